"""Rewards for choosing how to think: which format, how hard the question is, how many tools to call.

The choice of a completion is a reward component of weight 0 (`efficiency.mode`, `efficiency.tool_calls`) whose name
these functions take. All return new rewards [N]; NaN (not scored) stays NaN.

Shapes: rewards and components [N].
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.gate import completion_lengths, get_component, group_pass_rates, is_correct
from posttrain.advantage.group import group_min, group_sum, number_groups, require_rewards
from posttrain.advantage.length_rewards import group_min_max, scale_positive
from posttrain.batch import RolloutBatch, row_mean
from posttrain.options import PartialColumn, ScoreName
from posttrain.registry import register


@register("group_reward", "format_diversity", paper="2505.20258", needs=("groups", "components"))
def format_diversity(
    batch: RolloutBatch, *, on: ScoreName = "mode", decay: Literal["cosine", "none"] = "cosine"
) -> Tensor:
    """Scale up rewards of rare formats early in training (ARM's Ada-GRPO) -> [N].

    reward * scale, scale = 1 + (G/F - 1) * (1 + cos(pi * step / total_steps)) / 2; F of the group's G rows have the
    row's format.

    ARM's Ada-GRPO: early in training, rare formats are protected from extinction; at the end every scale is 1. `on`
    names the component with the number of the format; negative or NaN means that no format was recognized: such rows
    share one bucket and have reward 0.
    """
    rewards = torch.where(_get_category(batch, on) < 0, require_rewards(batch) * 0, require_rewards(batch))
    return rewards * diversity_scale(batch, on=on, decay=decay)


def diversity_scale(batch: RolloutBatch, *, on: str = "mode", decay: Literal["cosine", "none"] = "cosine") -> Tensor:
    """Compute the factor [N] of `format_diversity`, from G/F at step 0 to 1 at the last step.

    With decay `none` it stays at G/F.
    """
    key = number_groups(batch.group_ids)
    pair = torch.unique(torch.stack([key.double(), _get_category(batch, on)], 1), dim=0, return_inverse=True)[1]
    ones = torch.ones_like(key, dtype=torch.float64)
    share = group_sum(ones, key)[key] / group_sum(ones, pair)[pair]
    return 1 + (share - 1) * (cosine(batch.step, batch.total_steps) if decay == "cosine" else 1.0)


def cosine(step: float, total_steps: float) -> float:
    """Compute half a cosine from 1 at step 0 to 0 at total_steps and beyond."""
    return 0.5 * (1 + math.cos(math.pi * min(max(step / max(total_steps, 1), 0.0), 1.0)))


@register("group_reward", "difficulty_tag", paper="2505.18822", needs=("groups", "correct", "components"))
def difficulty_tag(
    batch: RolloutBatch,
    *,
    on: ScoreName = "tag",
    threshold: float = 0.625,
    tag_weight: float = 0.5,
    length_weight: float = 0.5,
) -> Tensor:
    """Reward predicting how hard the question is, and answering accordingly (AdaCtrl) -> [N].

    reward + tag_weight * r_tag + length_weight * r_len.

    AdaCtrl, following its code. A group is easy if its share of right answers is above the threshold (equal: hard).
    r_tag: 1 if the tag (`on`: 0 easy, 1 hard) matches the group's difficulty, 0 if not, -1 without a tag. r_len applies
    only if the tag matches: h = (1 - cos(pi L / longest of the group)) / 2 for hard groups, 1 - h for easy ones, for
    right and wrong rows.
    """
    terms = difficulty_terms(batch, on=on, threshold=threshold)
    return require_rewards(batch) + tag_weight * terms["tag_reward"] + length_weight * terms["length_reward"]


def difficulty_terms(batch: RolloutBatch, *, on: str = "tag", threshold: float = 0.625) -> dict[str, Tensor]:
    """Return `difficulty` [K] (0 easy, 1 hard) and the unweighted `tag_reward` and `length_reward` [N]."""
    key, rates = group_pass_rates(batch)
    hard = ~(rates > threshold)  # also True without a judged answer (NaN)
    tag = _get_category(batch, on)
    known = (tag == 0) | (tag == 1)
    matches = tag == hard[key].double()
    lengths = completion_lengths(batch)
    longest = group_min_max(lengths, key)[1][key]
    h = torch.where(longest > 0, 0.5 * (1 - torch.cos(math.pi * lengths / longest.clamp(min=1))), 0.0)
    return {
        "difficulty": hard.double(),
        "tag_reward": torch.where(known, matches.double(), -1.0),
        "length_reward": torch.where(matches, torch.where(hard[key], h, 1 - h), 0.0),
    }


@register(
    "group_reward",
    "optimal_tool_calls",
    paper="2504.14870",
    needs=("groups", "correct", "components", "all_correct"),
)
def optimal_tool_calls(
    batch: RolloutBatch,
    *,
    on: ScoreName = "tool_calls",
    variant: Literal["grpo", "ppo"] = "grpo",
    alpha: float = 1.0,
    smooth: float = 1.0,
    best: PartialColumn | None = None,
) -> Tensor:
    """Multiply positive rewards by alpha * r_tool, largest for as few tool calls as a right answer needs (OTC).

    m: calls of the row; n: fewest calls among the right rows of the group (0 without one). grpo: n = 0 gives 1 for m =
    0 and cos(m pi / (2m + smooth)) otherwise; n > 0 gives sin(pi f / 2n) with f = 2nm / (m + n), largest at m = n and
    falling on both sides. ppo: the cosine alone. smooth is a guess: the paper's value is not known, larger is milder.
    best: a data column with the fewest calls known to suffice for the row; n is never above it.
    """
    factor = alpha * tool_terms(batch, on=on, variant=variant, smooth=smooth, best=best)["tool_reward"]
    return scale_positive(require_rewards(batch), factor)


@register("group_reward", "curiosity", paper="2505.15966", needs=("groups", "components"))
def curiosity(
    batch: RolloutBatch,
    *,
    on: ScoreName = "tool_calls",
    rate: float = 0.3,
    bonus: float = 0.5,
    most: float = 1.0,
    cost: float = 0.05,
) -> Tensor:
    """Reward tool calls while few rows of the group make one, and charge for excess calls (Pixel Reasoner) -> [N].

    reward + bonus * max(rate - share, 0) for rows with a call - cost * (calls above most).

    share: rows of the group with a call, so a rarely used tool is rewarded until `rate` of the rows use it. A row with
    unknown calls has neither term.
    """
    calls, key = get_component(batch, on).double(), number_groups(batch.group_ids)
    known, called = ~calls.isnan(), calls > 0
    share = group_sum(called.double(), key) / group_sum(known.double(), key).clamp(min=1)
    curious = torch.where(called, (rate - share[key]).clamp(min=0), 0.0)
    excess = (calls - most).clamp(min=0).nan_to_num(nan=0.0)
    return require_rewards(batch) + bonus * curious - cost * excess


def tool_ledger(
    batch: RolloutBatch,
    *,
    on: str = "tool_calls",
    variant: Literal["grpo", "ppo"] = "grpo",
    alpha: float = 1.0,
    smooth: float = 1.0,
    best: PartialColumn | None = None,
) -> dict[str, Tensor]:
    """Return the rewards of `optimal_tool_calls` with the quantities behind them.

    `rewards` (from correctness if the batch has no rewards), `tool_reward` [N], `optimal_calls` [K] (for both variants
    the fewest calls of a right row, -1 = unknown), and `productivity`: right answers / tool calls of the batch, NaN
    without a call.
    """
    rewarded = batch if batch.rewards is not None else batch.replace(rewards=batch.correct)
    terms = tool_terms(rewarded, on=on, variant=variant, smooth=smooth, best=best)
    calls = get_component(batch, on).double().nan_to_num(nan=0.0).sum()
    productivity = is_correct(batch).double().sum() / torch.where(calls > 0, calls, torch.nan)
    rewards = optimal_tool_calls(rewarded, on=on, variant=variant, alpha=alpha, smooth=smooth, best=best)
    optimal = fewest_calls(batch, on=on, best=best)
    return {"rewards": rewards, **terms, "optimal_calls": optimal, "productivity": productivity}


def tool_terms(
    batch: RolloutBatch,
    *,
    on: str = "tool_calls",
    variant: Literal["grpo", "ppo"] = "grpo",
    smooth: float = 1.0,
    best: PartialColumn | None = None,
) -> dict[str, Tensor]:
    """Return `optimal_calls` [K] (-1 = unknown, or not used by the variant) and `tool_reward` [N] in [0, 1]."""
    calls, key = get_component(batch, on).double(), number_groups(batch.group_ids)
    optimal = fewest_calls(batch, on=on, best=best)
    optimal = optimal if variant == "grpo" else torch.full_like(optimal, -1.0)
    n = optimal.clamp(min=0)[key]
    falling = torch.where(calls == 0, 1.0, torch.cos(math.pi * calls / (2 * calls + smooth)))
    harmonic = 2 * n * calls / (calls + n).clamp(min=1)
    peaked = torch.sin(math.pi * harmonic / (2 * n.clamp(min=1)))
    return {"optimal_calls": optimal, "tool_reward": torch.where(n > 0, peaked, falling)}


def fewest_calls(batch: RolloutBatch, *, on: str, best: PartialColumn | None) -> Tensor:
    """Return the fewest calls of a right row of each group, or of its column `best` if smaller [K]; -1 = unknown."""
    calls = get_component(batch, on).double()
    enough = torch.where(is_correct(batch) & ~calls.isnan(), calls, torch.inf)
    if best is not None and best in batch.columns:  # the column is absent if no row of the batch has a value
        enough = torch.minimum(enough, batch.columns[best].double().nan_to_num(nan=torch.inf))
    fewest = group_min(enough, number_groups(batch.group_ids))
    return torch.where(fewest.isinf(), -1.0, fewest)


def _get_category(batch: RolloutBatch, on: str) -> Tensor:
    """Return a component with category numbers [N]; -1 where it is NaN or negative."""
    value = get_component(batch, on).double().nan_to_num(nan=-1.0)
    return torch.where(value < 0, -1.0, value)


@register("group_reward", "difficulty_budget", paper="2505.23727", needs=("topk_logp",))
def difficulty_budget(
    batch: RolloutBatch,
    *,
    difficulty: str = "difficulty",
    hard: float = 5.0,
    medium: float = 3.5,
    hard_budget: float = 256.0,
    easy_budget: float = 96.0,
    uncertainty_scale: float = 25.0,
    beta: float = 0.002,
) -> Tensor:
    """Multiply positive rewards by clip(1 - beta * (L - budget), 0, 1): a soft token budget for easy and hard prompts.

    PixelThink, following its code. difficulty: a data column (or component) of 1 to 10, or `pass_rate` for 10 * (1 -
    the group's share of right answers), which is not from the paper. The budget is hard_budget + uncertainty_scale * u
    from `hard` on and easy_budget below `medium`; in between there is no length term. u: mean over the row's tokens of
    1 - probability of the likeliest token + that of the second. The budgets are the paper's, for words of short
    thoughts: set your own, in tokens.
    """
    terms = budget_terms(
        batch,
        difficulty=difficulty,
        hard=hard,
        medium=medium,
        hard_budget=hard_budget,
        easy_budget=easy_budget,
        uncertainty_scale=uncertainty_scale,
        beta=beta,
    )
    return scale_positive(require_rewards(batch), terms["length_score"])


def budget_terms(
    batch: RolloutBatch,
    *,
    difficulty: str,
    hard: float,
    medium: float,
    hard_budget: float,
    easy_budget: float,
    uncertainty_scale: float,
    beta: float,
) -> dict[str, Tensor]:
    """Return `uncertainty`, `budget` (-1 = none) and `length_score` of each row [N]."""
    d, u = _get_difficulty(batch, difficulty), uncertainty(batch)
    budget = torch.where(d >= hard, hard_budget + uncertainty_scale * u, torch.where(d < medium, easy_budget, -1.0))
    score = (1 - beta * (completion_lengths(batch) - budget)).clamp(0, 1)
    return {"uncertainty": u, "budget": budget, "length_score": torch.where(budget < 0, 1.0, score)}


def uncertainty(batch: RolloutBatch) -> Tensor:
    """Compute 1 - (p of the likeliest token - p of the second), averaged over trained tokens [N]; 0 without tokens."""
    if batch.topk_logp is None:
        return torch.zeros(len(batch), dtype=torch.float64, device=batch.mask.device)
    top = torch.where(batch.mask[:, :, None], batch.topk_logp[..., :2].double(), 0.0).exp()
    gap = (1 - (top[..., 0] - top[..., 1])).clamp(0, 1)
    return row_mean(gap, batch.mask)


def _get_difficulty(batch: RolloutBatch, name: str) -> Tensor:
    """Return the difficulty [N] from a data column or component, or from the group's pass rate."""
    if name == "pass_rate":
        key, rates = group_pass_rates(batch)
        return 10 * (1 - rates.nan_to_num(nan=0.0)[key])
    return (batch.columns[name] if name in batch.columns else get_component(batch, name)).double()
