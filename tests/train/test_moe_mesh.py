"""Mixtures of experts on every mesh compute what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .families import save_family
from .test_mesh import LORA, Values, assert_equal, folder, rows

__all__ = ["folder", "rows"]  # fixtures

BALANCE: dict[str, Values] = {
    # SFT's is a mean over micro-batches, which must be the same on all ranks
    "sft": {
        "objective": {"router_aux_loss": 0.5},
        "batch": {"size": 8, "micro_size": 2, "packing": True},
    },
    "rl": {"regularisers": [{"use": "router_balance", "coef": 0.5}]},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("stage", BALANCE)
def test_divided_mixtures_compute_what_whole_ones_do(
    rows: Any, stage: str, kind: str, model: Values, folder: Path
) -> None:
    model = {**model, "path": str(save_family(kind, folder / kind)), "keys": BALANCE[stage]}
    expected = rows(stage, 1, **model)
    for parallel in ({"shard": 2}, {"context": 2}):
        assert_equal(rows(stage, 2, parallel=parallel, **model), expected)
