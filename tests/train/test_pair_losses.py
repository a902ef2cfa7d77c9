"""Every pair loss of the index trains on `tiny`, its margin grows, and missing data columns are reported."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from posttrain import registry
from posttrain.data.render import Pair
from posttrain.errors import DataError
from posttrain.recipe import presets
from posttrain.train import pair_columns, preference

# Settings with a visible effect in five steps of a tiny model; other losses train with their defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "sppo": {"beta": 0.1},
    "inpo": {"eta": 0.05},
    "mnpo": {"eta": 0.5, "weights": [1.0, 0.5]},
}
NUMBERS = {
    "chosen_win": 0.8,
    "rejected_win": 0.3,
    "chosen_score": 1.0,
    "rejected_score": 0.0,
    "ref_sample_is_chosen": False,
    "history_chosen_logp": [-9.0, -8.0],
    "history_rejected_logp": [-8.0, -9.0],
}
LOSSES = sorted(registry.load_index()["pair_loss"])


@pytest.fixture
def make_recipe_with_numbers(dpo_recipe: Any, tmp_path: Any) -> Any:
    """Return a function that builds a recipe whose pairs have every column of NUMBERS except those left out."""

    def make(*without: str, **changes: Any) -> Any:
        recipe = dpo_recipe(**changes)
        path = tmp_path / "pairs.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        added = {name: value for name, value in NUMBERS.items() if name not in without}
        path.write_text("".join(json.dumps({**row, **added}) + "\n" for row in rows))
        return recipe

    return make


@pytest.mark.parametrize("use", LOSSES)
def test_margin_grows(use: str, make_recipe_with_numbers: Any, rows_of: Any) -> None:
    recipe = make_recipe_with_numbers(loss={"use": use, **SETTINGS.get(use, {})}, run={"steps": 5})
    rows = rows_of(preference.run, recipe)
    assert len(rows) == 5
    assert rows[-1]["rewards/margins"] > rows[0]["rewards/margins"] + 1e-3
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_losses_of_all_presets_are_tested() -> None:
    assert {presets.preset(name).choices["loss"]["use"] for name in presets.names("dpo")} <= set(LOSSES)


@pytest.mark.parametrize(
    "use",
    [u for u in LOSSES if set(registry.load_index()["pair_loss"][u]["needs"]) & {*pair_columns.GIVEN} - {"labels"}],
)
def test_missing_column_raises_with_name_and_row(use: str, make_recipe_with_numbers: Any, opened: Any) -> None:
    """Before a model is loaded."""
    needs = registry.load_index()["pair_loss"][use]["needs"]
    missing = next(field for need in needs if need in pair_columns.GIVEN for field in pair_columns.GIVEN[need])
    recipe = make_recipe_with_numbers(missing, loss={"use": use, **SETTINGS.get(use, {})})
    with opened() as directory, pytest.raises(DataError, match=f"`{use}` needs the column `{missing}`"):
        preference.run(recipe, directory)


def test_hard_targets_need_no_win_rates(make_recipe_with_numbers: Any, rows_of: Any) -> None:
    recipe = make_recipe_with_numbers(
        "chosen_win", "rejected_win", loss={"use": "sppo", "beta": 0.1, "targets": "hard"}, run={"steps": 2}
    )
    assert rows_of(preference.run, recipe)[0]["loss"] == pytest.approx(
        25, rel=1e-4
    )  # (1/2 / beta)^2 on each side, halved


def test_log_probs_in_the_data_replace_the_reference(dpo_recipe: Any, tmp_path: Any, rows_of: Any) -> None:
    """IPO on sums: h is then the policy's margin minus the columns' margin, and no reference is computed."""
    plain = dpo_recipe(
        loss={"use": "ipo", "length_normalize": False}, run={"steps": 1}, batch={"size": 20, "micro_size": 20}
    )
    before = rows_of(preference.run, plain, "plain")[0]
    path = tmp_path / "pairs.jsonl"
    rows = [
        {**json.loads(line), "ref_chosen_logp": -3.0, "ref_rejected_logp": -5} for line in path.read_text().splitlines()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    moved = rows_of(preference.run, plain, "moved")[0]
    assert not (tmp_path / "moved" / "reference.safetensors").exists()
    gap = before["logps/chosen"] - before["logps/rejected"] - (-3.0 + 5.0)
    assert moved["rewards/margins"] == pytest.approx(0.1 * gap, rel=1e-4)


@pytest.mark.parametrize(
    ("use", "settings"), [("kto", {}), ("dpo", {"nll_weight": 1.0, "nll_reduction": "token"}), ("cpo", {})]
)
def test_micro_batches_change_nothing(use: str, settings: Any, dpo_recipe: Any, rows_of: Any) -> None:
    """KTO's baseline and the mean over all chosen tokens are computed over the step."""
    changes = {"loss": {"use": use, **settings}, "run": {"steps": 2}}
    whole = rows_of(preference.run, dpo_recipe(**changes, batch={"size": 6, "micro_size": 6}), "whole")
    split = rows_of(preference.run, dpo_recipe(**changes, batch={"size": 6, "micro_size": 2}), "split")
    for row, expected in zip(split, whole, strict=True):
        for name in ("loss", "grad_norm", "rewards/margins"):
            assert row[name] == pytest.approx(expected[name], rel=5e-4, abs=2e-6), (row["step"], name)


def test_kto_trains_on_labeled_answers(dpo_recipe: Any, rows_of: Any, tmp_path: Any) -> None:
    """Good and bad rows separately; at the start h = z0 = 0 and every row has the loss 1 - s(0) = 1/2."""
    recipe = dpo_recipe(loss={"use": "kto"}, run={"steps": 5})
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1) if i % 3 else "no", "label": bool(i % 3)} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = rows_of(preference.run, recipe)
    assert found[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    assert found[0]["loss/kl"] == 0
    last = found[-1]
    assert (
        last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])
        and last["rewards/margins"] > 0.01
    )


def test_kto_reads_conversations_in_trls_format(dpo_recipe: Any, rows_of: Any, tmp_path: Any) -> None:
    """A prompt and a completion as messages train like the same texts."""

    def metrics_of_labels(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    texts = [{"prompt": f"{i}+1=", "completion": str(i + 1) if i % 3 else "no", "label": bool(i % 3)} for i in range(8)]
    talks = [
        {
            **r,
            "prompt": metrics_of_labels("user", r["prompt"]),
            "completion": metrics_of_labels("assistant", r["completion"]),
        }
        for r in texts
    ]
    found = []
    for name, rows in (("texts", texts), ("talks", talks)):
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found.append(rows_of(preference.run, dpo_recipe(loss={"use": "kto"}, run={"steps": 2}), name))
    assert [row["loss"] for row in found[0]] == [row["loss"] for row in found[1]]
    assert found[0][1]["grad_norm"] == found[1][1]["grad_norm"] > 0


def test_metrics_of_labeled_answers_are_means_by_label() -> None:
    """Good rows -1 and -3, a bad row -8: means over each label's rows, also over two micro-batches."""
    logps, good = torch.tensor([-1.0, -8.0, -3.0]), torch.tensor([True, False, True])
    shown = preference.split_by_label({"logps/chosen": logps, "loss/kl": logps, "logps/rejected": logps[:0]}, good)
    assert {name: value.sum().item() for name, value in shown.items()} == {
        "logps/chosen": -4.0,
        "logps/rejected": -8.0,
        "loss/kl": -12.0,
    }
    sums = {"pairs": 3.0, "good": 2.0, "rewards/chosen": 4.0, "rewards/rejected": 1.0, "loss/kl": 6.0, "tokens": 9.0}
    trainer = preference.Preference.__new__(preference.Preference)
    trainer.single = True
    assert trainer.step_metrics(sums) == {
        "rewards/chosen": 2.0,
        "rewards/rejected": 1.0,
        "rewards/margins": 1.0,
        "loss/kl": 2.0,
    }
    one_sided = trainer.step_metrics({**sums, "good": 3.0, "rewards/rejected": 0.0})
    assert one_sided["rewards/rejected"] is None and one_sided["rewards/margins"] is None


def test_notes_on_lengths_and_labels() -> None:
    pairs = [Pair("1", (1,), (1, 2), (1,)), Pair("2", (1,), (1,), (1, 2, 3, 4))]
    told = "1.5 tokens chosen, 2.5 rejected on average; the chosen side is longer in 50% of the pairs"
    assert preference.lengths_note(pairs) == told
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
    assert pair_columns.labels_note([1.0, 1.0, 0.0], weights) == (
        "2 good answers, 1 bad ones; weighted, 2.00 good to 1 bad; 1 to 1.33 is advised"
    )
    assert pair_columns.labels_note([1.0, 0.0], weights) == "1 good answers, 1 bad ones; weighted, 1.00 good to 1 bad"
