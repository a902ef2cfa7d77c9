"""Engines whose completions are the answers of a rollout shape, so evaluation and generation sample as in training.

`TreeEngine` grows a tree from each prompt and records it: `tree` of the generate stage, a rollout shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain import source_locations
from posttrain.batch import Prompt, Rollout
from posttrain.batch.records import turn_records
from posttrain.errors import RecipeError
from posttrain.models.images import ImageReader
from posttrain.recipe.rollout_sections import RolloutShape
from posttrain.rollout.continuation import GradeRollouts, Shape, generate_shaped
from posttrain.rollout.engine import Engine, GenerationBatch, Generator
from posttrain.shapes.protocol import Grade

Record = dict[str, Any]
GradeAll = Callable[[Sequence[Rollout]], Sequence[Mapping[str, Any]]]


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


class TreeEngine(ShapedEngine):
    """Engine that wraps another engine: grows a tree per completion and returns its best path.

    `describe` returns what completions.jsonl adds for such rollouts: `tree`, and the
    scores of the path.
    """

    def __init__(self, engine: Engine, shape: Shape, grade: GradeAll) -> None:
        super().__init__(engine, shape)
        self.grade = grade
        self.paths: dict[int, list[Rollout]] = {}  # by trajectory
        self.graded: dict[Hashable, Mapping[str, Any]] = {}

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """Implement `Engine.generate`: the best path of n trees of each prompt, by reward; the first of ties."""
        if len(batch.share) < len(batch.prompts) or batch.logprobs:
            raise ValueError("a tree engine runs only without log-probs, in a single process")
        self.graded = {}
        self.paths = sample_rollouts(self.engine, self.shape, batch, self._grade)
        self._grade([path for paths in self.paths.values() for path in paths if path.scored])
        return [max(paths, key=self._rank) for paths in self.paths.values()]

    def describe(self, rollouts: Sequence[Rollout]) -> list[Record]:
        """Return scores, reward, correctness and the tree for each rollout of the last `generate`."""
        keys = ("scores", "reward", "correct")
        records: list[Record] = []
        for rollout in rollouts:
            assert rollout.trajectory is not None
            grade = self.graded[_rollout_key(rollout)]
            paths = self.paths[rollout.trajectory]
            records.append({**{key: grade[key] for key in keys}, "tree": self._tree(paths)})
        return records

    def _grade(self, rollouts: Sequence[Rollout]) -> list[Grade]:
        """Grade rollouts with the rewards; every path is scored once."""
        new = list({_rollout_key(r): r for r in rollouts if _rollout_key(r) not in self.graded}.values())
        if new:
            self.graded |= dict(zip(map(_rollout_key, new), self.grade(new), strict=True))
        grades = [self.graded[_rollout_key(r)] for r in rollouts]
        return [Grade(grade["reward"], grade["correct"]) for grade in grades]

    def _rank(self, path: Rollout) -> tuple[bool, float]:
        """Return the sort key of a path: graded or not, then reward."""
        grade = self.graded.get(_rollout_key(path))
        reward = None if grade is None else grade["reward"]
        return grade is not None, float("-inf") if reward is None else reward

    def _tree(self, paths: Sequence[Rollout]) -> Record:
        """Return a tree as `nodes` and `paths`.

        nodes: number, parent (0 is the prompt), text of the path up to and including the node, value, visits. paths:
        nodes, finish, and for scored paths reward and correct.
        """
        nodes: dict[int, Record] = {}
        described: list[Record] = []
        for path in paths:
            ids: tuple[int, ...] = ()
            parent = 0
            for node, segment in zip(path.nodes, path.segments, strict=False):  # a row that is not a path has no nodes
                ids += segment.ids
                text = self.shape.text(ids)
                nodes.setdefault(
                    node.number,
                    {
                        "number": node.number,
                        "parent": parent,
                        "text": text,
                        "value": node.value,
                        "visits": node.visits,
                    },
                )
                parent = node.number
            grade = self.graded.get(_rollout_key(path), {})
            described.append(
                {
                    "nodes": [node.number for node in path.nodes],
                    "finish": path.finish,
                    **turn_records(path),
                    **{key: grade[key] for key in ("reward", "correct") if key in grade},
                }
            )
        return {"nodes": [nodes[number] for number in sorted(nodes)], "paths": described}


def _rollout_key(rollout: Rollout) -> Hashable:
    """Return what identifies a rollout among those of a batch."""
    return rollout.trajectory, rollout.prompt.ids, rollout.ids, rollout.text
