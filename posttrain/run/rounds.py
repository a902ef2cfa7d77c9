"""Rounds of a pipeline, recognized by the names of their stages: NAME.ROUND.STAGE."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain.seeds import derive

_NAME = re.compile(r"(?P<group>.+?)\.(?P<round>\d+)\.(?P<stage>.+)$")
# Keys of a stage's summary that are shown, if present.
SUMMARY_KEYS = ("accuracy", "mean_tokens", "pairs", "longer_chosen", "loss_first", "loss_last", "reward_last")
MILESTONE_KEYS = ("accuracy", "pairs", "loss_last", "reward_last")  # in the line that is printed when a round is done

Summary = Mapping[str, Any]
Row = dict[str, float]


def seed(of_pipeline: int, name: str, samplers: Sequence[str] = ()) -> int:
    """Return the seed of a stage: that of the pipeline, or in rounds one derived per round, so that rounds sample
    differently.

    samplers: names of all eval and generate stages, in order. In a round, each of them after the first has its name in
    its seed: in round 1 they may sample from the same model, and would get the same completions.
    """
    found = _NAME.match(name)
    if found is None:
        return of_pipeline
    others = (
        m for m in map(_NAME.match, samplers) if m and (m["group"], m["round"]) == (found["group"], found["round"])
    )
    first = next(others, found)
    own = [found["stage"]] if name in samplers and first["stage"] != found["stage"] else []
    return derive(of_pipeline, "round", int(found["round"]), *own) % 2**31


def progress(seeds: Iterable[Mapping[str, Summary | None]]) -> dict[str, list[Row]]:
    """Return NAME -> one row per round: `round`, and STAGE/NUMBER from its stages' summaries, as the mean over
    seeds."""
    gathered: dict[str, dict[int, dict[str, list[float]]]] = {}
    for stages in seeds:
        for name, summary in stages.items():
            found = _NAME.match(name)
            for key in SUMMARY_KEYS if found and summary else ():
                value = summary.get(key) if summary else None
                if found and isinstance(value, int | float):
                    row = gathered.setdefault(found["group"], {}).setdefault(int(found["round"]), {})
                    row.setdefault(f"{found['stage']}/{key}", []).append(float(value))
    return {
        group: [
            {"round": number, **{key: sum(values) / len(values) for key, values in row.items()}}
            for number, row in sorted(rows.items())
        ]
        for group, rows in gathered.items()
    }


def milestones(names: Sequence[str], done: Mapping[str, Summary]) -> list[str]:
    """Return a line about the round that the newest finished stage completes, if it does."""
    last = list(done)[-1] if done else ""
    found = _NAME.match(last)
    if found is None:
        return []
    own = [name for name in names if name.startswith(f"{found['group']}.{found['round']}.") and _NAME.match(name)]
    if own[-1] != last:
        return []
    every = {m["round"] for name in names if (m := _NAME.match(name)) and m["group"] == found["group"]}
    rows = progress([{name: done[name] for name in own}]).get(found["group"], [])
    shown = [(key, value) for row in rows for key, value in row.items() if key.rpartition("/")[2] in MILESTONE_KEYS]
    text = "  ".join(f"{_words(key)} {value:.3g}" for key, value in shown)
    return [f"{found['group']}: round {found['round']} of {len(every)} is done  {text}"] if rows else []


def table(rows: Sequence[Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of one NAME's rows as text."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    heads = [_words(column) for column in columns]
    return heads, [[f"{row[c]:.4g}" if c in row else "-" for c in columns] for row in rows]


def _words(key: str) -> str:
    return key.replace("/", " ").replace("_", " ")
