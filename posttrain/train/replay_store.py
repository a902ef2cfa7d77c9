"""Store of a run's rollouts for replay. Every checkpoint contains it.

The recipe's replay kind decides which stored rollouts a step trains on, and which rollouts are stored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.batch import Prompt, Rollout, Stored
from posttrain.errors import RecipeError, RunError
from posttrain.recipe.stages import RlRecipe
from posttrain.replay.protocol import Replay, Request, Row
from posttrain.seeds import derive
from posttrain.train import distributed
from posttrain.train.roles import GROUP_STRIDE
from posttrain.train.rollout_values import rollout_from_dict, rollout_to_dict

FILE = "replay.json"


class ReplayStore:
    """Stored rollouts in the order in which they arrived, the same on all ranks.

    Only `store` and `load` change it, so a checkpoint of the previous step can be written during a step.
    """

    def __init__(
        self, kind: Replay, name: str, limit: int, prompts: Sequence[Prompt], *, steps: int = 1, seed: int = 0
    ) -> None:
        self.kind, self.name, self.limit, self.steps, self.seed = kind, name, limit, steps, seed
        self.prompts = {prompt.uid: prompt for prompt in prompts}
        self.rollouts: list[Rollout] = []

    @classmethod
    def from_recipe(cls, recipe: RlRecipe, prompts: Sequence[Prompt], steps: int) -> ReplayStore | None:
        """Return the empty store of a recipe's `replay`; None without `replay`.

        A user's class is looked up beside the recipe. Raises UserError for an unknown name or argument, and for a class
        that is not a replay kind.
        """
        section = recipe.replay
        if section is None:
            return None
        kind = section.load(recipe.base_dir).function(**section.params)
        for method in ("replace", "add", "store"):
            if not callable(getattr(kind, method, None)):
                raise RecipeError(
                    f"replay `{section.use}` has no method `{method}`",
                    where="replay",
                    hint="derive the class from posttrain.replay.protocol.Replay",
                )
        return cls(kind, section.use, section.limit, prompts, steps=steps, seed=recipe.run.seed)

    @property
    def trains_apart(self) -> bool:
        """Whether the kind trains on rows in a separate update; a user's class need not define `train_apart`."""
        return getattr(type(self.kind), "train_apart", Replay.train_apart) is not Replay.train_apart

    def inject(self, fresh: Sequence[Rollout], step: int) -> list[Rollout]:
        """Return the rollouts of a step after stored ones replace some of them, within their groups."""
        rows = [row_of(rollout, step) for rollout in fresh]
        swaps = dict(self.kind.replace(rows, self._rows(), self._request(step, "replace")))
        swaps = distributed.broadcast_from_rank0(swaps)
        self._check(swaps.keys(), len(fresh), "fresh", step)
        self._check(swaps.values(), len(self.rollouts), "stored", step)
        return [self._replace(rollout, swaps.get(n)) for n, rollout in enumerate(fresh)]

    def _replace(self, fresh: Rollout, index: int | None) -> Rollout:
        if index is None:
            return fresh
        stored = self.rollouts[index]
        if stored.prompt.uid != fresh.prompt.uid:
            raise RunError(
                f"replay `{self.name}` puts a rollout of prompt {stored.prompt.uid} among those of {fresh.prompt.uid}",
                hint="`replace` may swap rows of one uid only",
            )
        return dataclasses.replace(stored, group=fresh.group, bin=fresh.bin)

    def draw(
        self, rollouts: Sequence[Rollout], advantages: Sequence[float], step: int, *, apart: bool = False
    ) -> list[Rollout]:
        """Return the stored rollouts that a step trains on besides its own, each as a separate group.

        rollouts: the step's own, with the mean advantage of each. apart: those of a separate update; `rollouts` are
        then the step's fresh ones.
        """
        fresh = [row_of(rollout, step, a) for rollout, a in zip(rollouts, advantages, strict=True)]
        choose, purpose = (self.kind.train_apart, "apart") if apart else (self.kind.add, "add")
        chosen = distributed.broadcast_from_rank0(list(choose(fresh, self._rows(), self._request(step, purpose))))
        self._check(chosen, len(self.rollouts), "stored", step)
        first = 0 if apart else 1 + max(rollout.group % GROUP_STRIDE for rollout in rollouts)
        return [dataclasses.replace(self.rollouts[n], group=first + k, bin=None) for k, n in enumerate(chosen)]

    def store(
        self, rollouts: Sequence[Rollout], stored: Sequence[Stored], step: int, left_out: Sequence[bool] = ()
    ) -> None:
        """Store what the kind keeps of a step.

        rollouts: its fresh ones. stored: the data to store with each. left_out: rows whose tokens `select` has all
        removed; () = none.
        """
        fresh = [
            dataclasses.replace(row, advantage=0.0, left_out=row.advantage) if out else row
            for row, out in zip(
                (row_of(rollout, step, mean(own.advantages)) for rollout, own in zip(rollouts, stored, strict=True)),
                left_out or (False,) * len(rollouts),
                strict=True,
            )
        ]
        kept = self.kind.store(fresh, self._rows(), self._request(step, "store"))
        stay, join = distributed.broadcast_from_rank0((list(kept.stay), list(kept.join)))
        self._check(stay, len(self.rollouts), "stored", step)
        self._check(join, len(rollouts), "fresh", step)
        new = [dataclasses.replace(rollouts[n], stored=stored[n]) for n in join]
        self.rollouts = [*(self.rollouts[n] for n in stay), *new][-self.limit :]

    def _check(self, indices: Any, count: int, which: str, step: int) -> None:
        wrong = next((n for n in indices if type(n) is not int or not 0 <= n < count), None)
        if wrong is not None:
            raise RunError(
                f"replay `{self.name}` returned {which} row {wrong}, but there are {count}, numbered from 0",
                where=f"step {step + 1}",
            )

    def _rows(self) -> list[Row]:
        pairs = [(rollout, rollout.stored) for rollout in self.rollouts if rollout.stored is not None]
        return [row_of(rollout, stored.step, mean(stored.advantages)) for rollout, stored in pairs]

    def _request(self, step: int, purpose: str) -> Request:
        return Request(step, self.steps, derive(self.seed, "replay", purpose, step))

    def save(self, folder: Path) -> None:
        """Write the stored rollouts into a checkpoint folder."""
        (folder / FILE).write_text(json.dumps(list(map(rollout_to_dict, self.rollouts))))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; empty for a checkpoint of a run without replay."""
        path = folder / FILE
        rows = json.loads(path.read_text()) if path.is_file() else []
        self.rollouts = [rollout_from_dict(row, self.prompts[row["prompt"]]) for row in rows]


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 for no values."""
    return sum(values) / len(values) if values else 0.0


def row_of(rollout: Rollout, step: int, advantage: float = 0.0) -> Row:
    """Return the view of a rollout that a replay kind gets. step: for which it was sampled."""
    correct = None if rollout.correct is None else float(rollout.correct)
    return Row(rollout.prompt.uid, step, rollout.group, rollout.reward, correct, len(rollout.ids), advantage)
