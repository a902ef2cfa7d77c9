"""Adapters map names only: their syntax is a list of what may occur, and nothing that computes is on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODES = (
    "mechanics",
    "step_modes",
    "model_modes",
    "pair_modes",
    "agent_modes",
    "hint_modes",
    "sampler_modes",
    "replay_modes",
    "shape_modes",
)
ALLOWED = (
    *(ast.Module, ast.ImportFrom, ast.alias, ast.Assign, ast.Expr),
    *(ast.Dict, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.Store),
    *(ast.Call, ast.keyword, ast.Attribute),
)


def violations(source: str) -> list[str]:
    """What an adapter module may not do, [] if it only maps names.

    Allowed: imports of modes from mechanics and of modules from posttrain; tables of words, None, True and False; calls
    of modes; `module.function` as a value. So no arithmetic, comparison, loop, condition, own function, number, method
    call, or other library.
    """
    tree = ast.parse(source)
    found: list[str] = []
    modes: set[str] = set()
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name for alias in node.names}
            if node.module in MODES:
                modes |= names
            elif (node.module or "").split(".")[0] == "posttrain":
                modules |= names
            else:
                found.append(f"{node.lineno}: imports from {node.module}")
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if not isinstance(node, ALLOWED):
            found.append(f"{line}: {type(node).__name__}")
        elif isinstance(node, ast.Constant) and not isinstance(node.value, (str, bool, type(None))):
            found.append(f"{line}: the number {node.value!r}")
        elif isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in modes):
            found.append(f"{line}: calls {ast.unparse(node.func)}, which is no mode of mechanics")
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in modules):
            found.append(f"{line}: {ast.unparse(node)}, which is no function of a posttrain module")
        elif isinstance(node, ast.Assign) and not all(isinstance(target, ast.Name) for target in node.targets):
            found.append(f"{line}: assigns to {ast.unparse(node.targets[0])}")
    return found


@pytest.mark.parametrize("path", sorted((HERE / "adapters").glob("*.py")), ids=lambda p: p.stem)
def test_an_adapter_only_maps_names(path: Path) -> None:
    assert violations(path.read_text()) == []


def test_there_are_adapters() -> None:
    assert len(list((HERE / "adapters").glob("*.py"))) >= 4
    assert list((HERE / "adapters").rglob("*.py")) == list((HERE / "adapters").glob("*.py"))


@pytest.mark.parametrize(
    "line",
    [
        "ADAPTERS = {'a': call(group.group, outputs=x * y)}",
        "ADAPTERS['a'] = call(group.group)",
        "ADAPTERS |= {'a': call(group.group)}",
        "x = -y",
        "x = y < z",
        "x = y if z else w",
        "x = y and z",
        "x = {'eps': 1e-4}",
        "x = [f for f in y]",
        "x = lambda case: case",
        "def f(case): return case",
        "class A: pass",
        "for x in y: pass",
        "while x: pass",
        "if x: y = z",
        "import torch",
        "import operator",
        "from torch import add",
        "from functools import partial",
        "x = group.group(y)",
        "x = y.sum()",
        "x = sum(y)",
        "x = call(group).mean",
        "x = group.group.__wrapped__",
        "x = y[z]",
        "x = f'{y}'",
        "x = [*y]",
        "x = (y := z)",
        "assert x",
    ],
)
def test_what_computes_would_be_seen(line: str) -> None:
    good = "from mechanics import call\nfrom posttrain.advantage import group\n"
    assert violations(good + "ADAPTERS = {'a': call(group.group, outputs='x', empty=True, start={'k': None})}") == []
    assert violations(good + line) != []


@pytest.mark.parametrize("module", MODES)
def test_the_modes_hold_no_arithmetic(module: str) -> None:
    """mechanics.py and its like move numbers and call the product; operators that make new numbers are not in them."""
    tree = ast.parse((HERE / f"{module}.py").read_text())
    made = [n for n in ast.walk(tree) if isinstance(n, (ast.BinOp, ast.AugAssign)) and not isinstance(n.op, ast.BitOr)]
    signs = [n for n in ast.walk(tree) if isinstance(n, ast.UnaryOp) and not isinstance(n.op, ast.Not)]
    assert [ast.unparse(n) for n in [*made, *signs]] == []
