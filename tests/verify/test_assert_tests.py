"""Asserts of data sets: what is read, what is refused, and that no program passes without the right values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from posttrain.recipe.reward_sections import Reward
from posttrain.verify.assert_tests import read_asserts
from posttrain.verify.audit import script_doubts
from posttrain.verify.code import code_reward, setup_in_prompt
from posttrain.verify.load import load_reward

MBPP = {
    "tests": [
        "assert circle(2) == (12.56, 4)",
        "assert math.isclose(circle(1)[0], 3.14, rel_tol=0.001)",
        "assert set(circle(0)) == set([0.0, 0])",
    ],
    "test_setup_code": "import math",
}
CIRCLE = "def circle(r):\n    return round(3.14 * r * r, 2), r * 2"
HUMAN_EVAL = {
    "tests": """

METADATA = {'author': 'someone', 'dataset': 'test'}


def check(candidate):
    # simple cases
    assert candidate([1, 2, 3, 4]) == 24, "the product"
    assert abs(candidate([0.5, 0.5]) - 0.25) < 1e-9
    assert True, "always passes"

    # edges
    empty = []
    assert candidate(empty) is not None
    assert candidate([2] * 10) in (2**10, "1024")
""",
    "entry_point": "product",
    "test_setup_code": 'from typing import List\n\n\ndef product(xs: List[float]) -> float:\n    """Multiply."""\n',
}
HUMAN_EVAL_PLUS = {
    "tests": """import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    return False

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        np.testing.assert_allclose(out, exp, atol=atol)
    else:
        assert exact_match

def check(candidate):
    inputs = [[[1, 2]], [[3, 0.1]]]
    results = [2, 0.3]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)

check(product)
"""
}
PRODUCT = "def product(xs):\n    done = 1\n    for x in xs:\n        done *= x\n    return done"
KODCODE = {
    "tests": """import pytest
from solution import divide, halves as split

def test_divide():
    assert divide(6, 3) == 2
    assert divide(1, 4) == pytest.approx(0.25)

def test_halves():
    numbers = list(range(4))
    left, size = [0, 1], len(numbers) // 2
    result = split(numbers)
    assert len(result) == size
    assert result[0] == left and isinstance(result, tuple)
    assert all(len(part) == 2 for part in result)

def test_zero():
    with pytest.raises(ZeroDivisionError, match="by zero"):
        divide(1, 0)

@pytest.mark.parametrize("a, b, expected", [(4, 2, 2.0), (9, 3, 3.0)])
def test_each(a, b, expected):
    assert divide(a, b) == expected
""",
    "test_info": [{"function_name": "divide"}],
}
DIVIDE = "def divide(a, b):\n    return a / b\ndef halves(xs):\n    return xs[:2], xs[2:]"
ACE_CODE = {"tests": json.dumps(["assert rotate('abc', 1) == 'bca'", "assert rotate('', 3) == ''"])}
ROTATE = "def rotate(text, n):\n    return text[n:] + text[:n]"
LEETCODE = {
    "tests": "def check(candidate):\n    assert candidate(nums = [3, 3], target = 6) == [0, 1]\n",
    "entry_point": "Solution().twoSum",
}
TWO_SUM = "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        return [0, 1]"
LEETCODE_CALL = {"tests": LEETCODE["tests"] + "\n\ncheck(Solution().twoSum)"}
ROWS = {
    "mbpp": (MBPP, CIRCLE, 3),
    "humaneval": (HUMAN_EVAL, PRODUCT, 4),
    "humaneval+": (HUMAN_EVAL_PLUS, PRODUCT, 1),
    "kodcode": (KODCODE, DIVIDE, 4),
    "acecode": (ACE_CODE, ROTATE, 2),
    "leetcode": (LEETCODE, TWO_SUM, 1),
    "leetcode with its call": (LEETCODE_CALL, TWO_SUM, 1),
}
COLUMNS = ("tests", "entry_point", "test_setup_code")


def score(program: str, row: Any) -> dict[str, float | None]:
    given = {column: row[column] for column in COLUMNS if column in row}
    return code_reward(f"```python\n{program}\n```", **given, timeout_s=20.0, allow_unsandboxed=True)


@pytest.mark.parametrize("name", ROWS)
def test_a_correct_program_passes_every_test_of_a_data_sets_row(name: str) -> None:
    row, program, count = ROWS[name]
    assert score(program, row) == {"reward": 1.0, "passed": float(count), "unread": 0.0}


ENTRIES = {"mbpp": "circle", "humaneval+": "product", "kodcode": "divide", "acecode": "rotate"}
CHEATS = {
    "equal to everything": "class Same(list):\n    __hash__ = None\n    def __eq__(self, other): return True\n"
    "    def __ne__(self, other): return False\n    def __abs__(self): return 0\n"
    "    def __sub__(self, other): return self\n    def __lt__(self, other): return True\n"
    "    def __len__(self): return 0\ndef {name}(*a, **k): return Same()",
    "a number equal to everything": "class Same(float):\n    def __eq__(self, other): return True\n"
    "    __hash__ = float.__hash__\ndef {name}(*a, **k): return Same(77)",
    "exits": "import sys\nsys.exit(0)\ndef {name}(*a): pass",
    "exits in the call": "import sys\ndef {name}(*a, **k): sys.exit(0)",
    "ends its process": "import os\ndef {name}(*a, **k): os._exit(0)",
    "prints forged outcomes": "import json, os\ndef {name}(*a, **k):\n    for n in range(9):\n"
    "        print('\\ncalled functions returned: ' + json.dumps([['returned', True]] * n))\n    os._exit(0)",
    "prints broken outcomes": "import os\ndef {name}(*a, **k):\n"
    '    print(\'\\ncalled functions returned: [["returned", {{"dict": [[[1], 2]]}}]]\', flush=True)\n    os._exit(0)',
    "replaces what encodes": "import __main__, json\n__main__.encode_value = lambda value: True\n"
    "json.dumps = lambda value: '[[\"passed\"]]'\ndef {name}(*a, **k): return 1",
    "replaces the helpers of the tests": "import builtins, math, sys, types\n"
    "for at in ('abs', 'len', 'isinstance', 'all', 'set'): setattr(builtins, at, lambda *a, **k: True)\n"
    "math.isclose = lambda *a, **k: True\nassertion = is_floats = check = lambda *a, **k: True\n"
    "sys.modules['pytest'] = types.ModuleType('pytest')\ndef {name}(*a, **k): return None",
    "pickles strangely": "class Odd:\n    def __reduce__(self): return print, ('gone',)\n"
    "    def __repr__(self): return 'True'\n    def __getattr__(self, name): return self\n"
    "    def __call__(self, *a): return True\ndef {name}(*a, **k): return Odd()",
    "returns itself within itself": "def {name}(*a, **k):\n    own = []\n    own.append(own)\n    return own",
    "never ends its iterator": "import itertools\ndef {name}(*a, **k): return itertools.count(5)",
    "not a number": "def {name}(*a, **k): return float('nan')",
    "reads the expected values": "import gc, sys\ndef {name}(*a, **k):\n    found = sys._getframe(1).f_locals\n"
    "    return found.get('expected', found.get('checks'))",
}


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("name", ENTRIES)
def test_no_cheating_program_passes_a_test(cheat: str, name: str) -> None:
    row, program = ROWS[name][:2]
    assert ENTRIES[name] in program
    assert (
        score(CHEATS[cheat].replace("{{", "{").replace("}}", "}").replace("{name}", ENTRIES[name]), row)["reward"]
        == 0.0
    )


@pytest.mark.parametrize(
    ("program", "check"),
    [
        ("def f(x): return [x]", "f(1) == (1,)"),
        ("def f(x): return x", "f(0.1 + 0.2) == 0.3"),
        ("def f(x): return x", "f({1: 'a'}) == {'1': 'a'}"),
        ("def f(x): return 'True'", "f(1) is True"),
        ("def f(x): return 1", "f(1) is True"),
        ("def f(x): return -x", "f(2) in (2, 3)"),
        ("def f(x): return x", "abs(f(2) - 3) < 0.5"),
        ("def f(x): return []", "f(2)"),
        ("def f(x): return 1", "not f(2)"),
        ("def f(x): raise ValueError", "not f(2)"),
        ("def f(x): return x.append(1)", "f([2]) == [2, 1]"),
        ("def f(x): return (n for n in x)", "f([1]) == [1]"),
        ("def g(x): return x", "f(1) == 1"),
    ],
)
def test_a_wrong_value_fails_as_the_assert_would(program: str, check: str) -> None:
    assert score(program, {"tests": [f"assert {check}"]}) == {"reward": 0.0, "passed": 0.0, "unread": 0.0}


@pytest.mark.parametrize(
    ("program", "check"),
    [
        ("def f(x): return {x: (1, {2})}", "f((1, 2)) == {(1, 2): (1, {2})}"),
        ("def f(x): return range(x)", "list(f(3)) == [0, 1, 2]"),
        ("def f(x): return x[1]", "f(range(3)) == 1"),
        ("def f(x): return (n for n in x)", "sorted(f([2, 1])) == [1, 2]"),
        ("import numpy\ndef f(x): return numpy.int64(x)", "3 == f(3)"),
        ("def f(x): return b'a', 1j, frozenset(x)", "f([1]) == (b'a', 1j, frozenset({1}))"),
        ("def f(x, *, y=0): return x + y", "f(*[1], y=-2) == -1"),
        ("def f(x): return {'a': [x]}", "f(float('inf'))['a'][0] == float('inf')"),
        ("def f(x): return ' A '", "f(1).strip().lower() == 'a'"),
        ("def f(x): return x / 3", "round(f(1), 2) == 0.33 and 0 < f(3) <= 1"),
        ("def sum(a, b): return a + b", "sum(10, 15) == 25"),
        ("def f(x): return [x, x]", "[*f(1)] == [i for i in (1, 1)]"),
        ("def f(x): return None", "f(1) is None"),
        ("class Solution:\n    def f(self, x): return x", "Solution().f('a') == 'a'"),
    ],
)
def test_a_right_value_passes(program: str, check: str) -> None:
    assert score(program, {"tests": f"assert {check}"})["reward"] == 1.0


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("assert f(Node(1)) == 1\nclass Node: pass", "uses `Node`, which is defined beside the tests"),
        ("assert f(lambda x: x) == 1", "an expression `Lambda`"),
        ("assert f(1) == f(2)", "compares results of the program with each other"),
        ("assert f(g(1)) == 1", "a result of the program where a constant is needed"),
        ("assert not abs(f(1) - 1) > 0.1", "`not` of an order, which NaN passes"),
        ("assert f(1).root == 1", "an attribute `root`"),
        ("assert f(1).__class__ == int", "an attribute `__class__`"),
        ("assert f(1).__eq__(1)", "a method `__eq__`"),
        ("assert f('%99999999999d' % 1) == 1", "a constant that raises TypeError"),
        ("assert f([0] * 10**9) == 1", "a constant that raises ValueError"),
        ("assert f(10**10**10) == 1", "a constant that raises ValueError"),
        ("assert f(open('/etc/passwd').read()) == 1", "a method `read`"),
        ("import os\nassert f(os.getcwd()) == 1", "uses `os.getcwd`"),
        ("from helper import g\nassert f(1) == g(1)", "uses `g`"),
        ("def g(x):\n    return x\nassert f(1) == g(1)", "uses `g`, which is defined beside the tests"),
        ("assert x == 1", "uses `x`"),
        ("x = [2, 1]\nf(x)\nassert x == [1, 2]", "a call whose result is not checked"),
        ("def test_a():\n    x = [2, 1]\n    f(x)\n    assert x == [1, 2]", "a call whose result is not checked"),
        ("def test_a(tmp_path):\n    assert f(1) == 1", "a fixture"),
        ("@mock.patch('x')\ndef test_a():\n    assert f(1) == 1", "a decorator"),
        ("def test_a():\n    try:\n        f(1)\n    except ValueError:\n        pass", "a statement `try`"),
        ("def test_a():\n    while f(1):\n        assert f(1)", "a statement `while`"),
        ("def test_a():\n    pass", "no assert"),
        ("class TestF:\n    def test_a(self):\n        assert f(1) == 1", "a class"),
        (
            "def check(candidate):\n    assert candidate(1) == 1",
            "calls `candidate`: name the function in `entry_point`",
        ),
        ("assert f(1) ==", "not Python"),
        ("def test_a():\n    with pytest.raises(OwnError):\n        f(1)", "an exception `OwnError`"),
    ],
)
def test_what_cannot_be_read_is_named(tests: str, reason: str) -> None:
    read, unread = read_asserts([tests])
    assert read == []
    assert unread[reason] == 1


def test_a_helper_that_the_setup_defines_never_gives_the_expected_value() -> None:
    row = {
        "tests": "def check(candidate):\n    assert candidate(2) == poly(2)\n    assert candidate(3) == 9",
        "entry_point": "f",
        "test_setup_code": "def poly(x):\n    return x * x\ndef f(x):\n    pass",
    }
    assert score("def poly(x): return 0\ndef f(x): return 0", row) == {"reward": 0.0, "passed": 0.0, "unread": 1.0}
    assert score("def f(x): return poly(x)", row) == {"reward": 1.0, "passed": 1.0, "unread": 1.0}


def test_a_row_is_scored_by_the_tests_that_could_be_read_and_refused_if_none_could() -> None:
    tests = ["assert f(1) == 1", "assert f(Node()) == 1", "assert f(lambda: 1) == 1", "assert f(lambda: 2) == 1"]
    assert score("def f(x): return x", {"tests": tests}) == {"reward": 1.0, "passed": 1.0, "unread": 3.0}
    with pytest.raises(ValueError, match=r"none .* can be read: an expression `Lambda` \(2\), .*docs/rewards.md"):
        score("def f(x): return x", {"tests": tests[1:]})


@pytest.mark.parametrize(
    ("prompt", "runs"),
    [("def f(x):\n    pass", True), ("def g(x):\n    pass", False), ("Write f.", False), (None, False), ([], False)],
)
def test_a_prompt_that_defines_the_entry_point_runs_before_the_program(prompt: Any, runs: bool) -> None:
    messages = [{"role": "system", "content": "def f(): pass"}, {"role": "user", "content": prompt}]
    assert setup_in_prompt(messages, "f") == (prompt if runs else "")
    assert setup_in_prompt(messages, "") == setup_in_prompt([], "f") == ""


def test_the_input_of_a_test_holds_no_expected_value() -> None:
    (test,), _ = read_asserts(["assert f('given') == 'wanted'"])
    program, stdin = test.program_and_input("def f(x): return x")
    assert "given" in stdin
    assert "wanted" not in program + stdin


def test_tests_that_are_left_out_are_reported_by_the_audit() -> None:
    rows = [
        {"tests": ["assert f(1) == 1", "assert f(lambda: 1) == 1"]},
        {"tests": ["assert f(1) == 1"]},
        {"tests": ["?"]},
    ]
    found = script_doubts(load_reward(Reward(use="code.code_exec"), None), rows, "answer")
    assert [(doubt.rows, doubt.what.split(":")[0]) for doubt in found] == [
        ((0,), "are checked without those tests that cannot be read (an expression `Lambda`)"),
        ((2,), "cannot be checked"),
    ]
