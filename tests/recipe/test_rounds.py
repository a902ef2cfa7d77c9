"""Rounds expand into stages: stage names, meaning of `round:` and `stage:`, and references by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from posttrain.recipe.load import Loaded

ROUNDS = """
stage: pipeline
stages:
  - {name: sft, stage: sft, model: {path: tiny}, data: {source: rows.jsonl}, run: {steps: 1}}
  - name: up
    rounds: 3
    start: stage:sft
    stages:
      - name: answers
        stage: eval
        model: {path: "round:policy"}
        data: {source: rows.jsonl}
        rewards: [{use: math.accuracy}]
      - {name: pairs, stage: pairs, completions: stage:answers/completions.jsonl}
      - name: train
        stage: dpo
        loss: dpo
        model: {path: "round:policy"}
        data: {source: stage:pairs/pairs.jsonl}
        run: {steps: 1}
  - {name: last, stage: eval, model: {path: stage:up}, data: {source: rows.jsonl}, rewards: [{use: math.accuracy}]}
  - {name: first, stage: eval, model: {path: stage:up.1}, data: {source: rows.jsonl}, rewards: [{use: math.accuracy}]}
"""
Loads = Callable[..., Loaded]


def stages(loads: Loads, text: str = ROUNDS, *overrides: str) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in loads(text, *overrides).resolved["stages"]}


def anchors(found: dict[str, dict[str, Any]]) -> list[Any]:
    return [found[f"up.{n}.train"]["anchors"]["reference"] for n in (1, 2, 3)]


def test_each_round_starts_from_the_previous_model(loads: Loads) -> None:
    found = stages(loads)
    names = [f"up.{n}.{name}" for n in (1, 2, 3) for name in ("answers", "pairs", "train")]
    assert list(found) == ["sft", *names, "last", "first"]
    for name in ("answers", "train"):
        paths = [found[f"up.{n}.{name}"]["model"]["path"] for n in (1, 2, 3)]
        assert paths == ["stage:sft", "stage:up.1.train", "stage:up.2.train"]
    assert found["up.2.pairs"]["completions"] == "stage:up.2.answers/completions.jsonl"
    assert found["up.2.train"]["data"]["source"] == "stage:up.2.pairs/pairs.jsonl"
    assert found["up.3.pairs"]["not_in"] == ["stage:up.1.pairs/pairs.jsonl", "stage:up.2.pairs/pairs.jsonl"]
    assert (found["last"]["model"]["path"], found["first"]["model"]["path"]) == ("stage:up.3.train", "stage:up.1.train")
    assert anchors(found) == [None, None, None]


def test_values_can_be_lists_by_round(loads: Loads) -> None:
    found = stages(loads, ROUNDS.replace("rounds: 3", "rounds: 3\n    by_round: {train.optim.lr: [1e-6, 5e-7, 1e-7]}"))
    assert [found[f"up.{n}.train"]["optim"]["lr"] for n in (1, 2, 3)] == [1e-6, 5e-7, 1e-7]


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("previous", [None, None, None]),
        ("initial", [None, "stage:sft", "stage:sft"]),
        ("average", [None, "stage:up.1.average", "stage:up.2.average"]),
        ("extrapolated", [None, None, None]),
    ],
)
def test_reference_by_name_in_each_round(loads: Loads, reference: str, expected: list[Any]) -> None:
    """None means the policy loaded by the stage. In the first round all references are the same model."""
    assert anchors(stages(loads, ROUNDS, f"stages.up.reference={reference}")) == expected


def test_random_past_policy_is_an_earlier_one(loads: Loads) -> None:
    text = ROUNDS.replace("rounds: 3", "rounds: 12\n    reference: random_past")
    found = stages(loads, text)
    assert found == stages(loads, text), "drawn once and for all"
    drawn = [found[f"up.{n}.train"]["anchors"]["reference"] for n in range(1, 13)]
    assert drawn[0] is None and len(set(drawn)) > 4
    for n, path in enumerate(drawn, 1):
        assert path in {None, "stage:sft", *(f"stage:up.{past}.train" for past in range(1, n))}


def test_average_reference_is_a_merge(loads: Loads) -> None:
    """decay * old average + (1 - decay) * new model; none is made after the last round."""
    found = stages(loads, ROUNDS, "stages.up.reference=average", "stages.up.decay=0.75")
    merge = found["up.2.average"]
    assert merge["merge_method"] == "linear" and "up.3.average" not in found
    shares = {m["model"]: m["parameters"]["weight"] for m in merge["models"]}
    assert shares == {"stage:up.1.average": 0.75, "stage:up.2.train": 0.25}


def test_extrapolated_model_starts_the_next_round(loads: Loads) -> None:
    """trained + alpha (trained - trained model of the previous round); the last round extrapolates too."""
    found = stages(loads, ROUNDS, "stages.up.reference=extrapolated")
    merge = found["up.2.extrapolated"]
    assert (merge["merge_method"], merge["base_model"]) == ("task_arithmetic", "stage:up.1.train")
    assert [m["model"] for m in merge["models"]] == ["stage:up.2.train"]
    assert merge["parameters"]["lambda"] == 1.3
    assert found["up.1.extrapolated"]["base_model"] == "stage:sft"
    assert found["up.3.answers"]["model"]["path"] == "stage:up.2.extrapolated"
    assert found["last"]["model"]["path"] == "stage:up.3.extrapolated"


def test_losses_get_their_other_policies(loads: Loads) -> None:
    """mnpo plays against the newest two policies; inpo has the first as its reference; simpo has none."""
    initial = "stages.up.reference=initial"
    mnpo = stages(loads, ROUNDS.replace("loss: dpo", "algorithm: mnpo"), initial)
    assert [mnpo[f"up.{n}.train"]["anchors"]["history"] for n in (1, 2, 3)] == [
        ["stage:sft"], ["stage:up.1.train", "stage:sft"], ["stage:up.2.train", "stage:up.1.train"],
    ]  # fmt: skip
    assert anchors(mnpo) == [None, "stage:sft", "stage:sft"]
    inpo = stages(loads, ROUNDS.replace("loss: dpo", "loss: inpo"), initial)
    assert inpo["up.2.train"]["anchors"] == {"reference": "stage:sft", "previous": None, "history": []}
    assert anchors(stages(loads, ROUNDS.replace("loss: dpo", "loss: simpo"), initial)) == [None, None, None]
    own = ROUNDS.replace("loss: dpo", "loss: dpo\n        anchors: {reference: mine}")
    assert anchors(stages(loads, own, initial)) == ["mine", "mine", "mine"]


def test_extragradient_step_restarts_from_the_policy(loads: Loads) -> None:
    found = stages(loads, ROUNDS, "stages.up.extragradient=true")
    assert [name for name in found if name.startswith("up.1.")] == [
        *(f"up.1.half.{name}" for name in ("answers", "pairs", "train")),
        *(f"up.1.{name}" for name in ("answers", "pairs", "train")),
    ]
    assert found["up.2.half.answers"]["model"]["path"] == found["up.2.train"]["model"]["path"] == "stage:up.1.train"
    assert found["up.2.answers"]["model"]["path"] == "stage:up.2.half.train"
    assert found["up.2.half.pairs"]["not_in"] == ["stage:up.1.half.pairs/pairs.jsonl"]


TEMPORAL = """
stage: pipeline
defaults: {data: {source: rows.jsonl}, rewards: [{use: math.accuracy}], run: {steps: 1}}
stages:
  - {name: sft, stage: sft, model: {path: tiny}}
  - name: up
    rounds: 2
    start: stage:sft
    stages:
      - {name: now, stage: eval, model: {path: "round:policy"}}
      - {name: past, stage: eval, model: {path: "round:initial"}}
      - {name: pairs1, stage: pairs, builder: temporal, completions: stage:now/completions.jsonl,
         past: stage:past/completions.jsonl}
      - {name: ahead, stage: dpo, model: {path: "round:policy"}, data: {source: stage:pairs1/pairs.jsonl}}
      - {name: future, stage: eval, model: {path: stage:ahead}}
      - {name: pairs2, stage: pairs, builder: temporal, completions: stage:now/completions.jsonl,
         past: stage:past/completions.jsonl, future: stage:future/completions.jsonl}
      - {name: train, stage: dpo, model: {path: "round:policy"}, data: {source: stage:pairs2/pairs.jsonl}}
"""


def test_temporal_self_rewarding_expands_to_rounds(loads: Loads) -> None:
    """Phase 2 starts from the round's policy instead of phase 1's model; the past model is always the first."""
    found = stages(loads, TEMPORAL)
    assert found["up.2.train"]["model"]["path"] == found["up.2.ahead"]["model"]["path"] == "stage:up.1.train"
    assert found["up.2.past"]["model"]["path"] == "stage:sft"
    assert found["up.2.future"]["model"]["path"] == "stage:up.2.ahead"
    assert found["up.2.pairs2"]["future"] == "stage:up.2.future/completions.jsonl"


def test_origins_are_lines_of_the_stage(loads: Loads) -> None:
    origins = loads(ROUNDS).origins
    assert str(origins["stages.4.model.path"]) == str(origins["stages.1.model.path"]) == "r.yaml:10"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("rounds: 3", "rounds: 0", "r.yaml:5:13  stages.1.rounds: must be greater than 0, not 0"),
        ("rounds: 3", "rounds: 3\n    referense: x", "hint: did you mean `reference`?"),
        ("round:policy", "round:polcy", "`round:polcy` is not a policy of a round"),
        ("stage: dpo", "stage: pairs", "none of them produces a model"),
        ("start: stage:sft", "start: tiny", "`tiny` is newly created"),
        ("rounds: 3", "rounds: 3\n    decay: 0.9", "stages.1.decay: does nothing with reference previous"),
        (
            "rounds: 3",
            "rounds: 3\n    alpha: 0.9\n    reference: average",
            "stages.1.alpha: does nothing with reference",
        ),
        (
            "start: stage:sft",
            "start: stage:sfft",
            "r.yaml:6:12  stages.1.start: there is no stage `sfft` before this one",
        ),
        ("rounds: 3", "rounds: 3\n    by_round: {train.optim.lr: [1.0]}", "1 value for 3 rounds"),
        ("rounds: 3", "rounds: 3\n    by_round: {trian.x: [1, 2, 3]}", "`trian.x` is not a key of a stage"),
        ("rounds: 3", "rounds: 3\n    result: pairs", "`pairs` does not produce a model"),
        ("name: pairs", "name: pa.irs", "the name of a stage in rounds cannot contain `.`"),
        ("name: pairs", "name: pairs, foo: 1", "stages.1.stages.1.foo: unknown key"),
    ],
)
def test_errors_in_rounds(errors: Callable[..., str], old: str, new: str, told: str) -> None:
    found = errors(ROUNDS.replace(old, new))
    assert told in found
    assert "before this one" not in found.replace(told, ""), "what follows from a mistake is not told"
    assert found.count(told) == (2 if "polcy" in told else 1), "told once, not once a round"


def test_unused_key_is_noted_once_for_all_rounds(loads: Loads) -> None:
    (note,) = loads(ROUNDS.replace("        run: {steps: 1}", "        run: {steps: 1, keep_checkpoints: 3}")).notes
    assert "stages.1.stages." in note.what and "run.keep_checkpoints: does nothing" in note.what
