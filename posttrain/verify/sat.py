"""Rewards for assignments to the variables of a CNF formula (SATURN, arXiv 2505.16368). Pure functions of text."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\boxed\{((?:[^}\n\\]|\\(?!boxed\{))*+)\}")
_CLAUSE = re.compile(r"(?:!?[A-Z])+")
_LITERAL = re.compile(r"(!?)([A-Z])")


def assignment_reward(formula: str, completion: str) -> float:
    """Return 1 if the last `\\boxed{}` satisfies the formula, 0 if not, -1 without box, -2 if malformed."""
    boxes = _BOX.findall(completion)
    if not boxes:
        return -1.0
    try:
        return float(is_satisfied(formula, boxes[-1].strip()))
    except ValueError:
        return -2.0


def is_satisfied(formula: str, bits: str) -> bool:
    """Return whether every clause has a true literal: `A` needs a 1 at A's position, `!A` a 0; missing bits count as 0.

    Raises ValueError for a formula that is not clauses of letters joined by `&`.
    """
    clauses = [clause.strip() for clause in formula.split("&")]
    if not all(_CLAUSE.fullmatch(clause) for clause in clauses):
        raise ValueError(f"not a formula: {formula!r:.80}")
    return all(
        any(_bit(bits, letter) == ("0" if negated else "1") for negated, letter in literals(clause))
        for clause in clauses
    )


def falsify(formula: str, bits: str) -> str:
    """Return the bits with the variables of the first clause changed so that the clause is false."""
    values = dict(enumerate(bits))
    values |= {ord(letter) - ord("A"): "1" if negated else "0" for negated, letter in literals(formula.split("&")[0])}
    return "".join(values.get(position, "0") for position in range(max(values) + 1))


def literals(clause: str) -> list[tuple[str, str]]:
    """Return (`!` or empty, letter) for each literal of a clause."""
    return _LITERAL.findall(clause)


def _bit(bits: str, letter: str) -> str:
    position = ord(letter) - ord("A")
    return bits[position] if position < len(bits) else "0"
