"""Which rows of a step each rank trains on. Every row has one rank, in all updates of the step; only that rank has its
tensors by token in the update. What is said of all rows comes from sums over ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from posttrain.batch import Rollout, RolloutBatch, Segment
from posttrain.train.collate import Sequences
from posttrain.train.context import TrainContext
from posttrain.train.distributed import split_rows
from posttrain.train.ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class OwnRows:
    """The rows of this rank, and what it must know of those of the others. Rows have the numbers that they have in the
    step; `places` are those in this rank's batch.

    parts: the rows of each update, of all ranks. active: of all, those with a gradient; the others are only counted.
    owners: the rank of each row, counted in ranks that run the same rows. mine: this rank's, in the order of its
    batch. spare: the last of them is another rank's, there for passes whose result is dropped, because this rank has no
    row of its own.
    """

    ranks: Ranks
    count: int  # rows of the step
    parts: Sequence[Sequence[int]]
    active: frozenset[int]
    owners: Sequence[int]
    mine: Sequence[int]
    spare: bool = False

    @cached_property
    def counted(self) -> Sequence[int]:
        """This rank's rows without a spare one."""
        return self.mine[:-1] if self.spare else self.mine

    def places(self, rows: Collection[int]) -> list[int]:
        """The places of those of these rows that are this rank's, rising."""
        place_of = {row: place for place, row in enumerate(self.counted)}
        return sorted(place_of[row] for row in rows if row in place_of)

    def of(self, batch: RolloutBatch) -> RolloutBatch:
        """This rank's rows of a batch of all; a spare one has no token that counts."""
        return batch if self.ranks.count == 1 else self.without_spare(batch.select(self.mine))

    def without_spare(self, own: RolloutBatch) -> RolloutBatch:
        """A batch of this rank's rows whose spare row no sum and no denominator counts."""
        if not self.spare:
            return own
        last = torch.arange(len(own), device=own.mask.device) == len(own) - 1
        kept = torch.ones_like(last) if own.keep is None else own.keep
        return own.replace(mask=own.mask & ~last[:, None], keep=kept & ~last)

    def sequences(self, sequences: Sequences) -> Sequences:
        """This rank's rows of the sequences of all."""
        return sequences if self.ranks.count == 1 else replace(sequences.select(self.mine), own=True)

    def pick(self, items: Sequence[T]) -> list[T]:
        """This rank's of what the first rows of the step have, without a spare one."""
        return [items[row] for row in self.counted if row < len(items)]

    def bring_tokens(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """This rank's rollouts, with tokens and text, which the others lose. rollouts: all, each with its tokens on the
        rank that has sampled it. A spare one gets a token in place of its own."""
        self.ranks.send_tokens(rollouts, self.owners)
        own = self.pick(rollouts)
        if self.spare:
            last = rollouts[self.mine[-1]]
            own.append(replace(last, segments=(Segment("model", last.prompt.ids[-1:]),)))
        return own

    def everywhere(self, own: Tensor) -> Tensor:
        """Values of all rows [N,...], of each rank's own [n,...]."""
        if self.ranks.count == 1:
            return own
        found = own.new_zeros((self.count, *own.shape[1:]))
        found[list(self.counted)] = own[: len(self.counted)]
        return self.ranks.sum(found)


def deal_rows(
    p: TrainContext,
    batch: RolloutBatch,
    lengths: Sequence[int],
    parts: Sequence[Sequence[int]],
    sampled_by: Sequence[int] = (),
) -> OwnRows:
    """Give every row of a step to a rank: of each update those with a gradient so that all ranks have as many tokens;
    the others stay with the rank that has sampled them, or go round.

    batch: all rows, with their advantages. lengths: tokens of each row. parts: the rows of each update; a row that
    stands in several stays where the first has it. sampled_by: the rank that has the tokens of each row; () = all have.
    A loss over groups gets whole groups; where rows share the pass of their prompt they come together if there are
    enough prompts.
    """
    # as rank 0 finds them: rounding differs between GPUs, and all ranks must agree
    active = frozenset(p.ranks.broadcast(p.objective.has_signal(batch).nonzero()[:, 0].tolist()))
    if p.ranks.count == 1:
        return OwnRows(p.ranks, len(batch), parts, active, [0] * len(batch), range(len(batch)))
    same, groups, owner = p.ranks.same_rows, batch.group_ids.tolist(), dict[int, int]()
    count = p.ranks.count // same
    together = p.objective.whole_groups or (p.shares and len({groups[row] for row in active}) >= 4 * count)
    for part in parts:
        rows = [row for row in part if row in active and row not in owner]
        units = [groups[row] for row in rows] if together else None
        for rank, own in enumerate(split_rows([lengths[row] for row in rows], count, units)):
            owner |= dict.fromkeys((rows[n] for n in own), rank)
    found = [owner.get(row, sampled_by[row] // same if sampled_by else row % count) for row in range(len(batch))]
    mine = [row for row, rank in enumerate(found) if rank == p.ranks.number // same]
    return OwnRows(p.ranks, len(batch), parts, active, found, mine or [0], spare=not mine)


def ranks_of_tokens(ranks: Ranks, rollouts: Sequence[Rollout]) -> list[int]:
    """Which rank has the tokens of each rollout, where only the one that has sampled it does."""
    here = ranks.gather([n for n, rollout in enumerate(rollouts) if rollout.is_here])
    rank_of = {n: rank for rank, rows in enumerate(here) for n in rows}
    return [rank_of[n] for n in range(len(rollouts))]
