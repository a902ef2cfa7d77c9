"""Efficiency, contamination, capability, consensus and habits: by hand, and through the eval stage."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import random_calculation
from posttrain.data.rows import load_rows
from posttrain.errors import DataError, RecipeError
from posttrain.evaluate.contamination import contamination_check, probe_question, split_text
from posttrain.evaluate.efficiency import accuracy_capability, efficiency_metrics
from posttrain.evaluate.formats import arm_consensus
from posttrain.evaluate.measures import compute_habit_rates, count_habits
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Data

Evaluate = Callable[..., dict[str, Any]]


def test_efficiency_against_a_baseline() -> None:
    """A 0.5, L 150; baseline 0.4 and 200: dL 0.25, dA 0.25: 0.25 + 3 * 0.25 = 1. Baseline 0.625: dA -0.2, 0.25 - 1."""
    correct, lengths = [1, 0], [100, 200]
    found = efficiency_metrics(correct, lengths, base_accuracy=0.4, base_length=200)
    assert found.aes == pytest.approx(1.0)
    assert (found.mean_length_correct, found.mean_length_wrong, found.tokens_per_correct) == (100, 200, 300)
    assert efficiency_metrics(correct, lengths, base_accuracy=0.625, base_length=200).aes == pytest.approx(-0.75)
    assert efficiency_metrics(correct, lengths, base_accuracy=0.5, base_length=150).aes == 0
    assert efficiency_metrics(correct, lengths, base_accuracy=0.0, base_length=200).aes is None
    wrong = efficiency_metrics([0, 0], lengths)
    assert (wrong.tokens_per_correct, wrong.mean_length_correct, wrong.aes) == (None, None, None)


def test_gains_sum_to_the_accuracy_gain() -> None:
    generator = random.Random(0)
    n = [8] * 20
    before, after = ([generator.randint(0, 8) for _ in n] for _ in range(2))
    found = accuracy_capability(n, before, after, ks=[1, 8])
    gain = (sum(after) - sum(before)) / 8 / 20
    assert found.self_distillation_gain + found.capability_gain == pytest.approx(gain)
    assert found.pass_at_k_after[1] == pytest.approx(sum(after) / 160)
    assert sum(bucket["count"] for bucket in found.buckets.values()) == 20
    with pytest.raises(ValueError, match="pass@9 needs 9 samples"):
        accuracy_capability(n, before, after, ks=[9])


def test_hidden_text_itself_is_a_full_match() -> None:
    text = "A train leaves at noon, and another one follows at two."
    hidden = split_text(text, 0.6)[1]
    found = contamination_check([text, text], [hidden, ""], ratio=0.6)
    assert (found.exact, found.rouge_l) == ([1, 0], [1, 0])
    assert contamination_check(["one"], ["x"]).completion_rate is None
    assert contamination_check(["日本の首都は東京です"], ["東京です"], ratio=0.6, unit="char").exact == [1]
    assert probe_question("a b c d", "c d", fraction=0.5).exact_match == 1


def test_long_chain_is_never_generated_if_the_three_agree() -> None:
    def unwanted() -> str:
        raise AssertionError("generated")

    assert arm_consensus("The 7.", "7", " 7 ", unwanted) == ("The 7.", "consensus")
    assert arm_consensus("7", "7", "", lambda: "8") == ("8", "long_cot")
    assert arm_consensus("7", "7", "8", lambda: None) == (None, "long_cot")
    assert arm_consensus("1/2", "0.5", "0.50", None, equal=lambda *_: True).used == "consensus"


def test_habits_are_counted() -> None:
    trace = "First, we add. Let me check that. Wait, that does not work; go back. To get 24 we need 6 * 4."
    assert count_habits(trace) == {"verification": 1, "backtracking": 3, "subgoals": 1, "backward_chaining": 1}
    assert compute_habit_rates([trace, "7"])["backtracking"] == {"count": 1.5, "share": 0.5}
    assert compute_habit_rates([]) == {}


def test_random_calculation_answers_are_exact() -> None:
    """Each expression evaluated by Python on exact fractions; the decimals differ by at most half a millionth."""
    for row in random_calculation.rows(40, seed=3, steps=4):
        code = "".join(f"Fraction({c})" if c.isdigit() else c for c in _tokens(row["expression"]))
        value = eval(code.replace("^", "**"), {"Fraction": Fraction})
        assert abs(Fraction(row["answer"]) - value) <= Fraction(1, 2_000_000)
        assert sum(row["expression"].count(f" {sign} ") for sign in "+-*/") == 4
    assert random_calculation.rows(3, seed=1) == random_calculation.rows(5, seed=1)[:3]


def _tokens(text: str) -> list[str]:
    return re.findall(r"\d+|\D", text)


def script(right: int) -> Callable[[str, int], str]:
    """Answers; a prompt that is the beginning of a problem is scripted by its row, so it is answered as well."""
    return lambda prompt, i: f"<answer>{sum(map(int, prompt.split('+'))) if i < right else 0}</answer>"


def test_evaluation_against_a_baseline(scripted: Any, evaluate: Evaluate) -> None:
    """1 of 4, then 3 of 4 samples right for each of 6 problems: +0.5, all of it on problems solved before.

    Lengths are equal (a digit more or less in none): aes = 3 * (0.75 - 0.25)/0.25 = 6.
    """
    scripted(script(1))
    evaluate("before")
    scripted(script(3))
    summary = evaluate("after", eval={"samples": 4, "k": [1, 4], "bootstrap": 200, "baseline": "before"})
    found = summary["against"]
    assert found["difference"]["diff"] == pytest.approx(0.5)
    assert found["efficiency"]["aes"] == pytest.approx(6)
    assert found["capability"]["self_distillation_gain"] == pytest.approx(0.5)
    assert found["capability"]["capability_gain"] == 0
    assert found["capability"]["buckets"] == {"1": {"count": 6, "before": 0.25, "after": 0.75}}
    assert summary["efficiency"]["tokens_per_correct"] == pytest.approx(4 / 0.75)
    again = evaluate("again", eval={"samples": 4, "bootstrap": 200, "baseline": "before/problems.jsonl"})
    assert again["against"]["difference"]["diff"] == found["difference"]["diff"]
    with pytest.raises(RecipeError, match="no finished evaluation"):
        evaluate("third", eval={"baseline": "nowhere"})


def test_a_source_that_is_listed_twice_is_compared_row_by_row(scripted: Any, evaluate: Evaluate) -> None:
    """Each problem comes twice with one uid, and its second appearance is answered worse: against itself nothing
    changes. A baseline of which only the first appearance counted would be better than itself."""
    asked: Counter[tuple[str, int]] = Counter()

    def twice(prompt: str, i: int) -> str:
        asked[prompt, i] += 1
        return script(4 if asked[prompt, i] % 2 else 1)(prompt, i)

    scripted(twice)
    data = {"mix": [{"source": "problems.jsonl"}, {"source": "problems.jsonl"}]}
    settings = {"samples": 4, "k": [1, 4], "bootstrap": 200}
    before = evaluate("before", data=data, eval=settings)
    assert (before["problems"], before["accuracy"]) == (12, pytest.approx(0.625))
    found = evaluate("after", data=data, eval={**settings, "baseline": "before"})["against"]
    assert found["difference"]["diff"] == 0.0 and found["difference"]["problems"] == 12
    assert found["reference"]["accuracy"] == pytest.approx(0.625)
    assert found["efficiency"]["aes"] == pytest.approx(0.0)
    assert found["capability"]["problems"] == 12 and found["capability"]["capability_gain"] == 0
    once = evaluate("once", eval={**settings, "baseline": "before"})["against"]  # only what both have
    assert (once["difference"]["problems"], once["difference"]["only_in_a"]) == (6, 6)
    assert once["reference"]["accuracy"] == pytest.approx(1.0)


def test_contamination_probe_and_habits(scripted: Any, evaluate: Evaluate, folder: Path) -> None:
    """Problems of four words, continued with words three and four: all fit at ratio 0.5, none at 0.75."""
    rows = [{"prompt": f"one two three {i}", "answer": str(i)} for i in range(3)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scripted(lambda prompt, _: f" three {prompt[-1]} wait <answer>{prompt[-1]}</answer>")
    summary = evaluate(eval={"contamination": {"ratios": [0.5, 0.75], "max_new_tokens": 40}, "habits": True})
    half, most = summary["contamination"]
    assert (half["completion_rate"], half["rouge_l"], half["answer_rate"]) == (1, 1, 1)
    assert (most["completion_rate"], most["problems"]) == (0, 3)
    assert summary["habits"]["backtracking"]["share"] == 1
    assert (folder / "run" / "contamination.jsonl").is_file()


def test_right_completions_become_training_rows(scripted: Any, evaluate: Evaluate, folder: Path) -> None:
    """Problems 1+1 .. 1+3: two right samples, the first longer by a dot; 1+4 .. 1+6: none."""

    def answer(prompt: str, i: int) -> str:
        total = sum(map(int, prompt.split("+")))
        right = i < 2 and total <= 4
        return f"<answer>{total}</answer>" + "." * (1 - i) if right else "0"

    scripted(answer)
    evaluate("before")
    section = Data(source="accepted:before", params={"max_per_prompt": 1, "max_pass_rate": 0.5})
    rows = load_rows(section, folder)
    assert [row["completion"] for row in rows] == [f"<answer>{n}</answer>" for n in (2, 3, 4)]
    assert rows[0]["prompt"] == [{"role": "user", "content": "1+1"}]
    assert len(load_rows(Data(source="accepted:before", params={"max_per_prompt": 4}), folder)) == 6
    with pytest.raises(DataError, match="of 24 completions 6 right, 0 of these truncated; of 3 problems solved"):
        load_rows(section.model_copy(update={"params": {"max_pass_rate": 0.25}}), folder)
    for params, match in (({"picks": "first"}, "no parameter picks"), ({"pick": "best"}, "cannot use pick")):
        with pytest.raises(DataError, match=match):
            load_rows(section.model_copy(update={"params": params}), folder)
    with pytest.raises(DataError, match="not found"):
        load_rows(Data(source="accepted:nowhere"), folder)


@pytest.mark.parametrize("key", ["aes", "edges"])
def test_weights_of_a_comparison_without_a_baseline_are_refused(folder: Path, key: str) -> None:
    values = {"stage": "eval", "model": {"path": "tiny"}, "data": {"source": "problems.jsonl"}}
    values |= {"rewards": [{"use": "score.py:exact"}], "eval": {key: [0.1, 0.2, 0.3]}}
    with pytest.raises(RecipeError, match=f"eval.{key}: does nothing without a run to compare with"):
        load_dict(values, base_dir=folder, where="test")
