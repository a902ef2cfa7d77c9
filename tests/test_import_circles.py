"""No module of posttrain imports itself indirectly; imports in functions count, imports for types do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "posttrain"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield all import statements below, except those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        else:
            yield from imports(child)


def needed_modules(tree: ast.AST, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of posttrain named by the statements of a file."""
    found = set[str]()
    for statement in imports(tree):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        else:
            for alias in statement.names:
                whole = f"{statement.module}.{alias.name}"
                found.add(whole if whole in known else str(statement.module))
    return found & set(known)


def test_no_import_cycles() -> None:
    files = {module_name(path): path for path in ROOT.rglob("*.py") if "shipped" not in path.parts}
    graph = {name: needed_modules(ast.parse(path.read_text()), files) - {name} for name, path in files.items()}
    assert len(graph["posttrain.train.rl"]) > 10
    TopologicalSorter(graph).prepare()


def test_check_finds_a_cycle_through_a_function() -> None:
    known = {"posttrain.a": Path(), "posttrain.b": Path()}
    texts = {
        "posttrain.a": "def f():\n    from posttrain import b\n",
        "posttrain.b": "if TYPE_CHECKING:\n    from posttrain.a import f\n",
    }
    graph = {name: needed_modules(ast.parse(text), known) for name, text in texts.items()}
    TopologicalSorter(graph).prepare()
    graph["posttrain.b"] |= needed_modules(ast.parse("import posttrain.a"), known)
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()
