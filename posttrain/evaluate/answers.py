"""What a completion votes for: the answer that it marks as its own."""

from __future__ import annotations

from posttrain.verify.extract import Extractor, after_think, extract

# From the most explicit mark to the least.
MARKS: tuple[Extractor, ...] = ("answer_tag", "boxed", "hash", "anchor")


def voted_answer(completion: str, *, finished: bool) -> str | None:
    r"""The marked answer after the thought (`<answer>`, `\boxed`, `####`, `answer is`), else its last line that is not
    blank. A completion that was cut off (`finished` False) votes only with a marked answer: its last line is no end.
    """
    text = after_think(completion)
    marked = extract(text, MARKS)
    if marked is not None or not finished:
        return marked.strip() if marked else None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None
