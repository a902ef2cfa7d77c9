"""Static checks of the functions in a user's scripts and modules.

Sources are parsed, not imported, as far as their text is conclusive: a script may import torch, which takes seconds.
"""

from __future__ import annotations

import ast
import copy
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, did_you_mean
from posttrain.path_resolution import find_module, locate_function, missing_function_error
from posttrain.registry import explain_type_mismatch, format_value


def find_definition(
    use: str, base_dir: Path, what: str, check: Callable[[str, str], None], error: type[UserError] = UserError
) -> ast.FunctionDef | None:
    """Return the definition of `path/file.py:function` or `package.module:function`; None if it is not in that file's
    text.

    check: imports a function that the text cannot confirm (`use`, `what`), and raises if the import does not have it.
    Raises `error` if the file, module or function does not exist, with the existing names and the nearest one.
    """
    left, name = locate_function(use, base_dir, what, error)
    spec = None if isinstance(left, Path) else find_module(left)
    path = left if isinstance(left, Path) else Path(spec.origin) if spec is not None and spec.origin else None
    if path is not None and path.suffix == ".py":
        function, sure = _find_in_source(path, str(left), name, error)
        if sure:
            return function
    check(use, what)  # compiled, imported from another module, or missing
    return None


def _find_in_source(path: Path, left: str, name: str, error: type[UserError]) -> tuple[ast.FunctionDef | None, bool]:
    """Return the function in the text of a file (or None), and whether the text proves that the name exists.

    Raises `error` if the text proves that the name does not exist.
    """
    try:
        body = ast.parse(path.read_text(encoding="utf-8"), str(path)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        why = f"line {cause.lineno}: {cause.msg}" if isinstance(cause, SyntaxError) else str(cause) or "nested too deep"
        raise error(f"{path} is not valid Python: {why}") from cause
    names = set(_top_level_names(body))
    if name in names:
        return next((found for node in body if (found := _function_of(node)) and found.name == name), None), True
    if not names & {"*", "__getattr__"}:
        defined = set(_top_level_names([node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]))
        raise missing_function_error(left, name, defined or names, error)
    return None, False


def _function_of(node: ast.stmt) -> ast.FunctionDef | None:
    """Return a function, or the `__init__` of a class under the name of the class; None if the class body has none."""
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
    """Return the keyword-only arguments of a parsed function: name -> (annotation as text, default).

    Same form as `registry.keyword_parameters` returns for an imported function: `...` if there is no default. read:
    replacement for a default that is not a literal.
    """
    annotations: dict[str, tuple[str, Any]] = {}
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        value: Any = ...
        if default is not None:
            try:
                value = ast.literal_eval(default)
            except ValueError:
                value = read(default)
        annotations[argument.arg] = (ast.unparse(argument.annotation) if argument.annotation else "", value)
    return annotations


def find_argument_errors(function: ast.FunctionDef, given: Mapping[str, Any]) -> dict[str, UserError]:
    """Return key -> error for every key of `given` that is not a keyword-only argument of the component, or has a value
    of the wrong type. The key `use` holds the error about missing required arguments."""
    keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    needed = [argument.arg for argument, default in keywords if default is None]
    errors = _check_given(function, function.args.kwonlyargs, given)
    if missing := [f"`{key}`" for key in needed if key not in given]:
        errors["use"] = UserError(f"{function.name} needs {', '.join(missing)}")
    return errors


def find_data_argument_errors(
    function: ast.FunctionDef, given: Mapping[str, Any], size: int | None
) -> dict[str, UserError]:
    """Return key -> error for the arguments of a data function.

    A data function is called with `size`, `seed` and the recipe's params; if its first arguments are `level` and
    `draw`, it is called with these for each problem (`data/tasks/make.py`). The key `source` holds errors of the
    function itself. size: the recipe's `data.size`.
    """
    if [argument.arg for argument in function.args.args[:2]] == ["level", "draw"]:
        task_arguments = {key: value for key, value in given.items() if key not in ("levels", "shares", "distinct")}
        wrong = _check_given(function, function.args.kwonlyargs, task_arguments)
        if size is None:
            wrong["source"] = UserError(f"{function.name} makes rows: give `size`, the number of rows")
        return wrong
    arguments = [*function.args.posonlyargs, *function.args.args]
    optional = {a.arg for a in arguments[len(arguments) - len(function.args.defaults) :]}
    keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    optional |= {argument.arg for argument, default in keywords if default is not None}
    named = [*function.args.args, *function.args.kwonlyargs]
    names = [a.arg for a in named]
    errors = _check_given(function, [a for a in named if a.arg not in ("size", "seed")], given)
    hint = "it is called with size, seed and `params`"
    if function.args.kwarg is None and (lacks := [f"`{key}`" for key in ("size", "seed") if key not in names]):
        errors["source"] = UserError(f"{function.name} takes no {' and no '.join(lacks)}", hint=hint)
    elif missing := [f"`{key}`" for key in names if key not in ("size", "seed", *given, *optional)]:
        errors["source"] = UserError(f"{function.name} needs {', '.join(missing)}", hint="write it under `params`")
    elif size is None and "size" not in optional:
        errors["source"] = UserError(f"{function.name} makes rows: give `size`, the number of rows")
    return errors


def _check_given(function: ast.FunctionDef, takes: Sequence[ast.arg], given: Mapping[str, Any]) -> dict[str, UserError]:
    """Return key -> error for given arguments that the function does not take, or whose value has the wrong type."""
    annotations = {argument.arg: argument.annotation for argument in takes}
    errors = {}
    for key, value in given.items():
        if key not in annotations:
            if function.args.kwarg is None:
                allowed, hint = f"it takes: {', '.join(annotations) or 'none'}", did_you_mean(key, annotations)
                errors[key] = UserError(f"{function.name} has no argument {key}", allowed=allowed, hint=hint)
        elif why := explain_type_mismatch(_parse_annotation(annotations[key]), value):
            errors[key] = UserError(f"{function.name}: argument {key}: {why}, got {format_value(value, 60)}")
    return errors


_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple)},
    **{name: getattr(typing, name) for name in ("Literal", "Any", "Optional", "Union", "Sequence", "Mapping")},
}
_ANNOTATION_NODES = (ast.Expression, ast.Name, ast.Constant, ast.BinOp, ast.BitOr, ast.Subscript, ast.Tuple, ast.Load)


def _parse_annotation(annotation: ast.expr | None) -> Any:
    """Return the type of an annotation made of built-in names; None for any other annotation, which only an import
    resolves."""
    if annotation is None:
        return None
    nodes = list(ast.walk(annotation))
    known = all(isinstance(node, _ANNOTATION_NODES) for node in nodes)
    if not known or any(isinstance(node, ast.Name) and node.id not in _TYPES for node in nodes):
        return None
    try:
        return eval(compile(ast.Expression(annotation), "annotation", "eval"), {"__builtins__": {}}, _TYPES)
    except Exception:  # valid syntax that is no type, such as `int[3]`
        return None


_NOT_CALLABLE = (ast.Constant, ast.JoinedStr, ast.List, ast.Dict, ast.Set, ast.Tuple)


def _top_level_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names at module level that may be functions; `*` if a statement may define names that cannot be
    read."""
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
                elif not isinstance(node.value, _NOT_CALLABLE):
                    yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                yield "*"
            case ast.Expr(value=ast.Call()):
                yield "*"  # such as globals().update
