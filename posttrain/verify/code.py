"""Rewards for programs: run a model's program in the sandbox on tests whose results are compared outside."""

from __future__ import annotations

import ast
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.verify.assert_tests import AssertTest, assert_sources, read_asserts
from posttrain.verify.code_tests import ProgramTest, read_tests
from posttrain.verify.extract import THINK_START, after_think
from posttrain.verify.sandbox import Limits, run_python

Mode = Literal["partial", "binary", "weighted_sum", "pass_fail"]
MODES = ("partial", "binary", "weighted_sum", "pass_fail")

_FENCE_OR_THOUGHT = re.compile(rf"```(?P<language>[^\s`]*+)[^\S\n]*+\n|{re.escape(THINK_START)}")
_FENCE_END = re.compile(r"^[^\S\n]*```|```[^\S\n]*$", re.MULTILINE)
_COMPILES = "import sys\ncompile(sys.stdin.read(), 'main.py', 'exec')\n"


def program_in(completion: str) -> str | None:
    """Return the last non-blank block fenced as Python after the thought, or without any such block the last one fenced
    without a language; None if there is none.

    Nothing after an unclosed `<think>` counts, unless the `<think>` is inside a block and so part of the program. A
    fence closes at the start or the end of a line, so that a program may write ``` in a text.
    """
    labeled = plain = end = None
    text = after_think(completion)
    while (fence := _FENCE_OR_THOUGHT.search(text, 0 if end is None else end.end())) and fence[0] != THINK_START:
        end = _FENCE_END.search(text, fence.end())
        if end is None:
            break
        program = text[fence.end() : end.start()]
        if fence["language"].lower() in ("python", "python3", "py"):
            labeled = program
        elif not fence["language"]:
            plain = program
    last = plain if labeled is None else labeled
    return last if last and last.strip() else None


def code_reward(
    completion: str,
    tests: Sequence[Mapping[str, Any] | str] | Mapping[str, Any] | str | None,
    entry_point: str = "",
    test_setup_code: str = "",
    *,
    mode: Mode = "partial",
    timeout_s: float = 5.0,
    pass_weight: float = 0.1,
    no_code: float = -1.0,
    compile_fail: float = -0.1,
    budget_s: float | None = None,
    memory_mb: int = 512,
    allow_unsandboxed: bool = False,
) -> dict[str, float | None]:
    """Score the completion's program: {"reward", "passed"}, with asserts also "unread"; reward is None without tests.

    tests: in a form of `code_tests` or `assert_tests`; entry_point and test_setup_code are for asserts. A row is scored
    by the asserts that could be read; unread counts the others. A test passes if the program ends within timeout_s
    without an error and prints, or its function returns, what is expected.
    mode: with f = passed / tests, partial: f. binary: 1 if all tests pass. pass_fail: as binary, but stops at the first
    failure. weighted_sum: 1 if all tests pass, plus pass_weight * f; no_code without a program, compile_fail if it does
    not compile (both are 0 in the other modes).
    budget_s: seconds for all tests together; a test with no time left fails.
    Raises SandboxError without a sandbox. Raises ValueError for an unknown mode, and for asserts none of which can be
    read.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    rows, unread = read_any_tests(tests, entry_point, test_setup_code)
    if not rows:
        return {"reward": None, "passed": 0.0}
    parts = {} if unread is None else {"unread": float(unread.total())}
    program = program_in(completion)
    if program is None:
        return {"reward": no_code if mode == "weighted_sum" else 0.0, "passed": 0.0, **parts}
    give_up = None if budget_s is None else time.monotonic() + budget_s
    passed = 0
    for test in rows:
        left = timeout_s if give_up is None else min(timeout_s, give_up - time.monotonic())
        right = left > 0 and passes(program, test, left, memory_mb, allow_unsandboxed)
        passed += right
        if not right and (mode == "pass_fail" or left <= 0):
            break
    share, every = passed / len(rows), float(passed == len(rows))
    if mode == "weighted_sum":
        if not passed and not compiles(program, timeout_s, memory_mb, allow_unsandboxed):
            return {"reward": compile_fail, "passed": 0.0, **parts}
        return {"reward": every + pass_weight * share, "passed": float(passed), **parts}
    return {"reward": share if mode == "partial" else every, "passed": float(passed), **parts}


def read_any_tests(
    tests: Any, entry_point: str = "", test_setup_code: str = ""
) -> tuple[Sequence[ProgramTest | AssertTest], Counter[str] | None]:
    """Return a row's tests, and the number of asserts that could not be read for each reason; None without asserts.

    Raises ValueError, with the reasons, for asserts none of which can be read.
    """
    if (sources := assert_sources(tests)) is None:
        return ([] if tests is None else read_tests(tests)), None
    rows, unread = read_asserts(sources, entry_point, test_setup_code)
    if not rows:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in unread.most_common(5))
        raise ValueError(
            f"none of the row's `tests` can be read: {reasons or 'no assert'}; docs/rewards.md lists what can"
        )
    return rows, unread


def setup_in_prompt(messages: Sequence[Mapping[str, Any]], entry_point: str) -> str:
    """Return the first user message if it is Python that defines the entry point (HumanEval), else ""."""
    text = next((message.get("content") for message in messages if message.get("role") == "user"), None)
    if not entry_point or not isinstance(text, str):
        return ""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return text if any(isinstance(node, ast.FunctionDef) and node.name == entry_point for node in body) else ""


def passes(
    program: str, test: ProgramTest | AssertTest, seconds: float, memory_mb: int = 512, allow_unsandboxed: bool = False
) -> bool:
    """Return whether the program passes a test and exits with 0."""
    limits = Limits(seconds=seconds, memory_mb=memory_mb)
    run, stdin = test.program_and_input(program)
    done = run_python(run, stdin, limits=limits, allow_unsandboxed=allow_unsandboxed)
    return done.ok and test.accepts(done.stdout)


def compiles(program: str, seconds: float = 5.0, memory_mb: int = 512, allow_unsandboxed: bool = False) -> bool:
    """Return whether the program compiles; checked in the sandbox, because a program can crash the compiler."""
    limits = Limits(seconds=seconds, memory_mb=memory_mb)
    return run_python(_COMPILES, program, limits=limits, allow_unsandboxed=allow_unsandboxed).ok
