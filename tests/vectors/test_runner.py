"""The runner detects errors: a number off by 1%, a missing key, an unknown id, a case that raises."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
METHODS = sorted(p.stem for p in HERE.glob("*.json") if p.name != "interface.json")


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every number and text inside a JSON value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers(item, (*path, index))
    elif isinstance(value, (int, float, str)):
        yield path


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """Return a copy with the number at `path` 1% off; 0 and values close to 0 become 0.01.

    A text gets another ending.
    """
    value = copy.deepcopy(value)
    holder = value
    for step in path[:-1]:
        holder = holder[step]
    old = holder[path[-1]]
    if isinstance(old, str):
        holder[path[-1]] = old + "x"
    else:
        holder[path[-1]] = old * 1.01 if abs(old) > 1e-6 else 0.01
    return value


@pytest.mark.parametrize("method", METHODS)
def test_each_number_changed_by_one_percent_is_detected(
    method: str, runner: ModuleType, adapters: Any, vectors: Any
) -> None:
    seen = 0
    for case in vectors[method]:
        output = runner.compute(adapters, method, case)
        assert runner.case_differences(case, output) == []
        for path in numbers(case["expected"]):
            wrong = {**case, "expected": changed(case["expected"], path)}
            assert runner.case_differences(wrong, output), (case["name"], path)
            seen += 1
    assert seen > 0


@pytest.mark.parametrize("method", METHODS)
def test_each_missing_output_is_detected(method: str, runner: ModuleType, adapters: Any, vectors: Any) -> None:
    for case in vectors[method]:
        output = runner.compute(adapters, method, case)
        for key in case["expected"]:
            assert runner.case_differences(case, {k: v for k, v in output.items() if k != key}) == [f"{key}: missing"]


@pytest.mark.parametrize("method", METHODS)
def test_missing_value_fails(method: str, runner: ModuleType, adapters: Any, vectors: Any) -> None:
    case = copy.deepcopy(vectors[method][0])
    values = case["params"] if method == "toolrl_scale" else case["inputs"]  # its one input has a default
    del values[next(iter(values))]
    assert runner.check(adapters, method, [case])[0] == "failed"


def test_changed_vectors_fail_through_the_command(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in METHODS:
        content = json.loads((HERE / f"{method}.json").read_text())
        path = next(numbers(content["cases"][0]["expected"]))
        content["cases"][0]["expected"] = changed(content["cases"][0]["expected"], path)
        (tmp_path / f"{method}.json").write_text(json.dumps(content))
    assert runner.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*(f"{m} failed" for m in METHODS), f"0 passed, {len(METHODS)} failed, 0 unknown"]


def test_removed_key_fails_through_the_command(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((HERE / "pass_at_k.json").read_text())
    del content["cases"][0]["expected"]["pass_at_k"]["2"]
    (tmp_path / "pass_at_k.json").write_text(json.dumps(content))
    content = json.loads((HERE / "grpo.json").read_text())
    del content["cases"][0]["inputs"]["old_logp"]
    (tmp_path / "grpo.json").write_text(json.dumps(content))
    content = json.loads((HERE / "dpo.json").read_text())
    del content["cases"][0]["expected"]
    (tmp_path / "dpo.json").write_text(json.dumps(content))
    content = json.loads((HERE / "avg_at_k.json").read_text())
    del content["method"]
    (tmp_path / "avg_at_k.json").write_text(json.dumps(content))
    assert runner.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 4 failed, 0 unknown"


def test_command_from_another_directory(forked_python: str, tmp_path: Path) -> None:
    """A separate process; every line and the requested outputs."""
    shutil.copy(HERE / "loss_aggregation.json", tmp_path)
    (tmp_path / "no_such_method.json").write_text('{"method": "no_such_method", "cases": []}')
    command = [forked_python, str(HERE / "run.py"), str(tmp_path), "--json", "out.json"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "loss_aggregation passed",
        "no_such_method unknown",
        "1 passed, 0 failed, 1 unknown",
    ]
    written = json.loads((tmp_path / "out.json").read_text())
    assert [case["name"] for case in written["loss_aggregation"]] == ["ragged", "one_empty_row_and_padding_garbage"]
    assert written["loss_aggregation"][0]["output"]["token_mean"] == pytest.approx(-0.12573)


@pytest.mark.parametrize("ids", ["no_such_method", "grpo,no_such_method", "no_file"])
def test_requested_unknown_id_is_an_error(
    ids: str, runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(HERE / "grpo.json", tmp_path)
    (tmp_path / "no_such_method.json").write_text('{"method": "no_such_method", "cases": [{"name": "a"}]}')
    assert runner.main([str(tmp_path), "--ids", ids]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].endswith(" unknown")
    assert lines[-1] == f"{ids.count('grpo')} passed, 0 failed, 1 unknown"


def test_folder_without_vectors_is_an_error(runner: ModuleType, tmp_path: Path) -> None:
    assert runner.main([str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (None, None, True),
        (None, 0.0, False),
        (0.0, None, False),
        (1, True, True),
        (0.0, False, True),
        (1.0, "1.0", False),
        ("full", "full", True),
        ("full", 1, False),
        ("1", 1, False),
        (1.0, 1.0 + 9e-7, True),
        (1.0, 1.0 + 2e-6, False),
        (0.0, 9e-9, True),
        (0.0, 2e-8, False),
        ([1.0], [1.0, 2.0], False),
        ([1.0, 2.0], [1.0], False),
        ([], [], True),
        ([[0.0]], [0.0], False),
        ({"1": 0.5}, {"1": 0.5}, True),
        ({"1": 0.5}, {"1": 0.5, "2": 1.0}, False),
        (float("inf"), float("inf"), True),
        (float("inf"), 1e300, False),
    ],
)
def test_comparison(expected: Any, got: Any, same: bool, runner: ModuleType) -> None:
    assert (runner.case_differences({"expected": {"x": expected}}, {"x": got, "extra": 1}) == []) is same


def test_tolerance_is_absolute_and_per_key(runner: ModuleType) -> None:
    case = {"expected": {"x": 100.0, "y": 100.0}, "tolerance": {"x": 0.5}}
    assert runner.case_differences(case, {"x": 100.4, "y": 100.0}) == []
    assert runner.case_differences(case, {"x": 100.6, "y": 100.0}) != []
    assert runner.case_differences(case, {"x": 100.0, "y": 100.4}) != []


def test_plain_converts_results_to_json(runner: ModuleType) -> None:
    import torch

    given = {1: torch.tensor([1.0, float("nan")]), "b": (torch.tensor(True), None, [(0, 1)])}
    assert runner.plain(given) == {"1": [1.0, None], "b": [True, None, [[0, 1]]]}


@pytest.mark.parametrize(
    ("method", "params", "inputs", "expected"),
    [
        # flat rows with any ids, in any order, are the same as a table
        (
            "grpo_norm",
            {"eps": 0.0, "scale": "none"},
            {"rewards": [1, 4, 0, 2], "group_ids": [7, 2, 7, 2]},
            [0.5, 1, -0.5, -1],
        ),
        # a weight that is not named is 1; a component that a row lacks is left out; none left = no reward
        (
            "grpo_norm",
            {"weights": {"b": 3.0}, "scale": "none"},
            {"reward_components": {"a": [[1, 0, None]], "b": [[1, None, None]]}},
            [2.0, -2.0, 0.0],
        ),
        ("grpo_norm", {"singleton": "raw"}, {"rewards": [[3.0], [None]]}, [3.0, 0.0]),
        ("grpo_norm", {}, {"rewards": [[3.0], [1, 1]]}, [0.0, 0.0, 0.0]),
    ],
)
def test_equivalent_forms_of_a_case(
    method: str, params: Any, inputs: Any, expected: Any, runner: ModuleType, adapters: Any
) -> None:
    case = {"name": "made", "params": params, "inputs": inputs, "expected": {"advantages": expected}}
    assert runner.case_differences(case, runner.compute(adapters, method, case)) == []


def test_unknown_argument_name_is_never_ignored(runner: ModuleType, adapters: Any, vectors: Any) -> None:
    for method in METHODS:
        for place in ("params", "inputs"):
            case = copy.deepcopy(vectors[method][0])
            case[place]["no_such_name"] = 1
            assert runner.check(adapters, method, [case])[0] == "failed", (method, place)


def test_case_of_a_companion_function_does_not_run_the_method(runner: ModuleType, adapters: Any, vectors: Any) -> None:
    case = {**vectors["grpo"][0], "op": "no_such_companion"}
    assert runner.check(adapters, "grpo", [case])[0] == "failed"
