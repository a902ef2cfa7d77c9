"""ACRE: a multiple-choice question answered a second time, with the same thought and shuffled options."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import UserError, count_noun
from posttrain.registry import register
from posttrain.shapes.exits import count_tokens_before
from posttrain.shapes.protocol import Asked, Row

SECOND = '\n<second permutation="{permutation}">{answer}</second>'
_BLOCK = re.compile(r"<second permutation=")
_LETTERS = re.compile(r"\b((?i:option|choice|answer))(\s+(?:is\s+)?)\(?([A-Z])\)?(?!\w)|\(([A-Z])\)")


@register(
    "shape",
    "shuffled_options",
    paper="2510.10104",
    note=("Reconstructed from the abstract. That letters in the thought become the options' texts is ours."),
)
async def ask_again(
    asked: Asked,
    *,
    options: str = "options",
    answer: str = "answer",
    close: str = "</think>",
    rewrite_letters: bool = True,
    answer_tokens: int = 16,
) -> list[Row]:
    """ACRE: a completion, and a second answer from its thought after the question's options are shuffled.

    Only the completion is trained on. Rewards read it followed by a block `<second permutation="2 0 1">...</second>`:
    position j of the second question showed the original option permutation[j] (`reasoning.acre`). options, answer:
    data columns with the options' texts, in the order in which the prompt lists them, and the letter of the correct
    one, whose position always changes. The thought ends with `close`; a completion without `close`, or truncated, is
    not asked again. rewrite_letters: `option B`, `answer is B` and `(B)` in the thought become the option's text,
    because letters mean other options after the shuffle. answer_tokens: maximum length of the second answer, which is
    decoded greedily. Raises UserError for a row whose options do not occur in its prompt.
    """
    texts, gold = read_options(asked.row, options, answer)
    permutation = draw_permutation(len(texts), gold, asked.random())
    shuffled = shuffle_options(asked.decode(asked.prompt), texts, permutation)
    (whole,) = await asked.sample([asked.prompt])
    close = asked.localize(close)
    end = count_tokens_before(whole.ids_without_eos, close, asked.decode)
    second = ""
    if whole.finish == "stop" and end < len(whole.ids_without_eos):
        thought = asked.decode(whole.ids_without_eos[:end])
        thought = replace_letters(thought, texts) if rewrite_letters else thought
        prompt = asked.encode(shuffled + thought + close + "\n")
        if len(prompt) < asked.window:
            (reply,) = await asked.sample([prompt], answer_tokens, greedy=True)
            second = asked.text(reply.ids).strip()
    block = SECOND.format(permutation=" ".join(map(str, permutation)), answer=_BLOCK.sub("", second))
    return [Row(asked.prompt, (whole.segment,), whole.finish, text=_BLOCK.sub("", asked.text(whole.ids)) + block)]


def read_options(row: Mapping[str, Any], options: str, answer: str) -> tuple[list[str], int]:
    """Return the texts of a row's options and the index of the correct one. Raises UserError for a row without them."""
    texts, letter = row.get(options), str(row.get(answer) or "").strip().upper()
    if not isinstance(texts, Sequence) or isinstance(texts, str) or len(texts) < 2:
        raise UserError(
            f"rollout.shape `shuffled_options`: a row's column `{options}` is {texts!r}",
            allowed="a list of two texts or more, in the order of their letters",
        )
    gold = ord(letter) - ord("A") if len(letter) == 1 else -1
    if not 0 <= gold < len(texts):
        raise UserError(
            f"rollout.shape `shuffled_options`: a row's column `{answer}` is {letter!r}, and it has "
            f"{count_noun(len(texts), 'option')}",
            allowed="the letter of the right one",
        )
    return [str(text) for text in texts], gold


def draw_permutation(count: int, gold: int, draw: random.Random) -> list[int]:
    """Draw which original option is shown at each position; the correct one (`gold`) always changes its position."""
    while True:
        found = draw.sample(range(count), count)
        if found[gold] != gold:
            return found


def shuffle_options(prompt: str, texts: Sequence[str], permutation: Sequence[int]) -> str:
    """Return the prompt with texts[permutation[j]] in place of option j. Options are matched in order, from the end.

    Raises UserError if the prompt does not contain an option in that order.
    """
    parts: list[str] = []
    head = prompt
    for option in reversed(range(len(texts))):
        at = head.rfind(texts[option])
        if at < 0 or not texts[option]:
            raise UserError(
                f"rollout.shape `shuffled_options`: the prompt has no option {texts[option]!r}, or not in its order",
                hint="write the options into the prompt as the column has them, e.g. by data.prompt_template",
            )
        parts.append(texts[permutation[option]] + head[at + len(texts[option]) :])
        head = head[:at]
    return head + "".join(reversed(parts))


def replace_letters(thought: str, texts: Sequence[str]) -> str:
    """Replace the letter in `option B`, `answer is B` and `(B)` by the option's text; other letters do not change."""

    def text_of(match: re.Match[str]) -> str:
        letter = match[3] or match[4]
        number = ord(letter) - ord("A")
        if number >= len(texts):
            return match[0]
        return f"{match[1] or ''}{match[2] or ''}{texts[number]}"

    return _LETTERS.sub(text_of, thought)
