"""Invariants of every group reward and every filter in the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain import registry
from posttrain.batch import Remembered, RolloutBatch
from posttrain.recipe.needs import BY_ROW

NAMES = [(kind, name) for kind in ("group_reward", "keep") for name in sorted(registry.load_index()[kind])]
REWARDS = [name for kind, name in NAMES if kind == "group_reward"]
BY_ROW_ALONE = [(kind, name) for kind, name in NAMES if BY_ROW.issuperset(registry.load_index()[kind][name]["needs"])]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "remaining_length": {"max_length": 8},
    "truncation_tiers": {"target_lengths": (4, 2)},
    "gated": {"gate": {"on": "mode", "min": 1.0}},
    "mixed_plus_solved": {"kappa": 0.5},
    "hybrid": {"rule": "a", "rm": "b", "fmt": "mode"},
    "thurstone": {"prediction": "a", "target": "difficulty"},
}
LENGTHS = torch.tensor([4, 6, 1, 5, 2, 3, 6, 4, 0])
MASK = torch.arange(6) < LENGTHS[:, None]


def batch(garbage: float = 0.0, rewards: Any = (1, 0, 0, 1, 1, 1, 0, 0, 0), dtype: torch.dtype = torch.float64) -> Any:
    """Return three groups of three: mixed, all right, all wrong with an empty row. Masked cells hold `garbage`."""
    generator = torch.Generator().manual_seed(5)
    top = -torch.rand(9, 6, 8, generator=generator, dtype=torch.float64)
    numbers = torch.tensor([0, 1, 1, 2, 0, 0, 1, -1, 0])
    return RolloutBatch(
        group_ids=torch.arange(9) // 3,
        mask=MASK,
        rewards=torch.tensor(rewards, dtype=dtype),
        correct=torch.tensor([1, 0, 0, 1, 1, 1, 0, 0, 0], dtype=dtype),
        components={name: numbers.to(dtype) for name in ("mode", "tag", "tool_calls", "a", "b")},
        columns={name: (numbers + 1).to(dtype) for name in ("difficulty", "easiness", "tool_seconds")},
        opponent_rewards=torch.tensor([[0, 1], [1, 0], [0, float("nan")]] * 3, dtype=dtype),
        lengths=LENGTHS,
        truncated=LENGTHS == 6,
        trajectory_ids=torch.arange(9) // 3,
        step_ids=torch.arange(9) % 3,
        old_logp=torch.where(MASK, -0.5, garbage).to(dtype),
        entropy=torch.where(MASK, 0.5, garbage).to(dtype),
        answer_ids=torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, -1]),
        topk_logp=torch.where(MASK[:, :, None], top.sort(-1, descending=True)[0], garbage).to(dtype),
    )


def evaluate(kind: Any, name: str, rows: RolloutBatch) -> torch.Tensor:
    result = registry.get(kind, name).function(rows, **ARGUMENTS.get(name, {}))
    return result.result if isinstance(result, Remembered) else result


def test_the_registry_has_group_rewards_and_filters() -> None:
    assert {("group_reward", "kimi_length"), ("keep", "dynamic_sampling")} <= set(NAMES)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_result_has_one_value_per_row_with_the_right_dtype(kind: str, name: str) -> None:
    value = evaluate(kind, name, batch())
    assert value.shape == (9,)
    assert value.dtype == torch.bool if kind == "keep" else bool(value.isfinite().all())


@pytest.mark.parametrize(("kind", "name"), NAMES)
@pytest.mark.parametrize("garbage", [7.0, float("inf"), float("nan")])
def test_masked_cells_change_nothing(kind: str, name: str, garbage: float) -> None:
    assert torch.equal(evaluate(kind, name, batch(garbage)), evaluate(kind, name, batch()))


@pytest.mark.parametrize(("kind", "name"), BY_ROW_ALONE)
def test_components_without_token_needs_read_no_token_fields(
    kind: str, name: str, without_tokens: Callable[[RolloutBatch], RolloutBatch]
) -> None:
    """With several ranks, these components also get rows whose tokens are on other ranks."""
    assert torch.equal(evaluate(kind, name, without_tokens(batch())), evaluate(kind, name, batch()))


@pytest.mark.parametrize("name", REWARDS)
def test_unscored_rows_stay_unscored(name: str) -> None:
    nan = float("nan")
    values = evaluate("group_reward", name, batch(rewards=(1, nan, 0, 1, 1, 1, 0, 0, nan)))
    assert values.isnan().nonzero()[:, 0].tolist() == [1, 8]


@pytest.mark.parametrize("name", REWARDS)
def test_the_order_of_groups_changes_nothing(name: str) -> None:
    """Rows stay together and ordered within their group; only the groups are permuted."""
    order = torch.tensor([6, 7, 8, 0, 1, 2, 3, 4, 5])
    torch.testing.assert_close(
        evaluate("group_reward", name, batch().select(order)), evaluate("group_reward", name, batch())[order]
    )


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_float32_is_close_to_float64(kind: str, name: str) -> None:
    single, double = evaluate(kind, name, batch(dtype=torch.float32)), evaluate(kind, name, batch())
    torch.testing.assert_close(single.double(), double.double(), rtol=1e-4, atol=1e-5)
