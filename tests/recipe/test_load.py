"""Recipe loading: layers, origins, overrides, extends, presets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.load import Loaded, load, load_dict
from posttrain.recipe.presets import names, preset
from posttrain.recipe.stages import RlRecipe, SftRecipe

from .conftest import RL, SFT

Loads = Callable[..., Loaded]
Errors = Callable[..., str]


def test_every_value_has_its_origin(loads: Loads) -> None:
    loaded = loads(RL + "algorithm: dapo\noptim: {lr: 1e-5}\n", "rollout.group_size=4", "loss.clip_high=0.3")
    assert loaded.origins["loss.clip_low"].kind == "preset"
    assert str(loaded.origins["loss.aggregation"]) == "preset dapo"
    assert str(loaded.origins["optim.lr"]) == "r.yaml:7"
    assert str(loaded.origins["rewards.0.use"]) == "r.yaml:5"
    assert str(loaded.origins["rollout.group_size"]) == "command line"
    assert str(loaded.origins["loss.clip_high"]) == "command line"
    assert str(loaded.origins["optim.eps"]) == "default"
    assert loaded.resolved["loss"]["clip_high"] == 0.3
    assert loaded.resolved["loss"]["aggregation"] == "token_mean"
    assert loaded.recipe.loss.params["clip_low"] == 0.2


def test_resolved_recipe_is_json_and_covers_every_origin(loads: Loads) -> None:
    loaded = loads(RL)
    assert json.loads(json.dumps(loaded.resolved)) == loaded.resolved
    for key in loaded.origins:
        value = loaded.resolved
        for part in key.split("."):
            value = value[int(part)] if part.isdigit() else value[part]
    assert "train_on" not in loaded.resolved["data"], "a key that rl does not use"


def test_loaded_recipe_has_its_path(loads: Loads, tmp_path: Path) -> None:
    loaded = loads(SFT)
    assert loaded.path == (tmp_path / "r.yaml").resolve()
    assert loaded.recipe.base_dir == tmp_path.resolve()
    assert (loaded.name, loaded.text) == ("r", SFT)


def test_stage_defaults_are_kept_when_another_key_of_the_section_is_set(loads: Loads) -> None:
    """sft's learning rate stays sft's when only weight_decay is written."""
    assert loads(SFT + "optim: {weight_decay: 0.1}\n").recipe.optim.lr == 1e-5
    assert loads(RL + "optim: {weight_decay: 0.1}\n").recipe.optim.lr == 1e-6


def test_overrides_set_typed_values(loads: Loads) -> None:
    text = RL.replace("[{use: math.accuracy}]", "[{use: math.accuracy}, {use: format.structure, name: tags}]")
    loaded = loads(
        text,
        "rewards.0.weight=0.5",
        "rewards.tags.weight=1e-1",
        "model.lora={rank: 4}",
        "model.lora.alpha=8",
        "keep=null",
    )
    assert [r.weight for r in loaded.recipe.rewards] == [0.5, 0.1]
    assert (loaded.recipe.model.lora.rank, loaded.recipe.model.lora.alpha) == (4, 8)
    assert loaded.recipe.keep is None


def test_later_override_takes_precedence(loads: Loads) -> None:
    assert loads(SFT, "run.steps=4", "run.steps=5").recipe.run.steps == 5


@pytest.mark.parametrize(
    ("override", "stays", "goes"),
    [("run.epochs=2", "run.epochs", "run.steps"), ("data.mix=[{source: a.jsonl}]", "data.mix", "data.source")],
)
def test_override_replaces_an_alternative_key(loads: Loads, override: str, stays: str, goes: str) -> None:
    """Otherwise the user would have to unset the file's alternative by hand."""
    loaded = loads(SFT, override)
    section, key = goes.split(".")
    assert loaded.resolved[section][key] is None and loaded.origins[goes].kind == "default"
    assert any(origin.kind == "command line" for name, origin in loaded.origins.items() if name.startswith(stays))


def test_alternative_keys_in_one_layer_raise(loads: Loads, errors: Errors) -> None:
    assert "run: give either `steps` or `epochs`: remove one" in errors(SFT.replace("steps: 3", "steps: 3, epochs: 1"))
    assert "run: give either `steps` or `epochs`" in errors(SFT, "run.steps=2", "run.epochs=1")
    assert loads(SFT, "run.steps=null", "run.epochs=1").recipe.run.epochs == 1


def test_length_of_a_stage_replaces_the_default_length(loads: Loads) -> None:
    text = """
stage: pipeline
defaults: {model: {path: tiny}, data: {source: rows.jsonl}, run: {epochs: 2}}
stages:
  - {name: a, stage: sft, run: {steps: 5}}
  - {name: b, stage: sft}
"""
    found = loads(text, "stages.b.run.steps=7").resolved["stages"]
    assert [(s["run"]["steps"], s["run"]["epochs"]) for s in found] == [(5, None), (7, None)]


def test_invalid_overrides_are_reported_together(errors: Errors) -> None:
    assert errors(RL, "run.steps", "seed.x=1", "model.path.x=1", "rewards.3.weight=1", "run.seed=") == "\n".join(
        [
            "command line  `run.steps`: an override is written key.path=value",
            "  hint: write run.steps=VALUE",
            "command line  model.path.x: `model.path` is a single value and has no keys",
            "command line  rewards has no entry `3`",
            "  entries: 0 to 0",
            "command line  run.seed: no value after `=`",
            "  hint: give a value, or leave this override out",
            "command line  seed: unknown key",
            "  known here: tools, tool_format, tool_prompt, tool_workers, tool_memory_mb, "
            "environment, earlier_turns, stage, algorithm,"
            " model, data, sampler, rollout, prompt_variants, rewards, scoring, replay, group_rewards, keep,"
            " advantage, factors, advantage_transforms,"
            " credit_assignment, select, corrections, loss, kl, regularisers, controllers, critic, solutions,"
            " opponent, batch, optim, eval,"
            " extends, run, track",
            "  hint: `seed` belongs to `run` or `data`",
        ]
    )


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("run.output=", "write run.output=null for none, run.output='\"\"' for empty text"),
        ("run.steps=", "write run.steps=null for none"),
        ("loss.use=", "name a component: `posttrain methods list --kind loss`"),
        ("controllers.kl.coef.use=", "name a component: `posttrain methods list --kind controller`"),
    ],
)
def test_an_empty_value_is_answered_with_what_the_key_accepts(errors: Errors, override: str, hint: str) -> None:
    assert errors(RL, override) == f"command line  {override[:-1]}: no value after `=`\n  hint: {hint}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["controllers.kl.coef.use=cosine", "controllers.kl.coef.low=0.5"], {"use": "cosine", "high": 1.0, "low": 0.5}),
        (["controllers.kl.coef=cosine"], {"use": "cosine", "high": 1.0, "low": 0.0}),
        (["algorithm=grpo_d", "controllers.kl.coef.use=cosine"], {"use": "cosine", "high": 1.0, "low": 0.0}),
        (["algorithm=grpo_d", "controllers.kl.coef.high=0.1"], {"use": "grpo_d", "high": 0.1}),
    ],
)
def test_the_dotted_name_of_a_controller_is_one_key(
    loads: Loads, overrides: list[str], expected: dict[str, Any]
) -> None:
    found = loads(RL, "kl.coef=0.1", *overrides).resolved["controllers"]["kl.coef"]
    assert {key: found[key] for key in expected} == expected
    assert "explore_frac" not in found or found["use"] == "grpo_d", "arguments of the former controller"


def test_short_form_of_a_component(loads: Loads) -> None:
    text = RL + "keep: dynamic_sampling\n"
    assert loads(text).recipe.keep.params["metric"] == "correct"
    assert loads(text, "keep.metric=reward").recipe.keep.params["metric"] == "reward"
    assert loads(RL, "keep=dynamic_sampling", "keep.tol=0.5").resolved["keep"]["tol"] == 0.5
    assert str(loads(text).origins["keep.use"]) == "r.yaml:6"


def test_changing_the_component_drops_the_former_arguments(loads: Loads, write: Callable[..., Path]) -> None:
    """`clip_low` was an argument of clip; `aggregation` belongs to the section and stays."""
    write("def mine(batch, logp, *, a: float = 1.0): ...\n", "mine.py")
    write(RL + "loss: {clip_low: 0.1, aggregation: token_mean}\n", "base.yaml")
    loaded = loads("extends: base.yaml\n", "loss.use=mine.py:mine", "loss.a=2.0")
    assert loaded.resolved["loss"]["aggregation"] == "token_mean"
    assert "clip_low" not in loaded.resolved["loss"]
    assert loaded.resolved["loss"]["a"] == 2.0
    assert loads("extends: base.yaml\n", "loss.use=clip").resolved["loss"]["clip_low"] == 0.1


def test_extends(write: Callable[..., Path], loads: Loads) -> None:
    write(SFT + "optim: {lr: 1e-3, weight_decay: 0.1}\n", "sub/base.yaml")
    write("extends: base.yaml\noptim: {lr: 2e-3}\n", "sub/middle.yaml")
    loaded = loads("extends: sub/middle.yaml\nrun: {seed: 5}\n")
    assert (loaded.recipe.optim.lr, loaded.recipe.optim.weight_decay) == (2e-3, 0.1)
    assert (loaded.recipe.run.seed, loaded.recipe.run.steps) == (5, 3)
    assert str(loaded.origins["optim.lr"]) == "sub/middle.yaml:2"
    assert str(loaded.origins["optim.weight_decay"]) == "sub/base.yaml:5"


def test_circular_extends_raises(write: Callable[..., Path]) -> None:
    write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    with pytest.raises(RecipeError, match=r"^b.yaml:1:10  extends: a cycle: a.yaml extends b.yaml extends a.yaml$"):
        load("a.yaml")


def test_extends_of_a_missing_recipe_raises(errors: Errors) -> None:
    told = errors("extends: bse.yaml\n")
    assert told.startswith("r.yaml:1:10  extends: no recipe `bse.yaml`\n  searched: bse.yaml, and the shipped recipes")


def test_extends_is_only_allowed_in_a_file(errors: Errors) -> None:
    told = errors(SFT, "extends=debug/sft")
    assert told == (
        "command line  extends: can only be set in the recipe file\n"
        "  hint: write `extends: debug/sft` into the file, or copy that recipe"
    )


def test_errors_of_an_extended_recipe_name_its_lines(write: Callable[..., Path], errors: Errors) -> None:
    write(SFT.replace("steps: 3", "stepz: 3"), "base.yaml")
    told = errors("extends: base.yaml\nrun: {steps: 2}\n")
    assert told.startswith("base.yaml:4:7  run.stepz: unknown key")


@pytest.mark.parametrize("name", names())
def test_preset_gives_a_valid_recipe_with_every_choice_set(name: str, loads: Loads) -> None:
    found = preset(name)
    base = RL.partition("rewards")[0] if found.stage == "rl" else SFT.replace("sft", found.stage)
    places = ("objective", "tools", "environment", "rollout")
    needed: dict[str, Any] = {key: value for key, value in found.example.items() if key in places}
    if found.stage == "rl":
        needed["rewards"] = found.rewards or [{"use": "math.accuracy"}]
    loaded = loads(base + f"algorithm: {name}\n" + "".join(f"{key}: {value}\n" for key, value in needed.items()))
    for path, value in leaves(found.choices):
        arrived: Any = loaded.resolved
        for part in path:
            arrived = arrived[part]
        assert arrived == value or (isinstance(value, list) and list(arrived) == value)
        assert str(loaded.origins[".".join(map(str, path))]) == f"preset {name}"
    assert found.title and found.purpose
    assert re.fullmatch(r"(\d{4}\.\d{5})?", found.paper), "an arXiv id, or nothing"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, value) of every value that is neither a mapping nor a list of mappings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for number, entry in enumerate(value):
            yield from leaves(entry, (*path, number))
    else:
        yield path, value


def test_presets_exist_and_belong_to_a_stage(errors: Errors) -> None:
    assert {"grpo", "dr_grpo", "dapo", "dpo", "simpo"} <= set(names())
    told = errors(RL + "algorithm: simpo\n")
    place, known = told.splitlines()[:2]
    assert place == "r.yaml:6:12  algorithm: `simpo` is a method of stage dpo, not of rl"
    assert known.startswith("  `posttrain methods list --kind preset` lists all, ")
    assert "hint: did you mean `dr_grpo`?" in errors(RL + "algorithm: dr_grp\n")


def test_load_dict_with_overrides(tmp_path: Path) -> None:
    values = {"name": "first", "stage": "sft", "model": {"path": "tiny"}, "data": {"source": "x"}, "run": {"steps": 1}}
    loaded = load_dict(values, base_dir=tmp_path, where="stage first", overrides=["optim.lr=1.0"])
    assert (loaded.name, loaded.recipe.base_dir, loaded.recipe.optim.lr) == ("first", tmp_path, 1.0)
    assert str(loaded.origins["model.path"]) == "stage first"
    with pytest.raises(RecipeError, match=r"^stage first  model.pth: unknown key"):
        load_dict(values | {"model": {"path": "tiny", "pth": 1}}, base_dir=tmp_path, where="stage first")


def test_recipe_is_loaded_as_its_stages_class(loads: Loads) -> None:
    loaded = loads(RL)
    assert loaded.require(RlRecipe) is loaded.recipe
    with pytest.raises(RecipeError, match=r"r.yaml.*this is a recipe for `posttrain rl`, not for `posttrain sft`"):
        loaded.require(SftRecipe)


def test_missing_recipe_raises_with_similar_names() -> None:
    with pytest.raises(RecipeError) as caught:
        load("quickstrat")
    assert str(caught.value).startswith("no recipe `quickstrat`: it is neither a file nor the name of a shipped recipe")
    assert "hint: did you mean `quickstart`?" in str(caught.value)


def test_name_similar_to_no_recipe_gets_no_hint() -> None:
    with pytest.raises(RecipeError) as caught:
        load("axc_mine.yaml")
    assert "did you mean" not in str(caught.value)


def test_wrong_file_ending_suggests_the_existing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sft.csv", "sft.yaml", "sft.jsonl"):  # of several, the most similar ending
        (tmp_path / name).write_text("stage: sft\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"did you mean `sft\.yaml`\?"):
        load("sft.yml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xff\n", r"^r one.yaml:1  not UTF-8: byte 0xff"),
        (b"stage: sft\n# caf\xe9\n", r"^r one.yaml:2  not UTF-8: byte 0xe9(.|\n)*iconv -f LATIN1"),
        (b"\xef\xbb\xbfa: 1\n\xe9: 2\n", r"^r one.yaml:2  not UTF-8: byte 0xe9"),
        (
            "stage: sft\n".encode("utf-16"),
            r"^r one.yaml  not UTF-8: it begins like UTF-16(.|\n)*iconv -f UTF-16 -t UTF-8 'r one.yaml' >",
        ),
    ],
)
def test_recipe_that_is_not_utf8_names_the_line_and_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r one.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        load("r one.yaml")


def test_reward_and_tool_can_be_given_by_name_only() -> None:
    values = {"stage": "rl", "model": {"path": "tiny"}, "data": {"source": "x.jsonl"}, "run": {"steps": 1}}
    short = {**values, "rewards": ["math.accuracy", {"use": "length.truncation", "weight": 0}], "tools": ["calculator"]}
    recipe = load_dict(short, base_dir=Path.cwd(), where="test").recipe
    assert isinstance(recipe, RlRecipe)
    assert [(r.use, r.weight) for r in recipe.rewards] == [("math.accuracy", 1.0), ("length.truncation", 0.0)]
    assert recipe.tools[0].use == "calculator"


def test_extended_recipe_resolves_paths_relative_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped recipe names ../quickstart_data.py, while the extending recipe is elsewhere. Files beside the extending
    recipe come first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("extends: debug/rl\n")
    source = load("r.yaml").resolved["data"]["source"]
    assert source == f"{shipped_folder('recipes').resolve()}/quickstart_data.py:{source.rpartition(':')[2]}"
    (tmp_path / "base").mkdir()
    text = "stage: sft\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrun: {steps: 1}\n"
    (tmp_path / "base" / "b.yaml").write_text(text)
    (tmp_path / "base" / "rows.jsonl").write_text("{}\n")
    (tmp_path / "own.yaml").write_text("extends: base/b.yaml\n")
    assert load("own.yaml").resolved["data"]["source"] == str((tmp_path / "base" / "rows.jsonl").resolve())
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert load("own.yaml").resolved["data"]["source"] == "rows.jsonl"


def test_empty_mapping_clears_column_names(loads: Loads) -> None:
    text = SFT.replace("{source: rows.jsonl}", "{source: rows.jsonl, columns: {prompt: q}}")
    assert loads(text, "data.columns={answer: a}").resolved["data"]["columns"] == {"prompt": "q", "answer": "a"}
    assert loads(text, "data.columns={}").resolved["data"]["columns"] == {}
    assert loads(text, "data.columns={}", "data.columns.x=y").resolved["data"]["columns"] == {"x": "y"}
