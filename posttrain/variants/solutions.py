"""Parts of a given solution, shown in the prompt or put at the beginning of the answer."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.batch import Variant
from posttrain.registry import register
from posttrain.variants.plan import Asked, Outcome

BEHIND = "{prompt}\n\nFor reference, the answer begins like this:\n{hint}"
CONTINUE = (
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
    user: str = BEHIND,
) -> list[Variant]:
    """GHPO: a group without a right answer is sampled again, with a longer and longer beginning of the solution.

    Stage 0 is the plain prompt. While no rollout of the newest stage is right and a ratio is left, all rollouts are
    drawn anew with the first round(ratio * characters) of the solution in the user's message (`{hint}` in `user`), and
    take the place of those before. The hint is a part of the prompt: it has no loss. start_step: no hints before.
    spare_answer: the closing lines that name the row's `answer` are left out first.
    """
    text = asked.decode(asked.solution)
    text = without_closing_answer(text, asked.row.get("answer")) if spare_answer else text
    stage = len(asked.rounds)
    if stage == 0:
        return [Variant(note={"ratio": 0.0, "stage": 0})]
    if asked.rounds[-1].solved or stage > len(ratios) or not text or asked.step < start_step:
        return []
    ratio = ratios[stage - 1]
    hint = text[: hint_characters(ratio, len(text))]
    note = {"ratio": ratio, "stage": stage}
    return [Variant(f"hint {ratio:g}", user=user, fills={"hint": hint}, hinted=True, replaces=True, note=note)]


def hint_characters(ratio: float, length: int) -> int:
    """round(ratio * length), halves to the even number."""
    return round(ratio * length)


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

    A drawn problem is guided with probability `guided`, else plain; the two are never in one group. When it is first
    guided, the fractions are tried in order until a rollout is right, and the first that suffices is remembered
    (`fallback` where none does). The user's message then ends in max(1, floor(fraction * tokens)) tokens of the
    solution (`{hint}` in `user`), cut before the row's `answer` appears (spare_answer). It has no loss.
    """

    def __init__(
        self,
        *,
        fractions: tuple[float, ...] = (0.25, 0.5, 0.75),
        fallback: float = 0.25,
        guided: float = 0.5,
        fraction: str | None = None,
        spare_answer: bool = True,
        user: str = CONTINUE,
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
        if tried > len(self.fractions) or (tried and asked.rounds[-1].solved):
            return []
        fraction = (*self.fractions, self.fallback)[tried]
        if tried == len(self.fractions) and fraction == self.fractions[-1]:
            return []  # the rollouts at the fallback are there already
        return [self._make_variant(asked, fraction, replaces=tried > 0)]

    def _make_variant(self, asked: Asked, fraction: float, *, replaces: bool) -> Variant:
        text = asked.decode(asked.solution[: prefix_tokens(fraction, len(asked.solution))])
        text = before_answer(text, asked.row.get("answer")) if self.spare_answer else text
        name, note = f"prefix {fraction:g}", {"fraction": fraction}
        return Variant(name, user=self.user, fills={"hint": text}, hinted=True, replaces=replaces, note=note)

    def learn(self, memory: Mapping[str, float] | None, outcomes: Sequence[Outcome]) -> dict[str, float]:
        """See `Planner.learn`: the fraction of every problem that has been probed."""
        found = dict(memory or {})
        for outcome in outcomes:
            fraction = outcome.variant.note.get("fraction")
            if fraction is not None and outcome.uid not in found:
                found[outcome.uid] = shortest_fraction([fraction], [sum(map(bool, outcome.correct))], self.fallback)
        return found


def shortest_fraction(fractions: Sequence[float], right: Sequence[float], fallback: float = 0.25) -> float:
    """The smallest fraction with a right completion, `fallback` without one. right: right completions at each."""
    return min((f for f, count in zip(fractions, right, strict=True) if count > 0), default=fallback)


def prefix_tokens(fraction: float, length: int) -> int:
    """max(1, floor(fraction * length)) tokens of a solution, 0 of an empty one."""
    return min(max(1, math.floor(fraction * length)), length)


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
    """PrefixRL: the policy starts from inside a right trace, and learns to finish it.

    `mixture` says how many prefixed prompts there are to how many plain ones. A prefixed one begins the answer with one
    of `cuts` prefixes of the trace, each cut at floor(fraction * tokens), at least 1 and at most all but one, with a
    fraction that is drawn once and for all between `shortest` and `longest`. The prefix is a part of the state: it has
    no loss and no ratio.
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
    """The share of prefixed prompts in a mixture of so many prefixed and plain ones."""
    return prefixed / (prefixed + plain)


def cut_tokens(fraction: float, length: int) -> int:
    """floor(fraction * length) tokens, at least 1 and at most length - 1; 0 where the trace is too short to be cut."""
    return min(max(math.floor(fraction * length), 1), length - 1) if length > 1 else 0


def before_answer(text: str, answer: Any) -> str:
    """The text up to where the answer first stands as a word of its own; all of it where it does not."""
    found = _answer_pattern(answer)
    match = found.search(text) if found else None
    return text[: match.start()].rstrip() if match else text


def without_closing_answer(text: str, answer: Any) -> str:
    """The text without the lines at its end that name the answer; of one such line, what stands before the answer."""
    found, lines = _answer_pattern(answer), text.rstrip().split("\n")
    if not found:
        return text
    while len(lines) > 1 and (found.search(lines[-1]) or not lines[-1].strip()):
        lines.pop()
    left = "\n".join(lines)
    return before_answer(left, answer) if len(lines) == 1 else left


def _answer_pattern(answer: Any) -> re.Pattern[str] | None:
    words = "" if answer is None or isinstance(answer, list | dict) else str(answer).strip()
    return re.compile(rf"(?<![\w.]){re.escape(words)}(?![\w])") if words else None
