"""Checks that the packages which a recipe needs are installed, run before a run directory is made.

Validating a recipe does not need the packages: the recipe may be run on another machine.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from posttrain.errors import MissingExtra, Problem, UserError
from posttrain.path_resolution import PLAIN_FILES

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded

ENGINES = ("rollout", "engine")
Need = tuple[str, str, str, str]  # package, reason, extra that installs it, recipe key


def any_need(_: Need) -> bool:
    """Accept every need: what a run requires."""
    return True


def is_for_rows(need: Need) -> bool:
    """Return whether reading the data requires the package."""
    return need[3].startswith("data")


def is_for_tokens(need: Need) -> bool:
    """Return whether showing the data as tokens requires the package."""
    return is_for_rows(need) or need[0] in ("torch", "transformers", "gguf")


def require(loaded: Loaded, wanted: Callable[[Need], bool] = any_need) -> None:
    """Raise UserError listing every missing package, each with the recipe line that needs it."""
    if problems := find_missing_packages(loaded, wanted):
        raise UserError.of(problems)


def find_missing_packages(loaded: Loaded, wanted: Callable[[Need], bool] = any_need) -> list[Problem]:
    """Return a problem for each package that is needed and not installed, each package once."""
    stages = loaded.resolved.get("stages") or [loaded.resolved]
    prefixes = [f"stages.{n}." for n in range(len(stages))] if "stages" in loaded.resolved else [""]
    missing: dict[str, Problem] = {}
    for prefix, values in zip(prefixes, stages, strict=True):
        for package, why, extra, key in filter(wanted, list_needs(values)):
            if package not in missing and importlib.util.find_spec(package) is None:
                origin = loaded.origins.get(f"{prefix}{key}")
                where = origin.mark if origin and origin.kind != "default" else ""
                problem = MissingExtra(package.replace("_", "-"), why, extra).problems[0]
                if key.startswith("track."):
                    problem = dataclasses.replace(
                        problem, hint=f"{problem.hint}, or run without trackers: {prefix}track=[]"
                    )
                missing[package] = dataclasses.replace(problem, where=where)
    return list(missing.values())


def list_needs(values: Mapping[str, Any]) -> Iterator[Need]:
    """Yield the packages that one stage needs, from its resolved values."""
    stage = values["stage"]
    for package in ("torch", "transformers", *_trainer_packages(stage)):
        yield package, f"stage {stage}", "train", "stage"
    if stage == "harness":
        yield "lm_eval", "stage harness (posttrain eval --harness)", "eval", "stage"
    for place in ENGINES:
        engine = values.get(place) or {}
        server = (engine.get("vllm") or {}).get("server") or {}
        if engine.get("engine") == "vllm" and not server.get("urls"):
            yield "vllm", f"{place}.engine: vllm", "vllm", f"{place}.engine"
    model = values.get("model") or {}
    if model.get("quantize"):
        yield "bitsandbytes", f"model.quantize: {model['quantize']}", "quant", "model.quantize"
    if model.get("lora"):
        yield "peft", "model.lora", "train", "model.lora.rank"
    if str(model.get("path", "")).endswith(".gguf"):
        yield "gguf", "a .gguf model", "train", "model.path"
    optimizer = str((values.get("optim") or {}).get("use", ""))
    if optimizer.endswith("8bit"):
        yield "bitsandbytes", f"optim.use: {optimizer}", "quant", "optim.use"
    for number, tracker in enumerate(values.get("track") or ()):
        yield tracker["use"], f"track: {tracker['use']}", "track", f"track.{number}.use"
    data = values.get("data") or {}
    mix = [(f"data.mix.{i}.source", source.get("source")) for i, source in enumerate(data.get("mix") or [])]
    held_out = (values.get("eval") or {}).get("data") or {}
    for key, source in [("data.source", data.get("source")), *mix, ("eval.data.source", held_out.get("source"))]:
        yield from _list_source_needs(str(source or ""), key)
    for number, reward in enumerate(values.get("rewards") or ()):
        if str(reward.get("use", "")).startswith("gym."):
            yield "reasoning_gym", f"rewards: {reward['use']}", "gym", f"rewards.{number}.use"


def _trainer_packages(stage: str) -> tuple[str, ...]:
    """Return the libraries that a stage's training loop needs."""
    trl = ("datasets", "trl", "accelerate")
    return {"sft": trl, "dpo": trl, "reward_model": trl, "rl": ("datasets", "safetensors")}.get(stage, ("safetensors",))


def _list_source_needs(source: str, key: str) -> Iterator[Need]:
    """Yield the packages that reading a data source needs."""
    if source.startswith("gym:"):
        yield "reasoning_gym", f"data {source}", "gym", key
    elif source.endswith(".parquet"):
        yield "pyarrow", f"data {source}", "train", key
    elif source and ":" not in source and not source.endswith(PLAIN_FILES):
        yield "datasets", f"data {source}", "train", key
