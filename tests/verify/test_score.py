"""Scoring: from samples to components, rewards and correctness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RewardError
from posttrain.verify.load import BUILT_INS
from posttrain.verify.reward_inputs import built_in
from posttrain.verify.score import Sample, Scorer

Scorers = Callable[..., Scorer]
Samples = Callable[..., list[Sample]]


def test_components_are_named_weighted_and_summed(scorer: Scorers) -> None:
    """Right answer and format: 1 + 0.1 * 1; wrong answer: 0.1; right answer without the format: 1."""
    rewards = (
        {"use": "math.accuracy", "params": {"extract": ["answer_tag"]}},
        {"use": "format.structure", "weight": 0.1, "name": "form"},
    )
    right, wrong, bare = (
        "<think>a</think><answer>7</answer>",
        "<think>a</think><answer>8</answer>",
        "<answer>7</answer>",
    )
    with scorer(*rewards) as s:
        scores = s.score([Sample(text, {"answer": "7"}) for text in (right, wrong, bare)])
    assert scores.components == {"accuracy": [1.0, 0.0, 1.0], "form": [1.0, 1.0, 0.0]}
    assert scores.rewards == pytest.approx([1.1, 0.1, 1.0])
    assert scores.correct == [True, False, True]
    assert scores.errors == scores.timeouts == scores.abstained == {"accuracy": 0, "form": 0}
    assert scores.first_traceback is None
    assert scores.seconds > 0


def test_parts_are_logged_and_never_summed(script: Callable[..., Path], scorer: Scorers, samples: Samples) -> None:
    path = script(
        """
        def parts(completion, level):
            return {"reward": level, "style": 10, "rare": 5 if level > 1 else None} if level else None
        """
    )
    with scorer({"use": f"{path}:parts", "weight": 2.0}) as s:
        scores = s.score(samples([{"level": 1}, {"level": 2}, {"level": 0}]))
    assert scores.components == {
        "parts": [1.0, 2.0, None],
        "parts/style": [10.0, 10.0, None],
        "parts/rare": [None, 5.0, None],
    }
    assert scores.rewards == [2.0, 4.0, None]
    assert scores.abstained == {"parts": 1}


def test_correct_is_passed_to_rewards_that_ask_for_it(scorer: Scorers) -> None:
    """truncation reads `correct` from accuracy, although it comes first in the recipe; accuracy is only logged."""
    rewards = ({"use": "length.truncation", "params": {"max_length": 10}}, {"use": "math.accuracy", "weight": 0.0})
    rows = [(r"\boxed{7}", "7", 5), (r"\boxed{7}", "7", 11), (r"\boxed{8}", "7", 5), (r"\boxed{7}", "", 5)]
    with scorer(*rewards) as s:
        assert s.correctness == 1
        scores = s.score([Sample(c, {"answer": a}, token_count=n) for c, a, n in rows])
    assert scores.components == {"truncation": [1.0, 0.0, 0.0, None], "accuracy": [1.0, 1.0, 0.0, None]}
    assert scores.correct == [True, True, False, None]
    assert scores.rewards == [1.0, 0.0, 0.0, None]


def test_correct_at_sets_the_threshold_of_correctness(
    script: Callable[..., Path], scorer: Scorers, samples: Samples
) -> None:
    path = script("def share(completion, x): return x")
    with scorer(f"{path}:share", correct_at=0.5) as s:
        assert s.score(samples([{"x": 0.4}, {"x": 0.5}, {"x": None}])).correct == [False, True, None]


def test_component_marked_correct_decides_correctness(scorer: Scorers) -> None:
    rewards = ("format.structure", {"use": "math.accuracy", "correct": True})
    with scorer(*rewards) as s:
        assert s.score([Sample(r"\boxed{7}", {"answer": "7"})]).correct == [True]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (("math.accuracy", "math.accuracy"), "2 rewards are called `accuracy`"),
        (({"use": "length.truncation", "params": {"max_length": 5}},), "no reward decides it"),
        (({"use": "math.accuracy", "correct": True}, {"use": "format.structure", "correct": True}), "several rewards"),
        (
            ("math.accuracy", {"use": "length.truncation", "params": {"max_length": 5}, "correct": True}),
            "cannot decide what is correct",
        ),
    ],
)
def test_ambiguous_correctness_is_refused(rewards: tuple[Any, ...], message: str, scorer: Scorers) -> None:
    with pytest.raises(RewardError, match=message):
        scorer(*rewards)


def test_none_for_a_whole_group_drops_the_component(scorer: Scorers) -> None:
    """The math verifier has no score for group 1 (no answers), so only the format counts there."""
    rewards = ("math.accuracy", {"use": "format.structure", "weight": 0.5})
    good = "<think>a</think><answer>\\boxed{7}</answer>"
    with scorer(*rewards) as s:
        scores = s.score(
            [
                Sample(good, {"answer": "7"}, group=0),
                Sample(good, {"answer": ""}, group=0),
                Sample(good, {"answer": None}, group=1),
                Sample("", {}, group=1),
            ]
        )
    assert scores.rewards == [1.5, None, 0.5, 0.0]
    assert scores.abstained == {"accuracy": 3, "structure": 0}


def test_on_none_error_names_the_row(scorer: Scorers, samples: Samples) -> None:
    with scorer({"use": "math.accuracy", "on_none": "error"}) as s, pytest.raises(RewardError, match="None for row r1"):
        s.score(samples([{"answer": "7"}, {"answer": ""}]))


def test_no_samples_give_no_scores(scorer: Scorers) -> None:
    with scorer("math.accuracy") as s:
        scores = s.score([])
    assert scores.components == {"accuracy": []}
    assert scores.rewards == scores.correct == []


def test_built_in_arguments() -> None:
    sample = Sample(
        "c",
        {"uid": "u", "prompt": "2+3"},
        prompt="<user>2+3<think>\n",
        finish="length",
        token_count=9,
        token_ids=(5, 6),
        token_ends=(1, 1),
    )
    expected: dict[str, Any] = {
        "prompt": "<user>2+3<think>\n",
        "messages": [{"role": "user", "content": "2+3"}],
        "finish_reason": "length",
        "truncated": True,
        "token_count": 9,
        "step": 4,
        "correct": None,
        "prefilled_think": True,
        "token_ids": [5, 6],
        "token_ends": [1, 1],
    }
    assert {name: built_in(name, sample, 4, None) for name in expected} == expected
    told = Sample("c", {"messages": [{"role": "user", "content": "hi"}]}, prompt="no thought")
    assert built_in("messages", told, 0, None) == [{"role": "user", "content": "hi"}]
    assert built_in("prefilled_think", told, 0, None) is False


def test_every_built_in_argument_of_a_plain_completion() -> None:
    """Arguments about several turns are None, empty, or the completion."""
    plain = Sample("c", {"prompt": "p"}, prompt="<user>p")
    found = {name: built_in(name, plain, 0, True) for name in BUILT_INS}
    transcript, workflow = found.pop("transcript"), found.pop("workflow")
    assert found == {
        **{"prompt": "<user>p", "messages": [{"role": "user", "content": "p"}], "prefilled_think": False},
        **{"finish_reason": "stop", "truncated": False, "token_count": 0, "token_ids": [], "token_ends": []},
        **{"step": 0, "correct": True, "tool_calls": None, "turns": 1, "world_score": None},
        **{"parts": ["c"], "turn_rewards": []},
    }
    assert [(message.role, message.text) for message in transcript] == [("prompt", "<user>p"), ("model", "c")]
    assert workflow.mine.text == "c"


def test_prefilled_thought_satisfies_the_format(scorer: Scorers) -> None:
    with scorer("format.structure") as s:
        text = "a</think><answer>7</answer>"
        assert s.score([Sample(text, {}, prompt="q<think>"), Sample(text, {}, prompt="q")]).rewards == [1.0, 0.0]


def test_optional_columns_missing_from_a_row_keep_their_default(
    script: Callable[..., Path], scorer: Scorers, samples: Samples
) -> None:
    path = script("def scaled(completion, factor=3.0): return factor")
    with scorer(f"{path}:scaled") as s:
        assert s.score(samples([{"factor": 2.0}, {"factor": None}, {}])).rewards == [2.0, 3.0, 3.0]


def test_step_is_passed_on(script: Callable[..., Path], scorer: Scorers, samples: Samples) -> None:
    path = script("def now(completion, step): return step")
    with scorer(f"{path}:now") as s:
        assert s.score(samples([{}]), step=17).rewards == [17.0]


BATCHED = """
    from posttrain.verify.contract import batched

    @batched{size}
    def ranked(completions, level, style=None, *, scale=1.0):
        if "raise" in completions:
            raise ValueError("no")
        best = max(level)
        return [None if x is None else {{"reward": scale * (x == best), "rows": len(level)}} for x in level]
"""


@pytest.mark.parametrize(
    ("size", "rows", "best"),
    [("", 5, [0, 0, 0, 0, 2.0]), ("()", 5, [0, 0, 0, 0, 2.0]), ("(2)", 2, [0, 2.0, 0, 2.0, 2.0])],
)
def test_batched_reward_gets_many_rows_in_one_call(
    script: Callable[..., Path], scorer: Scorers, samples: Samples, size: str, rows: int, best: list[float]
) -> None:
    path = script(BATCHED.format(size=size))
    with scorer({"use": f"{path}:ranked", "params": {"scale": 2.0}}) as s:
        scores = s.score(samples([{"level": x} for x in (0, 1, 2, 3, 4)]))
    assert scores.components["ranked"] == best
    assert scores.components["ranked/rows"][0] == rows


def test_batch_that_raises_costs_only_its_own_rows(
    script: Callable[..., Path], scorer: Scorers, samples: Samples
) -> None:
    path = script(BATCHED.format(size="(2)"))
    made = samples([{"level": x} for x in (0, 1, 2, 3)])
    with scorer({"use": f"{path}:ranked"}, max_error_rate=1.0) as s:
        scores = s.score([made[0], made[1], Sample("raise", {"level": 2}), made[3]])
    assert scores.components["ranked"] == [0.0, 1.0, None, None]
    assert scores.errors == {"ranked": 2}
    assert "ValueError: no" in (scores.first_traceback or "")


def test_batch_of_the_wrong_length_is_reported(script: Callable[..., Path], scorer: Scorers, samples: Samples) -> None:
    path = script(
        """
        from posttrain.verify.contract import batched

        @batched()
        def one(completions):
            return [1.0]
        """
    )
    with scorer({"use": f"{path}:one"}) as s, pytest.raises(RewardError, match=r"batch from row r0.*a list of 3"):
        s.score(samples([{}, {}, {}]))


def test_batched_needs_completions(script: Callable[..., Path], scorer: Scorers) -> None:
    path = script("from posttrain.verify.contract import batched\n\n@batched()\ndef f(completion):\n    return 1.0\n")
    with pytest.raises(RewardError, match="takes no `completions`"):
        scorer({"use": f"{path}:f"})


def test_conditions_and_clips_of_the_recipe(script: Callable[..., Path], scorer: Scorers, samples: Samples) -> None:
    """style is 9, clipped to 2, and counts if right is 1."""
    path = script("def right(completion, ok):\n    return ok\n\ndef style(completion):\n    return 9\n")
    style = {"use": f"{path}:style", "clip": [0, 2], "condition": {"on": "right"}}
    with scorer({"use": f"{path}:right"}, style) as s:
        scores = s.score(samples([{"ok": 1}, {"ok": 0}]))
    assert scores.rewards == [3.0, 0.0]
    assert scores.components["style"] == [9.0, 9.0]
    with pytest.raises(RewardError, match="did you mean `right`"):
        scorer({"use": f"{path}:right"}, {**style, "condition": {"on": "rihgt"}})
    with pytest.raises(RewardError, match="on itself"):
        scorer({"use": f"{path}:right"}, {**style, "condition": {"on": "style"}})
    with pytest.raises(RewardError, match=r"clip \[2, 0\] is empty"):
        scorer({"use": f"{path}:right"}, {**style, "clip": [2, 0]})
