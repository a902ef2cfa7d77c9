"""`posttrain reward-model` and what looks at its recipes, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from posttrain.cli.app import app

RECIPE = """\
stage: reward_model
algorithm: reward_model
model: {path: tiny}
data: {source: pairs.jsonl}
objective: {holdout: 0.25}
batch: {size: 4}
run: {steps: 2}
"""


def test_from_another_directory_with_a_space(tmp_path: Path) -> None:
    """Train, read the summary, inspect the data; a label recipe's rows are answers."""
    folder = tmp_path / "a b"
    folder.mkdir()
    rows = [{"prompt": f"{n}", "chosen": "12", "rejected": "0", "good": n % 2, "completion": "3"} for n in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rm.yaml").write_text(RECIPE)
    recipe, output = str(folder / "rm.yaml"), str(folder / "out")
    done = CliRunner().invoke(app, ["reward-model", recipe, "--output", output, "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["report"]["pairs"] == 2 and summary["report_on"] == "held-out rows"
    assert "Reward model, pairs: 2" in (folder / "out" / "report.html").read_text()
    looked = CliRunner().invoke(app, ["data", "inspect", recipe, "--json"])
    assert json.loads(looked.stdout)["stage"] == "dpo"
    labels = ["algorithm=multilabel_reward", "objective.labels=[good]"]
    looked = CliRunner().invoke(app, ["data", "inspect", recipe, *labels, "--json"])
    assert json.loads(looked.stdout)["stage"] == "sft", looked.output
