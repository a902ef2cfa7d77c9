"""T-PPO: rollouts sampled in windows; an unfinished rollout continues in the next step, under the newer policy."""

from __future__ import annotations

from posttrain.errors import UserError
from posttrain.registry import register
from posttrain.shapes.protocol import Asked, Row


@register("shape", "windows", paper="2506.15050", needs=("goes_on",))
async def sample_window(asked: Asked, *, window: int = 8192) -> list[Row]:
    """T-PPO: samples at most `window` new tokens of a rollout per step. An unfinished rollout is trained on without a
    reward and continues in the next step; it is scored when it ends or has max_new_tokens.

    An unfinished rollout replaces a new one in the next step, so a step never waits for more than a window. Needs
    `advantage: extended_gae`. Raises UserError for a window below 1.
    """
    if window < 1:
        raise UserError(f"rollout.shape `windows`: window {window}", allowed="1 or more")
    written = tuple(i for segment in asked.begun for i in segment.ids)
    left = asked.max_new_tokens - len(written)
    (more,) = await asked.sample([(*asked.prompt, *written)], min(window, left))
    ended = more.finish == "stop" or len(more.ids) >= left
    return [
        Row(
            asked.prompt,
            (*asked.begun, more.segment),
            more.finish,
            scored=ended,
            goes_on=not ended,
            older=len(written),
        )
    ]
