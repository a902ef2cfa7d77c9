"""Streaming merge, one tensor name at a time, and verification of the written files.

Shapes: tensors of one name have any shape, the same in all models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from posttrain.errors import MergeError, RunError, count_noun
from posttrain.merge import global_topk
from posttrain.merge import tensors as disk
from posttrain.merge.blocks import (
    all_finite,
    apply_rule_by_block,
    equal,
    fingerprint,
    one_thread,
    reuse_memory,
    squared_distance,
)
from posttrain.merge.plan import Plan
from posttrain.merge.rules import merge_tensor, to_sum_dtype
from posttrain.merge.sources import Source
from posttrain.merge.vocabulary import reorder_embeddings
from posttrain.seeds import derive


@dataclass
class MergeStats:
    """Statistics of the merged tensors, collected before they are read back."""

    expected: set[str] = field(default_factory=set)  # some contributing input differs from the anchor
    changed: list[str] = field(default_factory=list)  # the merged tensor differs from the anchor's
    fingerprints: dict[str, int] = field(default_factory=dict)
    squares: dict[Path, float] = field(default_factory=dict)  # folder of a model -> squared distance from the anchor

    def norm(self, model: Source) -> float:
        """Return the norm of a model's difference from the anchor, over all tensors it contributes to."""
        return math.sqrt(self.squares.get(model.folder, 0.0))


def write_merged(
    plan: Plan, folder: Path, before_each: Callable[[int, str], None], sync: Callable[[Path], None]
) -> MergeStats:
    """Write the merged tensors into `folder`; `before_each(number, name)` is called before every tensor.

    sync: as in `tensors.write`. Raises MergeError that names the tensor for a NaN or infinity in an input, or a result
    too large for the output dtype.
    """
    stats = MergeStats()
    names = iter(range(1, len(plan.out) + 1))
    reuse_memory()
    largest = max((spec.nbytes for spec in plan.out.values()), default=0)
    # one buffer is written to disk while the other is filled
    memory = itertools.cycle([torch.empty(largest, dtype=torch.uint8) for _ in range(2)])
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        read = {s.folder: stack.enter_context(disk.open_reader(s.tensors)) for s in plan.sources}
        counts = _count_kept_entries(plan, read)

        def produce(name: str) -> Tensor:
            before_each(next(names), name)
            models, base = read_inputs(plan, name, read)
            merged = disk.view_as_spec(next(memory), plan.out[name])
            _merge_into(merged, plan, name, models, base, stats, counts)
            stats.fingerprints[name] = fingerprint(merged)
            return merged

        disk.write(folder, plan.out, produce, sync=sync)
    return stats


def read_inputs(
    plan: Plan, name: str, read: Mapping[Path, Callable[[str], Tensor]]
) -> tuple[list[Tensor], Tensor | None]:
    """Return the rule's inputs for an output tensor: the models' tensors, and the base's tensor or None.

    Raises MergeError for a NaN or infinity in an input.
    """
    part, position = plan.slice_of(name), plan.position(name)
    wanted = list(zip(part.models, position.inputs, strict=True))
    if part.base is not None:
        wanted.append((part.base, plan.anchor_name(name)))
    loaded: dict[tuple[Path, str], Tensor] = {}
    for source, stored in wanted:
        if (source.folder, stored) not in loaded:
            tensor = _check_finite(read[source.folder](stored), stored, source)
            shared = any(s.folder == source.folder and n != stored for s, n in wanted)
            loaded[source.folder, stored] = tensor.clone() if shared else tensor  # a reader reuses its buffer
    if plan.tokens is not None and name in plan.tokens.embeddings:
        ordered = reorder_embeddings(plan.tokens, {folder: tensor for (folder, _), tensor in loaded.items()})
        loaded = {key: ordered[key[0]] for key in loaded}
    tensors = [loaded[source.folder, stored] for source, stored in wanted]
    return (tensors, None) if part.base is None else (tensors[:-1], tensors[-1])


def _count_kept_entries(plan: Plan, read: Mapping[Path, Callable[[str], Tensor]]) -> dict[str, int] | None:
    """Return the number of entries to keep per tensor for a density over the whole model; None for other merges."""
    params = plan.slices[0].arguments.params(plan.position(""))
    if params.get("granularity") != "global" or plan.base is None:
        return None
    ours, theirs = read[plan.models[0].folder], read[plan.base.folder]
    floats = [name for name, spec in plan.base.tensors.items() if spec.dtype.is_floating_point]
    for source, reader in ((plan.models[0], ours), (plan.base, theirs)):
        for name in floats:
            _check_finite(reader(name), name, source)  # a NaN would rank as the largest entry

    def differences() -> Iterator[tuple[str, Tensor]]:
        return ((name, to_sum_dtype(ours(name)) - to_sum_dtype(theirs(name))) for name in floats)

    return global_topk.count_per_tensor(differences, params["density"], params["at_least_one"])


def draw_uniform(seed: int, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return uniform random numbers for each model, which depend on seed, model number and tensor name only."""
    made = []
    for number, tensor in enumerate(tensors):
        generator = torch.Generator().manual_seed(derive(seed, "merge", number, name))
        made.append(torch.rand(tensor.shape, generator=generator))
    return made


def _merge_into(
    out: Tensor,
    plan: Plan,
    name: str,
    models: list[Tensor],
    base: Tensor | None,
    stats: MergeStats,
    counts: Mapping[str, int] | None,
) -> None:
    """Merge one tensor into `out` and update the statistics; copy the anchor if no input changes it."""
    anchor = models[0] if base is None else base
    if not anchor.is_floating_point():
        out.copy_(anchor)
        return
    part, position = plan.slice_of(name), plan.position(name)
    differing = [not equal(tensor, anchor) for tensor in models]
    far = {s.folder: tensor for s, tensor, differs in zip(part.models, models, differing, strict=True) if differs}
    for folder, tensor in far.items():
        stats.squares[folder] = stats.squares.get(folder, 0.0) + squared_distance(tensor, anchor)
    moved = any(
        differs and moves
        for differs, moves in zip(differing, part.arguments.contributing_models(position), strict=True)
    )
    rescaled = part.arguments.rescales(position)
    if plan.method == "reasoning_vector":
        moved = moved and not equal(models[0], models[1])
    if not moved and not rescaled:
        out.copy_(anchor)  # equal inputs are copied bit for bit, without the rounding of a weighted sum
        return
    if moved or bool(anchor.any()):
        stats.expected.add(name)
    _apply_rule(out, plan, name, models, base, counts)
    if not all_finite(out):
        word = str(out.dtype).removeprefix("torch.")
        raise MergeError(f"the merged {name} overflows {word}", hint="set `dtype: bfloat16` or `float32`")
    if not torch.equal(out, anchor.to(out.dtype)):
        stats.changed.append(name)


def _apply_rule(
    out: Tensor,
    plan: Plan,
    name: str,
    models: list[Tensor],
    base: Tensor | None,
    counts: Mapping[str, int] | None,
) -> None:
    """Apply the rule to one tensor and write the result into `out`."""
    arguments, position = plan.slice_of(name).arguments, plan.position(name)
    weights, params = arguments.weights(position), arguments.params(position)
    if "by_entry" in plan.rule.needs:
        apply_rule_by_block(out, plan.rule.function, models, base, weights, params)
        return
    extra = draw_uniform(plan.seed, name, models) if "draws" in plan.rule.needs else counts and counts[name]
    out.copy_(merge_tensor(plan.rule.function, models, base, weights, params, extra))


def _check_finite(tensor: Tensor, name: str, source: Source) -> Tensor:
    if tensor.is_floating_point() and not all_finite(tensor):
        bad = int((~torch.isfinite(tensor)).sum())
        raise MergeError(f"{name} holds {bad} NaN or infinite values", where=source.name)
    return tensor


@dataclass(frozen=True)
class Changes:
    """Names of the tensors that changed, and of those that should have changed but did not."""

    changed: list[str]
    rounded_away: list[str]  # inputs differ, but too little for the output dtype, or the rule dropped the difference


def check_written(plan: Plan, folder: Path, stats: MergeStats) -> Changes:
    """Read the written model tensor by tensor and compare it with the merged tensors.

    Raises RunError if a name is missing or a stored tensor differs from the merged one; MergeError if inputs differ but
    the result equals the anchor everywhere.
    """
    written = disk.scan(folder)
    if written.keys() != plan.out.keys():
        raise RunError(f"tensors written and planned differ: {sorted(written.keys() ^ plan.out.keys())}")
    with one_thread(), disk.open_reader(written) as read:
        wrong = [name for name in plan.out if fingerprint(read(name)) != stats.fingerprints[name]]
    if wrong:
        raise RunError(
            f"written tensors differ from the merged ones: {', '.join(wrong)}", where=str(folder), hint="check the disk"
        )
    if stats.expected and not stats.changed:
        raise MergeError(
            f"the merged model equals {plan.anchor.name}, although its inputs differ in "
            f"{count_noun(len(stats.expected), 'tensor')}",
            hint="the weighted differences cancel, are not kept, or are too small for the output dtype; try "
            "`dtype: float32`",
        )
    return Changes(stats.changed, sorted(stats.expected - set(stats.changed)))
