"""Return contract of rewards: a finite number, None, or a dict of named parts with the key `reward`."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, overload

from posttrain.errors import count_noun

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


MAX_SCORE = 3.4e38  # float32 limit: advantages are computed in float32, and a larger score makes a mean infinite


class BrokenContract(Exception):
    """Raised when a reward returns a value outside the contract."""


class ExplainedFailure(RuntimeError):
    """Raised when a call of a reward fails for a reason that its message states: no traceback is shown."""


Function = TypeVar("Function", bound=Callable[..., Any])
Score = float | dict[str, float | None] | None


class ByTurn(NamedTuple):
    """Scores returned by a reward marked `per_turn`: one number per part, in order."""

    parts: tuple[float, ...]

    @property
    def total(self) -> float:
        return math.fsum(self.parts)


@overload
def batched(size: Function) -> Function: ...


@overload
def batched(size: int | None = None) -> Callable[[Function], Function]: ...


def batched(size: Any = None) -> Any:
    """Mark `f(completions, ...) -> list` as a batched reward, called with lists of up to `size` rows.

    size: rows per call; None, also plain `@batched`, means all rows of a step in one call. Columns and built-ins are
    lists too, one entry per row, in row order. timeout_s limits the whole call; if the call raises or times out, none
    of its rows has a score. Use it if a call has a high fixed cost (a model, a server). Rows of one group are adjacent.
    Raises ValueError for a size below 1.
    """
    if callable(size):
        return batched()(size)
    if size is not None and size < 1:
        raise ValueError(f"a batch size must be at least 1, not {size}")

    def mark(function: Function) -> Function:
        function.posttrain_batch_size = size or 0  # type: ignore[attr-defined]
        return function

    return mark


def in_trainer(opened: Callable[..., None], closed: Callable[[], None]) -> Callable[[Function], Function]:
    """Mark a batched reward that runs in the training process, in one call with all rows of a step.

    Intended for models, which need the trainer's GPU; every worker process would otherwise hold its own copy. Such a
    call has no time limit, and an exception in it ends the run. `opened` is called with the recipe's params before the
    policy is loaded, `closed` after the last step is scored.
    """

    def mark(function: Function) -> Function:
        function.posttrain_in_trainer = (opened, closed)  # type: ignore[attr-defined]
        return batched()(function)

    return mark


def judge(timeout_s: float) -> Callable[[Function], Function]:
    """Mark a reward that asks a model: `reward test` tries prompt injections on it, and its calls wait for a server.

    timeout_s: time limit of a call if the recipe gives none; time spent queued at the server counts.
    """

    def mark(function: Function) -> Function:
        function.posttrain_judge_timeout_s = timeout_s  # type: ignore[attr-defined]
        return function

    return mark


def per_turn(function: Function) -> Function:
    """Mark `f(completion, parts, ...) -> list` as a per-turn reward: one number per part, or None for the row.

    parts: the texts of the model's turns with tools or an environment; otherwise the steps of the completion, divided
    by `scoring.split`, or the completion alone. Per-turn advantages credit each number to its part; all other
    advantages use the sum as the score. None in the list counts as 0.
    """
    function.posttrain_per_turn = True  # type: ignore[attr-defined]
    return function


def checked_turns(value: Any, count: int) -> ByTurn | None:
    """Convert the returned list to the scores of `count` parts. Raises BrokenContract, naming the list index."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != count:
        raise BrokenContract(
            f"returned {short_repr(value)} for {count_noun(count, 'part')}, must return a list of {count}, or None"
        )
    return ByTurn(tuple(_number(part, f"part {index}: ") or 0.0 for index, part in enumerate(value)))


def checked_batch(value: Any, count: int) -> list[Score]:
    """Convert the returned list to the scores of `count` completions. Raises BrokenContract, naming the list index."""
    if not isinstance(value, list | tuple) or len(value) != count:
        many = "one completion, must return a list of one number" if count == 1 else f"{count} completions"
        must = "" if count == 1 else f", must return a list of {count}"
        must += " (a missing `return`?)" if value is None else ""
        length = f", {count_noun(len(value), 'score')}," if isinstance(value, list | tuple) else ""
        raise BrokenContract(f"returned {short_repr(value)}{length} for {many}{must}")
    scores: list[Score] = []
    for index, item in enumerate(value):
        try:
            scores.append(check_score(item))
        except BrokenContract as error:
            raise BrokenContract(f"{error} (entry {index} of the list)" if count > 1 else str(error)) from None
    return scores


def check_score(value: Any) -> Score:
    """Convert the returned value to a score. Raises BrokenContract, quoting the value."""
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
        value = value.item()  # numpy.bool_ and 0-d tensors are not numbers.Real
    if not isinstance(value, numbers.Real):
        raise BrokenContract(
            f"{what}returned {short_repr(value)} ({type(value).__name__}), must return a number or None"
        )
    try:
        number = float(value)
    except OverflowError:  # an int with more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise BrokenContract(f"{what}returned {number}, must return a finite number or None")
    if abs(number) > MAX_SCORE:
        raise BrokenContract(f"{what}returned {number}, must return a number within {MAX_SCORE:g} (float32)")
    return number


def short_repr(value: Any) -> str:
    """Return a short repr, or the type name if repr fails."""
    try:
        return _short.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
