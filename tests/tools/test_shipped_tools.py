"""Every shipped tool does what its EXAMPLES say."""

from __future__ import annotations

from pathlib import Path

import pytest

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
