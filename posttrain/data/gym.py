"""`gym:TASK`: rows of a reasoning-gym task, made on the spot from a seed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from posttrain import typed_json
from posttrain.errors import DataError, MissingExtra, did_you_mean
from posttrain.seeds import derive


def rows(task: str, size: int, seed: int, params: dict[str, Any]) -> list[dict[str, Any]]:
    """`size` rows: prompt, answer, gym_task, gym_entry (`typed_json` text of the whole item, which the task's verifier
    reads), gym_params (JSON text, where there are any: they belong to the verifier's configuration too).

    reasoning-gym draws item i from seed + i, so neighbouring seeds share nearly all items. The seed given to it is a
    hash of ours and the task's name (31 bits: numpy takes 32). Raises DataError naming near tasks or parameters.
    """
    dataset = _dataset(task, size, derive(seed, "gym", task) >> 32, params)
    own = {"gym_params": json.dumps(params)} if params else {}
    return [{**_row(task, dataset[i]), **own} for i in range(size)]


def _row(task: str, entry: dict[str, Any]) -> dict[str, Any]:
    answer = entry["answer"]
    try:
        written = typed_json.dumps(entry)
    except TypeError as cause:
        raise DataError(f"an item of gym:{task} does not fit in a row: {cause}") from cause
    return {
        "prompt": entry["question"],
        "answer": answer if answer is None or isinstance(answer, str) else str(answer),
        "gym_task": task,
        "gym_entry": written,
    }


def _dataset(task: str, size: int, seed: int, params: dict[str, Any]) -> Any:
    check(task, params)
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **params)
    except (AssertionError, TypeError, ValueError) as cause:
        raise refused(task, params, cause) from cause


def check(task: str, params: Mapping[str, Any]) -> None:
    """Raises DataError where there is no such task, or it does not take these parameters."""
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
        raise refused(task, params, cause) from cause


def refused(task: str, params: Mapping[str, Any], cause: Exception) -> DataError:
    """The error for values that a task does not take."""
    return DataError(f"gym:{task} refuses its parameters {dict(params)}: {cause}")
