"""`rollout.workflow` in the loop of `rl`: a workflow of calls by role as a shape of rollouts, each call a row.

The rollout's engine is asked as a shape asks it (`rollout/continuation.py`); here messages become tokens, calls become
rows, and a rollout ends where a call's prompt has no room left.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain import registry, source_locations
from posttrain.batch import Prompt, Said, WorkflowCall
from posttrain.data import render
from posttrain.errors import RecipeError
from posttrain.recipe.argument_checks import check_keys
from posttrain.recipe.rollout_sections import Workflow
from posttrain.recipe.sections import Data
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.continuation import Shape
from posttrain.rollout.template import Between, between_turns
from posttrain.shapes.protocol import Asked, Row
from posttrain.workflows.protocol import Call, Caller, Messages, OutOfRoom


@dataclass(frozen=True)
class WorkflowRunner:
    """The recipe's workflow with its keys bound. run: (row, call) -> nothing."""

    section: Workflow
    longest: int  # tokens of a call's prompt
    run: Callable[[Mapping[str, Any], Caller], Awaitable[None]]
    data: Data
    tokenizer: Any
    between: Between

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
            render=partial(self.render, uid=asked.row.get("uid", "")),
            between=self.reply_tokens,
            text=asked.text,
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
        said, trained, cut = tuple(map(_as_said, caller.made)), self.section.train, caller.out_of_room > 0
        return [
            Row(call.prompt, call.segments, call.finish, text=call.text, call=WorkflowCall(said, n, call.compared, cut))
            for n, call in enumerate(caller.made)
            if trained is None or call.role in trained
        ]

    def question(self, row: Mapping[str, Any]) -> str:
        """The prompt's own text: its last user message."""
        if not self.data.chat or isinstance(row.get("prompt"), str):
            return str(row.get("prompt", ""))
        messages = render.prompt_messages(row, self.data)
        return next((str(m["content"]) for m in reversed(messages) if m["role"] == "user"), "")

    def render(self, messages: Messages, uid: str) -> tuple[int, ...]:
        """Tokens of messages as a prompt, with the data's system message where they have none of their own."""
        asked: Any = messages if isinstance(messages, str) else [dict(message) for message in messages]
        section = self.data
        if not isinstance(asked, str):
            if any(message.get("role") == "system" for message in asked):
                section = section.model_copy(update={"system": None})
            if not section.chat:
                asked = "\n\n".join(str(message["content"]) for message in asked)
        text = render.prompt_text({"uid": uid, "prompt": asked}, self.tokenizer, section).pieces[0].text
        return render.encode_prompts([text], self.tokenizer, section)[0]

    def reply_tokens(self, last: int, text: str) -> tuple[int, ...]:
        """What stands between a turn that ended with the token `last` and the next: a message of the user's."""
        if not self.data.chat:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self.between.tokens(last, [{"role": "user", "content": text}], self.longest)


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


def workflow_of(recipe: RlRecipe, section: Workflow, tokenizer: Any, prompts: Sequence[Prompt]) -> Shape:
    """The workflow that `rollout.workflow` names, as a shape. Raises RecipeError for a function that is no coroutine
    function, UserError for a name or key that is not there."""
    component = registry.resolve(section.kinds, section.use, recipe.base_dir)
    check_keys(component, section)
    if not inspect.iscoroutinefunction(component.function):
        raise RecipeError(
            f"rollout.workflow `{section.use}` is no coroutine function",
            allowed="async def workflow(row, call, *, KEYS)",
        )
    between = between_turns(tokenizer)
    run = partial(component.function, **section.params)
    of_data = max(len(prompt.ids) for prompt in prompts)
    longest = section.max_prompt_tokens or of_data + 2 * recipe.rollout.max_new_tokens + 512
    runner = WorkflowRunner(section, longest, run, recipe.data, tokenizer, between)
    room = max(0, longest - of_data)
    return Shape(component.name, runner.make_rows, {}, tokenizer, own_group=False, room=room, key="rollout.workflow")
