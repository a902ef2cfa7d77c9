"""What a workflow is given and what it makes. `evaluate/workflow.py` runs it on the rollout's engine.

A workflow is a coroutine function `async (row, call, **its keys)`, called once a rollout. `await call(role, messages)`
samples what a role answers, and every call becomes a row of the batch: tokens exactly as sampled, under the prompt that
the role had. All roles are the policy, or each an adapter of it. Everything random comes from `call.random()` and the
engine, so a rollout does not depend on ranks.

One that learns from step to step is a class instead: its keys are those of `__init__`, `run(row, call)` is the
coroutine, and `learn(memory, outcomes, step)` gives what comes back as `call.memory` in later steps, values of JSON
that checkpoints keep. Calls of the roles that its attribute `late` names are not trained on in the step that makes
them: `learn` gets them, keeps what it wants, and may have them trained on later."""

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
    """A call's prompt has no room. The rollout ends with the calls that were made; a workflow may catch it."""


@dataclass(eq=False)
class Call:
    """One call that was made.

    role: who was asked. number: its place among the calls of the rollout. parent: the call that it goes on from, None =
    the data's prompt. compared: which calls are its group: `role`, those of its role for the same prompt of the data;
    `parent`, of these only the ones with the same parent. prompt: tokens that it was asked with. segments: tokens that
    it wrote, and replies between them. parts: what it wrote, a text a turn, without special tokens. shown: the replies.
    note: what rewards are to know of the call; values of JSON.
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
        """All that it wrote."""
        return "\n".join(self.parts)

    @property
    def answer(self) -> str:
        """What it wrote behind its thought."""
        return self.text.rpartition(THOUGHT)[2].strip()

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens from its prompt to its end."""
        return (*self.prompt, *(i for segment in self.segments for i in segment.ids))


@dataclass(eq=False)
class Caller:
    """Asks roles for one rollout of a prompt, and keeps what they said.

    question: the prompt's own text (its last user message). prompt: its tokens. limit: most tokens of a call's prompt,
    what it wrote and its replies. max_new_tokens: that of the recipe. draw: (prompts, most new tokens of each) -> what
    was sampled. render: messages to tokens. between: (last token, text) -> tokens of a user's reply. text: tokens to
    text without special ones. memory: what `learn` returned behind an earlier step, None = nothing yet. adapter_of: a
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
    out_of_room: int = 0  # tokens of a prompt that had no room; 0 = there was none
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def random(self) -> random.Random:
        """The same numbers whenever this rollout is made."""
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
        """What a role answers to messages (default: the data's own prompt), at most max_tokens long (default and most:
        rollout.max_new_tokens). Raises OutOfRoom."""
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
        """`count` answers of a role to the same messages, sampled side by side."""
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
        """One answer of a role to each of several conversations, sampled side by side. parents: one of each."""
        found = await self._ask(role, [self.render(m) for m in conversations], None, compared, max_tokens)
        for call, parent in zip(found, parents or [], strict=bool(parents)):
            call.parent = parent
        return found

    async def reply(self, call: Call, text: str, *, max_tokens: int | None = None) -> Call:
        """The same call goes on behind a message that it is shown, such as what a search has found. The message is not
        trained on; the call stays one row. Raises OutOfRoom, which leaves the call as it was."""
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
        """Another call of the same role that begins with the first `turns` turns of an earlier one and the replies
        behind them, and goes on differently. What it begins with is not trained on again. Raises OutOfRoom."""
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
        """Another call of the same role that begins as an earlier one, with `text` where its reply `number` (from 0)
        was, and goes on behind the message `then`. What it begins with is not trained on again; `shown`, which rewards
        read, still has what stood there. Raises OutOfRoom."""
        from posttrain.batch import Segment

        ids, begun = call.prompt, list[Segment]()
        for place, segment in enumerate(call.segments):
            own = self.between(ids[-1], text) if place == 2 * number + 1 else segment.ids
            begun.append(Segment("injected", own))
            ids = (*ids, *own)
        shown = self.between(ids[-1], then)
        (more,) = await self._sample(call.role, [(*ids, *shown)], max_tokens)
        segments = (*begun, Segment("tool", shown), more.segment)
        parts, replies = [*call.parts, self.text(more.ids)], [*call.shown, then]
        made = len(self.made)
        self.made.append(Call(call.role, made, call, call.compared, call.prompt, segments, parts, more.finish, replies))
        return self.made[-1]

    async def grade(self, calls: Sequence[Call]) -> list[Grade]:
        """What the recipe's rewards say of calls so far: their sum, and whether they are right. Calls are scored again
        once the rollout is over, when rewards may read what came behind."""
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
            Call(role, len(self.made) + n, parent, compared, ids, (one.segment,), [self.text(one.ids)], one.finish)
            for n, (ids, one) in enumerate(zip(prompts, found, strict=True))
        ]
        self.made += calls
        return calls

    async def _sample(self, role: str, prompts: Sequence[tuple[int, ...]], max_tokens: int | None) -> list[Sampled]:
        most = min(max_tokens or self.max_new_tokens, self.max_new_tokens)
        limits = [min(most, self.limit - len(ids)) for ids in prompts]
        if limits and min(limits) < 1:
            self.out_of_room = max(map(len, prompts))
            raise OutOfRoom
        async with (
            self._one_at_a_time
        ):  # of calls that a workflow gathers; an engine is asked by a rollout once at a time
            return await self.draw(prompts, limits, adapter=self.adapter_of(role)) if prompts else []


@dataclass(frozen=True)
class Made:
    """A call of a rollout that is over. reward, correct: None = not scored, or nobody knows. row: of a role in `late`,
    the call as values of JSON, which `Learned.again` may name in a later step."""

    role: str
    text: str
    note: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    correct: bool | None = None
    row: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """A rollout of the step, in the order in which its calls were made. columns: of the data's row."""

    uid: str
    columns: Mapping[str, Any]
    calls: tuple[Made, ...]

    def by(self, *roles: str) -> list[Made]:
        """The calls of some roles."""
        return [call for call in self.calls if call.role in roles]


@dataclass(frozen=True)
class Learned:
    """What `learn` makes of a step. memory: comes back as `call.memory`; None = nothing. again: rows that earlier steps
    have made and this one trains on, each with its advantage; their ratio is to the policy that sampled them. metrics:
    numbers for metrics.jsonl."""

    memory: Any
    again: Sequence[tuple[Mapping[str, Any], float]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Learner(Protocol):
    """A workflow with a memory, with its keys bound."""

    async def run(self, row: Mapping[str, Any], call: Caller) -> None:
        """The calls of one rollout."""
        ...

    def learn(self, memory: Any, outcomes: Sequence[Outcome], step: int) -> Learned:
        """What is known behind a step (from 0): a function of what was known before it and of all its rollouts, which
        are the same on all ranks."""
        ...


def last_between(text: str, tag: str) -> str | None:
    """What the last closed pair of a tag holds, without blanks around it; None where there is none."""
    found = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def fill(template: str, **values: str) -> str:
    """The template with `{name}` replaced by each of the values; other braces stay, so LaTeX may stand in both."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda found: str(values[found[1]]), template) if values else template
