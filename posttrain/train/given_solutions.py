"""Given solutions added to a step's rollouts (`solutions`): rows that are trained on but were not sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.batch import Rollout, Segment
from posttrain.train.context import TrainContext
from posttrain.train.scoring import score_while_sampling
from posttrain.verify.failures import Calls


def solution_rows(
    ctx: TrainContext, step: int, sampled: Sequence[Rollout], metrics: dict[str, Any]
) -> tuple[list[Rollout], list[Calls]]:
    """Build one scored row for each group of `sampled` that has a solution for its prompt.

    Returns the rows and the calls that scored them; adds counts to `metrics`. The tokens are of kind `given`: trained
    on, without log-probs of an engine.
    """
    groups = {rollout.group: rollout for rollout in sampled}
    rows = [
        Rollout(
            prompt=one.prompt,
            group=group,
            segments=(Segment("given", ctx.solutions[one.prompt.uid]),),
            text=ctx.loaded.tokenizer.decode(
                list(ctx.solutions[one.prompt.uid]), skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            finish="stop",
            version=one.version,
        )
        for group, one in groups.items()
        if one.prompt.uid in ctx.solutions
    ]
    if not rows:
        return rows, []
    with ctx.watchdog.phase("score"):
        with score_while_sampling(ctx, step) as scored:
            pass  # nothing is generated
        return rows, [scored.finish(rows, metrics)]
