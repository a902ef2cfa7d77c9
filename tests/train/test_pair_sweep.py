"""Every preference preset and every pair loss for twenty steps: margins grow and runs resume exactly.

The whole sweep is slow and runs with `make test-slow`. Otherwise: one method per family, and the invariant that lets
the families stand for all: a pair loss is a function of its batch, so a loop that resumes exactly for one loss resumes
exactly for every loss. Five steps of each loss are in test_pair_losses.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from posttrain import registry
from posttrain.batch import PairBatch
from posttrain.cli.app import app
from posttrain.recipe import presets
from posttrain.run.metrics import read_metrics

# Settings by loss with a visible effect in a few steps of a tiny model.
SETTINGS: dict[str, dict[str, Any]] = {"sppo": {"beta": 0.1}, "inpo": {"eta": 0.05}, "mnpo": {"eta": 0.5}}
COLUMNS = {
    "chosen_win": 0.8,
    "rejected_win": 0.3,
    "chosen_score": 1.0,
    "rejected_score": 0.0,
    "ref_sample_is_chosen": False,
    "history_chosen_logp": [-9.0, -8.0],
    "history_rejected_logp": [-8.0, -9.0],
}
PRESETS = {name: presets.preset(name).choices["loss"]["use"] for name in presets.names("dpo")}
LOSSES = sorted(registry.load_index()["pair_loss"])
METHODS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name, "loss": SETTINGS.get(use, {})} for name, use in PRESETS.items()},
    **{use: {"loss": {"use": use, **SETTINGS.get(use, {})}} for use in LOSSES if use not in PRESETS.values()},
}
METHODS["hypo"]["online_kl"] = {"max_new_tokens": 8}
# A reference by the starting policy; a mean over the step's tokens; a history by columns; single answers.
FAMILIES = {
    "dpo": {"loss": "dpo"},
    "cpo": {"loss": "cpo"},
    "mnpo": {"loss": {"use": "mnpo", "eta": 0.5}},
    "kto": {"loss": "kto"},
}


@pytest.fixture
def folder(dpo_recipe: Any, tmp_path: Path) -> Path:
    """A folder with pairs that have every column."""
    del dpo_recipe
    path = tmp_path / "pairs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, **COLUMNS}) + "\n" for row in rows))
    return tmp_path


def train_and_resume(folder: Path, values: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Return the metrics of a run through the command line, after checking that a resumed run has the same."""
    recipe = {
        "stage": "dpo",
        "model": {"path": "tiny"},
        "data": {"source": "pairs.jsonl"},
        **values,
        "batch": {"size": 8, "micro_size": 4},
        "optim": {"lr": 2e-3, "schedule": "linear", "warmup_steps": 2},
        "run": {"steps": steps, "save_every": steps // 2},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    command = ["dpo", str(folder / "recipe.yaml"), "--output", str(folder / "run")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    whole = rows_of(folder)
    shutil.rmtree(folder / "run" / "checkpoints" / f"step-{steps:08d}")  # as if killed before it was written
    (folder / "run" / "summary.json").unlink()
    done = CliRunner().invoke(app, [*command, "--resume"])
    assert done.exit_code == 0, done.output
    assert f"resumed after step {steps // 2}" in done.output
    assert rows_of(folder) == whole
    return whole


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(folder / "run")]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_method_per_family_trains_and_resumes_exactly(name: str, folder: Path) -> None:
    assert len(train_and_resume(folder, FAMILIES[name], 4)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_margin_grows_in_twenty_steps(name: str, folder: Path) -> None:
    rows = train_and_resume(folder, METHODS[name], 20)
    margins = [row["rewards/margins"] for row in rows]
    assert len(rows) == 20
    assert margins[-1] > margins[0] + 1e-3
    assert sum(margins[10:]) > sum(margins[:10])


RL_LOSSES: dict[str, dict[str, Any]] = {
    "copg": {"algorithm": "copg"},
    "p3o": {"algorithm": "p3o"},
    "trpa": {"algorithm": "trpa"},
    "gdc": {"algorithm": "gdc"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RL_LOSSES)
def test_online_pair_losses_raise_the_reward_in_twenty_steps(name: str, folder: Path) -> None:
    """The pair losses that run on the policy's own samples, in rl."""
    (folder / "digits.py").write_text(
        "def digits(completion, token_count):\n    return sum(c.isdigit() for c in completion) / max(token_count, 1)\n"
    )
    recipe = {
        "stage": "rl",
        **RL_LOSSES[name],
        "model": {"path": "tiny"},
        "data": {"source": "pairs.jsonl"},
        "rollout": {"prompts_per_step": 6, "group_size": 8, "max_new_tokens": 8},
        "rewards": [{"use": "digits.py:digits"}],
        "scoring": {"workers": 1, "correct_at": 0.25},
        "optim": {"lr": 3e-3},
        "run": {"steps": 20, "save_every": 10},
    }
    (folder / "rl.yaml").write_text(json.dumps(recipe))
    done = CliRunner().invoke(app, ["rl", str(folder / "rl.yaml"), "--output", str(folder / "run")])
    assert done.exit_code == 0, done.output
    rewards = [row["reward"] for row in rows_of(folder)]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.05


@pytest.mark.parametrize("use", LOSSES)
def test_pair_loss_is_a_function_of_its_batch(use: str) -> None:
    """The same values twice, and the batch is not modified."""
    draw = torch.Generator().manual_seed(0)

    def logps(*shape: int) -> torch.Tensor:
        return -torch.rand(*shape, 3, generator=draw, dtype=torch.float64) * 9

    batch = PairBatch(
        logps(), logps(), torch.tensor([4, 5, 6]), torch.tensor([3, 5, 8]),
        ref_chosen_logp=logps(), ref_rejected_logp=logps(), prev_chosen_logp=logps(), prev_rejected_logp=logps(),
        history_chosen_logp=logps(2), history_rejected_logp=logps(2),
        chosen_win=torch.full((3,), 0.8), rejected_win=torch.full((3,), 0.3),
        chosen_score=torch.ones(3), rejected_score=torch.zeros(3),
        ref_sample_is_chosen=torch.tensor([1.0, 0.0, 1.0]), label=torch.tensor([1.0, 0.0, 1.0]),
    )  # fmt: skip
    fields = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    loss = registry.get("pair_loss", use).function
    first, second = loss(batch), loss(batch)
    torch.testing.assert_close(first.losses, second.losses, rtol=0, atol=0)
    assert all(torch.equal(getattr(batch, name), value) for name, value in fields.items())


def test_sweep_contains_every_preset_and_every_loss() -> None:
    assert set(PRESETS) <= set(METHODS) and set(LOSSES) <= {*METHODS, *PRESETS.values()}
