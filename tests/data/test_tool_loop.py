"""Which tokens of a rollout are trained on."""

from __future__ import annotations

from posttrain.data.tool_loop import layout


def test_only_model_tokens_are_trained_on() -> None:
    found = layout([("model", 2), ("injected", 1), ("tool", 1), ("model", 1)], 6)
    assert found.mask == [True, True, False, False, True, False]
    assert (found.length, found.total, found.truncated, found.tool_calls) == (3, 5, False, 1)


def test_truncated_row_is_marked_as_truncated() -> None:
    found = layout([("model", 2), ("tool", 3), ("model", 1)], 4)
    assert found == ([True, True, False, False], 2, 4, True, 1)
    assert layout([("model", 4), ("tool", 3)], 4).tool_calls == 0


def test_rollout_without_an_answer_is_truncated() -> None:
    assert layout([("model", 1), ("tool", 1)], 4).truncated
    assert layout([("model", 1), ("tool", 0)], 4) == ([True, False, False, False], 1, 1, False, 0)
    assert layout([], 2) == ([False, False], 0, 0, False, 0)
