"""Counts of four reasoning habits of models that improve under RL (arXiv 2503.01307), by patterns.

The paper lets a language model judge each trace; these patterns are a cheap substitute for English text, not from the
paper.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

HABITS = {
    "verification": r"\b(?:let(?:'s| me| us) (?:check|verify|confirm)"
    r"|(?:check|verify|confirm)(?:ing)? (?:that|if|whether|this|the)\b)",
    "backtracking": r"\b(?:wait\b|(?:that|this) (?:does not|doesn't|did not|didn't) work|go back|try again|instead\b)",
    "subgoals": r"\b(?:step \d+|the goal is|first,? (?:i|we|let)|next,? (?:i|we|let))\b",
    "backward_chaining": r"\b(?:work(?:ing)? backwards?"
    r"|to (?:reach|get) (?:the target|\d+),? (?:i|we|you) (?:need|can|must))\b",
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in HABITS.items()}


def count_habits(trace: str) -> dict[str, int]:
    """Count the occurrences of each habit in a trace."""
    return {name: len(pattern.findall(trace)) for name, pattern in _PATTERNS.items()}


def compute_habit_rates(traces: Sequence[str]) -> dict[str, dict[str, float]]:
    """Compute how often each habit occurs in traces.

    Returns for each habit {`count`: mean count per trace, `share`: share of the traces that show it}; {} without
    traces.
    """
    found = [count_habits(trace) for trace in traces]
    if not found:
        return {}
    return {
        name: {
            "count": sum(counts[name] for counts in found) / len(found),
            "share": sum(counts[name] > 0 for counts in found) / len(found),
        }
        for name in HABITS
    }
