"""Named scores -> rewards, by hand. Two groups of three rows: 0 0 0 1 1 1."""

from __future__ import annotations

import pytest

from posttrain.errors import RewardError
from posttrain.recipe.section import OnNone
from posttrain.verify.score import combine

GROUPS = [0, 0, 0, 1, 1, 1]
FORM = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
# Group 0: nobody has a score (a maths verifier on a code prompt). Group 1: one row lacks one.
MATHS = [None, None, None, 1.0, None, 0.0]


def both(policy: OnNone) -> list[float | None]:
    return combine(
        {"maths": MATHS, "form": FORM}, {"maths": 1.0, "form": 0.5}, {"maths": policy, "form": "auto"}, GROUPS
    )


def test_auto_leaves_the_component_out_for_a_group_and_skips_single_rows() -> None:
    """Group 0: only form counts: 0.5, 0, 0.5. Group 1: 1 + 0.5, skipped, 0 + 0.5."""
    assert both("auto") == [0.5, 0.0, 0.5, 1.5, None, 0.5]


def test_skip_row() -> None:
    assert both("skip_row") == [None, None, None, 1.5, None, 0.5]


def test_ignore_component() -> None:
    assert both("ignore_component") == [0.5, 0.0, 0.5, 1.5, 0.0, 0.5]


def test_zero() -> None:
    assert both("zero") == [0.5, 0.0, 0.5, 1.5, 0.0, 0.5]


def test_error_names_the_row() -> None:
    with pytest.raises(RewardError, match="maths returned None for row 0"):
        both("error")
    with pytest.raises(RewardError, match="row seven"):
        combine({"a": [None]}, {"a": 1.0}, {"a": "error"}, [0], uids=["seven"])


@pytest.mark.parametrize(
    ("policy", "expected"), [("auto", None), ("skip_row", None), ("ignore_component", None), ("zero", 0.0)]
)
def test_a_row_without_any_component_is_not_scored(policy: OnNone, expected: float | None) -> None:
    assert combine({"a": [None]}, {"a": 2.0}, {"a": policy}, [0]) == [expected]


def test_a_failed_call_is_never_a_score_whatever_on_none_says() -> None:
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
    """Row 0 failed, rows 1 and 2 abstained: the group has no score, so they keep their other component."""
    rewards = combine(
        {"a": [None, None, None], "b": [1.0, 2.0, 3.0]},
        {"a": 1.0, "b": 1.0},
        {"a": "auto", "b": "auto"},
        [0, 0, 0],
        failed={"a": [True, False, False]},
    )
    assert rewards == [None, 2.0, 3.0]


def test_weight_zero_neither_counts_nor_skips() -> None:
    rewards = combine(
        {"a": [None, 5.0], "b": [1.0, 2.0]},
        {"a": 0.0, "b": 1.0},
        {"a": "error", "b": "auto"},
        [0, 0],
        failed={"a": [True, False]},
    )
    assert rewards == [1.0, 2.0]


def test_groups_may_have_any_ids_and_sizes() -> None:
    rewards = combine({"a": [None, 1.0, None]}, {"a": 1.0}, {"a": "auto"}, [7, -3, -3])
    assert rewards == [None, 1.0, None]


def test_negative_weights_and_fractions_add_up() -> None:
    rewards = combine({"a": [0.5], "b": [2.0]}, {"a": 2.0, "b": -0.25}, {"a": "auto", "b": "auto"}, [0])
    assert rewards == [0.5]


def test_a_condition_closes_a_component_and_a_clip_limits_it() -> None:
    """length 3 is clipped to 1; it counts where accuracy is at least 1: 1 + 1, 0, 0.5 + 0, and None is no accuracy."""
    rewards = combine(
        {"accuracy": [1.0, 0.0, 0.5, None], "length": [3.0, 3.0, None, 3.0]},
        {"accuracy": 1.0, "length": 1.0},
        {"accuracy": "ignore_component", "length": "skip_row"},
        [0, 0, 0, 0],
        clips={"length": (-1.0, 1.0)},
        conditions={"length": ("accuracy", 1.0)},
    )
    assert rewards == [2.0, 0.0, 0.5, 0.0]


def test_a_condition_that_failed_leaves_the_row_unscored() -> None:
    """Accuracy is only logged; where its call timed out nobody knows whether the length counts, and 0 is no answer."""
    rewards = combine(
        {"accuracy": [1.0, None, None], "length": [3.0, 3.0, 3.0]},
        {"accuracy": 0.0, "length": 1.0},
        {"accuracy": "auto", "length": "auto"},
        [0, 0, 0],
        failed={"accuracy": [False, True, False]},
        conditions={"length": ("accuracy", 1.0)},
    )
    assert rewards == [3.0, None, 0.0]


def test_a_condition_sees_the_clipped_score_of_no_other() -> None:
    """The gate is asked on what its component returned, not on what its clip leaves."""
    rewards = combine(
        {"a": [5.0], "b": [1.0]},
        {"a": 0.0, "b": 1.0},
        {"a": "auto", "b": "auto"},
        [0],
        clips={"a": (0.0, 1.0)},
        conditions={"b": ("a", 5.0)},
    )
    assert rewards == [1.0]
