"""Test formats of data sets: rLLM, open-r1, LiveCodeBench's runner, and APPS as verl reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from posttrain.verify.code import code_reward, program_in
from posttrain.verify.code_tests import ProgramTest, read_tests, same_output, same_value

ADD = "def add(a, b):\n    return a + b\n"
LIVE = {"input": "[5, 3, 10, 8, 2]\n5", "output": "3", "testtype": "functional", "metadata": {"func_name": "count"}}
COUNT = (
    "class Solution:\n"
    "    def count(self, hours: List[int], target: int) -> int:\n"
    "        return sum(hour >= target for hour in hours)\n"
)


@pytest.mark.parametrize(
    ("tests", "read"),
    [
        ([{"input": "2 3\n", "output": 5}], [ProgramTest("2 3\n", "5")]),
        ([{"input": "2\n", "output": "5", "testtype": "stdin", "fn_name": None}], [ProgramTest("2\n", "5")]),
        ([{"input": ["2", "3"], "output": ["5"], "type": "stdin_stdout"}], [ProgramTest("2\n3", "5")]),
        ({"inputs": ["1", "2"], "outputs": ["3", "4"]}, [ProgramTest("1", "3"), ProgramTest("2", "4")]),
        ([{"input": "2\n", "output": "5", "metadata": "from a contest"}], [ProgramTest("2\n", "5")]),
        ([LIVE], [ProgramTest([[5, 3, 10, 8, 2], 5], 3, "count")]),
        ([LIVE | {"metadata": '{"func_name": "count"}'}], [ProgramTest([[5, 3, 10, 8, 2], 5], 3, "count")]),
        ({"inputs": [[2, 3]], "outputs": [[5]], "fn_name": "add"}, [ProgramTest([2, 3], [5], "add", wrapped=True)]),
        ([{"type": "function_call", "fn_name": "f", "input": [[1]], "output": 2}], [ProgramTest([[1]], 2, "f")]),
        ([], []),
    ],
)
def test_each_format_is_also_read_from_json_text(tests: Any, read: list[ProgramTest]) -> None:
    assert read_tests(tests) == read_tests(json.dumps(tests)) == read


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ([{**LIVE, "metadata": {}}], "does not name it: add `fn_name`"),
        ([1], "must have `input` and `output`"),
        ({"inputs": ["1"], "outputs": []}, "as many `inputs` as `outputs`"),
        ({"input": "1", "output": "2"}, "as many `inputs` as `outputs`"),
        ([{"input": "1", "output": "2", "type": "interactive"}], "known: stdin"),
        ([{"input": {"a": 1}, "output": 2, "fn_name": "f"}], "list of arguments"),
        ([{"input": "a, b", "output": "2", "fn_name": "f"}], "must be JSON"),
    ],
)
def test_format_that_would_fail_every_program_is_refused(tests: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_tests(tests)


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        (COUNT, [LIVE], 1),
        (COUNT.replace(">=", ">"), [LIVE], 0),
        (ADD, {"inputs": [[2, 3], [1, 1]], "outputs": [[5], 2], "fn_name": "add"}, 2),
        (ADD + "print('shown', end='')", {"inputs": [[0.1, 0.2]], "outputs": [0.3], "fn_name": "add"}, 1),
        (ADD + "if __name__ == '__main__':\n    print(input())", {"inputs": [["a", "b"]], "outputs": ["ab"],
         "fn_name": "add"}, 1),
        ("from __future__ import annotations\ndef f(a):\n    return a, (a,)", [{"fn_name": "f", "input": [1],
         "output": [1, [1]]}], 1),
        ("class Same:\n    def __eq__(self, other): return True\ndef f(a): return Same()", [{"fn_name": "f",
         "input": [1], "output": 1}], 0),
        ("import os, sys\ndef f(a):\n    print(sys.stdin.read())\n    os._exit(0)", [{"fn_name": "f", "input": [1],
         "output": 1}], 0),
        ("def g(a): return a", [{"fn_name": "f", "input": [1], "output": 1}], 0),
        ("print('0.50', 2)", [{"input": "", "output": "0.5 2.0"}], 1),
    ],
)  # fmt: skip
def test_programs_run_on_each_format(program: str, tests: Any, passed: int) -> None:
    found = code_reward(f"```python\n{program}\n```", tests, timeout_s=20.0, allow_unsandboxed=True)
    assert found["passed"] == passed


def test_numbers_in_a_line_are_compared_as_in_livecodebench() -> None:
    assert same_output("0.50 1e1", "0.5 10")
    assert not same_output("0.500001", "0.5")
    assert not same_output("50000000000000000", "50000000000000001")
    assert not same_output("1 2", "1\n2")
    assert not same_output("a  b", "a b")
    assert not same_output("", "0")


def test_returned_values_keep_their_types() -> None:
    assert same_value([0.1 + 0.2, {"a": 1}], [0.3, {"a": 1.0}])
    assert not same_value(True, 1.0)
    assert not same_value(1.00001, 1)
    assert not same_value("1", 1)
    assert not same_value([1], [1, 2])


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("Here:\n```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)\n"),
        ("```python\nprint('```js')\n```", "print('```js')\n"),
        ("```python\nmain()\n    ```\n", "main()\n"),
        ("```python\nprint(1)```", "print(1)"),
        ("```cpp\nint main() {}\n```", None),
        ("print(1)", None),
    ],
)
def test_unmarked_code_block_is_the_program_if_none_is_marked_python(completion: str, program: str | None) -> None:
    assert program_in(completion) == program
