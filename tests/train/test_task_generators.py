"""Training on task generators: difficulty that follows the policy, exact resume, and each system through the CLI."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.data.tasks.search_world import make_world
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.train import assemble

from .conftest import merge_sections
from .test_rollout_source import recipe, run, use  # noqa: F401  fixtures
from .versioned_engine import VersionedEngine

sys.path.append(str(Path(__file__).parents[1]))
from scripted_engines import ScriptedEngine

Values = dict[str, Any]
TASKS: Values = {
    "source": None,
    "mix": [
        {"source": "task:countdown", "size": 24, "params": {"levels": [0, 1, 2]}},
        {"source": "task:random_calculation", "size": 24, "params": {"levels": [0, 1, 2]}},
    ],
}
SAMPLERS: dict[str, Values] = {
    "next_level": {"use": "next_level", "threshold": 0.3, "window": 3, "earlier": 0.2},
    "scaler": {"use": "scaler", "target": 0.2, "gain": 1.0, "active": 1, "history_len": 2, "zero_limit": 1},
    "weight": {"use": "scaler", "pick": "weight", "active": 1, "age_scale": 2},
}


@pytest.mark.parametrize("name", list(SAMPLERS))
@pytest.mark.parametrize("staleness", [0, 2])
def test_killed_run_resumes_exactly(
    recipe: Callable[..., Any],  # noqa: F811
    run: Any,  # noqa: F811
    use: Any,  # noqa: F811
    tmp_path: Path,
    name: str,
    staleness: int,
) -> None:
    """With the difficulty stored in the checkpoint, which has changed by then."""
    changes = {"data": TASKS, "sampler": SAMPLERS[name], "rollout": {"staleness": staleness, "group_size": 4}}
    made = recipe(
        **merge_sections(changes, {"scoring": {"correct_at": 0.3, "max_bad_gold": 1}, "run": {"samples_per_step": 99}})
    )
    use(lambda tokenizer: VersionedEngine(tokenizer, slowest=0.0))
    straight = run("straight", made)
    shutil.copytree(tmp_path / "straight", tmp_path / "killed")
    for step in range(4, 7):
        shutil.rmtree(checkpoints.folder_for(tmp_path / "killed" / "checkpoints", step))
    assert run("killed", made, resume=True) == straight
    states = [
        json.loads((checkpoints.folder_for(tmp_path / n / "checkpoints", 6) / "state.json").read_text())["sampler"]
        for n in ("straight", "killed")
    ]
    assert states[0] == states[1]
    moved = "sampler/stage" if name == "next_level" else "sampler/difficulty"
    assert len({row[moved] for row in straight}) > 1, "the run shows no change of difficulty"


# --- each system, three steps through the command line ---


def train_preset(folder: Path, algorithm: str, changes: Values) -> tuple[list[Values], list[Values]]:
    """Return metrics and samples of three steps of a preset's example on the tiny model."""
    shown = json.loads(CliRunner().invoke(app, ["methods", "show", f"preset/{algorithm}", "--json"]).stdout)[0]
    base = {key: value for key, value in yaml.safe_load(shown["recipe"]).items() if key != "rewards"}
    small: Values = {
        "model": {"path": "tiny"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 16},
        "rewards": yaml.safe_load(shown["recipe"])["rewards"],
        "scoring": {"workers": 1},
        "run": {"steps": 3, "samples_per_step": 99},
        "optim": {"lr": 1e-3},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(merge_sections(merge_sections(base, small), changes)))
    result = CliRunner().invoke(app, ["rl", str(folder / "recipe.yaml"), "--output", str(folder / "run")])
    assert result.exit_code == 0, result.output
    samples = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    return read_metrics(folder / "run"), samples


EASY = '''
def most(completion, prompt):
    """Right three times of four, by the text: what a policy that knows the level would earn."""
    return float(hash_of(completion) % 4 != 0)

def hash_of(text):
    return sum(map(ord, text))
'''
PAID = {"rewards": [{"use": "easy.py:most"}], "scoring": {"max_bad_gold": 1}}


@pytest.mark.slow
def test_saturn_moves_to_harder_formulas(tmp_path: Path) -> None:
    (tmp_path / "easy.py").write_text(EASY)
    metrics, samples = train_preset(tmp_path, "saturn", {**PAID, "sampler": {"window": 4}})
    assert [row["sampler/stage"] for row in metrics] == [1, 2, 3]
    by_step = {step: {len(s["prompt"].split(" & ")) for s in samples if s["step"] == step} for step in (1, 2, 3)}
    assert [max(by_step[step]) for step in (1, 2, 3)] == sorted({max(found) for found in by_step.values()})
    assert sum(row["updates"] for row in metrics) > 0


@pytest.mark.slow
def test_scaler_adapts_each_environment_and_swaps_one(tmp_path: Path) -> None:
    (tmp_path / "easy.py").write_text(EASY)
    changes = {**PAID, "sampler": {"active": 2, "max_limit": 1, "gain": 8.0}}
    metrics, _ = train_preset(tmp_path, "scaler", changes)
    assert metrics[0]["sampler/difficulty"] > 0
    assert metrics[-1]["sampler/retired"] > 0
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step-*/state.json")).read_text())["sampler"]
    assert set(state["d"]) == {"saturn", "ariadne", "countdown"}


@pytest.mark.slow
def test_ariadne_rewards_prefixes_of_the_path(tmp_path: Path) -> None:
    metrics, samples = train_preset(tmp_path, "ariadne", {})
    assert {"score/path/path_reward", "score/path/tag_format"} & set(metrics[0]) or "path/path_reward" in str(
        samples[0]
    )
    assert all("origin" in sample["prompt"] and "target" in sample["prompt"] for sample in samples)
    assert len({sample["prompt"].count("\n") for sample in samples}) > 1, "mazes of several sizes"


def script_searches(monkeypatch: pytest.MonkeyPatch, asked: Callable[[str], str]) -> None:
    """Rollouts that search for what `asked` finds in the question and give different answers in their second turn."""
    words = itertools.count()

    def make_engine(_: Any, loaded: Any, **__: Any) -> ScriptedEngine:
        def script(prompt: Any, sample: int) -> str:
            del sample
            text = loaded.tokenizer.decode(list(prompt.ids))
            if "[1] " in text:
                return f"<answer>{next(words)}</answer>"
            call = {"name": "search_world", "arguments": {"query": asked(text)}}
            return f"<tool_call>{json.dumps(call)}</tool_call>"

        return ScriptedEngine(script, loaded.tokenizer, window=4000)

    monkeypatch.setattr(assemble, "make_engine", make_engine)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["searchgym", "asearcher"])
def test_search_agents_train_with_masked_tool_results(
    tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool answers from the documents of the question's world; the tokens it returned are not trained on."""
    (tmp_path / "easy.py").write_text(EASY)
    script_searches(monkeypatch, lambda text: text.split("?")[0].split()[-1])
    changes: Values = {
        **PAID,
        "tool_prompt": "none",
        "rollout": {"max_turns": 3, "turn_tokens": 120, "max_new_tokens": 1500},
        "tools": [{"use": "search_world", "params": {"top": 1}}],
    }
    metrics, samples = train_preset(tmp_path, algorithm, changes)
    documents = make_world(0, 400).documents
    returned = [call["result"] for sample in samples for turn in sample["turns"] for call in turn["calls"]]
    assert len(returned) >= 40
    assert {text for text in returned if text.removeprefix("[1] ") not in documents.values()} == set()
    kinds = [{segment["kind"] for segment in sample["segments"]} for sample in samples]
    assert all(found == {"model", "tool"} for found in kinds)
    assert sum(row["updates"] for row in metrics) > 0


@pytest.mark.slow
def test_questions_over_custom_documents(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "world.txt").write_text("\n\n".join(make_world(0, 60).documents.values()))
    (tmp_path / "easy.py").write_text(EASY)
    data = {"source": "task:asearcher", "size": 30, "params": {"levels": [0, 1, 2], "folder": "docs"}}
    changes: Values = {
        **PAID,
        "data": data,
        "tool_prompt": "none",
        "tools": [{"use": "search", "params": {"folder": "docs", "top": 1}}],
        "rollout": {"max_turns": 2, "turn_tokens": 16, "max_new_tokens": 200, "staleness": 1},
    }
    metrics, samples = train_preset(tmp_path, "asearcher", changes)
    assert sum(row["updates"] for row in metrics) > 0
    assert any("X1" in sample["prompt"] for sample in samples), "no question with a hidden name was drawn"
