"""Rewards that run programs against tests."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.verify import code, sandbox
from posttrain.verify.code import code_reward, program_in
from posttrain.verify.code_tests import output_lines


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace program execution: `echo` returns its input, `broken` does not compile, `x` hangs; runs are recorded."""
    ran: list[str] = []

    def run(program: str, stdin: str = "", **_: Any) -> sandbox.Finished:
        ran.append(program)
        if program == code._COMPILES:
            return sandbox.Finished("ended", int("broken" in stdin), "", "", 0.0)
        hangs, fails = program.startswith("x"), program.startswith("broken")
        return sandbox.Finished("timeout" if hangs else "ended", int(fails), stdin, "", 0.0)

    monkeypatch.setattr(code, "run_python", run)
    return ran


def written(program: str) -> str:
    return f"```python\n{program}\n```"


TESTS = [{"input": "1", "output": "1\n"}, {"input": "2", "output": "3"}, {"input": "4", "output": "4"}]


def test_program_is_the_last_python_block_after_the_thought() -> None:
    thought = "<think>```python\nthought\n```</think>"
    assert program_in(thought + written("a") + "```\nno\n```" + "```py\nb\n```" + "```json\n{}\n```") == "b\n"
    assert program_in(thought) is None
    assert program_in("```python\n \n```") is None
    assert program_in("```python\nunclosed") is None


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("<think>\n" + written("a"), None),
        ("<think>b</think>c<think>" + written("a"), None),
        (written("a") + "\n<think>\n" + written("b"), "a\n"),
        (written("a") + "\n<think>\n" + written("b") + "</think>", None),
        (written("print('<think>')"), "print('<think>')\n"),
        (written("print('<think>')") + "\n" + written("b"), "b\n"),
        ("so</think>" + written("a"), "a\n"),  # the prompt opened the thought
        (written("a"), "a\n"),
    ],
)
def test_unclosed_thought_contains_no_program(completion: str, program: str | None) -> None:
    assert program_in(completion) == program


def test_outputs_are_compared_without_trailing_whitespace() -> None:
    assert output_lines("a \nb\n\n") == output_lines("a\nb")
    assert output_lines("\n \na\nb") == output_lines("a\nb")
    assert output_lines(" a") != output_lines("a")
    assert output_lines("\n a") != output_lines("a")
    assert output_lines("a\n\nb") != output_lines("a\nb")
    assert output_lines("5\ndebug") != output_lines("5")


@pytest.mark.parametrize(
    ("mode", "reward"), [("partial", 2 / 3), ("binary", 0.0), ("pass_fail", 0.0), ("weighted_sum", 0.2 / 3)]
)
def test_modes(runs: list[str], mode: Any, reward: float) -> None:
    found = code_reward(written("echo"), TESTS, mode=mode)
    assert found["reward"] == pytest.approx(reward)
    assert len(runs) == (2 if mode == "pass_fail" else 3)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("mode", "reward"), [("partial", 1.0), ("binary", 1.0), ("pass_fail", 1.0)])
def test_all_pass(mode: Any, reward: float) -> None:
    assert code_reward(written("echo"), TESTS[:1], mode=mode) == {"reward": reward, "passed": 1.0}


@pytest.mark.usefixtures("runs")
def test_weighted_sum_distinguishes_no_program_compile_error_and_failure() -> None:
    def reward(text: str) -> float | None:
        return code_reward(text, TESTS, mode="weighted_sum")["reward"]

    assert reward("no code") == -1.0
    assert reward(written("broken")) == -0.1
    assert reward(written("x")) == 0.0
    assert code_reward(written("echo"), TESTS[:1], mode="weighted_sum", pass_weight=0.5)["reward"] == 1.5


def test_row_without_tests_has_no_score_and_nothing_runs(runs: list[str]) -> None:
    assert code_reward(written("echo"), [])["reward"] is None
    assert code_reward(written("echo"), None)["reward"] is None
    assert runs == []


def test_tests_beyond_the_time_budget_fail(runs: list[str]) -> None:
    assert code_reward(written("echo"), TESTS, budget_s=0.0) == {"reward": 0.0, "passed": 0.0}
    assert runs == []


def test_real_program_that_exits_early_or_prints_extra_output() -> None:
    one = [{"input": "", "output": "5"}]

    def reward(program: str) -> float | None:
        return code_reward(written(program), one, timeout_s=20.0, allow_unsandboxed=True)["reward"]

    assert reward("print(5)") == 1.0
    assert reward("print(5); import sys; sys.exit(1)") == 0.0
    assert reward("import os; os._exit(0)") == 0.0
    assert reward("print(5); print('debug')") == 0.0


def test_unknown_mode_is_reported() -> None:
    with pytest.raises(ValueError, match="known: partial"):
        code_reward("", TESTS, mode="all")  # type: ignore[arg-type]
