"""What other methods would have made of a run's saved rollouts: rows kept, advantages, the push on each token, clips.

The push on a token is - d loss / d log-prob, at the log-probs of the last update of its row: what the optimiser would
have seen of it. A method is put in the place of the run's own; the rewards, lengths and sampling are those of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, row_mean
from posttrain.errors import UserError
from posttrain.recipe.needs import MARKS
from posttrain.recipe.presets import of_stage
from posttrain.recipe.rl_stage import OBJECTIVE
from posttrain.recipe.stages import RlRecipe
from posttrain.train.objective import Objective
from posttrain.train.saved_rollouts import Saved

OWN = "as it was"
KNOWN = {field.name for field in fields(RolloutBatch)}


@dataclass(frozen=True)
class Outcome:
    """One method on the rollouts: rows that stay [N], advantages [N] (a row's mean), push on each token [N,T], and
    where the clip cuts (share of trained tokens). `missing`: why it could not be computed."""

    name: str
    kept: Tensor
    advantages: Tensor
    push: Tensor
    clipped: float | None
    missing: str = ""


def compare(run: Mapping[str, Any], saved: Saved, algorithms: Sequence[str]) -> list[Outcome]:
    """The run's own method and others, on the same rollouts. run: the resolved recipe of an `rl` run."""
    own = RlRecipe.model_validate(dict(run))
    return [outcome(OWN, own, saved), *(outcome(name, _instead(run, name), saved) for name in algorithms)]


def _instead(run: Mapping[str, Any], algorithm: str) -> RlRecipe:
    """The run's recipe with the objective of a preset in place of its own."""
    found = of_stage(algorithm, "rl")
    kept = {key: value for key, value in run.items() if key not in OBJECTIVE}
    choices = {key: value for key, value in found.choices.items() if key in OBJECTIVE}
    return RlRecipe.model_validate({**kept, **choices, "algorithm": algorithm})


def outcome(name: str, recipe: RlRecipe, saved: Saved) -> Outcome:
    """One method. What it needs and the rollouts do not have, or what its functions refuse, becomes `missing`."""
    objective = Objective.from_recipe(recipe)
    lacking = [n for n in sorted(objective.needs - MARKS) if n in KNOWN and not _has(saved.batch, n)]
    nothing = torch.zeros(0)
    if lacking:
        return Outcome(name, nothing, nothing, nothing, None, f"the rollouts do not have {', '.join(lacking)}")
    try:
        batch = objective.compute_advantages(saved.batch)
        push, clipped = _push(objective, batch, saved.logp)
    except UserError as error:
        return Outcome(name, nothing, nothing, nothing, None, error.problems[0].what)
    assert batch.advantages is not None and batch.keep is not None
    return Outcome(name, batch.keep, row_means(batch.advantages, batch.mask), push, clipped)


def _has(batch: RolloutBatch, name: str) -> bool:
    """Whether a field is there; what a part of the objective makes is."""
    return name in ("advantages", "channels", "returns", "components", "columns") or getattr(batch, name) is not None


def _push(objective: Objective, batch: RolloutBatch, logp: Tensor) -> tuple[Tensor, float | None]:
    leaf = logp.double().requires_grad_()
    values = batch.values
    loss, stats = objective.loss(batch.replace(new_values=values), leaf, objective.totals(batch))
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    tokens = max(float(batch.mask.sum()), 1.0)
    clip = stats.get("clip_ratio/region_mean")
    return -(torch.zeros_like(leaf) if gradient is None else gradient), None if clip is None else float(clip) / tokens


def row_means(advantages: Tensor, mask: Tensor) -> Tensor:
    """A row's advantage [N]; of advantages by token, their mean over trained tokens."""
    return advantages if advantages.dim() == 1 else row_mean(advantages, mask)


def summary(outcomes: Sequence[Outcome], batch: RolloutBatch) -> list[dict[str, Any]]:
    """A row a method. `like the run`: cosine between its push and the run's own; `on right rows`: share of the push's
    size; `longest quarter`: the same for the rows that are longest."""
    lengths = batch.mask.sum(-1)
    longest = lengths >= lengths.double().quantile(0.75)
    right = batch.correct == 1 if batch.correct is not None else torch.zeros_like(longest)
    table: list[dict[str, Any]] = []
    for one in outcomes:
        if one.missing:
            table.append({"method": one.name, "note": one.missing})
            continue
        size = one.push.abs()
        total = max(float(size.sum()), 1e-30)
        table.append(
            {
                "method": one.name,
                "rows kept": f"{int(one.kept.sum())}/{len(one.kept)}",
                "rows pushed": int((size > 0).any(-1).sum()),
                "mean |A|": float(one.advantages[one.kept].abs().mean()) if one.kept.any() else 0.0,
                "on right rows": float(size[right].sum()) / total,
                "longest quarter": float(size[longest].sum()) / total,
                "clipped": one.clipped,
                "like the run": cosine(one.push, outcomes[0].push),
            }
        )
    return table


def cosine(a: Tensor, b: Tensor) -> float | None:
    """Cosine of two matrices as vectors; None where one is 0 everywhere."""
    scale = float(a.norm() * b.norm())
    return float((a * b).sum()) / scale if scale > 0 else None


def by_row(outcomes: Sequence[Outcome], batch: RolloutBatch) -> list[dict[str, Any]]:
    """A row a rollout: its group, reward, length, and each method's advantage and push on the whole row."""
    assert batch.rewards is not None
    rows = []
    for n in range(len(batch)):
        row: dict[str, Any] = {
            "group": int(batch.group_ids[n]),
            "reward": _number(batch.rewards[n]),
            "correct": None if batch.correct is None else _number(batch.correct[n]),
            "tokens": int(batch.mask[n].sum()),
        }
        for one in outcomes:
            if not one.missing:
                row[f"{one.name}: A"] = _number(one.advantages[n]) if one.kept[n] else None
                row[f"{one.name}: push"] = float(one.push[n].sum())
        rows.append(row)
    return rows


def _number(value: Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)
