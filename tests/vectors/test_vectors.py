"""The product's formulas reproduce the numbers of the vector files in this folder."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
METHODS = sorted(p.stem for p in HERE.glob("*.json") if p.name != "interface.json")


def test_files_adapters_and_interface_name_the_same_methods(
    adapters: dict[str, Any], vectors: dict[str, Any], interface: dict[str, Any]
) -> None:
    assert len(METHODS) >= 20
    assert sorted(vectors) == METHODS
    assert sorted({name.partition(".")[0] for name in adapters}) == METHODS  # METHOD.OP is a companion function
    assert sorted(interface) == METHODS


@pytest.mark.parametrize("method", METHODS)
def test_vectors(
    method: str, runner: ModuleType, adapters: Any, vectors: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict, computed = runner.check(adapters, method, vectors[method])
    assert verdict == "passed", capsys.readouterr().err
    assert [c["name"] for c in computed] == [c["name"] for c in vectors[method]]


@pytest.mark.parametrize("method", METHODS)
def test_defaults_match_the_interface(
    method: str, runner: ModuleType, adapters: Any, vectors: Any, interface: Any
) -> None:
    """A case that omits a parameter and one that gives its documented default compute the same."""
    for case in vectors[method]:
        params = {**defaults(interface[method]["params"], case["params"]), **case["params"]}
        inputs = {**defaults(interface[method]["inputs"], {}), **case["inputs"]}
        if case.get("op"):  # the interface tells the defaults of the method, not of its companions
            continue
        filled = {**case, "params": params, "inputs": inputs}
        assert runner.compute(adapters, method, filled) == runner.compute(adapters, method, case)


@pytest.mark.parametrize("method", METHODS)
def test_every_output_of_the_interface_is_computed(
    method: str, runner: ModuleType, adapters: Any, vectors: Any, interface: Any
) -> None:
    """Except outputs that only cases of companions and variants expect."""
    everywhere = {name for case in vectors[method] for name in case["expected"]}
    for case in vectors[method]:
        others = everywhere - case["expected"].keys()
        assert interface[method]["outputs"].keys() - others <= runner.compute(adapters, method, case).keys()


def defaults(described: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """name -> documented default, as JSON. `lo` is the value of epsilon; required ones have none."""
    found: dict[str, Any] = {}
    for name, entry in described.items():
        text = entry.get("default", "required")
        if text in ("lo", "params['epsilon']"):
            found[name] = given["epsilon"]
        elif text != "required":
            found[name] = json.loads(json.dumps(ast.literal_eval(text)))
    return found
