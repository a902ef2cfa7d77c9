"""`rollout.workflow` in the RL loop: which calls by role are trained on, and what a workflow with a memory learns.

`evaluate/workflow.py` runs a workflow on the rollout's engine. This module binds it to the recipe, checks its calls
against the model's window, and lets a workflow with a memory learn from each step (`learn_from`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from posttrain.batch import CallRecord, Prompt, Rollout, Stored, WorkflowCall
from posttrain.errors import RecipeError
from posttrain.evaluate.workflow import bind_workflow
from posttrain.models.images import ImageReader
from posttrain.recipe.rollout_sections import Workflow
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.continuation import MOST_ROLLOUTS, Shape
from posttrain.shapes.protocol import Ended, Remembered
from posttrain.train.roles import GROUP_STRIDE
from posttrain.train.rollout_values import rollout_from_dict, rollout_to_dict
from posttrain.workflows.protocol import Learned, Made, Outcome


def check_window(shape: Shape | None, prompts: Sequence[Prompt], new_tokens: int, window: int) -> None:
    """Raise RecipeError if calls of a workflow may exceed the model's window."""
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
    """Return the workflow that `rollout.workflow` names, as a shape. Raises what `bind_workflow` raises."""
    adapters = (recipe.model.lora and recipe.model.lora.adapters) or []
    return bind_workflow(
        section,
        recipe.data,
        tokenizer,
        prompts,
        recipe.rollout.max_new_tokens,
        recipe.base_dir,
        key="rollout.workflow",
        train=section.train,
        reader=reader,
        adapter_of=partial(section.adapter_of, several=adapters),
    )


@dataclass(frozen=True)
class LearnedStep:
    """A step after a workflow or shape with a memory has learned from it.

    rollouts: scored rows that the step trains on. late: rows that later steps may train on. again: rows of earlier
    steps that are added, with their advantages.
    """

    rollouts: list[Rollout]
    late: list[Rollout]
    again: list[Rollout]
    memory: dict[str, Any]
    metrics: dict[str, float]


def learn_from(
    shape: Shape, memory: Mapping[str, Any], rollouts: Sequence[Rollout], prompts: Sequence[Prompt], step: int
) -> LearnedStep:
    """Let the workflow or shape learn from a step's rollouts. memory: of all components.

    Raises RecipeError if its `learn` returns another type.
    """
    assert shape.learn is not None
    if shape.key == "rollout.shape":
        ended = [
            Ended(r.prompt.uid, r.ids, r.is_given, r.reward, r.correct, r.finish)
            for r in rollouts
            if r.scored and not r.unfinished
        ]
        remembered = shape.learn(memory.get(shape.name), ended, step)
        if not isinstance(remembered, Remembered):
            raise _wrong_learned(shape, remembered, "posttrain.shapes.protocol.Remembered")
        return LearnedStep(list(rollouts), [], [], {**memory, shape.name: remembered.memory}, dict(remembered.metrics))
    scored_rows, late = ([rollout for rollout in rollouts if rollout.scored is scored] for scored in (True, False))
    found = shape.learn(memory.get(shape.name), _outcomes(rollouts), step)
    if not isinstance(found, Learned):
        raise _wrong_learned(shape, found, "posttrain.workflows.protocol.Learned")
    uids = {row["prompt"] for row, _ in found.again}
    by_uid = {prompt.uid: prompt for prompt in prompts if prompt.uid in uids} if uids else {}
    first = 1 + max((rollout.group % GROUP_STRIDE for rollout in rollouts), default=0)
    again = [_as_stored(row, by_uid, advantage, first + k) for k, (row, advantage) in enumerate(found.again)]
    return LearnedStep(scored_rows, late, again, {**memory, shape.name: found.memory}, dict(found.metrics))


def _wrong_learned(shape: Shape, found: Any, allowed: str) -> RecipeError:
    return RecipeError(f"`learn` of {shape.key} `{shape.name}` returned {found!r:.60}", allowed=allowed)


def _outcomes(rollouts: Sequence[Rollout]) -> list[Outcome]:
    """Return the step's rollouts with all of their calls; a call that is not a row has only its text."""
    rows: dict[int, dict[int, Rollout]] = {}
    for rollout in rollouts:
        assert rollout.call is not None and rollout.trajectory is not None
        rows.setdefault(rollout.trajectory, {})[rollout.call.number] = rollout
    outcomes = []
    for rows_by_call in rows.values():
        first = next(iter(rows_by_call.values()))
        assert first.call is not None
        calls = tuple(_as_made(call, rows_by_call.get(n)) for n, call in enumerate(first.call.calls))
        outcomes.append(Outcome(first.prompt.uid, first.prompt.row, calls))
    return outcomes


def _as_made(call: CallRecord, rollout: Rollout | None) -> Made:
    if rollout is None:
        return Made(call.role, call.text, call.note)
    row = (
        None
        if rollout.scored
        else rollout_to_dict(replace(rollout, call=WorkflowCall((call._replace(parent=None),), 0)))
    )
    return Made(call.role, call.text, call.note, rollout.reward, rollout.correct, row)


def _as_stored(row: Mapping[str, Any], prompts: Mapping[str, Prompt], advantage: float, group: int) -> Rollout:
    """Return a row of an earlier step as a group and rollout of its own."""
    rollout = rollout_from_dict(row, prompts[row["prompt"]])
    logps = tuple(0.0 if math.isnan(logp) else logp for logp in rollout.logps)
    stored = Stored(rollout.version, logps, (advantage,))
    return replace(rollout, group=group, trajectory=group * MOST_ROLLOUTS, part=0, stored=stored)
