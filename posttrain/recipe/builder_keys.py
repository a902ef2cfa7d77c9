"""The builders of preference pairs as a recipe names them, and which keys each of them reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

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

# Keys that only these builders read.
OWN: dict[str, tuple[Builder, ...]] = {
    "past": ("temporal", "versus_past"),
    "future": ("temporal",),
    "teacher": ("large_margin", "verified", "guided"),
    "max_pairs": ("right_wrong", "versus_past", "gold_vs_own", "broken_format"),
    "prefer_teacher": ("verified",),
    "min_positive": ("large_margin",),
    "margin": ("large_margin",),
    "margin_student": ("large_margin",),
    "min_length": ("after_verification",),
    "flags": ("after_verification", "large_margin"),
}


def problems(recipe: Any) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, what would be right) of a recipe that makes pairs."""
    for key, builders in OWN.items():
        chosen = getattr(recipe, key) != type(recipe).model_fields[key].get_default(call_default_factory=True)
        if chosen and recipe.builder not in builders:
            yield key, f"does nothing with builder {recipe.builder}", f"it is for {', '.join(builders)}"
    for key in NEEDS.get(recipe.builder, ()):
        if getattr(recipe, key) is None:
            yield "builder", f"{recipe.builder} needs `{key}`", f"write `{key}`: completions of that model"
