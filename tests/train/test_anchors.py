"""Models that a preference recipe names as reference, previous policy or history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.models import load as models
from posttrain.models.save import save
from posttrain.train import pair_columns, preference, stored_logps


@pytest.fixture
def other(dpo_recipe: Any, tmp_path: Path) -> str:
    """Return the directory of a model that is not the policy: `tiny` with another seed."""
    save(models.load(dpo_recipe().model, tmp_path, seed=5), tmp_path / "other", verify=False)
    return "other"


def first(rows_of: Any, recipe: Any, name: str) -> float:
    return float(rows_of(preference.run, recipe, name)[0]["rewards/margins"])


def test_named_reference_is_used(dpo_recipe: Any, rows_of: Any, other: str, tmp_path: Path) -> None:
    """beta ((c - r) - (ref_c - ref_r)) of the first step: 0 against the policy itself, otherwise the difference of the
    two models."""
    start = {"loss": {"use": "dpo", "beta": 1.0}, "run": {"steps": 1}, "batch": {"size": 20, "micro_size": 20}}
    assert first(rows_of, dpo_recipe(**start, anchors={"reference": "tiny"}), "itself") == pytest.approx(0, abs=1e-5)
    assert not (tmp_path / "itself" / "reference.safetensors").exists(), "the policy's own log-probs are not asked for"
    free = first(rows_of, dpo_recipe(**start | {"loss": {"use": "dpo", "beta": 1.0, "reference_free": True}}), "free")
    named = first(rows_of, dpo_recipe(**start, anchors={"reference": other}), "named")
    of_other = dpo_recipe(
        **start | {"model": {"path": other}, "loss": {"use": "dpo", "beta": 1.0, "reference_free": True}}
    )
    assert named == pytest.approx(free - first(rows_of, of_other, "of_other"), abs=1e-4)
    assert abs(named) > 1e-3


def test_previous_policy_and_history_are_used(dpo_recipe: Any, rows_of: Any, other: str) -> None:
    """dno reads only the previous policy: DPO against it. So does mnpo with one opponent and no reference."""
    start = {"run": {"steps": 1}, "batch": {"size": 20, "micro_size": 20}}
    expected = first(
        rows_of, dpo_recipe(**start, loss={"use": "dpo", "beta": 0.5}, anchors={"reference": other}), "dpo"
    )
    dno = dpo_recipe(**start, loss={"use": "dno", "eta": 0.5}, anchors={"previous": other})
    assert first(rows_of, dno, "dno") == pytest.approx(expected, rel=1e-4)
    mnpo = {"use": "mnpo", "eta": 0.5, "ratio": 0.0, "distance": "logistic", "length_normalize": False}
    one = dpo_recipe(**start, loss=mnpo, anchors={"history": [other]})
    assert first(rows_of, one, "one") == pytest.approx(expected, rel=1e-4)
    two = dpo_recipe(**start, loss={**mnpo, "weights": [0.0, 1.0]}, anchors={"history": ["tiny", other]})
    assert first(rows_of, two, "two") == pytest.approx(expected, rel=1e-4)


def test_resumed_runs_do_not_recompute_log_probs(
    dpo_recipe: Any, opened: Any, other: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = dpo_recipe(run={"steps": 1}, anchors={"reference": other})
    with opened() as directory:
        preference.run(recipe, directory)
    monkeypatch.setattr(stored_logps, "write", lambda *_: pytest.fail("asked again"))
    with opened(resume=True) as directory:
        preference.run(recipe, directory)
    assert (tmp_path / "run" / "anchors.reference.safetensors").exists()


def test_unused_models_are_refused(dpo_recipe: Any) -> None:
    with pytest.raises(RecipeError, match=r"anchors.history: does nothing: dpo does not read it"):
        dpo_recipe(anchors={"history": ["tiny"]})
    with pytest.raises(RecipeError, match=r"anchors.reference: does nothing: simpo does not read it"):
        dpo_recipe(loss={"use": "simpo"}, anchors={"reference": "tiny"})
    with pytest.raises(RecipeError, match=r"anchors.reference: `stage:a` names a stage of a pipeline"):
        dpo_recipe(anchors={"reference": "stage:a"})


def test_reference_named_as_model_and_as_column_is_refused(dpo_recipe: Any, opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    dpo_recipe()  # writes the pairs
    column = '"ref_chosen_logp": -1.0, "ref_rejected_logp": -2.0}'
    recipe = dpo_recipe(anchors={"reference": "tiny"}, run={"steps": 1})
    path.write_text("".join(line[:-1] + f", {column}\n" for line in path.read_text().splitlines()))
    with opened() as directory, pytest.raises(RecipeError, match="the data has the column `ref_chosen_logp`"):
        preference.run(recipe, directory)


def test_source_of_log_probs_is_reported(dpo_recipe: Any) -> None:
    named = dpo_recipe(loss={"use": "inpo"}, anchors={"reference": "first"}).anchors
    told = pair_columns.origin_note(frozenset({"ref_logp", "prev_logp"}), {}, "tiny", named)
    assert told == "reference: first; previous policy: the starting policy (tiny)"
