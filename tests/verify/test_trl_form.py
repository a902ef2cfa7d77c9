"""Rewards written for TRL's trainers, used unchanged; and classes, partials and coroutines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RewardError
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.audit import audit_gold
from posttrain.verify.load import load_reward
from posttrain.verify.score import Sample, Scorer

SCRIPT = """
import asyncio, functools, re


def length(completions, **kwargs):
    return [-abs(20 - len(c)) for c in completions]


def by_name(completions, **kwargs):
    return [float(c == a) for c, a in zip(completions, kwargs["answer"])]


def solution_of(prompts, completions, solution, **kwargs):
    return [1.0 if s == c else 0.0 for c, s in zip(completions, solution)]


def of_messages(completions, prompts, **kwargs):
    assert prompts[0][-1]["role"] == "user"
    return [float(c[0]["role"] == "assistant" and c[0]["content"] == "2") for c in completions]


def everything(completions, prompts, completion_ids, trainer_state, answer, log_extra=None, log_metric=None, **kwargs):
    assert len(completions) == len(prompts) == len(completion_ids) == len(answer) == len(kwargs["colour"])
    log_metric("seen", 1.0)
    log_extra("length", [len(c) for c in completions])
    return [trainer_state.global_step + len(completion_ids[0])] * len(completions)


def in_kwargs(completions, **kwargs):
    kwargs["log_metric"]("seen", 1.0)
    return [float(kwargs["trainer_state"].global_step + len(kwargs["completion_ids"][0]))] * len(completions)


async def awaited(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def some_none(completions, answer, **kwargs):
    return [None if a is None else 1.0 for a in answer]


def scaled(completions, scale, **kwargs):
    return [scale] * len(completions)


half = functools.partial(scaled, scale=0.5)


class Plain:
    def __call__(self, completion, answer):
        return float(completion == answer)


class Made:
    def __init__(self, scale: float, offset: float = 0.0):
        self.scale, self.offset = scale, offset

    def __call__(self, completions, answer, **kwargs):
        return [self.scale * (c == a) + self.offset for c, a in zip(completions, answer)]


class Awaited:
    async def __call__(self, completion):
        return 0.25


class Parent:
    def __init__(self, **options):
        self.options = options

    def __call__(self, completion, *, bonus: float = 0.0):
        return float(self.options.get("base", 0)) + bonus


class NoCall:
    pass


class Fails:
    def __init__(self):
        raise OSError("no such table")

    def __call__(self, completion):
        return 1.0


made = Made(2.0)


def raises(completion, answer):
    return {}["missing"]
"""
Score = Callable[..., list[float | None]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SCRIPT)
    return tmp_path / "mine.py"


@pytest.fixture
def score(script: Path) -> Score:
    """Return the rewards that `use` gives for completions of rows."""

    def scored(use: str, rows: list[dict[str, Any]], texts: list[str], **params: Any) -> list[float | None]:
        sections = [Reward(use=f"{script}:{use}", params=params)]
        samples = [Sample(text, row, prompt="asked", token_ids=(1, 2)) for text, row in zip(texts, rows, strict=True)]
        with Scorer(sections, Scoring(workers=1), script.parent) as scorer:
            scores = scorer.score(samples, step=3)
            assert scores.first_traceback is None, scores.first_traceback
            return scores.components[use]

    return scored


ROWS = [{"prompt": "1+1", "answer": "2", "solution": "2", "colour": "red"}] * 2
TALK = [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}] * 2
MESSAGES = [{"messages": [{"role": "user", "content": "1+1"}], "answer": "2"}] * 2


@pytest.mark.parametrize(
    ("use", "rows", "params", "expected"),
    [
        ("length", ROWS, {}, [-19, -19]),
        ("by_name", ROWS, {}, [1, 0]),
        ("solution_of", ROWS, {}, [1, 0]),
        ("of_messages", TALK, {}, [1, 0]),
        ("of_messages", MESSAGES, {}, [1, 0]),
        ("everything", ROWS, {}, [5, 5]),
        ("in_kwargs", ROWS, {}, [5, 5]),
        ("awaited", ROWS, {}, [0.5, 0.5]),
        ("some_none", [ROWS[0], {**ROWS[1], "answer": None}], {}, [1, None]),
        ("half", ROWS, {}, [0.5, 0.5]),
        ("scaled", ROWS, {"scale": 0.3}, [0.3, 0.3]),
        ("Plain", ROWS, {}, [1, 0]),
        ("Made", ROWS, {"scale": 3.0}, [3, 0]),
        ("Made", ROWS, {"scale": 3.0, "offset": 1.0}, [4, 1]),
        ("Awaited", ROWS, {}, [0.25, 0.25]),
        ("Parent", ROWS, {"base": 1, "bonus": 0.5}, [1.5, 1.5]),
        ("made", ROWS, {}, [2, 0]),
    ],
)
def test_trl_reward_runs_unchanged(
    use: str, rows: Any, params: dict[str, Any], expected: list[float | None], score: Score
) -> None:
    assert score(use, rows, ["2", "3"], **params) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("use", "knows"),
    [
        ("length", False),
        ("in_kwargs", False),
        ("awaited", False),
        ("by_name", True),
        ("solution_of", True),
        ("Plain", True),
    ],
)
def test_unread_kwargs_columns_are_not_audited(use: str, knows: bool, script: Path) -> None:
    """A length reward takes every column and reads none: it does not depend on gold, so it is not audited."""
    assert load_reward(Reward(use=f"{script}:{use}"), None).knows_gold == knows
    rows = [{"prompt": f"{n}+1", "answer": str(n + 1), "solution": str(n + 1)} for n in range(8)]
    with Scorer([Reward(use=f"{script}:{use}")], Scoring(workers=1), None) as scorer:
        assert bool(audit_gold(scorer, rows).skipped) != knows


@pytest.mark.parametrize(
    ("use", "params", "told"),
    [
        ("NoCall", {}, "is a class without `__call__`"),
        ("Fails", {}, "cannot be instantiated: OSError: no such table"),
        ("Made", {}, "cannot be instantiated: TypeError"),
        ("Plain", {"scale": 1.0}, "unknown parameter `scale`"),
    ],
)
def test_class_that_cannot_be_instantiated_is_refused(
    use: str, params: dict[str, Any], told: str, script: Path
) -> None:
    with pytest.raises(RewardError, match=told):
        load_reward(Reward(use=f"{script}:{use}", params=params), None)


def test_exception_on_gold_is_reported_with_its_line(script: Path) -> None:
    raised = pytest.raises(RewardError, match=r"every call on row .* raised")
    with Scorer([Reward(use=f"{script}:raises")], Scoring(workers=1), None) as scorer, raised as error:
        audit_gold(scorer, [{"uid": "r1", "prompt": "1+1", "answer": "2"}])
    assert "KeyError: 'missing'" in str(error.value)
    assert f'File "{script}", line ' in str(error.value)


def test_exception_in_a_class_is_reported_with_its_traceback(script: Path) -> None:
    """`raise` in the `__call__` of a TRL-style reward: the run shows the line of the script."""
    text = "class Boom:\n    def __call__(self, completions, **kwargs):\n        raise KeyError('colour')\n"
    (script.parent / "boom.py").write_text(text)
    with Scorer([Reward(use="./boom.py:Boom")], Scoring(workers=1), script.parent) as scorer:
        scores = scorer.score([Sample("2", ROWS[0], prompt="asked")], step=1)
    assert scores.first_traceback is not None
    assert 'boom.py", line 3, in __call__' in scores.first_traceback and "KeyError: 'colour'" in scores.first_traceback
