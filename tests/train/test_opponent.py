"""A policy that plays against a slow copy of itself (`opponent`), through the command line on `tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from posttrain.advantage.reward_mix import versus_opponent
from posttrain.batch import RolloutBatch
from posttrain.loss import nash
from posttrain.train.weight_copy import Opponent

F64 = torch.float64
COMMAND = ["rl", "rl/nash_mp_tiny"]


@pytest.mark.slow
def test_nash_mirror_prox_trains_twenty_steps(cli: Any, tmp_path: Path) -> None:
    """The policy gains an advantage over an opponent that follows it."""
    rows = cli.resumed(tmp_path / "a run", *COMMAND)
    margins = [row["reward/shaped"] for row in rows]
    assert len(rows) == 20 and sum(margins[10:]) > sum(margins[:10])
    assert rows[-1]["reward"] > rows[-1]["opponent/reward"] > rows[0]["opponent/reward"]
    assert rows[0]["nash_mp/opponent"] == pytest.approx(0, abs=1e-4) and rows[-1]["nash_mp/opponent"] > 0.01


@pytest.mark.parametrize(
    "changes",
    [
        ["model.lora=null"],
        ["model.lora={rank: 4}"],
        ["rollout.staleness=2", "corrections=[{use: off_policy_seq_mask}]"],
    ],
)
def test_resumed_run_restores_the_opponent(cli: Any, changes: list[str], tmp_path: Path) -> None:
    """Also an opponent whose answers are sampled at the start of the rollouts' step."""
    small = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4"]
    small += ["run.steps=4", "run.save_every=2"]
    rows = cli.resumed(tmp_path / "run", *COMMAND, *small, *changes, steps=4)
    assert rows[-1]["nash_mp/opponent"] and rows[-1].get("rollout/staleness", 2) == 2


def test_opponent_replaces_the_policy_temporarily_and_follows_it() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout())
    model[0].weight.data.fill_(1.0)
    opponent = Opponent(model, ema=0.25)
    model[0].weight.data.fill_(5.0)
    with opponent.in_place(model) as standing:
        assert standing(torch.ones(1, 1)).item() == 1.0 and not standing.training
    assert model[0].weight.item() == 5.0 and model.training
    opponent.follow(model)
    assert opponent.weights["0.weight"].item() == 2.0


def test_win_rate_against_the_opponents_answers() -> None:
    rows = RolloutBatch(
        group_ids=torch.zeros(4),
        mask=torch.ones(4, 1).bool(),
        rewards=torch.tensor([1.0, 0.5, 0.0, float("nan")], dtype=F64),
        opponent_rewards=torch.tensor([[0.5, 0.5], [0.5, 0.0], [1.0, float("nan")], [0.0, 0.0]], dtype=F64),
    )
    torch.testing.assert_close(
        versus_opponent(rows), torch.tensor([0.5, 0.25, -0.5, float("nan")], dtype=F64), equal_nan=True
    )
    soft = torch.sigmoid(torch.tensor([0.25, 0.125, -0.5], dtype=F64)) - 0.5
    soft[1] = (torch.sigmoid(torch.tensor(0.0, dtype=F64)) + torch.sigmoid(torch.tensor(0.25, dtype=F64)) - 1) / 2
    torch.testing.assert_close(versus_opponent(rows, scale=2.0)[:3], soft)


def test_loss_is_the_formula_summed_over_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    logp, ref, theirs = (-torch.rand(3, 4, generator=draw, dtype=F64) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    win = torch.tensor([0.9, 0.2, 0.5], dtype=F64)
    rows = RolloutBatch(torch.zeros(3), mask, advantages=win - 0.5, ref_logp=ref, opponent_logp=theirs)

    def total(x: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, x, 0.0).sum(-1)

    wanted = nash.nash_step(total(logp), total(ref), total(theirs), win, beta=0.2, eta=0.5).loss
    torch.testing.assert_close(nash.nash_mp(rows, logp, beta=0.2, eta=0.5).values.sum() / 3, wanted)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["opponent=null"], "opponent: {ema: 0.01}"),
        (["loss={use: clip}", "group_rewards=[]"], "no component reads it"),
        (
            [
                "rollout={staleness: 1, partial: true, engine: vllm, vllm: {server: {devices: [1]}}}",
                "corrections=[tis]",
            ],
            "sampled between two updates",
        ),
        (["rollout.engine=stored", "rollout.group_size=1"], "no effect if no rollout is sampled"),
    ],
)
def test_invalid_settings_raise(cli: Any, change: list[Any], told: str, tmp_path: Path) -> None:
    assert told in cli.refused(*COMMAND, *change, "--output", str(tmp_path / "run"))
