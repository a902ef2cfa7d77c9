"""`ROWS` of a reward script: data rows on which `reward test` tries right and wrong completions.

    ROWS = [{"prompt": ..., "answer": ...}, ...]

in a file with one reward function; with several, a dict `{"function": [...], ...}`. If the function needs parameters,
or cannot decide correctness, use a dict instead of the list: `{"rows": [...], "params": {...}, "correct":
"math.accuracy"}`; `correct` names a reward of weight 0 that decides correctness. `GOLD(row)`, or `GOLD = {"function":
...}`, writes a completion that earns full marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import RewardError
from posttrain.recipe.reward_sections import Reward
from posttrain.verify.contract import short_repr
from posttrain.verify.examples import only_reward
from posttrain.verify.load import load_reward, load_script
from posttrain.verify.reward_test_cases import Row

CORRECTNESS = "math.accuracy"  # for a reward that reads `correct`, unless its rows name another
_KEYS = ("rows", "params", "correct")


@dataclass(frozen=True)
class ScriptRows:
    """Rows of a reward function with the rewards to try on them: the function, and optionally a correctness reward."""

    function: str
    rewards: tuple[Reward, ...]
    rows: tuple[Row, ...]


def own_rows(path: Path, only: str | None = None) -> list[ScriptRows]:
    """Return the rows to try for each reward function of the script at `path`, in its order; [] without ROWS.

    only: restrict to this function.
    """
    module = load_script(path)
    written = module.get("ROWS")
    if not written:
        return []
    if not isinstance(written, Mapping) or "rows" in written:
        written = {only_reward(module, str(path)): written}
    return [_parse_entry(path, name, entry) for name, entry in written.items() if only in (None, name)]


def _parse_entry(path: Path, name: str, entry: Any) -> ScriptRows:
    where = f"{path}: ROWS of {name}"
    given = entry if isinstance(entry, Mapping) else {"rows": entry}
    if unknown := sorted(set(given) - set(_KEYS)):
        raise RewardError(f"unknown keys: {', '.join(unknown)}", where=where, allowed=f"known: {', '.join(_KEYS)}")
    rows = given.get("rows")
    if not isinstance(rows, Sequence) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise RewardError(f"not rows: {short_repr(rows)}", where=where, allowed='[{"prompt": ..., "answer": ...}, ...]')
    tried = Reward(use=f"{path}:{name}", params=dict(given.get("params", {})))
    beside = given.get("correct")
    if beside is None and "correct" in load_reward(tried, None).built_ins:
        beside = CORRECTNESS
    rewards = (tried,) if beside is None else (Reward(use=beside, weight=0, correct=True), tried)
    return ScriptRows(name, rewards, tuple({"uid": str(i), **row} for i, row in enumerate(rows)))
