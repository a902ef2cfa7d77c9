"""The builders of preference pairs as a recipe names them, and which keys each of them reads."""

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

# Completions of other models that a builder reads, and those that it cannot do without.
READS: dict[Builder, tuple[Other, ...]] = {
    "large_margin": ("teacher",),
    "verified": ("teacher",),
    "temporal": ("past", "future"),
    "versus_past": ("past",),
    "guided": ("teacher",),
}
NEEDS: dict[Builder, tuple[Other, ...]] = {"temporal": ("past",), "versus_past": ("past",), "guided": ("teacher",)}
