"""Which keys a function with `**kwargs` reads of them whatever happens, read off its text."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

# Where a statement may not run, or what it raises may be caught.
_GUARDED = (ast.If, ast.IfExp, ast.Try, ast.BoolOp, ast.While, ast.With, ast.Match, ast.FunctionDef, ast.Lambda)


def keys_read(function: Callable[..., Any], name: str) -> list[str]:
    """The keys of `kwargs["key"]` that every call of a function reads; [] where its text is not to be had.

    name: of the argument. A read behind a condition, or where an error may be caught, is none, nor is one of a key that
    the text names elsewhere too (`"key" in kwargs`, `kwargs.get("key")`): the function looks whether it is there.
    """
    inner = getattr(function, "func", function)
    inner = inner if inspect.isroutine(inner) else type(inner).__call__
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(inner))))
    except (OSError, TypeError, SyntaxError):
        return []
    written = tree.body[0] if tree.body else None
    if not isinstance(written, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    texts = Counter(n.value for n in ast.walk(written) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    found = Counter(key for statement in written.body for key in _read(statement, name))
    changed = any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(written))
    return [] if changed else [key for key, times in found.items() if texts[key] == times]


def _read(node: ast.AST, name: str) -> Iterator[str]:
    if isinstance(node, _GUARDED):
        return
    match node:
        case ast.Subscript(value=ast.Name(id=read), slice=ast.Constant(value=str(key)), ctx=ast.Load()) if read == name:
            yield key
    for below in ast.iter_child_nodes(node):
        yield from _read(below, name)
