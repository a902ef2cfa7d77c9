"""Which rows of a step each of several ranks trains on. Every row has one rank, in all updates of the step; only that
rank has its tensors by token in the update. What is said of all rows comes from sums over ranks. One process alone has
all rows (`update.rows_of_step`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.batch import Rollout, RolloutBatch, Segment
from posttrain.train.collate import Sequences
from posttrain.train.context import TrainContext
from posttrain.train.load_balancing import split_rows
from posttrain.train.ranks import Ranks


@dataclass(frozen=True)
class OwnRows:
    """The rows of this rank, and what it must know of those of the others. Rows have the numbers that they have in the
    step; this rank's batch and sequences hold `mine` in that order, then `spare`.

    parts: the rows of each update, of all ranks. active: of all, those with a gradient; the others are only counted.
    owners: the rank of each row, counted in ranks that run the same rows. mine: this rank's. spare: a row of another
    rank, for passes whose result is dropped, where this rank has none of its own.
    """

    ranks: Ranks
    count: int  # rows of the step
    parts: Sequence[Sequence[int]]
    active: frozenset[int]
    owners: Sequence[int]
    mine: Sequence[int]
    spare: tuple[int, ...] = ()

    def of(self, batch: RolloutBatch) -> RolloutBatch:
        """This rank's rows of a batch of all; no sum and no denominator counts a spare one."""
        own = batch.select([*self.mine, *self.spare])
        if not self.spare:
            return own
        last = torch.arange(len(own), device=own.mask.device) == len(own) - 1
        kept = torch.ones_like(last) if own.keep is None else own.keep
        return own.replace(mask=own.mask & ~last[:, None], keep=kept & ~last)

    def sequences(self, sequences: Sequences) -> Sequences:
        """This rank's rows of the sequences of all."""
        return replace(sequences.select([*self.mine, *self.spare]), own=True)

    def bring_tokens(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """This rank's rollouts, with tokens and text, which the others lose. rollouts: all, each with its tokens on the
        rank that has sampled it. A spare one gets token 0 in place of its own: its prompt's last may be an image's."""
        self.ranks.send_tokens(rollouts, self.owners)
        others = [rollouts[row] for row in self.spare]
        spare = [replace(one, segments=(Segment("model", (0,)),)) for one in others]
        return [*(rollouts[row] for row in self.mine), *spare]

    def everywhere(self, own: Tensor) -> Tensor:
        """Values of all rows [N,...], of each rank's own [n,...]."""
        found = own.new_zeros((self.count, *own.shape[1:]))
        found[list(self.mine)] = own[: len(self.mine)]
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
    same, groups, owner = p.ranks.model_parallel_size, batch.group_ids.tolist(), dict[int, int]()
    count = p.ranks.count // same
    together = p.objective.whole_groups or (p.shares and len({groups[row] for row in active}) >= 4 * count)
    for part in parts:
        rows = [row for row in part if row in active and row not in owner]
        units = [groups[row] for row in rows] if together else None
        for rank, own in enumerate(split_rows([lengths[row] for row in rows], count, units)):
            owner |= dict.fromkeys((rows[n] for n in own), rank)
    found = [owner.get(row, sampled_by[row] // same if sampled_by else row % count) for row in range(len(batch))]
    mine = [row for row, rank in enumerate(found) if rank == p.ranks.number // same]
    return OwnRows(p.ranks, len(batch), parts, active, found, mine, spare=() if mine else (0,))


def ranks_of_tokens(ranks: Ranks, rollouts: Sequence[Rollout]) -> list[int]:
    """Which rank has the tokens of each rollout, where only the one that has sampled it does."""
    here = ranks.gather([n for n, rollout in enumerate(rollouts) if rollout.is_here])
    rank_of = {n: rank for rank, rows in enumerate(here) for n in rows}
    return [rank_of[n] for n in range(len(rollouts))]
