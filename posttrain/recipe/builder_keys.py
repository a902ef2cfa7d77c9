"""Builders of preference pairs by recipe name, and which completions of other models each of them reads."""

from __future__ import annotations

from typing import Literal

Builder = Literal[
    "right_wrong",
    "short_long",
    "best_worst",
    "tournament",
    "large_margin",
    "verified",
    "after_verification",
    "temporal",
    "versus_past",
    "gold_vs_own",
    "broken_format",
    "guided",
]
Other = Literal["past", "future", "teacher"]

# Builder -> completions of other models that it reads -> whether they are required.
OTHERS: dict[Builder, dict[Other, bool]] = {
    "temporal": {"past": True, "future": False},
    "versus_past": {"past": True},
    "large_margin": {"teacher": False},
    "verified": {"teacher": False},
    "guided": {"teacher": True},
}
