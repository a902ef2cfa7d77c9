"""Time of verifiers grows in proportion to the length of a completion, whatever a policy repeats in it."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain import verify
from posttrain.path_resolution import known_files
from posttrain.verify import (
    agents,
    audits,
    box_context,
    boxes,
    code,
    gym,
    judging,
    language,
    math,
    notation,
    options,
    regions,
    sql,
    structured,
    word_answers,
)
from posttrain.verify.examples import read_examples
from posttrain.verify.load import load_script

SHORT, LONG = 6_000, 24_000  # characters
SLOW = 0.15  # seconds; shorter times are not compared
TOO_SLOW = 2.0  # seconds for the short text
GROWTH = 9  # of the time for four times the length: 4 if linear, 16 if quadratic


def seconds(call: Callable[[str], Any], text: str) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    call(text)
    return time.process_time() - start


def is_quadratic(call: Callable[[str], Any], unit: str, before: str = "", after: str = "") -> bool:
    """Return whether the time grows faster than the text, in each of three tries."""

    def text(length: int) -> str:
        return before + unit * (length // len(unit)) + after

    for _ in range(3):
        short = seconds(call, text(SHORT))
        if short > TOO_SLOW:
            return True
        long = seconds(call, text(LONG))
        if long < SLOW or long < GROWTH * short:
            return False
    return True


def reward(name: str, **columns: Any) -> Callable[[str], Any]:
    """Return a shipped reward as a function of the completion."""
    script, _, function = name.partition(".")
    loaded = load_script(known_files("rewards", [".py"])[script])[function]
    return lambda text: loaded(text, **columns)


CASES = {
    "audits": (lambda t: audits.read_probabilities(t, 3), [("\n", "", ""), ("1\n", "", "")]),
    "checks": (lambda t: judging.read_checks(t, 3), [("\n", "", ""), (" \n", "1", "")]),
    "referee": (reward("referee.order", truth=[1.0, 0.0]), [("\n", "", ""), (":", "1", ""), ("=", "1", "a")]),
    "boxes": (box_context.unwrap_boxes, [("\\boxed{", "", ""), ("\\boxed{1", "", "}"), ("\\boxed{1}^", "", "")]),
    "formula": (gym.is_formula, [(" ", "", ""), ("\n", "1", "1"), ("** ", "1", "1")]),
    "box tags": (reward("boxes.form", form="box_tag"), [(" ", "", ""), ("\n", "<answer>", "</answer>")]),
    "box form": (
        lambda t: boxes.box_reward(t, [[0, 0, 1, 1]]),
        [("</think><answer>", "<think>", ""), ("<think>", "", "")],
    ),
    "references": (regions.read_regions, [("<ref>", "", ""), ("<|object_ref_start|>", "", "")]),
    "steps": (lambda t: agents.read_step(t, True), [("<planning>", "", ""), ("<action>", "", "")]),
    "assignment": (reward("sat.assignment", formula="A&!B"), [("\\boxed{", "", ""), ("\\boxed", "", "")]),
    "language": (
        lambda t: language.language_share(t, language="en"),
        [("a", "$", "$"), ("\\(", "", ""), ("\\[", "", ""), ("aa ", "$", "$")],
    ),
    "program": (code.program_in, [("```a\nb ", "", ""), ("  ```\n", "```a\n", ""), (" ", "```", "")]),
    "open-r1": (reward("format.structure", mode="open_r1"), [("\n</think>\n<answer>\n", "<think>\n", "")]),
    "json": (structured.object_in, [(" ", "```", ""), ("a", "```", ""), ("\n", "```json", "")]),
    "query": (sql.query_in, [(" ", "```", ""), ("\n", "```sql", "")]),
    "clean": (notation.clean, [(" ", "1", "1"), ("1", "", "a"), ("100 ", "", "1"), ("$", "", "a")]),
    "dates": (lambda t: notation.same_dates(t, "3-4"), [(" ", "1", ""), ("\n", "", "a"), ("-", "1", "")]),
    "words": (lambda t: word_answers.same_words(t, "no"), [(" ", "1", "a"), (",", "a", ""), ("and ", "", "")]),
    "options": (lambda t: options.same(t, "A"), [("$", "", "a"), ("~", "", "a"), ("\\ ", "(A)", "")]),
    "math": (
        lambda t: math.grade(t, "12"),
        [
            *((blank, before, after) for blank in " \n\t\N{NO-BREAK SPACE}" for before, after in (
                ("\\boxed{", "}"), ("\\boxed{1", "2}"), ("\\boxed{\\text{a", "}}"))),
            *((unit, "\\boxed{", "}") for unit in ("1", ",", "(", "\\", "-", "a", "^", "\\frac{", "1,000", ". ")),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_time_is_linear_in_the_text(name: str) -> None:
    call, kinds = CASES[name]
    assert [kind for kind in kinds if is_quadratic(call, *kind)] == []


REPEATED = (" ", "\n", "1", "a", ",", "(", "[", "\\", "$", "**", "```", "\\boxed{", "<think>", "<answer>", "a b. ")
SCRIPTS = sorted({path for path in known_files("rewards", [".py"]).values() if path.stem != "code"})


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_time_of_shipped_rewards_is_linear(script: Path) -> None:
    """With the columns of their first example; programs, judges and records of workflows are left out."""
    for name, examples in read_examples(script).items():
        function = load_script(script)[name]
        takes = inspect.signature(function).parameters
        if hasattr(function, "posttrain_judge_timeout_s") or takes.keys() & {"transcript", "workflow", "parts"}:
            continue
        columns = {key: value for key, value in examples[0].columns.items() if key in takes} | examples[0].params
        call = functools.partial(function, **columns)
        assert [unit for unit in REPEATED if is_quadratic(call, unit)] == [], name


def patterns_of(value: Any) -> Iterator[re.Pattern[str]]:
    """Yield the regular expressions in a value of a module."""
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        yield value
    elif isinstance(value, tuple | list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from patterns_of(inner)


UNITS = (*" \n1a,;\\(){}[$*^_-/=.`<'!|:~", "\\ ", "\\,", "a ", "1,", "\\a", "{}", "aa bb ", "\\text{", "\\frac{")
AROUND = (("", ""), ("1", "1"), ("a", "!x"), ("{", "}x"), ("\\", "\n\0"))
MODULES = sorted(module.name for module in pkgutil.iter_modules(verify.__path__) if module.name != "jail")


@pytest.mark.parametrize("module", MODULES)
def test_no_pattern_takes_exponential_time(module: str) -> None:
    """Else 60 characters would take longer than the universe is old; a linear pattern takes microseconds."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    try:
        for pattern in patterns_of(vars(importlib.import_module(f"posttrain.verify.{module}"))):
            for unit, (start, stop) in itertools.product(UNITS, AROUND):
                text = start + unit * (60 // len(unit)) + stop
                signal.setitimer(signal.ITIMER_REAL, 2.0)
                try:
                    list(pattern.finditer(text))
                    pattern.fullmatch(text)
                except TimeoutError:
                    pytest.fail(f"{pattern.pattern} on {text!r}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_quadratic_time_is_recognized() -> None:
    assert is_quadratic(re.compile(r"\s*x").search, " ")
    assert not is_quadratic(lambda text: [sum(map(ord, text)) for _ in range(200)], " ")
