"""The quickstart's task: contents of its rows, held-out test problems, and a valid recipe."""

import json
import zlib

import pytest

from posttrain.path_resolution import shipped_folder
from posttrain.recipe.load import load
from posttrain.registry import load_function

RECIPES = shipped_folder("recipes")


def function(name, script="quickstart_data"):
    return load_function(f"{script}.py:{name}", RECIPES, what="test")


def test_a_solution_adds_column_by_column():
    """458 + 367: 8+7 = 15, carry 1; 5+6+1 = 12, carry 1; 4+3+1 = 8."""
    solution = function("solution")
    assert solution(458, 367) == "<think>8+7+0=15 5+6+1=12 4+3+1=08</think><answer>825</answer>"
    assert solution(999, 111) == "<think>9+1+0=10 9+1+1=11 9+1+1=11</think><answer>1110</answer>"


def test_forgotten_carry_propagates_and_the_leading_digit_is_kept():
    """758 + 367 without carries: 8+7 = 15 -> 5; 5+6+0 = 11 -> 1; 7+3+0 = 10 -> 10 in front."""
    forgetful = function("solution")(758, 367, lambda: True)
    assert forgetful == "<think>8+7+0=15 5+6+0=11 7+3+0=10</think><answer>1015</answer>"


def test_demonstrations_are_right_as_often_as_carries_are_remembered():
    rows = function("demonstrations")(4000, 0)
    right = [f"<answer>{sum(map(int, r['prompt'][:-2].split('+')))}</answer>" in r["completion"] for r in rows]
    assert 0.47 < sum(right) / len(right) < 0.53
    assert all("<answer>" in r["completion"] for r in rows)


def test_test_problems_are_not_in_training_sets():
    tested = {r["prompt"] for r in function("held_out")(500, 0)}
    trained = {r["prompt"] for r in function("problems")(4000, 0)}
    shown = {r["prompt"] for seed in (0, 1) for r in function("demonstrations")(19200, seed)}
    assert len(tested) == 500 and len(trained) == 4000
    assert not tested & (trained | shown)
    assert all(zlib.crc32(p.removesuffix("=?").encode()) % 10 == 0 for p in tested)


def test_rows_depend_only_on_the_seed():
    make = function("problems")
    assert make(5, 3) == make(5, 3) != make(5, 4)
    assert make(9, 3)[:5] == make(5, 3)


def test_pairs_are_a_right_and_a_wrong_completion_of_one_prompt(tmp_path):
    def line(prompt, answer):
        completion = f"<think></think><answer>{answer}</answer>"
        return json.dumps({"prompt": f"<bos><|user|>{prompt}<|assistant|>", "completion": completion}) + "\n"

    file = tmp_path / "completions.jsonl"
    three = [("100+200=?", a) for a in (300, 301, 300, 302)] + [("1+1=?", 2), ("1+1=?", 2), ("1+2=?", 3), ("1+2=?", 4)]
    file.write_text("".join(line(prompt, answer) for prompt, answer in three))
    found = function("pairs")(10, 0, file)
    assert [pair["prompt"] for pair in found] == ["100+200=?", "1+2=?", "100+200=?"]  # a second pair comes last
    assert "<answer>3<" in found[1]["chosen"] and "<answer>4<" in found[1]["rejected"]
    assert {found[0]["rejected"][-12:], found[2]["rejected"][-12:]} == {"301</answer>", "302</answer>"}
    assert function("pairs")(2, 0, file) == found[:2]


def test_random_reward_is_fair_and_ignores_the_answer():
    coin = function("coin", "quickstart_random")
    texts = [function("solution")(a, b) for a in range(100, 999, 13) for b in range(100, 999, 17)]
    heads = sum(map(coin, texts)) / len(texts)
    assert heads == pytest.approx(0.5, abs=0.03)


def test_controls_differ_from_rl_in_one_setting_each():
    stages = {stage["name"]: stage for stage in load("quickstart", stage="run").resolved["stages"]}
    rl, coin, longer = stages["rl"], stages["rl-coin"], stages["sft-longer"]
    assert {key for key in rl if rl[key] != coin[key]} == {"name", "rewards"}
    assert [r["use"] for r in coin["rewards"] if r["weight"]] == ["quickstart_random.py:coin"]
    assert longer["model"].items() <= rl["model"].items() and longer["run"]["max_minutes"] == "stage:rl"
    assert longer["data"]["source"] == stages["sft"]["data"]["source"]
    graded = [s for s in stages.values() if s["stage"] == "eval"]
    assert {json.dumps({k: s[k] for k in s if k not in ("name", "model")}) for s in graded} == {
        json.dumps({k: graded[0][k] for k in graded[0] if k not in ("name", "model")})
    }
    assert graded[0]["data"]["size"] >= 300
