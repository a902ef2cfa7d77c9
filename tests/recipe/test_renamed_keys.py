"""Recipes and run directories of older versions: renamed keys are read under their current names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.errors import UserError
from posttrain.recipe.load import load, load_dict
from posttrain.renamed_keys import current_key
from posttrain.run.resolved_recipe import read_resolved, refuse_other_recipe

RL = """stage: rl
model: {path: tiny}
data: {source: rows.jsonl}
rewards: [{use: math.accuracy}]
run: {steps: 1}
tools: [{use: calculator}]
"""


def test_old_recipe_is_read_with_current_names_and_a_note(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    old = "algorithm: xrpo_novelty\nbonuses: [{use: novelty, lam: 3.0}]\nspread: salt\n"
    path.write_text(f"{RL}{old}controllers: {{bonuses.0.lam: {{use: cosine}}}}\n")
    loaded = load(str(path))
    assert loaded.resolved["advantage_transforms"][0]["lam"] == 3.0
    assert loaded.resolved["credit_assignment"]["use"] == "salt"
    assert [*loaded.resolved["controllers"]] == ["advantage_transforms.0.lam"]
    assert [(note.where.rpartition("/")[2], note.what) for note in loaded.notes] == [
        ("r.yaml:8:1", "bonuses: was renamed to `advantage_transforms`"),
        ("r.yaml:9:1", "spread: was renamed to `credit_assignment`"),
        ("r.yaml:10:15", "controllers.bonuses.0.lam: was renamed to `advantage_transforms.0.lam`"),
    ]


def test_old_keys_in_overrides_extended_recipes_and_pipeline_stages(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(f"{RL}spread: salt\n")
    (tmp_path / "top.yaml").write_text("stage: rl\nextends: base.yaml\n")
    assert load(str(tmp_path / "top.yaml")).resolved["credit_assignment"]["use"] == "salt"
    assert load(str(tmp_path / "top.yaml"), ["spread=null"]).resolved["credit_assignment"] is None
    rl = {"name": "a", "stage": "rl", "rewards": [{"use": "math.accuracy"}], "run": {"steps": 1}}
    rl |= {"model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}, "tools": [{"use": "calculator"}]}
    values = {"stage": "pipeline", "defaults": {"spread": "salt"}, "stages": [rl]}
    loaded = load_dict(values, base_dir=tmp_path, where="r", overrides=["stages.a.bonuses=[novelty]"])
    assert loaded.resolved["stages"][0]["credit_assignment"]["use"] == "salt"
    assert loaded.resolved["stages"][0]["advantage_transforms"][0]["use"] == "novelty"


def test_old_key_together_with_its_new_name_raises(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"{RL}spread: salt\ncredit_assignment: salt\n")
    with pytest.raises(UserError, match="spread: unknown key"):
        load(str(tmp_path / "r.yaml"))


def test_run_directories_of_older_versions_are_read_and_resumed(tmp_path: Path) -> None:
    before = {"stage": "rl", "bonuses": [{"use": "novelty", "lam": 2.5}], "spread": None, "seed": 1}
    now = {
        "stage": "rl",
        "advantage_transforms": [{"use": "novelty", "lam": 2.5}],
        "credit_assignment": None,
        "seed": 1,
    }
    (tmp_path / "resolved.json").write_text(json.dumps(before))
    assert read_resolved(tmp_path, "rl") == now
    refuse_other_recipe(tmp_path, before, now, may_change=set())
    with pytest.raises(UserError, match=r"advantage_transforms\[0\].lam was 2.5, is 3.0"):
        refuse_other_recipe(tmp_path, before, {**now, "advantage_transforms": [{"use": "novelty", "lam": 3.0}]})


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("bonuses", "advantage_transforms"),
        ("stages.train.spread.alpha", "stages.train.credit_assignment.alpha"),
        ("stages[0].bonuses[1].use", "stages[0].advantage_transforms[1].use"),
        ("rewards.0.params.spread", "rewards.0.params.spread"),
        ("spreads", "spreads"),
    ],
)
def test_current_key_of_an_old_key(old: str, today: str) -> None:
    assert current_key(old) == today
