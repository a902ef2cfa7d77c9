"""ARM's consensus-guided mode (arXiv 2505.20258): cheap answers if they agree, a long chain of thought otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from posttrain.verify.text import qa_norm


class Consensus(NamedTuple):
    """The answer, and whether it comes from the agreement of the cheap formats or from the long chain."""

    answer: str | None
    used: Literal["consensus", "long_cot"]


def arm_consensus(
    direct: str | None,
    short_cot: str | None,
    code: str | None,
    long_cot: str | Callable[[], str | None] | None,
    *,
    equal: Callable[[str, str], bool] | None = None,
) -> Consensus:
    """Return the direct answer if all three cheap formats gave equal answers, else the answer of the long chain.

    long_cot may be a function, called only if the long chain is needed. A missing or blank answer counts as
    disagreement. equal: the verifier's equality; by default text equality ignoring case, punctuation and articles.
    """
    cheap = [answer for answer in (direct, short_cot, code) if answer is not None and answer.strip()]
    same = equal or _same_text
    if len(cheap) == 3 and all(same(cheap[0], other) for other in cheap[1:]):
        return Consensus(direct, "consensus")
    return Consensus(long_cot() if callable(long_cot) else long_cot, "long_cot")


def _same_text(a: str, b: str) -> bool:
    return qa_norm(a) == qa_norm(b)
