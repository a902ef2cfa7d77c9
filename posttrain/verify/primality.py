"""A bound on the primality tests that sympy makes while it evaluates answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sympy import Integer

MAX_TESTED = 10**60  # a test of a 9,000-digit number takes a minute


def skip_large_primality_tests() -> None:
    """Make sympy treat the primality of integers above MAX_TESTED as unknown, in this process. Called once, on import.

    sympy has no setting for it. To find out whether log(n) is finite, its assumption system asks related facts about n
    in a random order until one decides, and with bad luck the first one is whether n is prime. No comparison of
    answers depends on that fact.
    """
    handlers: dict[str, Any] = Integer._prop_handler
    for fact in ("prime", "composite"):
        handlers[fact] = _limit_handler(handlers[fact])


def _limit_handler(handler: Callable[[Integer], bool | None]) -> Callable[[Integer], bool | None]:
    """Return a handler of sympy's assumption system that answers None (unknown) for large integers."""

    def evaluate(number: Integer) -> bool | None:
        return handler(number) if abs(number.p) <= MAX_TESTED else None

    return evaluate
