"""Engine that grows a tree from each prompt and records it: `tree` of the generate stage, a rollout shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from posttrain.batch import Rollout
from posttrain.batch.records import turn_records
from posttrain.evaluate.shaped import sample_rollouts
from posttrain.rollout.continuation import Shape
from posttrain.rollout.engine import Engine, GenerationBatch, Generator
from posttrain.shapes.protocol import Grade

Record = dict[str, Any]
GradeAll = Callable[[Sequence[Rollout]], Sequence[Mapping[str, Any]]]


class TreeEngine(Generator):
    """Engine that wraps another engine: grows a tree per completion and returns its best path.

    Its weights are never synced. `describe` returns what completions.jsonl adds for such rollouts: `tree`, and the
    scores of the path.
    """

    def __init__(self, engine: Engine, shape: Shape, grade: GradeAll) -> None:
        self.engine, self.shape, self.grade = engine, shape, grade
        self.window = engine.window - shape.room
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
        found: list[Record] = []
        for rollout in rollouts:
            assert rollout.trajectory is not None
            grade = self.graded[_rollout_key(rollout)]
            paths = self.paths[rollout.trajectory]
            found.append({**{key: grade[key] for key in keys}, "tree": self._tree(paths)})
        return found

    def _grade(self, rollouts: Sequence[Rollout]) -> list[Grade]:
        """Grade rollouts with the rewards; every path is scored once."""
        new = list({_rollout_key(r): r for r in rollouts if _rollout_key(r) not in self.graded}.values())
        if new:
            self.graded |= dict(zip(map(_rollout_key, new), self.grade(new), strict=True))
        found = [self.graded[_rollout_key(r)] for r in rollouts]
        return [Grade(grade["reward"], grade["correct"]) for grade in found]

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
                text = self.shape.decode(ids, special=False)
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

    def close(self) -> None:
        self.engine.close()


def _rollout_key(rollout: Rollout) -> Hashable:
    """Return what identifies a rollout among those of a batch."""
    return rollout.trajectory, rollout.prompt.ids, rollout.ids, rollout.text
