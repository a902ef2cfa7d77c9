"""reasoning-gym tasks: gold scores full marks; a program, a name inside the scorer and a constant do not."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from posttrain import typed_json
from posttrain.data import gym as data
from posttrain.errors import MissingExtra
from posttrain.verify.gym import import_tasks, is_formula, read_literal, replace_eval, scorer
from posttrain.verify.reward_hacking_probes import NAMES

FORMULAS = ("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication")
EVALUATED = ("binary_matrix", "spiral_matrix", "string_insertion", "n_queens")
UNKNOWN = ("boxnet", "rush_hour")  # any valid plan is right, and the items contain none
TASKS = sorted(set(DATASETS) - {"composite"})


def gold_of(task: str, entry: dict[str, Any]) -> str:
    """Return the gold answer; for tasks with many right answers, the example that the item contains."""
    found = entry["metadata"]
    own = {
        "graph_color": lambda: json.dumps({str(k): v for k, v in found["possible_answer"].items()}),
        "rubiks_cube": lambda: found["example_correct_answer"],
        "propositional_logic": lambda: found["example_answer"],
    }
    return str(own[task]() if entry["answer"] is None else entry["answer"])


@pytest.mark.parametrize("task", TASKS)
def test_every_task_scores_gold_and_no_trick(task: str) -> None:
    """Gold of the row as the data gives it scores 1; scorer names, programs and constants earn less than full marks."""
    entry = reasoning_gym.create_dataset(task, size=1, seed=23)[0]
    back = typed_json.loads(typed_json.dumps(entry))
    assert back == entry and repr(back) == repr(entry)
    names = [*NAMES, *DATASETS[task][0].score_answer.__code__.co_varnames]
    tricks = [form.format(name) for name in names for form in ("{}", "[{}]")]
    tricks += ["True", "None", "0", "nan", "inf", "[]", "{}", "1*2*3*4", "str(entry)", "__import__('os').getcwd()", ""]
    gold = "" if task in UNKNOWN else gold_of(task, entry)
    assert not gold or scorer(task)(gold, back) == 1.0
    tricks.remove("0") if gold == "0.0" else None
    paid = [t for t in tricks if t != gold and scorer(task)(t, back) >= 1.0]
    assert paid == []


@pytest.mark.parametrize("task", sorted(set(TASKS) - {*UNKNOWN, "graph_color", "rubiks_cube", "propositional_logic"}))
def test_answer_of_another_row_is_wrong(task: str) -> None:
    first, second = reasoning_gym.create_dataset(task, size=2, seed=3)
    if first["answer"] != second["answer"]:
        assert scorer(task)(str(first["answer"]), second) < 1.0


@pytest.mark.parametrize("task", EVALUATED)
def test_answer_cannot_access_names_of_the_scorer(task: str) -> None:
    """No partial credit either: upstream gave 0.1 for a list in the wrong format, and 0.5 in n_queens."""
    names = [*NAMES, *DATASETS[task][0].score_answer.__code__.co_varnames]
    for entry in reasoning_gym.create_dataset(task, size=3, seed=3):
        for name in names:
            for form in (
                "{}",
                "[{}]",
                "list({})",
                "[*{}]",
                "{}[0]",
                "[{}][0]",
                "[x for x in {}]",
                "({},)",
                "[x.split() for x in {}.split('\\n')]",
            ):
                assert scorer(task)(form.format(name), entry) == 0.0, form.format(name)


def test_eval_calls_are_found_in_the_code() -> None:
    changed = {task for task in TASKS if vars(replace_eval(DATASETS[task][0])).get("score_answer")}
    assert changed == {*EVALUATED, "number_sorting"}

    class Late:
        def score_answer(self, answer: str, entry: Any) -> Any:
            gold = entry
            return [self.inner(one) for one in [answer]], gold

        def inner(self, text: str, *, more: str = "") -> Any:
            return next(eval(one + more) for one in [text])

    late = replace_eval(Late)()
    assert late.score_answer("[1, (2, 'a')]", 3) == ([[1, (2, "a")]], 3)
    with pytest.raises(ValueError):
        late.score_answer("gold", 3)
    assert Late().score_answer("len('ab')", 3) == ([2], 3)  # the class itself is unchanged


@pytest.mark.parametrize("text", ["x", "[x]", "f()", "a.b", "9**9", "[0] * 10", "[1 for _ in (1,)]", "f'{1}'"])
def test_text_that_is_not_a_literal(text: str) -> None:
    with pytest.raises(ValueError):
        read_literal(text)
    assert read_literal(" [[0, -1], {'a': (1.5, None)}] ") == [[0, -1], {"a": (1.5, None)}]


@pytest.mark.parametrize("text", ["[" * 100_000, "(" * 5000 + ")" * 5000, "-" * 100_000 + "1", "1" * 300_000, "[1]*"])
def test_hostile_literals_are_wrong(text: str) -> None:
    entry = reasoning_gym.create_dataset("spiral_matrix", size=1, seed=3)[0]
    started = time.process_time()
    assert scorer("spiral_matrix")(text, entry) == 0.0
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("task", "wrong"),
    [
        ("game_of_life_halting", ["T", "yes", "not sure", "trueish"]),
        ("gsm_symbolic", ["-{}", "{}0", "{} or 1", "1 or {}"]),
        ("coin_flip", ["0", "0.", "1", "0.5"]),
        ("puzzle24", ["1*2*3*4", "24", "4*6", "8 + 8 + 4 + 4"]),
    ],
)
def test_only_the_answer_earns_full_marks(task: str, wrong: list[str]) -> None:
    for entry in reasoning_gym.create_dataset(task, size=5, seed=9):
        gold = entry["answer"]
        assert scorer(task)(gold, entry) == 1.0
        said = [form.format(gold) for form in wrong]
        assert [scorer(task)(text, entry) for text in said if text != gold] == [0.0] * sum(t != gold for t in said)


def test_small_probability_is_not_rounded_to_zero() -> None:
    entry = {"answer": "0.0000305176", "metadata": {}}
    said = ("0", "0.00001", "0.0001", "1/32768", "0.0000305")
    assert [scorer("coin_flip")(text, entry) for text in said] == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_halting_is_read_from_the_word() -> None:
    entry = reasoning_gym.create_dataset("game_of_life_halting", size=1, seed=9)[0]
    other = {"True": "False", "False": "True"}[entry["answer"]]
    assert scorer("game_of_life_halting")(other, entry) == 0.0
    assert scorer("game_of_life_halting")(entry["answer"].lower(), entry) == 1.0


def test_sorted_numbers_must_be_those_of_the_row() -> None:
    for entry in reasoning_gym.create_dataset("number_sorting", size=3, seed=5):
        gold = read_literal(entry["answer"])
        assert scorer("number_sorting")(str([float(n) for n in gold]), entry) == 1.0
        assert scorer("number_sorting")(json.dumps([str(float(n) + 0.5) for n in gold]), entry) == 0.0


def test_row_is_scored_with_its_own_configuration() -> None:
    """The task tolerates 0.001 by default; with ten decimals it does not."""
    for row in data.rows("decimal_arithmetic", 3, 0, {"min_num_decimal_places": 8, "max_num_decimal_places": 10}):
        entry, off = typed_json.loads(row["gym_entry"]), str(float(row["answer"]) + 5e-4)
        assert scorer("decimal_arithmetic", row["gym_params"])(row["answer"], entry) == 1.0
        assert scorer("decimal_arithmetic", row["gym_params"])(off, entry) == 0.0
        assert scorer("decimal_arithmetic")(off, entry) == 1.0


@pytest.mark.parametrize("task", [*FORMULAS, *EVALUATED])
def test_right_answers_score_and_programs_are_not_run(task: str, tmp_path: Path) -> None:
    file = tmp_path / "run"
    programs = [f"__import__('os').system('touch {file}')", f"open('{file}', 'w')", "exit(1)", "eval(chr(49))"]
    programs += ["().__class__", "9**9**9**9", "(9^9)^(9^9)", "1" * 5000, f"[open('{file}', 'w') for _ in (1,)]"]
    started = time.monotonic()
    for entry in reasoning_gym.create_dataset(task, size=5, seed=3):
        assert scorer(task)(entry["answer"], entry) == 1.0
        nothing = scorer(task)("I do not know", entry)
        assert [scorer(task)(program, entry) for program in programs] == [nothing] * len(programs)
    assert not file.exists()
    assert time.monotonic() - started < 20


def test_unevaluated_integral_is_wrong() -> None:
    """Its derivative is always the integrand; the task's own gold sometimes has this form."""
    score, kinds = scorer("intermediate_integration"), set()
    for entry in reasoning_gym.create_dataset("intermediate_integration", size=12, seed=9):
        open_end = "Integral" in entry["answer"]
        assert score(f"Integral({entry['metadata']['integrand']}, x)", entry) == float(open_end)
        kinds.add(open_end)
    assert kinds == {True, False}


@pytest.mark.parametrize("answer", ["nan", "NaN", "nan+nanj", "-inf", "nan + nani"])
def test_non_number_is_not_close_to_every_number(answer: str) -> None:
    for entry in reasoning_gym.create_dataset("complex_arithmetic", size=3, seed=2):
        assert scorer("complex_arithmetic")(answer, entry) == 0.0
        assert scorer("complex_arithmetic")(entry["answer"], entry) == 1.0


def test_unknown_task_is_an_error() -> None:
    with pytest.raises(ValueError, match="no task nothing"):
        scorer("nothing")


def test_answer_that_crashes_the_task_scorer_is_wrong() -> None:
    entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=2)[0]
    assert scorer("prime_factorization")("two and two", entry) == 0.0
    assert scorer("prime_factorization")(entry["answer"], entry) == 1.0
    with pytest.raises(ValueError, match="two"):  # here the row is at fault
        scorer("prime_factorization")("x", {**entry, "answer": "two"})


def test_list_instead_of_a_matrix_gets_partial_credit() -> None:
    entry = reasoning_gym.create_dataset("binary_matrix", size=1, seed=3)[0]
    written = str([[int(cell) for cell in row.split()] for row in entry["answer"].split("\n")])
    assert scorer("binary_matrix")(written, entry) == 0.1


@pytest.mark.parametrize("text", ["94*4 - 61 - 6", "(8 - 5)×2", "-34*x**8/15 - 5*x/4 + C", "2.5*sin(x) + exp(-x^2)"])
def test_valid_formulas(text: str) -> None:
    assert is_formula(text)


@pytest.mark.parametrize("text", ["x.real", "(1).real", "a[0]", "'a'", "lambda: 1", "_", "__name__", "x\\y", "٣"])
def test_invalid_formulas(text: str) -> None:
    assert not is_formula(text)


@pytest.mark.parametrize("task", ["fraction_simplification", "letter_jumble"])
def test_second_answer_after_the_right_one_is_not_rewarded(task: str) -> None:
    entry = reasoning_gym.create_dataset(task, size=1, seed=5)[0]
    gold = str(entry["answer"])
    other = "7/9" if "fraction" in task else "other words"
    assert scorer(task)(gold, entry) == 1.0
    assert [scorer(task)(f"{gold} or {other}", entry), scorer(task)(f"{gold} {other}", entry)] == [0.0, 0.0]


def test_without_reasoning_gym_the_reward_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match=r"the reward gym\.score needs reasoning-gym") as raised:
        import_tasks()
    assert "posttrain[gym]" in str(raised.value)
