"""One of two training processes that share an engine: `shared_ranks.py FOLDER KINDS SETTINGS`, with torchrun's
environment.

Writes FOLDER/KIND-N.json for each kind: the rollouts sampled before and after the weights changed, and the results of
the probe. test_shared_vllm.py and ../gpu/test_tensor_parallel_gpu.py provide the model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.batch import Prompt, Rollout
from posttrain.errors import EngineError
from posttrain.models import adapters
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import EngineSection
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Lora
from posttrain.rollout import warm_process
from posttrain.rollout.make_engine import make_engine
from posttrain.run import ranks
from posttrain.train import distributed
from posttrain.train.ranks import ranks_of_run

WINDOW = 240
TEXTS = ("458+367=?", "12+5=?", "7+8=?", "999+111=?", "hello world", "40+2=?")
SAMPLED = Sampling(temperature=0.7, max_new_tokens=24)
SYNCS = 2


def load(folder: Path, kind: str) -> LoadedModel:
    """Load the model of `folder`, on the GPU if there is one; with an adapter for `lora` and `merged`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    gpu = torch.cuda.is_available()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if gpu else torch.float32)
    model.to("cuda" if gpu else "cpu")
    if kind in ("lora", "merged"):
        model = adapters.add(model, Lora(rank=4), seed=0)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return LoadedModel(model.eval(), tokenizer, (eos,), eos if pad is None else pad, "test")


def disturb(model: Any, scale: float = 0.05) -> None:
    """Change every trained weight, identically on all ranks."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_((torch.randn(p.shape, generator=generator) * scale).to(p))


def prompts_of(loaded: LoadedModel) -> list[Prompt]:
    ids = [tuple(loaded.tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS]
    return [Prompt(uid=f"p{n}", row={}, text=text, ids=ids[n]) for n, text in enumerate(TEXTS)]


def section_of(kind: str, **vllm: Any) -> EngineSection:
    settings = {"enforce_eager": True, "merge_adapter": kind == "merged", **vllm}
    return EngineSection.model_validate({"engine": "vllm", "vllm": settings})


def sample_across_syncs(engine: Any, loaded: LoadedModel, share: Sequence[int]) -> dict[str, Any]:
    """Sample, change the weights, sync and sample again; return the rollouts by version and the probe's gaps."""
    prompts, found = prompts_of(loaded), dict[str, Any](gaps=[engine.gap], stale=[], rollouts=[], memory=[], sync_s=[])
    for version in range(SYNCS + 1):
        rollouts = engine.generate(prompts, 3, SAMPLED, seed=version, share=share)
        found["rollouts"] += [[r.group, version, list(r.ids), list(r.logps or ())] for r in rollouts]
        if version < SYNCS:
            disturb(loaded.model)
            found["stale"].append(engine.probe(loaded.model))
            began = time.monotonic()
            engine.sync(loaded.model, version + 1)
            found["sync_s"].append(time.monotonic() - began)
            found["gaps"].append(engine.gap)
            found["memory"].append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    return found


def sample_across_a_pause(engine: Any, loaded: LoadedModel, share: Sequence[int]) -> list[list[int]]:
    """Return the versions of the tokens of long completions during which the weights change."""
    found: list[Rollout] = []
    long = Sampling(temperature=1.0, max_new_tokens=200)
    prompts = prompts_of(loaded)
    drawing = threading.Thread(target=lambda: found.extend(engine.generate(prompts, 2, long, seed=1, share=share)))
    drawing.start()
    time.sleep(0.3)
    engine.sync(loaded.model, engine.version + 1)
    drawing.join(60)
    return [list(r.versions or (r.version,) * len(r.ids)) for r in found]


def kill_worker(engine: Any, loaded: LoadedModel, number: int) -> dict[str, Any]:
    """Sample on both ranks while rank 0 kills the second worker; return the error and the seconds until it came."""
    if number == 0:
        worker = engine.clients[0].hub.client.worker_pidfds[1]
        threading.Timer(1.0, signal.pidfd_send_signal, (worker, signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        for seed in range(1000):
            engine.generate(prompts_of(loaded), 2, Sampling(max_new_tokens=200), seed=seed)
    except EngineError as error:
        return {"error": str(error), "took_s": time.monotonic() - began}
    raise AssertionError("a worker was killed, and nobody noticed")


def free_memory() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def run(folder: Path, kind: str, settings: dict[str, Any], *, last: bool) -> dict[str, Any]:
    """Start an engine, use it and close it. Unless it is the last, the next engine's process imports vLLM meanwhile."""
    loaded = load(folder / "model", kind)
    number, share = distributed.rank(), range(distributed.rank(), len(TEXTS), 2)
    distributed.barrier()
    before, began = free_memory(), time.monotonic()
    engine: Any = make_engine(
        section_of(kind, tensor_parallel=2, **settings),
        loaded,
        scratch=distributed.rank_path(folder / f"engine-{kind}"),
        max_len=WINDOW,
        training=ranks_of_run(divided=False),
    )
    started = time.monotonic() - began
    try:
        if ranks.is_main() and not last:
            warm_process.start(1)
        if kind == "killed":
            return kill_worker(engine, loaded, number)
        found = sample_across_syncs(engine, loaded, share)
        found["cut"], found["taken"] = sample_across_a_pause(engine, loaded, share), before - free_memory()
        if settings.get("sleep"):
            engine.sleep()
            found["asleep"] = before - free_memory()
            engine.sync(loaded.model, engine.version + 1)
        distributed.barrier()
    finally:
        began = time.monotonic()
        engine.close()
    torch.cuda.empty_cache()
    return {**found, "started_s": started, "closed_s": time.monotonic() - began, "left": before - free_memory()}


def main(folder: Path, kinds: list[str], settings: dict[str, Any]) -> None:
    ranks.claim_gpu()
    with distributed.join_process_group():
        if ranks.is_main():
            warm_process.start(1)
        for kind in kinds:
            found = run(folder, kind, settings, last=kind == kinds[-1])
            (folder / f"{kind}-{distributed.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    main(Path(sys.argv[1]), sys.argv[2].split(","), json.loads(sys.argv[3]))
