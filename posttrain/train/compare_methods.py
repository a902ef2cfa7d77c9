"""Comparison of methods on a run's saved rollouts: kept rows, advantages, push on each token, clipping.

The push on a token is - d loss / d log-prob at the log-probs of the last update of its row: the training signal seen by
the optimizer. Each method replaces the run's objective; rewards, lengths and sampling are those of the run.
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
from posttrain.train.saved_rollouts import SavedRollouts

RUN_METHOD = "as it was"
BATCH_FIELDS = {field.name for field in fields(RolloutBatch)}
COMPUTED = {"advantages", "channels", "returns", "components", "columns"}  # fields that the objective fills, or empty


@dataclass(frozen=True)
class Outcome:
    """Result of one method on the rollouts.

    kept: rows that stay [N]. advantages [N]: mean per row. push: on each token [N,T]. clipped: share of trained tokens
    in the clip region. missing: the reason if the method could not be computed.
    """

    name: str
    kept: Tensor
    advantages: Tensor
    push: Tensor
    clipped: float | None
    missing: str = ""


def compare(run: Mapping[str, Any], saved: SavedRollouts, algorithms: Sequence[str]) -> list[Outcome]:
    """Compute the run's own method and `algorithms` on the same rollouts. run: the resolved recipe of an `rl` run."""
    recipe = RlRecipe.model_validate(dict(run))
    return [
        evaluate_method(RUN_METHOD, recipe, saved),
        *(evaluate_method(name, _replace_objective(run, name), saved) for name in algorithms),
    ]


def _replace_objective(run: Mapping[str, Any], algorithm: str) -> RlRecipe:
    """Return the run's recipe with the objective of a preset."""
    found = of_stage(algorithm, "rl")
    others = {key: value for key, value in run.items() if key not in OBJECTIVE}
    choices = {key: value for key, value in found.choices.items() if key in OBJECTIVE}
    return RlRecipe.model_validate({**others, **choices, "algorithm": algorithm})


def evaluate_method(name: str, recipe: RlRecipe, saved: SavedRollouts) -> Outcome:
    """Compute one method; data that the rollouts lack, or an error of its functions, becomes `missing`."""
    objective = Objective.from_recipe(recipe)
    needs = sorted((objective.needs - MARKS) & BATCH_FIELDS - COMPUTED)
    lacking = [name for name in needs if getattr(saved.batch, name) is None]
    nothing = torch.zeros(0)
    if lacking:
        return Outcome(name, nothing, nothing, nothing, None, f"the rollouts do not have {', '.join(lacking)}")
    try:
        batch = objective.compute_advantages(saved.batch)
        push, clipped = _compute_push(objective, batch, saved.logp)
    except UserError as error:
        return Outcome(name, nothing, nothing, nothing, None, error.problems[0].what)
    assert batch.advantages is not None and batch.keep is not None
    by_row = batch.advantages if batch.advantages.dim() == 1 else row_mean(batch.advantages, batch.mask)
    return Outcome(name, batch.keep, by_row, push, clipped)


def _compute_push(objective: Objective, batch: RolloutBatch, logp: Tensor) -> tuple[Tensor, float | None]:
    """Return the push on each token [N,T], and the clip fraction."""
    leaf = logp.double().requires_grad_()
    values = batch.values
    loss, stats = objective.loss(batch.replace(new_values=values), leaf, objective.totals(batch))
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    tokens = max(float(batch.mask.sum()), 1.0)
    clip = stats.get("clip_ratio/region_mean")
    return -(torch.zeros_like(leaf) if gradient is None else gradient), None if clip is None else float(clip) / tokens


def summarize(outcomes: Sequence[Outcome], batch: RolloutBatch) -> list[dict[str, Any]]:
    """Return one table row per method.

    `like the run`: cosine between its push and the run's push; `on right rows`: share of the push's absolute size;
    `longest quarter`: the same share for the longest rows.
    """
    lengths = batch.mask.sum(-1)
    longest = lengths >= lengths.double().quantile(0.75)
    right = batch.correct == 1 if batch.correct is not None else torch.zeros_like(longest)
    table: list[dict[str, Any]] = []
    for method in outcomes:
        if method.missing:
            table.append({"method": method.name, "note": method.missing})
            continue
        size = method.push.abs()
        total = max(float(size.sum()), 1e-30)
        table.append(
            {
                "method": method.name,
                "rows kept": f"{int(method.kept.sum())}/{len(method.kept)}",
                "rows pushed": int((size > 0).any(-1).sum()),
                "mean |A|": float(method.advantages[method.kept].abs().mean()) if method.kept.any() else 0.0,
                "on right rows": float(size[right].sum()) / total,
                "longest quarter": float(size[longest].sum()) / total,
                "clipped": method.clipped,
                "like the run": cosine(method.push, outcomes[0].push),
            }
        )
    return table


def cosine(a: Tensor, b: Tensor) -> float | None:
    """Return the cosine of two matrices as vectors; None if either is all zeros."""
    scale = float(a.norm() * b.norm())
    return float((a * b).sum()) / scale if scale > 0 else None


def tabulate_rows(outcomes: Sequence[Outcome], batch: RolloutBatch) -> list[dict[str, Any]]:
    """Return one table row per rollout: group, reward, length, and each method's advantage and push on the row."""
    assert batch.rewards is not None
    rows = []
    for n in range(len(batch)):
        row: dict[str, Any] = {
            "group": int(batch.group_ids[n]),
            "reward": _number(batch.rewards[n]),
            "correct": None if batch.correct is None else _number(batch.correct[n]),
            "tokens": int(batch.mask[n].sum()),
        }
        for method in outcomes:
            if not method.missing:
                row[f"{method.name}: A"] = _number(method.advantages[n]) if method.kept[n] else None
                row[f"{method.name}: push"] = float(method.push[n].sum())
        rows.append(row)
    return rows


def _number(value: Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)
