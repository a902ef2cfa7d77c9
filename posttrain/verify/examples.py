"""`EXAMPLES` of a reward script: expected scores, checked by running the reward the way training does.

    EXAMPLES = [(completion, columns, expected), (completion, columns, expected, params), ...]

in a file with one reward function; with several functions, a dict `{"function": [...], ...}`. columns: data columns and
built-ins by name. expected: a number, None, a dict of parts, or a list for a per-turn reward.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import RewardError, did_you_mean
from posttrain.path_resolution import missing_function_error
from posttrain.verify import trl_form
from posttrain.verify.contract import ByTurn, short_repr
from posttrain.verify.load import LoadedReward, describe, first_argument_is_completion, load_script
from posttrain.verify.pool import Pool, make_calls, make_target, split_result
from posttrain.verify.transcript import read_transcript
from posttrain.verify.worker import Call, Result, Target
from posttrain.verify.workflow import read_workflow


@dataclass(frozen=True)
class Example:
    """One entry of `EXAMPLES`."""

    completion: str
    columns: Mapping[str, Any]
    expected: float | Mapping[str, float | None] | Sequence[float] | None
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Result of running an example."""

    function: str
    example: Example
    result: Result

    @property
    def ok(self) -> bool:
        return self.result.kind == "value" and matches_expected(self.result.value, self.example.expected)

    @property
    def outcome(self) -> str:
        value = self.result.value
        return short_repr(value) if self.result.kind == "value" else f"{self.result.kind}: {_last_line(value)}"


def read_examples(path: Path, only: str | None = None) -> dict[str, list[Example]]:
    """Return function -> its examples.

    only: restrict to this function. Raises RewardError if there are none or they are malformed.
    """
    module = load_script(path)
    written = module.get("EXAMPLES")
    where = str(path)
    if only is not None and not callable(module.get(only)):
        raise missing_function_error(where, only, own_rewards(module), RewardError)
    if not written:
        raise RewardError(
            "no EXAMPLES",
            where=where,
            hint='add e.g. EXAMPLES = [("\\\\boxed{7}", {"answer": "7"}, 1.0), ("", {...}, 0.0)]',
        )
    if not isinstance(written, Mapping):
        written = {only_reward(module, where): written}
    wanted = [only] if only else list(written)
    for name in wanted:
        if not callable(module.get(name)):
            raise RewardError(
                f"EXAMPLES of a function {name}, which the script does not have",
                where=where,
                allowed=f"functions: {', '.join(own_rewards(module)) or 'none'}",
                hint=did_you_mean(name, own_rewards(module)),
            )
        if name not in written:
            raise RewardError(
                f"no EXAMPLES of the function {name}",
                where=where,
                allowed=f"EXAMPLES of: {', '.join(written)}",
                hint=f'add e.g. EXAMPLES["{name}"] = [("...", {{}}, 1.0)]',
            )
    return {name: [_parse_example(line, where) for line in written[name]] for name in wanted}


def own_rewards(module: Mapping[str, Any]) -> list[str]:
    """Return the names of the reward functions that a script defines (not those that it imports)."""
    return [
        name
        for name, value in module.items()
        if first_argument_is_completion(value)
        and not (inspect.isfunction(value) and value.__module__ != module["__name__"])
    ]


def only_reward(module: Mapping[str, Any], where: str) -> str:
    """Return the name of the only reward function of a script. Raises RewardError if the script has none or several."""
    names = own_rewards(module)
    if len(names) != 1:
        raise RewardError(
            f"EXAMPLES or ROWS is a list, but the file has {len(names)} reward functions",
            where=where,
            allowed=", ".join(names),
            hint='write {"FUNCTION": [...]}',
        )
    return names[0]


def _parse_example(line: Any, where: str) -> Example:
    if not isinstance(line, Sequence) or not 3 <= len(line) <= 4 or not isinstance(line[0], str):
        raise RewardError(
            f"not an example: {short_repr(line)}", where=where, allowed="(completion, columns, expected[, params])"
        )
    return Example(*line)


def run_examples(path: Path, only: str | None = None, *, timeout_s: float = 10.0) -> list[Outcome]:
    """Run the examples of a script in a worker process.

    Raises RewardError if params or columns do not fit the function.
    """
    examples = [(name, example) for name, listed in read_examples(path, only).items() for example in listed]
    module = load_script(path)
    targets: dict[str, Target] = {}
    calls: list[Call] = []
    for number, (name, example) in enumerate(examples):
        reward = describe(module[name], f"{path}:{name}", dict(example.params), name)
        _check_columns(reward, example, number)
        key = f"{name} {json.dumps(example.params, sort_keys=True, default=repr)}"
        targets.setdefault(key, make_target(reward, timeout_s))
        given = dict(example.columns)
        if "transcript" in reward.built_ins:
            where = f"{reward.target}, example {number + 1}"
            given["transcript"] = read_transcript(given.get("transcript"), example.completion, where)
        if "workflow" in reward.built_ins:
            where = f"{reward.target}, example {number + 1}"
            given["workflow"] = read_workflow(given.get("workflow"), example.completion, where)
        if reward.trl_form:
            offered = {name: trl_form.built_in(name, (), 0) for name in trl_form.BUILT_INS}
            offered |= {"prompts": given.get("prompt", "")}
            given = {name: value for name, value in offered.items() if name in reward.built_ins} | given
        calls += make_calls(reward, list(targets).index(key), number, [example.completion], [given])
    pool = Pool(list(targets.values()), workers=1)
    try:
        results = pool.run(calls)
    finally:
        pool.close()
    rows = [row for call, result in zip(calls, results, strict=True) for row in split_result(call, result)]
    return [Outcome(name, example, result) for (name, example), result in zip(examples, rows, strict=True)]


def _check_columns(reward: LoadedReward, example: Example, number: int) -> None:
    where = f"{reward.target}, example {number + 1}"
    known = {*reward.columns, *reward.optional_columns, *reward.built_ins}
    if unknown := sorted(set(example.columns) - known) if not reward.all_columns else []:
        raise RewardError(f"the function does not take {', '.join(unknown)}", where=where)
    if absent := [c for c in reward.columns if c not in example.columns]:
        raise RewardError(f"columns are missing: {', '.join(absent)}", where=where)


def matches_expected(value: Any, expected: Any) -> bool:
    """Return whether the value equals the expectation to 9 digits.

    For parts, an expected number is compared with `reward`; for a per-turn result, with the sum over turns.
    """
    if isinstance(value, ByTurn):
        if isinstance(expected, Sequence):
            return len(expected) == len(value.parts) and all(map(matches_expected, value.parts, expected))
        value = value.total
    if isinstance(expected, Mapping):
        return isinstance(value, Mapping) and all(
            k in value and matches_expected(value[k], v) for k, v in expected.items()
        )
    if isinstance(value, Mapping):
        value = value["reward"]
    if value is None or expected is None:
        return value is None and expected is None
    return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-9)


def _last_line(text: str | None) -> str:
    return (text or "").strip().rpartition("\n")[2]
