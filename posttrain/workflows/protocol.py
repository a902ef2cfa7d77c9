"""Interface of workflows. `evaluate/workflow.py` runs a workflow on the rollout's engine.

A workflow is a coroutine function `async (row, call, **its keys)`, called once per rollout. `await call(role,
messages)` samples a role's answer, and every call becomes a row of the batch: the tokens exactly as sampled, under the
prompt that the role was given. All roles are the policy, or each role is an adapter of it. All randomness comes from
`call.random()` and the engine, so a rollout does not depend on ranks.

A workflow that learns from step to step is a class instead: its keys are the arguments of `__init__`, `run(row, call)`
is the coroutine, and `learn(memory, outcomes, step)` returns JSON values that are passed back as `call.memory` in later
steps and saved in checkpoints. Calls of the roles in its attribute `late` are not trained on in the step that makes
them: `learn` receives these calls, may store them, and may return them for training in a later step."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from posttrain.errors import UserError

if TYPE_CHECKING:
    from posttrain.batch import FinishReason, Segment
    from posttrain.shapes.protocol import Draw, Grade, Sampled

Messages = str | Sequence[Mapping[str, Any]]  # one user message, or a conversation
Compared = Literal["role", "parent"]
THOUGHT = "</think>"


class OutOfRoom(Exception):
    """A call's prompt does not fit. The rollout ends with the calls made so far, unless the workflow catches this."""


@dataclass(eq=False)
class Call:
    """One finished call.

    role: the role that was called. number: index among the rollout's calls. parent: the call that it follows, None =
    the data's prompt. compared: the calls in its group: `role` = calls of its role for the same data prompt; `parent` =
    of these, only calls with the same parent. prompt: tokens of its prompt. segments: its sampled tokens, and the
    replies between them. parts: its text, one entry per turn, without special tokens. shown: the replies. note: JSON
    values about the call for rewards.
    """

    role: str
    number: int
    parent: Call | None
    compared: Compared
    prompt: tuple[int, ...]
    segments: tuple[Segment, ...]
    parts: list[str]
    finish: FinishReason
    shown: list[str] = field(default_factory=list)
    note: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All sampled text of the call."""
        return "\n".join(self.parts)

    @property
    def answer(self) -> str:
        """Sampled text after the thought."""
        return self.text.rpartition(THOUGHT)[2].strip()

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens of the call: prompt, sampled tokens and replies."""
        return (*self.prompt, *(i for segment in self.segments for i in segment.ids))


@dataclass(eq=False)
class Caller:
    """Calls roles for one rollout of a prompt, and records the calls.

    question: text of the data's prompt (its last user message). prompt: its tokens. limit: maximum tokens of a call:
    prompt, sampled tokens and replies. max_new_tokens: the recipe's. draw: (prompts, maximum new tokens of each) ->
    completions. render: messages to tokens. between: (last token, text) -> tokens of a user reply. text: tokens to text
    without special tokens. memory: what `learn` returned after an earlier step, None = nothing yet. adapter_of: a
    role's adapter, None = the only one. made: all calls so far.
    """

    question: str
    prompt: tuple[int, ...]
    limit: int
    max_new_tokens: int
    seed: int
    draw: Draw
    render: Callable[[Messages], tuple[int, ...]]
    between: Callable[[int, str], tuple[int, ...]]
    text: Callable[[Sequence[int]], str]
    scores: Callable[[Sequence[Call]], Awaitable[list[Grade]]]
    memory: Any = None
    adapter_of: Callable[[str], str | None] = lambda _: None
    made: list[Call] = field(default_factory=list)
    out_of_room: int = 0  # tokens of a prompt that did not fit; 0 = all prompts fit
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def random(self) -> random.Random:
        """Return a generator with the same numbers whenever this rollout is generated."""
        return random.Random(self.seed)

    async def __call__(
        self,
        role: str,
        messages: Messages | None = None,
        *,
        parent: Call | None = None,
        compared: Compared = "role",
        max_tokens: int | None = None,
    ) -> Call:
        """Sample a role's answer to messages (default: the data's prompt), at most max_tokens long (default and
        maximum: rollout.max_new_tokens). Raises OutOfRoom."""
        asked = self.prompt if messages is None else self.render(messages)
        return (await self._ask(role, [asked], parent, compared, max_tokens))[0]

    async def several(
        self,
        role: str,
        messages: Messages | None = None,
        *,
        count: int,
        parent: Call | None = None,
        compared: Compared = "role",
        max_tokens: int | None = None,
    ) -> list[Call]:
        """Sample `count` answers of a role to the same messages, in parallel."""
        asked = self.prompt if messages is None else self.render(messages)
        return await self._ask(role, [asked] * count, parent, compared, max_tokens)

    async def each(
        self,
        role: str,
        conversations: Sequence[Messages],
        *,
        parents: Sequence[Call] | None = None,
        compared: Compared = "role",
        max_tokens: int | None = None,
    ) -> list[Call]:
        """Sample one answer of a role to each conversation, in parallel. parents: the parent of each answer."""
        found = await self._ask(role, [self.render(m) for m in conversations], None, compared, max_tokens)
        for call, parent in zip(found, parents or [], strict=bool(parents)):
            call.parent = parent
        return found

    async def reply(self, call: Call, text: str, *, max_tokens: int | None = None) -> Call:
        """Continue a call after a reply, such as search results. The reply is not trained on; the call stays one row.
        Raises OutOfRoom, and then leaves the call unchanged."""
        from posttrain.batch import Segment

        shown = self.between(call.ids[-1], text)
        (more,) = await self._sample(call.role, [(*call.ids, *shown)], max_tokens)
        call.segments = (*call.segments, Segment("tool", shown), more.segment)
        call.finish = more.finish
        call.parts.append(self.text(more.ids))
        call.shown.append(text)
        return call

    async def rewind(
        self, call: Call, turns: int, *, parent: Call | None = None, max_tokens: int | None = None
    ) -> Call:
        """Make a new call of the same role that repeats the first `turns` turns of an earlier call, with the replies
        after them, and continues differently. The repeated part is not trained on again. Raises OutOfRoom."""
        from posttrain.batch import Segment

        begun = tuple(Segment("injected", segment.ids) for segment in call.segments[: 2 * turns])
        ids = (*call.prompt, *(i for segment in begun for i in segment.ids))
        (more,) = await self._sample(call.role, [ids], max_tokens)
        parts, shown = [*call.parts[:turns], self.text(more.ids)], list(call.shown[:turns])
        segments = (*begun, more.segment)
        number, compared = len(self.made), call.compared
        self.made.append(Call(call.role, number, parent, compared, call.prompt, segments, parts, more.finish, shown))
        return self.made[-1]

    async def replace_reply(
        self, call: Call, number: int, text: str, *, then: str, max_tokens: int | None = None
    ) -> Call:
        """Make a new call of the same role that repeats an earlier call with `text` in place of its reply `number`
        (from 0), and continues after the message `then`. The repeated part is not trained on again; `shown`, which
        rewards read, still has the original reply. Raises OutOfRoom."""
        from posttrain.batch import Segment

        ids, begun = call.prompt, list[Segment]()
        for index, segment in enumerate(call.segments):
            tokens = self.between(ids[-1], text) if index == 2 * number + 1 else segment.ids
            begun.append(Segment("injected", tokens))
            ids = (*ids, *tokens)
        shown = self.between(ids[-1], then)
        (more,) = await self._sample(call.role, [(*ids, *shown)], max_tokens)
        segments = (*begun, Segment("tool", shown), more.segment)
        parts, replies = [*call.parts, self.text(more.ids)], [*call.shown, then]
        made = len(self.made)
        self.made.append(Call(call.role, made, call, call.compared, call.prompt, segments, parts, more.finish, replies))
        return self.made[-1]

    async def grade(self, calls: Sequence[Call]) -> list[Grade]:
        """Score calls so far with the recipe's rewards. Calls are scored again at the end of the rollout, when rewards
        can read later calls."""
        return await self.scores(calls) if calls else []

    async def _ask(
        self,
        role: str,
        prompts: Sequence[tuple[int, ...]],
        parent: Call | None,
        compared: Compared,
        max_tokens: int | None,
    ) -> list[Call]:
        if not isinstance(role, str) or not re.fullmatch(r"\w+", role):
            raise UserError(f"a workflow calls the role {role!r:.60}", allowed="a word of letters, digits and _")
        found = await self._sample(role, prompts, max_tokens)
        calls = [
            Call(
                role,
                len(self.made) + n,
                parent,
                compared,
                ids,
                (completion.segment,),
                [self.text(completion.ids)],
                completion.finish,
            )
            for n, (ids, completion) in enumerate(zip(prompts, found, strict=True))
        ]
        self.made += calls
        return calls

    async def _sample(self, role: str, prompts: Sequence[tuple[int, ...]], max_tokens: int | None) -> list[Sampled]:
        most = min(max_tokens or self.max_new_tokens, self.max_new_tokens)
        limits = [min(most, self.limit - len(ids)) for ids in prompts]
        if limits and min(limits) < 1:
            self.out_of_room = max(map(len, prompts))
            raise OutOfRoom
        # A workflow may gather calls, but a rollout must send the engine one request at a time.
        async with self._one_at_a_time:
            return await self.draw(prompts, limits, adapter=self.adapter_of(role)) if prompts else []


@dataclass(frozen=True)
class Made:
    """A call of a finished rollout. reward, correct: None = not scored or unknown. row: for a role in `late`, the call
    as JSON values, which `Learned.again` may contain in a later step."""

    role: str
    text: str
    note: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    correct: bool | None = None
    row: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """A finished rollout of the step, with its calls in order. columns: of the data's row."""

    uid: str
    columns: Mapping[str, Any]
    calls: tuple[Made, ...]

    def by(self, *roles: str) -> list[Made]:
        """Return the calls of some roles."""
        return [call for call in self.calls if call.role in roles]


@dataclass(frozen=True)
class Learned:
    """Result of `learn`. memory: passed back as `call.memory`; None = nothing. again: rows of earlier steps that this
    step trains on, each with its advantage; their ratio is to the policy that sampled them. metrics: numbers for
    metrics.jsonl."""

    memory: Any
    again: Sequence[tuple[Mapping[str, Any], float]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Learner(Protocol):
    """A workflow with memory, with its keys bound."""

    async def run(self, row: Mapping[str, Any], call: Caller) -> None:
        """Make the calls of one rollout."""
        ...

    def learn(self, memory: Any, outcomes: Sequence[Outcome], step: int) -> Learned:
        """Return the memory after a step (from 0), a function of the previous memory and of all rollouts of the step,
        which are the same on all ranks."""
        ...


def last_between(text: str, tag: str) -> str | None:
    """Return the stripped content of the last closed <tag> pair; None if there is none."""
    found = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def fill(template: str, **values: str) -> str:
    """Replace each `{name}` in a template by its value; other braces stay, so template and values may hold LaTeX."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda match: str(values[match[1]]), template) if values else template
