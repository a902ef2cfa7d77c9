"""`recipe validate` refuses every recipe that a run refuses: with the same words and lines, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
import yaml

RL: dict[str, Any] = {
    "stage": "rl",
    "model": {"path": "tiny"},
    "data": {"source": "rows.jsonl"},
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
    "rewards": [{"use": "math.accuracy"}],
    "run": {"steps": 1},
}
# With a reward of the user's.
STYLED: dict[str, Any] = {**RL, "rewards": [*RL["rewards"], {"use": "mine.py:style", "weight": 0.1}]}
SFT: dict[str, Any] = {
    "stage": "sft",
    "model": {"path": "tiny"},
    "data": {"source": "rows.jsonl"},
    "batch": {"size": 2},
    "run": {"steps": 1},
}
DPO: dict[str, Any] = {**SFT, "stage": "dpo", "data": {"source": "pairs.jsonl"}}
RM: dict[str, Any] = {**DPO, "stage": "reward_model"}
EVAL: dict[str, Any] = {
    "stage": "eval",
    "model": {"path": "tiny"},
    "data": {"source": "rows.jsonl"},
    "rewards": [{"use": "math.accuracy"}],
    "sampling": {"max_new_tokens": 4},
}
GENERATE: dict[str, Any] = {key: EVAL[key] for key in ("model", "data", "sampling")} | {"stage": "generate"}
SCRIPT = """\
from posttrain.registry import register


def style(completion): return 1.0
def knows(completion, correct): return 1.0
def reads(completion, colour): return 1.0
def loss(batch, logp, *, eps: float = 0.2, kind: str): return None
def rows(size, seed): return []
def made(count): return []
"""

# recipe, {dotted key: value}, what is told
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # rewards
    (STYLED, {"rewards.1.clip": [1, 0]}, "rewards.1.clip: clip [1, 0] is empty"),
    (STYLED, {"rewards.1.condition": {"on": "zzz"}}, "rewards.1.condition.on: reward style has a condition on `zzz`"),
    (STYLED, {"rewards.1.condition": {"on": "acuracy"}}, "hint: did you mean `accuracy`?"),
    (
        STYLED,
        {"rewards.1.condition": {"on": "style"}},
        "rewards.1.condition.on: reward style has a condition on itself",
    ),
    (
        STYLED,
        {"rewards.0.condition": {"on": "style"}, "rewards.1.condition": {"on": "accuracy"}},
        "the conditions go in a circle: accuracy -> style -> accuracy",
    ),
    (
        RL,
        {"rewards": [{"use": "mine.py:knows"}]},
        "rewards.0.use: rewards knows read `correct`, but no reward decides it",
    ),
    (
        STYLED,
        {"rewards.1": {"use": "mine.py:knows", "correct": True}},
        "reward knows reads `correct`, so it cannot decide what is correct",
    ),
    (STYLED, {"rewards.1.name": "accuracy"}, "2 rewards are called `accuracy`"),
    (STYLED, {"rewards.0.correct": True, "rewards.1.correct": True}, "several rewards have `correct: true`"),
    (STYLED, {"rewards.1.use": "mine.py:reads"}, "rewards.1.use: reward reads: the data has no column `colour`"),
    (STYLED, {"rewards.1": {"use": "judge_model"}}, "reward judge_model: needs params: {path: MODEL}"),
    (
        STYLED,
        {"rewards.1": {"use": "judge_model", "params": {"path": "tiny", "scale": [9, 1]}}},
        "scale [9, 1] is not [low",
    ),
    (
        STYLED,
        {"rewards.1": {"use": "judge_model", "params": {"path": "tiny", "samples": 2}}},
        "are all equal at temperature 0",
    ),
    (STYLED, {"rewards.1": {"use": "reward_model"}}, "reward reward_model: needs params: {path: FOLDER}"),
    (STYLED, {"rewards.1": {"use": "reward_model", "params": {"path": "tiny"}}}, "tiny is no reward model"),
    (
        GENERATE,
        {"samples": 2, "best_of": {"rewards": [{"use": "mine.py:style", "clip": [2, 1]}]}},
        "best_of.rewards.0.clip",
    ),
    (
        GENERATE,
        {"search": {"rewards": [{"use": "mine.py:knows"}]}},
        "search.rewards.0.use: rewards knows read `correct`",
    ),
    (EVAL, {"eval": {"best_of": "acuracy", "samples": 2}}, "eval.best_of: no reward is called `acuracy`"),
    # data
    (RL, {"data.source": "folder"}, "data.source: "),
    (RL, {"data.source": "folder/inner"}, "is no directory that `datasets` saved (save_to_disk)"),
    (RL, {"data": {"source": "saved", "split": "trian"}}, "saved has no split `trian`"),
    (RL, {"data.source": "notes.txt"}, "files ending in `.txt` are not read"),
    (RL, {"data.source": "empty.jsonl"}, "empty.jsonl: the file is empty"),
    (RL, {"data.source": "blank.jsonl"}, "blank.jsonl: the file has no rows"),
    (RL, {"data.source": "wrong.parquet"}, "wrong.parquet: not a parquet file"),
    (RL, {"data.source": "rows.jsonl.zst"}, "rows.jsonl.zst: zstd is not read"),
    (RL, {"data.source": "gym:chain_sum"}, "data.source: gym:chain_sum is made on the spot: give `size`"),
    (
        RL,
        {"data": {"source": "gym:chain_sum", "size": 9, "params": {"min_terms": 9, "max_terms": 2}}},
        "refuses its par",
    ),
    (RL, {"data.source": "mine.py:rows"}, "data.source: rows makes rows: give `size`"),
    (RL, {"data": {"source": "mine.py:made", "size": 9}}, "data.source: made takes no `size` and no `seed`"),
    (SFT, {"data": {"mix": []}}, "data.mix: needs 1 entry or more"),
    (SFT, {"data": {"mix": [{"source": "rows.jsonl"}], "split": "test"}}, "data.split: does nothing with `data.mix`"),
    (RL, {"data.skip": 100}, "rows.jsonl has no rows after the first 100"),
    (RL, {"data.prompt_template": "{prompt"}, "data.prompt_template: expected '}'"),
    (RL, {"data.columns": {"answer": "gold"}}, "no column `gold`"),
    (RM, {"objective": {"margin": "gap"}}, ": the reward model learns from the column `gap`"),
    (RM, {"objective": {"use": "mixture", "user": "who"}}, "learns from the column `who`"),
    (DPO, {"loss": {"use": "dno_soft"}}, "pair loss `dno_soft` needs the column `chosen_win`"),
    (
        DPO,
        {"data.source": "anchored.jsonl", "anchors": {"reference": "tiny"}},
        "the data has the column `ref_chosen_logp`",
    ),
    # models and what generates
    (RL, {"model.chat_template": "folder"}, "model.chat_template: template"),
    (RL, {"model.chat_template": "broken.jinja"}, "broken.jinja:1 is not Jinja"),
    (SFT, {"model.lora": {"targets": []}}, "model.lora.targets: needs 1 entry or more"),
    (SFT, {"model.lora": {"rank": 10**6}}, "model.lora.rank: must be at most 65,536"),
    (RL, {"rollout.max_new_tokens": 4096}, "4096 new tokens leave no room for a prompt in the model's window of 2048"),
    (EVAL, {"sampling.max_new_tokens": 2048}, "sampling.max_new_tokens: 2048 new tokens leave no room"),
    (RL, {"rollout.engine": "vllm", "model.lora": {"rank": 1024}}, "model.lora.rank: 1024 is more than vLLM serves"),
    (RL, {"rollout.engine": "vllm", "rollout.vllm": {"max_model_len": 4}}, "rollout.vllm.max_model_len: 4 has no room"),
    (EVAL, {"sampling.stop": [""]}, "sampling.stop.0: must not be empty"),
    (EVAL, {"sampling.temperature": 1e-9}, "temperature 1e-09 overflows"),
    (RL, {"run.output": "notes.txt"}, "run.output: notes.txt is a file, not a directory"),
    # numbers and components
    (SFT, {"optim": {"betas": [0.9, 1.0]}}, "optim.betas.1: must be less than 1"),
    (SFT, {"optim": {"lr": 1e300}}, "optim.lr: must be at most 10"),
    (RL, {"loss": {"dual_clip": 0.5}}, "loss.dual_clip: must be greater than 1"),
    (RL, {"loss": {"clip_low": -0.2}}, "loss.clip_low: must be at least 0"),
    (RL, {"advantage": {"use": "gae", "lam": 1.5}}, "advantage.lam: must be at most 1"),
    (RL, {"advantage": {"use": "riskpo", "bundle_size": 3}}, "2 prompts a step cannot be divided into bundles of 3"),
    (
        STYLED,
        {"advantage": {"use": "gdpo", "conditions": {"styl": {"on": "accuracy", "min": 1.0}}}},
        "did you mean `style`?",
    ),
    (RL, {"advantage": {"use": "channels", "channels": [{"rewards": {"tone": 1.0}}]}}, "`channels` reads `tone`"),
    (RL, {"advantage": {"use": "channels", "channels": []}}, "advantage.channels: has no channel"),
    (RL, {"group_rewards": [{"use": "kimi_length", "gate": {"on": "tone", "min": 1.0}}]}, "group_rewards.0.gate.on: "),
    (RL, {"group_rewards": [{"use": "truncation_tiers", "thresholds": [0.2, 0.4]}]}, "2 thresholds make 3 levels"),
    (
        RL,
        {"controllers": {"loss.clip_low": {"use": "stages", "values": [0.1, 0.2], "until": [1, 2]}}},
        "2 values and until",
    ),
    (RL, {"controllers": {"loss.clip_low": {"use": "equal_stages", "values": []}}}, "has no value"),
    (RL, {"loss": {"use": "mine.py:loss", "eps": "much", "kind": "a"}}, "loss.eps: loss: argument eps: "),
    (RL, {"loss": {"use": "mine.py:loss"}}, "loss.use: loss needs `kind`"),
    (DPO, {"loss": {"label_smoothing": 0.7, "variant": "robust"}}, "0.7 says that labels are wrong as often as right"),
    (DPO, {"loss": {"use": "simpo", "variant": "hinge", "label_smoothing": 0.1}}, "has no effect with variant hinge"),
    (DPO, {"loss": {"beta": -0.1}}, "loss.beta: must be greater than 0"),
    (DPO, {"loss": {"use": "mnpo", "weights": [1.0]}, "anchors": {"history": ["tiny", "tiny"]}}, "for a history of 2"),
    (RL, {"scoring": {"workers": 10**6}}, "scoring.workers: must be at most 1,024"),
    (RL, {"scoring": {"memory_mb": 1}}, "scoring.memory_mb: must be at least 64"),
    (RL, {"run.seed": 10**30}, "run.seed: must be less than"),
]
# In one process: both commands on every recipe, and what has been imported by then.
EACH = """
import functools, json, sys
import typer.testing
from typer.testing import CliRunner
from posttrain.cli import imports
from posttrain.cli.app import app
imports.Importer._in_worker = lambda _, request, *__: imports.describe(request)  # saves 50 processes
typer.testing._get_command = functools.cache(typer.testing._get_command)
told = {}
for name, verb in json.loads(sys.argv[1]).items():
    checked = CliRunner().invoke(app, ["recipe", "validate", name])
    run = CliRunner().invoke(app, [verb, name])
    heavy = sorted({"torch", "vllm"} & set(sys.modules))
    told[name] = [checked.exit_code, checked.stderr, run.exit_code, run.stderr, heavy]
print(json.dumps(told))
"""


def apply_changes(recipe: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = deepcopy(recipe)
    for key, value in changes.items():
        *above, last = (int(part) if part.isdigit() else part for part in key.split("."))
        node: Any = found
        for part in above:
            node = node[part]
        node[last] = value
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """(exit code of validate, its stderr, those of the run, heavy modules) of each of BAD."""
    folder = tmp_path_factory.mktemp("bad recipes")
    rows = [{"prompt": f"{n} + 1", "answer": str(n + 1), "completion": str(n + 1)} for n in range(8)]
    pairs = [{"prompt": f"{n} + 1", "chosen": str(n + 1), "rejected": "0"} for n in range(8)]
    anchored = [{**pair, "ref_chosen_logp": -1.0, "ref_rejected_logp": -2.0} for pair in pairs]
    for name, found in (("rows", rows), ("pairs", pairs), ("anchored", anchored)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
    (folder / "folder" / "inner").mkdir(parents=True)
    (folder / "saved").mkdir()
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    texts = {"mine.py": SCRIPT, "notes.txt": "x\n", "empty.jsonl": "", "blank.jsonl": "\n\n", "wrong.parquet": "hello"}
    for name, text in {**texts, "broken.jinja": "{% for %}"}.items():
        (folder / name).write_text(text)
    (folder / "rows.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    verbs = {}
    for number, (recipe, changes, _) in enumerate(BAD):
        (folder / f"{number}.yaml").write_text(yaml.safe_dump(apply_changes(recipe, changes), sort_keys=False))
        verbs[f"{number}.yaml"] = recipe["stage"].replace("_", "-")
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(verbs)], cwd=folder, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return [answers[f"{number}.yaml"] for number in range(len(BAD))]


@pytest.mark.parametrize("number", range(len(BAD)), ids=[",".join(changes) for _, changes, _ in BAD])
def test_validate_and_run_give_the_same_error(number: int, told: list[list[Any]]) -> None:
    checked_code, checked, run_code, run, heavy = told[number]
    assert (checked_code, run_code) == (2, 2), checked + run
    assert BAD[number][2] in checked
    assert checked == run
    assert heavy == []
    assert f"{number}.yaml:" in checked.splitlines()[0]
