"""Dynamic sampling: which groups are kept, and how missing groups are refilled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from posttrain.advantage.keep import (
    Refill,
    count_admitted,
    dynamic_sampling,
    group_has_spread,
    keep_mixed_groups,
    mixed_plus_solved,
    some_right,
)
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError

NAN = float("nan")
Groups = Callable[..., RolloutBatch]


def batch(correct: list[float], groups: list[int], rewards: list[float] | None = None) -> RolloutBatch:
    return RolloutBatch(
        group_ids=torch.tensor(groups),
        mask=torch.ones(len(groups), 1, dtype=torch.bool),
        correct=torch.tensor(correct, dtype=torch.float64),
        rewards=None if rewards is None else torch.tensor(rewards, dtype=torch.float64),
    )


def test_uniform_groups_are_dropped() -> None:
    """Groups 3 (mixed), 8 (all right), 1 (all wrong), rows not in order."""
    rows = batch([1, 1, 0, 1, 0, 0], [3, 8, 1, 8, 3, 1])
    assert dynamic_sampling(rows).tolist() == [True, False, False, False, True, False]


def test_groups_are_kept_by_correctness_not_by_shaped_reward() -> None:
    """An all-wrong group whose rewards differ by a length term is dropped."""
    rows = batch([0, 0, 1, 0], [0, 0, 1, 1], rewards=[-0.1, -0.5, 1.0, 1.0])
    assert dynamic_sampling(rows).tolist() == [False, False, True, True]
    assert dynamic_sampling(rows, metric="reward").tolist() == [True, True, False, False]


def test_equal_rewards_with_rounding_noise_are_dropped() -> None:
    """torch's std of three times 0.1 is not exactly 0."""
    assert not group_has_spread(
        torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    ).any()


def test_groups_are_kept_only_above_tol() -> None:
    metric, groups = torch.tensor([0.0, 0.25, 0.0, 0.5]), torch.tensor([0, 0, 1, 1])
    assert group_has_spread(metric, groups, tol=0.25).tolist() == [False, False, True, True]


def test_group_of_one_row_is_kept() -> None:
    assert dynamic_sampling(batch([0, 1, 1], [0, 1, 1])).tolist() == [True, False, False]


def test_missing_correct_raises() -> None:
    with pytest.raises(UserError, match=r"\(NaN\) for scored rows of groups \[4\](.|\n)*metric: reward"):
        dynamic_sampling(batch([1, 0, NAN, 1], [2, 2, 4, 4]))
    with pytest.raises(ValueError, match="has no correct"):
        dynamic_sampling(batch([1], [0]).replace(correct=None))


def test_unscored_rows_are_ignored_by_the_filter() -> None:
    """Group 0 differs among its scored rows; group 1 differs only by its unscored row; groups 2 and 3 have too few
    scored rows."""
    correct = [1, 0, NAN, 1, 1, NAN, 1, NAN, NAN, NAN]
    rows = batch(correct, [0, 0, 0, 1, 1, 1, 2, 2, 3, 3], rewards=correct)
    assert dynamic_sampling(rows).tolist() == [True] * 3 + [False] * 7


def test_refill_takes_groups_in_order_of_arrival_up_to_the_target() -> None:
    refill = Refill(want=3)
    assert refill.status == "open"
    refill = refill.add([False, True, False])
    assert (refill.status, refill.selected_groups) == ("open", [(0, 1)])
    refill = refill.add([True, True, True])
    assert (refill.status, refill.batches) == ("full", 2)
    assert refill.selected_groups == [(0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("tables", "max_batches", "status"),
    [
        ([[True, True]], 0, "full"),
        ([[True, False]], 0, "short"),
        ([[True, False], [False]], 2, "error"),
        ([[True, False], [True]], 2, "full"),
        ([[False]], 1, "error"),
        ([], 0, "short"),
    ],
)
def test_refill_status_is_full_short_or_error(tables: list[list[bool]], max_batches: int, status: str) -> None:
    """`short` only if the source has ended before enough groups or the batch limit was reached."""
    refill = Refill(want=2, max_batches=max_batches)
    for flags in tables:
        refill = refill.add(flags)
    assert refill.end().status == status


def test_some_right_and_keep_mixed_groups(groups: Groups) -> None:
    batch = groups([[1, 0], [1, 1], [0, 0], [1], [None, 1]])
    assert keep_mixed_groups(batch).tolist() == [True] * 2 + [False] * 7
    assert some_right(batch).tolist() == [True] * 4 + [False] * 2 + [True] * 3


def test_solved_groups_are_admitted_in_order(groups: Groups) -> None:
    """kappa 1/2: as many solved groups as mixed groups; 1/3: half as many, rounded down."""
    batch = groups([[1, 1], [1, 0], [1, 1], [0, 1], [1, 1], [0, 0]])
    assert mixed_plus_solved(batch, kappa=0.5)[::2].tolist() == [True, True, True, True, False, False]
    assert mixed_plus_solved(batch, kappa=1 / 3 + 1e-9)[::2].tolist() == [True, True, False, True, False, False]
    assert mixed_plus_solved(batch)[::2].tolist() == [False, True, False, True, False, False]
    assert mixed_plus_solved(batch, kappa=1.0)[::2].tolist() == [True] * 5 + [False]


@pytest.mark.parametrize(("kappa", "count"), [(-0.1, 0), (0.0, 0), (0.2, 2), (0.25, 3), (0.9, 7), (1.0, 7), (2.0, 7)])
def test_number_of_admitted_solved_groups(kappa: float, count: int) -> None:
    """Ten mixed, seven solved: 0.2 * 10 / 0.8 = 2.5, 0.25 * 10 / 0.75 = 3.33, 0.9 * 10 / 0.1 = 90."""
    assert count_admitted(kappa, 10, 7) == count


@pytest.mark.parametrize(("kappa", "mixed", "admitted"), [(0.2, 172, 43), (0.2, 171, 42), (0.03, 97, 3), (0.12, 22, 3)])
def test_solved_groups_have_exactly_their_share(kappa: float, mixed: int, admitted: int) -> None:
    """43 of 172 + 43 are 0.2, and 0.2 * 172 / 0.8 is less than 43 in floating point."""
    assert count_admitted(kappa, mixed, 100) == admitted
