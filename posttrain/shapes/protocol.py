"""Interface of rollout shapes. `rollout/continuation.py` runs a shape on an engine.

A shape is a coroutine function `async (asked, **its keys) -> list of rows`, called once per rollout. It samples with
`await asked.sample(prompts)` as often as it needs, each time with other prompts: the tokens so far and a sentence, a
part of them, a summary. `await asked.grade(rows)` scores intermediate rows, e.g. for a search. All randomness comes
from `asked.random()` and the engine, so it does not depend on ranks.

A shape that learns from step to step is a class instead (`Learner`): its keys are the arguments of `__init__`,
`run(asked)` is the coroutine, and what `learn` returns is passed back as `asked.memory` in later steps.
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
    """A completion of one prompt by the engine. version: policy version at its first token. by_text: it ended with a
    stop string, which is text that the model wrote, and not with an EOS token."""

    segment: Segment
    finish: FinishReason
    version: int = 0
    by_text: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        """Sampled tokens, including the EOS token."""
        return self.segment.ids

    def first(self, count: int) -> Segment:
        """Return the first `count` tokens as a segment, with their log-probs and versions."""
        ids, logps, versions = self.segment.ids, self.segment.logps, self.segment.versions
        return dataclasses.replace(
            self.segment, ids=ids[:count], logps=logps and logps[:count], versions=versions and versions[:count]
        )

    @property
    def ids_without_eos(self) -> tuple[int, ...]:
        """Sampled tokens without the EOS token."""
        return self.ids[:-1] if self.finish == "stop" and not self.by_text else self.ids


class Draw(Protocol):
    """Sampling function: prompts, and the maximum new tokens of each -> completions. greedy: take the most probable
    tokens, whatever the recipe's temperature. adapter: the adapter to sample with; None = the first."""

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
    """The recipe's rewards for a row: weighted sum (None = not scored) and correctness (None = unknown)."""

    reward: float | None
    correct: bool | None


@dataclass(frozen=True)
class Row:
    """One row of the training batch.

    prompt: tokens that the completion continues, without loss. segments: the completion; segments of kind `model` are
    trained on. scored: whether rewards read the row; an unscored row has no reward of its own. text: what rewards read;
    None = the completion. nodes: the node of each segment, if the row is a path through a tree. ends: last token of
    each part of the completion, from 0 and ascending, -1 for parts before its first token; for advantages that credit
    parts. call: the workflow call of the row, and adapter: the adapter that made it. goes_on: the rollout has not ended
    and continues in the next step, with these segments as `Asked.begun`. older: number of its tokens sampled by earlier
    steps. turns, world_score: of a path through an environment.
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
    """One rollout to generate.

    prompt: tokens of the data's prompt. row: all columns of the data. max_new_tokens: the recipe's. window: maximum
    tokens of a prompt plus completion. draw: samples from the engine. grade: rows -> their grades by the recipe's
    rewards; a row that is graded and returned is not scored again. encode, decode: text to tokens and back, special
    tokens included. text: tokens to text as rewards read it. localize: writes `<think>` and `</think>` in a text as the
    model marks its thoughts. begun: segments of this rollout from earlier steps. memory: what `learn` returned after an
    earlier step. world: makes the recipe's environment, for shapes that act in one; reply: (last token, text, maximum
    tokens) -> tokens of a message with that text.
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
    localize: Callable[[str], str] = str
    begun: tuple[Segment, ...] = ()
    memory: Any = None
    world: Callable[[], Any] | None = None
    reply: Callable[[int, str, int], tuple[int, ...]] | None = None

    def random(self) -> random.Random:
        """Return a generator with the same numbers whenever this rollout is generated."""
        return random.Random(self.seed)

    async def sample(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | None = None, *, greedy: bool = False
    ) -> list[Sampled]:
        """Sample one completion per prompt, at most max_tokens long (default and maximum: max_new_tokens). greedy: take
        the most probable tokens; these are for rewards, not for training.

        Raises ValueError for a prompt that leaves no room in `window`.
        """
        most = min(max_tokens or self.max_new_tokens, self.max_new_tokens)
        limits = [min(most, self.window - len(prompt)) for prompt in prompts]
        if limits and min(limits) < 1:
            longest = max(map(len, prompts))
            raise ValueError(
                f"sample: a prompt of {longest} tokens leaves no room for a completion: together they may have "
                f"{self.window} (a key `answer_tokens` of the shape makes it more)"
            )
        return await self.draw([tuple(prompt) for prompt in prompts], limits, greedy=greedy) if prompts else []


class Ended(NamedTuple):
    """A scored row of a finished step. ids: completion tokens. given: a stored row, not sampled by the policy. reward,
    correct: None = not scored or unknown. finish: `length` = cut off by a limit."""

    uid: str
    ids: tuple[int, ...]
    given: bool
    reward: float | None
    correct: bool | None
    finish: str = "stop"


class Remembered(NamedTuple):
    """Result of `learn`. memory: JSON values that are passed back as `Asked.memory`; None = nothing. metrics: numbers
    for metrics.jsonl."""

    memory: Any
    metrics: Mapping[str, float] = {}


class Learner(Protocol):
    """A shape with memory, with its keys bound."""

    async def run(self, asked: Asked) -> Sequence[Row]:
        """Return the rows of one rollout."""
        ...

    def learn(self, memory: Any, ended: Sequence[Ended], step: int) -> Remembered:
        """Return the memory after a step (from 0), a function of the previous memory and of all scored rows of the
        step, which are the same on all ranks."""
        ...
