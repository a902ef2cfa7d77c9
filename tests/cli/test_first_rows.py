"""Validation of the first rows of a data file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import first_rows
from posttrain.errors import DataError
from posttrain.recipe.sections import Data


def test_rows_without_required_columns_are_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a"}, {"prompt": "a", "completion": None}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ((_, check),) = first_rows.list_checks({"stage": "sft"}, Data(source="r.jsonl"), tmp_path, [])
    with pytest.raises(DataError, match=r"(?s)r.jsonl:2 .*no `completion`.*r.jsonl:3 .*`completion` is null"):
        check()


def test_evaluation_rewards_are_checked_on_evaluation_rows(call: Callable[..., Any], folder: Path) -> None:
    """Not on training rows, which may have other columns."""
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    (folder / "held.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2", "answer": "2"}) + "\n")
    words = ["recipe", "validate", "r.yaml", "data.source=train.jsonl"]
    evaluation = "eval={every: 1, n: 1, rewards: [{use: math.accuracy}], data: {source: %s}}"
    assert call(*words, evaluation % "held.jsonl").exit_code == 0
    swapped = call(*words[:-1], "data.source=held.jsonl", evaluation % "train.jsonl")
    assert swapped.exit_code == 2
    assert "eval.data has no column `answer`" in swapped.stderr and "eval.data.columns: {answer:" in swapped.stderr


def test_rl_rewards_are_checked_on_evaluation_rows_too(call: Callable[..., Any], folder: Path) -> None:
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    (folder / "held.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    (folder / "rl.yaml").write_text(
        "stage: rl\nmodel: {path: tiny}\ndata: {source: train.jsonl}\nrewards: [{use: math.accuracy}]\n"
        "eval: {every: 1, data: {source: held.jsonl}}\nrun: {steps: 1}\n"
    )
    told = call("recipe", "validate", "rl.yaml")
    assert told.exit_code == 2 and "eval.data has no column `answer`" in told.stderr


def test_later_rows_without_required_columns_are_named(tmp_path: Path) -> None:
    """Columns are taken from the first rows, but each of the first 2,000 rows is checked."""
    rows = [{"prompt": "a", "completion": "b"}] * 1999 + [{"prompt": "a"}] * 2
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ((_, check),) = first_rows.list_checks({"stage": "sft"}, Data(source="r.jsonl"), tmp_path, [])
    with pytest.raises(DataError, match=r"r.jsonl:2000 .*no `completion`") as told:
        check()
    assert "2001" not in str(told.value)
    ((_, check),) = first_rows.list_checks({"stage": "sft"}, Data(source="r.jsonl", size=1999), tmp_path, [])
    assert check() == []


def test_history_of_alpaca_rows_is_refused_with_plain_text(tmp_path: Path) -> None:
    row = {"instruction": "2", "output": "3", "history": [["0", "1"]]}
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    plain = Data(source="r.jsonl", chat=False)
    ((_, check),) = first_rows.list_checks({"stage": "sft"}, plain, tmp_path, [])
    with pytest.raises(DataError, match="`history` holds earlier turns, which `chat: false` cannot write"):
        check()
    plain = plain.model_copy(update={"prompt_template": "{prompt}"})
    ((_, check),) = first_rows.list_checks({"stage": "sft"}, plain, tmp_path, [])
    assert check() == []


def test_flags_of_parts_that_disagree_are_refused_only_by_stages_that_train_on_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a", "weight": 0}, {"type": "text", "text": "b", "weight": 1}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]
    (tmp_path / "r.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    ((_, check),) = first_rows.list_checks({"stage": "sft"}, Data(source="r.jsonl"), tmp_path, [])
    with pytest.raises(DataError, match="has parts that are trained on and parts that are not"):
        check()
    for stage in ("eval", "generate"):
        ((_, check),) = first_rows.list_checks({"stage": stage}, Data(source="r.jsonl"), tmp_path, [])
        assert check() == []


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([("user", {}), ("assistant", {"train": False})], "every answer has `train: false`"),
        ([("system", {}), ("user", {})], "no message has the role assistant, but system, user"),
        ([("user", {})], ""),
        ([], "`messages` is an empty list"),
    ],
)
def test_rows_without_trained_tokens_raise(
    call: Callable[..., Any], folder: Path, messages: list[tuple[str, dict[str, Any]]], told: str
) -> None:
    row = {"messages": [{"role": role, "content": "1", **more} for role, more in messages]}
    (folder / "r.jsonl").write_text((json.dumps(row) + "\n") * 30)
    result = call("recipe", "validate", "r.yaml", "data.source=r.jsonl")
    assert result.exit_code == 2 and told in result.stderr and "r.jsonl:1" in result.stderr, result.stderr
    right = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    if told:  # one row further down that is trained on
        (folder / "r.jsonl").write_text((json.dumps(row) + "\n") * 30 + json.dumps(right) + "\n")
        assert "no token is trained on" not in call("recipe", "validate", "r.yaml", "data.source=r.jsonl").stderr


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("stage: sft\ndata: {source: rows.jsonl}\nbatch: {siz: 2}\noptim: {lr: fast}\nrun: {steps: 1}",
         ["data.source: rows.jsonl:1", "batch.siz: unknown key", "optim.lr: must be a number"]),
        ("stage: dpo\ndata: {source: rows.jsonl}\nmodel.lora: {rank: x}",
         ["model.lora: unknown key", "no `chosen` and `rejected`"]),
        ("stage: rl\ndata: {source: rows.jsonl}\nrewards: [{use: ./no.py:f}, {use: math.accuracy}]\n"
         "rollout: {group_siz: 1}",
         ["rewards.0.use: reward script not found", "rewards.1.use: reward accuracy: the data has no column `answer`",
          "rollout.group_siz: unknown key"]),
        ("stage: rl\ndata: {source: rows.jsonl}\nrewards: [{use: ./no.py:f}, {use: math.accuracy}]\nrun: {steps: 1}",
         ["rewards.0.use: reward script not found", "rewards.1.use: reward accuracy: the data has no column `answer`"]),
        ("stage: sft\ndata: {source: rows.jsonl, colums: {completion: answers}}\nrun: {steps: 1}",
         ["data.colums: unknown key"]),
        ("stage: pipeline\nstages:\n  - {name: a, stage: sft, model: {path: tiny}, data: {source: rows.jsonl}, "
         "batch: {siz: 2}, run: {steps: 1}}",
         ["stages.0.batch.siz: unknown key", "stages.0.data.source: rows.jsonl:1"]),
    ],
)  # fmt: skip
def test_data_errors_are_reported_together_with_recipe_errors(
    call: Callable[..., Any], folder: Path, recipe: str, told: list[str]
) -> None:
    """Except if the recipe error is in the keys that define which columns are read: it may be the only cause."""
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answers": "2"}\n')
    (folder / "w.yaml").write_text(f"{recipe}\n" + ("" if "pipeline" in recipe else "model: {path: tiny}\n"))
    result = call("recipe", "validate", "w.yaml", "--json")
    assert result.exit_code == 2
    problems = [one["what"] for one in json.loads(result.stdout)["problems"]]
    assert len(problems) == len(told) and all(any(word in one for one in problems) for word in told), problems


def test_row_errors_are_reported_in_order(call: Callable[..., Any], folder: Path) -> None:
    """Of a source on the command line all have the same place, and what is left of a list stands at its end."""
    (folder / "r.jsonl").write_text("{,}\n" * 9)
    found = json.loads(call("recipe", "validate", "r.yaml", "data.source=r.jsonl", "--json").stdout)["problems"]
    told = [one["what"].removeprefix("data.source: ") for one in found]
    assert [one.rpartition(":2: ")[0] for one in told[:5]] == [f"r.jsonl:{line}" for line in range(1, 6)]
    assert told[5:] == ["and 4 lines more"]


def test_missing_columns_raise(call: Callable[..., Any], folder: Path) -> None:
    """Also with more rows than are read first; a column that starts later is found."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = "stage: rl\nmodel: {path: tiny}\ndata: {source: train.jsonl}\nrewards: [{use: math.accuracy}]\n"
    (folder / "rl.yaml").write_text(head + "run: {steps: 1}\n")
    sampler = "sampler={use: curriculum_stage, column: hard}"
    for words, column in ((sampler, "hard"), ("algorithm=ghpo", "solution")):
        told = call("recipe", "validate", "rl.yaml", words)
        assert told.exit_code == 2 and f"reads the column `{column}`, and the data has none" in told.stderr
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*rows, {**rows[0], "hard": 0.5}]))
    assert call("recipe", "validate", "rl.yaml", sampler).exit_code == 0


@pytest.mark.parametrize(
    ("scale", "boundaries", "code", "told"),
    [
        (5, "[0.3, 1]", 2, "`hard` is 0 to 4.9: 39 of 50 prompts are outside of 0 to 1"),
        (1, "[0.1, 0.2]", 0, "39 of 50 prompts have a `hard` above the last boundary 0.2: no stage draws them"),
        (1, "[0.5, 1]", 0, ""),
    ],
)
def test_difficulties_unusable_by_the_curriculum_raise(
    scale: int, boundaries: str, code: int, told: str, call: Callable[..., Any], folder: Path
) -> None:
    """Of 0, 0.02, ..., 0.98 eleven are at most 0.2; of five times as much eleven are at most 1."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "hard": scale * n / 50} for n in range(50)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = "stage: rl\nmodel: {path: tiny}\ndata: {source: train.jsonl}\nrewards: [{use: math.accuracy}]\n"
    sampler = f"sampler: {{use: curriculum_stage, column: hard, boundaries: {boundaries}}}\n"
    (folder / "rl.yaml").write_text(head + sampler + "run: {steps: 1}\n")
    result = call("recipe", "validate", "rl.yaml")
    assert result.exit_code == code and told in result.stderr
    assert told or "boundary" not in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.params={levels: [0]}"], "give `size`"),
        (["data.size=4", "data.params={levels: [0, 1], shares: [1]}"], "shares [1]"),
        (["data.size=4", "data.params={levels: [-1]}"], "levels [-1]"),
        (["data.size=4", "data.params={levels: [0, 1], shares: [1, 3]}"], ""),
    ],
)
def test_task_generator_options_are_checked(
    call: Callable[..., Any], folder: Path, words: list[str], told: str
) -> None:
    (folder / "gen.py").write_text("def sums(level, draw):\n    return {'prompt': '1', 'answer': '1'}\n")
    (folder / "rl.yaml").write_text(
        "stage: rl\nmodel: {path: tiny}\ndata: {source: './gen.py:sums'}\nrewards: [{use: math.accuracy}]\n"
        "run: {steps: 1}\n"
    )
    result = call("recipe", "validate", "rl.yaml", *words)
    assert (result.exit_code == 2) is bool(told) and told in result.stderr, result.stderr


@pytest.mark.usefixtures("folder")
def test_unparsable_yaml_text_is_quoted_in_the_hint(call: Callable[..., Any]) -> None:
    result = call("recipe", "show", "r.yaml", "data.params.form={question} x")
    assert result.exit_code == 2 and "data.params.form='\"{question} x\"'" in result.stderr
    assert call("recipe", "show", "r.yaml", 'data.prompt_template="{question} x"').exit_code == 0


def test_run_directory_means_its_final_model(tmp_path: Path) -> None:
    from posttrain.models.model_paths import locate

    for name in ("final", "best"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "config.json").write_text("{}")
    (tmp_path / "run" / "resolved.json").write_text("{}")
    assert locate("run", tmp_path).path == tmp_path / "run" / "final"
