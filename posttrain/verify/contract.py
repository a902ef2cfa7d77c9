"""What a reward may return: a finite number, None, or a dict of named parts with the key `reward`."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, overload

from posttrain.errors import count_noun

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


LARGEST = 3.4e38  # of the float32 in which advantages are computed: above it a mean is infinite


class BrokenContract(Exception):
    """A reward returned something else."""


Function = TypeVar("Function", bound=Callable[..., Any])
Score = float | dict[str, float | None] | None


class ByTurn(NamedTuple):
    """What a reward marked `per_turn` gave: a number for each part, in order."""

    parts: tuple[float, ...]

    @property
    def total(self) -> float:
        return math.fsum(self.parts)


@overload
def batched(size: Function) -> Function: ...


@overload
def batched(size: int | None = None) -> Callable[[Function], Function]: ...


def batched(size: Any = None) -> Any:
    """Mark `f(completions, ...) -> list` as a reward of many rows: it is called with lists of up to `size` rows.

    size None, also `@batched` alone: all rows of a step in one call. Columns and built-ins come as lists too, one entry
    a row, in the order of the rows. Its timeout_s is that of the whole call; if it raises or is late, all rows of the
    call have no score. Use it where a call costs much beside a row (a model, a server); rows of one group are beside
    each other. Raises ValueError for a size below 1.
    """
    if callable(size):
        return batched()(size)
    if size is not None and size < 1:
        raise ValueError(f"a batch of {size} rows")

    def mark(function: Function) -> Function:
        function.posttrain_batch_size = size or 0  # type: ignore[attr-defined]
        return function

    return mark


def in_trainer(opened: Callable[..., None], closed: Callable[[], None]) -> Callable[[Function], Function]:
    """Mark a batched reward as one that runs in the process that trains, in one call with all rows of a step.

    That is for models: they need the trainer's GPU, and each worker process would hold a copy of its own. Nothing
    limits the time of such a call, and what it raises ends the run. `opened` is called with the recipe's params before
    the policy is loaded, `closed` when the last step is scored.
    """

    def mark(function: Function) -> Function:
        function.posttrain_in_trainer = (opened, closed)  # type: ignore[attr-defined]
        return batched()(function)

    return mark


def judge(timeout_s: float) -> Callable[[Function], Function]:
    """Mark a reward that asks a model: `reward test` tries injections on it, and its calls wait for a server.

    timeout_s: the limit of a call where the recipe gives none; waiting behind other requests counts.
    """

    def mark(function: Function) -> Function:
        function.posttrain_judge_timeout_s = timeout_s  # type: ignore[attr-defined]
        return function

    return mark


def per_turn(function: Function) -> Function:
    """Mark `f(completion, parts, ...) -> list` as a reward by turn: one number for each of `parts`, or None for a row.

    parts: the texts of the model's turns, with tools or an environment; else the steps of the completion, divided by
    `scoring.split`, or the completion alone. A number is credited to its part by the advantages that know of turns; for
    all others their sum is the score. None in the list counts as 0.
    """
    function.posttrain_per_turn = True  # type: ignore[attr-defined]
    return function


def checked_turns(value: Any, count: int) -> ByTurn | None:
    """The returned list as the scores of `count` parts. Raises BrokenContract, naming the place."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != count:
        raise BrokenContract(
            f"returned {short_repr(value)} for {count_noun(count, 'part')}, must return a list of {count}, or None"
        )
    return ByTurn(tuple(_number(one, f"part {place}: ") or 0.0 for place, one in enumerate(value)))


def checked_batch(value: Any, count: int) -> list[Score]:
    """The returned list as scores of `count` completions. Raises BrokenContract, naming the place."""
    if not isinstance(value, list | tuple) or len(value) != count:
        many = "one completion, must return a list of one number" if count == 1 else f"{count} completions"
        must = "" if count == 1 else f", must return a list of {count}"
        must += " (a missing `return`?)" if value is None else ""
        raise BrokenContract(f"returned {short_repr(value)} for {many}{must}")
    scores: list[Score] = []
    for place, one in enumerate(value):
        try:
            scores.append(check_score(one))
        except BrokenContract as error:
            raise BrokenContract(f"{error} (entry {place} of the list)" if count > 1 else str(error)) from None
    return scores


def check_score(value: Any) -> Score:
    """The returned value as numbers. Raises BrokenContract with the value in it."""
    if not isinstance(value, Mapping):
        return _number(value)
    if "reward" not in value:
        raise BrokenContract(f"returned parts without the key `reward`: {short_repr(value)}")
    if not all(isinstance(name, str) for name in value):
        raise BrokenContract(f"returned parts whose names are not text: {short_repr(value)}")
    return {name: _number(part, f"part `{name}`: ") for name, part in value.items()}


def _number(value: Any, what: str = "") -> float | None:
    if value is None:
        return None
    if type(value).__module__ in ("numpy", "torch") and getattr(value, "shape", None) == ():
        value = value.item()  # a numpy.bool_ or a tensor without dimensions is no number to Python
    if not isinstance(value, numbers.Real):
        raise BrokenContract(
            f"{what}returned {short_repr(value)} ({type(value).__name__}), must return a number or None"
        )
    try:
        number = float(value)
    except OverflowError:  # an int of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise BrokenContract(f"{what}returned {number}, must return a finite number or None")
    if abs(number) > LARGEST:
        raise BrokenContract(f"{what}returned {number}, must return a number within {LARGEST:g} (float32)")
    return number


def short_repr(value: Any) -> str:
    """A short repr; objects whose repr fails are named by their type."""
    try:
        return _short.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
