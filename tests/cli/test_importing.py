"""`posttrain recipe import`: files in the style of nine tools, and what becomes of them, word for word.

The expected recipes stand beside the files. `UPDATE_IMPORTED=1 pytest tests/cli/test_importing.py` writes them anew.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.recipe import keys
from posttrain.recipe.foreign import transforms, words
from posttrain.recipe.foreign.convert import convert
from posttrain.recipe.foreign.shell import commands
from posttrain.recipe.foreign.source import read
from posttrain.recipe.load import load

Call = Callable[..., Any]
IMPORTED = Path(__file__).with_name("imported")
FILES = sorted(path for path in IMPORTED.iterdir() if not path.name.endswith(".recipe.yaml"))
LACK_A_REWARD = {  # files with a reward that has to be written, and what the mistake names
    "ms_swift_grpo.sh": "made_rewards.py",
    "trl_script.py": "short_in_tokens",
}
TOOLS = (
    *("trl", "open_r1", "axolotl", "llamafactory", "ms_swift", "megatron_swift"),
    *("openrlhf", "verl", "torchtune", "mergekit"),
)


def test_every_tool_has_an_example() -> None:
    assert {next(tool for tool in TOOLS if path.name.startswith(tool)) for path in FILES} == set(TOOLS)
    assert set(words.TOOLS) == set(TOOLS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_example_is_imported_as_the_expected_recipe(path: Path, call: Call, folder: Path) -> None:
    """The tool is detected, the recipe is valid, and every value and every omitted key is as expected."""
    result = call("recipe", "import", str(path), "--output", "made.yaml")
    made = (folder / "made.yaml").read_text(encoding="utf-8")
    expected = path.with_name(f"{path.stem}.recipe.yaml")
    if os.environ.get("UPDATE_IMPORTED"):
        expected.write_text(made, encoding="utf-8")
    assert made == expected.read_text(encoding="utf-8")
    if path.name in LACK_A_REWARD:
        assert result.exit_code == 2 and LACK_A_REWARD[path.name] in result.stderr
        assert "made.yaml is not valid yet: 1 error" in result.stderr
        return
    assert result.exit_code == 0, result.stderr
    tool = words.table(next(tool for tool in TOOLS if path.name.startswith(tool))).tool
    assert f"made.yaml: valid (stage {load('made.yaml').recipe.stage}, from {tool})" in result.stderr


def test_omitted_keys_are_named_with_a_reason(call: Call, folder: Path) -> None:
    text = (
        "base_model: org/x\nmicro_batch_size: 1\ndatasets: [{path: rows.jsonl}]\nunheard_of: 3\nplugins: [axolotl.y]\n"
    )
    (folder / "a.yml").write_text(text)
    result = call("recipe", "import", "a.yml", "--json")
    told = json.loads(result.stdout)
    assert (told["tool"], told["stage"], told["valid"]) == ("axolotl", "sft", True)
    assert [(one["key"], one["line"]) for one in told["left_out"]] == [("unheard_of", 4), ("plugins", 5)]
    assert told["left_out"][0]["why"] == "no counterpart is known"
    assert "line 4: unheard_of: 3   no counterpart is known" in result.stderr
    assert told["origins"]["model.path"] == "base_model, line 1"
    assert told["recipe"]["batch"] == {"size": 1, "micro_size": 1}


def test_incomplete_recipe_is_written_and_reported(call: Call, folder: Path) -> None:
    (folder / "g.yaml").write_text("model_name_or_path: tiny\ndataset_name: rows.jsonl\nnum_generations: 4\n")
    result = call("recipe", "import", "g.yaml", "--from", "trl", "--output", "made.yaml")
    assert result.exit_code == 2
    assert "rewards: is missing" in result.stderr
    assert "made.yaml is not valid yet: 1 error" in result.stderr
    assert "group_size: 4" in (folder / "made.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "text", "told"),
    [
        (("x.py",), "print(1)", "no trainer of TRL with values in it"),
        (("x.yaml",), "colour: red\n", "none of its keys shows which tool this file is for"),
        (("x.sh",), "echo hello\n", "no training command that is known in it"),
        (("x.yaml", "--from", "axolot"), "a: 1\n", "did you mean `axolotl`?"),
        (("x.sh",), "swift infer --model m\n", "`infer` trains nothing"),
        (("x.yaml",), "model_name_or_path: m\n", "name it: --stage sft"),
        # With their `beta` these would be DPO.
        (("x.sh",), "trl distillation --model_name_or_path m --beta 0.5\n", "`distillation` of TRL is not converted"),
        (
            ("x.yml",),
            "base_model: a\ngate_mode: hidden\nexperts: [{source_model: b}]\n",
            "`experts` of mergekit is not",
        ),
        (("x.sh",), "python trl/examples/scripts/online_dpo.py --model_name_or_path m --beta 0.1\n", "`online_dpo` of"),
        (
            ("x.yaml", "--from", "trl"),
            "model_name_or_path: m\nteacher_model_name_or_path: t\nbeta: 1.0\n",
            "whose `kl.reference` is the teacher",
        ),
        (("x.yaml", "--stage", "sfd"), "a: 1\n", "no stage `sfd`"),
        (("x.yaml", "--output", "r.yaml"), "a: 1\n", "r.yaml exists and is not overwritten"),
        (("x.yaml",), "a: [1\n", "not readable as YAML"),
        (("x.yaml",), "base_model: m\nrl: ebft\n", "rl: ebft is not trained here"),
    ],
)
def test_unimportable_file_raises(arguments: Any, text: str, told: str, call: Call, folder: Path) -> None:
    (folder / arguments[0]).write_text(text)
    result = call("recipe", "import", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_missing_file_raises(call: Call, folder: Path) -> None:
    (folder / "config.yaml").write_text("a: 1\n")
    assert "did you mean `config.yaml`?" in call("recipe", "import", "confg.yaml").stderr


@pytest.mark.parametrize(
    ("tool", "name", "text"),
    [
        ("trl", "a.yaml", "use_vllm: true\nvllm_tensor_parallel_size: 2\nmodel_name_or_path: m\nnum_generations: 4\n"),
        (
            "openrlhf",
            "a.sh",
            "python -m openrlhf.cli.train_ppo_ray --vllm_num_engines 2 --vllm_tensor_parallel_size 2",
        ),
        (
            "verl",
            "a.sh",
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm "
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2\n",
        ),
    ],
)
def test_tensor_parallel_engine_is_imported(tool: str, name: str, text: str, call: Call, folder: Path) -> None:
    (folder / name).write_text(text)
    told = json.loads(call("recipe", "import", name, "--from", tool, "--stage", "rl", "--json").stdout)
    assert told["recipe"]["rollout"]["engine"] == "vllm" and told["recipe"]["rollout"]["vllm"] == {"tensor_parallel": 2}
    assert not any("tensor" in one["key"] for one in told["left_out"])


def test_gpus_multiply_the_batch(call: Call, folder: Path) -> None:
    (folder / "a.yml").write_text(
        "base_model: x\nmicro_batch_size: 2\ngradient_accumulation_steps: 3\ndatasets: [{path: rows.jsonl}]\n"
    )
    one = json.loads(call("recipe", "import", "a.yml", "--json").stdout)
    four = json.loads(call("recipe", "import", "a.yml", "--json", "--gpus", "4").stdout)
    assert (one["recipe"]["batch"]["size"], four["recipe"]["batch"]["size"]) == (6, 24)
    assert any("1 GPU" in note for note in one["differs"]) and not any("GPU" in note for note in four["differs"])


def test_named_file_is_read_and_flags_take_precedence(call: Call, folder: Path) -> None:
    (folder / "c.yaml").write_text("model_name_or_path: org/a\ndataset_name: rows.jsonl\nlearning_rate: 1e-5\n")
    (folder / "run.sh").write_text("trl sft --config c.yaml --learning_rate 2e-5\n")
    told = json.loads(call("recipe", "import", "run.sh", "--json").stdout)
    assert (told["recipe"]["model"]["path"], told["recipe"]["optim"]["lr"]) == ("org/a", 2e-5)


def test_names_of_llamafactory_s_registry(call: Call, folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "mine.jsonl").write_text('{"q": "a", "a": "b"}\n')
    entry = {"mine": {"file_name": "mine.jsonl", "columns": {"prompt": "q", "response": "a"}}}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(entry))
    (folder / "l.yaml").write_text("model_name_or_path: tiny\nstage: sft\nfinetuning_type: full\ndataset: mine\n")
    told = json.loads(call("recipe", "import", "l.yaml", "--json").stdout)
    data = told["recipe"]["data"]
    assert data["source"] == str(folder / "data" / "mine.jsonl")
    assert data["columns"] == {"instruction": "q", "output": "a"}
    assert told["valid"]


GRPO = """
model_name_or_path: tiny
dataset_name: rows.jsonl
use_cpu: true
reward_funcs: [mine.close, mine.Short]
num_generations: 4
max_completion_length: 8
per_device_train_batch_size: 8
learning_rate: 1.0e-3
max_steps: 2
"""
MINE = """
def close(completions, answer, **kwargs):
    return [-abs(len(c) - len(a)) / 10 for c, a in zip(completions, answer)]


class _Short:
    def __call__(self, completions, **kwargs):
        return [-abs(20 - len(c)) / 20 for c in completions]


Short = _Short()
"""


def test_imported_trl_grpo_file_trains(call: Call, folder: Path) -> None:
    """Its reward functions, which are beside it, run unchanged."""
    (folder / "grpo.yaml").write_text(GRPO)
    (folder / "mine.py").write_text(MINE)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    imported = call("recipe", "import", "grpo.yaml", "--output", "made.yaml")
    assert imported.exit_code == 0, imported.stderr
    result = call("rl", "made.yaml", "--output", "run", "scoring.max_bad_gold=1.0")
    assert result.exit_code == 0, result.stderr
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    assert all(line["grad_norm"] > 0 for line in metrics)
    assert all({"rewards/close/mean", "rewards/Short/mean"} <= line.keys() for line in metrics)


AXOLOTL = """
base_model: tiny
datasets: [{path: rows.jsonl, type: alpaca}]
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
sequence_len: 512
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 2
warmup_ratio: 0.5
learning_rate: 0.01
optimizer: adamw_torch
"""


def test_imported_axolotl_file_trains(call: Call, folder: Path) -> None:
    (folder / "sft.yml").write_text(AXOLOTL)
    rows = [{"instruction": f"{n}+1", "input": "", "output": str(n + 1)} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert call("recipe", "import", "sft.yml", "--output", "made.yaml").exit_code == 0
    result = call("sft", "made.yaml", "--output", "run", "model.device=cpu")
    assert result.exit_code == 0, result.stderr
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in metrics if "lr" in line]
    assert len(rates) == 4 and rates[0] < rates[1] < 0.01  # half of the updates is warm-up
    assert (folder / "run" / "final" / "adapter_config.json").is_file() or (folder / "run" / "final").is_dir()


TRL_PACKED = """
model_name_or_path: org/x
dataset_name: rows.jsonl
packing: true
max_length: 512
per_device_train_batch_size: 2
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yml", AXOLOTL),
        ("t.yml", TRL_PACKED),
    ],
)
def test_batch_of_packed_rows_is_converted(call: Call, folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    told = json.loads(call("recipe", "import", name, "--stage", "sft", "--json").stdout)
    size = told["recipe"]["batch"]["size"]
    assert told["recipe"]["batch"]["packing"] is True
    (note,) = [note for note in told["differs"] if "batch.size counts rows" in note]
    assert f"{size} packs of many rows, up to {size * 512} tokens" in note
    (folder / name).write_text("\n".join(line for line in text.splitlines() if "packing" not in line) + "\n")
    told = json.loads(call("recipe", "import", name, "--stage", "sft", "--json").stdout)
    assert not [note for note in told["differs"] if "batch.size counts rows" in note]


def test_every_table_target_is_a_recipe_key() -> None:
    """So that renaming a key cannot leave a table outdated; every function named by a table exists, and is named by
    one."""
    known = {path for model in keys.BY_NAME.values() for path in keys.all_paths(model)}
    heads = {head for stage in keys.BY_NAME for head in keys.components_of(stage)}
    used = set()
    for name in words.TOOLS:
        for key, entry in words.table(name).keys.items():
            used.add(entry.how)
            targets = [entry.to] if isinstance(entry.to, str) else list(entry.to.values())
            for target in filter(None, targets):
                free = target.startswith("data.columns.") or target.partition(".")[0] in heads
                assert free or target in known, (name, key, target)
            assert not entry.how or entry.how in transforms.TRANSFORMS, (name, key)
            assert not entry.part_of or entry.part_of in words.table(name).keys, (name, key)
    assert set(transforms.TRANSFORMS) <= used


def test_shell_script_is_parsed_like_a_shell() -> None:
    script = """
    A=${A:-1}; B="two words" # a comment
    C=(--x $A --y="$B" # inside
       'single $A')
    C+=(--z)
    if [ -n "$D" ]; then A=9; E=5; fi
    case "$E" in 5) F=$((A * 2 + 1)) ;; esac
    python -m thing "${C[@]}" --home "$HOME/d" --sum ${F} --default ${G:-${A}x} $@ \\
        --list '[1, 2]' --free $B
    """
    (command,) = [[word.text for word in found] for found in commands(script) if found[0].text == "python"]
    assert command[2:] == [
        "thing", "--x", "1", "--y=two words", "single $A", "--z", "--home", "${HOME}/d", "--sum", "3",
        "--default", "1x", "--list", "[1, 2]", "--free", "two", "words",
    ]  # fmt: skip
    words_of = [word for found in commands(script) for word in found if word.text == "--z"]
    assert words_of[0].line == 5


def test_empty_variable_takes_a_default_and_the_value_of_the_first_branch() -> None:
    script = """
    size=${SIZE:-}
    rate=${RATE-}
    if [ $DEVICE = gpu ]; then size=${SIZE:-512}; else size=256; fi
    case $DEVICE in gpu) few=${rate:-3};; *) few=4;; esac
    python train.py data.size=${size} data.few=${few} data.kept=${rate-9} data.rate=${rate:-2}
    """
    (command,) = [[word.text for word in found] for found in commands(script) if found[0].text == "python"]
    assert command[2:] == ["data.size=512", "data.few=3", "data.kept=", "data.rate=2"]


def test_quoted_default_with_variables_is_read() -> None:
    script = """
    HOME_OF_DATA=${HOME_OF_DATA:-"${HOME}/verl"}
    FILE=${FILE:-"${HOME_OF_DATA}/data/test.parquet"}
    python train.py --a ${FILE} --b "${OTHER:-$HOME/x y}"
    """
    (command,) = [[word.text for word in found] for found in commands(script) if found[0].text == "python"]
    assert command[2:] == ["--a", "${HOME}/verl/data/test.parquet", "--b", "${HOME}/x y"]


def test_values_known_when_the_script_runs_are_left_out(folder: Path) -> None:
    (folder / "run.sh").write_text(
        "python -m verl.trainer.sft_trainer model.path=${2:-org/x} data.train_files=${DATA:?where} trainer.seed=3 \\\n"
        "  trainer.default_local_dir=$1 trainer.save_freq=$(wc -l < x) trainer.project_name=${NAME,,}\n"
    )
    draft = convert(read(folder / "run.sh"))
    assert (draft.at("model.path"), draft.at("data.source"), draft.at("run.seed")) == ("org/x", "${DATA}", 3)
    left = {one.key for one in draft.left}
    assert left == {"trainer.default_local_dir", "trainer.save_freq", "trainer.project_name"}
    assert "run.output" not in draft.origins() and any("trainer.save_freq of line 2" in note for note in draft.notes)


def test_import_runs_no_script(tmp_path: Path) -> None:
    (found,) = commands(f"trl sft --x $(touch {tmp_path}/made) --y `touch {tmp_path}/made`")
    assert not (tmp_path / "made").exists()
    assert f"$(touch {tmp_path}/made)" in [word.text for word in found]


def test_running_another_tools_file_suggests_the_import(call: Call, folder: Path) -> None:
    (folder / "theirs.yaml").write_text("actor_rollout_ref: {model: {path: org/x}}\ndata: {train_files: x.parquet}\n")
    told = call("recipe", "validate", "theirs.yaml").stderr
    assert "if it is a file of verl: posttrain recipe import theirs.yaml" in told


STRANGE = ("null", "[]", "{}", "-1", "0", "1e400", '"x"', "[{a: 1}]", "{a: {b: 1}}", "99999999999999999999")


@pytest.mark.parametrize("value", STRANGE)
def test_invalid_values_never_crash_the_import(value: str, folder: Path) -> None:
    """Each key of the YAML examples in turn gets a value of another type: a recipe, or a readable error."""
    taken = refused = 0
    for path in (path for path in FILES if path.suffix in (".yaml", ".yml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        keyed = [place for place, line in enumerate(lines) if line[:1].isalpha()]
        for place in keyed[:: max(1, len(keyed) // 6)]:
            changed = [*lines[:place], f"{lines[place].partition(':')[0]}: {value}", *lines[place + 1 :]]
            (folder / path.name).write_text("\n".join(changed))
            try:
                draft = convert(read(folder / path.name))
            except RecipeError as error:
                assert path.name in str(error)
                refused += 1
            else:
                assert draft.at("stage") in keys.BY_NAME
                taken += 1
    assert taken > refused


def test_axolotl_conversations_and_alpaca_rows_share_one_format(call: Call, folder: Path) -> None:
    """A recipe has one form for all rows: the chat template, which alpaca's rows get as well."""
    (folder / "a.yml").write_text(
        "base_model: tiny\nmicro_batch_size: 2\nnum_epochs: 1\ndatasets:\n"
        "  - {path: org/chat, type: chat_template, train_on_eos: all}\n  - {path: org/alpaca, type: alpaca}\n"
    )
    result = call("recipe", "import", "a.yml", "--output", "made.yaml")
    assert result.exit_code == 0, result.stderr
    made = (folder / "made.yaml").read_text()
    assert "train_on: assistant" in made and "prompt_template" not in made and "chat: false" not in made
    assert "datasets.1.type: alpaca   one recipe renders all rows alike" in result.stderr
    assert "train_on_eos: all   the token that ends a turn is trained on" in result.stderr


def test_alpaca_rows_with_an_input_get_a_note(call: Call, folder: Path) -> None:
    (folder / "a.yml").write_text(
        "base_model: tiny\nmicro_batch_size: 2\nnum_epochs: 1\ndatasets:\n  - {path: org/alpaca, type: alpaca}\n"
    )
    found = json.loads(call("recipe", "import", "a.yml", "--json").stdout)
    assert any("non-empty `input`" in note and "### Input:" in note for note in found["differs"])


def test_missing_tracker_is_noted(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else known(name, *more)
    )
    (folder / "a.yml").write_text(
        "base_model: tiny\nmicro_batch_size: 2\nnum_epochs: 1\nwandb_project: p\ndatasets: [{path: org/rows}]\n"
    )
    result = call("recipe", "import", "a.yml")
    assert result.exit_code == 0
    assert "wandb needs wandb, which is not installed" in result.stderr
