"""Every shipped tool does what its EXAMPLES say."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import ToolError
from posttrain.places import shipped
from posttrain.recipe.rollout_sections import Tool
from posttrain.registry import load_module
from posttrain.tools.load import load_tool
from posttrain.verify.sandbox import isolation

FILES = sorted(shipped("tools").glob("*.py"))


def test_there_are_tools() -> None:
    assert [path.stem for path in FILES] == ["calculator", "python", "search", "sql"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_examples(path: Path, tmp_path: Path) -> None:
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
            assert function(**given, **params) == expected


def test_the_python_tool_is_refused_where_there_is_no_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run, and with what to do; accepted limits are the user's choice."""
    monkeypatch.setattr("posttrain.verify.sandbox.isolation", lambda: "limits")
    with pytest.raises(ToolError, match=r"no sandbox .*allow_unsandboxed: true"):
        load_tool(Tool(use="python"), tmp_path)
    assert load_tool(Tool(use="python", params={"allow_unsandboxed": True}), tmp_path).name == "python"
