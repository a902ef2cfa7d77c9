"""posttrain's side of `rl_step.py`: the product's own loop from a recipe, with clocks around it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from clocks import metric_times, posttrain_steps, replaced
from rl_work import GROUP, HERE, LR, random_ids


def run_posttrain(spec: dict[str, Any], result: dict[str, Any], at_end: Callable[[], None] = lambda: None) -> None:
    """Run posttrain's own loop from a recipe; a step lasts from one line of metrics to the next.

    at_end: called after each step, when `result` has its figures. With `start_only` the run ends before its first step.
    """
    from posttrain.pipeline import count_engine_processes, run_stage
    from posttrain.recipe.load import load_dict
    from posttrain.rollout import warm_process

    loaded = load_dict(posttrain_recipe(spec), base_dir=HERE, where="benchmark")
    warm_process.start(count_engine_processes(loaded.recipe))  # before the training modules, as run_stage
    from posttrain.rollout import vllm_engine
    from posttrain.rollout.starting import StartingEngine
    from posttrain.run.directory import RunDirectory
    from posttrain.train import assemble, checkpoint, distributed, rl

    def open_it() -> RunDirectory:
        return RunDirectory.open(Path(spec["run"]), name="rl_step", text="", resolved=loaded.resolved)

    def figures(times: list[float]) -> None:
        if distributed.is_main():  # which writes the metrics that others would read too early
            result.update(steps_so_far(directory.path, times))
        at_end()

    def make(*args: Any, **kwargs: Any) -> Any:
        engine = made(*args, **kwargs)
        return engine if isinstance(engine, StartingEngine) else prepared(engine, spec, result)

    made, finished = assemble.make_engine, vllm_engine.colocated_engine
    with (
        distributed.open_directory(open_it) as directory,
        replaced(assemble, "make_engine", make),
        replaced(vllm_engine, "colocated_engine", lambda *a, **more: prepared(finished(*a, **more), spec, result)),
        replaced(checkpoint, "save", lambda *_, **__: None),  # 17 GB after the last step, outside the measurement
        replaced(rl, "save_model", lambda *_, **__: None),
        replaced(rl, "step", stopping(result) if spec.get("start_only") else rl.step),
        metric_times(figures),
        marks_of_the_start(result.setdefault("marks", {})),
        contextlib.suppress(Started),
    ):
        run_stage(loaded.recipe, directory)
    if not spec.get("start_only"):
        result["predicted_peak_gib"] = predicted_gib(loaded.recipe)


@contextlib.contextmanager
def marks_of_the_start(marks: dict[str, float]) -> Iterator[None]:
    """Context manager that stores in `marks` the times at which the phases before step 1 end."""
    from posttrain.run.progress import Progress
    from posttrain.train import assemble, rl, sharding

    marks["imports"] = time.perf_counter()
    ends: list[tuple[Any, str, str]] = [
        (rl, "audit_rewards", "data and rewards"),
        (sharding, "load", "model"),
        (assemble, "make_engine", "engine asked"),
        (rl, "check_start", "checks"),
        (rl, "probe_max_memory", "longest rows"),
        (Progress, "ready", "ready"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, label in ends:
            stack.enter_context(replaced(owner, name, marking(getattr(owner, name), marks, label)))
        yield


def marking(function: Callable[..., Any], marks: dict[str, float], label: str) -> Callable[..., Any]:
    """Return the function with a record of the time at which it returned."""

    def marked(*args: Any, **more: Any) -> Any:
        found = function(*args, **more)
        marks[label] = time.perf_counter()
        return found

    return marked


class Started(Exception):
    """Raised when the first step would start."""


def stopping(result: dict[str, Any]) -> Callable[..., Any]:
    """Replacement of a step that records its start and ends the run."""

    def stop(*_: Any) -> Any:
        result["began"] = time.perf_counter()
        raise Started

    return stop


def steps_so_far(folder: Path, times: Sequence[float]) -> dict[str, Any]:
    """Return figures by step of a run, from its metrics."""
    from posttrain.run.metrics import read_metrics

    rows = read_metrics(folder)
    keys = {key for row in rows for key in row if key.startswith("time/") and key.count("/") == 1}
    phases = sorted(keys - {"time/step"})  # minus the time of each reward within its phase
    memory = {key.removeprefix("memory/"): [row.get(key) for row in rows] for key in MEMORY if key in rows[0]}
    return posttrain_steps(rows, times) | {
        "phases": {PHASES.get(key, key[5:]): [row.get(key, 0.0) for row in rows] for key in phases},
        "reward": [row["reward"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
        "gap": [row.get("mismatch/mean") for row in rows],
        **({"torch_memory": memory} if memory else {}),
    }


def predicted_gib(recipe: Any) -> float:
    """Return the peak predicted by `posttrain plan` for a recipe on this machine."""
    from posttrain.train import plan

    return plan.plan(recipe)["peak_gib"]


MEMORY = ("memory/allocated_gib", "memory/reserved_gib")
PHASES = {"time/rollout": "generate"}


def posttrain_recipe(spec: dict[str, Any]) -> dict[str, Any]:
    settings = spec["posttrain"]
    rollout: dict[str, Any] = {
        "engine": "vllm" if spec["vllm"] else "transformers",
        "prompts_per_step": spec["prompts"],
        "group_size": GROUP,
        "max_new_tokens": spec["new"],
        "staleness": settings.get("staleness", 0),
    }
    if spec["vllm"]:
        rollout["vllm"] = {"gpu_memory": settings["share"], "sleep": settings["sleep"]}
        rollout["vllm"] |= {"engines": settings["engines"]} if "server" not in settings else {}
        rollout["vllm"] |= {"enforce_eager": True} if spec["smoke"] else {}
        rollout["vllm"] |= {"merge_adapter": spec["lora"] and settings["merge_adapter"]}
        rollout["vllm"] |= {"server": settings["server"]} if "server" in settings else {}
    return {
        "stage": "rl",
        "algorithm": "grpo",
        "model": {
            "path": spec["model"],
            "gradient_checkpointing": settings["checkpointing"],
            "compile": settings["compile"],
            "dtype": "auto" if spec["smoke"] else settings["dtype"],
            **({"lora": {}} if spec["lora"] else {}),
            **({"vision": "all"} if spec["picture"] else {}),
        },
        "data": {"source": spec["rows"], "shuffle": False},
        "rollout": rollout,
        "rewards": [{"use": "even.py:even_share"}],
        "corrections": [] if spec["correction"] == "none" else [{"use": spec["correction"]}],
        "batch": {"micro_tokens": settings["micro_tokens"]},
        "optim": {"lr": LR},
        "run": {"steps": spec["steps"]},
    }


def prepared(engine: Any, spec: dict[str, Any], result: dict[str, Any]) -> Any:
    """Return the engine with the lengths of works B, L and V, and a measurement of generation alone before it
    closes."""
    if getattr(engine, "is_prepared", False):
        return engine
    engine.is_prepared = True
    if not spec["smoke"] and spec["alone"]:
        measure_alone(engine, spec, result)
    if spec["lengths"]:
        give_lengths(engine, spec)
    return engine


def measure_alone(engine: Any, spec: dict[str, Any], result: dict[str, Any]) -> None:
    """When the engine closes, repeat its last requests `alone` times."""
    close, complete, last = engine.close, engine.complete, list[Any]()
    version = None  # that the last requests were made to

    def measure_and_close() -> None:
        if last:
            asked, last[:] = list(last), []  # closing twice is fine
            for _ in range(spec["alone"]):
                engine.sync(engine.loaded.model, engine.version)  # it may sleep without weights; caches are empty then
                result.setdefault("generate_alone_s", []).append(generation_alone(complete, asked))
        close()

    async def remembering(request: Any, sampling: Any) -> Any:
        nonlocal version
        if engine.version != version:
            version, last[:] = engine.version, []
        last.append((request, sampling))
        return await complete(request, sampling)

    engine.complete, engine.close = remembering, measure_and_close


def generation_alone(complete: Callable[..., Any], asked: Sequence[Any]) -> float:
    """Return the seconds of these requests without log-probs."""
    from posttrain.rollout import loop

    plain = [complete(dataclasses.replace(request, logprobs=False), sampling) for request, sampling in asked]
    started = time.perf_counter()
    loop.run_all(plain)
    return time.perf_counter() - started


def give_lengths(engine: Any, spec: dict[str, Any]) -> None:
    """From now on give every rollout its own number of tokens: one request per rollout, EOS ignored.

    The calls of `generate_batch` are those of the steps, in order.
    """
    steps = iter(spec["lengths"])
    if not hasattr(engine, "complete"):  # the transformers engine of a smoke test: stand-ins for its tokens
        engine.generate_batch = random_rollouts(engine, steps)
        return
    generate_batch, complete, of_step = engine.generate_batch, engine.complete, list[int]()

    def by_step(batch: Any) -> Any:
        of_step[:] = next(steps)
        return generate_batch(batch)

    async def by_row(request: Any, sampling: Any) -> Any:
        lengths = of_step[request.number * GROUP :][: request.n]
        rows = [
            dataclasses.replace(request, n=1, seed=request.seed + i, ends=False, max_new_tokens=length)
            for i, length in enumerate(lengths)
        ]
        return [sample for (sample,) in await asyncio.gather(*(complete(row, sampling) for row in rows))]

    engine.generate_batch, engine.complete = by_step, by_row


def random_rollouts(engine: Any, steps: Any) -> Callable[..., Any]:
    """Return an `Engine.generate_batch` that returns random ids of the lengths of each step, independent of how prompts
    are shared."""
    from posttrain.rollout.engine import Completion

    def generate_batch(batch: Any) -> Any:
        every = random_ids(next(steps))
        ours = [every[number * batch.n + i] for number in batch.share for i in range(batch.n)]
        sampled = [Completion(tuple(ids), (-1.0,) * len(ids), "length") for ids in ours]
        return batch.rollouts(sampled, engine.loaded.tokenizer, engine.version)

    return generate_batch
