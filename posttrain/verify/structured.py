"""Grading of JSON objects: validity, surrounding text, keys and values. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify.extract import after_think
from posttrain.verify.text import overlap, weighted_mean

PARTS = ("validity", "format", "structure", "content", "length")
_FENCE = re.compile(r"```[^\S\n]*+\w*+[^\S\n]*+\n?+(.*?)```", re.DOTALL)


def read_object(text: str) -> dict[str, Any] | None:
    """Parse a text as a JSON object; None for anything else, for duplicate keys, and for NaN or Infinity."""
    try:
        value = json.loads(text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError):  # not a JSON object, or too deeply nested
        return None
    return value if isinstance(value, dict) else None


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("duplicate key")
    return made


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def object_in(text: str) -> tuple[dict[str, Any] | None, float]:
    """Return (object, form): 1 if the text is the object, 0.5 if it is one fenced block of it, else 0."""
    stripped = text.strip()
    if (found := read_object(stripped)) is not None:
        return found, 1.0
    blocks = list(_FENCE.finditer(stripped))
    if len(blocks) != 1 or (found := read_object(blocks[0][1].strip())) is None:
        return None, 0.0
    return found, 0.5 if blocks[0][0] == stripped else 0.0


def alike(a: Any, b: Any, decimals: int) -> bool:
    """Return whether JSON values are equal: numbers after rounding, texts after stripping, everything else exactly."""
    if _is_number(a) and _is_number(b):
        return a == b or round(a, decimals) == round(b, decimals)
    if isinstance(a, str) and isinstance(b, str):
        return a.strip() == b.strip()
    return same_json(a, b)


def same_json(a: Any, b: Any) -> bool:
    """Return whether JSON values are equal: 1 = 1.0, but 1 is neither "1" nor true; key order does not matter."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_json(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_json, a, b))
    return bool(a == b)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def json_reward(
    completion: str,
    answer: Mapping[str, Any],
    *,
    required: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
    decimals: int = 6,
    schema: Mapping[str, Any] | None = None,
    tokens: int | None = None,
    budget: int | None = None,
) -> dict[str, float]:
    """Grade the text after the thought: {"reward", "validity", "format", "structure", "content"}, each in [0, 1].

    validity: 1 if there is an object (`object_in`), else all parts are 0. format: the form from `object_in`.
    structure: overlap of the object's keys with the required keys (default: the gold's; a blank value counts as a
    missing key unless it is blank in the gold, too), or 0 / 1 by a JSON schema.
    content: share of the gold's keys whose value is `alike`.
    length: with a budget, 1 - min(1, tokens / budget), with weight 0 by default.
    reward: mean by `weights`. The source states no formulas; all of these are our guess.
    """
    found, form = object_in(after_think(completion))
    names = ["validity", "format", "structure", "content", *(["length"] if budget else [])]
    parts = dict.fromkeys(names, 0.0)
    if found is not None:
        wanted = set(answer if required is None else required)
        parts |= {
            "validity": 1.0,
            "format": form,
            "structure": overlap(wanted, _held_keys(found, answer)) if schema is None else float(fits(found, schema)),
            "content": sum(k in found and alike(found[k], v, decimals) for k, v in answer.items()) / len(answer)
            if answer
            else 1.0,
        }
        if budget:
            parts["length"] = 1 - min(1.0, (tokens or 0) / budget)
    return {"reward": weighted_mean(parts, {"length": 0.0, **(weights or {})}, PARTS), **parts}


def _held_keys(found: Mapping[str, Any], answer: Mapping[str, Any]) -> set[str]:
    return {key for key, value in found.items() if not is_blank(value) or is_blank(answer.get(key))}


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value is valid under a JSON schema. Raises jsonschema's SchemaError for an invalid schema."""
    import jsonschema

    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return bool(validator(schema).is_valid(value))


def from_json(value: Any, kind: type | tuple[type, ...], what: str, column: str = "answer") -> Any:
    """Return the value of a data column that may be stored as JSON text.

    kind: required type; what: its description in words. Raises ValueError for anything else.
    """
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, kind):
        raise ValueError(f"`{column}` must be {what}, or its JSON text, not {value!r:.80}")
    return parsed


def is_blank(value: Any) -> bool:
    """Return whether a value is null, or an empty text, list or object."""
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {})
