"""Literal values in a parsed Python script, also through names assigned once and defaults of command-line options."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from typing import Any

_DTYPES = ("float32", "float16", "bfloat16", "float", "half")
PARSERS = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config")


_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class NotLiteral(Exception):
    """Raised for a value that is known only when the script runs; the message names the value."""


class Script:
    """A parsed script. names: what each name is assigned, in order. functions: functions of the module. imports: name
    -> `module.name`. options: name of an option of its argument parser or dataclass -> default."""

    def __init__(self, tree: ast.Module, text: str) -> None:
        self.tree, self.text = tree, text
        self.functions = {
            function.name: function
            for function in tree.body
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.names: dict[str, list[ast.expr | None]] = {}
        self.imports: dict[str, str] = {}
        self.options: dict[str, ast.expr] = {}
        self.parsed: set[str] = set()  # names that hold parsed options
        for node in ast.walk(tree):
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        """Record what one node of the syntax tree assigns, imports or declares."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor | ast.NamedExpr | ast.comprehension):
            self._assign(node.target, None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node.optional_vars, None)
        elif isinstance(node, ast.arg):
            self.names.setdefault(node.arg, []).append(None)
        elif isinstance(node, ast.Import):
            self.imports |= {(alias.asname or alias.name.split(".")[0]): alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            self.imports |= {(alias.asname or alias.name): f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            self._note_fields(node)
        elif isinstance(node, ast.Call) and self.name_of(node) == "add_argument":
            self._note_option(node)

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        """Record an assignment; a tuple is assigned element by element if its values are written out."""
        if isinstance(target, ast.Tuple | ast.List):
            values = target.elts if not isinstance(value, ast.Tuple | ast.List) else value.elts
            paired = isinstance(value, ast.Tuple | ast.List) and len(values) == len(target.elts)
            for number, inner in enumerate(target.elts):
                first = number == 0 and isinstance(value, ast.Call) and self.name_of(value) == "from_pretrained"
                self._assign(inner, values[number] if paired else value if first else None)  # model, tokenizer = ...
                if isinstance(inner, ast.Name) and isinstance(value, ast.Call) and self.name_of(value) in PARSERS:
                    self.parsed.add(inner.id)
        elif isinstance(target, ast.Name):
            self.names.setdefault(target.id, []).append(value)
            if isinstance(value, ast.Call) and self.name_of(value) in PARSERS:
                self.parsed.add(target.id)

    def _note_fields(self, node: ast.ClassDef) -> None:
        """Record the defaults of a dataclass, from which HfArgumentParser makes options."""
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                default: ast.expr | None = field.value
                if isinstance(field.value, ast.Call):
                    default = next(
                        (keyword.value for keyword in field.value.keywords if keyword.arg == "default"), None
                    )
                if default is not None:
                    self.options[field.target.id] = default

    def _note_option(self, call: ast.Call) -> None:
        flags = [
            argument.value
            for argument in call.args
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        ]
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        action = named.get("action")
        default = named.get("default")
        if default is None and isinstance(action, ast.Constant) and action.value == "store_true":
            default = ast.copy_location(ast.Constant(False), call)
        long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        if long and default is not None:
            self.options[long.lstrip("-").replace("-", "_")] = default

    def value(self, node: ast.expr) -> Any:
        """Return the literal value of an expression. Raises NotLiteral."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {self.value(key): self.value(below) for key, below in pairs if key is not None}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            number = self.value(node.operand)
            if isinstance(number, int | float):
                return -number if isinstance(node.op, ast.USub) else number
        if isinstance(node, ast.BinOp) and (compute := _ARITHMETIC.get(type(node.op))):
            sides = self.value(node.left), self.value(node.right)
            if all(isinstance(side, int | float) and side for side in sides):
                return compute(*sides)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Name):
            found = self.resolve(node)
            if found is not node:
                return self.value(found)
        raise NotLiteral(f"`{_shorten(ast.unparse(node))}` is computed")

    def _attribute(self, node: ast.Attribute) -> Any:
        """Return the value of `torch.bfloat16`, or of `args.NAME` for an option with a literal default."""
        if isinstance(node.value, ast.Name):
            if node.value.id == "torch" and node.attr in _DTYPES:
                return {"float": "float32", "half": "float16"}.get(node.attr, node.attr)
            if node.value.id in self.parsed and node.attr in self.options:
                return self.value(self.options[node.attr])
        raise NotLiteral(f"`{ast.unparse(node)}` is known when the script runs")

    def resolve(self, node: ast.expr) -> ast.expr:
        """Return the expression assigned to a name that is assigned once; any other expression is returned as it is."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            values = self.names.get(node.id, [])
            if len(values) != 1 or values[0] is None:
                break
            node = values[0]
        return node

    def chain(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> Iterator[ast.Call]:
        """Yield the calls that create a value: methods, the objects they are called on, and functions of the script
        through their return values."""
        if isinstance(node, ast.Name) and node.id not in seen:
            for value in self.names.get(node.id, []):
                if value is not None:
                    yield from self.chain(value, seen | {node.id})
        elif isinstance(node, ast.Subscript):
            yield from self.chain(node.value, seen)
        elif isinstance(node, ast.Call):
            yield node
            if isinstance(node.func, ast.Attribute):
                yield from self.chain(node.func.value, seen)
            elif isinstance(node.func, ast.Name) and node.func.id in self.functions and node.func.id not in seen:
                for below in ast.walk(self.functions[node.func.id]):
                    if isinstance(below, ast.Return) and below.value is not None:
                        yield from self.chain(below.value, seen | {node.func.id})

    def subscript_of(self, call: ast.Call) -> ast.expr | None:
        """Return the literal in `call[...]`, or None."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, ast.Subscript) and node.value is call)
        return next((subscript.slice for subscript in found if isinstance(subscript.slice, ast.Constant)), None)

    def calls(self, name: str) -> list[ast.Call]:
        """Return the calls of a function or class of this name, in source order."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self.name_of(node) == name]
        return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))

    def attributes_set_on(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Yield (attribute, value) of each `NAME.attribute = value` whose NAME is assigned this call."""
        for node in ast.walk(self.tree):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Attribute) and self.resolve(target.value) is call:
                    yield target.attr, node.value  # type: ignore[attr-defined]  # an Assign has it

    def name_of(self, call: ast.Call) -> str:
        """Return the last part of the called name: `from_pretrained` of `AutoModel.from_pretrained(...)`."""
        function = call.func
        return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")

    def text_of(self, node: ast.expr) -> str:
        """Return the source text of an expression."""
        return ast.get_source_segment(self.text, node) or ast.unparse(node)


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
