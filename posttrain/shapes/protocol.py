"""What a shape of rollouts is given and what it returns. `rollout/continuation.py` runs it on an engine.

A shape is a coroutine function `async (asked, **its keys) -> list of rows`, called once a rollout. It samples by
`await asked.sample(prompts)` as often as it likes, each time with other prompts: the tokens so far and a sentence, a
part of them, a summary. `await asked.grade(rows)` scores rows on the way, for a search. Everything random comes from
`asked.random()` and the engine, so it does not depend on ranks.

One that learns from step to step is a class instead (`Learner`): its keys are those of `__init__`, `run(asked)` is the
coroutine, and what `learn` returns comes back as `asked.memory` in later steps.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from posttrain.batch import FinishReason, Node, Segment, Turn, WorkflowCall


class Sampled(NamedTuple):
    """What the engine wrote behind one prompt. version: of the policy that began it."""

    segment: Segment
    finish: FinishReason
    version: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """Its tokens, with the one that ended it."""
        return self.segment.ids

    def first(self, count: int) -> Segment:
        """Its first `count` tokens, as they were sampled."""
        ids, logps, versions = self.segment.ids, self.segment.logps, self.segment.versions
        return dataclasses.replace(
            self.segment, ids=ids[:count], logps=logps and logps[:count], versions=versions and versions[:count]
        )

    @property
    def written(self) -> tuple[int, ...]:
        """Its tokens without the one that ended it."""
        return self.ids[:-1] if self.finish == "stop" else self.ids


class Draw(Protocol):
    """Asks the engine: prompts, and the most new tokens of each -> what was sampled. greedy: the most probable tokens,
    whatever the recipe's temperature. adapter: which of a model's adapters answers; None = the first."""

    def __call__(
        self,
        prompts: Sequence[tuple[int, ...]],
        limits: Sequence[int],
        /,
        *,
        greedy: bool = False,
        adapter: str | None = None,
    ) -> Awaitable[list[Sampled]]: ...


class Grade(NamedTuple):
    """What the recipe's rewards say of a row: their weighted sum, None = not scored; and whether it is right, None =
    nobody knows."""

    reward: float | None
    correct: bool | None


@dataclass(frozen=True)
class Row:
    """One row of the trained batch.

    prompt: tokens that the completion continues; they have no loss. segments: the completion; those of kind `model` are
    trained on. scored: rewards read it; a row that is not scored has no reward of its own. text: what rewards read;
    None = the completion. nodes: where the row is a path through a tree, the node of each segment. ends: the token that
    ends each part of the completion, from 0 and rising, -1 for parts before its first token; for advantages that credit
    parts. call: of a workflow, which of its calls the row is, and adapter: which of several made it. goes_on: the
    rollout has not ended and goes on in the next step, with these segments as `Asked.begun`. older: how many of its
    tokens earlier steps have sampled. turns, world_score: of a path through an environment.
    """

    prompt: tuple[int, ...]
    segments: tuple[Segment, ...]
    finish: FinishReason
    scored: bool = True
    text: str | None = None
    nodes: tuple[Node, ...] = ()
    ends: tuple[int, ...] = ()
    call: WorkflowCall | None = None
    adapter: str | None = None
    goes_on: bool = False
    older: int = 0
    turns: tuple[Turn, ...] = ()
    world_score: float | None = None


@dataclass(frozen=True)
class Asked:
    """One rollout to be made.

    prompt: tokens of the data's prompt. row: all columns of the data. max_new_tokens: that of the recipe. window: most
    tokens of a prompt with what is sampled behind it. draw: asks the engine.
    grade: rows -> what the recipe's rewards say of each; a row that is graded and returned is not scored again.
    encode, decode: text to tokens and back, special tokens included. text: tokens to text without special tokens.
    begun: what earlier steps have sampled of this rollout. memory: what `learn` has kept of earlier steps.
    world: makes the recipe's environment, where a shape may act in one; reply: (last token, text, most tokens of it) ->
    tokens of a message that it shows.
    """

    prompt: tuple[int, ...]
    row: Mapping[str, Any]
    max_new_tokens: int
    window: int
    seed: int
    draw: Draw
    grade: Callable[[Sequence[Row]], Awaitable[list[Grade]]]
    encode: Callable[[str], tuple[int, ...]]
    decode: Callable[[Sequence[int]], str]
    text: Callable[[Sequence[int]], str]
    begun: tuple[Segment, ...] = ()
    memory: Any = None
    world: Callable[[], Any] | None = None
    reply: Callable[[int, str, int], tuple[int, ...]] | None = None

    def random(self) -> random.Random:
        """The same numbers whenever this rollout is made."""
        return random.Random(self.seed)

    async def sample(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | None = None, *, greedy: bool = False
    ) -> list[Sampled]:
        """One completion of each prompt, at most max_tokens long (default and most: max_new_tokens). greedy: of the
        most probable tokens; such tokens are for rewards and not to be trained on.

        Raises ValueError for a prompt that leaves no room in `window`.
        """
        most = min(max_tokens or self.max_new_tokens, self.max_new_tokens)
        limits = [min(most, self.window - len(prompt)) for prompt in prompts]
        if limits and min(limits) < 1:
            longest = max(map(len, prompts))
            raise ValueError(
                f"sample: a prompt of {longest} tokens; with what is sampled behind it, it may have {self.window} "
                "(a key `answer_tokens` of the shape makes it longer)"
            )
        return await self.draw([tuple(prompt) for prompt in prompts], limits, greedy=greedy) if prompts else []


class Ended(NamedTuple):
    """A scored row of a step that is over. ids: of its completion. given: it was stored, and the policy sampled nothing
    of it. reward, correct: None = not scored, or nobody knows. finish: `length` where a limit cut it off."""

    uid: str
    ids: tuple[int, ...]
    given: bool
    reward: float | None
    correct: bool | None
    finish: str = "stop"


class Remembered(NamedTuple):
    """What `learn` makes of a step. memory: comes back as `Asked.memory`, values of JSON; None = nothing. metrics:
    numbers for metrics.jsonl."""

    memory: Any
    metrics: Mapping[str, float] = {}


class Learner(Protocol):
    """A shape with a memory, with its keys bound."""

    async def run(self, asked: Asked) -> Sequence[Row]:
        """The rows of one rollout."""
        ...

    def learn(self, memory: Any, ended: Sequence[Ended], step: int) -> Remembered:
        """What is known behind a step (from 0): a function of what was known before it and of all its scored rows,
        which are the same on all ranks."""
        ...
