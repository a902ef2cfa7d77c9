"""Losses on stored completions (`rollout.engine: stored`), through the command line on `tiny`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.batch import RolloutBatch
from posttrain.loss import offline_rl
from posttrain.path_resolution import shipped_folder

F64 = torch.float64


LEVELS = {
    "token": [],
    "response": ["loss.level=response"],
    "step": ["loss.use=oreo_step", "scoring.split=lines"],
}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_oreo_trains_twenty_steps(cli: Any, level: str, tmp_path: Path) -> None:
    """Right traces become likelier than wrong traces; the run resumes exactly."""
    rows = cli.resumed(tmp_path / "a run", "rl", "rl/oreo_tiny", *LEVELS[level])
    margins = [row["oreo/margin"] for row in rows]
    assert len(rows) == 20 and margins[0] == pytest.approx(0, abs=1e-6)
    assert sum(margins[10:]) > sum(margins[:10]) and margins[-1] > 0
    assert sum(r["oreo/error"] for r in rows[-5:]) < sum(r["oreo/error"] for r in rows[:5])


def a_batch(turn_ids: Any = None, mask: Any = None, **more: Any) -> RolloutBatch:
    kept = torch.ones(2, 4, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    return RolloutBatch(
        group_ids=torch.arange(2),
        mask=kept,
        rewards=torch.tensor([1.0, 0.0], dtype=F64),
        ref_logp=-torch.arange(8, dtype=F64).reshape(2, 4) / 8,
        new_values=torch.arange(8, dtype=F64).reshape(2, 4) / 10,
        turn_ids=None if turn_ids is None else torch.tensor(turn_ids),
        **more,
    )


def test_oreo_loss_equals_the_formula_row_by_row() -> None:
    """`loss: oreo` is value plus policy loss of the formula, also with garbage in masked cells."""
    batch = a_batch(mask=[[1, 1, 1, 0], [1, 1, 1, 1]])
    logp = torch.tensor([[-1.0, -2, -3, float("nan")], [-0.5, -1, -1, -1]], dtype=F64, requires_grad=True)
    values = batch.new_values.requires_grad_()
    loss = offline_rl.oreo_loss(batch, logp, beta=0.1)
    (torch.where(batch.mask, loss.values, 0.0).sum(-1) / batch.mask.sum(-1)).mean().backward()
    clean = logp.detach().nan_to_num(7.0).requires_grad_()
    again = values.detach().clone().requires_grad_()
    found = offline_rl.oreo(clean, batch.ref_logp, again, batch.rewards, batch.mask, beta=0.1)
    (found.value_loss + found.policy_loss).backward()
    torch.testing.assert_close(logp.grad.nan_to_num(0.0), clean.grad)
    torch.testing.assert_close(values.grad, again.grad)


def test_steps_of_one_token_and_of_the_whole_response() -> None:
    logp = -torch.rand(2, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    each, whole = a_batch([[0, 1, 2, 3]] * 2), a_batch([[0, 0, 0, 0]] * 2)
    for batch, level in ((each, "token"), (whole, "response")):
        by_step = offline_rl.oreo_step(batch, logp).values
        torch.testing.assert_close(by_step.mean(-1), offline_rl.oreo_loss(batch, logp, level=level).values.mean(-1))


def test_invalid_data_raises(cli: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2" * 9, "answer": "2"}, {"prompt": "2+1=", "answer": "3"}]
    file = tmp_path / "rows.jsonl"

    def write(*chosen: dict[str, str]) -> list[str]:
        file.write_text("".join(json.dumps(row) + "\n" for row in chosen))
        return ["rl", "rl/oreo_tiny", f"data.source={file}", "data.size=null", "--output", str(tmp_path / "run")]

    said = cli.refused(*write(rows[0]), "rollout.prompts_per_step=1", "rollout.max_new_tokens=4")
    assert "longer than rollout.max_new_tokens 4" in said and "rollout.max_new_tokens: 10" in said
    assert "completion" in cli.refused(*write(*rows), "rollout.prompts_per_step=1")
    assert "a row has one" in cli.refused(*write(rows[0]), "rollout.group_size=2")
    assert "whose log-probs are unknown" in cli.refused(*write(rows[0]), "corrections=[{use: tis}]")


STORED: dict[str, Any] = {
    "stage": "rl",
    "model": {"path": "tiny"},
    "data": {"source": str(shipped_folder("recipes") / "data/traces.py") + ":traces", "size": 256},
    "rollout": {"engine": "stored", "prompts_per_step": 16, "group_size": 1, "max_new_tokens": 64},
    "rewards": [{"use": "math.accuracy", "params": {"extract": ["answer_tag"]}}],
    "scoring": {"workers": 1},
    "advantage": "reward",
}


def critic_of(cli: Any, folder: Path, steps: int) -> Path:
    """Return a run that trains only a critic."""
    recipe = folder / "critic.yaml"
    recipe.write_text(json.dumps({**STORED, "loss": "critic", "critic": {"lr": 3e-3}}))
    cli.run("rl", str(recipe), f"run.steps={steps}", "--output", str(folder / "critic"))
    return folder / "critic"


def advantages_command(folder: Path, critic: Path) -> list[str]:
    """Return the command that trains the policy with the critic."""
    recipe = folder / "policy.yaml"
    split = {"scoring": {"workers": 1, "split": "lines"}, "critic": {"path": str(critic)}}
    recipe.write_text(json.dumps({**STORED, **split, "loss": "direct_advantage", "optim": {"lr": 1e-3}}))
    return ["rl", str(recipe)]


@pytest.mark.slow
def test_direct_advantages_train_twenty_steps(cli: Any, tmp_path: Path) -> None:
    critic = critic_of(cli, tmp_path, 20)
    errors = [row["critic/error"] for row in cli.rows_of(critic)]
    assert errors[0] == pytest.approx(0.25) and min(errors) < 0.25
    rows = cli.resumed(tmp_path / "a run", *advantages_command(tmp_path, critic), "run.steps=20", "run.save_every=10")
    margins = [row["direct_advantage/margin"] for row in rows]
    assert margins[0] == pytest.approx(0, abs=1e-5) and sum(margins[10:]) > sum(margins[:10]) and margins[-1] > 0


def test_critic_is_trained_alone_and_loaded_frozen(cli: Any, tmp_path: Path) -> None:
    """The critic's run does not change the model; the policy's run does not change the critic."""
    critic = critic_of(cli, tmp_path, 2)
    assert all(row["grad_norm"] == 0 for row in cli.rows_of(critic))
    head = load_file(critic / "final" / "critic.safetensors")
    assert head["weight"].any()
    command = advantages_command(tmp_path, critic)
    cli.run(*command, "run.steps=2", "--output", str(tmp_path / "run"))
    rows = cli.rows_of(tmp_path / "run")
    assert rows[0]["direct_advantage/margin"] == pytest.approx(0, abs=1e-5) and rows[1]["direct_advantage/margin"]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert torch.equal(load_file(checkpoint / "critic.safetensors")["weight"], head["weight"])
    elsewhere = [*command, "run.steps=2", "--output", str(tmp_path / "other")]
    assert "holds no critic: critic.safetensors is missing" in cli.refused(*elsewhere, f"critic.path={tmp_path}")
    assert "trained separately" in cli.refused(*elsewhere, "critic.path=null")
    assert "is frozen" in cli.refused(*elsewhere, "loss={use: oreo}")
    assert "scoring.split" in cli.refused(*elsewhere, "scoring.split=null")


def test_steps_without_a_token_are_skipped() -> None:
    """Two steps end within one token ("}\n}\n"), so a number is missing. The reward is counted once, after the last
    step, and a step's value is followed by the value of the next existing step."""
    logp, values = -torch.rand(2, 4, dtype=F64), torch.rand(2, 4, dtype=F64) - 0.5
    found, wanted = (
        offline_rl.direct_advantage_loss(a_batch(turns, values=values), logp, beta=0.2)
        for turns in ([[0, 0, 2, 2], [1, 1, 2, 4]], [[0, 0, 1, 1], [0, 0, 1, 2]])
    )
    torch.testing.assert_close(found.values, wanted.values)
    torch.testing.assert_close(found.stats["direct_advantage/margin"], wanted.stats["direct_advantage/margin"])


def test_direct_advantages_equal_the_formula_with_token_steps() -> None:
    batch = a_batch([[0, 0, 1, 1], [0, 1, 2, 2]], values=torch.rand(2, 4, dtype=F64) - 0.5)
    logp = -torch.rand(2, 4, dtype=F64)
    found = offline_rl.direct_advantage_loss(batch, logp, beta=0.2)
    own = torch.tensor([[*logp[0].view(2, 2).sum(-1), 0.0], [logp[1, 0], logp[1, 1], logp[1, 2:].sum()]], dtype=F64)
    r = batch.ref_logp
    ref = torch.tensor([[*r[0].view(2, 2).sum(-1), 0.0], [r[1, 0], r[1, 1], r[1, 2:].sum()]], dtype=F64)
    v = torch.sigmoid(batch.values)
    before = torch.tensor([[v[0, 0], v[0, 2], 0.0], [v[1, 0], v[1, 1], v[1, 2]]], dtype=F64)
    there = torch.tensor([[True, True, False], [True, True, True]])
    wanted = offline_rl.direct_advantage(own, ref, before, batch.rewards, there, beta=0.2).loss
    torch.testing.assert_close(found.values.sum() / found.counted.sum(), wanted)
