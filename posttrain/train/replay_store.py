"""The stored rollouts of a run (`replay`): which of them a step trains on, and which are kept, as the recipe's kind
says. They are in every checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.batch import Prompt, Rollout, Stored
from posttrain.errors import RecipeError, RunError
from posttrain.recipe.argument_checks import load_component
from posttrain.recipe.stages import RlRecipe
from posttrain.replay.protocol import Replay, Request, Row
from posttrain.seeds import derive
from posttrain.train import distributed
from posttrain.train.rollout_values import rollout_from_dict, rollout_to_dict
from posttrain.train.variants import APART

FILE = "replay.json"


class ReplayStore:
    """Stored rollouts in the order in which they came, the same on all ranks. It changes in `store` and `load` only, so
    that a checkpoint of the step before can be written while a step is under way."""

    def __init__(
        self, kind: Replay, name: str, limit: int, prompts: Sequence[Prompt], *, steps: int = 1, seed: int = 0
    ) -> None:
        self.kind, self.name, self.limit, self.steps, self.seed = kind, name, limit, steps, seed
        self.prompts = {prompt.uid: prompt for prompt in prompts}
        self.rollouts: list[Rollout] = []

    @classmethod
    def from_recipe(cls, recipe: RlRecipe, prompts: Sequence[Prompt], steps: int) -> ReplayStore | None:
        """The empty store of a recipe's `replay`; None without. A class of the user is looked for beside it. Raises
        UserError for a name or an argument that does not exist, and for what is no kind of replay."""
        section = recipe.replay
        if section is None:
            return None
        made = load_component(section, recipe.base_dir).function(**section.params)
        for method in ("replace", "add", "store"):
            if not callable(getattr(made, method, None)):
                raise RecipeError(
                    f"replay `{section.use}` has no method `{method}`",
                    where="replay",
                    hint="derive the class from posttrain.replay.protocol.Replay",
                )
        return cls(made, section.use, section.limit, prompts, steps=steps, seed=recipe.run.seed)

    @property
    def trains_apart(self) -> bool:
        """Whether the kind ever has rows trained on in an update of their own; a class of the user's need not say."""
        return getattr(type(self.kind), "train_apart", Replay.train_apart) is not Replay.train_apart

    def inject(self, fresh: Sequence[Rollout], step: int) -> list[Rollout]:
        """The rollouts of a step with stored ones in the places of those that give way, in their groups."""
        rows = [row_of(one, step) for one in fresh]
        swaps = dict(self.kind.replace(rows, self._rows(), self._request(step, "replace")))
        swaps = distributed.broadcast_from_rank0(swaps)
        self._check(swaps.keys(), len(fresh), "fresh", step)
        self._check(swaps.values(), len(self.rollouts), "stored", step)
        return [self._in_place_of(one, swaps.get(place)) for place, one in enumerate(fresh)]

    def _in_place_of(self, fresh: Rollout, place: int | None) -> Rollout:
        if place is None:
            return fresh
        stored = self.rollouts[place]
        if stored.prompt.uid != fresh.prompt.uid:
            raise RunError(
                f"replay `{self.name}` puts a rollout of prompt {stored.prompt.uid} among those of {fresh.prompt.uid}",
                hint="`replace` may swap rows of one uid only",
            )
        return dataclasses.replace(stored, group=fresh.group, bin=fresh.bin)

    def draw(self, rollouts: Sequence[Rollout], advantages: Sequence[float], step: int) -> list[Rollout]:
        """The stored rollouts that a step trains on beside its own, each a group by itself. rollouts: its own, with
        the mean advantage of each."""
        fresh = [row_of(one, step, a) for one, a in zip(rollouts, advantages, strict=True)]
        places = list(self.kind.add(fresh, self._rows(), self._request(step, "add")))
        places = distributed.broadcast_from_rank0(places)
        self._check(places, len(self.rollouts), "stored", step)
        first = 1 + max(one.group % APART for one in rollouts)
        return [dataclasses.replace(self.rollouts[n], group=first + k, bin=None) for k, n in enumerate(places)]

    def draw_apart(self, rollouts: Sequence[Rollout], advantages: Sequence[float], step: int) -> list[Rollout]:
        """The stored rollouts that are trained on in an update of their own, each a group by itself. rollouts: the
        step's fresh ones, with the mean advantage of each."""
        fresh = [row_of(one, step, a) for one, a in zip(rollouts, advantages, strict=True)]
        places = list(self.kind.train_apart(fresh, self._rows(), self._request(step, "apart")))
        places = distributed.broadcast_from_rank0(places)
        self._check(places, len(self.rollouts), "stored", step)
        return [dataclasses.replace(self.rollouts[n], group=k, bin=None) for k, n in enumerate(places)]

    def store(
        self, rollouts: Sequence[Rollout], stored: Sequence[Stored], step: int, left_out: Sequence[bool] = ()
    ) -> None:
        """Keep what the kind wants of a step. rollouts: its fresh ones. stored: what each would be stored with.
        left_out: of which `select` has taken every token; () = of none."""
        fresh = [
            dataclasses.replace(row, advantage=0.0, left_out=row.advantage) if out else row
            for row, out in zip(
                (row_of(one, step, _mean(own.advantages)) for one, own in zip(rollouts, stored, strict=True)),
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

    def _check(self, places: Any, count: int, which: str, step: int) -> None:
        wrong = next((n for n in places if type(n) is not int or not 0 <= n < count), None)
        if wrong is not None:
            raise RunError(
                f"replay `{self.name}` names {which} row {wrong} of {count}, from 0", where=f"step {step + 1}"
            )

    def _rows(self) -> list[Row]:
        pairs = [(one, one.stored) for one in self.rollouts if one.stored is not None]
        return [row_of(one, stored.step, _mean(stored.advantages)) for one, stored in pairs]

    def _request(self, step: int, purpose: str) -> Request:
        return Request(step, self.steps, derive(self.seed, "replay", purpose, step))

    def save(self, folder: Path) -> None:
        """Write the stored rollouts into a checkpoint folder."""
        (folder / FILE).write_text(json.dumps(list(map(rollout_to_dict, self.rollouts))))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; a checkpoint of a run without replay has nothing."""
        path = folder / FILE
        rows = json.loads(path.read_text()) if path.is_file() else []
        self.rollouts = [rollout_from_dict(row, self.prompts[row["prompt"]]) for row in rows]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def row_of(rollout: Rollout, step: int, advantage: float = 0.0) -> Row:
    """What a kind sees of a rollout that was sampled for that step."""
    correct = None if rollout.correct is None else float(rollout.correct)
    return Row(rollout.prompt.uid, step, rollout.group, rollout.reward, correct, len(rollout.ids), advantage)
