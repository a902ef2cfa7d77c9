"""Tests made of asserts (MBPP, HumanEval, KodCode, AceCode, LeetCode), read as calls and checks of their results.

    ["assert add(2, 3) == 5", "assert abs(half(1) - 0.5) < 1e-9"]
    "def check(candidate):\\n    assert candidate(2, 3) == 5"                    with `entry_point`: the candidate
    "from solution import add\\ndef test_add():\\n    result = add(2, 3)\\n    assert result == 5"

Run beside a program, an assert proves nothing: the program may redefine `__eq__` or exit first. Here only the calls run
in the program's process; the expression of an assert is evaluated outside, on the plain values that the calls returned.
A test that cannot be read so is not run at all.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from posttrain.verify.expected_values import BUILTINS, KNOWN, METHODS, bounded_operator
from posttrain.verify.function_calls import Call, encode_value, read_outcomes, write_input

_MOST_STEPS = 20_000  # statements of a test whose loops are unrolled
_EXPRESSIONS = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp,
    ast.Subscript, ast.Slice, ast.Starred, ast.keyword, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
    ast.comprehension, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_MODULES = {"np": "numpy", "numpy": "numpy", "math": "math", "pytest": "pytest", "collections": "collections"}
_SOLUTIONS = ("solution", "main", "program")  # modules as which tests import the program


class UnreadableTest(ValueError):
    """Raised for a test that cannot be read as calls and checks; the message names what stands in the way."""


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
            return all(_evaluate(check, self.constants, **names) for check in self.checks)
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
        return _Module(entry_point, setup).read(sources)


class _Module:
    """Reader of the statements of a row's tests.

    functions: name in the tests -> function of the program. refused: name -> why it cannot be called. imports: name ->
    dotted name. env: name -> expression bound to it, or why it has none.
    """

    def __init__(self, entry_point: str, setup: str) -> None:
        self.setup, self.entry_point = setup, entry_point
        self.functions = {entry_point: entry_point} if entry_point else {}
        self.refused: dict[str, str] = {}
        self.imports = dict(_MODULES)
        self.env: dict[str, ast.expr | UnreadableTest] = {}
        self.constants: list[Any] = []
        self.tests: list[AssertTest] = []
        self.unread: Counter[str] = Counter()
        self.steps = 0

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
                    self.add_import(node)
                case ast.Expr(ast.Call(ast.Name("check"), [tested])) if not self.entry_point:
                    name = ast.unparse(tested).removeprefix("Solution().")
                    self.entry_point = self.functions[name] = name
        for node in body:
            if isinstance(node, ast.FunctionDef) and _is_close_helper(node):
                self.imports[node.name] = "evalplus.assertion"
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in self.functions:
                self.refused[node.name] = f"uses `{node.name}`, which is defined beside the tests"

    def add_import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = getattr(node, "module", None)
        for alias in node.names:
            name = alias.asname or alias.name
            if module in _SOLUTIONS:
                self.functions[name] = alias.name
            else:
                self.imports[name] = f"{module}.{alias.name}" if module else alias.name

    def _read_each(self, body: Sequence[ast.stmt]) -> None:
        """Read statements each as a test of its own, but for assignments, which hold for those that follow."""
        for node in body:
            match node:
                case ast.FunctionDef(name="check", args=ast.arguments(args=[ast.arg(candidate)])):
                    outer = dict(self.env)
                    if self.entry_point:
                        self.functions[candidate] = self.entry_point
                    else:
                        self.refused[candidate] = f"calls `{candidate}`: name the function in `entry_point`"
                    self._read_each(node.body)
                    self.env = outer
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
        unit = _Unit(self)
        try:
            if isinstance(node, ast.FunctionDef):
                unit.run_function(node)
            else:
                unit.run([node])
            if not unit.checks:
                raise UnreadableTest("no assert")
            self.tests.append(AssertTest(tuple(unit.calls), tuple(unit.checks), self.constants, self.setup))
        except UnreadableTest as error:
            self.unread[str(error)] += 1
        except RecursionError:
            self.unread["nested too deeply"] += 1

    def _bind(self, node: ast.Assign | ast.AnnAssign) -> None:
        """Bind a name for the tests that follow, which are refused only if they read a value that cannot be read."""
        unit = _Unit(self)
        try:
            unit.run([node])
            if unit.calls:
                raise UnreadableTest("calls the program outside of a test")
            self.env = unit.env
        except UnreadableTest as error:
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    self.env[target.id] = error


class _Unit(ast.NodeTransformer):
    """Reader of one test: collects its calls, and its checks with results in place of the calls."""

    def __init__(self, module: _Module) -> None:
        self.module = module
        self.env = dict(module.env)
        self.calls: list[Call] = []
        self.checks: list[CodeType] = []
        self.local: list[str] = []  # variables of comprehensions
        self.calls_builtins = False

    def run_function(self, node: ast.FunctionDef) -> None:
        """Read a function `test_...`, for each row of its `pytest.mark.parametrize`."""
        rows: list[tuple[ast.expr, Any]] = []
        for decorator in node.decorator_list:
            match decorator:
                case ast.Call(func, [ast.Constant(str(names)), values]) if (
                    ast.unparse(func).endswith("mark.parametrize") and not rows
                ):
                    target: ast.expr = ast.parse(names.strip(" ,"), mode="eval").body
                    rows = [(target, value) for value in self.evaluate_constant(values)]
                case _:
                    raise UnreadableTest("a decorator")
        wanted = {arg.arg for arg in node.args.args}
        if wanted - {name.id for target, _ in rows[:1] for name in ast.walk(target) if isinstance(name, ast.Name)}:
            raise UnreadableTest("a fixture")
        outer = dict(self.env)
        for target, value in rows:
            self.env = dict(outer)
            self.assign(target, value)
            self.run(node.body)
        if not node.decorator_list:
            self.run(node.body)

    def run(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            self.module.steps += 1
            if self.module.steps > _MOST_STEPS:
                raise UnreadableTest(f"more than {_MOST_STEPS:,} statements")
            match node:
                case ast.Assign(targets=[target]) | ast.AnnAssign(target=target) if node.value is not None:
                    self.bind(target, self.read(node.value))
                case ast.Assert(ast.Constant()) | ast.Pass() | ast.Expr(ast.Constant()):
                    pass
                case ast.Import() | ast.ImportFrom():
                    self.module.add_import(node)
                case ast.Assert():
                    self.add_check(self.read_condition(node.test))
                case ast.Expr(ast.Call(ast.Name("assertion"))):
                    self.add_check(self.read_condition(node.value))
                case ast.For(orelse=[]):
                    for value in self.evaluate_constant(node.iter):
                        self.assign(node.target, value)
                        self.run(node.body)
                case ast.With(items=[ast.withitem(ast.Call(func, [kind], options))]) if (
                    self.full_name(func) == "pytest.raises"
                ):
                    self.run_raises(kind, options, node.body)
                case ast.Expr():
                    raise UnreadableTest("a call whose result is not checked")
                case _:
                    raise UnreadableTest(f"a statement `{type(node).__name__.lower()}`")

    def run_raises(self, kind: ast.expr, options: Sequence[ast.keyword], body: Sequence[ast.stmt]) -> None:
        """Read `with pytest.raises(KIND, match=...): ...; CALL`."""
        classes = [ast.unparse(item) for item in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
        for name in classes:
            if not isinstance(found := getattr(builtins, name, None), type) or not issubclass(found, BaseException):
                raise UnreadableTest(f"an exception `{name}`")
        match = next((self.evaluate_constant(option.value) for option in options if option.arg == "match"), "")
        *before, last = body
        self.run(before)
        calls = len(self.calls)
        if isinstance(last, ast.Expr | ast.Assign):
            self.read(last.value)
        if len(self.calls) != calls + 1:
            raise UnreadableTest("`pytest.raises` of something else than one call")
        self.add_check(ast.parse(f"_raised({calls}, {classes!r}, {match!r})", mode="eval").body)

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for item, part in zip(target.elts, value.elts, strict=True):
                self.bind(item, part)
        elif isinstance(value, ast.Name) and value.id == "_solution" and isinstance(target, ast.Name):
            self.env[target.id] = value
        elif not _results_in(value):
            self.assign(target, self.compute(value))
        elif isinstance(target, ast.Name):
            self.env[target.id] = value
        else:
            raise UnreadableTest("an assignment to several names or to an item")

    def assign(self, target: ast.expr, value: Any) -> None:
        """Bind the names of a target to a constant."""
        if isinstance(target, ast.Name):
            self.env[target.id] = _item("_constants", len(self.module.constants))
            self.module.constants.append(value)
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, Sequence):
            if len(target.elts) != len(value):
                raise UnreadableTest("an assignment of another number of values")
            for item, part in zip(target.elts, value, strict=True):
                self.assign(item, part)
        else:
            raise UnreadableTest("an assignment to an item or attribute")

    def add_check(self, condition: ast.expr) -> None:
        self.checks.append(_compile(condition))

    def read_condition(self, node: ast.expr) -> ast.expr:
        """Return a condition on results; a builtin's name counts as the program's if nothing else is called."""
        condition = self.read(node)
        if not _results_in(condition):
            self.calls_builtins = True
            condition = self.read(node)
            self.calls_builtins = False
        if not _results_in(condition):
            raise UnreadableTest("an assert that calls nothing of the program")
        for part in ast.walk(condition):
            match part:
                case ast.UnaryOp(ast.Not(), ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()])):
                    raise UnreadableTest("`not` of an order, which NaN passes")
                case ast.Compare():
                    operands = [part.left, *part.comparators]
                case ast.BinOp():
                    operands = [part.left, part.right]
                case ast.Call():
                    operands = [*part.args, *(keyword.value for keyword in part.keywords)]
                case _:
                    continue
            if sum(map(_results_in, operands)) > 1:
                raise UnreadableTest("compares results of the program with each other")
        return condition

    def read(self, node: ast.expr) -> ast.expr:
        """Return an expression whose calls of the program are replaced by their results, and names by their values."""
        return self.visit(copy.deepcopy(node))

    def evaluate_constant(self, node: ast.expr) -> Any:
        return self.compute(self.read(node))

    def compute(self, node: ast.expr) -> Any:
        if _results_in(node):
            raise UnreadableTest("a result of the program where a constant is needed")
        try:
            value = _evaluate(_compile(node), self.module.constants)
            return list(value) if isinstance(value, Iterator) else value
        except UnreadableTest:
            raise
        except Exception as error:
            raise UnreadableTest(f"a constant that raises {type(error).__name__}") from None

    def full_name(self, node: ast.expr) -> str:
        """Return the full name of an imported function, "" for anything else."""
        if isinstance(node, ast.Attribute) and (owner := self.full_name(node.value)):
            return f"{owner}.{node.attr}"
        if isinstance(node, ast.Name) and node.id not in self.env:
            return self.module.imports.get(node.id, "")
        return ""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, _EXPRESSIONS) or isinstance(node, ast.LShift | ast.MatMult):
            raise UnreadableTest(f"an expression `{type(node).__name__}`")
        names = [name.id for part in getattr(node, "generators", ()) for name in ast.walk(part.target)
                 if isinstance(name, ast.Name)]  # fmt: skip
        self.local += names
        visited = super().generic_visit(node)
        del self.local[len(self.local) - len(names) :]
        return bounded_operator(visited)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.local:
            return node
        if (bound := self.env.get(node.id)) is not None:
            if isinstance(bound, UnreadableTest):
                raise UnreadableTest(*bound.args)
            return bound
        return self._known_function(node) or self._refuse_name(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if (known := self._known_function(node)) is None:
            raise UnreadableTest(f"an attribute `{node.attr}`")
        return known

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if function := self._program_function(node.func):
            return self._add_call(function, node)
        match node.func:
            case ast.Name("Solution") if not node.args and "Solution" not in self.module.refused:
                return ast.Name("_solution", ast.Load())
            case ast.Attribute(value, method) if not self.full_name(node.func):
                if method not in METHODS:
                    raise UnreadableTest(f"a method `{method}`")
                node.func.value = self.visit(value)
            case _:
                node.func = self._known_function(node.func) or self._refuse_name(ast.unparse(node.func))
        if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) != 1:
            raise UnreadableTest("a class")
        node.args = [self.visit(argument) for argument in node.args]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        return node

    def _known_function(self, node: ast.expr) -> ast.expr | None:
        """Return the expression for a builtin or imported function that is evaluated outside; None for another."""
        if (name := self.full_name(node)) in KNOWN:
            return _item("_known", name)
        return node if isinstance(node, ast.Name) and node.id in BUILTINS else None

    def _refuse_name(self, name: str) -> ast.expr:
        raise UnreadableTest(self.module.refused.get(name) or f"uses `{name[:60]}`")

    def _program_function(self, node: ast.expr) -> str:
        """Return the program's function that is called, "" if it is another."""
        module = self.module
        if isinstance(node, ast.Attribute):
            owner = node.value
            if module.imports.get(ast.unparse(owner)) in _SOLUTIONS:
                return node.attr
            new = isinstance(owner, ast.Call) and not owner.args and ast.unparse(owner.func) == "Solution"
            held = self.env.get(owner.id) if isinstance(owner, ast.Name) else None
            new = new or (isinstance(held, ast.Name) and held.id == "_solution")
            return node.attr if new and "Solution" not in module.refused else ""
        if not isinstance(node, ast.Name) or node.id in self.env or node.id in self.local:
            return ""
        if node.id in module.functions:
            return module.functions[node.id]
        if node.id in module.refused or node.id in module.imports or node.id == "Solution":
            return ""
        return node.id if self.calls_builtins or node.id not in BUILTINS else ""

    def _add_call(self, function: str, node: ast.Call) -> ast.expr:
        arguments: list[Any] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                arguments += self.evaluate_constant(argument.value)
            else:
                arguments.append(self.evaluate_constant(argument))
        if any(keyword.arg is None for keyword in node.keywords):
            raise UnreadableTest("arguments `**`")
        named = {str(keyword.arg): self.evaluate_constant(keyword.value) for keyword in node.keywords}
        try:
            encode_value([arguments, named])
        except (TypeError, RecursionError):
            raise UnreadableTest("an argument that is not made of builtin types") from None
        self.calls.append((function, arguments, named))
        return _item("_results", len(self.calls) - 1)


def _is_close_helper(node: ast.FunctionDef) -> bool:
    """Return whether a function is `assertion(out, exp, atol)` of EvalPlus: equal, or floats that are close."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    arguments = [argument.arg for argument in node.args.args]
    close = "allclose" in ast.unparse(node)
    return close and arguments == ["out", "exp", "atol"] and names <= {*arguments, "exact_match", "is_floats", "np"}


def _has_asserts(node: ast.FunctionDef) -> bool:
    return not _is_close_helper(node) and any(isinstance(part, ast.Assert) for part in ast.walk(node))


def _results_in(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "_results" for part in ast.walk(node))


def _item(name: str, key: int | str) -> ast.expr:
    return ast.Subscript(ast.Name(name, ast.Load()), ast.Constant(key), ast.Load())


def _compile(node: ast.expr) -> CodeType:
    """Compile an expression that `_Unit` has read, which holds no name, attribute or operator but those allowed."""
    try:
        return compile(ast.fix_missing_locations(ast.Expression(node)), "assert", "eval")
    except (SyntaxError, ValueError, MemoryError) as error:
        raise UnreadableTest(f"an expression that does not compile ({type(error).__name__})") from None


def _evaluate(code: CodeType, constants: Sequence[Any], **names: Any) -> Any:
    names |= {"__builtins__": {}, "_constants": constants, "_known": KNOWN, **BUILTINS}
    return eval(code, names)
