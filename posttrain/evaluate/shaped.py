"""Completions that a shape of rollouts comes to: evaluation and generation answer as the policy was trained to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain import source_locations
from posttrain.batch import Prompt, Rollout
from posttrain.errors import RecipeError
from posttrain.models.images import ImageReader
from posttrain.recipe.rollout_sections import RolloutShape
from posttrain.rollout.continuation import GradeRollouts, Shape, generate_shaped
from posttrain.rollout.engine import Engine, GenerationBatch, Generator
from posttrain.shapes.protocol import Grade


def load_shape(
    section: RolloutShape,
    tokenizer: Any,
    base_dir: Path | None,
    world: Callable[[], Any] | None = None,
    reader: ImageReader | None = None,
) -> Shape:
    """The shape that a section names. world: makes the environment that it acts in. reader: of a model that sees.
    Raises UserError for a name or key that is not there."""
    return replace(Shape.from_recipe(section, base_dir, tokenizer, reader), world=world)


def sample_rollouts(
    engine: Engine, shape: Shape, batch: GenerationBatch, grade: GradeRollouts
) -> dict[int, list[Rollout]]:
    """The rows of n rollouts of a shape for each prompt, in order, by the rollout's number. Nothing is trained on them:
    no group and no metric is wanted. See `generate_shaped`."""
    batch = replace(batch, logprobs=shape.reads_logps)
    rows = generate_shaped(engine, shape, batch, apart=0, grade=grade, metrics={})
    return {number: list(own) for number, own in itertools.groupby(rows, key=_trajectory_of)}


def _trajectory_of(row: Rollout) -> int:
    assert row.trajectory is not None
    return row.trajectory


class ShapedEngine(Generator):
    """An Engine around another, whose completions are the answers that rollouts of a shape come to: the text that
    rewards read, after the data's prompt, with all tokens that were sampled on the way. It is never synced.

    Raises RecipeError for a rollout with more than one scored row, which is no one answer.
    """

    def __init__(self, engine: Engine, shape: Shape) -> None:
        self.engine, self.shape = engine, shape
        self.window = engine.window - shape.room

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """See `Engine.generate`; without log-probs."""
        if batch.logprobs:
            raise ValueError("what a shape comes to has no log-probs of its own")
        rollouts = sample_rollouts(self.engine, self.shape, batch, _refuse_to_grade)
        return [self._answer(own, batch.prompts[own[0].group - batch.first_group]) for own in rollouts.values()]

    def _answer(self, rows: Sequence[Rollout], prompt: Prompt) -> Rollout:
        """The rows of a rollout as one completion of its prompt."""
        scored = [row for row in rows if row.scored]
        if len(scored) != 1:
            raise RecipeError(
                f"shape `{self.shape.name}` gave {len(scored)} scored rows for {source_locations.row(prompt.uid)}",
                allowed="one, which is the rollout's answer",
                hint="evaluate without the shape",
            )
        written = tuple(segment for row in rows for segment in row.segments if segment.kind == "model")
        return replace(scored[0], prompt=prompt, segments=written, trajectory=None, part=0)

    def close(self) -> None:
        self.engine.close()


def _refuse_to_grade(_: Sequence[Rollout]) -> list[Grade]:
    raise RecipeError(
        "a shape of an evaluation has no rewards to ask on the way", hint="write it as `tree` of a generate stage"
    )
