"""Whether a script or module of the user has a function, read off its text. Nothing is imported where its text says
enough: a script may need torch, which takes seconds."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from posttrain.errors import UserError, did_you_mean
from posttrain.places import find_module, no_function, place_of


def written(
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


def strange_arguments(
    function: ast.FunctionDef, given: Iterable[str], *, of_data: bool = False
) -> dict[str, UserError]:
    """Key -> what is wrong, for every key of `given` that is no argument for a recipe to set: a keyword-only one, or of
    a data function any but `size` and `seed`. Under `use` what a component must be given and is not."""
    takes = [argument.arg for argument in function.args.kwonlyargs]
    if of_data:
        takes = [a.arg for a in (*function.args.args, *function.args.kwonlyargs) if a.arg not in ("size", "seed")]
    found = {}
    given = list(given)
    needed = [
        a.arg for a, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if not default
    ]
    if not of_data and (missing := [f"`{key}`" for key in needed if key not in given]):
        found["use"] = UserError(f"{function.name} needs {', '.join(missing)}")
    for key in given:
        if key not in takes and function.args.kwarg is None:
            hint = did_you_mean(key, takes)
            allowed = f"it takes: {', '.join(takes) or 'none'}"
            found[key] = UserError(f"{function.name} has no argument {key}", allowed=allowed, hint=hint)
    return found


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
