"""The adapter tables only contain names. The product computes; the modes that call it compute nothing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
TABLES = sorted((HERE / "adapters").glob("*.yaml"))
DEFAULTS = ("start", "choices")  # arguments of modes that hold numbers: what interface.json gives where a case has none


@pytest.fixture(scope="module")
def tables(runner: ModuleType) -> ModuleType:
    return sys.modules[runner.read_table.__module__]


def numbers(node: yaml.Node, key: str = "") -> Iterator[str]:
    """Return the numbers of a table outside of DEFAULTS and of the steps of `at_steps`, each with its line."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
            yield f"{node.start_mark.line + 1}: the number {node.value}"
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value if node.tag != "!at_steps" else ():
            yield from numbers(item, key)
    else:
        for name, value in node.value:
            yield from numbers(name)
            if name.value not in DEFAULTS:
                yield from numbers(value, name.value)


def tags(node: yaml.Node) -> Iterator[str]:
    if not isinstance(node, yaml.ScalarNode):
        for item in node.value:
            for inner in item if isinstance(item, tuple) else (item,):
                yield from tags(inner)
    if node.tag.startswith("!"):
        yield node.tag[1:]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_table_contains_no_numbers(path: Path) -> None:
    assert list(numbers(yaml.compose(path.read_text()))) == []


def test_adapters_folder_contains_only_tables() -> None:
    assert len(TABLES) >= 4
    assert [p.name for p in (HERE / "adapters").rglob("*.*") if p.suffix != ".yaml"] == []


def test_every_mode_is_used(tables: ModuleType) -> None:
    """By a table, or by another mode."""
    named = {tag for path in TABLES for tag in tags(yaml.compose(path.read_text()))}
    source = "".join((HERE / f"{module}.py").read_text() for module in tables.MODULES)
    called = {
        n.func.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert set(tables.MODES) - named - called == set()
    assert named - set(tables.MODES) == {"f", "reward", "here"}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("a: !no_such_mode [!f loss.kl.k1, x]", KeyError),
        ("a: !tensor [1]", KeyError),  # a function of mechanics that is not a mode
        ("a: !call [!f loss.kl.no_such_function, x]", AttributeError),
        ("a: !call [!f os.system, x]", ModuleNotFoundError),
        ("a: !call [!reward length.no_such_reward, x]", Exception),
        ("a: !call [!here no_such_function, x]", KeyError),
        ("a: !call [!f loss.kl.k1]", TypeError),
        ("a: !call {function: !f loss.kl.k1, outputs: x, no_such_argument: x}", TypeError),
        ("a: !call [!!python/name:os.system , x]", yaml.YAMLError),
        ("a: !!python/object/apply:os.getcwd []", yaml.YAMLError),
        ("a: !call [!f loss.kl.k1, x]\na: !call [!f loss.kl.k2, x]", ValueError),
        ("a: !call {function: !f loss.kl.k1, outputs: x, outputs: y}", ValueError),
    ],
)
def test_invalid_table_is_refused(line: str, error: Any, tables: ModuleType, tmp_path: Path) -> None:
    good = "good: !call [!f loss.kl.k1, x]\n"
    (tmp_path / "table.yaml").write_text(good)
    assert list(tables.read_table(tmp_path / "table.yaml")) == ["good"]
    (tmp_path / "table.yaml").write_text(good + line)
    with pytest.raises(error):
        tables.read_table(tmp_path / "table.yaml")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a: !call [!f x, {y: 1}]", ["1: the number 1"]),
        ("a: !call {names: {y: 1.0e-4}}", ["1: the number 1.0e-4"]),
        ("a: !call {names: {1: y}}", ["1: the number 1"]),
        ("a: !at_steps [!f x, y, [0, 50]]", []),
        ("a: !on_batch {start: {y: 1}, choices: {z: {y: [1]}}}", []),
        ("a: !call [!f x, {y: true, z: null}]", []),
    ],
)
def test_number_in_a_table_is_detected(line: str, found: list[str]) -> None:
    assert list(numbers(yaml.compose(line))) == found


def test_list_of_names_maps_them_to_themselves(tables: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text("a: !call [!f evaluate.estimators.avg_at_k, [avg, {rows: per_problem}]]")
    adapter = tables.read_table(tmp_path / "table.yaml")["a"]
    assert adapter({"params": {}, "inputs": {"correct": [[1, 0]]}}).keys() == {"avg", "rows"}


def test_modes_contain_no_arithmetic(tables: ModuleType) -> None:
    """mechanics.py and similar modules move numbers and call the product; they contain no operators that compute new
    numbers.
    """
    for module in tables.MODULES:
        nodes = list(ast.walk(ast.parse((HERE / f"{module}.py").read_text())))
        made = [n for n in nodes if isinstance(n, (ast.BinOp, ast.AugAssign)) and not isinstance(n.op, ast.BitOr)]
        signs = [n for n in nodes if isinstance(n, ast.UnaryOp) and not isinstance(n.op, ast.Not)]
        assert [f"{module}: {ast.unparse(n)}" for n in [*made, *signs]] == []
