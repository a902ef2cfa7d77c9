"""`rollout.workflow` in the loop of `rl`: a workflow of calls by role as a shape of rollouts, each call a row.

The rollout's engine is asked as a shape asks it (`rollout/continuation.py`); here messages become tokens, calls become
rows, and a rollout ends where a call's prompt has no room left. A workflow with a memory learns from each step
(`learn_from`).
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from posttrain import registry, source_locations
from posttrain.batch import Prompt, Rollout, Said, Stored, WorkflowCall
from posttrain.data import images, render
from posttrain.errors import RecipeError
from posttrain.images import PLACE, break_places
from posttrain.models.images import ImageReader
from posttrain.recipe.argument_checks import check_keys
from posttrain.recipe.rollout_sections import Workflow
from posttrain.recipe.sections import Data
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.continuation import MOST_ROLLOUTS, Shape
from posttrain.rollout.template import Between, between_turns
from posttrain.shapes.protocol import Asked, Ended, Remembered, Row
from posttrain.train.roles import APART
from posttrain.train.rollout_values import rollout_from_dict, rollout_to_dict
from posttrain.workflows.protocol import Call, Caller, Learned, Made, Messages, Outcome, OutOfRoom


@dataclass(frozen=True)
class WorkflowRunner:
    """The recipe's workflow with its keys bound. run: (row, call) -> nothing."""

    section: Workflow
    longest: int  # tokens of a call's prompt
    run: Callable[[Mapping[str, Any], Caller], Awaitable[None]]
    data: Data
    tokenizer: Any
    between: Between
    reader: ImageReader | None = None  # of a model that sees
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
            scores=lambda calls: asked.grade(as_rows(caller, calls)),
            memory=asked.memory,
            adapter_of=self.adapter_of,
        )
        with contextlib.suppress(OutOfRoom):
            await self.run({**asked.row, "prompt": question}, caller)
        about = f"rollout.workflow `{self.section.use}` of {source_locations.row(str(asked.row.get('uid', '')))}"
        if caller.out_of_room and not caller.made:
            raise RecipeError(
                f"{about}: the prompt of the first call has {caller.out_of_room} tokens",
                allowed=f"rollout.workflow.max_prompt_tokens: {self.longest}",
                hint="write a larger number",
            )
        if not caller.made:
            raise RecipeError(f"{about} has called no role", allowed="await call(ROLE, MESSAGES)")
        trained = self.section.train
        rows = as_rows(caller, [call for call in caller.made if trained is None or call.role in trained])
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
        (text,) = images.show([made], [text], section, self.reader) or (text,)
        whole = "".join(piece.text for piece in text.pieces)
        return render.encode_prompts([whole], self.tokenizer, section)[0]

    def reply_tokens(self, last: int, text: str) -> tuple[int, ...]:
        """What stands between a turn that ended with the token `last` and the next: a message of the user's."""
        if not self.data.chat:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self.between.tokens(last, [{"role": "user", "content": text}], self.longest)


def as_rows(caller: Caller, calls: Sequence[Call]) -> list[Row]:
    """Calls of a rollout as rows of it, which know who said what until now."""
    said, cut = tuple(map(_as_said, caller.made)), caller.out_of_room > 0
    return [
        Row(call.prompt, call.segments, call.finish, text=call.text, adapter=caller.adapter_of(call.role),
            call=WorkflowCall(said, call.number, call.compared, cut))
        for call in calls
    ]  # fmt: skip


def _as_said(call: Call) -> Said:
    """A call as rewards and samples.jsonl have it."""
    tokens = sum(len(segment.ids) for segment in call.segments if segment.kind == "model")
    parent = None if call.parent is None else call.parent.number
    parts, shown = (tuple(call.parts), tuple(call.shown)) if call.shown else ((), ())
    return Said(call.role, call.text, parent, call.finish, tokens, call.note, parts, shown)


def check_window(shape: Shape | None, prompts: Sequence[Prompt], new_tokens: int, window: int) -> None:
    """Raises RecipeError for calls of a workflow that the model's window has no room for."""
    if shape is None or shape.key != "rollout.workflow":
        return
    longest = max(len(prompt.ids) for prompt in prompts) + shape.room
    if longest + new_tokens > window:
        raise RecipeError(
            f"a call's prompt of {longest} tokens + {new_tokens} new ones exceed the model's window of {window} tokens",
            where="rollout.workflow.max_prompt_tokens",
            allowed=f"up to {max(0, window - new_tokens)}",
            hint="a rollout whose next call has a longer prompt ends before it",
        )


def workflow_of(
    recipe: RlRecipe,
    section: Workflow,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    reader: ImageReader | None = None,
) -> Shape:
    """The workflow that `rollout.workflow` names, as a shape. Raises RecipeError for a function that is no coroutine
    function, UserError for a name or key that is not there."""
    component = registry.resolve(section.kinds, section.use, recipe.base_dir)
    check_keys(component, section)
    learner: Any = None
    run: Any = component.function
    if inspect.isclass(run):
        learner = run(**section.params)
        run = getattr(learner, "run", None)
        if not callable(getattr(learner, "learn", None)):
            raise RecipeError(
                f"rollout.workflow `{section.use}` is a class without `learn`",
                allowed="def learn(self, memory, outcomes, step) -> Learned",
                hint="a workflow that learns nothing is a coroutine function",
            )
    if not inspect.iscoroutinefunction(run):
        raise RecipeError(
            f"rollout.workflow `{section.use}` is no coroutine function",
            allowed="async def workflow(row, call, *, KEYS)" if learner is None else "async def run(self, row, call)",
        )
    between = between_turns(tokenizer)
    run = partial(run, **section.params) if learner is None else run
    of_data = max(len(prompt.ids) for prompt in prompts)
    longest = section.max_prompt_tokens or of_data + 2 * recipe.rollout.max_new_tokens + 512
    late = frozenset(getattr(learner, "late", ()))
    adapter_of = partial(section.adapter_of, several=(recipe.model.lora and recipe.model.lora.adapters) or [])
    runner = WorkflowRunner(section, longest, run, recipe.data, tokenizer, between, reader, late, adapter_of)
    return Shape(
        component.name,
        runner.make_rows,
        {},
        tokenizer,
        own_group=False,
        room=max(0, longest - of_data),
        reads_logps=bool(late),
        grades=section.may("grades"),
        key="rollout.workflow",
        learn=None if learner is None else learner.learn,
        reader=reader,
    )


@dataclass(frozen=True)
class Learnt:
    """A step behind a workflow with a memory. rollouts: the rows that the step trains on with what they earned. late:
    those that later steps may train on. again: rows of earlier steps that come on top, with their advantages."""

    rollouts: list[Rollout]
    late: list[Rollout]
    again: list[Rollout]
    memory: dict[str, Any]
    metrics: dict[str, float]


def learn_from(
    shape: Shape, memory: Mapping[str, Any], rollouts: Sequence[Rollout], prompts: Sequence[Prompt], step: int
) -> Learnt:
    """Have the workflow, or the shape, learn from a step's rollouts. memory: of all components. Raises RecipeError
    where it answers with something else."""
    assert shape.learn is not None
    if shape.key == "rollout.shape":
        kept = shape.learn(memory.get(shape.name), list(map(_as_ended, filter(_is_scored, rollouts))), step)
        if not isinstance(kept, Remembered):
            raise _wrong_learned(shape, kept, "posttrain.shapes.protocol.Remembered")
        return Learnt(list(rollouts), [], [], {**memory, shape.name: kept.memory}, dict(kept.metrics))
    now, late = ([rollout for rollout in rollouts if rollout.scored is scored] for scored in (True, False))
    found = shape.learn(memory.get(shape.name), _outcomes(rollouts), step)
    if not isinstance(found, Learned):
        raise _wrong_learned(shape, found, "posttrain.workflows.protocol.Learned")
    wanted = {row["prompt"] for row, _ in found.again}
    by_uid = {prompt.uid: prompt for prompt in prompts if prompt.uid in wanted} if wanted else {}
    first = 1 + max((one.group % APART for one in rollouts), default=0)
    again = [_as_stored(row, by_uid, advantage, first + k) for k, (row, advantage) in enumerate(found.again)]
    return Learnt(now, late, again, {**memory, shape.name: found.memory}, dict(found.metrics))


def _wrong_learned(shape: Shape, found: Any, allowed: str) -> RecipeError:
    return RecipeError(f"`learn` of {shape.key} `{shape.name}` returned {found!r:.60}", allowed=allowed)


def _is_scored(rollout: Rollout) -> bool:
    return rollout.scored and not rollout.unfinished


def _as_ended(rollout: Rollout) -> Ended:
    return Ended(rollout.prompt.uid, rollout.ids, rollout.is_given, rollout.reward, rollout.correct)


def _outcomes(rollouts: Sequence[Rollout]) -> list[Outcome]:
    """The step's rollouts with all of their calls; of those that are no rows, what was said."""
    rows: dict[int, dict[int, Rollout]] = {}
    for rollout in rollouts:
        assert rollout.call is not None and rollout.trajectory is not None
        rows.setdefault(rollout.trajectory, {})[rollout.call.number] = rollout
    found = []
    for own in rows.values():
        first = next(iter(own.values()))
        assert first.call is not None
        calls = tuple(_as_made(said, own.get(n)) for n, said in enumerate(first.call.calls))
        found.append(Outcome(first.prompt.uid, first.prompt.row, calls))
    return found


def _as_made(said: Said, rollout: Rollout | None) -> Made:
    if rollout is None:
        return Made(said.role, said.text, said.note)
    row = (
        None
        if rollout.scored
        else rollout_to_dict(replace(rollout, call=WorkflowCall((said._replace(parent=None),), 0)))
    )
    return Made(said.role, said.text, said.note, rollout.reward, rollout.correct, row)


def _as_stored(row: Mapping[str, Any], prompts: Mapping[str, Prompt], advantage: float, group: int) -> Rollout:
    """A row that an earlier step has made, as a group and a rollout of its own."""
    rollout = rollout_from_dict(row, prompts[row["prompt"]])
    logps = tuple(0.0 if math.isnan(logp) else logp for logp in rollout.logps)
    stored = Stored(rollout.version, logps, (advantage,))
    return replace(rollout, group=group, trajectory=group * MOST_ROLLOUTS, part=0, stored=stored)
