"""Whether a script or module of the user has a function, read off its text. Nothing is imported where its text says
enough: a script may need torch, which takes seconds."""

from __future__ import annotations

import ast
import copy
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, did_you_mean
from posttrain.path_resolution import find_module, no_function, place_of
from posttrain.registry import shown_value, wrong_type


def find_definition(
    use: str, base_dir: Path, what: str, check: Callable[[str, str], None], error: type[UserError] = UserError
) -> ast.FunctionDef | None:
    """The text of `path/file.py:function` or `package.module:function`; None where it is written somewhere else.

    check: imports a function whose text does not say that it is there (`use`, `what`), and raises if it is not.
    Raises `error` where there is no such file, module or function, with what there is and the nearest name.
    """
    left, name = place_of(use, base_dir, what, error)
    spec = None if isinstance(left, Path) else find_module(left)
    path = left if isinstance(left, Path) else Path(spec.origin) if spec is not None and spec.origin else None
    if path is not None and path.suffix == ".py":
        function, sure = _in_text(path, str(left), name, error)
        if sure:
            return function
    check(use, what)  # compiled, made by another module, or not there
    return None


def _in_text(path: Path, left: str, name: str, error: type[UserError]) -> tuple[ast.FunctionDef | None, bool]:
    """The function in the text of a file, and whether the text says that it is there. Raises `error` if it is not."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8"), str(path)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        why = f"line {cause.lineno}: {cause.msg}" if isinstance(cause, SyntaxError) else str(cause) or "nested too deep"
        raise error(f"{path} is no Python: {why}") from cause
    names = set(_top_level(body))
    if name in names:
        return next((found for node in body if (found := _function(node)) and found.name == name), None), True
    if not names & {"*", "__getattr__"}:
        own = set(_top_level([node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]))
        raise no_function(left, name, own or names, error)
    return None, False


def _function(node: ast.stmt) -> ast.FunctionDef | None:
    """A function, or of a class what makes it, under the name of the class; None where that is not written in it."""
    if not isinstance(node, ast.ClassDef):
        return node if isinstance(node, ast.FunctionDef) else None
    inits = [inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"]
    if not inits:
        return None
    made = copy.copy(inits[0])
    made.name = node.name
    return made


def keyword_annotations(
    function: ast.FunctionDef | ast.AsyncFunctionDef, read: Callable[[ast.expr], Any] = lambda _: None
) -> dict[str, tuple[str, Any]]:
    """The keyword-only arguments of a function: name -> (annotation as text, default), as `registry.keywords` gives
    them of one that was imported: ... where there is none. read: what a default that is no literal is taken for."""
    found: dict[str, tuple[str, Any]] = {}
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        value: Any = ...
        if default is not None:
            try:
                value = ast.literal_eval(default)
            except ValueError:
                value = read(default)
        found[argument.arg] = (ast.unparse(argument.annotation) if argument.annotation else "", value)
    return found


def strange_arguments(function: ast.FunctionDef, given: Mapping[str, Any]) -> dict[str, UserError]:
    """Key -> what is wrong, for every key of `given` that is no keyword-only argument of a component, or has a value of
    another type. Under `use` what it must be given and is not."""
    keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    needed = [argument.arg for argument, default in keywords if default is None]
    found = _unknown(function, function.args.kwonlyargs, given)
    if missing := [f"`{key}`" for key in needed if key not in given]:
        found["use"] = UserError(f"{function.name} needs {', '.join(missing)}")
    return found


def strange_data_arguments(
    function: ast.FunctionDef, given: Mapping[str, Any], size: int | None
) -> dict[str, UserError]:
    """The same of a data function, which is called with `size`, `seed` and the recipe's params; or, if its first
    arguments are `level` and `draw`, with these for each problem (`data/tasks/make.py`). Under `source` what it lacks
    itself. size: the recipe's."""
    if [argument.arg for argument in function.args.args[:2]] == ["level", "draw"]:
        own = {key: value for key, value in given.items() if key not in ("levels", "shares", "distinct")}
        wrong = _unknown(function, function.args.kwonlyargs, own)
        if size is None:
            wrong["source"] = UserError(f"{function.name} makes rows: give `size`, the number of rows")
        return wrong
    arguments = [*function.args.posonlyargs, *function.args.args]
    optional = {a.arg for a in arguments[len(arguments) - len(function.args.defaults) :]}
    keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    optional |= {argument.arg for argument, default in keywords if default is not None}
    named = [*function.args.args, *function.args.kwonlyargs]
    names = [a.arg for a in named]
    found = _unknown(function, [a for a in named if a.arg not in ("size", "seed")], given)
    hint = "it is called with size, seed and `params`"
    if function.args.kwarg is None and (lacks := [f"`{key}`" for key in ("size", "seed") if key not in names]):
        found["source"] = UserError(f"{function.name} takes no {' and no '.join(lacks)}", hint=hint)
    elif missing := [f"`{key}`" for key in names if key not in ("size", "seed", *given, *optional)]:
        found["source"] = UserError(f"{function.name} needs {', '.join(missing)}", hint="write it under `params`")
    elif size is None and "size" not in optional:
        found["source"] = UserError(f"{function.name} makes rows: give `size`, the number of rows")
    return found


def _unknown(function: ast.FunctionDef, takes: Sequence[ast.arg], given: Mapping[str, Any]) -> dict[str, UserError]:
    annotations = {argument.arg: argument.annotation for argument in takes}
    found = {}
    for key, value in given.items():
        if key not in annotations:
            if function.args.kwarg is None:
                allowed, hint = f"it takes: {', '.join(annotations) or 'none'}", did_you_mean(key, annotations)
                found[key] = UserError(f"{function.name} has no argument {key}", allowed=allowed, hint=hint)
        elif why := wrong_type(_plain_type(annotations[key]), value):
            found[key] = UserError(f"{function.name}: argument {key}: {why}, got {shown_value(value, 60)}")
    return found


_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple)},
    **{name: getattr(typing, name) for name in ("Literal", "Any", "Optional", "Union", "Sequence", "Mapping")},
}
_OF_TYPES = (ast.Expression, ast.Name, ast.Constant, ast.BinOp, ast.BitOr, ast.Subscript, ast.Tuple, ast.Load)


def _plain_type(annotation: ast.expr | None) -> Any:
    """The type that an annotation of plain names says; None for others, which only an import could tell."""
    if annotation is None:
        return None
    nodes = list(ast.walk(annotation))
    known = all(isinstance(node, _OF_TYPES) for node in nodes)
    if not known or any(isinstance(node, ast.Name) and node.id not in _TYPES for node in nodes):
        return None
    try:
        return eval(compile(ast.Expression(annotation), "annotation", "eval"), {"__builtins__": {}}, _TYPES)
    except Exception:  # plain names that make no type, such as `int[3]`
        return None


_NO_FUNCTIONS = (ast.Constant, ast.JoinedStr, ast.List, ast.Dict, ast.Set, ast.Tuple)


def _top_level(body: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that statements give to what may be a function; `*` where they cannot be read off."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if not all(isinstance(t, ast.Name) for t in targets):
                    yield "*"
                elif not isinstance(node.value, _NO_FUNCTIONS):
                    yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                yield "*"
            case ast.Expr(value=ast.Call()):
                yield "*"  # such as globals().update
