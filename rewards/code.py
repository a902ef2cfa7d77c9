r"""Does the program pass its tests? Run in a sandbox: no network, no files but a scratch directory, limits.

rewards:
  - use: code.code_exec           # reads the column `tests`, or its JSON text
    timeout_s: 30                 # of the whole call; keep it above budget_s
    params: {mode: partial, budget_s: 20}

Tests are inputs with outputs, `[{"input": "2 3\n", "output": "5"}]`, or calls of a function or of a method of
`Solution`, `[{"fn_name": "add", "input": [2, 3], "output": 5}]`; also in the forms of APPS, TACO and PRIME (`{"inputs":
[...], "outputs": [...], "fn_name": ...}`) and LiveCodeBench (`testtype: functional`, JSON lines). Asserts (MBPP,
HumanEval, KodCode, AceCode, LeetCode) are read as calls, and what they check is checked outside of the program, which
could make its own asserts pass: docs/rewards.md says which can be read.

Partial credit gives signal where no program passes everything; binary leaves less to game. What the sandbox protects
from: docs/sandbox.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify import sandbox
from posttrain.verify.code import Mode, code_reward, read_any_tests, setup_in_prompt
from posttrain.verify.milestones import milestone_reward


def code_exec(
    completion: str,
    tests: Sequence[Mapping[str, Any] | str] | Mapping[str, Any] | str | None,
    entry_point: str | None = None,
    test_setup_code: str | None = None,
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    mode: Mode = "partial",
    timeout_s: float = 5.0,
    budget_s: float = 8.0,
    pass_weight: float = 0.1,
    no_code: float = -1.0,
    compile_fail: float = -0.1,
    memory_mb: int = 512,
    allow_unsandboxed: bool = False,
) -> dict[str, float | None] | None:
    """The share of tests that the last Python block after the thought passes (without one, the last block without a
    language); None without tests.

    mode: partial, binary (all or nothing), pass_fail (the same, stops at the first failure), weighted_sum (1 if all
    pass + pass_weight * share; no_code, compile_fail). timeout_s: of a test; budget_s: of all tests of a completion,
    which must be below the call's own limit. Output must be equal but for blanks at line ends and at the end; a line of
    numbers is compared as numbers, exactly. Returned values must be equal, floats within 1e-6.
    Of asserts, each, or each function `test_...`, is a test; entry_point names the function that `candidate` is, and
    test_setup_code runs before the program; without it the prompt does, if it is Python that defines entry_point
    (HumanEval). Asserts that cannot be read are left out and counted.
    allow_unsandboxed: run programs also where the machine has no namespaces. Logged parts: passed; of asserts also
    unread, the tests that could not be read.
    """
    found = code_reward(
        completion,
        tests,
        entry_point or "",
        test_setup_code or setup_in_prompt(messages, entry_point or ""),
        mode=mode,
        timeout_s=timeout_s,
        budget_s=budget_s,
        pass_weight=pass_weight,
        no_code=no_code,
        compile_fail=compile_fail,
        memory_mb=memory_mb,
        allow_unsandboxed=allow_unsandboxed,
    )
    return None if found["reward"] is None else found


def milestones(
    completion: str,
    milestones: Sequence[str] | None,
    score_pattern: str | None = None,
    stdin: str = "",
    *,
    base: float = -10.0,
    credit: float = 0.1,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    allow_unsandboxed: bool = False,
) -> dict[str, float] | None:
    """The score that the last Python block prints, else credit for how far it got: agents that write ML programs
    (2509.01684); None without milestones.

    milestones: regular expressions, each of a statement's source (`read_csv`, `\\.fit\\(`). After the first statement
    that one finds, a line is inserted that prints a mark with a random number, so that the program cannot print it
    itself; the paper lets a frozen model insert them. score_pattern: what the program prints when it has a result, with
    one group for the number; no such line: base + credit a milestone that was passed. Keep scores above base + credit *
    milestones. Logged part: matched.
    """
    if not milestones:
        return None
    return milestone_reward(
        completion,
        milestones,
        score_pattern,
        stdin=stdin,
        base=base,
        credit=credit,
        timeout_s=timeout_s,
        memory_mb=memory_mb,
        allow_unsandboxed=allow_unsandboxed,
    )


def CHECK(function: str, params: Mapping[str, Any]) -> list[str]:
    """Nothing runs where there is no sandbox."""
    return sandbox.problems(params)


def setup() -> None:
    """Called once in each worker, outside the time limit of a call."""
    sandbox.isolation()


_TESTS = [{"input": "2 3\n", "output": "5\n"}, {"input": "-1 1\n", "output": "0"}]
_FAR = {"milestones": [r"input\(", "print"], "stdin": "2 3\n"}
_CALLS = {"inputs": [[2, 3], [-1, 1]], "outputs": [5, 0], "fn_name": "add"}
_CHECK = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n"
_SUM = "Here it is:\n```python\na, b = map(int, input().split())\nprint(%s)\n```"

EXAMPLES = {
    "code_exec": [
        (_SUM % "a + b", {"tests": _TESTS}, {"reward": 1.0, "passed": 2.0}),
        (_SUM % "abs(a) + abs(b)", {"tests": _TESTS}, 0.5),
        (_SUM % "abs(a) + abs(b)", {"tests": _TESTS}, 0.05, {"mode": "weighted_sum"}),
        (_SUM % "a + b); print('debug'", {"tests": _TESTS}, 0.0, {"mode": "binary"}),
        (_SUM % "a +", {"tests": _TESTS}, -0.1, {"mode": "weighted_sum"}),
        ("```python\ndef add(a, b):\n    return a + b\n```", {"tests": _CALLS}, {"reward": 1.0, "passed": 2.0}),
        ("```\ndef add(a, b):\n    return abs(a) + abs(b)\n```", {"tests": _CALLS}, 0.5),
        (
            "```python\ndef add(a, b):\n    return a + b\n```",
            {"tests": _CHECK, "entry_point": "add"},
            {"reward": 1.0, "passed": 2.0, "unread": 0.0},
        ),
        (
            "```python\ndef add(a, b):\n    return 5\n```",
            {"tests": ["assert add(2, 3) == 5", "assert add(1, 1) == 2"]},
            0.5,
        ),
        (
            "```python\ndef twice(x):\n    return plus(x, x)\n```",
            {
                "tests": "def check(candidate):\n    assert candidate(2) == 4\n",
                "entry_point": "twice",
                "messages": [
                    {
                        "role": "user",
                        "content": 'def plus(a, b):\n    return a + b\n\n\ndef twice(x):\n    """Use `plus`."""\n',
                    }
                ],
            },
            {"reward": 1.0, "passed": 1.0, "unread": 0.0},
        ),
        ("Just add them.", {"tests": _TESTS}, -1.0, {"mode": "weighted_sum"}),
        ("", {"tests": _TESTS}, 0.0),
        ("", {"tests": []}, None),
    ],
    "milestones": [
        (_SUM % "a + b", _FAR | {"score_pattern": r"^(\d+)$"}, {"reward": 5.0, "matched": 2.0}),
        (_SUM % "a + b); print(1 / 0", _FAR, {"reward": -9.8, "matched": 2.0}),
        (_SUM % "1 / 0", _FAR, {"reward": -9.9, "matched": 1.0}),
        ("```python\nprint('<milestone 0>')\n```", _FAR, {"reward": -9.9, "matched": 1.0}),
        ("```python\na +\n```", _FAR, {"reward": -10.0, "matched": 0.0}),
        ("", _FAR, -10.0),
        ("", {"milestones": None}, None),
    ],
}


def GOLD(row: Mapping[str, Any]) -> str | None:
    """A completion whose program is the row's `answer`."""
    return None if row.get("answer") is None else f"<think>so</think>\n```python\n{row['answer']}\n```"


def _doubt(row: Mapping[str, Any], **_: Any) -> str:
    entry_point, asked = row.get("entry_point") or "", [{"role": "user", "content": row.get("prompt")}]
    setup = row.get("test_setup_code") or setup_in_prompt(asked, entry_point)
    try:
        unread = read_any_tests(row.get("tests"), entry_point, setup)[1]
    except ValueError as error:
        return f"cannot be checked: {error}"
    reasons = ", ".join(sorted(unread or ()))
    return f"are checked without those tests that cannot be read ({reasons})" if reasons else ""


DOUBT = {"code_exec": _doubt}

_ROWS: list[dict[str, Any]] = [
    {"prompt": "Add.", "tests": _TESTS, "answer": "a, b = map(int, input().split())\nprint(a + b)"},
    {"prompt": "Double.", "tests": [{"input": "4", "output": "8"}], "answer": "print(int(input()) * 2)"},
    {
        "prompt": "Write `plus`.",
        "tests": ["assert plus(2, 3) == 5", "assert plus(-1, 1) == 0"],
        "answer": "def plus(a, b):\n    return a + b",
    },
    {"prompt": "Write `add`.", "tests": _CALLS, "answer": "def add(a, b):\n    return a + b"},
]

ROWS = {
    "code_exec": _ROWS,
    "milestones": {
        "rows": [{**row, **_FAR, "score_pattern": r"^(\d+)$"} for row in _ROWS],
        "correct": "code.code_exec",
    },
}
