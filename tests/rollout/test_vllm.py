"""The vLLM engine for real, on the CPU build too (make test-vllm). One engine at a time: starting takes seconds."""

from __future__ import annotations

import contextlib
import importlib.util
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt, Rollout
from posttrain.errors import DataError, EngineError
from posttrain.models.load import LoadedModel
from posttrain.recipe.rollout_sections import EngineSection, Sampling, Vllm
from posttrain.rollout.engine import make_engine
from posttrain.rollout.hf import TransformersEngine, evaluating
from posttrain.rollout.pushed import requests_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SECTION = EngineSection(engine="vllm", vllm=Vllm(enforce_eager=True))
GREEDY = Sampling(temperature=0.0, max_new_tokens=16)
SAMPLED = Sampling(temperature=0.7, max_new_tokens=24)


@contextlib.contextmanager
def engine_of(loaded: LoadedModel, tmp_path: Path, **changes: Any) -> Iterator[Any]:
    section = SECTION.model_copy(update={"vllm": SECTION.vllm.model_copy(update=changes)})
    engine = make_engine(section, loaded, scratch=tmp_path, max_len=64)
    try:
        yield engine
    finally:
        engine.close()


def ids_of(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [r.ids for r in rollouts]


def largest_gap(model: Any, rollouts: list[Rollout], temperature: float) -> float:
    """Largest |engine - trainer| log-prob of a sampled token."""
    gaps = []
    for r in rollouts:
        ids = torch.tensor([r.prompt.ids + r.ids])
        with torch.no_grad(), evaluating(model):
            logp = (model(input_ids=ids).logits[0, :-1].float() / temperature).log_softmax(-1)
        start = len(r.prompt.ids) - 1
        expected = logp[start:].gather(-1, ids[0, start + 1 :, None]).squeeze(-1)
        gaps.append(float((torch.tensor(r.logps) - expected).abs().max()))
    return max(gaps)


def disturb(model: Any, scale: float) -> None:
    """Move every trained weight."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * scale)


def test_full_training(loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path) -> None:
    """Everything that needs no second start: sampling, log-probs, seeds, ends, sync, probe."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with engine_of(loaded, tmp_path) as engine:
        assert torch.equal(torch.get_rng_state(), state), "starting vLLM moved the global random state"
        torch.set_num_threads(threads)  # vLLM's CPU worker replaces it by a function that refuses
        assert not list(tmp_path.rglob("*.safetensors")), "weights went over the disk"

        check_sampling(engine, loaded, prompts)
        check_requests(engine, prompts)
        check_pauses(engine, loaded, prompts)
        check_ends(engine, loaded, prompts)
        check_sync(engine, loaded, prompts)
        with pytest.raises(DataError, match=r"row long .*window of 64"):
            engine.generate([Prompt("long", {}, "", tuple([10] * 60))], 1, GREEDY, seed=0)
        assert torch.equal(torch.get_rng_state(), state), "generating moved the global random state"
        worker = weakref.ref(engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker)
        assert worker() is not None
    assert worker() is None, "closing left vLLM's worker, which holds weights and cache, to a later collection"
    engine.close()  # twice is fine


def check_requests(engine: Any, prompts: list[Prompt]) -> None:
    """Each request is told as soon as it is finished, with what the call gives in the end; one may have a length of its
    own, and go on behind its end."""
    asked = requests_of(prompts, 2, SAMPLED, seed=3, logprobs=1, share=[1, 3])
    asked.append(replace(asked[0], number=5, n=1, max_new_tokens=7, ends=False))
    told: dict[int, Any] = {}
    found = engine.complete(asked, SAMPLED, seed=3, done=lambda place, samples: told.update({place: samples}))
    assert [len(samples) for samples in found] == [2, 2, 1] and len(found[2][0].ids) == 7
    assert told == dict(enumerate(found))


def check_pauses(engine: Any, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """Paused at its third step, with what was sampled kept, and gone on with: whole rollouts, told once each, whose
    log-probs are the trainer's in both parts. The next call is not disturbed."""
    step, steps, rounds, told = engine.llm.llm_engine.step, 0, 0, list[int]()
    complete = engine.core.complete

    def stepping() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            engine.core.pause()
        return step()

    def completing(*given: Any, **more: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return complete(*given, **more)

    expected = ids_of(engine.generate(prompts, 3, SAMPLED, seed=1))
    engine.llm.llm_engine.step, engine.core.complete = stepping, completing
    try:
        found = engine.generate(prompts, 3, SAMPLED, seed=1, done=lambda rows: told.append(rows[0].group))
    finally:
        engine.core.complete = complete
        vars(engine.llm.llm_engine).pop("step", None)
    assert rounds == 2 and sorted(told) == list(range(len(prompts)))
    kept = [
        next((at for at, (a, b) in enumerate(zip(r.ids, e, strict=False)) if a != b), 99)
        for r, e in zip(found, expected, strict=True)
    ]
    assert min(kept) >= 1 and min(kept) < 99, "what was sampled before the pause is not what goes on"
    assert all(len(r.ids) <= 24 and r.finish == ("stop" if r.ids[-1] in loaded.eos_ids else "length") for r in found)
    assert largest_gap(loaded.model, found, 0.7) < 1e-4
    assert ids_of(engine.generate(prompts, 3, SAMPLED, seed=1)) == expected


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
    """Every id of the EOS set ends a completion and stays in it; so does the token that completes a stop string."""
    free = engine.generate(prompts[:1], 1, GREEDY, seed=0)[0]
    other = TransformersEngine(loaded, batch_size=8)
    stop = loaded.tokenizer.decode(free.ids[3:5])
    sampling = Sampling(temperature=0.0, max_new_tokens=16, stop=[stop])
    stopped, expected = (e.generate(prompts[:1], 1, sampling, seed=0)[0] for e in (engine, other))
    assert (stopped.ids, stopped.finish) == (expected.ids, "stop")
    assert len(stopped.ids) < len(free.ids)

    engine.core.eos_ids.append(free.ids[5])
    ended = engine.generate(prompts[:1], 1, GREEDY, seed=0)[0]
    assert ended.finish == "stop"
    assert ended.ids == free.ids[: free.ids.index(free.ids[5]) + 1]
    engine.core.eos_ids.pop()


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

    push = engine.llm.collective_rpc
    engine.llm.collective_rpc = lambda *_args, **_kwargs: None  # a sync whose transfer is lost
    disturb(loaded.model, 0.05)
    with pytest.raises(EngineError, match="stale engine: after syncing version 2"):
        engine.sync(loaded.model, 2)
    assert engine.version == 1
    engine.llm.collective_rpc = push
    engine.sync(loaded.model, 2)


@pytest.mark.parametrize(("quantize", "merged"), [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_lora(quantize: bool, merged: bool, loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path) -> None:
    """Only the adapter travels, or with `merge_adapter` the sums; a 4-bit base is held dequantised."""
    from peft import LoraConfig, get_peft_model

    if quantize:
        quantise(loaded.model)
    adapter = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear")
    model = get_peft_model(loaded.model, adapter)
    lora = LoadedModel(model, loaded.tokenizer, loaded.eos_ids, loaded.pad_id, "test")
    base = {name: weight.detach().clone() for name, weight in model.get_base_model().state_dict().items()}
    with engine_of(lora, tmp_path, merge_adapter=merged) as engine:
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
        folder = engine.adapter_folder
        if merged:
            assert folder is None and not list(tmp_path.rglob("*.safetensors")), "weights went over the disk"
        else:
            assert sum(f.stat().st_size for f in folder.iterdir()) < 200_000
    assert merged or not folder.exists()
    after = model.get_base_model().state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in base.items() if "lora_" not in name)


def quantise(model: Any) -> None:
    """Replace the decoder's linear layers by 4-bit ones, as loading with nf4 does."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                layer = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32
                )
                layer.weight = bitsandbytes.nn.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                setattr(module, name, layer.to("cpu"))
