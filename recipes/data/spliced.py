"""Agent-R (2501.11425): a bad path up to its first bad step, a change of mind, then the good path.

Used as `source: ../data/spliced.py:spliced` with `params: {file: FILE}`. A line of FILE: good and bad (messages),
good_reward, bad_reward, first_bad (position in `bad` of the step that a judge calls bad first, or null). Used by
recipes/sft/agent_r.yaml. The environment must allow the good path after the bad step.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.data.sft_rows import splice

REVISIONS = (
    "Thought: My last step was a mistake. I go back to what I know and take another way.\nAction: wait",
    "Thought: This does not lead to the goal. I should correct it before I go on.\nAction: wait",
    "Thought: I see that I was wrong here. Let me do it differently.\nAction: wait",
)


def spliced(
    size: int | None = None, seed: int = 0, *, file: str, alpha: float = 0.5, beta: float = 0.2
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The first `size` rows (None: all) {messages} whose messages say which of them are trained on.

    alpha: a good path's reward must be above it; beta: and above the bad one's by more than this.
    """
    draw = random.Random(f"spliced/{seed}")
    made = 0
    for line in Path(file).expanduser().read_text(encoding="utf-8").splitlines():
        if not line.strip() or made == size:
            continue
        row = json.loads(line)
        turns = splice(
            row["good"],
            row["bad"],
            row["good_reward"],
            row["bad_reward"],
            row["first_bad"],
            alpha=alpha,
            beta=beta,
            revision=draw.choice(REVISIONS),
        )
        if turns is not None:
            made += 1
            yield {"messages": [turn.message for turn in turns]}
