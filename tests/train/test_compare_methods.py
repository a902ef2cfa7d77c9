"""SavedRollouts: rollouts read back as written, and the results of other methods on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from posttrain.batch import RolloutBatch
from posttrain.cli.app import app
from posttrain.cli.compare_methods import COLUMNS, ROW_COLUMNS
from posttrain.errors import UserError
from posttrain.recipe.load import load_dict
from posttrain.train import saved_rollouts
from posttrain.train.compare_methods import compare, summarize, tabulate_rows
from posttrain.train.saved_rollouts import SavedRollouts


def resolve_recipe(**changes: Any) -> dict[str, Any]:
    """Return an rl run's resolved recipe."""
    values = {
        "stage": "rl",
        "algorithm": "grpo",
        "model": {"path": "tiny"},
        "data": {"source": "x"},
        "rewards": [{"use": "a.b", "name": "b"}],
        "run": {"steps": 1},
        **changes,
    }
    return load_dict(values, base_dir=Path.cwd(), where="test").resolved


@pytest.fixture
def saved() -> SavedRollouts:
    """Save groups (1, 0) and (1, 1), 2 tokens a row; row 0 has moved by a ratio of 2, row 1 by 1/2."""
    batch = RolloutBatch(
        group_ids=torch.tensor([0, 0, 1, 1]),
        mask=torch.ones(4, 2, dtype=torch.bool),
        rewards=torch.tensor([1.0, 0, 1, 1]),
        components={"b": torch.tensor([1.0, 0, 1, 1])},
        correct=torch.tensor([1.0, 0, 1, 1]),
        truncated=torch.zeros(4, dtype=torch.bool),
        lengths=torch.tensor([2, 2, 2, 2]),
        old_logp=torch.full((4, 2), -1.0),
        rollout_logp=torch.full((4, 2), float("nan")),
        step=4,
        total_steps=9,
        memory={"riskpo": {"low": 0.5}},
        reward_weights={"b": 1.0},
    )
    moved = torch.tensor([2.0, 0.5, 1, 1]).log()[:, None]
    return SavedRollouts(batch, batch.old_logp + moved)


def test_rollouts_are_read_back_as_written(saved: SavedRollouts, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved_rollouts.write(tmp_path, step, saved, keep=2)
    assert [path.name for path in saved_rollouts.steps(tmp_path)] == [
        "step-00000002.safetensors",
        "step-00000003.safetensors",
    ]
    found = saved_rollouts.read(tmp_path)
    assert (found.batch.step, found.batch.memory) == (4, {"riskpo": {"low": 0.5}})
    torch.testing.assert_close(found.logp, saved.logp)
    torch.testing.assert_close(found.batch.components["b"], saved.batch.components["b"])
    assert found.batch.ref_logp is None and found.batch.mask.dtype == torch.bool
    with pytest.raises(UserError, match="has no rollouts of step 1"):
        saved_rollouts.read(tmp_path, 1)
    with pytest.raises(UserError, match="keep_rollouts"):
        saved_rollouts.read(tmp_path / "nowhere")


def test_nothing_is_written_if_rollouts_are_not_kept(saved: SavedRollouts, tmp_path: Path) -> None:
    saved_rollouts.write(tmp_path, 1, saved, keep=0)
    assert not (tmp_path / "rollouts").exists()


def test_skipped_rows_use_the_engines_log_probs(saved: SavedRollouts) -> None:
    """Row 1 was skipped (log-probs 0); the engine reported -3 for it."""
    scored = saved.batch.replace(old_logp=None, rollout_logp=torch.full((4, 2), -3.0))
    logp = torch.tensor([[-1.0, -1.0], [0, 0], [-1, -1], [-1, -1]])
    kept = saved_rollouts.build_saved(scored, scored.replace(old_logp=logp - 0.5, hidden=torch.ones(4, 2, 3)), logp)
    assert kept.batch.old_logp is not None and kept.batch.hidden is None
    assert kept.batch.old_logp[:, 0].tolist() == [-1.5, -3.0, -1.5, -1.5]
    assert kept.logp[:, 0].tolist() == [-1.0, -3.0, -1.0, -1.0]


def test_advantages_and_clipping_of_each_method(saved: SavedRollouts) -> None:
    """grpo: A = +-0.7071 (less eps), and the clip at 0.2 cuts both rows: A > 0 with ratio 2, A < 0 with ratio 1/2.

    cispo keeps every token; dapo drops the group that is all right; verl_rank needs what is not saved.
    """
    outcomes = {o.name: o for o in compare(resolve_recipe(), saved, ["grpo", "cispo", "dapo", "verl_rank"])}
    grpo, cispo, dapo = outcomes["grpo"], outcomes["cispo"], outcomes["dapo"]
    assert grpo.advantages.tolist() == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-3)
    assert grpo.clipped == pytest.approx(0.5) and not grpo.push.any()
    torch.testing.assert_close(outcomes["as it was"].push, grpo.push)
    assert cispo.push[0, 0] > 0 > cispo.push[1, 0]
    assert dapo.kept.tolist() == [True, True, False, False]
    assert outcomes["verl_rank"].missing == "the rollouts do not have hidden"
    table = summarize(list(outcomes.values()), saved.batch)
    assert [row["method"] for row in table] == ["as it was", "grpo", "cispo", "dapo", "verl_rank"]
    assert table[3]["rows kept"] == "2/4" and table[4]["note"] and table[1]["like the run"] is None
    rows = tabulate_rows(list(outcomes.values()), saved.batch)
    assert rows[2]["dapo: A"] is None and rows[2]["grpo: A"] == 0.0 and rows[0]["cispo: push"] > 0


def test_compare_methods_command(saved: SavedRollouts, tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text(json.dumps(resolve_recipe()))
    saved_rollouts.write(tmp_path, 5, saved, keep=1)
    call = CliRunner().invoke
    text = call(app, ["compare-methods", str(tmp_path), "--algorithm", "dapo,cispo", "--rows", "2"])
    assert text.exit_code == 0 and "dapo" in text.stdout and "like the run" in text.stdout
    explained = [line.partition("  ")[0] for line in text.stderr.splitlines()]
    assert explained[:-1] == [*COLUMNS, *ROW_COLUMNS] and explained[-1].startswith("rollouts of step 5")
    found = json.loads(call(app, ["compare-methods", str(tmp_path), "--algorithm", "dapo", "--json"]).stdout)
    assert [*found["methods"][1]] == ["method", *COLUMNS], "every column is explained"
    assert [key for key in found["rows"][0] if key.startswith("dapo: ")] == [
        name.replace("METHOD", "dapo") for name in ROW_COLUMNS
    ]
    assert found["step"] == 5 and len(found["rows"]) == 4 and found["methods"][1]["method"] == "dapo"
    assert call(app, ["compare-methods", str(tmp_path), "--algorithm", "dappo"]).exit_code == 2
    assert call(app, ["compare-methods", str(tmp_path), "--algorithm", "simpo"]).exit_code == 2
    assert call(app, ["compare-methods", str(tmp_path / "none"), "--algorithm", "dapo"]).exit_code == 2
