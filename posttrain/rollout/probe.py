"""Comparison of engine and trainer: log-probs of one fixed sequence from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from posttrain.models.adapters import activate
from posttrain.rollout.hf import eval_mode

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

TEXT = "Question: what is 12 + 30? Let us add: 12 + 30 = 42. The answer is 42."


def probe_ids(tokenizer: Any, limit: int) -> tuple[int, ...]:
    """Return the first `limit` tokens of the fixed sequence."""
    return tuple(tokenizer.encode(TEXT, add_special_tokens=False)[:limit])


@torch.no_grad()
def trainer_logps(loaded: LoadedModel, model: Any, ids: Sequence[int], adapter: str | None = None) -> list[float]:
    """Return log p(ids[t] | ids[:t]) for t = 1 ... len(ids)-1 at temperature 1. adapter: name of the LoRA adapter to
    use, if there are several."""
    activate(model, adapter)
    row = torch.tensor([list(ids)], device=loaded.device)
    with eval_mode(model), loaded.autocast(cache_enabled=False):  # autocast would cache a copy of all weights
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, row[0, 1:, None]).squeeze(-1).tolist()


def mean_gap(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the mean of |a - b|. Raises ValueError if the lengths differ."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


@dataclass(frozen=True)
class ProbeResult:
    """Log-probs of the probe sequence from one engine and from the trainer, at the same sync."""

    engine: tuple[float, ...]
    trainer: tuple[float, ...]

    def missed_sync(self, now: ProbeResult, tolerance: float) -> bool:
        """Return whether the engine missed the sync since: steps are small, so the gap alone could pass for rounding.

        True if the engine's log-probs are unchanged although the trainer's moved by more than a hundredth of what
        rounding explains; or if they are far closer to the trainer's earlier log-probs than to the current ones.
        """
        moved = mean_gap(now.trainer, self.trainer)
        if now.engine == self.engine:
            return moved > tolerance / 100
        lag = mean_gap(now.engine, self.trainer)
        return moved > 4 * lag and mean_gap(now.engine, now.trainer) > 2 * lag
