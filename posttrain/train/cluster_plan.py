"""Cluster plan: estimated step time of a recipe on a cluster, the scaling limit, and changes that shorten the step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from posttrain.errors import UserError, did_you_mean
from posttrain.recipe.stages import RlRecipe
from posttrain.train.memory import GIB, Shape
from posttrain.train.memory_plan import Machine, Recipe, count_passes, predict_phases, trains_on_pairs, with_key
from posttrain.train.mesh import shard_ranks
from posttrain.train.step_time import (
    CARDS,
    Rates,
    Step,
    decode_seconds,
    exchange_bytes,
    slowest,
    step_seconds,
    update_bytes,
)

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
MIN_SPEEDUP = 1.3  # from twice the GPUs; scaling counts as saturated below it
MAX_TIME_SHARE = 0.97  # of the step time, for a change to be listed
COMPILED_LAUNCH, EAGER_LAUNCH = 1.5e-3, 5e-3  # `Rates.launch`


def rates_of(card: str, stated: list[str], *, compiled: bool) -> Rates:
    """Return the rates of a GPU type, overridden by `stated` KEY=VALUE pairs. Raises UserError for unknown names."""
    if card not in CARDS:
        raise UserError(
            f"--card {card}: not known", allowed=", ".join(CARDS), hint="--assume flops=... states its rates"
        )
    flops, memory, nvlink, _ = CARDS[card]
    found = Rates(flops=flops, memory=memory, nvlink=nvlink, launch=COMPILED_LAUNCH if compiled else EAGER_LAUNCH)
    known = [field.name for field in fields(Rates)]
    for text in stated:
        key, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if key not in known or number < 0:
            raise UserError(
                f"--assume {text}: not KEY=NUMBER", allowed=f"keys: {', '.join(known)}", hint=did_you_mean(key, known)
            )
        override: dict[str, Any] = {key: int(number) if key in ("prompt", "gpus_a_node") else number}
        found = replace(found, **override)
    return found


def step_of(recipe: Recipe, prompt: int, machine: Machine) -> Step:
    """Describe the recipe's step on `machine.ranks` training processes. prompt: tokens of the longest prompt or row."""
    model, ranks = recipe.model, machine.ranks
    shards = shard_ranks(model.divided, ranks) if model.divided and ranks > 1 else 1
    common: dict[str, Any] = {"ranks": ranks, "shards": shards}
    if model.divided and ranks > 1:
        common |= {key: getattr(model.divided, key) for key in ("context", "tensor", "expert")}
    common["checkpointing"] = bool(model.gradient_checkpointing)
    if not isinstance(recipe, RlRecipe):
        rows = recipe.batch.size * (2 if trains_on_pairs(recipe) else 1)
        micro = (recipe.batch.micro_size or recipe.batch.size) * prompt
        return Step(rows=rows, longest=0, prompt=prompt, micro_tokens=micro, generates=False, **common)
    rollout, vllm = recipe.rollout, recipe.rollout.vllm
    separate = rollout.engine == "vllm" and vllm.server is not None
    size = vllm.tensor_parallel if rollout.engine == "vllm" else 1
    count = vllm.servers if separate else ranks * vllm.engines // size
    return Step(
        rows=rollout.prompts_per_step * rollout.group_size,
        longest=rollout.max_new_tokens,
        prompt=prompt,
        micro_tokens=recipe.batch.micro_tokens,
        updates=recipe.batch.epochs * recipe.batch.minibatches,
        epochs=recipe.batch.epochs,
        passes=count_passes(recipe),
        engines=count,
        engine_gpus=size,
        engine_room=vllm.share * machine.card if rollout.engine == "vllm" else 0.0,
        apart=separate,
        ahead=separate and rollout.staleness > 0,
        **common,
    )


def plan_cluster(recipe: Recipe, shape: Shape, prompt: int, machine: Machine, rates: Rates) -> dict[str, Any]:
    """Estimate a step: seconds by part, network bytes, bottleneck, scaling with the number of GPUs, and improvements.

    All estimates follow from `rates`, which the result contains as `assumed`.
    """
    step = step_of(recipe, prompt, machine)
    seconds = step_seconds(shape, step, rates)
    tokens = step.rows * step.row_tokens(rates)
    scaled = [scale(shape, step, rates, factor) for factor in SCALES]
    return {
        "training_gpus": step.ranks,
        "engines": {"count": step.engines, "gpus_each": step.engine_gpus, "apart": step.apart}
        if step.generates
        else {},
        "engine_holds_weights": not step.engine_room or 2 * shape.parameters / step.engine_gpus < step.engine_room,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "slowest": slowest(seconds),
        "tokens_a_second": round(tokens / seconds["step"]),
        "network_gib_a_rank": round(
            (sum(update_bytes(shape, step, rates)) + exchange_bytes(shape, step, rates)) / GIB, 2
        ),
        "network_gib_to_engines": round((4 * shape.adapter or 2 * shape.parameters) * step.engines / GIB, 2)
        if step.generates
        else 0.0,
        "longest_completion_s": round(decode_seconds(shape, replace(step, rows=step.engines), rates), 1)
        if step.generates
        else 0.0,
        "scaled": scaled,
        "saturates_at": saturation(scaled),
        "changes": [
            {"change": text, "step_s": round(step_s, 2)}
            for text, step_s in sorted(_changes(recipe, shape, prompt, machine, rates), key=lambda item: item[1])
            if step_s < MAX_TIME_SHARE * seconds["step"]
        ][:4],
        "assumed": asdict(rates),
    }


def scale(shape: Shape, step: Step, rates: Rates, factor: float) -> dict[str, Any]:
    """Estimate the same batch on `factor` times as many training and generation GPUs.

    The number of copies of a sharded model stays the same; each engine keeps its number of GPUs.
    """
    ranks, engines = max(1, round(step.ranks * factor)), max(1, round(step.engines * factor))
    copies = step.ranks // step.shards
    shards = max(1, ranks // copies) if step.shards > 1 else 1
    tensor = min(step.tensor, shards)
    expert = min(step.expert, shards // tensor)
    changed = replace(step, ranks=ranks, shards=shards, tensor=tensor, expert=expert, engines=engines)
    seconds = step_seconds(shape, changed, rates)
    gpus = ranks + engines * step.engine_gpus * step.apart
    return {"gpus": gpus, "step_s": round(seconds["step"], 2), "slowest": slowest(seconds)}


def saturation(scaled: list[dict[str, Any]]) -> int | None:
    """Return the smallest of these GPU counts at which doubling them speeds up less than `MIN_SPEEDUP`; None if
    none."""
    for current, twice in itertools.pairwise(scaled):
        if current["gpus"] < twice["gpus"] and current["step_s"] < MIN_SPEEDUP * twice["step_s"]:
            return int(current["gpus"])
    return None


def _changes(recipe: Recipe, shape: Shape, prompt: int, machine: Machine, rates: Rates) -> Iterator[tuple[str, float]]:
    """Yield (change, seconds of a step with it) for changes that fit into each GPU's memory."""
    step = step_of(recipe, prompt, machine)

    def time_with(text: str, changed: Step, with_rates: Rates = rates) -> tuple[str, float]:
        return text, step_seconds(shape, changed, with_rates)["step"]

    def fits(key: str, value: Any) -> bool:
        return predict_phases(with_key(recipe, key, value), shape, prompt, machine).peak < machine.card

    if step.apart and not step.ahead:
        yield time_with("rollout.staleness=1", replace(step, ahead=True))
    if not recipe.model.compile and not recipe.model.divided and rates.launch > COMPILED_LAUNCH:
        yield time_with("model.compile=true", step, replace(rates, launch=COMPILED_LAUNCH))
    if step.checkpointing and fits("model.gradient_checkpointing", False):
        yield time_with("model.gradient_checkpointing=false", replace(step, checkpointing=False))
    if isinstance(recipe, RlRecipe) and fits("batch.micro_tokens", 2 * step.micro_tokens):
        more = 2 * step.micro_tokens
        yield time_with(f"batch.micro_tokens={more}", replace(step, micro_tokens=more))
    copies = step.ranks // rates.gpus_a_node
    if recipe.model.divided and step.shards == step.ranks and copies > 1 and step.ranks % rates.gpus_a_node == 0:
        parallel = recipe.model.divided.model_copy(update={"replicate": copies})
        changed = recipe.model.model_copy(update={"parallel": parallel, "shard": False})
        if predict_phases(recipe.model_copy(update={"model": changed}), shape, prompt, machine).peak < machine.card:
            yield time_with(f"model.parallel={{replicate: {copies}}}", replace(step, shards=rates.gpus_a_node))
    if step.apart:  # move one machine from one side to the other
        moved = rates.gpus_a_node // step.engine_gpus
        if step.ranks > rates.gpus_a_node and moved:
            fewer = step.ranks - rates.gpus_a_node
            shards = fewer if step.shards == step.ranks else step.shards
            more_engines = replace(step, ranks=fewer, shards=shards, engines=step.engines + moved)
            yield time_with(f"--gpus {fewer} --servers {more_engines.engines}x{step.engine_gpus}", more_engines)
        if moved and step.engines > moved:
            more_ranks = step.ranks + rates.gpus_a_node
            shards = more_ranks if step.shards == step.ranks else step.shards
            fewer_engines = replace(step, ranks=more_ranks, shards=shards, engines=step.engines - moved)
            yield time_with(f"--gpus {more_ranks} --servers {fewer_engines.engines}x{step.engine_gpus}", fewer_engines)
