"""Calls of a program's functions, made in the sandbox; what they return is read outside.

The source of this file is also the program that runs in the sandbox, so it imports only the standard library there.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MOST_ITEMS = 1_000_000  # of an iterator or a range
_RESULTS = "called functions returned: "
# Names that LeetCode's solutions use without importing them.
_IMPORTS = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *; from collections import *; from functools import *; from heapq import *; from itertools import *
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, log10, pi, sqrt
from typing import *
"""

Call = tuple[str, Sequence[Any], dict[str, Any]]  # function or method of `Solution`, arguments, keyword arguments


def encode_value(value: Any) -> Any:
    """Convert a value to JSON that keeps its type. Raises TypeError for an object that is not made of builtin types."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode_value(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode_value(key), encode_value(item)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode_value(item) for item in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": list(value)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if hasattr(type(value), "__next__") or type(value) in (type({}.keys()), type({}.values()), type({}.items())):
        return {"iterator": [encode_value(item) for item in itertools.islice(value, _MOST_ITEMS)]}
    raise TypeError(f"{type(value).__name__} is not a builtin type")


def decode_value(value: Any) -> Any:
    """Convert what `encode_value` returned back; iterators are iterators again. Raises ValueError for other JSON."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    makes: dict[str, Any] = {
        "dict": dict, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes, "iterator": iter,
        "complex": lambda parts: complex(*parts), "range": lambda limits: range(*limits),
    }  # fmt: skip
    if kind not in makes:
        raise ValueError(f"unknown type {kind!r}")
    made = makes[kind](decode_value(items))
    if kind == "range" and len(made) > _MOST_ITEMS:
        raise ValueError("the range is too long")
    return made


def write_input(program: str, calls: Sequence[Call], setup: str = "") -> tuple[str, str]:
    """Return what to run in the sandbox for these calls, and its standard input. setup: code to run before."""
    encoded = [
        [function, list(map(encode_value, arguments)), {key: encode_value(item) for key, item in named.items()}]
        for function, arguments, named in calls
    ]
    return Path(__file__).read_text(), json.dumps({"program": program, "setup": setup, "calls": encoded})


def read_outcomes(stdout: str, count: int) -> list[list[Any]]:
    """Return the outcome of each call: ["returned", value], ["raised", builtin classes, message], or ["object"].

    Raises ValueError or another exception if the program's output does not end with the outcomes of `count` calls: it
    is written in the program's process, which may print anything.
    """
    _, _, text = stdout.rpartition(f"\n{_RESULTS}")
    outcomes = json.loads(text)
    if not isinstance(outcomes, list) or len(outcomes) != count:
        raise ValueError(f"expected the outcomes of {count} calls")
    return [[kind, decode_value(rest[0]), *rest[1:]] if rest else [kind] for kind, *rest in outcomes]


def _call(space: dict[str, Any], function: str, arguments: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    solution = space.get("Solution")
    owner = solution() if solution is not None and hasattr(solution, function) else None
    called = space[function] if owner is None else getattr(owner, function)
    try:
        value = called(*map(decode_value, arguments), **{key: decode_value(item) for key, item in named.items()})
    except BaseException as error:
        classes = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return ["raised", classes, str(error)[:1000]]
    try:
        return ["returned", encode_value(value)]
    except TypeError:
        return ["object"]


def _run() -> None:
    """Run the program and the calls that standard input holds, which is empty afterwards, and print the outcomes.

    `__name__` of the program is not `__main__`, so that a solution's own demonstration is not run.
    """
    given = json.loads(sys.stdin.read())
    sys.setrecursionlimit(50_000)
    space: dict[str, Any] = {"__name__": "solution"}
    for name, source in (("imports", _IMPORTS), ("setup", given["setup"]), ("main.py", given["program"])):
        exec(compile(source, name, "exec", dont_inherit=True), space)
    outcomes = [_call(space, *call) for call in given["calls"]]
    print(f"\n{_RESULTS}{json.dumps(outcomes)}", flush=True)


if __name__ == "__main__":
    _run()
