"""Every preset of stage rl trains on `tiny`, calls its components, changes the weights, and resumes exactly."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.errors import UserError
from posttrain.recipe import presets
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import RlRecipe
from posttrain.run.metrics import read_metrics
from posttrain.train import assemble, rl
from posttrain.train.objective import BoundComponent

Opened = Callable[..., AbstractContextManager[Any]]
NAMES = presets.names("rl")

REWARDS = '''
def digits(completion, token_count):
    """Share of tokens that are digits: it differs between the completions of an untrained model."""
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def lower(completion):
    return float(completion[:1].islower())
'''

GAME = """
class Choice:
    def reset(self, row): self.over = False
    def actions(self): return [] if self.over else ["digit", "other"]
    def action(self, text): return text if text in self.actions() else ("other", "digit")[text[:1].isdigit()]
    def step(self, text):
        digit, self.over = self.action(text) == "digit", True
        return "", True, float(digit)
    def score(self): return 0.0
    def close(self): pass
"""

# Presets with settings for models that write more than a few tokens.
SMALLER: dict[str, dict[str, Any]] = {
    **{
        name: {"rollout": {"max_new_tokens": 40}} for name in ("rl_plus", "calibrl", "relift")
    },  # which solutions have to fit
    "pass_k_training": {"advantage": {"k": 2}},
    "s_grpo": {
        "rollout": {
            "group_size": 1,
            "shape": {"use": "serial_exit", "num_exits": 3, "inducer": "!", "answer_tokens": 6},
        }
    },
    "deepsearch": {"rollout": {"shape": {"use": "mcts", "segment_tokens": 2, "width": 2, "max_depth": 3, "paths": 3}}},
    "delethink": {"rollout": {"shape": {"use": "chunks", "keep_head": 1, "keep_tail": 3, "max_chunks": 3}}},
    "supo": {"rollout": {"shape": {"use": "summaries", "instruction": "!", "answer_tokens": 4, "max_summaries": 2}}},
    "brpo": {
        "rollout": {
            "shape": {"use": "budgets", "budgets": [3, 7], "num_answers": 2, "closing": "!", "answer_tokens": 4}
        }
    },
    "papo": {"model": {"path": "tiny-vision"}, "data": {"source": "task:find_square", "size": 24}},
    "dvrp": {"model": {"path": "tiny-vision"}, "data": {"source": "task:find_square", "size": 24}},
    "t_ppo": {"rollout": {"shape": {"use": "windows", "window": 4}}},
    "igpo": {
        "scoring": {"workers": 1, "correct_at": 0.15, "split": "lines"},
        "rollout": {"max_new_tokens": 30, "max_turns": 8},
    },
    "adaptvision": {
        "scoring": {"workers": 1, "correct_at": 0.15, "split": "lines"},
        "rollout": {"max_new_tokens": 30, "max_turns": 8},
    },
    "mc_grpo": {
        "environment": {"use": "game.py:Choice", "simulations": 2},
        "rollout": {"max_turns": 1, "stop": ["a", "e", "o"]},
    },
    # whose prompts or workflows are long: fewer of them
    **{name: {"rollout": {"prompts_per_step": 2}} for name in ("critique_rl", "search_r2", "rlac", "reseek")},
    "ptst": {
        "rollout": {"max_new_tokens": 10},
        "controllers": {
            "rollout.max_new_tokens": {"use": "stages", "values": [6, 8, 10], "until": [1, 2]},
            "rollout.group_size": {"use": "stages", "values": [4, 3, 2], "until": [1, 2]},
        },
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with rewards and rows with the numeric and text columns that some presets read."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "game.py").write_text(GAME)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(24):
            numbers = {
                "target": 5 + i % 4,
                "easiness": 1.0 + i % 3,
                "difficulty": i % 5 / 4,
                "level": i % 2,
                "task": "a",
            }
            texts = {"solution": f"add {i} and {i}\nso it is {2 * i}", "hint": "carry the ten", "guidance": "carry"}
            file.write(
                json.dumps({"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": str(2 * i), **numbers, **texts}) + "\n"
            )
    return tmp_path


def values_of(name: str) -> dict[str, Any]:
    """Return `algorithm: NAME` with its rewards as functions that an untrained model satisfies now and then."""
    named = [{**reward} for reward in presets.preset(name).rewards]
    for number, reward in enumerate(named):
        if not reward["use"].endswith("necessary_prefix"):  # it gives several numbers
            stand_in = "rewards.py:lower" if number else "rewards.py:digits"
            reward |= {"use": stand_in, "name": reward.get("name") or reward["use"].rpartition(".")[2], "params": {}}
    rewards = named or [{"use": "rewards.py:digits"}, {"use": "rewards.py:lower", "weight": 0.1}]
    rewards[0]["correct"] = True
    changes = SMALLER.get(name, {})
    return {
        "stage": "rl",
        "algorithm": name,
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 5, "group_size": 4, "max_new_tokens": 10, **changes.get("rollout", {})},
        "rewards": rewards,
        "scoring": {"workers": 1, "correct_at": 0.15},
        "optim": {"lr": 1e-3},
        "run": {"steps": 3, "save_every": 2},
        **{key: value for key, value in changes.items() if key != "rollout"},
    }


def recipe_of(name: str, folder: Path) -> RlRecipe:
    recipe = load_dict(values_of(name), base_dir=folder, where="test").recipe
    assert isinstance(recipe, RlRecipe)
    return recipe


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Record the keys of components called since training started (the rehearsal before does not count)."""
    keys: set[str] = set()
    call, train = BoundComponent.__call__, rl.train

    def recording(self: BoundComponent, *args: Any) -> Any:
        keys.add(self.key)
        return call(self, *args)

    def from_here(*args: Any) -> Any:
        keys.clear()
        return train(*args)

    monkeypatch.setattr(BoundComponent, "__call__", recording)
    monkeypatch.setattr(rl, "train", from_here)
    yield keys


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(path)]


def test_presets_are_found() -> None:
    assert len(NAMES) >= 60


def command(name: str, folder: Path, *options: str) -> list[str]:
    """Return the arguments of `posttrain` that train a preset; writes the recipe to the folder."""
    recipe = folder / f"{name}.yaml"
    recipe.write_text(json.dumps(values_of(name)))  # JSON is YAML
    return ["rl", str(recipe), "--output", str(folder / name), *options]


EVERY_RUN = NAMES[::3]  # the others run with the slow tests


@pytest.mark.parametrize("name", [n if n in EVERY_RUN else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_preset_trains_and_resumes_exactly(name: str, folder: Path, called: set[str]) -> None:
    """Three steps through the command line, a checkpoint after the second; then the third again from there."""
    recipe = recipe_of(name, folder)
    done = CliRunner().invoke(app, command(name, folder))
    assert done.exit_code == 0, done.output
    whole = rows_of(folder / name)
    named = {key for key, _ in recipe.active_components() if not key.startswith("controllers.")}
    assert named <= called
    assert all(f"control/{key}" in row for key in recipe.controllers for row in whole)
    assert len(whole) == 3 and any(row["grad_norm"] > 0 for row in whole)
    shutil.rmtree(folder / name / "checkpoints" / "step-00000003")
    (folder / name / "summary.json").unlink()
    done = CliRunner().invoke(app, command(name, folder, "--resume"))
    assert done.exit_code == 0, done.output
    assert "resumed after step 2" in done.output
    assert rows_of(folder / name) == whole


@pytest.mark.parametrize(
    "name", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ppo", "tis"))]
)  # clipped surrogate, value head, engine correction
def test_one_preset_per_family_in_a_separate_process(name: str, folder: Path, forked_python: str) -> None:
    typed = [forked_python, "-m", "posttrain", *command(name, folder, "run.steps=2")]
    done = subprocess.run(typed, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = rows_of(folder / name)
    assert len(rows) == 2 and any(row["grad_norm"] > 0 for row in rows)


def test_missing_reward_of_a_preset_raises_before_the_model_is_loaded(
    folder: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("hdpo", folder)
    fewer = recipe.model_copy(update={"rewards": recipe.rewards[:1]})
    monkeypatch.setattr(assemble.models, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    with opened() as directory, pytest.raises(UserError, match="no reward component"):
        rl.run(fewer, directory)
