"""All names in a recipe are looked up before anything starts: every error with its position, reported together."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("scripts_described_here")

SCRIPT = """
def score(completion, answer): return 1.0
def part(batch, *, width: float = 1.0): ...
def schedule(*, slope: float = 1.0): ...
class Slope:
    def __init__(self, *, by, base=0): ...
def rows(size, seed, *, terms=2): return []
"""
RL = (
    "stage: rl\nmodel: {path: tiny}\nrun: {steps: 1}\ndata: {source: rows.jsonl}\nrewards: [{use: 'mine.py:score'}]\n"
    "kl: {coef: 0.1}\n"
)
HEADS = {
    "rl": RL,
    "sft": "stage: sft\nmodel: {path: tiny}\nrun: {steps: 1}\ndata: {source: rows.jsonl}\n",
    "dpo": "stage: dpo\nmodel: {path: tiny}\nrun: {steps: 1}\ndata: {source: rows.jsonl}\n",
    "eval": "stage: eval\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrewards: [{use: 'mine.py:score'}]\n",
    "generate": "stage: generate\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nsamples: 2\n",
    "merge": "stage: merge\nmerge_method: linear\nmodels: [{model: model}, {model: model}]\n",
    "pairs": "stage: pairs\ncompletions: run\n",
}


@pytest.fixture(autouse=True)
def _things(folder: Path) -> None:
    """A script, a model, a run, and an adapter whose base is somewhere else; with a space in the path to all."""
    (folder / "mine.py").write_text(SCRIPT, encoding="utf-8")
    for name in ("model", "run", "adapter", "empty", "my models/first"):
        (folder / name).mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}", encoding="utf-8")
    (folder / "my models" / "first" / "config.json").write_text("{}", encoding="utf-8")
    (folder / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "/gone"}', encoding="utf-8")
    (folder / "run" / "completions.jsonl").write_text("", encoding="utf-8")
    row = {"prompt": "a", "completion": "b", "answer": "b", "chosen": "b", "rejected": "c"}  # for every stage
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


def _write(folder: Path, verb: str, extra: str) -> None:
    """The recipe of a verb, with lines that replace those of the same key."""
    given = [line.partition(":")[0] for line in extra.splitlines() if not line.startswith(" ")]
    kept = [line for line in HEADS[verb].splitlines() if line.partition(":")[0] not in given]
    (folder / "r.yaml").write_text("\n".join([*kept, extra]) + "\n", encoding="utf-8")


FUNCTIONS = [  # verb, what is written, the key told, what is told, the hint
    ("rl", "rewards: [{use: 'mine.py:scor'}]", "rewards.0.use", "mine.py has no function scor", "`score`"),
    ("rl", "rewards: [{use: 'json:dump_'}]", "rewards.0.use", "json has no function dump_", "`dump`"),
    ("rl", "rewards: [{use: mth.accuracy}]", "rewards.0.use", "unknown reward: mth.accuracy", "`math.accuracy`"),
    ("rl", "rewards: [{use: mine.py}]", "rewards.0.use", "names no function", "mine.py:FUNCTION"),
    ("rl", "loss: mine.py:prt", "loss.use", "mine.py has no function prt", "`part`"),
    ("rl", "loss: mine.py", "loss.use", "unknown loss `mine.py`", "mine.py:FUNCTION"),
    ("rl", "loss: mine:part", "loss.use", "cannot import mine", "`mine.py:part`"),
    ("rl", "kl: {use: 'posttrain.loss.kl:k33', coef: 1}", "kl.use", "posttrain.loss.kl has no function k33", "`k3`"),
    ("rl", "keep: [{use: 'mime.py:part'}]", "keep.0.use", "keep script not found: mime.py", "`mine.py`"),
    ("rl", "keep: {use: 'mime.py:part'}", "keep.use", "keep script not found: mime.py", "`mine.py`"),
    ("rl", "select: ['mine.py:prt']", "select.0.use", "mine.py has no function prt", "`part`"),
    ("rl", "group_rewards: ['mime.py:f']", "group_rewards.0.use", "group reward script not found", "`mine.py`"),
    ("rl", "advantage: {use: 'mine.py:part', widht: 2}", "advantage.widht", "has no argument widht", "`width`"),
    ("rl", "factors: ['mine.py:prt']", "factors.0.use", "has no function prt", "`part`"),
    ("rl", "advantage_transforms: ['mine.py:prt']", "advantage_transforms.0.use", "has no function prt", "`part`"),
    ("rl", "credit_assignment: mine.py:prt", "credit_assignment.use", "has no function prt", "`part`"),
    ("rl", "corrections: ['mine.py:prt']", "corrections.0.use", "has no function prt", "`part`"),
    ("rl", "regularisers: ['mine.py:prt']", "regularisers.0.use", "has no function prt", "`part`"),
    ("rl", "controllers: {kl.coef: 'mine.py:schedul'}", "controllers.kl.coef.use", "no function schedul", "`schedule`"),
    ("rl", "controllers: {kl.coef: {use: 'mine.py:schedule', slop: 2}}", "controllers.kl.coef.slop",
     "has no argument slop", "`slope`"),
    ("rl", "controllers: {kl.coef: {use: 'mine.py:Slope', bas: 2}}", "controllers.kl.coef.bas",
     "Slope has no argument bas", "`base`"),
    ("rl", "controllers: {kl.coef: 'mine.py:Slope'}", "controllers.kl.coef.use", "Slope needs `by`", ""),
    ("rl", "data: {source: 'mine.py:rwos', size: 3}", "data.source", "mine.py has no function rwos", "`rows`"),
    ("rl", "data: {source: mine.py, size: 3}", "data.source", "data `mine.py` names no function", "mine.py:FUNCTION"),
    ("rl", "data: {source: 'jsn:rows', size: 3}", "data.source", "cannot import jsn", "`json:rows`"),
    ("rl", "data: {source: 'mine.py:rows', size: 3, params: {tems: 1}}", "data.params.tems", "no argument tems",
     "`terms`"),
    ("rl", "data: {mix: [{source: 'mine.py:rows', size: 3}, {source: 'mime.py:rows', size: 3}]}",
     "data.mix.1.source", "data function script not found: mime.py", "`mine.py`"),
    ("rl", "data: {source: 'gym:chain_summ', size: 3}", "data.source", "has no task chain_summ", "`gym:chain_sum`"),
    ("rl", "tools: [{use: 'mime.py:f'}]", "tools.0.use", "tool script not found: mime.py", "`mine.py`"),
    ("rl", "tools: [{use: 'mine:f'}]", "tools.0.use", "cannot import mine", "`mine.py:f`"),
    ("rl", "environment: {use: 'mime.py:C'}", "environment.use", "environment script not found: mime.py", "`mine.py`"),
    ("sft", "objective: mine.py:prt", "objective.use", "has no function prt", "`part`"),
    ("dpo", "loss: mine.py:prt", "loss.use", "has no function prt", "`part`"),
    ("generate", "best_of: {rewards: [{use: 'mine.py:scor'}]}", "best_of.rewards.0.use", "no function scor", "`score`"),
    ("generate", "samples: 1\nsearch: {rewards: [{use: 'mine.py:scor'}]}", "search.rewards.0.use", "no function scor",
     "`score`"),
    ("pairs", "rewards: [{use: 'mine.py:scor'}]", "rewards.0.use", "no function scor", "`score`"),
    ("sft", "model: {path: tiny, chat_template: mine.jinja}", "model.chat_template", "template not found", ""),
    ("rl", "rewards: [{use: judge_model, params: {path: tiny, template: mime.py}}]", "rewards.0.params.template",
     "template not found: mime.py", "`mine.py`"),
    ("merge", "tokenizer_source: modle", "tokenizer_source", "`modle` is none of the models", "`model`"),
    # what is here and is something else than what was meant
    ("sft", "model: {path: ./empty}", "model.path", "holds no model", ""),
    ("pairs", "completions: empty", "completions", "holds no completions: completions.jsonl is missing", ""),
    ("eval", "eval: {baseline: run}", "eval.baseline", "holds no evaluation: problems.jsonl is missing", ""),
    ("sft", "data: {source: 'accepted:run'}", "data.source", "holds no evaluation: problems.jsonl is missing", ""),
]  # fmt: skip

THINGS = [
    ("sft", "model: {path: ./modle}", "model.path", "model not found: ./modle", "`./model`"),
    ("sft", "model: {path: my models/firs}", "model.path", "model not found", "`my models/first`"),
    ("sft", "model: {path: /cluster/model}", "model.path", "model not found: /cluster/model", ""),
    ("sft", "model: {path: adapter}", "model.path", "the base of the adapter adapter: model not found: /gone", ""),
    ("sft", "data: {source: row.jsonl}", "data.source", "data not found: row.jsonl", "`rows.jsonl`"),
    ("sft", "data: {source: 'hub:openai/gsm8k'}", "data.source", "data not found: hub:openai/", "`openai/gsm8k`"),
    ("sft", "data: {source: /cluster/rows}", "data.source", "data not found: /cluster/rows", ""),
    ("sft", "data: {source: 'accepted:runn'}", "data.source", "evaluation not found: runn", "`run`"),
    ("sft", "objective: {use: pear, behavior_model: ./modle}", "objective.behavior_model", "not found", "`./model`"),
    ("dpo", "anchors: {reference: ./modle}", "anchors.reference", "model not found: ./modle", "`./model`"),
    ("dpo", "loss: dno\nanchors: {previous: ./modle}", "anchors.previous", "model not found", "`./model`"),
    ("dpo", "loss: mnpo\nanchors: {history: [model, ./modle]}", "anchors.history.1", "model not found", "`./model`"),
    ("rl", "kl: {coef: 1, reference: ./modle}", "kl.reference", "model not found: ./modle", "`./model`"),
    ("rl", "rewards: [{use: reward_model, params: {path: ./modle}}]", "rewards.0.params.path", "not found",
     "`./model`"),
    ("rl", "rewards: [{use: reward_model, params: {path: [model, ./modle]}}]", "rewards.0.params.path.1", "not found",
     "`./model`"),
    ("merge", "models: [{model: model}, {model: ./modle}]", "models.1.model", "not found", "`./model`"),
    ("eval", "eval: {baseline: runn}", "eval.baseline", "evaluation not found: runn", "`run`"),
    ("pairs", "completions: runn", "completions", "completions not found: runn", "`run`"),
    ("pairs", "builder: temporal\npast: runn\nfuture: run", "past", "completions not found: runn", "`run`"),
    ("pairs", "not_in: [runn]", "not_in.0", "pairs not found: runn", "`run`"),
]  # fmt: skip


def check_message(text: str, key: str, what: str, hint: str) -> None:
    """One block of lines has the place, the key, what was looked for, and the hint."""
    blocks = text.replace("\nr.yaml", "\n\nr.yaml").replace("\nnote: ", "\n\n").split("\n\n")
    found = [block for block in blocks if f"  {key}: " in block]
    assert found, text
    assert found[0].removeprefix("note: ").startswith("r.yaml:"), found[0]
    assert what in found[0]
    assert (f"hint: did you mean {hint}" in found[0] or f"hint: write {hint}" in found[0]) if hint else True, found[0]


@pytest.mark.parametrize(("verb", "written", "key", "what", "hint"), FUNCTIONS, ids=lambda text: str(text)[:40])
def test_missing_functions_and_files_are_refused(
    verb: str, written: str, key: str, what: str, hint: str, folder: Path, call: Call
) -> None:
    """By `validate` and by the command, with the same words, before a directory is created."""
    _write(folder, verb, written)
    before = sorted(folder.iterdir())
    checked, run = call("recipe", "validate", "r.yaml"), call(verb, "r.yaml")
    assert (checked.exit_code, run.exit_code) == (2, 2), run.output
    check_message(checked.stderr, key, what, hint)
    assert run.stderr == checked.stderr
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize(("verb", "written", "key", "what", "hint"), THINGS, ids=lambda text: str(text)[:40])
def test_missing_models_data_and_runs_are_notes_of_validate(
    verb: str, written: str, key: str, what: str, hint: str, folder: Path, call: Call
) -> None:
    """They may exist where the recipe will run; the command itself refuses them."""
    _write(folder, verb, written)
    checked, run = call("recipe", "validate", "r.yaml"), call(verb, "r.yaml")
    assert (checked.exit_code, run.exit_code) == (0, 2), checked.output
    assert "r.yaml: valid" in checked.stdout and checked.stderr.startswith("note: ")
    for text in (checked.stderr, run.stderr):
        check_message(text, key, what, hint)
    assert "note" not in run.stderr
    told = json.loads(call("recipe", "validate", "r.yaml", "--json").stdout)
    assert told["valid"] and any(key in note["what"] and what in note["what"] for note in told["notes"])


@pytest.mark.parametrize(
    ("verb", "written", "hint"),
    [
        ("eval", "eval: {baseline: my models/none}", "my models has first"),
        ("sft", "data: {source: my data.jsonl}", " has rows.jsonl"),
    ],
)
def test_hint_lists_existing_names_if_none_is_similar(
    verb: str, written: str, hint: str, folder: Path, call: Call
) -> None:
    _write(folder, verb, written)
    assert re.search(f"\n  hint: {folder}.*{hint}", call(verb, "r.yaml").stderr)


def test_hub_id_similar_to_a_folder_gets_a_note(folder: Path, call: Call) -> None:
    """The hub is not asked. An id similar to nothing is accepted."""
    _write(folder, "sft", "model: {path: modle}")
    checked = call("recipe", "validate", "r.yaml")
    assert checked.exit_code == 0
    check_message(checked.stderr, "model.path", "`modle` is read as a hub id", "`model`")
    _write(folder, "sft", "model: {path: Qwen/Qwen3-4B}\ndata: {source: openai/gsm8k}")
    assert call("recipe", "validate", "r.yaml").stderr == ""


def test_errors_and_notes_of_a_pipeline_are_reported_together(folder: Path, call: Call) -> None:
    """Also where the schema has something to say, and from another directory."""
    (folder / "r.yaml").write_text(
        "stage: pipeline\ndefaults: {model: {path: ./modle}, data: {source: rows.jsonl}, run: {steps: 1}}\nstages:\n"
        "  - {name: a, stage: sft, objective: 'mine.py:prt'}\n"
        "  - {name: b, stage: rl, model: {path: 'stage:a'}, rewards: [{use: 'mine.py:scor'}], kl: {coef: x},\n"
        "     controllers: {kl.coef: 'mine.py:schedul'}}\n",
        encoding="utf-8",
    )
    checked = call("recipe", "validate", "r.yaml")
    lines = [line.split()[1:3] for line in checked.stderr.splitlines() if line.startswith("note: ")]
    assert lines == [["r.yaml:2:26", "stages.0.model.path:"]]
    told = [line.split()[:2] for line in checked.stderr.splitlines() if line.startswith("r.yaml")]
    assert told == [
        ["r.yaml:4:38", "stages.0.objective.use:"],
        ["r.yaml:5:68", "stages.1.rewards.0.use:"],
        ["r.yaml:5:97", "stages.1.kl.coef:"],
        ["r.yaml:6:29", "stages.1.controllers.kl.coef.use:"],
    ]


def test_every_merge_of_a_sweep_is_looked_up_before_the_first(folder: Path, call: Call) -> None:
    _write(folder, "merge", "models: [{model: model}, {model: ./modle}]")
    (folder / "e.yaml").write_text(HEADS["eval"], encoding="utf-8")
    result = call("merge", "r.yaml", "--sweep", "models.0.parameters.weight=0:1:0.5", "--eval", "e.yaml")
    assert result.exit_code == 2
    check_message(result.stderr, "models.1.model", "model not found: ./modle", "`./model`")
    assert not (folder / "runs").exists()


def test_prompt_for_a_missing_model_raises(call: Call) -> None:
    result = call("generate", "./modle", "--prompt", "1 + 1")
    assert result.exit_code == 2
    assert "model.path: model not found: ./modle" in result.stderr and "did you mean `./model`?" in result.stderr
