"""Answers that a task of reasoning-gym would run as Python are harmless, or unreadable."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from posttrain.verify.gym import guard, is_formula, is_inert, scorer

FORMULAS = ("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication")
EVALUATED = ("binary_matrix", "spiral_matrix", "string_insertion", "n_queens")


def test_the_tasks_that_run_answers_are_found() -> None:
    """number_sorting evaluates its own answer only: the guard is in nobody's way."""
    found = {task: check for task in DATASETS if (check := guard(task)) is not None}
    assert found == dict.fromkeys(FORMULAS, is_formula) | dict.fromkeys((*EVALUATED, "number_sorting"), is_inert)


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


def test_an_integral_that_was_not_computed_is_no_answer() -> None:
    """Its derivative is the integrand, whatever that is; the task's own gold is one now and then."""
    score, kinds = scorer("intermediate_integration"), set()
    for entry in reasoning_gym.create_dataset("intermediate_integration", size=12, seed=9):
        open_end = "Integral" in entry["answer"]
        assert score(f"Integral({entry['metadata']['integrand']}, x)", entry) == float(open_end)
        kinds.add(open_end)
    assert kinds == {True, False}


@pytest.mark.parametrize("answer", ["nan", "NaN", "nan+nanj", "-inf", "nan + nani"])
def test_what_is_no_number_is_not_near_every_number(answer: str) -> None:
    for entry in reasoning_gym.create_dataset("complex_arithmetic", size=3, seed=2):
        assert scorer("complex_arithmetic")(answer, entry) == 0.0
        assert scorer("complex_arithmetic")(entry["answer"], entry) == 1.0


def test_an_answer_on_which_the_tasks_code_fails_is_wrong() -> None:
    entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=2)[0]
    assert scorer("prime_factorization")("two and two", entry) == 0.0
    assert scorer("prime_factorization")(entry["answer"], entry) == 1.0
    with pytest.raises(ValueError, match="two"):  # the row is what is wrong
        scorer("prime_factorization")("x", {**entry, "answer": "two"})


def test_a_list_in_place_of_a_matrix_keeps_its_part_of_the_credit() -> None:
    entry = reasoning_gym.create_dataset("binary_matrix", size=1, seed=3)[0]
    written = str([[int(cell) for cell in row.split()] for row in entry["answer"].split("\n")])
    assert scorer("binary_matrix")(written, entry) == 0.1


@pytest.mark.parametrize("text", ["[[0, 1], [-1, 2]]", "ABCD", "1 2 3", "Q _ _", "['a', 'b']", "", "if"])
def test_inert(text: str) -> None:
    assert is_inert(text)


@pytest.mark.parametrize("text", ["f()", "a.b", "a[0]", "9**9", "[0] * 10", "(x := 1)", "[x for x in y]", "f'{x()}'"])
def test_what_is_not_inert(text: str) -> None:
    assert not is_inert(text)


@pytest.mark.parametrize("text", ["94*4 - 61 - 6", "(8 - 5)×2", "-34*x**8/15 - 5*x/4 + C", "2.5*sin(x) + exp(-x^2)"])
def test_formulas(text: str) -> None:
    assert is_formula(text)


@pytest.mark.parametrize("text", ["x.real", "(1).real", "a[0]", "'a'", "lambda: 1", "_", "__name__", "x\\y", "٣"])
def test_no_formulas(text: str) -> None:
    assert not is_formula(text)
