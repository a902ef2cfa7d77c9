"""Every shipped tool passes its EXAMPLES."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from posttrain.errors import ToolError
from posttrain.images import join_parts, split_pictures
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.tool_sections import Tool
from posttrain.registry import load_module
from posttrain.tools.load import load_tool
from posttrain.verify.sandbox import isolation

FILES = sorted(shipped_folder("tools").glob("*.py"))


def test_tools_are_shipped() -> None:
    assert [path.stem for path in FILES] == ["calculator", "crop", "python", "search", "search_world", "sql"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples_of_shipped_tools(path: Path, tmp_path: Path) -> None:
    if path.stem == "python" and isolation() != "namespaces":
        pytest.skip("this machine offers no namespaces")
    script = load_module(path)
    fixed = script.sample(tmp_path) if hasattr(script, "sample") else {}
    tool = load_tool(Tool(use=path.stem, params=fixed), tmp_path)
    assert tool.schema["function"]["description"]
    function = getattr(script, path.stem)
    assert len(script.EXAMPLES) >= 3
    for given, expected, *more in script.EXAMPLES:
        params = {**fixed, **(more[0] if more else {})}
        if isinstance(expected, type):
            with pytest.raises(expected):
                function(**given, **params)
        else:
            assert join_parts(split_pictures(function(**given, **params), 1 << 20))[0] == expected


def test_python_tool_is_refused_without_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run, with a hint; the user can accept limits only."""
    monkeypatch.setattr("posttrain.verify.sandbox.isolation", lambda: "limits")
    with pytest.raises(ToolError, match=r"no sandbox .*allow_unsandboxed: true"):
        load_tool(Tool(use="python"), tmp_path)
    assert load_tool(Tool(use="python", params={"allow_unsandboxed": True}), tmp_path).name == "python"


CALCULATOR = load_module(shipped_folder("tools") / "calculator.py").calculator
TOO_MUCH = [
    "round(7, -10**8)", "round(7.5, 10**9)", "round(1, -(10**300))", "9**9**9", "(-9)**9**9", "2**10**400", "10**310",
    "10**300 * 10**300", "(10**300) * (10**300) % 7", "9" * 400, "9" * 2500, "(" * 900 + "1" + ")" * 900,
    "-" * 1500 + "1",
    "+".join(["1"] * 900), "1 << 10**9", "factorial(10**9)", "math.factorial(99999)", "'a' * 10**9", "[0] * 10**9",
    "str(10**5000)", "max(" * 300 + "1" + ")" * 300, "(10**299 + 1)**10**6", "2.0**10**9", "1e308 * 1e308 ** 1e308",
    "abs(9**9**9)", "sqrt(10**400)", "log(10**400)", "min(10**400, 1)", "(1,) * 10**9", "lambda: 1", "True",
    "pow(9, 9**9)",
]  # fmt: skip


@pytest.mark.parametrize("expression", TOO_MUCH)
def test_calculator_bounds_its_work(expression: str) -> None:
    started = time.process_time()
    with pytest.raises((ValueError, ArithmeticError, SyntaxError)):
        CALCULATOR(expression)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("+".join(["1"] * 300), "300"),
        ("10**300", str(10**300)),
        ("round(12345.678, -2)", "12300"),
        ("round(2.5)", "2"),
        ("round(1234, -2)", "1200"),
        ("2**-1", "0.5"),
        ("(-8)**3", "-512"),
        ("0.5**2000", "0"),
        ("1**(10**300)", "1"),
        ("7 % -3", "-2"),
    ],
)
def test_calculator_results(expression: str, value: str) -> None:
    assert CALCULATOR(expression) == value
