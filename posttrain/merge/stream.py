"""The merge itself, one tensor name at a time, and the comparison of what was written with what was meant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from posttrain.errors import MergeError, RunError
from posttrain.merge import everywhere
from posttrain.merge import tensors as disk
from posttrain.merge.blocks import all_finite, equal, one_thread, rule_by_block, squared_distance
from posttrain.merge.plan import Plan
from posttrain.merge.rules import merge_tensor, raised
from posttrain.merge.sources import Source
from posttrain.seeds import derive


@dataclass
class Tally:
    """What the inputs say about the result: `expected` are the names that must come out different from the anchor."""

    expected: set[str] = field(default_factory=set)
    squares: list[float] = field(default_factory=list)  # per model: squared norm of its difference from the anchor

    @property
    def norms(self) -> list[float]:
        return [math.sqrt(square) for square in self.squares]


def write_merged(plan: Plan, folder: Path, before_each: Callable[[int, str], None]) -> Tally:
    """Write the merged tensors into `folder`; `before_each(number, name)` is called before every tensor.

    Raises MergeError naming the tensor for a NaN or infinity in an input, or a result too large for the output dtype.
    """
    tally = Tally(squares=[0.0] * len(plan.models))
    names = iter(range(1, len(plan.out) + 1))
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        read = {s.folder: stack.enter_context(disk.reader(s.tensors)) for s in plan.sources}
        counts = _counts(plan, read)

        def produce(name: str) -> Tensor:
            before_each(next(names), name)
            models = [_finite(read[s.folder](name), name, s) for s in plan.models]
            base = None if plan.base is None else _finite(read[plan.base.folder](name), name, plan.base)
            return _merged(plan, name, models, base, tally, counts)

        disk.write(folder, plan.out, produce)
    return tally


def _counts(plan: Plan, read: Mapping[Path, Callable[[str], Tensor]]) -> dict[str, int] | None:
    """How many entries of each tensor are kept, where a share of the whole model is; None for other merges."""
    params = plan.arguments.params("")
    if params.get("granularity") != "global" or plan.base is None:
        return None
    ours, theirs = read[plan.models[0].folder], read[plan.base.folder]
    floats = [name for name, spec in plan.base.tensors.items() if spec.dtype.is_floating_point]
    for source, reader in ((plan.models[0], ours), (plan.base, theirs)):
        for name in floats:
            _finite(reader(name), name, source)  # a NaN would be the largest of all

    def differences() -> Iterator[tuple[str, Tensor]]:
        return ((name, raised(ours(name)) - raised(theirs(name))) for name in floats)

    return everywhere.counts(differences, params["density"], params["at_least_one"])


def draws(seed: int, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """One tensor of uniform numbers a model; they depend on seed, model number and name, never on order or shards."""
    made = []
    for number, tensor in enumerate(tensors):
        generator = torch.Generator().manual_seed(derive(seed, "merge", number, name))
        made.append(torch.rand(tensor.shape, generator=generator))
    return made


def _merged(
    plan: Plan, name: str, models: list[Tensor], base: Tensor | None, tally: Tally, counts: Mapping[str, int] | None
) -> Tensor:
    anchor = models[0] if base is None else base
    dtype = plan.out[name].dtype
    if not anchor.is_floating_point():
        return anchor
    differing = [not equal(tensor, anchor) for tensor in models]
    for i, differs in enumerate(differing):
        if differs:
            tally.squares[i] += squared_distance(models[i], anchor)
    moved = any(differs and moves for differs, moves in zip(differing, plan.arguments.moving(name), strict=True))
    if plan.method == "reasoning_vector":
        moved = moved and not equal(models[0], models[1])
    if not moved and not plan.rescales(name):
        return anchor.to(dtype)  # equal inputs come out bit for bit, without the rounding of a weighted sum
    if moved or bool(anchor.any()):
        tally.expected.add(name)
    result = _ruled(plan, name, models, base, counts).to(dtype)
    if not all_finite(result):
        word = str(dtype).removeprefix("torch.")
        raise MergeError(f"the merged {name} overflows {word}", hint="set `dtype: bfloat16` or `float32`")
    return result


def _ruled(
    plan: Plan, name: str, models: list[Tensor], base: Tensor | None, counts: Mapping[str, int] | None
) -> Tensor:
    """What the rule makes of one tensor."""
    drawn = draws(plan.seed, name, models) if "draws" in plan.rule.needs else None
    weights, params = plan.arguments.weights(name), plan.arguments.params(name)
    if "by_entry" in plan.rule.needs:
        dtype = plan.out[name].dtype
        return rule_by_block(plan.rule.function, models, base, weights, extra=drawn, dtype=dtype, params=params)
    extra = drawn if drawn is not None else counts and counts[name]
    return merge_tensor(plan.rule.function, models, base, weights, params, extra)


def _finite(tensor: Tensor, name: str, source: Source) -> Tensor:
    if tensor.is_floating_point() and not all_finite(tensor):
        bad = int((~torch.isfinite(tensor)).sum())
        raise MergeError(f"{name} holds {bad} NaN or infinite values", where=source.name)
    return tensor


@dataclass(frozen=True)
class Changes:
    """Names of tensors by what became of them, read back from the disk."""

    changed: list[str]
    rounded_away: list[str]  # the inputs differ, but too little for the output's dtype, or the rule kept nothing of it


def compare_written(plan: Plan, folder: Path, tally: Tally) -> Changes:
    """Read the written model and compare it with the anchor, tensor by tensor.

    Raises RunError if a tensor changed that no input changes, or a name is missing; MergeError if inputs differ and yet
    the result equals the anchor everywhere.
    """
    written = disk.scan(folder)
    if written.keys() != plan.out.keys():
        raise RunError(f"tensors written and planned differ: {sorted(written.keys() ^ plan.out.keys())}")
    with one_thread(), _pair(plan, folder) as (merged, anchor):
        changed = [n for n, s in plan.out.items() if not torch.equal(merged(n), anchor(n).to(s.dtype))]
    unexpected = sorted(set(changed) - tally.expected)
    if unexpected:
        raise RunError(f"tensors changed that are equal in all inputs: {', '.join(unexpected)}", where=str(folder))
    if tally.expected and not changed:
        raise MergeError(
            f"the merged model equals {plan.anchor.name}, although {len(tally.expected)} tensors of the inputs differ",
            hint="the weighted differences cancel, are not kept, or are too small for the output dtype; try "
            "`dtype: float32`",
        )
    return Changes(changed, sorted(tally.expected - set(changed)))


@contextmanager
def _pair(plan: Plan, folder: Path) -> Iterator[tuple[Callable[[str], Tensor], Callable[[str], Tensor]]]:
    with disk.reader(disk.scan(folder)) as merged, disk.reader(plan.anchor.tensors) as anchor:
        yield merged, anchor
