"""Whether a user's script has a function, read off its text. Nothing is imported: a script may need torch, which takes
seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from posttrain.errors import UserError, nearest
from posttrain.places import find


def has_function(use: str, base_dir: Path) -> ast.FunctionDef | None:
    """Refuse `file.py:function` where there is no such file, or no such name at its top level.

    Returns its text where it is written there. `package.module:function` is not looked at.
    """
    file, _, name = use.rpartition(":")
    if not file.endswith(".py"):
        return None
    path = find(file, base_dir, "script")
    try:
        body = ast.parse(path.read_text(encoding="utf-8"), str(path)).body
    except SyntaxError as error:
        raise UserError(f"{path} is no Python: line {error.lineno}: {error.msg}") from error
    names = set(_top_level(body))
    if name not in names and "*" not in names:
        near = nearest(name, names)
        own = set(_top_level([node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]))
        known = ", ".join(sorted(n for n in own if not n.startswith("_"))) or "nothing"
        hint = f"did you mean `{near}`?" if near else ""
        raise UserError(f"{path} has no function {name}", allowed=f"it has: {known}", hint=hint)
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def strange_arguments(function: ast.FunctionDef, given: Iterable[str]) -> dict[str, UserError]:
    """Key -> what is wrong, for every key of `given` that is none of its keyword-only arguments."""
    takes = [argument.arg for argument in function.args.kwonlyargs]
    if function.args.kwarg is not None:
        return {}
    found = {}
    for key in given:
        if key not in takes:
            near = nearest(key, takes)
            hint = f"did you mean `{near}`?" if near else ""
            allowed = f"it takes: {', '.join(takes) or 'none'}"
            found[key] = UserError(f"{function.name} has no argument {key}", allowed=allowed, hint=hint)
    return found


def _top_level(body: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that statements give; `*` where they cannot be read off."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (target.id if isinstance(target, ast.Name) else "*" for target in targets)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                yield "*"
            case ast.Expr(value=ast.Call()):
                yield "*"  # such as globals().update
