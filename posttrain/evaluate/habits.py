"""Four habits of reasoning that takes RL well (arXiv 2503.01307), counted by patterns.

The paper lets a language model judge each trace; these patterns are a cheap stand-in of ours, for English text.
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
    """How often each habit shows in a trace."""
    return {name: len(pattern.findall(trace)) for name, pattern in _PATTERNS.items()}


def habit_rates(traces: Sequence[str]) -> dict[str, dict[str, float]]:
    """Habit -> {`count`: mean count a trace, `share`: share of the traces that show it}; {} without traces."""
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
