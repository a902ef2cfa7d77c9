"""Variants that show a part of a given solution, in the prompt or as the beginning of the answer."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.batch import Variant
from posttrain.registry import register
from posttrain.variants.plan import Asked, Outcome

PREFIX_PROMPT = "{prompt}\n\nFor reference, the answer begins like this:\n{hint}"
CONTINUE_PROMPT = (
    "{prompt}\n\nHere is the first part of a correct solution. Study it, then carry on from where it stops, without"
    " repeating it:\n{hint}"
)


@register(
    "prompt_variants",
    "hint_on_failure",
    paper="2507.10628",
    needs=("solution", "hinted"),
    note=(
        "The authors' loop puts the plain prompt back on groups that an earlier stage has rescued; here every row keeps"
        " the prompt that it was sampled from. Leaving out the lines of the final answer, and the sentence before the"
        " hint, are ours."
    ),
)
def hint_on_failure(
    asked: Asked,
    *,
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75),
    start_step: int = 0,
    spare_answer: bool = True,
    user: str = PREFIX_PROMPT,
) -> list[Variant]:
    """GHPO: a group without a correct answer is sampled again with an increasing part of the solution in its prompt.

    Stage 0 is the plain prompt. While no rollout of the newest stage is correct and a ratio remains, all rollouts are
    replaced by new ones with the first round(ratio * characters) of the solution in the user message (`{hint}` in
    `user`). The hint is part of the prompt and has no loss. start_step: no hints before this step. spare_answer: the
    closing lines that name the row's `answer` are removed first.
    """
    text = asked.decode(asked.solution)
    text = strip_closing_answer(text, asked.row.get("answer")) if spare_answer else text
    stage = len(asked.rounds)
    if stage == 0:
        return [Variant(note={"ratio": 0.0, "stage": 0})]
    if asked.rounds[-1].is_solved or stage > len(ratios) or not text or asked.step < start_step:
        return []
    ratio = ratios[stage - 1]
    hint = text[: round(ratio * len(text))]
    note = {"ratio": ratio, "stage": stage}
    return [Variant(f"hint {ratio:g}", user=user, fills={"hint": hint}, hinted=True, replaces=True, note=note)]


@register(
    "prompt_variants",
    "solution_prefix",
    paper="2601.18779",
    needs=("solution", "hinted"),
    note=(
        "The paper probes with the base model before training; here a problem is probed when it is first drawn, by the"
        " policy of that step, unless `fraction` names a column with the result. Its grid of fractions and what counts"
        " as hard were not confirmed: give it hard problems only."
    ),
)
class SolutionPrefix:
    """POPE: hard problems with the shortest sufficient part of their solution in the prompt, mixed with plain ones.

    A sampled problem is guided with probability `guided`, else plain; the two are never in one group. When a problem is
    first guided, the fractions are tried in order until a rollout is correct, and the first sufficient fraction is
    stored (`fallback` if none is). The user message then ends with max(1, floor(fraction * tokens)) tokens of the
    solution (`{hint}` in `user`), cut before the row's `answer` appears (spare_answer). This part has no loss.
    """

    def __init__(
        self,
        *,
        fractions: tuple[float, ...] = (0.25, 0.5, 0.75),
        fallback: float = 0.25,
        guided: float = 0.5,
        fraction: str | None = None,
        spare_answer: bool = True,
        user: str = CONTINUE_PROMPT,
    ) -> None:
        self.fractions, self.fallback, self.guided = fractions, fallback, guided
        self.fraction, self.spare_answer, self.user = fraction, spare_answer, user

    def plan(self, asked: Asked) -> list[Variant]:
        """See `Planner.plan`."""
        known = (asked.memory or {}).get(asked.uid, asked.row.get(self.fraction) if self.fraction else None)
        tried = len(asked.rounds)
        if not asked.solution or asked.random().random() >= self.guided:
            return [] if tried else [Variant()]
        if known is not None:
            return [] if tried else [self._make_variant(asked, float(known), replaces=False)]
        if tried > len(self.fractions) or (tried and asked.rounds[-1].is_solved):
            return []
        fraction = (*self.fractions, self.fallback)[tried]
        if tried == len(self.fractions) and fraction == self.fractions[-1]:
            return []  # the rollouts at the fallback were sampled in the last round
        return [self._make_variant(asked, fraction, replaces=tried > 0)]

    def _make_variant(self, asked: Asked, fraction: float, *, replaces: bool) -> Variant:
        text = asked.decode(asked.solution[: prefix_tokens(fraction, len(asked.solution))])
        text = cut_before_answer(text, asked.row.get("answer")) if self.spare_answer else text
        name, note = f"prefix {fraction:g}", {"fraction": fraction}
        return Variant(name, user=self.user, fills={"hint": text}, hinted=True, replaces=replaces, note=note)

    def learn(self, memory: Mapping[str, float] | None, outcomes: Sequence[Outcome]) -> dict[str, float]:
        """See `Planner.learn`: returns the fraction of every probed problem."""
        fractions = dict(memory or {})
        for outcome in outcomes:
            fraction = outcome.variant.note.get("fraction")
            if fraction is not None and outcome.uid not in fractions:
                fractions[outcome.uid] = shortest_fraction([fraction], [sum(map(bool, outcome.correct))], self.fallback)
        return fractions


def shortest_fraction(fractions: Sequence[float], right: Sequence[float], fallback: float = 0.25) -> float:
    """Return the smallest fraction with a correct completion, else `fallback`. right: correct completions at each."""
    return min((f for f, count in zip(fractions, right, strict=True) if count > 0), default=fallback)


def prefix_tokens(fraction: float, length: int) -> int:
    """Return max(1, floor(fraction * length)) tokens of a solution; 0 of an empty one."""
    return min(max(1, math.floor(fraction * length + 1e-9)), length)  # 0.29 * 100 is 28.999999999999996


@register(
    "prompt_variants",
    "trace_prefix",
    paper="2601.18795",
    needs=("solution", "hinted", "begins_answer"),
    note="Read from notes on the paper. The traces must be right ones of hard problems, which is for you to check.",
)
def trace_prefix(
    asked: Asked,
    *,
    cuts: int = 3,
    shortest: float = 0.4,
    longest: float = 0.8,
    mixture: tuple[float, float] = (3000.0, 1000.0),
) -> list[Variant]:
    """PrefixRL: the policy continues correct traces from an intermediate point.

    `mixture` is the ratio of prefixed prompts to plain ones. A prefixed answer begins with one of `cuts` prefixes of
    the trace, each cut at floor(fraction * tokens), at least 1 and at most all but one, with a fraction between
    `shortest` and `longest` that is drawn once per prefix and stays fixed. The prefix is part of the state: it has no
    loss and no ratio.
    """
    if asked.rounds:
        return []
    draw = asked.random()
    if len(asked.solution) < 2 or draw.random() >= prefixed_share(*mixture):
        return [Variant()]
    number = draw.randrange(cuts)
    fraction = random.Random(f"{asked.uid}/{number}").uniform(shortest, longest)
    cut = cut_tokens(fraction, len(asked.solution))
    return [Variant(f"prefix {number}", begin=asked.solution[:cut], hinted=True, note={"cut": cut})]


def prefixed_share(prefixed: float = 3000.0, plain: float = 1000.0) -> float:
    """Return the share of prefixed prompts in a mixture with `prefixed` : `plain` prompts."""
    return prefixed / (prefixed + plain)


def cut_tokens(fraction: float, length: int) -> int:
    """Return floor(fraction * length), at least 1 and at most length - 1; 0 if the trace has fewer than two tokens."""
    return min(max(math.floor(fraction * length + 1e-9), 1), length - 1) if length > 1 else 0


def cut_before_answer(text: str, answer: Any) -> str:
    """Return the text before the first occurrence of the answer as a whole word; all of it if there is none."""
    found = _answer_pattern(answer)
    match = found.search(text) if found else None
    return text[: match.start()].rstrip() if match else text


def strip_closing_answer(text: str, answer: Any) -> str:
    """Return the text without its last lines that name the answer; if one line remains, cut before the answer."""
    found, lines = _answer_pattern(answer), text.rstrip().split("\n")
    if not found:
        return text
    while len(lines) > 1 and (found.search(lines[-1]) or not lines[-1].strip()):
        lines.pop()
    left = "\n".join(lines)
    return cut_before_answer(left, answer) if len(lines) == 1 else left


def _answer_pattern(answer: Any) -> re.Pattern[str] | None:
    words = "" if answer is None or isinstance(answer, list | dict) else str(answer).strip()
    return re.compile(rf"(?<![\w.]){re.escape(words)}(?![\w])") if words else None
