"""Workflows of calls by role, run on an engine: in `rl` as rollouts, in `generate` as records.

The engine is called as shapes call it (`rollout/continuation.py`). This module turns messages into tokens and calls
into rows, and ends a rollout at a call whose prompt has no room.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from posttrain import source_locations
from posttrain.batch import CallRecord, Prompt, Rollout, WorkflowCall
from posttrain.batch.records import call_records
from posttrain.data import images, render
from posttrain.errors import RecipeError
from posttrain.evaluate.shaped import ShapedEngine, sample_rollouts
from posttrain.images import PLACEHOLDER, escape_placeholders
from posttrain.models.images import ImageReader
from posttrain.recipe.rollout_sections import PlayWorkflow
from posttrain.recipe.sections import Data
from posttrain.rollout.continuation import Shape, bind_coroutine
from posttrain.rollout.engine import GenerationBatch
from posttrain.rollout.template import TurnSeparator
from posttrain.shapes.protocol import Asked, Grade, Row
from posttrain.workflows.protocol import Call, Caller, Messages, OutOfRoom

Record = dict[str, Any]


@dataclass(frozen=True)
class WorkflowRunner:
    """The recipe's workflow with its keys bound. run: (row, call) -> None."""

    use: str  # name of the workflow
    key: str  # its recipe key
    longest: int  # token limit of a call's prompt
    run: Callable[[Mapping[str, Any], Caller], Awaitable[None]]
    data: Data
    tokenizer: Any
    between: TurnSeparator
    reader: ImageReader | None = None  # for a vision model
    train: Sequence[str] | None = None  # roles whose calls are rows; None = all
    late: frozenset[str] = frozenset()  # roles whose calls a later step may train on
    adapter_of: Callable[[str], str | None] = lambda _: None  # adapter of a role, for a model with several

    async def make_rows(self, asked: Asked) -> list[Row]:
        """Run the workflow for one rollout and return the calls of the trained roles as rows.

        Raises RecipeError for a workflow that makes no call, and for a first call whose prompt is too long.
        """
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
            text=lambda ids: escape_placeholders(asked.text(ids)),
            scores=lambda calls: asked.grade(calls_to_rows(caller, calls)),
            memory=asked.memory,
            adapter_of=self.adapter_of,
        )
        with contextlib.suppress(OutOfRoom):
            await self.run({**asked.row, "prompt": question}, caller)
        about = f"{self.key} `{self.use}` of {source_locations.describe_row(str(asked.row.get('uid', '')))}"
        if caller.out_of_room and not caller.made:
            raise RecipeError(
                f"{about}: the prompt of the first call has {caller.out_of_room} tokens",
                allowed=f"{self.key}.max_prompt_tokens: {self.longest}",
                hint="write a larger number",
            )
        if not caller.made:
            raise RecipeError(f"{about} made no call", allowed="await call(ROLE, MESSAGES)")
        rows = calls_to_rows(caller, [call for call in caller.made if self.train is None or call.role in self.train])
        return [replace(row, scored=row.call is None or row.call.role not in self.late) for row in rows]

    def question(self, row: Mapping[str, Any]) -> str:
        """Return the text of the prompt: its last user message."""
        if not self.data.chat or isinstance(row.get("prompt"), str):
            return str(row.get("prompt", ""))
        messages = render.prompt_messages(row, self.data)
        return next((str(m["content"]) for m in reversed(messages) if m["role"] == "user"), "")

    def render(self, messages: Messages, row: Mapping[str, Any]) -> tuple[int, ...]:
        """Tokenize messages as a prompt.

        Adds the data's system message if the messages have none, and the row's images if their texts have places for
        them.
        """
        prompt: Any = messages if isinstance(messages, str) else [dict(message) for message in messages]
        section = self.data
        if not isinstance(prompt, str):
            if any(message.get("role") == "system" for message in prompt):
                section = section.model_copy(update={"system": None})
            if not section.chat:
                prompt = "\n\n".join(str(message["content"]) for message in prompt)
        call_row = {"uid": row.get("uid", ""), "prompt": prompt}
        if self.reader is not None and row.get("images") and PLACEHOLDER in str(prompt):
            call_row["images"] = row["images"]
        text = render.prompt_text(call_row, self.tokenizer, section)
        (text,) = images.expand_placeholders([call_row], [text], section, self.reader) or (text,)
        whole = "".join(piece.text for piece in text.pieces)
        return render.encode_prompts([whole], self.tokenizer, section)[0]

    def reply_tokens(self, last: int, text: str) -> tuple[int, ...]:
        """Return the tokens between a turn that ended with the token `last` and the next turn: a user message."""
        if not self.data.chat:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self.between.tokens(last, [{"role": "user", "content": text}], self.longest)


def calls_to_rows(caller: Caller, calls: Sequence[Call]) -> list[Row]:
    """Convert calls of a rollout to rows that include all messages so far."""
    history, cut = tuple(map(_to_call_record, caller.made)), caller.out_of_room > 0
    return [
        Row(call.prompt, call.segments, call.finish, text=call.text, adapter=caller.adapter_of(call.role),
            call=WorkflowCall(history, call.number, call.compared, cut))
        for call in calls
    ]  # fmt: skip


def _to_call_record(call: Call) -> CallRecord:
    """Convert a call to the form that rewards and samples.jsonl use."""
    tokens = sum(len(segment.ids) for segment in call.segments if segment.kind == "model")
    parent = None if call.parent is None else call.parent.number
    parts, shown = (tuple(call.parts), tuple(call.shown)) if call.shown else ((), ())
    return CallRecord(call.role, call.text, parent, call.finish, tokens, call.note, parts, shown)


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
    """Return the workflow that a section names, as a shape.

    key: its place in the recipe. train: roles whose calls are rows, None = all. reader: for a vision model. Raises the
    errors of `bind_coroutine`.
    """
    component, run, learner = bind_coroutine(section, base_dir, key)
    longest_prompt = max(len(prompt.ids) for prompt in prompts)
    longest = section.max_prompt_tokens or longest_prompt + 2 * max_new_tokens + 512
    late = frozenset(getattr(learner, "late", ()))
    between = TurnSeparator(tokenizer)
    runner = WorkflowRunner(section.use, key, longest, run, data, tokenizer, between, reader, train, late, adapter_of)
    return Shape(
        component.name,
        runner.make_rows,
        tokenizer,
        own_group=False,
        room=max(0, longest - longest_prompt),
        reads_logps=bool(late),
        grades=section.may("grades"),
        key=key,
        learn=getattr(learner, "learn", None),
        reader=reader,
    )


class WorkflowEngine(ShapedEngine):
    """Engine that wraps another engine: runs a workflow rollout per completion and returns its last call.

    Its workflow has no memory. `describe` returns what completions.jsonl adds for
    such rollouts.
    """

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """Implement `Engine.generate`: return the last call of n rollouts of each prompt.

        It has all calls of its rollout in `call`.
        """
        if len(batch.share) < len(batch.prompts) or batch.logprobs:
            raise ValueError("a workflow engine runs only without log-probs, in a single process")
        rollouts = sample_rollouts(self.engine, self.shape, batch, refuse_to_grade).values()
        return [replace(rows[-1], prompt=batch.prompts[rows[-1].group - batch.first_group]) for rows in rollouts]

    def describe(self, rollouts: Sequence[Rollout]) -> list[Record]:
        """Return the `calls` of each rollout, with roles, parents and the workflow's notes.

        `cut`: a further call had no room.
        """
        return [
            {"calls": call_records(rollout)["calls"], **({"cut": True} if rollout.call and rollout.call.cut else {})}
            for rollout in rollouts
        ]


def refuse_to_grade(_: Sequence[Rollout]) -> list[Grade]:
    """Raise RecipeError: a workflow of `generate` cannot ask for grades."""
    raise RecipeError("a workflow of `generate` cannot grade partial rollouts", hint="run it in stage rl")
