"""Mixtures of experts on every device mesh compute what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import ModelError
from posttrain.train import expert_split

from .families import family, save_family
from .test_mesh import LORA, Values, assert_equal, folder, rows

__all__ = ["folder", "rows"]  # fixtures

BALANCE: dict[str, Values] = {
    # SFT's router loss is a mean over micro-batches, which must be the same on all ranks
    "sft": {
        "objective": {"router_aux_loss": 0.5},
        "batch": {"size": 8, "micro_size": 2, "packing": True},
    },
    "rl": {"regularisers": [{"use": "router_balance", "coef": 0.5}]},
}


def test_expert_parallel_plan_is_applied_or_refused() -> None:
    with torch.device("meta"):
        mixture, dense = family("mixtral"), family("llama")
    expert_split.check(mixture, 2)
    with pytest.raises(ModelError, match="expert: 3 GPUs cannot divide the 4 experts of this mixtral"):
        expert_split.check(mixture, 3)
    with pytest.raises(ModelError, match="no expert-parallel plan that posttrain supports for llama"):
        expert_split.check(dense, 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("stage", BALANCE)
def test_parallel_mixtures_equal_the_unsharded(rows: Any, stage: str, kind: str, model: Values, folder: Path) -> None:
    """Sharded weights, lines and experts; experts also combined with shards and replicas."""
    model = {**model, "path": str(save_family(kind, folder / kind)), "keys": BALANCE[stage]}
    expected = rows(stage, 1, **model)
    for parallel in ({"shard": 2}, {"context": 2}):
        assert_equal(rows(stage, 2, parallel=parallel, **model), expected)
    for parallel in ({"expert": 2}, {"expert": 2, "replicate": 2}):
        assert_equal(rows(stage, 4, parallel=parallel, **model), expected)


@pytest.mark.slow
def test_expert_parallel_run_resumes_on_other_meshes(rows: Any, folder: Path) -> None:
    """With whole experts, and with two ranks of half of the experts each, from a checkpoint written by four."""
    given: Values = {"path": str(save_family("qwen3_moe", folder / "moe")), "keys": BALANCE["sft"]}
    expected = rows("sft", 1, steps=3, **given)
    for steps, (ranks, parallel) in enumerate([(4, {"expert": 2}), (2, {"expert": 2})], 1):
        found = rows("sft", ranks, steps=steps, name="run", resume=steps > 1, parallel=parallel, **given)
        assert_equal(found, expected[:steps])
    assert_equal(rows("sft", 1, steps=3, name="run", resume=True, **given), expected)
