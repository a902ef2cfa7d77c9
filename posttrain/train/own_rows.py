"""Assignment of a step's rows to ranks: every row is trained on by one rank, in all updates of the step.

Only that rank holds the row's per-token tensors during the update; statistics of all rows are sums over ranks. A single
process has all rows (`update.rows_of_step`).
"""

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
    """Rows of this rank, and what it must know about the rows of other ranks.

    Rows are numbered as in the step; this rank's batch and sequences contain `mine` in that order, then `spare`.

    parts: rows of each update, of all ranks. active: all rows with a gradient; other rows are only counted. owners:
    rank of each row, counting ranks that run the same rows as one. mine: rows of this rank. spare: a row of another
    rank, for passes whose result is discarded, if this rank has no rows.
    """

    ranks: Ranks
    count: int  # rows of the step
    parts: Sequence[Sequence[int]]
    active: frozenset[int]
    owners: Sequence[int]
    mine: Sequence[int]
    spare: tuple[int, ...] = ()

    def select_batch(self, batch: RolloutBatch) -> RolloutBatch:
        """Return this rank's rows of a batch of all rows; sums and denominators exclude a spare row."""
        own = batch.select([*self.mine, *self.spare])
        if not self.spare:
            return own
        last = torch.arange(len(own), device=own.mask.device) == len(own) - 1
        keep = torch.ones_like(last) if own.keep is None else own.keep
        return own.replace(mask=own.mask & ~last[:, None], keep=keep & ~last)

    def select_sequences(self, sequences: Sequences) -> Sequences:
        """Return this rank's rows of the sequences of all rows."""
        return replace(sequences.select([*self.mine, *self.spare]), own=True)

    def receive_tokens(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Exchange tokens and text between ranks; return this rank's rollouts, the only ones that keep theirs here.

        rollouts: all rollouts, each with its tokens on the rank that sampled it. A spare rollout gets the single
        completion token 0, because the last token of its prompt may belong to an image.
        """
        self.ranks.send_tokens(rollouts, self.owners)
        others = [rollouts[row] for row in self.spare]
        spare = [replace(rollout, segments=(Segment("model", (0,)),)) for rollout in others]
        return [*(rollouts[row] for row in self.mine), *spare]

    def gather_values(self, own: Tensor) -> Tensor:
        """Return values of all rows [N,...] from the values of each rank's own rows [n,...]."""
        gathered = own.new_zeros((self.count, *own.shape[1:]))
        gathered[list(self.mine)] = own[: len(self.mine)]
        return self.ranks.sum(gathered)


def assign_rows(
    ctx: TrainContext,
    batch: RolloutBatch,
    lengths: Sequence[int],
    parts: Sequence[Sequence[int]],
    sampled_by: Sequence[int] = (),
) -> OwnRows:
    """Assign every row of a step to a rank.

    In each update, rows with a gradient are divided so that all ranks have nearly equal tokens; other rows stay with
    the rank that sampled them, or are distributed round-robin.

    batch: all rows, with their advantages. lengths: tokens of each row. parts: rows of each update; a row in several
    updates is assigned by the first. sampled_by: rank that holds the tokens of each row; () = all ranks do. A loss over
    groups gets whole groups; if rows share the forward pass of their prompt, a prompt's rows stay together if there are
    enough prompts.
    """
    # decided by rank 0: rounding differs between GPUs, and all ranks must agree
    active = frozenset(ctx.ranks.broadcast(ctx.objective.has_signal(batch).nonzero()[:, 0].tolist()))
    size, groups, owner = ctx.ranks.model_parallel_size, batch.group_ids.tolist(), dict[int, int]()
    count = ctx.ranks.count // size
    by_group = ctx.objective.whole_groups or (ctx.shares and len({groups[row] for row in active}) >= 4 * count)
    for part in parts:
        rows = [row for row in part if row in active and row not in owner]
        units = [groups[row] for row in rows] if by_group else None
        for rank, indices in enumerate(split_rows([lengths[row] for row in rows], count, units)):
            owner |= dict.fromkeys((rows[n] for n in indices), rank)
    owners = [owner.get(row, sampled_by[row] // size if sampled_by else row % count) for row in range(len(batch))]
    mine = [row for row, rank in enumerate(owners) if rank == ctx.ranks.number // size]
    return OwnRows(ctx.ranks, len(batch), parts, active, owners, mine, spare=() if mine else (0,))


def ranks_of_tokens(ranks: Ranks, rollouts: Sequence[Rollout]) -> list[int]:
    """Return the rank that holds the tokens of each rollout, which is the one that sampled it."""
    sampled = ranks.gather([n for n, rollout in enumerate(rollouts) if rollout.is_local])
    rank_of = {n: rank for rank, rows in enumerate(sampled) for n in rows}
    return [rank_of[n] for n in range(len(rollouts))]
