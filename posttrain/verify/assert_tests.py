"""Tests made of asserts (MBPP, HumanEval, KodCode, AceCode, LeetCode), read as calls and checks of their results.

    ["assert add(2, 3) == 5", "assert abs(half(1) - 0.5) < 1e-9"]
    "def check(candidate):\\n    assert candidate(2, 3) == 5"                    with `entry_point`: the candidate
    "from solution import add\\ndef test_add():\\n    result = add(2, 3)\\n    assert result == 5"

Run beside a program, an assert proves nothing: the program may redefine `__eq__` or exit first. Here only the calls run
in the program's process; the expression of an assert is evaluated outside, on the plain values that the calls returned.
A test that cannot be read in this way is not run.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from posttrain.verify.assert_reader import AssertReader, TestScope, UnreadableTest, evaluate_compiled
from posttrain.verify.function_calls import Call, read_outcomes, write_input


@dataclass(frozen=True)
class AssertTest:
    """Calls of a program, and expressions that must all be true of their results.

    checks: read `_results[i]`, the value that call i returned, and `_constants`. setup: code that runs before the
    program.
    """

    calls: tuple[Call, ...]
    checks: tuple[CodeType, ...]
    constants: Sequence[Any] = field(default=(), compare=False)
    setup: str = ""

    def program_and_input(self, program: str) -> tuple[str, str]:
        """Return what to run for this test, and its standard input, which holds no expected value."""
        return write_input(program, self.calls, self.setup)

    def accepts(self, stdout: str) -> bool:
        """Return whether the outcomes that this output reports pass every check."""
        try:
            results = _Results(read_outcomes(stdout, len(self.calls)))
            names = {"_results": results, "_raised": results.has_raised}
            return all(evaluate_compiled(check, self.constants, **names) for check in self.checks)
        except Exception:  # as an assert of these values would raise
            return False


class _Results:
    """Outcomes of a test's calls; a call that returned nothing readable has no item."""

    def __init__(self, outcomes: Sequence[Sequence[Any]]) -> None:
        self.outcomes = outcomes

    def __getitem__(self, number: int) -> Any:
        kind, *values = self.outcomes[number]
        if kind != "returned":
            raise LookupError(f"call {number} {kind}")
        return values[0]

    def has_raised(self, number: int, classes: Sequence[str], match: str) -> bool:
        kind, *values = self.outcomes[number]
        return kind == "raised" and any(name in values[0] for name in classes) and bool(re.search(match, values[1]))


def assert_sources(tests: Any) -> list[str] | None:
    """Return the Python sources of tests that are written in Python; None for tests in another form."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError):
            return [tests] if re.search(r"\b(assert|def)\b", tests) else None
    if isinstance(tests, list | tuple) and tests and all(isinstance(test, str) for test in tests):
        return list(tests)
    return None


def read_asserts(sources: Sequence[str], entry_point: str = "", setup: str = "") -> tuple[list[AssertTest], Counter]:
    """Return the tests that could be read, and how many could not for each reason.

    One test is an assert or loop of a list, of a module or of `check(candidate)`, or a whole function `test_...`.
    entry_point: function that `candidate` stands for. setup: code that runs before the program (MBPP's
    `test_setup_code`); the program may redefine what it defines, so no check may depend on that.
    """
    return _read_cached(tuple(sources), entry_point.removeprefix("Solution()."), setup)


@functools.lru_cache(maxsize=64)
def _read_cached(sources: tuple[str, ...], entry_point: str, setup: str) -> tuple[list[AssertTest], Counter[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the data set's own code: `is` with a literal, invalid escapes
        return _ModuleReader(entry_point, setup).read(sources)


class _ModuleReader:
    """Reader of the statements of a row's tests."""

    def __init__(self, entry_point: str, setup: str) -> None:
        self.setup, self.entry_point = setup, entry_point
        self.scope = TestScope({entry_point: entry_point} if entry_point else {})
        self.tests: list[AssertTest] = []
        self.unread: Counter[str] = Counter()

    def read(self, sources: Sequence[str]) -> tuple[list[AssertTest], Counter[str]]:
        body: list[ast.stmt] = []
        for source in sources:
            try:
                body += ast.parse(source).body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self.unread["not Python"] += 1
        self._read_definitions(body)
        try:
            self._read_definitions(ast.parse(self.setup).body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError("`test_setup_code` is not Python") from None
        self._read_each(body)
        return self.tests, self.unread

    def _read_definitions(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.Import() | ast.ImportFrom():
                    self.scope.add_import(node)
                case ast.Expr(ast.Call(ast.Name("check"), [tested])) if not self.entry_point:
                    name = ast.unparse(tested).removeprefix("Solution().")
                    self.entry_point = self.scope.functions[name] = name
        for node in body:
            if isinstance(node, ast.FunctionDef) and _is_close_helper(node):
                self.scope.imports[node.name] = "evalplus.assertion"
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in self.scope.functions:
                self.scope.refused[node.name] = f"uses `{node.name}`, which is defined beside the tests"

    def _read_each(self, body: Sequence[ast.stmt]) -> None:
        """Read each statement as one test, except assignments, which apply to the statements that follow."""
        for node in body:
            match node:
                case ast.FunctionDef(name="check", args=ast.arguments(args=[ast.arg(candidate)])):
                    outer = dict(self.scope.env)
                    if self.entry_point:
                        self.scope.functions[candidate] = self.entry_point
                    else:
                        self.scope.refused[candidate] = f"calls `{candidate}`: name the function in `entry_point`"
                    self._read_each(node.body)
                    self.scope.env = outer
                case ast.FunctionDef() if node.name.startswith("test"):
                    self._read_test(node)
                case ast.ClassDef():
                    if tests := sum(isinstance(item, ast.FunctionDef) and item.name.startswith("test")
                                    for item in node.body):  # fmt: skip
                        self.unread["a class"] += tests
                case ast.FunctionDef() if _has_asserts(node):
                    self.unread[f"a function `{node.name}` with asserts"] += 1
                case ast.Assert(ast.Constant()) | ast.FunctionDef() | ast.Import() | ast.ImportFrom() | ast.Pass():
                    pass
                case (
                    ast.Expr(ast.Constant())
                    | ast.Expr(ast.Call(ast.Name("check"), [_]))
                    | ast.If(ast.Compare(ast.Name("__name__")))
                ):
                    pass
                case ast.Expr(ast.Call(ast.Name(name), [])) if name.startswith("test"):
                    pass
                case ast.Assign() | ast.AnnAssign():
                    self._bind(node)
                case _:
                    self._read_test(node)

    def _read_test(self, node: ast.stmt) -> None:
        reader = AssertReader(self.scope)
        try:
            if isinstance(node, ast.FunctionDef):
                reader.run_function(node)
            else:
                reader.run([node])
            if not reader.checks:
                raise UnreadableTest("no assert")
            self.tests.append(AssertTest(tuple(reader.calls), tuple(reader.checks), self.scope.constants, self.setup))
        except UnreadableTest as error:
            self.unread[str(error)] += 1
        except RecursionError:
            self.unread["nested too deeply"] += 1

    def _bind(self, node: ast.Assign | ast.AnnAssign) -> None:
        """Bind a name for the tests that follow, which are refused only if they read a value that cannot be read."""
        reader = AssertReader(self.scope)
        try:
            reader.run([node])
            if reader.calls:
                raise UnreadableTest("calls the program outside of a test")
            self.scope.env = reader.env
        except UnreadableTest as error:
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    self.scope.env[target.id] = error


def _is_close_helper(node: ast.FunctionDef) -> bool:
    """Return whether a function is `assertion(out, exp, atol)` of EvalPlus: equal, or floats that are close."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    arguments = [argument.arg for argument in node.args.args]
    close = "allclose" in ast.unparse(node)
    return close and arguments == ["out", "exp", "atol"] and names <= {*arguments, "exact_match", "is_floats", "np"}


def _has_asserts(node: ast.FunctionDef) -> bool:
    return not _is_close_helper(node) and any(isinstance(part, ast.Assert) for part in ast.walk(node))
