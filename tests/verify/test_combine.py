"""Combining named scores into rewards, computed by hand. Two groups of three rows: 0 0 0 1 1 1."""

from __future__ import annotations

import pytest

from posttrain.errors import RewardError
from posttrain.recipe.section import OnNone
from posttrain.verify.score import combine

GROUPS = [0, 0, 0, 1, 1, 1]
FORM = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
# Group 0: no row has a score (a math verifier on a code prompt). Group 1: one row has none.
MATHS = [None, None, None, 1.0, None, 0.0]


def both(policy: OnNone) -> list[float | None]:
    return combine(
        {"maths": MATHS, "form": FORM}, {"maths": 1.0, "form": 0.5}, {"maths": policy, "form": "auto"}, GROUPS
    )


def test_auto_drops_the_component_for_a_group_and_skips_single_rows() -> None:
    """Group 0: only the format counts: 0.5, 0, 0.5. Group 1: 1 + 0.5, skipped, 0 + 0.5."""
    assert both("auto") == [0.5, 0.0, 0.5, 1.5, None, 0.5]


def test_skip_row() -> None:
    assert both("skip_row") == [None, None, None, 1.5, None, 0.5]


def test_ignore_component() -> None:
    assert both("ignore_component") == [0.5, 0.0, 0.5, 1.5, 0.0, 0.5]


def test_zero() -> None:
    assert both("zero") == [0.5, 0.0, 0.5, 1.5, 0.0, 0.5]


def test_on_none_error_names_the_row() -> None:
    with pytest.raises(RewardError, match="maths returned None for row 0"):
        both("error")
    with pytest.raises(RewardError, match="row seven"):
        combine({"a": [None]}, {"a": 1.0}, {"a": "error"}, [0], uids=["seven"])


@pytest.mark.parametrize(
    ("policy", "expected"), [("auto", None), ("skip_row", None), ("ignore_component", None), ("zero", 0.0)]
)
def test_row_without_any_component_is_unscored(policy: OnNone, expected: float | None) -> None:
    assert combine({"a": [None]}, {"a": 2.0}, {"a": policy}, [0]) == [expected]


def test_failed_call_is_never_a_score_for_any_on_none() -> None:
    policies: list[OnNone] = ["auto", "skip_row", "ignore_component", "zero", "error"]
    for policy in policies:
        rewards = combine(
            {"a": [1.0, None], "b": [1.0, 1.0]},
            {"a": 1.0, "b": 1.0},
            {"a": policy, "b": "auto"},
            [0, 0],
            failed={"a": [False, True]},
        )
        assert rewards == [2.0, None], policy


def test_failed_rows_do_not_decide_whether_a_group_abstains() -> None:
    """Row 0 failed, rows 1 and 2 abstained: the group has no score, so rows 1 and 2 keep their other component."""
    rewards = combine(
        {"a": [None, None, None], "b": [1.0, 2.0, 3.0]},
        {"a": 1.0, "b": 1.0},
        {"a": "auto", "b": "auto"},
        [0, 0, 0],
        failed={"a": [True, False, False]},
    )
    assert rewards == [None, 2.0, 3.0]


def test_component_of_weight_zero_neither_counts_nor_skips_rows() -> None:
    rewards = combine(
        {"a": [None, 5.0], "b": [1.0, 2.0]},
        {"a": 0.0, "b": 1.0},
        {"a": "error", "b": "auto"},
        [0, 0],
        failed={"a": [True, False]},
    )
    assert rewards == [1.0, 2.0]


def test_groups_can_have_any_ids_and_sizes() -> None:
    rewards = combine({"a": [None, 1.0, None]}, {"a": 1.0}, {"a": "auto"}, [7, -3, -3])
    assert rewards == [None, 1.0, None]


def test_negative_and_fractional_weights_are_summed() -> None:
    rewards = combine({"a": [0.5], "b": [2.0]}, {"a": 2.0, "b": -0.25}, {"a": "auto", "b": "auto"}, [0])
    assert rewards == [0.5]


def test_condition_gates_a_component_and_clip_bounds_it() -> None:
    """length 3 is clipped to 1 and counts if accuracy is at least 1: 1 + 1, 0, 0.5 + 0; accuracy None is not 1."""
    rewards = combine(
        {"accuracy": [1.0, 0.0, 0.5, None], "length": [3.0, 3.0, None, 3.0]},
        {"accuracy": 1.0, "length": 1.0},
        {"accuracy": "ignore_component", "length": "skip_row"},
        [0, 0, 0, 0],
        clips={"length": (-1.0, 1.0)},
        conditions={"length": ("accuracy", 1.0)},
    )
    assert rewards == [2.0, 0.0, 0.5, 0.0]


def test_failed_condition_leaves_the_row_unscored() -> None:
    """Accuracy is only logged; if its call timed out, it is unknown whether the length counts, and 0 would be wrong."""
    rewards = combine(
        {"accuracy": [1.0, None, None], "length": [3.0, 3.0, 3.0]},
        {"accuracy": 0.0, "length": 1.0},
        {"accuracy": "auto", "length": "auto"},
        [0, 0, 0],
        failed={"accuracy": [False, True, False]},
        conditions={"length": ("accuracy", 1.0)},
    )
    assert rewards == [3.0, None, 0.0]


def test_condition_reads_the_unclipped_score() -> None:
    """The condition is tested on the score that its component returned, before clipping."""
    rewards = combine(
        {"a": [5.0], "b": [1.0]},
        {"a": 0.0, "b": 1.0},
        {"a": "auto", "b": "auto"},
        [0],
        clips={"a": (0.0, 1.0)},
        conditions={"b": ("a", 5.0)},
    )
    assert rewards == [1.0]
