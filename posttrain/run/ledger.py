"""Accounting of a run's tokens and seconds: sums over its steps, for the summary and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.run.progress import duration

NAMES = {
    "trained": "trained on",
    "without_update": "in steps without an update",
    "without_signal": "in rows without a gradient (unscored, or an advantage of 0)",
    "dropped": "dropped by `keep` or `select`",
    "replaced": "in groups that were replaced by others",
    "kept": "kept for later steps",
    "cut": "cut, and masked by loss.mask_truncated",
    "masked": "masked otherwise",
    "context": "context of what is trained on",
    "eval": "evaluations",
    "final_save": "saving the final model",
}


def add(sums: dict[str, float], kind: str, values: Mapping[str, float]) -> None:
    """Add `values` to the sums `KIND/NAME`. kind: tokens or seconds."""
    for name, value in values.items():
        sums[f"{kind}/{name}"] = sums.get(f"{kind}/{name}", 0.0) + value


def ledger(sums: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the summary's `ledger`: tokens and seconds by name, including `seconds`; zeros are left out."""
    totals: dict[str, dict[str, float]] = {"tokens": {}, "seconds": {}}
    for key, value in (*sums.items(), *((f"seconds/{name}", value) for name, value in seconds.items())):
        kind, _, name = key.partition("/")
        if value:
            totals[kind][name] = int(value) if kind == "tokens" else round(value, 3)
    return totals


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """Return a summary's ledger as text, largest part first: one line for tokens, one for seconds. If `num_tokens`
    differs because it includes prompts, the line says so."""
    lines, found = [], summary.get("ledger") or {}
    read = summary.get("num_tokens")
    for kind, total in ((kind, sum(found.get(kind, {}).values())) for kind in ("tokens", "seconds")):
        if not total:
            continue
        parts = sorted(found[kind].items(), key=lambda item: -item[1])
        shown = ", ".join(f"{value / total:.0%} {NAMES.get(name, name)}" for name, value in parts)
        counted = f"{total:,.0f} tokens"
        if read is not None and read != total:
            counted = f"{total:,.0f} sampled tokens" + (f" (of {read:,} with their prompts)" if read > total else "")
        timed = f"{duration(total)} of steps, evaluations and saves"
        lines.append(f"{counted if kind == 'tokens' else timed}: {shown}")
    return lines
