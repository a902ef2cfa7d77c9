"""Engine whose completions are the answers of a rollout shape, so evaluation and generation sample as in training."""

from __future__ import annotations

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
    """Load the shape that a section names.

    world: makes the environment that the shape acts in. reader: of a vision model. Raises UserError for an unknown name
    or key.
    """
    return replace(Shape.from_recipe(section, base_dir, tokenizer, reader), world=world)


def sample_rollouts(
    engine: Engine, shape: Shape, batch: GenerationBatch, grade: GradeRollouts
) -> dict[int, list[Rollout]]:
    """Sample n rollouts of a shape for each prompt and return their rows, in order, by the rollout's number.

    They are not trained on, so groups and metrics are not needed. See `generate_shaped`.
    """
    batch = replace(batch, logprobs=shape.reads_logps)
    rows = generate_shaped(engine, shape, batch, group_stride=0, grade=grade, metrics={})
    by_rollout: dict[int, list[Rollout]] = {}
    for row in rows:
        assert row.trajectory is not None
        by_rollout.setdefault(row.trajectory, []).append(row)
    return by_rollout


class ShapedEngine(Generator):
    """Engine that wraps another engine and returns the answers of a shape's rollouts. Its weights are never synced.

    A completion has the text that rewards read, after the data's prompt, and all tokens sampled for the rollout. Raises
    RecipeError for a rollout with more than one scored row, which has no single answer.
    """

    def __init__(self, engine: Engine, shape: Shape) -> None:
        self.engine, self.shape = engine, shape
        self.window = engine.window - shape.room

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """Implement `Engine.generate`, without log-probs."""
        if batch.logprobs:
            raise ValueError("answers of a shape have no log-probs")
        rollouts = sample_rollouts(self.engine, self.shape, batch, _refuse_to_grade)
        return [self._answer(rows, batch.prompts[rows[0].group - batch.first_group]) for rows in rollouts.values()]

    def _answer(self, rows: Sequence[Rollout], prompt: Prompt) -> Rollout:
        """Return the rows of a rollout as a single completion of its prompt."""
        scored = [row for row in rows if row.scored]
        if len(scored) != 1:
            location = source_locations.describe_row(prompt.uid)
            raise RecipeError(
                f"shape `{self.shape.name}` gave {len(scored)} scored rows for {location}",
                allowed="one, which is the rollout's answer",
                hint="evaluate without the shape",
            )
        written = tuple(segment for row in rows for segment in row.segments if segment.kind == "model")
        return replace(scored[0], prompt=prompt, segments=written, trajectory=None, part=0)

    def close(self) -> None:
        self.engine.close()


def _refuse_to_grade(_: Sequence[Rollout]) -> list[Grade]:
    """Raise RecipeError: a shape of an evaluation cannot ask for grades."""
    raise RecipeError(
        "a shape of an evaluation cannot grade partial rollouts", hint="write it as `tree` of a generate stage"
    )
