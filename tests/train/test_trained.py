"""A run that trains on nothing must not end like one that has trained: each case is refused, or reported and
stopped.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.errors import PosttrainError, RunError
from posttrain.recipe.load import load_dict
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.train import optim, preference, reward_model, rl, sft, update_check
from posttrain.train.checkpoint import State
from posttrain.train.rl_metrics import signal_metrics, signal_note

Opened = Callable[..., AbstractContextManager[Any]]
RUNNERS = {"sft": sft.run, "dpo": preference.run, "rl": rl.run, "reward_model": reward_model.run}

OWN = """
def digits(completion, token_count):
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def flat(completion):
    return 0.5

def silent(completion):
    return None

def early(completion, step):
    return len(completion) if step < 2 else 0.5
"""
# In a separate file, because scoring workers import no torch.
PARTS = '''
import torch
from posttrain.batch import PairLoss, TokenLoss

def no_policy(batch, logp):
    """0, whatever the policy."""
    return TokenLoss(logp * 0)

def no_factor(batch):
    """0 for every row."""
    return torch.zeros(len(batch))

def no_weight(rows):
    """0 for every token."""
    return torch.zeros_like(rows.logp)

def no_pair(batch):
    """A constant that knows the policy."""
    return PairLoss(batch.chosen_logp * 0 + 1)
'''

RL: dict[str, Any] = {
    "stage": "rl",
    "model": {"path": "tiny"},
    "data": {"source": "prompts.jsonl"},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
    "rewards": [{"use": "own.py:digits"}],
    "scoring": {"workers": 1},
    "optim": {"lr": 1e-3},
    "run": {"steps": 3},
}
SFT: dict[str, Any] = {
    "stage": "sft",
    "model": {"path": "tiny"},
    "data": {"source": "rows.jsonl"},
    "batch": {"size": 4},
    "optim": {"lr": 1e-3},
    "run": {"steps": 3},
}
DPO = SFT | {"stage": "dpo", "data": {"source": "pairs.jsonl"}, "loss": {"use": "dpo"}}
FLAT = {"rewards": [{"use": "own.py:flat"}]}
DROPPED = {"keep": "dynamic_sampling", "scoring": {"workers": 1, "correct_at": 2.0}}
TINY_LR = {"optim": {"lr": 1e-30}}

# what is trained on, and the message at the latest after the first step
NOTHING: dict[str, tuple[dict[str, Any], str]] = {
    "equal rewards": (RL | FLAT, "no update in this step: no group has a signal; no answer reached scoring.correct_at"),
    "unscored": (RL | {"rewards": [{"use": "own.py:silent"}]}, "silent returned None for all"),
    "groups dropped": (RL | DROPPED, "`keep` dropped every group whose rewards differ"),
    "rows masked": (
        RL | {"rollout": {**RL["rollout"], "max_new_tokens": 2}, "loss": {"mask_truncated": True}},
        "no token is left of the groups whose rewards differ",
    ),
    "loss without gradient": (
        RL | {"loss": {"use": "parts.py:no_policy"}},
        "the gradient of every trained weight is 0",
    ),
    "factor 0": (RL | {"factors": [{"use": "parts.py:no_factor"}]}, "no token was left to train on"),
    "rl, rate under rounding": (RL | TINY_LR, "the learning rate 1e-30 changes no weight"),
    "sft, rate under rounding": (SFT | TINY_LR, "the learning rate 1e-30 changes no weight"),
    "sft, adapter": (
        SFT | TINY_LR | {"model": {"path": "tiny", "lora": {"rank": 2}}},
        "the learning rate 1e-30 changes no weight",
    ),
    "sft, weights 0": (SFT | {"objective": {"use": "parts.py:no_weight"}}, "the gradient of every trained weight is 0"),
    "sft, all rows too long": (SFT | {"data": {"source": "rows.jsonl", "max_length": 1, "overlong": "drop"}}, "no row"),
    "sft, no turn trained": (SFT | {"data": {"source": "untrained.jsonl"}}, "no row is left"),
    "dpo, loss without gradient": (DPO | {"loss": {"use": "parts.py:no_pair"}}, "the gradient of every trained weight"),
    "dpo, rate under rounding": (DPO | TINY_LR, "the learning rate 1e-30 changes no weight"),
    "dpo, equal sides": (DPO | {"data": {"source": "equal.jsonl"}}, "no row is left"),
    "reward model, equal sides": (
        SFT | {"stage": "reward_model", "algorithm": "reward_model", "data": {"source": "equal.jsonl"}},
        "no row is left",
    ),
}


@pytest.fixture
def made(tmp_path: Path) -> Callable[[dict[str, Any]], Any]:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "parts.py").write_text(PARTS)
    user, answer = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2", "train": False}
    files = {
        "prompts": [{"prompt": f"{i}+{i}="} for i in range(12)],
        "rows": [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}."} for i in range(12)],
        "pairs": [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": "no"} for i in range(12)],
        "equal": [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": f"{2 * i}"} for i in range(12)],
        "untrained": [{"messages": [user, answer]} for _ in range(4)],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda values: load_dict(values, base_dir=tmp_path, where="test").recipe


@pytest.mark.parametrize("case", NOTHING)
def test_run_without_training_signal_is_stopped(
    case: str, made: Any, opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    values, said = NOTHING[case]
    recipe = made(values)
    with opened() as directory, pytest.raises(PosttrainError) as told:
        RUNNERS[recipe.stage](recipe, directory)
    assert said in " ".join((capsys.readouterr().err + str(told.value)).split())
    assert not directory.final.exists(), "no model that looks like a trained one"
    if isinstance(told.value, RunError):
        assert "nothing was trained: none of 3 steps made an update" in str(told.value)
        assert [row["updates"] for row in read_metrics(directory.path)] == [0, 0, 0]


@pytest.mark.parametrize("values", [RL, SFT, DPO], ids=lambda values: values["stage"])
def test_frozen_model_is_refused(values: Any, made: Any, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    build = optim.build
    monkeypatch.setattr(optim, "build", lambda model, *rest: build(model.requires_grad_(False), *rest))
    recipe = made(values)
    with opened() as directory, pytest.raises(PosttrainError, match="no weight of the model is trained"):
        RUNNERS[recipe.stage](recipe, directory)


@pytest.mark.parametrize("values", [RL, SFT, DPO], ids=lambda values: values["stage"])
def test_adapter_without_gradient_is_refused(
    values: Any, made: Any, opened: Opened, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both of its factors are 0, so the gradients of both are 0."""
    build = optim.build

    def zeroed(model: Any, *rest: Any) -> Any:
        for name, weight in model.named_parameters():
            if "lora_A" in name:
                torch.nn.init.zeros_(weight)
        return build(model, *rest)

    monkeypatch.setattr(optim, "build", zeroed)
    recipe = made(values | {"model": {"path": "tiny", "lora": {"rank": 2}}})
    with opened() as directory, pytest.raises(RunError, match="nothing was trained"):
        RUNNERS[recipe.stage](recipe, directory)
    assert "the gradient of every trained weight is 0" in capsys.readouterr().err


def test_loss_scale_at_which_every_gradient_overflows(
    made: Any, opened: Opened, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = functools.partial(torch.amp.GradScaler, init_scale=2.0**40, backoff_factor=0.999)
    monkeypatch.setattr("posttrain.train.optim.GradScaler", stuck)
    with opened() as directory, pytest.raises(RunError, match="nothing was trained"):
        rl.run(made(RL | {"model": {"path": "tiny", "dtype": "float16"}}), directory)
    assert "gradients overflowed float16" in capsys.readouterr().err


@pytest.mark.parametrize("values", [RL | FLAT, SFT | TINY_LR, DPO | TINY_LR], ids=lambda values: values["stage"])
def test_consecutive_steps_without_an_update_stop_the_run(values: Any, made: Any, opened: Opened) -> None:
    """The run is saved, so --resume with a higher limit continues with the next step."""
    make = lambda limit: made(values | {"run": {"steps": 5, "max_idle_steps": limit}})  # noqa: E731
    recipe = make(2)
    with opened() as directory, pytest.raises(RunError, match=r"no update in the last 2 steps(.|\n)*max_idle_steps"):
        RUNNERS[recipe.stage](recipe, directory)
    newest = checkpoints.latest(directory.checkpoints)
    assert newest is not None and checkpoints.step_of(newest) == 2
    with opened(resume=True) as directory, pytest.raises(RunError, match="none of 5 steps made an update"):
        RUNNERS[recipe.stage](make(None), directory)
    assert [row["step"] for row in read_metrics(directory.path)] == [1, 2, 3, 4, 5]


def test_summary_counts_updates_and_the_share_of_trained_tokens(made: Any, opened: Opened) -> None:
    with opened() as directory:
        found = sft.run(made(SFT), directory)
        rows = read_metrics(directory.path)
    assert (found["updates"], found["steps_without_update"]) == (3, 0)
    assert found["trained_ratio"] == pytest.approx(sum(row["trained_ratio"] for row in rows) / 3, abs=0.05)
    with opened("rl") as directory:
        found = rl.run(made(RL), directory)
        rows = read_metrics(directory.path)
    assert found["updates"] == sum(row["updates"] for row in rows) == 3
    assert 0 < found["trained_ratio"] <= 1


def test_update_counts_are_resumed() -> None:
    """Two updates in step 1, none in 2 and 3, one in 4."""
    state = State()
    for updates in (2, 0, 0):
        state.count_tokens(6.0, 10.0, updates)
        state.count_step(1.0, updates)
    assert (state.updates, state.idle, state.idle_steps) == (2, 2, 2)
    assert update_check.check_patience(state, 3) is None and update_check.check_patience(state, None) is None
    assert "no update in the last 2 steps, 2 updates before" in str(update_check.check_patience(state, 2))
    update_check.check_end(state)
    state.count_tokens(10.0, 10.0, 1)
    state.count_step(1.0, 1)
    assert state.idle == 0
    assert update_check.summary(state) == {"updates": 3, "steps_without_update": 2, "trained_ratio": pytest.approx(0.4)}


def test_reward_without_return_value_is_named(made: Any, opened: Opened, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = made(RL | {"rewards": [{"use": "own.py:silent"}]})
    with opened() as directory, pytest.raises(RunError, match="nothing was trained"):
        rl.run(recipe, directory)
    rows = read_metrics(directory.path)[0]["rollout/rows"]
    told = capsys.readouterr().err
    assert f"silent returned None for all {rows} completions (a missing `return`?)" in told
    assert " correct " not in told, "it reads the completion alone: what is right is not known"


@pytest.mark.parametrize(
    ("keep", "mask", "name", "said"),
    [
        ([True] * 4, [True] * 4, "share", None),
        ([False] * 4, [False] * 4, "dropped", "`keep` dropped every group"),
        ([True] * 4, [False] * 4, "masked", "no token is left"),
        ([False, False, True, True], [False, False, False, True], "share", None),
    ],
)
def test_signal_is_counted_after_keep_and_masks(
    keep: list[bool], mask: list[bool], name: str, said: str | None
) -> None:
    """Two groups of two whose rewards differ; in the last case one is dropped, and one row of the other is masked."""
    batch = RolloutBatch(
        group_ids=torch.tensor([0, 0, 1, 1]),
        mask=torch.tensor(mask)[:, None],
        keep=torch.tensor(keep),
        rewards=torch.tensor([0.0, 1.0, 0.0, 1.0]),
        correct=torch.zeros(4),
    )
    found = signal_metrics(batch)
    assert found[f"signal/{name}"] == (0.5 if keep[0] != keep[3] else 1.0)
    assert found["frac_reward_zero_std"] == 0
    assert sum(value for key, value in found.items() if key.startswith("signal/")) == pytest.approx(1)
    note = signal_note(found)
    assert note is None if said is None else said in (note or "")
