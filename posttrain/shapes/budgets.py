"""AnytimeReasoner: one thought, answered several times at each of several token budgets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from posttrain.batch import Segment
from posttrain.errors import UserError
from posttrain.registry import register
from posttrain.shapes.protocol import Asked, Row, Sampled

CLOSING = "...\n</think>\n\n"


@register("shape", "budgets", paper="2505.13438", needs=("shared_reward", "parts"))
async def answer_at_budgets(
    asked: Asked,
    *,
    budgets: tuple[int, ...] = (2000, 4000, 6000, 8000),
    num_answers: int = 4,
    closing: str = CLOSING,
    close: str = "</think>",
    answer_tokens: int = 128,
) -> list[Row]:
    """AnytimeReasoner: a thought of at most budgets[-1] tokens is cut at every budget, and num_answers answers are
    sampled after each cut.

    The tokens of `closing` follow each cut and are not trained on. A thought that ends with `close` before a budget is
    answered whole at that and all later budgets, and what follows `close` is dropped. Each answer is a scored row, with
    the thought before it not trained on. The thought is the last row, divided into parts that end at the budgets, and
    has no reward of its own: `advantage: budget_relative` assigns its credit. answer_tokens: maximum length of an
    answer. Raises UserError for budgets that do not ascend or exceed rollout.max_new_tokens.
    """
    check_budgets(budgets, asked.max_new_tokens)
    if num_answers < 1:
        raise UserError(f"rollout.shape `budgets`: num_answers {num_answers}", allowed="1 or more")
    (whole,) = await asked.sample([asked.prompt], budgets[-1])
    end = count_tokens_through(whole.ids_without_eos, asked.localize(close), asked.decode)
    thought, closing_ids = whole.ids_without_eos[:end], asked.encode(asked.localize(closing))
    cuts = [(thought[:budget], () if end is not None and budget >= len(thought) else closing_ids) for budget in budgets]
    prompts = [(*asked.prompt, *part, *closed) for part, closed in cuts for _ in range(num_answers)]
    answers = iter(await asked.sample(prompts, answer_tokens))
    rows = [
        _answer_row(asked, number, (*part, *closed), next(answers))
        for number, (part, closed) in enumerate(cuts)
        for _ in range(num_answers)
    ]
    ends = tuple(min(budget, len(thought)) - 1 for budget in budgets)
    return [*rows, Row(asked.prompt, (whole.first(len(thought)),), "stop", scored=False, ends=ends)]


def _answer_row(asked: Asked, number: int, before: tuple[int, ...], answer: Sampled) -> Row:
    """Return the row of an answer at budget `number`; the whole row belongs to that part."""
    segments = (Segment("injected", before), answer.segment)
    return Row(asked.prompt, segments, answer.finish, ends=(*[-1] * number, len(before) + len(answer.ids) - 1))


def check_budgets(budgets: Sequence[int], max_new_tokens: int) -> None:
    """Raise UserError unless budgets ascend within 1 to max_new_tokens."""
    if not budgets or budgets[0] < 1 or any(b <= a for a, b in itertools.pairwise(budgets)):
        raise UserError(f"rollout.shape `budgets`: budgets {list(budgets)}", allowed="rising numbers of tokens")
    if budgets[-1] > max_new_tokens:
        raise UserError(
            f"rollout.shape `budgets`: a thought of {budgets[-1]} tokens is longer than a completion",
            allowed=f"budgets up to rollout.max_new_tokens ({max_new_tokens})",
        )


def count_tokens_through(ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> int | None:
    """Return the number of tokens until their decoded text contains `text`; None if it never does."""
    if not text or text not in decode(ids):
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if text in decode(ids[:middle]) else (middle + 1, high)
    return low
