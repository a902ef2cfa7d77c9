"""Steps of a single-turn completion, and the check that something reads per-turn rewards. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

Split = Literal["lines", "paragraphs"]

# Separators of steps; a separator belongs to the step before it.
_ENDS = {"lines": re.compile(r"\n+"), "paragraphs": re.compile(r"\n[ \t]*\n\s*")}


def ends_of(text: str, split: Split | None) -> list[int]:
    """Return the end offset of each step, ascending; the last is the length of the text.

    Steps are never blank in a non-blank text.

    split: lines (a step ends with its line breaks), paragraphs (with a blank line), or None (the text is one step).
    """
    if split is None:
        return [len(text)]
    ends: list[int] = []
    start = 0
    for match in _ENDS[split].finditer(text):
        if text[start : match.end()].strip() and text[match.end() :].strip():
            ends.append(match.end())
            start = match.end()
    return [*ends, len(text)]


def parts_of(text: str, split: Split | None) -> list[str]:
    """Split a text into its steps; joined, the steps equal the text."""
    ends = ends_of(text, split)
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def problem(
    names: Sequence[str],
    advantage: str,
    params: Mapping[str, Any],
    needs: Collection[str],
    *,
    environment: bool,
    split: str | None,
) -> tuple[str, str, str]:
    """Return (recipe key, problem, hint) for a recipe with the per-turn rewards `names`; ('', '', '') if valid.

    needs: inputs required by the recipe's components. environment: whether steps of an environment may give rewards
    too.
    """
    right = "mark a reward with @per_turn (docs/rewards.md), e.g. turns.repeats"
    wanted = {"token_rewards", "turn_scores"} & set(needs)
    if split and not names and "turn_ids" not in needs:
        return "scoring.split", "does nothing: no reward is marked @per_turn", right
    if wanted and not names and not (environment and wanted == {"token_rewards"}):
        also = "" if environment else ", or use an `environment` whose steps give rewards"
        return "advantage.use", f"`{advantage}` reads rewards by turn, but no reward is marked @per_turn", right + also
    for key in ("tag", "step_reward") if "turn_scores" in wanted else ():
        if params.get(key) not in names:
            what = f"`{advantage}` reads `{params.get(key)}`, which is not a reward by turn of this recipe"
            return f"advantage.{key}", what, f"rewards by turn: {', '.join(names)}"
    return "", "", ""
