"""How `EXAMPLES` of a reward script are found, run and compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RewardError
from posttrain.verify.examples import matches_expected, read_examples, run_examples

Script = Callable[..., Path]


def test_list_of_examples_applies_to_the_only_function(script: Script) -> None:
    path = script(
        """
        from posttrain.verify.math import grade  # imported: not this script's
        def helper(text): return text.strip()
        def score(completion, answer): return float(helper(completion) == answer)
        EXAMPLES = [(" a ", {"answer": "a"}, 1), ("b", {"answer": "a"}, 1.0)]
        """
    )
    outcomes = run_examples(path)
    assert [(o.function, o.ok, o.outcome) for o in outcomes] == [("score", True, "1.0"), ("score", False, "0.0")]


def test_dict_of_examples_names_functions_and_passes_params(script: Script) -> None:
    path = script(
        """
        def one(completion, *, scale=1.0): return scale
        def two(completion, level): return {"reward": level, "half": level / 2}
        EXAMPLES = {
            "one": [("", {}, 1.0), ("", {}, 3.0, {"scale": 3.0})],
            "two": [("", {"level": 2}, {"half": 1.0}), ("", {"level": 2}, 2.0), ("", {"level": 2}, {"half": 2.0})],
        }
        """
    )
    assert [o.ok for o in run_examples(path)] == [True, True, True, True, False]
    assert {o.function for o in run_examples(path, "two")} == {"two"}


def test_errors_and_time_outs_are_not_scores(script: Script) -> None:
    path = script(
        """
        def score(completion):
            if completion == "raise":
                raise ValueError("boom")
            while completion == "loop":
                pass
            return "text"
        EXAMPLES = [("raise", {}, 0.0), ("loop", {}, None), ("type", {}, 0.0)]
        """
    )
    assert [(o.ok, o.outcome) for o in run_examples(path, timeout_s=1.0)] == [
        (False, "error: ValueError: boom"),
        (False, "timeout: "),
        (False, "broken: returned 'text' (str), must return a number or None"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(completion): return 1", "no EXAMPLES"),
        ("def f(completion): return 1\ndef g(completion): return 1\nEXAMPLES = [('', {}, 1)]", "2 reward functions"),
        (
            "def f(completion): return 1\nEXAMPLES = {'g': [('', {}, 1)]}",
            "EXAMPLES of a function g, which the script does not have\n  functions: f",
        ),
        ("def f(completion): return 1\nEXAMPLES = [('', {})]", "not an example"),
        ("def f(completion, a): return 1\nEXAMPLES = [('', {}, 1)]", "columns are missing: a"),
        ("def f(completion): return 1\nEXAMPLES = [('', {'b': 1}, 1)]", "does not take b"),
        ("def f(completion, *, a=1): return 1\nEXAMPLES = [('', {}, 1, {'b': 1})]", "unknown parameter `b`"),
    ],
)
def test_malformed_examples_are_refused(text: str, message: str, script: Script) -> None:
    with pytest.raises(RewardError, match=message):
        run_examples(script(text))


def test_examples_of_one_function(script: Script) -> None:
    path = script("def f(completion): return 1\ndef g(completion): return 2\nEXAMPLES = {'f': [('', {}, 1)]}")
    assert list(read_examples(path, "f")) == ["f"]
    with pytest.raises(RewardError, match=r"has no function h\n  it has: f, g"):
        read_examples(path, "h")
    with pytest.raises(RewardError, match=r"no EXAMPLES of the function g\n  EXAMPLES of: f\n  hint: add e.g."):
        read_examples(path, "g")


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1.0, 1, True),
        (0.1 + 0.2, 0.3, True),
        (0.5, 0.51, False),
        (None, None, True),
        (None, 0.0, False),
        (0.0, None, False),
        ({"reward": 1.0, "a": 2.0}, 1.0, True),
        ({"reward": 1.0, "a": 2.0}, {"a": 2.0}, True),
        ({"reward": 1.0}, {"a": 2.0}, False),
        (1.0, {"reward": 1.0}, False),
    ],
)
def test_agrees(value: Any, expected: Any, same: bool) -> None:
    assert matches_expected(value, expected) is same
