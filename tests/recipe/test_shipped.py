"""Shipped recipes, the index of components, and the JSON schema."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from posttrain import registry
from posttrain.path_resolution import shipped_folder
from posttrain.recipe import keys, schema
from posttrain.recipe.load import load
from posttrain.recipe.tree import plain
from posttrain.recipe.yaml import read

RECIPES = sorted(shipped_folder("recipes").rglob("*.yaml"))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables without defaults that recipes require."""
    for path in RECIPES:
        for name in re.findall(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", path.read_text(encoding="utf-8")):
            monkeypatch.setenv(name, "tiny")


@pytest.fixture(scope="module")
def validator() -> Any:
    built = json.loads(schema.text())
    jsonschema.Draft7Validator.check_schema(built)
    return jsonschema.Draft7Validator(built)


def test_recipes_are_found() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.relative_to(shipped_folder("recipes")).as_posix())
def test_shipped_recipe_loads_and_documents_itself(path: Path, validator: Any) -> None:
    """It matches the schema, and its first lines name the schema, describe the recipe and give the command."""
    loaded = load(str(path))
    assert [error.message for error in validator.iter_errors(plain(read(path).tree))] == []
    first, second, *_ = loaded.text.splitlines()
    found = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert found, first
    assert (path.parent / found[1]).resolve() == (shipped_folder("recipes") / "schema.json").resolve()
    assert second.startswith("# ")
    head = loaded.text[: loaded.text.index("\nstage:")]
    assert f"posttrain {loaded.recipe.verb} " in head, "the command that runs it"


FUNCTION = re.compile(r"([\w./-]+\.py):(\w+)")


def test_functions_named_by_recipes_exist_in_their_scripts() -> None:
    missing, seen = [], 0
    for path in RECIPES:
        for script, name in FUNCTION.findall(path.read_text(encoding="utf-8")):
            body = ast.parse((path.parent / script).read_text(encoding="utf-8")).body
            seen += 1
            if name not in {getattr(node, "name", None) for node in body}:
                missing.append(f"{path.name}: {script}:{name}")
    assert seen > 10
    assert missing == []


def test_schema_file_is_up_to_date() -> None:
    """Otherwise run `python -m posttrain.recipe.schema`."""
    assert json.loads((shipped_folder("recipes") / "schema.json").read_text(encoding="utf-8")) == json.loads(
        schema.text()
    )


def test_index_file_is_up_to_date() -> None:
    """Otherwise run `python -m posttrain.registry`."""
    assert json.loads(registry.INDEX.read_text(encoding="utf-8")) == json.loads(json.dumps(registry.build_index()))


RL = {"stage": "rl", "model": {"path": "x"}, "data": {"source": "x"}, "rewards": [{"use": "math.accuracy"}]}


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": {"use": "clip", "clip_high": 0.3}},
        {"loss": {"clip_high": 0.3}},
        {"loss": "mine.py:loss"},
        {"loss": {"use": "mine.py:loss", "anything": 1}},
        {"keep": "dynamic_sampling"},
        {"keep": None},
        {"rollout": {"group_size": "${GROUP}"}},
        {"algorithm": "dapo"},
        {"run": {"steps": 3, "max_minutes": 1.5}},
    ],
)
def test_schema_accepts_valid_recipes(changes: dict[str, Any], validator: Any) -> None:
    assert validator.is_valid({**RL, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"rollou": {}},
        {"loss": {"clip_hig": 0.3}},
        {"loss": {"use": "clip", "beta": 0.3}},
        {"loss": {"use": "clop"}},
        {"keep": "dynamic_samplin"},
        {"rollout": {"group_size": "eight"}},
        {"rollout": {"group_size": 0}},
        {"algorithm": "simpo"},
        {"data": {"source": "x", "train_on": "all"}},
        {"model": {"path": "x", "lora": {"rnk": 1}}},
        {"rewards": []},
        {"rewards": [{"weight": 1}]},
        {"stage": "rll"},
        {"model": None},
    ],
)
def test_schema_rejects_invalid_recipes(changes: dict[str, Any], validator: Any) -> None:
    assert not validator.is_valid({**RL, **changes})


def test_schema_requires_sections_unless_inherited(validator: Any) -> None:
    assert not validator.is_valid({"stage": "rl"})
    assert validator.is_valid({"stage": "rl", "extends": "other.yaml"})


def test_schema_checks_pipeline_entries(validator: Any) -> None:
    entry = {"name": "a", "stage": "sft", "data": {"source": "x"}}
    pipeline = {"stage": "pipeline", "defaults": {"model": {"path": "tiny"}}}
    assert validator.is_valid({**pipeline, "stages": [entry]})
    assert not validator.is_valid({**pipeline, "stages": [{**entry, "rollout": {}}]})
    assert not validator.is_valid({**pipeline, "stages": [{"stage": "sft"}]})
    assert not validator.is_valid({**pipeline, "stages": [{**entry, "extends": "other.yaml"}]})
    assert not validator.is_valid({**pipeline, "stages": [entry], "defaults": {"modle": {}}})


def test_unused_lists_only_existing_keys() -> None:
    """Otherwise renaming a key would silently disable its entry in `unused`."""
    for stage in keys.BY_NAME.values():
        for path in stage.unused:
            section, _, key = path.partition(".")
            inner = keys.models(stage.model_fields[section].annotation)[0]
            assert key in keys.own_keys(inner), (stage.__name__, path)
