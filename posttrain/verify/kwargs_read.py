"""Static analysis of the keys that a function always reads from its `**kwargs`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

# Nodes whose body may not run, or may have its exceptions caught.
_GUARDED = (ast.If, ast.IfExp, ast.Try, ast.BoolOp, ast.While, ast.With, ast.Match, ast.FunctionDef, ast.Lambda)


def keys_read(function: Callable[..., Any], name: str) -> list[str]:
    """Return the keys of `kwargs["key"]` that every call of a function reads; [] if its source is not available.

    name: name of the kwargs argument. A read under a condition, or inside a try block, does not count. Neither does a
    key that the source names elsewhere too (`"key" in kwargs`, `kwargs.get("key")`), because the function then checks
    whether the key is present.
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
    found = Counter(key for statement in written.body for key in _read_keys(statement, name))
    changed = any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(written))
    return [] if changed else [key for key, times in found.items() if texts[key] == times]


def _read_keys(node: ast.AST, name: str) -> Iterator[str]:
    if isinstance(node, _GUARDED):
        return
    match node:
        case ast.Subscript(value=ast.Name(id=read), slice=ast.Constant(value=str(key)), ctx=ast.Load()) if read == name:
            yield key
    for below in ast.iter_child_nodes(node):
        yield from _read_keys(below, name)
