"""`posttrain recipe import` of TRL's Python scripts, which are parsed and never run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
SCRIPT = Path(__file__).with_name("imported") / "trl_script.py"


def _import(call: Call, folder: Path, text: str, *more: str) -> dict[str, Any]:
    (folder / "s.py").write_text(text, encoding="utf-8")
    found: dict[str, Any] = json.loads(call("recipe", "import", "s.py", *more, "--json").stdout)
    return found


def test_reward_functions_are_written_with_only_their_dependencies(call: Call, folder: Path) -> None:
    result = call("recipe", "import", str(SCRIPT), "--output", "made.yaml")
    assert "made_rewards.py: right, as in trl_script.py" in result.stderr
    text = SCRIPT.read_text(encoding="utf-8")

    def block(begin: str) -> str:
        return text[text.index(begin) :].partition("\n\n\n")[0]

    assert (folder / "made_rewards.py").read_text(encoding="utf-8") == "\n\n\n".join(
        [
            '"""Reward functions copied from trl_script.py, with what they read."""\n\n'
            "from __future__ import annotations\n\nimport re",
            'NUMBER = re.compile(r"-?\\d+")',
            "HALF = 0.5",
            block("def last_number"),
            block("def right"),
        ]
    ) + "\n"
    again = call("recipe", "import", str(SCRIPT), "--output", "other.yaml")
    assert "other.yaml is not valid yet: 1 error" in again.stderr  # `short_in_tokens` is still to be written
    assert (folder / "other_rewards.py").exists()
    (folder / "other.yaml").unlink()
    refused = call("recipe", "import", str(SCRIPT), "--output", "other.yaml")
    assert refused.exit_code == 2 and "other_rewards.py exists and is not overwritten" in refused.stderr
    assert not (folder / "other.yaml").exists()


def test_written_reward_equals_the_scripts(call: Call, folder: Path) -> None:
    """One for the right number, half a point for a number at all."""
    call("recipe", "import", str(SCRIPT), "--output", "made.yaml")
    written: dict[str, Any] = {}
    exec((folder / "made_rewards.py").read_text(encoding="utf-8"), written)
    assert written["right"](["it is 12", "13", "none"], ["12", "12", "12"]) == [1.5, 0.5, 0.0]


def test_rewards_are_left_out_without_an_output_file(call: Call) -> None:
    found = json.loads(call("recipe", "import", str(SCRIPT), "--json").stdout)
    why = {one["key"]: one["why"] for one in found["left_out"]}
    assert why["reward_funcs: right"].startswith("it is a function of the script: with --output it is written")


def test_computed_values_are_named_with_their_line(call: Call) -> None:
    found = json.loads(call("recipe", "import", str(SCRIPT), "--json").stdout)
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    computed = next(one for one in found["left_out"] if one["key"] == "gradient_accumulation_steps")
    assert "gradient_accumulation_steps=len" in lines[computed["line"] - 1]
    assert computed["why"] == "`len('four')` is computed: write the value"
    note = f"gradient_accumulation_steps of line {computed['line']} is computed there: the default is used here"
    assert any(one.startswith(note) for one in found["differs"])


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("@cached\ndef f(completions, **kwargs): return [1.0]", "`f` has a decorator"),
        ("COUNT = 0\ndef f(completions):\n    global COUNT\n    return [1.0]", "keeps `COUNT` from call to call"),
        ("TABLE = load()\ndef f(completions): return [TABLE[c] for c in completions]", "`TABLE`, which `f` reads, is"),
        ("def f(completions, scale=1 / len('x')): return [scale]", "a default of `f` is computed"),
        ("import helper\ndef f(completions): return helper.score(completions)", "it reads `helper` of helper beside"),
        ("from .x import y\ndef f(completions): return y(completions)", "it reads `y` of x beside the script"),
        ("A = 1\nA = 2\ndef f(completions): return [A]", "reads `A` (line 4), which the script computes"),
    ],
)
def test_reward_with_outside_dependencies_is_refused_with_the_reason(
    call: Call, folder: Path, function: str, why: str
) -> None:
    (folder / "helper.py").write_text("", encoding="utf-8")
    text = f"from trl import GRPOTrainer\n{function}\nGRPOTrainer('tiny', reward_funcs=f, train_dataset=g())\n"
    found = _import(call, folder, text, "--output", "m.yaml")
    reason = next(one["why"] for one in found["left_out"] if one["key"] == "reward_funcs: f")
    assert why in reason and "copy it to a file of its own" in reason
    assert not (folder / "m_rewards.py").exists()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (
            "from trl import SFTTrainer, SFTConfig\nfrom datasets import load_dataset\n"
            "d = load_dataset('json', data_files={'train': 'rows.jsonl'}, split='train')\n"
            "SFTTrainer(model='tiny', args=SFTConfig(max_steps=5, per_device_train_batch_size=2), train_dataset=d)\n",
            {"stage": "sft", "model.path": "tiny", "data.source": "rows.jsonl", "run.steps": 5, "batch.size": 2},
        ),
        (
            "import torch\nfrom peft import LoraConfig, get_peft_model\nfrom trl import DPOTrainer, DPOConfig\n"
            "from datasets import load_dataset\nfrom transformers import AutoModelForCausalLM\n"
            "base = AutoModelForCausalLM.from_pretrained('tiny', dtype=torch.float32)\n"
            "model = get_peft_model(base, LoraConfig(r=4))\n"
            "c = DPOConfig('out', beta=0.3)\nc.max_steps = 2\n"
            "DPOTrainer(model, args=c, train_dataset=load_dataset('rows.jsonl'))\n",
            {"stage": "dpo", "loss.beta": 0.3, "run.steps": 2, "run.output": "out", "model.lora.rank": 4}
            | {"model.lora.alpha": 8, "model.lora.dropout": 0.0, "model.dtype": "float32", "data.source": "rows.jsonl"},
        ),
        (
            "from dataclasses import dataclass, field\nfrom transformers import HfArgumentParser\n"
            "from trl import KTOTrainer, KTOConfig\nfrom datasets import load_dataset\n"
            "@dataclass\nclass Own:\n    steps: int = 4\n    name: str = field(default='tiny', metadata={})\n"
            "(own,) = HfArgumentParser(Own).parse_args_into_dataclasses()\n"
            "KTOTrainer(model=own.name, args=KTOConfig(max_steps=own.steps),\n"
            "           train_dataset=load_dataset('rows.jsonl')['train'])\n",
            {"stage": "dpo", "algorithm": "kto", "model.path": "tiny", "run.steps": 4},
        ),
    ],
)
def test_literal_values_are_resolved(call: Call, folder: Path, text: str, values: dict[str, Any]) -> None:
    recipe = _import(call, folder, text)["recipe"]
    for key, value in values.items():
        node = recipe
        for part in key.split("."):
            node = node[part]
        assert (key, node) == (key, value)


def test_command_and_script_keys_are_merged(call: Call, folder: Path) -> None:
    (folder / "own.py").write_text(
        "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser\n"
        "def brief(completions, **kwargs):\n    return [float(len(one) < 9) for one in completions]\n"
        "config, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()\n"
        "GRPOTrainer(model=model.model_name_or_path, args=config, reward_funcs=brief,\n"
        "            train_dataset=load_dataset('rows.jsonl')).train()\n",
        encoding="utf-8",
    )
    (folder / "run.sh").write_text(
        "accelerate launch --num_processes 2 own.py --model_name_or_path tiny --num_generations 4 --max_steps 3 \\\n"
        "  --per_device_train_batch_size 8\n",
        encoding="utf-8",
    )
    result = call("recipe", "import", "run.sh", "--output", "made.yaml", "--json")
    found = json.loads(result.stdout)
    assert found["valid"], found["problems"]
    assert found["recipe"]["rollout"] == {"group_size": 4, "prompts_per_step": 4}
    assert found["recipe"]["model"]["path"] == "tiny" and found["recipe"]["data"]["source"] == "rows.jsonl"
    assert found["recipe"]["rewards"] == [{"use": "./made_rewards.py:brief"}]
    assert any(one.startswith("what the command does not say is from own.py: ") for one in found["differs"])
    alone = json.loads(call("recipe", "import", "own.py", "--json").stdout)
    told = {one["key"]: one["why"] for one in alone["left_out"]}
    assert told["args"] == "its values come from the command line: import a .sh file with that line"


@pytest.mark.parametrize(
    ("text", "more", "told"),
    [
        ("print(1)\n", (), "no trainer of TRL with values in it"),
        ("from trl import TrlParser\nTrlParser(())\n", (), "give the line that starts it in a .sh file"),
        ("def f(:\n", (), "s.py:1  not readable as Python"),
        ("SFTTrainer('a')\nDPOTrainer('a')\n", (), "it trains several times: sft in line 1, dpo in line 2"),
        ("SFTTrainer('a')\n", ("--from", "axolotl"), "only Python scripts of TRL can be imported"),
    ],
)
def test_unreadable_scripts_raise(call: Call, folder: Path, text: str, more: tuple[str, ...], told: str) -> None:
    (folder / "s.py").write_text(text, encoding="utf-8")
    result = call("recipe", "import", "s.py", *more)
    assert result.exit_code == 2 and told in result.stderr


def test_training_is_selected_by_stage(call: Call, folder: Path) -> None:
    text = "SFTTrainer('a', train_dataset=x)\nDPOTrainer('b', train_dataset=x)\n"
    assert _import(call, folder, text, "--stage", "dpo")["recipe"]["model"]["path"] == "b"


TRAINS = "from trl import SFTTrainer, SFTConfig\nfrom datasets import load_dataset\n"
EVALUATES = "args=SFTConfig(max_steps=5, eval_strategy='steps', eval_steps=2)"


@pytest.mark.parametrize(
    ("rows", "trained", "evaluated"),
    [
        (
            "d = load_dataset('json', data_files='rows.jsonl')['train'].train_test_split(test_size=0.2)",
            "d['train']",
            "d['test']",
        ),
        ("d = load_dataset('org/rows', split='train')\nd = d.train_test_split(0.1)", "d['train']", "d['test']"),
        ("d = load_dataset('org/rows')['train']", "d.skip(100)", "d.select(range(100))"),
        ("d = load_dataset('org/rows')", "d['train']", "load_dataset('org/others', split='test')"),
        ("d = load_dataset('org/rows')", "d['test']", "d['test']"),
        ("d = load_dataset('org/rows', split='train[10:]')", "d", "load_dataset('org/rows', split='train[:10]')"),
    ],
)
def test_rows_held_out_by_code_are_not_evaluated(
    call: Call, folder: Path, rows: str, trained: str, evaluated: str
) -> None:
    """The recipe's source has them all, so any split of it would measure rows that are trained on."""
    trainer = f"SFTTrainer('tiny', {EVALUATES}, train_dataset={trained}, eval_dataset={evaluated})\n"
    found = _import(call, folder, f"{TRAINS}{rows}\n{trainer}")
    assert "eval" not in found["recipe"]
    assert any(
        "nothing is evaluated here, write `eval` with rows that are not trained on" in n for n in found["differs"]
    )
    divided = any("`train_test_split` holds rows out there; this recipe trains on all" in n for n in found["differs"])
    assert divided == ("train_test_split" in rows)


@pytest.mark.parametrize(
    ("rows", "trained", "evaluated", "split"),
    [
        ("d = load_dataset('org/rows')", "d['train']", "d['validation']", "validation"),
        ("d = load_dataset('org/rows', split='train')", "d", "load_dataset('org/rows', split='test')", "test"),
        ("d = load_dataset('org/rows').map(f)", "d['train']", "d['test'] if evaluates else None", "test"),
    ],
)
def test_other_split_of_the_dataset_is_evaluated(
    call: Call, folder: Path, rows: str, trained: str, evaluated: str, split: str
) -> None:
    trainer = f"SFTTrainer('tiny', {EVALUATES}, train_dataset={trained}, eval_dataset={evaluated})\n"
    found = _import(call, folder, f"{TRAINS}{rows}\n{trainer}")
    assert found["recipe"]["eval"] == {"every": 2, "data": {"source": "org/rows", "split": split}}
    assert all("eval_dataset" not in note for note in found["differs"])


def test_file_has_no_evaluation_split(call: Call, folder: Path) -> None:
    (folder / "t.yaml").write_text(
        "model_name_or_path: tiny\ndataset_name: rows.jsonl\neval_strategy: steps\neval_steps: 5\npacking: false\n"
    )
    found = json.loads(call("recipe", "import", "t.yaml", "--from", "trl", "--stage", "sft", "--json").stdout)
    assert "eval" not in found["recipe"]
    assert "the file names no data for it" in next(o["why"] for o in found["left_out"] if o["key"] == "eval_steps")


def test_reward_made_by_code_is_an_error_until_written(call: Call, folder: Path) -> None:
    """It keeps its place and weight, so that the others keep theirs, and has no name that the script has."""
    text = (
        "from functools import partial\nfrom trl import GRPOTrainer, GRPOConfig\nfrom datasets import load_dataset\n"
        "class Acc:\n    def __call__(self, completions, **kwargs):\n        return [1.0 for _ in completions]\n"
        "def fmt(completions, **kwargs):\n    return [partial(float, 1)() for _ in completions]\n"
        "GRPOTrainer('tiny', reward_funcs=[Acc(), fmt, partial(fmt, a=1), lambda completions: [0.0]],\n"
        "            args=GRPOConfig(reward_weights=[1.0, 0.5, 0.25, 2.0]), train_dataset=load_dataset('rows.jsonl'))\n"
    )
    (folder / "s.py").write_text(text, encoding="utf-8")
    result = call("recipe", "import", "s.py", "--output", "m.yaml", "--json")
    found = json.loads(result.stdout)
    assert found["recipe"]["rewards"] == [
        {"use": "./m_rewards.py:Acc"},
        {"use": "./m_rewards.py:fmt", "weight": 0.5},
        {"use": "./m_rewards.py:partial_2", "weight": 0.25},
        {"use": "./m_rewards.py:reward", "weight": 2.0},
    ]
    assert result.exit_code == 2 and not found["valid"]
    assert [one["what"] for one in found["problems"]] and "m.yaml is not valid yet: 3 errors" in result.stderr
    reasons = {one["key"]: one["why"] for one in found["left_out"]}
    assert reasons["reward_funcs: Acc"] == "`Acc()` is made by code: write it as a function of that name"
