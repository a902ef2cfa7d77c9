"""Data source `gym:TASK`: rows of a reasoning-gym task, generated from a seed.

With `params: {levels: [0, 1, 2]}` the task's own curriculum sets its parameters by level (every attribute at that
level, or at its highest), and rows have the columns `task` and `level`, as rows of `task:NAME` do.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain import typed_json
from posttrain.data.tasks.make import assign_levels
from posttrain.errors import DataError, MissingExtra, did_you_mean
from posttrain.seeds import derive


def rows(task: str, size: int, seed: int, params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `size` rows with the columns prompt, answer, gym_task, gym_entry and, with params, gym_params.

    gym_entry is `typed_json` text of the whole item, which the task's verifier reads; gym_params is JSON text of the
    parameters, which also configure the verifier. reasoning-gym derives item i from seed + i, so neighboring seeds
    share nearly all items; the seed passed to it is therefore a hash of the recipe's seed and the task name (31 bits:
    numpy accepts 32). Raises DataError that names similar tasks or parameters.
    """
    if "levels" in params:
        return _by_level(task, size, seed, params)
    dataset = _dataset(task, size, derive(seed, "gym", task) >> 32, params)
    own = {"gym_params": json.dumps(params)} if params else {}
    return [{**_row(task, dataset[i]), **own} for i in range(size)]


def _by_level(task: str, size: int, seed: int, params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows of several levels in the proportions `shares`; each level has its own generator."""
    check(task, params)
    levels = list(params["levels"])
    order = assign_levels(size, levels, params.get("shares") or [1.0] * len(levels))
    streams: dict[int, Iterator[dict[str, Any]]] = {}
    for level in dict.fromkeys(levels):
        own = level_params(task, level, params)
        streams[level] = iter(rows(task, order.count(level), derive(seed, "level", level), own))
    return [{**next(streams[level]), "task": f"gym:{task}", "level": level} for level in order]


def level_params(task: str, level: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task's parameters at a level of its curriculum; `params` may set parameters outside the curriculum.

    Raises DataError if the task has no curriculum or the level is above its highest, beyond which nothing changes.
    """
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(task):
        raise DataError(f"gym:{task} has no curriculum", hint="write its own parameters instead of `levels`")
    curriculum = create_curriculum(task)
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if not 0 <= level <= highest:
        raise DataError(f"gym:{task} has no level {level}", allowed=f"levels 0 to {highest}")
    before = dataclasses.asdict(curriculum.generate_configuration())
    curriculum.set_global_level(level)
    made = dataclasses.asdict(curriculum.generate_configuration())
    fields = {name for a in curriculum.attributes.values() for name in _fields_of(a)}
    own = {key: value for key, value in params.items() if key not in ("levels", "shares")}
    if set_twice := sorted(fields & own.keys()):
        raise DataError(f"gym:{task}: {set_twice[0]} is set by `levels`", hint="remove one of the two")
    return {**{key: made[key] for key in before if key in fields}, **own}


def _fields_of(attribute: Any) -> list[str]:
    """Return the names of the parameters that a curriculum attribute sets."""
    names = ("field_name", "lower_field_name", "upper_field_name")
    return [value for name in names if (value := getattr(attribute, name, None))]


def _row(task: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return an item of a task as a row. Raises DataError if the item cannot be serialized."""
    answer = entry["answer"]
    try:
        serialized = typed_json.dumps(entry)
    except TypeError as cause:
        raise DataError(f"an item of gym:{task} does not fit in a row: {cause}") from cause
    return {
        "prompt": entry["question"],
        "answer": answer if answer is None or isinstance(answer, str) else str(answer),
        "gym_task": task,
        "gym_entry": serialized,
    }


def _dataset(task: str, size: int, seed: int, params: dict[str, Any]) -> Any:
    """Create a reasoning-gym dataset. Raises DataError if the task rejects its parameters."""
    check(task, params)
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **params)
    except (AssertionError, TypeError, ValueError) as cause:
        raise params_error(task, params, cause) from cause


def check(task: str, params: Mapping[str, Any]) -> None:
    """Raise DataError if the task does not exist or does not accept these parameters."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise MissingExtra("reasoning-gym", f"data gym:{task}", "gym")
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise DataError(
            f"reasoning-gym has no task {task}",
            allowed=f"it has {len(DATASETS)}: {', '.join(sorted(DATASETS))}",
            hint=did_you_mean(task, DATASETS, "gym:{}"),
        )
    if task == "composite":
        raise DataError("gym:composite is a mixture of tasks", hint="write the tasks as sources of data.mix")
    if "levels" in params:
        for level in _checked_levels(task, params):
            check(task, level_params(task, level, params))
        return
    known = set(DATASETS[task][1].__dataclass_fields__) - {"seed", "size"}
    for key in params:
        if key not in known:
            raise DataError(
                f"gym:{task} has no parameter {key}",
                allowed=f"it has: {', '.join(sorted(known))}",
                hint=did_you_mean(key, known),
            )
    try:
        config = DATASETS[task][1](**params)
        if callable(validate := getattr(config, "validate", None)):
            validate()
    except (AssertionError, TypeError, ValueError) as cause:
        raise params_error(task, params, cause) from cause


def _checked_levels(task: str, params: Mapping[str, Any]) -> list[int]:
    """Return the distinct levels of `params`. Raises DataError for invalid `levels` or `shares`."""
    levels, shares = params["levels"], params.get("shares")
    if not isinstance(levels, list) or not levels or not all(type(level) is int for level in levels):
        raise DataError(f"gym:{task}: levels {levels!r}", allowed="whole numbers from 0 on, e.g. [0, 1, 2]")
    if shares is not None and len(shares) != len(levels):
        raise DataError(f"gym:{task}: {len(shares)} shares for {len(levels)} levels")
    return list(dict.fromkeys(levels))


def params_error(task: str, params: Mapping[str, Any], cause: Exception) -> DataError:
    """Return the error for parameters that a task rejects."""
    return DataError(f"gym:{task} refuses its parameters {dict(params)}: {cause}")
