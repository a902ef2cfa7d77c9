"""Workflows of calls by role, run on an engine: in the loop of `rl` as rollouts, in `generate` as records.

The engine is asked as a shape asks it (`rollout/continuation.py`); here messages become tokens, calls become rows, and
a rollout ends where a call's prompt has no room left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from posttrain import source_locations
from posttrain.batch import Prompt, Rollout, Said, WorkflowCall
from posttrain.batch.records import call_records
from posttrain.data import images, render
from posttrain.errors import RecipeError
from posttrain.evaluate.shaped import sample_rollouts
from posttrain.images import PLACE, break_places
from posttrain.models.images import ImageReader
from posttrain.recipe.rollout_sections import PlayWorkflow
from posttrain.recipe.sections import Data
from posttrain.rollout.continuation import Shape, bind_coroutine
from posttrain.rollout.engine import Engine, GenerationBatch, Generator
from posttrain.rollout.template import Between
from posttrain.shapes.protocol import Asked, Grade, Row
from posttrain.workflows.protocol import Call, Caller, Messages, OutOfRoom

Record = dict[str, Any]


@dataclass(frozen=True)
class WorkflowRunner:
    """The recipe's workflow with its keys bound. run: (row, call) -> nothing."""

    use: str  # its name in the recipe
    key: str  # its place there
    longest: int  # tokens of a call's prompt
    run: Callable[[Mapping[str, Any], Caller], Awaitable[None]]
    data: Data
    tokenizer: Any
    between: Between
    reader: ImageReader | None = None  # of a model that sees
    train: Sequence[str] | None = None  # roles whose calls are rows; None = all
    late: frozenset[str] = frozenset()  # roles whose calls a later step may train on
    adapter_of: Callable[[str], str | None] = lambda _: None  # a role's adapter, of a model with several

    async def make_rows(self, asked: Asked) -> list[Row]:
        """The calls of one rollout, of those roles that are trained. Raises RecipeError for a workflow that calls
        nobody, and for a first call whose prompt has no room."""
        question = self.question(asked.row)
        caller = Caller(
            question=question,
            prompt=asked.prompt,
            limit=self.longest + asked.max_new_tokens,
            max_new_tokens=asked.max_new_tokens,
            seed=asked.seed,
            draw=asked.draw,
            render=partial(self.render, row=asked.row),
            between=self.reply_tokens,
            text=lambda ids: break_places(asked.text(ids)),
            scores=lambda calls: asked.grade(calls_to_rows(caller, calls)),
            memory=asked.memory,
            adapter_of=self.adapter_of,
        )
        with contextlib.suppress(OutOfRoom):
            await self.run({**asked.row, "prompt": question}, caller)
        about = f"{self.key} `{self.use}` of {source_locations.row(str(asked.row.get('uid', '')))}"
        if caller.out_of_room and not caller.made:
            raise RecipeError(
                f"{about}: the prompt of the first call has {caller.out_of_room} tokens",
                allowed=f"{self.key}.max_prompt_tokens: {self.longest}",
                hint="write a larger number",
            )
        if not caller.made:
            raise RecipeError(f"{about} has called no role", allowed="await call(ROLE, MESSAGES)")
        rows = calls_to_rows(caller, [call for call in caller.made if self.train is None or call.role in self.train])
        return [replace(row, scored=row.call is None or row.call.role not in self.late) for row in rows]

    def question(self, row: Mapping[str, Any]) -> str:
        """The prompt's own text: its last user message."""
        if not self.data.chat or isinstance(row.get("prompt"), str):
            return str(row.get("prompt", ""))
        messages = render.prompt_messages(row, self.data)
        return next((str(m["content"]) for m in reversed(messages) if m["role"] == "user"), "")

    def render(self, messages: Messages, row: Mapping[str, Any]) -> tuple[int, ...]:
        """Tokens of messages as a prompt, with the data's system message where they have none of their own, and with
        the row's images where their texts have places for them."""
        asked: Any = messages if isinstance(messages, str) else [dict(message) for message in messages]
        section = self.data
        if not isinstance(asked, str):
            if any(message.get("role") == "system" for message in asked):
                section = section.model_copy(update={"system": None})
            if not section.chat:
                asked = "\n\n".join(str(message["content"]) for message in asked)
        made = {"uid": row.get("uid", ""), "prompt": asked}
        if self.reader is not None and row.get("images") and PLACE in str(asked):
            made["images"] = row["images"]
        text = render.prompt_text(made, self.tokenizer, section)
        (text,) = images.expand_placeholders([made], [text], section, self.reader) or (text,)
        whole = "".join(piece.text for piece in text.pieces)
        return render.encode_prompts([whole], self.tokenizer, section)[0]

    def reply_tokens(self, last: int, text: str) -> tuple[int, ...]:
        """What stands between a turn that ended with the token `last` and the next: a message of the user's."""
        if not self.data.chat:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self.between.tokens(last, [{"role": "user", "content": text}], self.longest)


def calls_to_rows(caller: Caller, calls: Sequence[Call]) -> list[Row]:
    """Calls of a rollout as rows of it, which know who said what until now."""
    said, cut = tuple(map(_call_to_said, caller.made)), caller.out_of_room > 0
    return [
        Row(call.prompt, call.segments, call.finish, text=call.text, adapter=caller.adapter_of(call.role),
            call=WorkflowCall(said, call.number, call.compared, cut))
        for call in calls
    ]  # fmt: skip


def _call_to_said(call: Call) -> Said:
    """A call as rewards and samples.jsonl have it."""
    tokens = sum(len(segment.ids) for segment in call.segments if segment.kind == "model")
    parent = None if call.parent is None else call.parent.number
    parts, shown = (tuple(call.parts), tuple(call.shown)) if call.shown else ((), ())
    return Said(call.role, call.text, parent, call.finish, tokens, call.note, parts, shown)


def bind_workflow(
    section: PlayWorkflow,
    data: Data,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    base_dir: Path | None,
    *,
    key: Literal["workflow", "rollout.workflow"],
    train: Sequence[str] | None = None,
    reader: ImageReader | None = None,
    adapter_of: Callable[[str], str | None] = lambda _: None,
) -> Shape:
    """The workflow that a section names, as a shape. key: its place in the recipe. train: roles whose calls are rows,
    None = all. reader: of a model that sees. Raises as `bind_coroutine`."""
    component, run, learner = bind_coroutine(section, base_dir, key)
    of_data = max(len(prompt.ids) for prompt in prompts)
    longest = section.max_prompt_tokens or of_data + 2 * max_new_tokens + 512
    late = frozenset(getattr(learner, "late", ()))
    between = Between(tokenizer)
    runner = WorkflowRunner(section.use, key, longest, run, data, tokenizer, between, reader, train, late, adapter_of)
    return Shape(
        component.name,
        runner.make_rows,
        tokenizer,
        own_group=False,
        room=max(0, longest - of_data),
        reads_logps=bool(late),
        grades=section.may("grades"),
        key=key,
        learn=getattr(learner, "learn", None),
        reader=reader,
    )


class WorkflowEngine(Generator):
    """An Engine around another: a rollout of a workflow a completion, of which the last call is returned. It is never
    synced, and its workflow has no memory. `describe` says of such rollouts what completions.jsonl adds."""

    def __init__(self, engine: Engine, shape: Shape) -> None:
        self.engine, self.shape = engine, shape
        self.window = engine.window - shape.room

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """`Engine.generate`: the last call of n rollouts of each prompt, which has all of its calls in `call`."""
        if len(batch.share) < len(batch.prompts) or batch.logprobs:
            raise ValueError("a workflow gives calls without log-probs, in one process")
        played = sample_rollouts(self.engine, self.shape, batch, refuse_to_grade).values()
        return [replace(own[-1], prompt=batch.prompts[own[-1].group - batch.first_group]) for own in played]

    def describe(self, rollouts: Sequence[Rollout]) -> list[Record]:
        """`calls` of each rollout, who said what in answer to whom, with the workflow's notes; `cut` where a further
        call had no room."""
        return [
            {"calls": call_records(rollout)["calls"], **({"cut": True} if rollout.call and rollout.call.cut else {})}
            for rollout in rollouts
        ]

    def close(self) -> None:
        self.engine.close()


def refuse_to_grade(_: Sequence[Rollout]) -> list[Grade]:
    """Raises RecipeError: a workflow of `generate` that asks for grades gets none."""
    raise RecipeError("a workflow of `generate` has no rewards to ask on the way", hint="run it by the stage rl")
