"""Bad pairs: reported by row and counted, and handled by the recipe's policy (table in docs/preference.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain import source_locations
from posttrain.data import prepare
from posttrain.data import rows as rows_module
from posttrain.data.prepare import prepare_pairs
from posttrain.errors import DataError
from posttrain.models import load as models
from posttrain.recipe.preference_sections import PairRules
from posttrain.recipe.sections import Data
from posttrain.train import hf_trainer, pair_columns, preference

GOOD = {"name": "good", "prompt": "1+1", "chosen": "2", "rejected": "3"}
BAD = {
    "same": ({"chosen": "2", "rejected": "2"}, prepare.SAME_SIDES),
    "spaces": ({"chosen": "2", "rejected": " 2\n"}, prepare.SAME_SIDES),
    "empty": ({"rejected": ""}, prepare.EMPTY_COMPLETION),
    "blank": ({"chosen": " \n"}, prepare.EMPTY_COMPLETION),
    "nothing asked": ({"prompt": " "}, prepare.EMPTY_PROMPT),
    "far": ({"rejected": "3" * 40}, prepare.TOO_FAR_APART),
    "long": ({"chosen": "2" * 200}, prepare.ANSWER_TOO_LONG),
}


@pytest.fixture(scope="module")
def tiny() -> Any:
    from posttrain.recipe.sections import Model

    return models.load_tokenizer(Model(path="tiny"), Path())


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make row ids the column `name` instead of a hash."""
    monkeypatch.setattr(rows_module, "row_uid", lambda record, *_: record["name"])
    monkeypatch.setattr(source_locations, "_locations", {})  # other tests use hashed uids


def data(tmp_path: Path, *rows: dict[str, Any]) -> Data:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(source=str(path), max_length=120)


@pytest.mark.parametrize("name", BAD)
def test_bad_pair_is_dropped_and_reported_by_row(name: str, tmp_path: Path, tiny: Any) -> None:
    changes, cause = BAD[name]
    section = data(tmp_path, GOOD, {**GOOD, **changes, "name": name})
    rules = PairRules(max_gap=10) if name == "far" else PairRules()
    prepared = prepare_pairs(section, tiny, tmp_path, rules=rules)
    assert [pair.uid for pair in prepared.items] == ["good"]
    assert prepared.dropped == {cause: [name]}
    assert hf_trainer.rows_note(prepared, "pair").endswith(f"; {cause}: 1 ({tmp_path}/pairs.jsonl:2)")


@pytest.mark.parametrize("name", [name for name in BAD if name != "long"])
def test_bad_pair_raises_if_the_recipe_says_so(name: str, tmp_path: Path, tiny: Any) -> None:
    changes, cause = BAD[name]
    section = data(tmp_path, GOOD, {**GOOD, **changes, "name": name})
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2 \(row {name}\)  {cause}"):
        prepare_pairs(section, tiny, tmp_path, rules=PairRules(bad="error", max_gap=10))


def test_contradicting_pairs_are_reported_by_row(tmp_path: Path, tiny: Any) -> None:
    """2 over 3 and 3 over 2, up to white space; under another prompt there is no contradiction."""
    turned = {"chosen": " 3", "rejected": "2\n"}
    rows = [
        GOOD,
        {**GOOD, "rejected": "4", "name": "b"},
        {**GOOD, **turned, "name": "c"},
        {**GOOD, **turned, "prompt": "2+1", "name": "d"},
    ]
    prepared = prepare_pairs(data(tmp_path, *rows), tiny, tmp_path)
    assert prepared.noted == {prepare.CONTRADICTS: ["good", "c"]} and len(prepared) == 4
    told = hf_trainer.rows_note(prepared, "pair")
    assert told.endswith(f"; {prepare.CONTRADICTS}: 2 ({tmp_path}/pairs.jsonl:1, 3)")


def test_answers_with_both_labels_are_reported_by_row(tmp_path: Path, tiny: Any) -> None:
    def rated(name: str, prompt: str, completion: str, label: bool) -> dict[str, Any]:
        return {"name": name, "prompt": prompt, "completion": completion, "label": label}

    rows = [rated("a", "1+1", "2", True), rated("b", "2+2", "4", True), rated("c", "1+1", "2", False)]
    prepared = prepare_pairs(data(tmp_path, *rows), tiny, tmp_path, single=True)
    assert prepared.noted == {prepare.CONTRADICTS: ["a", "c"]}
    assert not prepare_pairs(data(tmp_path, *rows[:2]), tiny, tmp_path, single=True).noted


def test_too_long_pair_raises_if_the_recipe_says_so(tmp_path: Path, tiny: Any) -> None:
    section = data(tmp_path, GOOD, {**GOOD, "chosen": "2" * 200, "name": "long"}).model_copy(
        update={"overlong": "error"}
    )
    with pytest.raises(DataError, match=r"pairs\.jsonl:2 \(row long\)  .* over data.max_length 120"):
        prepare_pairs(section, tiny, tmp_path)


def test_all_too_long_pairs_are_counted(tmp_path: Path, tiny: Any) -> None:
    rows = [{**GOOD, "chosen": "2" * 200, "name": str(n)} for n in range(5)]
    told = r"no row is left of 5: trained part alone longer than max_length: 5 \(.*/pairs\.jsonl:1, 2, 3, \.\.\.\)"
    with pytest.raises(DataError, match=told):
        prepare_pairs(data(tmp_path, *rows), tiny, tmp_path)


def test_kept_huge_score_gap_is_reported(tmp_path: Path, tiny: Any) -> None:
    section = data(tmp_path, GOOD, {**GOOD, "rejected": "3" * 40, "name": "far"})
    told = preference.lengths_note(prepare_pairs(section, tiny, tmp_path).items)
    assert told.endswith(f"; LOOK: in 1 one side is over 10 times as long as the other ({tmp_path}/pairs.jsonl:2)")


def test_missing_columns_are_counted() -> None:
    """Columns missing from all rows, or a reference that only some rows have."""
    rows = [{"uid": n, "chosen_win": 1.0, "rejected_win": 0.0} for n in "abc"]
    rows[1].pop("chosen_win")
    with pytest.raises(
        DataError, match=r"(?s)row b .*`sppo` needs the column `chosen_win`, which is missing in 1 of 3 rows"
    ):
        pair_columns.read(rows, frozenset({"ref_logp", "win_rates"}), "sppo")
    rows = [{"uid": n, **({"ref_chosen_logp": 1.0, "ref_rejected_logp": 1.0} if n == "a" else {})} for n in "abcde"]
    with pytest.raises(DataError, match=r"(?s)rows b, c, d, ... .*`ref_chosen_logp`, which is missing in 4 of 5 rows"):
        pair_columns.read(rows, frozenset({"ref_logp"}), "dpo")


def test_labels_of_one_class_raise(dpo_recipe: Any, opened: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1", "completion": str(n + 1), "label": True, "name": str(n)} for n in range(6)]
    recipe = dpo_recipe(loss={"use": "kto"}, run={"steps": 1})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (
        opened() as directory,
        pytest.raises(DataError, match="`label` is good in all 6 answers; kto learns from both"),
    ):
        preference.run(recipe, directory)
