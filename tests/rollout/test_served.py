"""A real `vllm serve`, also with the CPU build (make test-vllm). A start is slow, so one server serves many checks."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt, Rollout
from posttrain.errors import EngineError
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import EngineSection
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.make_engine import make_engine
from posttrain.rollout.requests import Request
from posttrain.rollout.server_client import ServerClient

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WINDOW = 240
SAMPLED = Sampling(temperature=0.7, max_new_tokens=24)
LONG = Sampling(max_new_tokens=220)


def engine_of(loaded: LoadedModel, folder: Path, **vllm: Any) -> Any:
    section = EngineSection.model_validate({"engine": "vllm", "vllm": {"enforce_eager": True, **vllm}})
    return make_engine(section, loaded, scratch=folder, max_len=WINDOW)


def disturb(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * 0.05)


def logps_of(model: Any, r: Rollout, temperature: float) -> list[float]:
    row = torch.tensor([r.prompt.ids + r.ids])
    with torch.no_grad():
        logp = (model(input_ids=row).logits[0, :-1].float() / temperature).log_softmax(-1)
    return logp[len(r.prompt.ids) - 1 :].gather(-1, row[0, len(r.prompt.ids) :, None]).squeeze(-1).tolist()


def test_server(loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path) -> None:
    """All checks that need no second start. The last check kills the server."""
    engine = engine_of(loaded, tmp_path, server={"devices": [1]})
    try:
        client: ServerClient = engine.clients[0]
        assert (
            engine.generates_during_updates and client.is_here and client.about["logprobs_mode"] == "processed_logprobs"
        )
        assert not list(tmp_path.rglob("*.safetensors")), "weights went over the disk"
        check_draws(engine, loaded, prompts, tmp_path)
        check_access(client)
        check_a_sync_in_the_middle(engine, loaded, prompts)
        check_a_kill(engine, client, prompts)
    finally:
        engine.close()
    assert client.process is not None and client.process.uds is not None and not client.process.uds.parent.exists()


def check_draws(engine: Any, loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path) -> None:
    """Check that equal seeds give the samples of an engine beside the trainer and that log-probs match the
    trainer's."""
    disturb(loaded.model, 1)
    assert engine.probe(loaded.model) > 0.01, "a skipped sync goes unseen"
    engine.sync(loaded.model, 1)
    assert engine.gap < 1e-5
    stops = Sampling(max_new_tokens=60, stop=["5", "8"])
    found = engine.generate(prompts, 3, SAMPLED, seed=5, logprobs=2)
    stopped = engine.generate(prompts, 2, stops, seed=6)
    beside = engine_of(loaded, tmp_path / "beside")
    try:
        expected = beside.generate(prompts, 3, SAMPLED, seed=5, logprobs=2)
        assert [(r.ids, r.finish) for r in found] == [(r.ids, r.finish) for r in expected]
        again = beside.generate(prompts, 2, stops, seed=6)
        assert [(r.ids, r.finish) for r in stopped] == [(r.ids, r.finish) for r in again]
    finally:
        beside.close()
    assert [r.segments[0].logps is None for r in found] == [False] * 6 + [True] * 12
    assert {r.finish for r in found} == {"stop", "length"}, "ends are not tried"
    assert any(r.text[-1:] in ("5", "8") for r in stopped if r.finish == "stop"), "no stop string was met"
    for r in found[:6]:
        assert max(abs(a - b) for a, b in zip(r.logps, logps_of(loaded.model, r, 0.7), strict=True)) < 1e-4


def check_access(client: ServerClient) -> None:
    """Check that requests without the key, from a second run, or to endpoints that no run needs are refused."""
    for key, told in (("guessed", "asks for its key"), (client.key, r"works for another run \(.*process \d+")):
        other = ServerClient("", key, timeout_s=30, eos_ids=(), process=client.process)
        other._http = None
        with pytest.raises(EngineError, match=told):
            loop.run(other.open({"max_model_len": 8, "model": {}}))
        loop.run(other._disconnect(other._http))
    for path in ("/collective_rpc", "/server_info", "/sleep", "/v1/completions"):
        with pytest.raises(EngineError, match="status 404: nothing is served"):
            loop.run(client._ask("POST", path, {}))
    bad = Request(0, (10**6,), 1, 0, 4, True)
    with pytest.raises(EngineError, match=r"status 400: .*vocabulary"):
        loop.run(client.complete(bad, SAMPLED))


def check_a_sync_in_the_middle(engine: Any, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """Check that requests interrupted by a sync continue with the new weights, and that each token has its version and
    log-prob."""
    endless = [Request(i, prompt.ids, 4, 7 + i, 200, True, ends=False) for i, prompt in enumerate(prompts)]
    for wait_s in (
        0.3,
        0.1,
        0.05,
        0.02,
        0.0,
        0.2,
        0.6,
        1.2,
        2.4,
    ):  # the sync may come before requests start or after they end
        old = engine.version
        running = [loop.submit(engine.complete(request, LONG)) for request in endless]
        time.sleep(wait_s)
        disturb(loaded.model, old + 1)
        engine.sync(loaded.model, old + 1)
        samples = [sample for future in running for sample in future.result(120)]
        assert all(len(c.ids) == 200 and c.finish == "length" for c in samples)
        if any(len(set(c.versions)) == 2 for c in samples):
            break
    assert any(set(c.versions) == {old, old + 1} for c in samples), "no request was cut short"
    prompt_of = [prompt for prompt in prompts for _ in range(4)]
    cut = [(prompt, c) for prompt, c in zip(prompt_of, samples, strict=True) if old + 1 in c.versions]
    for prompt, c in cut[::5]:  # others had ended before the sync
        first = c.versions.count(old)
        assert c.versions == (old,) * first + (old + 1,) * (200 - first)
        row = torch.tensor([prompt.ids + c.ids])
        with torch.no_grad():
            logp = loaded.model(input_ids=row).logits[0, :-1].float().log_softmax(-1)
        mine = logp[len(prompt.ids) - 1 :].gather(-1, row[0, len(prompt.ids) :, None]).squeeze(-1).tolist()
        assert max(abs(a - b) for a, b in zip(c.logps[first:], mine[first:], strict=True)) < 1e-4


def check_a_kill(engine: Any, client: ServerClient, prompts: list[Prompt]) -> None:
    """Kill the server (kill -9) during a request; check that the run gets an error immediately and that no vLLM process
    remains."""
    assert client.process is not None
    pid = client.process.process.pid
    group = processes_in_group(pid)
    assert len(group) >= 2, "vLLM's engine core is no process of its own"
    raised: list[BaseException] = []

    def generate() -> None:
        try:
            engine.generate(prompts, 8, LONG, seed=1)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    thread.join(30)
    assert not thread.is_alive() and isinstance(raised[0], EngineError)
    assert "vLLM on the CPU was killed by SIGKILL" in str(raised[0]) and "--resume" in str(raised[0])
    with pytest.raises(EngineError, match="SIGKILL"):
        engine.sync(engine.loaded.model, 3)
    engine.close()
    assert not processes_in_group(pid)


def processes_in_group(group: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


TRAINER = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import conftest, os, signal
from peft import LoraConfig, get_peft_model
from posttrain.models import tiny
from posttrain.models.load import LoadedModel
from posttrain.batch import Prompt
import test_served

tokenizer = tiny.build_tokenizer()
model = get_peft_model(conftest.small_model(tokenizer), LoraConfig(r=4, target_modules="all-linear")).eval()
loaded = LoadedModel(model, tokenizer, (tokenizer.eos_token_id,), tokenizer.pad_token_id, "test")
if __name__ == "__main__":
    engine = test_served.engine_of(loaded, Path({scratch!r}), server={{"devices": [1]}})
    test_served.disturb(model, 1)
    assert engine.probe(model) > 0.01, "a skipped sync goes unseen"
    engine.sync(model, 1)
    prompts = [Prompt("p", {{}}, "12+5=?", tuple(tokenizer.encode("12+5=?", add_special_tokens=False)))]
    (found,) = engine.generate(prompts, 1, test_served.SAMPLED, seed=3)
    worst = max(abs(a - b) for a, b in zip(found.logps, test_served.logps_of(model, found, 0.7), strict=True))
    print(engine.gap, worst, engine.clients[0].process.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_trainer_leaves_no_process(tmp_path: Path) -> None:
    """The trainer trains an adapter; its server has loaded two."""
    program = tmp_path / "trainer.py"
    program.write_text(TRAINER.format(folder=str(Path(__file__).parent), scratch=str(tmp_path / "engine")))
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200)
    assert run.returncode == -signal.SIGKILL, run.stderr[-3000:]
    gap, worst, pid = run.stdout.split()
    assert float(gap) < 1e-5 and float(worst) < 1e-4
    deadline = time.monotonic() + 20
    while processes_in_group(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_in_group(int(pid))
