"""From rollouts to numbers: token rows for the model, and the typed batch that advantages and losses read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.batch import Rollout, RolloutBatch
from posttrain.train.logprobs import Sequences


def sequences_of(rollouts: Sequence[Rollout]) -> Sequences:
    """Prompt and completion tokens exactly as the engine saw and gave them; text is never tokenised again."""
    return Sequences(
        tuple(r.prompt.ids + r.ids for r in rollouts),
        tuple(len(r.prompt.ids) for r in rollouts),
    )


def rollout_batch(rollouts: Sequence[Rollout]) -> RolloutBatch:
    """The RolloutBatch of scored rollouts, on the CPU. T is the longest completion; unscored is NaN."""
    width = max(len(r.ids) for r in rollouts)
    names = list(dict.fromkeys(name for r in rollouts for name in r.scores))
    return RolloutBatch(
        group_ids=torch.tensor([r.group for r in rollouts]),
        mask=_rows([r.trained for r in rollouts], width, False, torch.bool),
        rewards=_column([r.reward for r in rollouts]),
        components={name: _column([r.scores.get(name) for r in rollouts]) for name in names},
        correct=_column([r.correct for r in rollouts]),
        truncated=torch.tensor([r.finish == "length" for r in rollouts]),
        rollout_logp=_rows([r.logps for r in rollouts], width, float("nan"), torch.float32),
    )


def _column(values: Sequence[float | bool | None]) -> Tensor:
    return torch.tensor([float("nan") if v is None else float(v) for v in values], dtype=torch.float64)


def _rows(values: Sequence[Sequence[float | bool]], width: int, fill: float | bool, dtype: torch.dtype) -> Tensor:
    out = torch.full((len(values), width), fill, dtype=dtype)
    for n, row in enumerate(values):
        out[n, : len(row)] = torch.tensor(row, dtype=dtype)
    return out
