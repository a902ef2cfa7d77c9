"""Tests of programs in the forms that data sets have, and how one is run and judged.

    [{"input": "2 3\\n", "output": "5"}]                             standard input and output
    [{"fn_name": "add", "input": [2, 3], "output": 5}]              a call of a function or of a method of `Solution`
    {"inputs": [[2, 3]], "outputs": [5], "fn_name": "add"}          the same in columns (APPS, TACO, PRIME)
    [{"testtype": "functional", "input": "2\\n3", "output": "5", "metadata": {"func_name": "add"}}]      LiveCodeBench

A called function is judged by what it returns, outside its process, so that the program never holds the expected value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from posttrain.verify.function_calls import read_outcomes, write_input
from posttrain.verify.structured import from_json, same_json

_BLANK_START = re.compile(r"\A\s*\n")  # outputs of CodeContests and TACO may begin with a line break
TOLERANCE = 1e-6  # of a float that a called function returns, relative and absolute


@dataclass(frozen=True)
class ProgramTest:
    """One test. function "": `given` is the standard input, `expected` the output. Else: arguments and return value;
    wrapped: `expected` may also be a list of one value, the value itself (APPS)."""

    given: Any
    expected: Any
    function: str = ""
    wrapped: bool = False

    def program_and_input(self, program: str) -> tuple[str, str]:
        """Return what to run for this test, and its standard input."""
        if not self.function:
            return program, self.given
        return write_input(program, [(self.function, self.given, {})])

    def accepts(self, stdout: str) -> bool:
        """Return whether this output passes the test."""
        if not self.function:
            return same_output(stdout, self.expected)
        try:
            ((kind, *returned),) = read_outcomes(stdout, 1)
            value = json.loads(json.dumps(returned[0]))
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            return False
        if kind != "returned":
            return False
        golds = [self.expected, *(self.expected if self.wrapped else [])]
        return any(same_value(value, gold) for gold in golds)


def read_tests(tests: Any) -> list[ProgramTest]:
    """Convert the tests of a row to `ProgramTest`s. Raises ValueError for a form that is not in this module's list."""
    tests = from_json(tests, (list, tuple, Mapping), "a list of tests, or inputs and outputs", "tests")
    if not isinstance(tests, Mapping):
        return [read_test(test) for test in tests]
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError("`tests` needs as many `inputs` as `outputs`")
    shared = {"fn_name": tests.get("fn_name")}
    return [read_test({"input": given, "output": gold, **shared}) for given, gold in zip(inputs, outputs, strict=True)]


def read_test(test: Mapping[str, Any]) -> ProgramTest:
    """Convert one test. Raises ValueError for a test without input and output, or a call without its function."""
    if not isinstance(test, Mapping) or "input" not in test or "output" not in test:
        raise ValueError(f"a test in `tests` must have `input` and `output`, not {test!r:.80}")
    given, gold, kind = test["input"], test["output"], test.get("testtype") or test.get("type")
    if kind not in (None, "stdin", "stdin_stdout", "functional", "function_call"):
        raise ValueError(
            f"a test in `tests` is of type {kind!r}; known: stdin, stdin_stdout, functional, function_call"
        )
    calls = kind in ("functional", "function_call")
    function = _function_of(test, calls)
    if calls and not function:
        raise ValueError("a test in `tests` calls a function and does not name it: add `fn_name`")
    if not function or kind in ("stdin", "stdin_stdout"):
        return ProgramTest(_lines(given), _lines(gold))
    if not isinstance(given, str):
        if not isinstance(given, list | tuple):
            raise ValueError(
                f"the `input` of a test that calls a function must be a list of arguments, not {given!r:.80}"
            )
        return ProgramTest(list(given), gold, function, wrapped=isinstance(gold, list | tuple) and len(gold) == 1)
    try:
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
        return ProgramTest(arguments, json.loads(gold) if isinstance(gold, str) else gold, function)
    except ValueError:
        raise ValueError(
            f"`input` and `output` of a test that calls a function must be JSON, not {given!r:.60}"
        ) from None


def _function_of(test: Mapping[str, Any], calls: bool) -> str:
    """Return the function that a test calls, "" if it calls none. calls: the test says that it does."""
    named = test.get("fn_name") or test.get("func_name")
    if calls and not named and test.get("metadata"):
        named = from_json(test["metadata"], Mapping, "an object", "metadata").get("func_name")
    return str(named or "")


def _lines(value: Any) -> str:
    """Return the text of an input or output, which some data sets hold as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def same_output(stdout: str, expected: str) -> bool:
    """Return whether two outputs have the same lines but for blanks at line ends and blank lines around them.

    A line of numbers is compared number by number, exactly (`0.50` is `0.5`), as LiveCodeBench does.
    """
    found, wanted = output_lines(stdout), output_lines(expected)
    return len(found) == len(wanted) and all(map(_same_line, found, wanted))


def output_lines(text: str) -> list[str]:
    """Split a text into lines without trailing blanks and without blank lines at the beginning and the end."""
    return [line.rstrip() for line in _BLANK_START.sub("", text.rstrip()).split("\n")]


def _same_line(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    try:
        return bool(wanted) and list(map(Decimal, found.split())) == list(map(Decimal, wanted.split()))
    except InvalidOperation:
        return False


def same_value(value: Any, gold: Any) -> bool:
    """Return whether JSON values are equal, floats within TOLERANCE."""
    if isinstance(value, list) and isinstance(gold, list | tuple):
        return len(value) == len(gold) and all(map(same_value, value, gold))
    floats = isinstance(value, float) or isinstance(gold, float)
    if floats and not isinstance(value, bool) and isinstance(value, int | float) and isinstance(gold, int | float):
        return math.isclose(value, gold, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return same_json(value, gold)
