"""Whether a user's script has a function, read off its text. Nothing is imported: a script may need torch, which takes
seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from posttrain.errors import UserError, nearest
from posttrain.places import find


def has_function(use: str, base_dir: Path) -> None:
    """Refuse `file.py:function` where there is no such file, or no such name at its top level.

    `package.module:function` is not looked at.
    """
    file, _, name = use.rpartition(":")
    if not file.endswith(".py"):
        return
    path = find(file, base_dir, "script")
    try:
        names = set(_top_level(ast.parse(path.read_text(encoding="utf-8"), str(path)).body))
    except SyntaxError as error:
        raise UserError(f"{path} is no Python: line {error.lineno}: {error.msg}") from error
    if name not in names and "*" not in names:
        near = nearest(name, names)
        known = ", ".join(sorted(n for n in names if not n.startswith("_"))) or "nothing"
        hint = f"did you mean `{near}`?" if near else ""
        raise UserError(f"{path} has no function {name}", allowed=f"it has: {known}", hint=hint)


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
