"""The eval stage on scripted completions with hand-computed numbers, and on the tiny model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.rows import load_rows
from posttrain.errors import Interrupted, RecipeError, RewardError, UserError
from posttrain.evaluate.compare import compare, read_problem_values
from posttrain.evaluate.contamination import count_trained_rows
from posttrain.evaluate.run import remarks
from posttrain.recipe.sections import Data
from posttrain.run.jsonl import read_rows

Evaluate = Callable[..., dict[str, Any]]
TIMES = ("seconds", "completions")


def right_for(count: int) -> Callable[[str, int], str]:
    """The first `count` samples are right, the others say 0."""

    def script(prompt: str, sample: int) -> str:
        return f"<answer>{sum(map(int, prompt.split('+'))) if sample < count else 0}</answer>"

    return script


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key not in TIMES}


def test_rows_that_the_model_was_trained_on_are_reported(scripted, evaluate: Evaluate, folder: Path) -> None:
    scripted(right_for(2))
    own = (folder / "problems.jsonl").read_text().splitlines()
    other = [*own[:2], *(line.replace("1+", "2+") for line in own[2:])]
    (folder / "first").mkdir()
    (folder / "first" / "problems.jsonl").write_text("\n".join(other) + "\n")
    for run, source, start in (("first", "first/problems.jsonl", "tiny"), ("second", "others.jsonl", "first/final")):
        (folder / run / "final").mkdir(parents=True)
        recipe = {"stage": "sft", "data": {"source": source}, "model": {"path": start}}
        (folder / run / "resolved.json").write_text(json.dumps(recipe))
    rows = load_rows(Data(source="problems.jsonl"), folder)
    found = count_trained_rows("second/final", rows, folder)
    assert (found["rows"], found["of"], found["runs"]) == (2, 6, [str(folder / "first")])
    assert count_trained_rows("tiny", rows, folder) == {}
    summary = {**evaluate(), "trained_on": found}
    assert "trained_on" not in evaluate("again")
    assert f"measured on rows it was trained on: 2 of 6 ({folder / 'first'})" in remarks(summary)


@pytest.mark.parametrize("form", ["models", "slices", "base_model"])
def test_rows_of_trainings_are_counted_by_prompt_and_through_a_merge(folder: Path, form: str) -> None:
    """Each source of the merge was trained on other prompts, in other files and with other columns; a prompt of both
    counts once, and rows without a prompt are not considered equal.
    """
    for run, prompts in (("left", ["1+1", "1+2", ""]), ("right", ["1 + 2", "1+6", "7+7"])):
        (folder / run / "final").mkdir(parents=True)
        rows = [json.dumps({"prompt": prompt, "completion": "x"}) for prompt in prompts]
        (folder / f"{run}.jsonl").write_text("\n".join(rows) + "\n")
        recipe = {"stage": "sft", "data": {"source": f"{run}.jsonl"}, "model": {"path": "tiny"}}
        (folder / run / "resolved.json").write_text(json.dumps(recipe))
    left, right = ({"model": f"{run}/final", "layer_range": [0, 1]} for run in ("left", "right"))
    recipe = {
        "models": {"models": [left, right], "base_model": "tiny"},
        "slices": {"slices": [{"sources": [left]}, {"sources": [right]}]},
        "base_model": {"models": [left], "base_model": "right"},
    }[form]
    (folder / "merged" / "final").mkdir(parents=True)
    (folder / "merged" / "resolved.json").write_text(json.dumps({"stage": "merge", **recipe}))
    rows = [*load_rows(Data(source="problems.jsonl"), folder), {"uid": "x", "prompt": ""}]
    found = count_trained_rows("merged", rows, folder)
    assert (found["rows"], found["of"]) == (3, 7)
    assert sorted(found["runs"]) == [str(folder / "left"), str(folder / "right")]


def test_summary_by_hand(scripted, evaluate: Evaluate, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Problems 1+1 .. 1+3: 3 of 4 right, 1+4 .. 1+6: 0 right (four different wrong answers).

    accuracy (3 * .75 + 0) / 6 = .375 = pass@1; pass@2: 1 - C(1,2)/C(4,2) = 1 for the first three -> .5; cons@4: 1 for
    the first three -> .5; there is no cons@1, a vote of one. `<answer>2</answer>` and EOS: 4 tokens (the
    tags are one token each).
    """

    three = right_for(3)
    scripted(lambda p, i: three(p, i) if int(p[-1]) <= 3 else f"<answer>{'abcd'[i]}</answer>")
    summary = evaluate()
    assert summary["accuracy"] == pytest.approx(0.375)
    means = {name: found["mean"] for name, found in summary["intervals"].items()}
    assert means == pytest.approx(
        {
            "accuracy": 0.375,
            "pass@1": 0.375,
            "pass@2": 0.5,
            "pass@4": 0.5,
            "cons@2": 0.5,
            "cons@4": 0.5,
            "tokens": 4.0,
        }
    )
    found = summary["intervals"]["accuracy"]
    assert 0 <= found["low"] < 0.375 < found["high"] <= 0.75 and "6 problems" in found["note"]
    assert (summary["problems"], summary["samples"], summary["num_completions"]) == (6, 4, 24)
    assert summary["rewards"] == {"exact": {"mean": 0.375, "none": 0}}
    told = capsys.readouterr()
    assert told.out == "" and "pass@4" in told.err and "0.375" in told.err

    rows = read_rows(folder / "run" / "problems.jsonl")
    assert [row["right"] for row in rows] == [3, 3, 3, 0, 0, 0]
    assert rows[0]["majority"] == "2" and rows[0]["majority_share"] == 0.75
    records = read_rows(folder / "run" / "completions.jsonl")
    assert len(records) == 24 and records[0]["completion"] == "<answer>2</answer>"
    assert len(read_rows(folder / "run" / "samples.jsonl")) == 4


def test_answers_equal_by_the_verifier_share_votes(scripted, evaluate: Evaluate, folder: Path) -> None:
    """1+1: three forms of 2 and two times 3. By text 3 would lead and cons@5 be 0; of the wrong ones, 6/2 is 3."""
    said = [
        r"\boxed{3}",
        r"\boxed{2}",
        r"\boxed{6/2}",
        r"\boxed{\frac{4}{2}}",
        r"\boxed{2.0}",
        r"\boxed{3}",
        r"\boxed{2}",
    ]
    scripted(lambda p, i: said[i] if p == "1+1" else r"\boxed{7}")
    evaluate(rewards=[{"use": "math.accuracy"}], eval={"samples": 7, "k": [1, 7], "bootstrap": 200})
    records = read_rows(folder / "run" / "completions.jsonl")[:7]
    assert [r["vote"] for r in records] == ["3", "2", "3", "2", "2", "3", "2"]
    assert [r["answer"] for r in records] == ["3", "2", "6/2", r"\frac{4}{2}", "2.0", "3", "2"]
    row = read_rows(folder / "run" / "problems.jsonl")[0]
    assert (row["majority"], row["majority_share"], row["consensus"]) == ("2", pytest.approx(4 / 7), 1.0)


def test_completions_ended_by_the_time_limit_are_counted(scripted, evaluate: Evaluate, folder: Path) -> None:
    (folder / "slow.py").write_text(
        "import time\n\ndef slow(completion, answer):\n    time.sleep(30 if answer == '2' else 0)\n    return 1.0\n"
    )
    scripted(right_for(1))
    summary = evaluate(
        rewards=[{"use": "slow.py:slow", "timeout_s": 0.5}], eval={"samples": 1, "k": [1], "bootstrap": 200}
    )
    assert summary["timeouts"] == {"slow": 1} and summary["unscored"] == 1
    assert any("timed out" in line for line in remarks(summary))


def test_truncated_completion_is_wrong_and_counted_separately(scripted, evaluate: Evaluate) -> None:
    """Sample 0 has the right answer and then reaches the limit of 24 tokens; the other three stop, right."""
    right = right_for(4)
    scripted(lambda p, i: right(p, i) + (" and so on" * 9 if i == 0 else ""))
    summary = evaluate()
    assert (summary["accuracy"], summary["truncated"], summary["truncated_right"]) == (0.75, 0.25, 6)
    assert any("25.0% of the completions hit the limit" in line for line in remarks(summary))


def test_truncated_right_answer_is_wrong_in_every_metric(scripted, evaluate: Evaluate, folder: Path) -> None:
    right = right_for(4)
    scripted(lambda p, i: right(p, i) + " and so on" * 9)
    summary = evaluate()
    assert {name: found["mean"] for name, found in summary["intervals"].items() if name != "tokens"} == dict.fromkeys(
        ("accuracy", "pass@1", "pass@2", "pass@4", "cons@2", "cons@4"), 0.0
    )
    row = read_rows(folder / "run" / "problems.jsonl")[0]
    assert (row["majority"], row["majority_share"], row["consensus"]) == (None, None, 0.0)


def test_truncated_completions_do_not_outvote_the_others(scripted, evaluate: Evaluate, folder: Path) -> None:
    """Two truncated with a wrong answer, one finished wrong, then the right one twice; the first two do not vote."""
    cut, said = " and so on" * 9, ["0", "0", "9", "{}", "{}"]
    scripted(lambda p, i: f"<answer>{said[i].format(eval(p))}</answer>{cut if i < 2 else ''}")
    summary = evaluate(eval={"samples": 5, "k": [2, 4, 5], "bootstrap": 200})
    assert [summary["intervals"][f"cons@{k}"]["mean"] for k in (2, 4, 5)] == [0.0, 0.5, 1.0]
    row = read_rows(folder / "run" / "problems.jsonl")[0]
    assert (row["majority"], row["majority_share"]) == ("2", pytest.approx(2 / 3))


def test_unjudged_problem_is_excluded_from_every_metric(scripted, evaluate: Evaluate, folder: Path) -> None:
    """1+1 and 1+2 are not judged, 1+3 in half of its samples; the others are right."""
    right = right_for(4)
    scripted(lambda p, i: "abstain" if p in ("1+1", "1+2") or (p == "1+3" and i < 2) else right(p, i))
    summary = evaluate(eval={"samples": 4, "k": [1, 2], "bootstrap": 200})
    found = {n: (f["mean"], f["problems"]) for n, f in summary["intervals"].items() if n != "tokens"}
    assert found == dict.fromkeys(("accuracy", "pass@1", "pass@2", "cons@2"), (1.0, 4))
    rows = read_rows(folder / "run" / "problems.jsonl")
    assert [row["consensus"] for row in rows] == [row["accuracy"] for row in rows] == [None, None, 1.0, 1.0, 1.0, 1.0]


def test_completions_that_end_inside_their_thought_are_reported(scripted, evaluate: Evaluate) -> None:
    """Two of four open a thought and stop below the limit; nothing is truncated and nothing is right."""
    scripted(lambda _, i: "<think>so" if i < 2 else "<think>so</think>nothing")
    summary = evaluate(sampling={"max_new_tokens": 24, "stop": ["\n"]})
    assert (summary["truncated"], summary["accuracy"], summary["ended_in_thought"]) == (0.0, 0.0, 12)
    (line,) = [line for line in remarks(summary) if "inside their thought" in line]
    assert line.startswith("50.0% of the completions end inside") and line.endswith(r"see sampling.stop ('\n')")
    assert [line for line in remarks({**summary, "ended_in_thought": 0}) if "inside their thought" in line] == []


def test_unscored_samples_are_excluded_and_never_wrong(scripted, evaluate: Evaluate) -> None:
    """Per problem one sample crashes the reward, one gets None, two are right: accuracy 1, pass@4 not available."""
    right = right_for(4)
    scripted(lambda p, i: ("crash", "abstain", right(p, i), right(p, i))[i])
    summary = evaluate()
    assert (summary["accuracy"], summary["unscored"], summary["unscored_problems"]) == (1.0, 12, 0)
    assert summary["intervals"]["pass@2"]["mean"] == 1.0
    assert summary["intervals"]["pass@4"]["mean"] is None
    assert summary["rewards"]["exact"] == {"mean": 1.0, "none": 12}


@pytest.mark.parametrize("seed", range(4))
def test_killed_and_resumed_evaluation_gives_the_same_results(evaluate: Evaluate, folder: Path, seed: int) -> None:
    """The tiny model at temperature 1.

    A kill truncates completions.jsonl at any byte; after a resume every record and every number equals the
    uninterrupted run's.
    """
    whole = evaluate("whole")
    text = (folder / "whole" / "completions.jsonl").read_bytes()
    evaluate("run")
    (folder / "run" / "completions.jsonl").write_bytes(text[: random.Random(seed).randrange(len(text))])
    (folder / "run" / "problems.jsonl").unlink()
    resumed = evaluate("run", resume=True)
    assert without_times(resumed) == without_times(whole)
    assert (folder / "run" / "completions.jsonl").read_bytes() == text
    for name in ("problems.jsonl", "samples.jsonl"):
        assert (folder / "run" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_different_seed_gives_different_samples(evaluate: Evaluate, folder: Path) -> None:
    evaluate("one")
    evaluate("two", run={"seed": 1})
    texts = [[r["completion"] for r in read_rows(folder / name / "completions.jsonl")] for name in ("one", "two")]
    assert texts[0] != texts[1]
    assert len(set(texts[0])) > 12  # samples of one prompt differ, and so do chunks


def test_ctrl_c_preserves_finished_chunks(
    scripted, evaluate: Evaluate, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.run.interrupt import GracefulStop

    engine = scripted(right_for(2))
    with monkeypatch.context() as patch:
        patch.setattr(GracefulStop, "__enter__", lambda self: setattr(self, "requested", True) or self)
        with pytest.raises(Interrupted, match="after 1 of 3 chunks"):
            evaluate()
    assert len(read_rows(folder / "run" / "completions.jsonl")) == 8
    summary = evaluate(resume=True)
    assert summary["accuracy"] == 0.5
    assert [call["first_group"] for call in engine.calls] == [0, 2, 4]  # no chunk was sampled twice


def test_finished_run_is_summarized_again_without_the_model(
    scripted, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(right_for(1))
    before = evaluate()
    monkeypatch.setattr("posttrain.evaluate.sampling.load", None)
    assert without_times(evaluate(resume=True)) == without_times(before)


def test_compare_pairs_problems(scripted, evaluate: Evaluate, folder: Path) -> None:
    """3 of 4 right against 1 of 4 in every problem: the difference is .5 in each, so the interval has no width."""
    scripted(right_for(1))
    evaluate("before")
    scripted(right_for(3))
    evaluate("after")
    result = compare(folder / "before", folder / "after")
    assert (result["diff"], result["low"], result["high"], result["problems"]) == (0.5, 0.5, 0.5, 6)
    assert not result["informative"]
    with pytest.raises(UserError, match="no metric speed"):
        read_problem_values(folder / "before", "speed")
    with pytest.raises(UserError, match="no finished evaluation"):
        compare(folder / "before", folder / "nowhere")


def test_compare_ignores_problems_of_only_one_run(scripted, evaluate: Evaluate, folder: Path) -> None:
    scripted(right_for(1))
    evaluate("before")
    evaluate("after", data={"source": "problems.jsonl", "size": 4})
    result = compare(folder / "before", folder / "after")
    assert (result["problems"], result["only_in_a"], result["only_in_b"]) == (4, 2, 0)
    (folder / "other.jsonl").write_text(json.dumps({"prompt": "5+5", "answer": "10"}) + "\n")
    evaluate("other", data={"source": "other.jsonl"})
    with pytest.raises(UserError, match="no problem"):
        compare(folder / "before", folder / "other")


def test_k_above_the_samples(evaluate: Evaluate) -> None:
    with pytest.raises(RecipeError, match=r"eval\.k  k = 8 needs"):
        evaluate(eval={"samples": 4, "k": [8]})


def test_missing_reward_column_is_reported(evaluate: Evaluate, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.evaluate.sampling.load", None)  # the error must come before a model is loaded
    (folder / "problems.jsonl").write_text(json.dumps({"prompt": "1+1", "solution": "2"}) + "\n")
    with pytest.raises(RewardError, match="no column `answer`"):
        evaluate()


def test_generate_writes_completions(scripted, evaluate: Evaluate) -> None:
    scripted(right_for(1))
    summary = evaluate(
        stage="generate",
        model={"path": "tiny"},
        data={"source": "problems.jsonl"},
        sampling={"max_new_tokens": 24},
        engine={"batch_size": 8},
        samples=2,
    )
    records = read_rows(Path(summary["completions"]))
    assert [(r["problem"], r["sample"]) for r in records] == [(p, s) for p in range(6) for s in range(2)]
    assert (records[1]["completion"], records[1]["finish"], records[1]["tokens"]) == ("<answer>0</answer>", "stop", 4)
    assert (summary["prompts"], summary["samples"], summary["mean_tokens"]) == (6, 2, 4.0)
