"""Losses on completions that the data rows bring (`rollout.engine: stored`), through the command line on `tiny`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from posttrain.batch import RolloutBatch
from posttrain.cli.app import app
from posttrain.loss import offline_rl
from posttrain.run.metrics import read_metrics

F64 = torch.float64


def posttrain(*command: str) -> str:
    done = CliRunner().invoke(app, list(command))
    assert done.exit_code == 0, done.output
    return done.output


def refused(*command: str) -> str:
    done = CliRunner().invoke(app, list(command))
    assert done.exit_code != 0, done.output
    return " ".join(done.output.split())


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


def resumed(run: Path, *command: str) -> list[dict[str, Any]]:
    """The metrics of a whole run, which are those of one that is killed after step 10 and goes on."""
    posttrain(*command, "--output", str(run))
    whole = rows_of(run)
    shutil.rmtree(run / "checkpoints" / "step-00000020")
    (run / "summary.json").unlink()
    assert "resumed after step 10" in posttrain(*command, "--output", str(run), "--resume")
    assert rows_of(run) == whole
    return whole


def slow(test: Any) -> Any:
    """Only where it is asked for: make test-slow."""
    asked = os.environ.get("POSTTRAIN_SLOW") == "1"
    return pytest.mark.slow(pytest.mark.skipif(not asked, reason="make test-slow")(test))


LEVELS = {
    "token": [],
    "response": ["loss.level=response"],
    "step": ["loss.use=oreo_step", "scoring.split=lines"],
}


@slow
@pytest.mark.parametrize("level", LEVELS)
def test_oreo_trains_twenty_steps(level: str, tmp_path: Path) -> None:
    """Right traces become likelier than wrong ones; going on from a checkpoint changes nothing."""
    rows = resumed(tmp_path / "a run", "rl", "rl/oreo_tiny", *LEVELS[level])
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


def test_the_loss_is_the_formulas_row_by_row() -> None:
    """`loss: oreo` is value plus policy loss of the formula, also with garbage where nothing is trained."""
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


def test_a_step_of_one_token_is_a_token_and_a_step_of_all_is_the_response() -> None:
    logp = -torch.rand(2, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    each, whole = a_batch([[0, 1, 2, 3]] * 2), a_batch([[0, 0, 0, 0]] * 2)
    for batch, level in ((each, "token"), (whole, "response")):
        by_step = offline_rl.oreo_step(batch, logp).values
        torch.testing.assert_close(by_step.mean(-1), offline_rl.oreo_loss(batch, logp, level=level).values.mean(-1))


def test_what_cannot_be_trained_on_is_told(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2" * 9, "answer": "2"}, {"prompt": "2+1=", "answer": "3"}]
    file = tmp_path / "rows.jsonl"

    def write(*chosen: dict[str, str]) -> list[str]:
        file.write_text("".join(json.dumps(row) + "\n" for row in chosen))
        return ["rl", "rl/oreo_tiny", f"data.source={file}", "data.size=null", "--output", str(tmp_path / "run")]

    said = refused(*write(rows[0]), "rollout.prompts_per_step=1", "rollout.max_new_tokens=4")
    assert "longer than rollout.max_new_tokens 4" in said and "rollout.max_new_tokens: 10" in said
    assert "completion" in refused(*write(*rows), "rollout.prompts_per_step=1")
    assert "a row has one" in refused(*write(rows[0]), "rollout.group_size=2")
    assert "nobody knows" in refused(*write(rows[0]), "corrections=[{use: tis}]")
