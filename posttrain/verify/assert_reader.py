"""Reader of one test made of asserts: its calls of the program, and conditions on what the calls return."""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from posttrain.verify.expected_values import BUILTINS, KNOWN, METHODS, bounded_operator
from posttrain.verify.function_calls import Call, encode_value

_MOST_STEPS = 20_000  # statements of a test whose loops are unrolled
_EXPRESSIONS = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp,
    ast.Subscript, ast.Slice, ast.Starred, ast.keyword, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
    ast.comprehension, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_MODULES = {"np": "numpy", "numpy": "numpy", "math": "math", "pytest": "pytest", "collections": "collections"}
_SOLUTIONS = ("solution", "main", "program")  # modules as which tests import the program


class UnreadableTest(ValueError):
    """Raised for a test that cannot be read as calls and checks; the message states the reason."""


@dataclass
class TestScope:
    """Names and constants shared by the tests of a row.

    functions: name in the tests -> function of the program. refused: name -> why it cannot be called. imports: name ->
    dotted name. env: name -> expression bound to it, or why it has none. steps: statements read.
    """

    functions: dict[str, str]
    refused: dict[str, str] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=lambda: dict(_MODULES))
    env: dict[str, ast.expr | UnreadableTest] = field(default_factory=dict)
    constants: list[Any] = field(default_factory=list)
    steps: int = 0

    def add_import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = getattr(node, "module", None)
        for alias in node.names:
            name = alias.asname or alias.name
            if module in _SOLUTIONS:
                self.functions[name] = alias.name
            else:
                self.imports[name] = f"{module}.{alias.name}" if module else alias.name


class AssertReader(ast.NodeTransformer):
    """Reader of one test: collects its calls, and its checks with results in place of the calls."""

    def __init__(self, scope: TestScope) -> None:
        self.scope = scope
        self.env = dict(scope.env)
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
            self.scope.steps += 1
            if self.scope.steps > _MOST_STEPS:
                raise UnreadableTest(f"more than {_MOST_STEPS:,} statements")
            match node:
                case ast.Assign(targets=[target]) | ast.AnnAssign(target=target) if node.value is not None:
                    self.bind(target, self.read(node.value))
                case ast.Assert(ast.Constant()) | ast.Pass() | ast.Expr(ast.Constant()):
                    pass
                case ast.Import() | ast.ImportFrom():
                    self.scope.add_import(node)
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
        elif not _contains_result(value):
            self.assign(target, self.compute(value))
        elif isinstance(target, ast.Name):
            self.env[target.id] = value
        else:
            raise UnreadableTest("an assignment to several names or to an item")

    def assign(self, target: ast.expr, value: Any) -> None:
        """Bind the names of a target to a constant."""
        if isinstance(target, ast.Name):
            self.env[target.id] = _subscript("_constants", len(self.scope.constants))
            self.scope.constants.append(value)
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
        if not _contains_result(condition):
            self.calls_builtins = True
            condition = self.read(node)
            self.calls_builtins = False
        if not _contains_result(condition):
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
            if sum(map(_contains_result, operands)) > 1:
                raise UnreadableTest("compares results of the program with each other")
        return condition

    def read(self, node: ast.expr) -> ast.expr:
        """Return an expression whose calls of the program are replaced by their results, and names by their values."""
        return self.visit(copy.deepcopy(node))

    def evaluate_constant(self, node: ast.expr) -> Any:
        return self.compute(self.read(node))

    def compute(self, node: ast.expr) -> Any:
        if _contains_result(node):
            raise UnreadableTest("a result of the program where a constant is needed")
        try:
            value = evaluate_compiled(_compile(node), self.scope.constants)
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
            return self.scope.imports.get(node.id, "")
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
            case ast.Name("Solution") if not node.args and "Solution" not in self.scope.refused:
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
        """Return the expression for a builtin or imported function that is evaluated outside, or None."""
        if (name := self.full_name(node)) in KNOWN:
            return _subscript("_known", name)
        return node if isinstance(node, ast.Name) and node.id in BUILTINS else None

    def _refuse_name(self, name: str) -> ast.expr:
        raise UnreadableTest(self.scope.refused.get(name) or f"uses `{name[:60]}`")

    def _program_function(self, node: ast.expr) -> str:
        """Return the name of the program's function that is called, "" for any other function."""
        if isinstance(node, ast.Attribute):
            owner = node.value
            if self.scope.imports.get(ast.unparse(owner)) in _SOLUTIONS:
                return node.attr
            new = isinstance(owner, ast.Call) and not owner.args and ast.unparse(owner.func) == "Solution"
            bound = self.env.get(owner.id) if isinstance(owner, ast.Name) else None
            new = new or (isinstance(bound, ast.Name) and bound.id == "_solution")
            return node.attr if new and "Solution" not in self.scope.refused else ""
        if not isinstance(node, ast.Name) or node.id in self.env or node.id in self.local:
            return ""
        if node.id in self.scope.functions:
            return self.scope.functions[node.id]
        if node.id in self.scope.refused or node.id in self.scope.imports or node.id == "Solution":
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
        return _subscript("_results", len(self.calls) - 1)


def _contains_result(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "_results" for part in ast.walk(node))


def _subscript(name: str, key: int | str) -> ast.expr:
    return ast.Subscript(ast.Name(name, ast.Load()), ast.Constant(key), ast.Load())


def _compile(node: ast.expr) -> CodeType:
    """Compile an expression from `AssertReader.read`, which contains only allowed names, attributes and operators."""
    try:
        return compile(ast.fix_missing_locations(ast.Expression(node)), "assert", "eval")
    except (SyntaxError, ValueError, MemoryError) as error:
        raise UnreadableTest(f"an expression that does not compile ({type(error).__name__})") from None


def evaluate_compiled(code: CodeType, constants: Sequence[Any], **names: Any) -> Any:
    """Evaluate a compiled expression of a test without Python's builtins, except those of BUILTINS.

    constants: values of the constants that the expression names by index. Raises any exception of the expression.
    """
    names |= {"__builtins__": {}, "_constants": constants, "_known": KNOWN, **BUILTINS}
    return eval(code, names)
