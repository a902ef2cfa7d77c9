"""Mixtures of sources, and invalid rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.rows import load_rows, mix
from posttrain.errors import DataError
from posttrain.recipe.sections import Data, Source


def part(name: str, n: int) -> list[dict[str, Any]]:
    return [{"uid": f"{name}{i}"} for i in range(n)]


def names(rows: list[dict[str, Any]]) -> str:
    return "".join(r["uid"][0] for r in rows)


def test_every_prefix_of_a_mixture_has_the_weights() -> None:
    """Weights 3 : 1. In the first n rows, a's count differs from 3n/4 by at most one row."""
    mixed = mix([part("a", 30), part("b", 10)], [3, 1], ["a", "b"])
    assert len(mixed) == 40
    assert names(mixed)[:8] == "aabaaaba"
    for n in range(1, 41):
        assert abs(names(mixed)[:n].count("a") - 0.75 * n) <= 1
    assert len({r["uid"] for r in mixed}) == 40


def test_mixture_without_size_ends_when_the_weights_cannot_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    logged, handler = list[logging.LogRecord](), logging.Handler()
    monkeypatch.setattr(handler, "emit", logged.append)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    mixed = mix([part("a", 100), part("b", 3)], [1, 1], ["a.jsonl", "b.jsonl"])
    assert names(mixed) == "abababa"
    assert len(logged) == 1 and "4 of 100 rows of a.jsonl used" in logged[0].getMessage()


def test_source_too_small_for_size_is_an_error() -> None:
    assert len(mix([part("a", 6), part("b", 2)], [3, 1], ["a", "b"], 8)) == 8
    with pytest.raises(DataError, match=r"b has 2 rows, not its share 0\.5 of 8"):
        mix([part("a", 6), part("b", 2)], [1, 1], ["a", "b"], 8)


def test_sources_of_a_mixture_can_have_different_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "from a"}')
    (tmp_path / "b.jsonl").write_text('{"prompt": "from b"}')
    section = Data(mix=[Source(source="a.jsonl", columns={"prompt": "q"}), Source(source="b.jsonl")])
    assert [r["prompt"] for r in load_rows(section, tmp_path)] == ["from a", "from b"]
    with pytest.raises(DataError, match=r"data.columns belongs to one source: write it inside data.mix"):
        load_rows(Data(mix=[Source(source="b.jsonl")], columns={"prompt": "q"}), tmp_path)


def test_invalid_rows_are_reported_together_and_wrong_columns_once(tmp_path: Path) -> None:
    good = '{"q": "2 + 2", "a": "4"}\n'
    wrong = ['{"q": "2 + 2"}\n', '{"q": 3, "a": "4"}\n', *['{"a": "4"}\n'] * 5]
    (tmp_path / "a.jsonl").write_text(good + "".join(wrong) + good)
    section = Data(source="a.jsonl", columns={"prompt": "q", "completion": "a"})
    with pytest.raises(DataError) as caught:
        load_rows(section, tmp_path)
    told = [problem.what for problem in caught.value.problems]
    assert told == [
        "no column `a`",
        "`prompt` is int (3), not text or messages",
        *["no column `q`"] * 3,
        "and 2 rows more",
    ]
    assert str(caught.value.problems[0]).partition("  ")[0].endswith("a.jsonl:2")
    with pytest.raises(DataError, match="no column `prompt`") as caught:  # theirs: ours
        load_rows(Data(source="a.jsonl", columns={"q": "prompt", "a": "completion"}), tmp_path)
    assert [problem.hint for problem in caught.value.problems] == ["turn it round: `prompt: q`"]
    with pytest.raises(DataError, match="no column `reply`") as caught:  # nothing reads a `reply`
        load_rows(Data(source="a.jsonl", columns={"a": "reply"}), tmp_path)
    assert [problem.hint for problem in caught.value.problems] == ["the data has `a` already: remove this mapping"]


def test_column_can_be_a_key_of_another_column(tmp_path: Path) -> None:
    record = {"prompt": "q", "a.b": "flat", "reward_model": {"ground_truth": "5", "more": [{"x": 6}]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(record) + "\n")

    def columns(**keys: str) -> dict[str, Any]:
        return load_rows(Data(source="rows.jsonl", columns=keys), tmp_path)[0]  # type: ignore[arg-type]

    row = columns(answer="reward_model.ground_truth", flat="a.b", deep="reward_model.more.0.x")
    assert (row["answer"], row["flat"], row["deep"]) == ("5", "flat", 6)
    assert row["reward_model"] == record["reward_model"] and "a.b" not in row
    with pytest.raises(DataError, match=r"`reward_model` has no key `truth`\s+known: ground_truth, more"):
        columns(answer="reward_model.truth")
    with pytest.raises(DataError, match=r"`prompt` has no key `x`\s+known: prompt is str"):
        columns(answer="prompt.x")
    with pytest.raises(DataError, match=r"no column `reward.ground_truth`"):
        columns(answer="reward.ground_truth")
