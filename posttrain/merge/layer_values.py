"""mergekit's parameter values: a number, a list interpolated over the layers, or values by tensor-name filter."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.recipe.merge_sections import Filtered

Setting = float | Sequence[float] | Sequence[Filtered]


def value_at(setting: Setting | None, name: str, depth: float) -> float | None:
    """Return the value of a setting for one tensor; None without a setting or if none of its filters matches.

    A filter is a substring of the tensor name; the first match wins. A list is spread over the layers and interpolated.

    Args:
        depth: 0 for the first layer, 1 for the last; 0 for tensors outside the layers, as in mergekit.
    """
    if setting is None or isinstance(setting, int | float):
        return setting
    if any(isinstance(entry, Filtered) for entry in setting):
        entries = [entry for entry in setting if isinstance(entry, Filtered)]
        fits = (e for e in entries if e.filter is None or e.filter == "*" or e.filter in name)
        return next((value_at(entry.value, name, depth) for entry in fits), None)
    return _interpolate([float(x) for x in setting if not isinstance(x, Filtered)], depth)


def _interpolate(values: Sequence[float], place: float) -> float:
    position = place * (len(values) - 1)
    low = min(int(position), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (position - low) * (values[high] - values[low])
