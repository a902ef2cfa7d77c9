"""mergekit's parameters: a number, a list that runs over the layers, or values by a filter on the tensor's name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from posttrain.recipe.merge_sections import Filtered

Setting = float | Sequence[float] | Sequence[Filtered]

_LAYER = re.compile(r"\.(\d+)\.")


def layer_count(names: Iterable[str]) -> int:
    """How many layers the names count."""
    return 1 + max((int(found[1]) for name in names if (found := _LAYER.search(name))), default=-1)


def value_at(setting: Setting | None, name: str, layers: int) -> float | None:
    """What a setting comes to for one tensor; None if none of its filters fits (or there is no setting).

    Filters are parts of the name, the first that fits decides. A list is spread over the layers and interpolated; what
    comes before the layers (embeddings) has its first value, what comes after them its last (in mergekit its first).
    """
    if setting is None or isinstance(setting, int | float):
        return setting
    if any(isinstance(entry, Filtered) for entry in setting):
        entries = [entry for entry in setting if isinstance(entry, Filtered)]
        fits = (e for e in entries if e.filter is None or e.filter == "*" or e.filter in name)
        return next((value_at(entry.value, name, layers) for entry in fits), None)
    return _interpolated([float(x) for x in setting if not isinstance(x, Filtered)], _depth(name, layers))


def _depth(name: str, layers: int) -> float:
    """0 for the first layer and what comes before it, 1 for the last and what comes after it."""
    found = _LAYER.search(name)
    if found is None:
        return 0.0 if "emb" in name or "wte" in name or "wpe" in name else 1.0
    return int(found[1]) / (layers - 1) if layers > 1 else 0.0


def _interpolated(values: Sequence[float], place: float) -> float:
    position = place * (len(values) - 1)
    low = min(int(position), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (position - low) * (values[high] - values[low])
