"""Grid of `posttrain sweep R optim.lr=1e-5,3e-5 run.seed=0,1,2`: overrides with several values, and the resulting
runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from posttrain.errors import RecipeError

SEED = "run.seed"
MAX_RUNS = 1000  # of one sweep


@dataclass(frozen=True)
class GridPoint:
    """One run of a sweep. setting: its varied values except the seed (`optim.lr=1e-5`), by which the table groups runs;
    "" if only the seed varies. overrides: the command-line overrides of the run."""

    setting: str
    seed: str
    overrides: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Folder of the run below the sweep's folder: the setting, then the seed."""
        named = re.sub(r"[^\w=.,+-]+", "_", self.setting)[:120] or "runs"
        return f"{named}/seed-{self.seed}" if self.seed else named


def split_values(text: str) -> list[str]:
    """Split `a,b,c` at commas outside brackets, braces and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        if char == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def grid(words: Sequence[str]) -> tuple[list[str], list[GridPoint]]:
    """Return (overrides shared by all runs, the runs): every combination of values, seeds innermost, then the last key.

    Raises RecipeError if no key has several values, a value is empty or repeated, or there are too many runs.
    """
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        values = split_values(text) if equals else []
        if len(values) < 2:
            fixed.append(word)
            continue
        if key in axes:
            raise RecipeError(f"{key} is given twice", where="command line")
        if "" in values or len(set(values)) < len(values):
            what = "an empty value" if "" in values else "a value twice"
            raise RecipeError(f"{key}: {what} in `{text}`", where="command line", hint=f"write {key}=A,B,C")
        axes[key] = values
    if not axes:
        hint = "write posttrain sweep R optim.lr=1e-5,3e-5 run.seed=0,1,2"
        raise RecipeError("no key has several values", where="command line", hint=hint)
    points = list(_points(axes))
    if len(points) > MAX_RUNS:
        raise RecipeError(f"{len(points)} runs; a sweep has at most {MAX_RUNS}", where="command line")
    return fixed, points


def _points(axes: dict[str, list[str]]) -> Iterator[GridPoint]:
    seeds = axes.get(SEED, [""])
    others = {key: values for key, values in axes.items() if key != SEED}
    for chosen in itertools.product(*others.values()):
        pairs = [f"{key}={value}" for key, value in zip(others, chosen, strict=True)]
        for seed in seeds:
            yield GridPoint(",".join(pairs), seed, (*pairs, *([f"{SEED}={seed}"] if seed else [])))
