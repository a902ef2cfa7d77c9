"""A real vLLM engine, also with the CPU build (make test-vllm). One engine at a time, because starting takes
seconds."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime import cache_dir_utils

from posttrain.batch import Prompt, Rollout
from posttrain.errors import DataError, EngineError
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import EngineSection, Vllm
from posttrain.recipe.rollout_sections import Rollout as RolloutSection
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop, vllm_start
from posttrain.rollout.engine import GenerationBatch
from posttrain.rollout.hf import TransformersEngine, eval_mode
from posttrain.rollout.make_engine import make_engine
from posttrain.rollout.requests import requests_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WINDOW = 240
SECTION = EngineSection(engine="vllm", vllm=Vllm(enforce_eager=True))
GREEDY = Sampling(temperature=0.0, max_new_tokens=16)
SAMPLED = Sampling(temperature=0.7, max_new_tokens=24)


@contextlib.contextmanager
def engine_of(loaded: LoadedModel, tmp_path: Path, **changes: Any) -> Iterator[Any]:
    section = SECTION.model_copy(update={"vllm": SECTION.vllm.model_copy(update=changes)})
    tmp_path.mkdir(exist_ok=True)
    engine = make_engine(section, loaded, scratch=tmp_path, max_len=WINDOW)
    try:
        yield engine
    finally:
        engine.close()


def ids_of(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [r.ids for r in rollouts]


def largest_gap(model: Any, rollouts: list[Rollout], temperature: float) -> float:
    """Return the largest |engine - trainer| log-prob difference of a sampled token."""
    return max(
        abs(a - b) for r in rollouts for a, b in zip(r.logps, trainer_logps_of(model, r, temperature), strict=True)
    )


def trainer_logps_of(model: Any, r: Rollout, temperature: float) -> list[float]:
    ids = torch.tensor([r.prompt.ids + r.ids])
    with torch.no_grad(), eval_mode(model):
        logp = (model(input_ids=ids).logits[0, :-1].float() / temperature).log_softmax(-1)
    start = len(r.prompt.ids) - 1
    return logp[start:].gather(-1, ids[0, start + 1 :, None]).squeeze(-1).tolist()


def disturb(model: Any, scale: float) -> None:
    """Change every trained weight."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * scale)


def test_engine_with_full_weights(loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path) -> None:
    """All checks that need no second start: sampling, log-probs, seeds, ends, sync, probe, pauses, a killed engine."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with engine_of(loaded, tmp_path) as engine:
        assert torch.equal(torch.get_rng_state(), state), "starting vLLM moved the global random state"
        assert torch.get_num_threads() == threads
        torch.set_num_threads(threads)  # vLLM's CPU worker replaces it by a function that refuses, in its process
        assert not list(tmp_path.rglob("*.safetensors")), "weights went over the disk"

        check_sampling(engine, loaded, prompts)
        os.kill(engine.clients[0].processes[0].pid, signal.SIGTERM)  # a job scheduler's variable, meant for the trainer
        check_requests(engine, prompts)
        check_ends(engine, loaded, prompts)
        check_sync(engine, loaded, prompts)
        check_pauses(engine, loaded, prompts)
        with pytest.raises(DataError, match=r"row long .*window of 240"):
            engine.generate([Prompt("long", {}, "", tuple([10] * 236))], 1, GREEDY, seed=0)
        assert torch.equal(torch.get_rng_state(), state), "generating moved the global random state"
        check_death(engine, prompts)
    engine.close()  # twice is fine


def test_two_engines_beside_the_trainer(loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path) -> None:
    """They share the requests, both get new weights, and both end."""
    disturb(loaded.model, 0.05)
    with engine_of(loaded, tmp_path, engines=2) as engine:
        processes = [client.processes[0] for client in engine.clients]
        assert len({process.pid for process in processes}) == 2
        for version in (1, 2):
            rollouts = engine.generate(prompts, 2, SAMPLED, seed=version)
            assert largest_gap(loaded.model, rollouts, SAMPLED.temperature) < 1e-3
            disturb(loaded.model, 0.05)
            engine.sync(loaded.model, version)
        assert [client.asked for client in engine.clients] == [0, 0]
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


def check_requests(engine: Any, prompts: list[Prompt]) -> None:
    """Check that requests run concurrently with other requests; one may have its own length limit and continue beyond
    its end token. Cancelling one does not affect the others."""
    asked = requests_of(GenerationBatch(prompts, 2, SAMPLED, 3, [1, 3], logprobs=1))
    asked.append(replace(asked[0], number=5, n=1, max_new_tokens=7, ends=False))
    alone = [loop.run(engine.complete(request, SAMPLED)) for request in asked]
    given_up = loop.submit(engine.complete(replace(asked[0], n=8, ends=False, max_new_tokens=50), SAMPLED))
    found = loop.run_all([engine.complete(request, SAMPLED) for request in asked[:2]])
    given_up.cancel()
    found.append(loop.run(engine.complete(asked[2], SAMPLED)))
    assert [[c.ids for c in samples] for samples in found] == [[c.ids for c in samples] for samples in alone]
    assert [len(samples) for samples in found] == [2, 2, 1] and len(found[2][0].ids) == 7
    assert [c.logps is None for c in (found[0][0], found[1][0])] == [True, True], "the first prompt is none of them"
    waited = time.monotonic()
    while engine.clients[0].asked and time.monotonic() - waited < 10:
        time.sleep(0.01)
    assert engine.clients[0].asked == 0


def check_pauses(engine: Any, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """Check a sync during generation: sampled tokens are kept, the remaining tokens are sampled with the new weights,
    and every token has the log-prob of the weights that sampled it. The next call is unaffected."""
    for _ in range(5):  # on a busy machine vLLM may finish before its first token is reported
        old, before = copy.deepcopy(loaded.model), engine.version
        found = sample_across_a_sync(engine, loaded, prompts)
        if any(r.versions for r in found):
            break
    assert {v for r in found for v in r.versions or (r.version,)} == {before, before + 1}
    assert all(len(r.ids) <= 200 and r.finish == ("stop" if r.ids[-1] in loaded.eos_ids else "length") for r in found)
    for r in found:
        versions = r.versions or (r.version,) * len(r.ids)
        by_version = {
            before: trainer_logps_of(old, r, 0.7),
            before + 1: trainer_logps_of(loaded.model, r, 0.7),
        }
        theirs = [by_version[version][at] for at, version in enumerate(versions)]
        assert max(abs(a - b) for a, b in zip(r.logps, theirs, strict=True)) < 1e-4
    again = engine.generate(prompts, 3, SAMPLED, seed=1)
    assert {r.version for r in again} == {before + 1} and largest_gap(loaded.model, again, 0.7) < 1e-4


def sample_across_a_sync(engine: Any, loaded: LoadedModel, prompts: list[Prompt]) -> list[Rollout]:
    """Pause many rollouts at their first tokens, as a sync does, then sync."""
    client = engine.clients[0]
    long = RolloutSection(engine="vllm", staleness=1, partial=True, temperature=0.7, max_new_tokens=200)
    many = [replace(p, uid=f"{p.uid}-{i}") for i in range(8) for p in prompts]
    states = client.llm.output_processor.request_states
    found: list[Rollout] = []
    told: list[int] = []

    async def pause_early() -> None:
        while len(told) < len(many) and not any(s.detokenizer.num_output_tokens() > 1 for s in states.values()):
            await asyncio.sleep(0)
        engine.open.clear()
        await client.pause()

    paused = loop.submit(pause_early())
    drawing = threading.Thread(
        target=lambda: found.extend(
            engine.generate(many, 3, long, seed=1, done=lambda rows: told.append(rows[0].group))
        )
    )
    drawing.start()
    paused.result(240)
    disturb(loaded.model, 0.02)
    engine.sync(loaded.model, engine.version + 1)
    drawing.join(240)
    assert sorted(told) == list(range(len(many))), "whole groups, told once each"
    return found


def check_death(engine: Any, prompts: list[Prompt]) -> None:
    """Kill the engine (kill -9) during requests; check that waiting and later requests raise one sentence that names
    it."""
    process = engine.clients[0].processes[0]
    failures: list[BaseException] = []

    def draw() -> None:
        try:
            engine.generate(prompts, 8, SAMPLED.model_copy(update={"max_new_tokens": 200}), seed=1)
        except BaseException as error:
            failures.append(error)

    drawing = threading.Thread(target=draw)
    drawing.start()
    while not engine.clients[0].asked:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    drawing.join(30)
    [failure] = failures
    assert isinstance(failure, EngineError) and "vLLM was killed by SIGKILL" in str(failure)
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        engine.generate(prompts, 1, GREEDY, seed=0)
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        engine.sync(engine.loaded.model, 9)


def check_sampling(engine: Any, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    first = engine.generate(prompts, 3, SAMPLED, seed=1, first_group=5)
    assert [r.prompt.uid for r in first] == [p.uid for p in prompts for _ in range(3)]
    assert [r.group for r in first] == [5 + i for i in range(len(prompts)) for _ in range(3)]
    assert largest_gap(loaded.model, first, 0.7) < 1e-4
    assert ids_of(engine.generate(prompts, 3, SAMPLED, seed=1)) == ids_of(first)
    assert ids_of(engine.generate(prompts, 3, SAMPLED, seed=2)) != ids_of(first)
    assert len(set(ids_of(first))) == len(first), "samples of a prompt are equal"

    greedy = engine.generate(prompts, 2, GREEDY, seed=0)
    assert ids_of(greedy) == ids_of(TransformersEngine(loaded, batch_size=8).generate(prompts, 2, GREEDY, seed=0))
    assert largest_gap(loaded.model, greedy, 1.0) < 1e-4

    cut = engine.generate(prompts, 1, Sampling(top_p=0.5, max_new_tokens=4), seed=0)
    assert all(r.segments[0].logps is None for r in cut), "renormalised log-probs passed off as the policy's"
    assert engine.generate(prompts, 1, GREEDY, seed=0, logprobs=False)[0].segments[0].logps is None
    some = engine.generate(prompts, 2, SAMPLED, seed=0, logprobs=1)
    assert [r.segments[0].logps is None for r in some] == [i >= 2 for i in range(len(some))]


def check_ends(engine: Any, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """Check that every EOS id ends a completion and is included, as is the token that completes a stop string."""
    free = engine.generate(prompts[:1], 1, GREEDY, seed=0)[0]
    other = TransformersEngine(loaded, batch_size=8)
    stop = loaded.tokenizer.decode(free.ids[3:5])
    sampling = Sampling(temperature=0.0, max_new_tokens=16, stop=[stop])
    stopped, expected = (e.generate(prompts[:1], 1, sampling, seed=0)[0] for e in (engine, other))
    assert (stopped.ids, stopped.finish) == (expected.ids, "stop")
    assert len(stopped.ids) < len(free.ids)

    client, spec = engine.clients[0], engine.spec
    client.spec = replace(spec, eos_ids=(*spec.eos_ids, free.ids[5]))
    ended = engine.generate(prompts[:1], 1, GREEDY, seed=0)[0]
    assert ended.finish == "stop"
    assert ended.ids == free.ids[: free.ids.index(free.ids[5]) + 1]
    client.spec = spec


def check_sync(engine: Any, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    assert engine.probe(loaded.model) < 1e-4
    before = ids_of(engine.generate(prompts, 1, GREEDY, seed=0))
    disturb(loaded.model, 0.05)
    assert engine.probe(loaded.model) > 0.05, "a skipped sync goes unseen"
    assert ids_of(engine.generate(prompts, 1, GREEDY, seed=0)) == before
    engine.sync(loaded.model, 1)
    assert engine.probe(loaded.model) < 1e-4
    after = engine.generate(prompts, 1, GREEDY, seed=0)
    assert ids_of(after) != before and {r.version for r in after} == {1}
    assert largest_gap(loaded.model, after, 1.0) < 1e-4

    sender, engine.sender = engine.sender, types.SimpleNamespace(send=list)  # a sync whose transfer fails
    disturb(loaded.model, 0.05)
    with pytest.raises(EngineError, match="stale engine: after syncing version 2"):
        engine.sync(loaded.model, 2)
    assert engine.version == 1
    engine.sender = sender
    engine.sync(loaded.model, 2)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new folder for temporary files, also of child processes. Its path is short enough for socket files. torch's
    compile cache stays where it is."""
    compiled = Path(cache_dir_utils.default_cache_dir())
    compiled.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, compiled.name).symlink_to(compiled)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_two_engines_with_adapters_in_one_process(
    loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path, temporary: Path
) -> None:
    """Two concurrent engines, started one after another in one process: one gets only the adapter, one the merged
    weights. Both hold the 4-bit base dequantized. Closed engines leave no temporary file."""
    from peft import LoraConfig, get_peft_model

    quantize(loaded.model)
    adapter = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear")
    model = get_peft_model(loaded.model, adapter)
    lora = LoadedModel(model, loaded.tokenizer, loaded.eos_ids, loaded.pad_id, "test")
    base = {name: weight.detach().clone() for name, weight in model.get_base_model().state_dict().items()}
    with contextlib.ExitStack() as stack:
        engines = {
            merged: stack.enter_context(engine_of(lora, tmp_path / str(merged), merge_adapter=merged))
            for merged in (False, True)
        }
        for merged, engine in engines.items():
            start = ids_of(engine.generate(prompts, 1, GREEDY, seed=0))
            for version in (1, 2, 3):
                disturb(model, 0.1)
                assert engine.probe(model) > 0.05, "a skipped sync goes unseen"
                engine.sync(model, version)
                assert engine.probe(model) < 1e-3
            rollouts = engine.generate(prompts, 2, SAMPLED, seed=0)
            assert {r.version for r in rollouts} == {3}
            assert largest_gap(model, rollouts, 0.7) < 5e-3
            assert ids_of(engine.generate(prompts, 1, GREEDY, seed=0)) != start
            assert not list(tmp_path.rglob("*.safetensors")), f"weights are left on the disk, {merged=}"
        assert any(path.is_socket() for path in temporary.rglob("*")), "vLLM puts its files elsewhere"
        assert not list(temporary.glob("vllm_dist_*")), "the kernel removes nothing of an engine that is killed"
    assert all(path.is_symlink() for path in temporary.iterdir())
    after = model.get_base_model().state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in base.items() if "lora_" not in name)


START_AND_WAIT = """
import sys, time
from pathlib import Path
import posttrain

def main():
    from tests.rollout.conftest import small_model
    from posttrain.models import tiny
    from posttrain.models.load import LoadedModel
    from posttrain.recipe.engine_sections import Vllm
    from posttrain.rollout.vllm_engine import make_colocated
    tokenizer = tiny.build_tokenizer()
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    loaded = LoadedModel(small_model(tokenizer), tokenizer, (eos,), pad, "test")
    engine = make_colocated(Vllm(enforce_eager=True), loaded, scratch=Path(sys.argv[1]), max_len=64)
    print(engine.clients[0].processes[0].pid, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("when", ["starting", "started"])
def test_killed_trainer_leaves_no_process(when: str, tmp_path: Path) -> None:
    """Also before vLLM is imported: its engine core would wait five minutes for an answer to its handshake."""
    script = tmp_path / "start.py"
    script.write_text(START_AND_WAIT)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        started = [int(trainer.stdout.readline())] if when == "started" else []
        while not started:
            time.sleep(0.05)
            started = children(trainer.pid, "spawn_main")
        assert all(command_of(pid) for pid in started)
        trainer.kill()
    began = time.monotonic()
    while any(command_of(pid) for pid in started):
        assert time.monotonic() - began < 20, "the engine's process lives on"
        time.sleep(0.05)


def children(parent: int, word: str) -> list[int]:
    """Return child processes whose command contains `word`."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if word in command_of(pid) and parent_of(pid) == parent]


def command_of(pid: int) -> str:
    """Return the command of a process, "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def quantize(model: Any) -> None:
    """Replace the decoder's linear layers by 4-bit layers, as loading with nf4 does."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                layer = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32
                )
                layer.weight = bitsandbytes.nn.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                setattr(module, name, layer.to("cpu"))


def test_preempted_requests_return_all_of_their_tokens(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of 9 blocks holds one of 12 completions, so vLLM preempts the others and continues them later. They equal
    those of a cache with room for all."""
    prompts = [Prompt(str(n), {}, "", (5 + n, 6, 7, 8)) for n in range(6)]
    found = {}
    for blocks in (400, 9):
        plain = vllm_start.arguments

        def arguments(*given: Any, plain: Any = plain, blocks: int = blocks) -> dict[str, Any]:
            return {**plain(*given), "num_gpu_blocks_override": blocks, "block_size": 32}

        with monkeypatch.context() as patched:
            patched.setattr(vllm_start, "arguments", arguments)
            with engine_of(loaded, tmp_path / str(blocks)) as engine:
                found[blocks] = engine.generate(prompts, 2, Sampling(max_new_tokens=200), seed=3)
    assert ids_of(found[9]) == ids_of(found[400])
    assert all(len(r.ids) == 200 for r in found[9] if r.finish == "length")
    assert [len(r.logps) for r in found[9]] == [len(r.ids) for r in found[9]]
