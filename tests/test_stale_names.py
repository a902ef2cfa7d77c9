"""Names of posttrain in code that few tests run: attributes of its modules, imports in strings and in docs."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
IMPORT = re.compile(r"^\s*from (posttrain[\w.]*) import (\([^)]*\)|[^\n#]+)", re.MULTILINE)
MEANT = {  # the test asserts that it is missing; an invented package; the examples below
    ("tests/test_api.py", "posttrain.grpo"),
    ("tests/test_import_circles.py", "posttrain.b"),
    ("tests/test_stale_names.py", "posttrain.loss.clip.clop"),
}


@functools.cache
def module_of(name: str) -> ModuleType | None:
    """Return the module of that name; None if it does not exist, or if a package that it needs is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def lacks(module: ModuleType, name: str) -> bool:
    """Return whether `name` is neither a name in the module nor a submodule, which may need packages that are not
    installed."""
    if hasattr(module, name):
        return False
    return not hasattr(module, "__path__") or importlib.util.find_spec(f"{module.__name__}.{name}") is None


def modules_in(nodes: list[ast.AST]) -> dict[str, ModuleType]:
    """Return the modules of posttrain that code imports, by their name in the code, except names that are bound
    again."""
    found: dict[str, ModuleType | None] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "posttrain" and not node.level:
            found |= {a.asname or a.name: module_of(f"{node.module}.{a.name}") for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.asname: module_of(a.name) for a in node.names if a.asname and a.name.startswith("posttrain")}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return {name: module for name, module in found.items() if module is not None and name not in bound}


def scripts_in(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """Yield multi-line strings that are Python and mention posttrain: scripts that tests run in separate processes."""
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if "posttrain" in text and "\n" in text:
            try:
                yield ast.parse(textwrap.dedent(text))
            except SyntaxError:
                continue  # prose


def find_stale(tree: ast.AST) -> Iterator[str]:
    """Yield names of posttrain's modules that code uses, or replaces with `setattr`, and that do not exist."""
    nodes = list(ast.walk(tree))
    modules = modules_in(nodes)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (module := module_of(node.module or "")):
            if module.__name__.split(".")[0] == "posttrain" and not node.level:
                yield from (f"{module.__name__}.{a.name}" for a in node.names if lacks(module, a.name))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (module := modules.get(node.value.id)) and lacks(module, node.attr):
                yield f"{module.__name__}.{node.attr}"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr" and len(node.args) > 1:
            place, name = node.args[:2]
            module = modules.get(place.id) if isinstance(place, ast.Name) else None
            if module and isinstance(name, ast.Constant) and lacks(module, str(name.value)):
                yield f"{module.__name__}.{name.value}"
    for script in scripts_in(nodes):
        yield from find_stale(script)


def list_tracked(*endings: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *endings], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return listed.split() or pytest.skip("no checkout of git")


def test_names_used_in_code_exist() -> None:
    texts = ((file, (ROOT / file).read_text(encoding="utf-8")) for file in list_tracked("*.py"))
    found = {(file, name) for file, text in texts for name in find_stale(ast.parse(text))}
    assert found - MEANT == set(), "a function or module has another name or place now"


def test_imports_in_docs_exist() -> None:
    found = []
    for file in list_tracked("*.md"):
        for module, names in IMPORT.findall((ROOT / file).read_text("utf-8")):
            place = module_of(module)
            words = [part.split()[0] for part in names.strip("() \n").split(",") if part.strip()]
            found += [f"{file}: {module}.{word}" for word in words if place is None or lacks(place, word)]
    assert found == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from posttrain.loss import clip\nclip.clop()", ["posttrain.loss.clip.clop"]),
        ("from posttrain.loss import clop", ["posttrain.loss.clop"]),
        ("import posttrain.loss.clip as c\nmonkeypatch.setattr(c, 'clop', 1)", ["posttrain.loss.clip.clop"]),
        ("RUN = '''\n  from posttrain.loss import clip\n  clip.clop()\n'''", ["posttrain.loss.clip.clop"]),
        ("RUN = f'''\nfrom posttrain.loss import clip\nclip.clop({x})\n'''", ["posttrain.loss.clip.clop"]),
        ("from posttrain.loss import clip\nclip.clip()\ndef f(clip): clip.clop()", []),
        ("'''from posttrain on,\nall is prose'''", []),
    ],
)
def test_check_finds_stale_names(code: str, found: list[str]) -> None:
    assert list(find_stale(ast.parse(code))) == found
