"""What every group reward and every filter of the registry must obey, whatever its formula."""

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
    """Three groups of three: mixed, all right, all wrong with an empty row. Masked cells hold `garbage`."""
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


def found(kind: Any, name: str, rows: RolloutBatch) -> torch.Tensor:
    result = registry.get(kind, name).function(rows, **ARGUMENTS.get(name, {}))
    return result.result if isinstance(result, Remembered) else result


def test_there_is_something_to_test() -> None:
    assert {("group_reward", "kimi_length"), ("keep", "dynamic_sampling")} <= set(NAMES)


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_one_number_a_row_of_the_right_kind(kind: str, name: str) -> None:
    value = found(kind, name, batch())
    assert value.shape == (9,)
    assert value.dtype == torch.bool if kind == "keep" else bool(value.isfinite().all())


@pytest.mark.parametrize(("kind", "name"), NAMES)
@pytest.mark.parametrize("garbage", [7.0, float("inf"), float("nan")])
def test_garbage_under_the_mask_changes_nothing(kind: str, name: str, garbage: float) -> None:
    assert torch.equal(found(kind, name, batch(garbage)), found(kind, name, batch()))


@pytest.mark.parametrize(("kind", "name"), BY_ROW_ALONE)
def test_what_needs_nothing_by_token_reads_nothing_by_token(
    kind: str, name: str, without_tokens: Callable[[RolloutBatch], RolloutBatch]
) -> None:
    """With several ranks it sees rows whose tokens others have."""
    assert torch.equal(found(kind, name, without_tokens(batch())), found(kind, name, batch()))


@pytest.mark.parametrize("name", REWARDS)
def test_a_row_that_was_not_scored_stays_so(name: str) -> None:
    nan = float("nan")
    values = found("group_reward", name, batch(rewards=(1, nan, 0, 1, 1, 1, 0, 0, nan)))
    assert values.isnan().nonzero()[:, 0].tolist() == [1, 8]


@pytest.mark.parametrize("name", REWARDS)
def test_the_order_of_groups_changes_nothing(name: str) -> None:
    """Groups stay together and in their inner order; only their places in the batch change."""
    order = torch.tensor([6, 7, 8, 0, 1, 2, 3, 4, 5])
    torch.testing.assert_close(
        found("group_reward", name, batch().select(order)), found("group_reward", name, batch())[order]
    )


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_float32_is_close_to_float64(kind: str, name: str) -> None:
    single, double = found(kind, name, batch(dtype=torch.float32)), found(kind, name, batch())
    torch.testing.assert_close(single.double(), double.double(), rtol=1e-4, atol=1e-5)
