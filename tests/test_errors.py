"""Errors across processes, and helpers of their messages: suggestions of near names, counted nouns."""

from __future__ import annotations

import pickle

import pytest

from posttrain.data.inspect import _check_doubles
from posttrain.errors import EngineError, Interrupted, MissingExtra, PosttrainError, count_noun, nearest
from posttrain.verify.audit import Audit


@pytest.mark.parametrize(
    ("written", "meant"),
    [("dpao", "dapo"), ("dapoo", "dapo"), ("grop", "grpo"), ("dpo", "dpo"), ("simp", "simpo"), ("zebra", None)],
)
def test_nearest_name_is_suggested(written: str, meant: str | None) -> None:
    """Transposed letters have priority: `mdpo` shares more letters in order with `dpao` than `dapo` does."""
    assert nearest(written, ["dpo", "mdpo", "dapo", "grpo", "simpo", "gspo"]) == meant


def test_count_noun_uses_singular_or_plural() -> None:
    assert [count_noun(n, "row") for n in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1000 rows"]
    assert [count_noun(n, "batch", "batches") for n in (1, 3)] == ["1 batch", "3 batches"]


def test_messages_use_the_singular_for_one() -> None:
    assert Audit(1, {}, "boxed").summary == "gold scores best on 1 of 1 row (gold written in \\boxed{})"
    assert _check_doubles([(1, 2)])["text"] == "0 of 1 item equal to an earlier one"


@pytest.mark.parametrize(
    "error",
    [MissingExtra("peft", "model.lora", "train"), Interrupted("stopped", number=15), EngineError("a", where="b")],
)
def test_errors_keep_kind_and_problems_when_pickled_and_copied(error: PosttrainError) -> None:
    """Ranks that share an engine send errors to each other."""
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), found.exit_code) == (type(error), str(error), error.exit_code)
    assert error.copy().problems == found.problems == error.problems
    assert [problem.where for problem in error.at("r.yaml").problems] == [error.problems[0].where or "r.yaml"]
