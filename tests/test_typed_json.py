"""Round trip of values that JSON cannot represent."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from posttrain.typed_json import dumps, loads


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, -2.5, "é\n", 10**30, [], {}, (), [1, [2]], {"a": {"b": [None]}}),
        *((1, 2), ((1, 2), [3, (4,)]), {"board": ((0, 1), (1, 0))}, [("a", 1)], {"p": [((1,),)]}),
        *({0: 1, 1: 2}, {1: "int", "1": "text"}, {(0, 1): "cell"}, {None: 1, True: 2, 1.5: 3}, {"__type__": "tuple"}),
        {"__type__": "tuple", "value": [1]},  # a dict that looks like a mark stays a dict
        *({1, 2}, frozenset({"a"}), {(1, 2), (3, 4)}, set()),
        *(1 + 2j, b"\x00\xff", range(1, 9, 2), Decimal("1.10"), Fraction(1, 3)),
        *(date(2024, 2, 29), datetime(2024, 1, 1, 12, 30, tzinfo=UTC), time(1, 2, 3), timedelta(days=-1, seconds=5)),
        *(np.float64(0.1), np.int64(7), np.str_("x"), np.bool_(True)),
    ],
    ids=repr,
)
def test_values_are_restored(value: Any) -> None:
    found = loads(dumps(value))
    assert found == value and type(found) is type(value) and repr(found) == repr(value)


def test_arrays_and_nan_are_restored() -> None:
    array = np.array([[1, 2], [3, 4]], dtype=np.int8)
    found = loads(dumps(array))
    assert found.dtype == array.dtype and (found == array).all()
    assert repr(loads(dumps([float("nan"), float("-inf")]))) == "[nan, -inf]"


def test_subclasses_become_their_base_type() -> None:
    class Kind(StrEnum):
        A = "a"

    assert loads(dumps([namedtuple("P", "x y")(1, 2), OrderedDict(a=1), Kind.A])) == [(1, 2), {"a": 1}, "a"]


@pytest.mark.parametrize("text", ['{"a": [1, null]}', '"x"', "[{}]", '{"__type__": "tuple"}', '{"value": 1}'])
def test_plain_json_reads_as_json(text: str) -> None:
    assert loads(text) == json.loads(text)


@pytest.mark.parametrize("value", [object(), [lambda: 1], {"a": type}, {object(): 1}])
def test_unrestorable_values_raise(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        dumps(value)


@pytest.mark.parametrize("text", ['{"__type__": "os.system", "value": "id"}', '{"__type__": [], "value": 1}', "{"])
def test_unknown_marks_raise(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        loads(text)
