"""S-GRPO: one thought, cut at several points and answered from each, to reward early correct exits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

from posttrain.batch import Segment
from posttrain.registry import register
from posttrain.shapes.protocol import Asked, Row, Sampled

INDUCER = "Time is limited, stop thinking and start answering.\n</think>\n\n"


@register(
    "shape",
    "serial_exit",
    paper="2505.07686",
    needs=("own_group",),
    note="No source says whether the copied part of the thought is trained on in each row: `loss_on` decides.",
)
async def serial_exit(
    asked: Asked,
    *,
    num_exits: int = 8,
    inducer: str = INDUCER,
    close: str = "</think>",
    answer_tokens: int = 256,
    loss_on: Literal["sampled", "answer_only"] = "sampled",
) -> list[Row]:
    """S-GRPO: samples a whole rollout, cuts its thought at num_exits points, and samples an answer from each. All
    answers are one group, the earliest cut first, the whole rollout last.

    Cut points are drawn uniformly from the thought's tokens (up to `close`, or all tokens without it), each at most
    once, so a short thought has fewer. The tokens of `inducer` follow each cut and are not trained on. answer_tokens:
    maximum length of an answer after a cut. loss_on: `sampled` trains each row on its part of the thought and its
    answer; `answer_only` excludes the copied thought. With group_size n a prompt has n such groups.
    """
    (whole,) = await asked.sample([asked.prompt])
    thought = count_tokens_before(whole.ids_without_eos, asked.localize(close), asked.decode)
    cuts = draw_cuts(thought, num_exits, asked.random())
    closing = asked.encode(asked.localize(inducer))
    answers = await asked.sample([(*asked.prompt, *whole.ids[:cut], *closing) for cut in cuts], answer_tokens)
    exits = [
        Row(
            asked.prompt,
            (copy_thought(whole, cut, loss_on), Segment("injected", closing), answer.segment),
            answer.finish,
        )
        for cut, answer in zip(cuts, answers, strict=True)
    ]
    return [*exits, Row(asked.prompt, (whole.segment,), whole.finish)]


def copy_thought(whole: Sampled, cut: int, loss_on: str) -> Segment:
    """Return the first `cut` tokens of a completion, trained on unless loss_on is `answer_only`."""
    return Segment("injected", whole.ids[:cut]) if loss_on == "answer_only" else whole.first(cut)


def draw_cuts(tokens: int, count: int, random: random.Random) -> list[int]:
    """Draw `count` numbers uniformly from 1 to `tokens`; returns them ascending, each once; [] for no tokens."""
    return sorted({random.randint(1, tokens) for _ in range(count)}) if tokens else []


def count_tokens_before(ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> int:
    """Return the number of tokens that decode to the text before the first `text`; all tokens if it does not occur."""
    found = decode(ids).find(text) if text else -1
    if found < 0:
        return len(ids)
    low, high = 0, len(ids)
    while low < high:  # the longest prefix whose text ends there or earlier
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(decode(ids[:middle])) <= found else (low, middle - 1)
    return low
