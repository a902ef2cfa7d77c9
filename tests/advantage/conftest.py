"""Fixtures that build batches from tables of groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain.batch import RolloutBatch

Table = list[list[Any]]


def column(table: Table) -> torch.Tensor:
    """Return rows [N] of groups, which may differ in size; None becomes NaN."""
    return torch.tensor([torch.nan if x is None else float(x) for row in table for x in row], dtype=torch.float64)


@pytest.fixture
def groups() -> Callable[..., RolloutBatch]:
    """Return `groups(correct, lengths, rewards=..., mode=...)`, which builds a batch from tables of groups. Other names
    are reward components. Rewards default to correctness; a row has as many trained tokens as its length, in a mask as
    wide as the longest row."""

    def make(correct: Table, lengths: Table | None = None, rewards: Table | None = None, **others: Any) -> RolloutBatch:
        ids = torch.tensor([g for g, row in enumerate(correct) for _ in row])
        sizes = column(lengths).long() if lengths else torch.ones(len(ids), dtype=torch.long)
        fields = {name: others.pop(name) for name in ("step", "total_steps") if name in others}
        return RolloutBatch(
            group_ids=ids,
            mask=torch.arange(max(int(sizes.max()), 1)) < sizes[:, None],
            rewards=column(correct if rewards is None else rewards),
            correct=column(correct),
            lengths=sizes,
            components={name: column(table) for name, table in others.items()},
            **fields,
        )

    return make


@pytest.fixture
def without_tokens() -> Callable[[RolloutBatch], RolloutBatch]:
    """Return a function that removes tokens and texts from a batch, as for rows held by other ranks."""

    def make(batch: RolloutBatch) -> RolloutBatch:
        fields = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}
        by_token = [name for name, v in fields.items() if isinstance(v, torch.Tensor) and v.dim() > 1]
        fields |= {**dict.fromkeys(by_token), "answer_ids": None, "opponent_rewards": batch.opponent_rewards}
        return RolloutBatch(**{**fields, "mask": batch.mask.any(-1, keepdim=True)})

    return make
