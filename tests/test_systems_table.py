"""docs/systems.yaml: presets and lines of every system load, its tests exist, and the page is generated from it."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from posttrain.recipe import presets
from posttrain.recipe.load import load, load_dict

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "site"))
try:
    table: ModuleType = importlib.import_module("systems")
finally:
    sys.path.pop(0)
SYSTEMS = table.read_table()
NAMES = [system.system for system in SYSTEMS]
MODEL: dict[str, Any] = {"model": {"path": "tiny"}, "run": {"steps": 3}}
AROUND: dict[str, Any] = {  # what a recipe of the stage needs in addition to the lines of a system
    "rl": {**MODEL, "data": {"source": "rows.jsonl"}, "rewards": [{"use": "math.accuracy"}]},
    "dpo": {**MODEL, "data": {"source": "pairs.jsonl"}},
    "sft": {**MODEL, "data": {"source": "rows.jsonl"}},
    "reward_model": {**MODEL, "data": {"source": "pairs.jsonl"}},
    "eval": {"model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}, "rewards": [{"use": "math.accuracy"}]},
    "generate": {"model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}},
}


def test_titles_are_unique() -> None:
    assert len(SYSTEMS) >= 154
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("system", SYSTEMS, ids=NAMES)
def test_presets_and_lines_load(system: Any, tmp_path: Path) -> None:
    """Or the entry gives a reason for having none. Presets load as `algorithm`, lines as a recipe that contains
    them."""
    assert system.is_offered or system.missing
    assert not system.is_offered or system.tests
    for name in system.presets:
        stage = presets.preset(name).stage
        values = {"stage": stage, "algorithm": name, **presets.preset(name).example, **AROUND[stage]}
        if read := presets.preset(name).rewards:
            read_names = {reward["use"] for reward in read}
            values["rewards"] = [*(r for r in values["rewards"] if r["use"] not in read_names), *read]
        load_dict(values, base_dir=tmp_path, where=name)
    if system.shipped:
        load(f"{ROOT}/recipes/{system.shipped}.yaml")
    if system.recipe:
        stage = system.recipe["stage"]
        loaded = load_dict(merge_sections(AROUND.get(stage, {}), system.recipe), base_dir=tmp_path, where=system.system)
        assert loaded.recipe.stage == stage


def merge_sections(around: dict[str, Any], lines: dict[str, Any]) -> dict[str, Any]:
    """Merge sections key by key; lists are replaced by those of the lines."""
    both = {k: {**around[k], **v} for k, v in lines.items() if isinstance(v, dict) and k in around}
    return {**around, **lines, **both}


@functools.cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_named_tests_exist() -> None:
    named = {test for system in SYSTEMS for test in system.tests}
    assert (
        named and [test for test in sorted(named) if test.split("::")[1] not in functions_of(test.split("::")[0])] == []
    )


def test_page_is_generated_from_the_table() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(SYSTEMS), "run `make index`"
