"""Steps of agents: the turns of trajectories as separate rows. GiGPO compares actions taken in the same state."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.advantage.group import (
    combine_ids,
    normalize_by_group,
    normalize_by_trajectory,
    require_field,
    require_rewards,
)
from posttrain.advantage.tokens import token_rewards
from posttrain.batch import RolloutBatch
from posttrain.registry import register

REWARD = "/reward"  # component of the step batch with a step's total reward; no recipe reward has this name
Mode = Literal["mean_norm", "mean_std_norm"]


@register(
    "advantage",
    "gigpo",
    paper="2505.10978",
    needs=("groups", "turn_ids", "turn_states"),
    note="A state is the text shown before a turn; the authors also subtract 0.1 from the reward of an invalid action.",
)
def gigpo(
    batch: RolloutBatch,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    mode: Mode = "mean_norm",
    similarity: float | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Add the advantage of a turn among turns of the same state to that of the episode -> [N,T] (GiGPO).

    Episode advantage + omega * step advantage, one value per turn; a turn of the model is a step.

    Episode: the row's reward, normalized within the prompt. Step: the discounted return of a turn's rewards (per-turn
    rewards, with the remainder of the row's reward at its last turn), normalized over the turns of the prompt's
    rollouts with the same text before them (`turn_states`; the first turns share the prompt). A state seen once gives
    0. mean_norm subtracts the mean; mean_std_norm also divides by std + eps. similarity: texts with a difflib ratio of
    at least this (0.9, say) are one state; null: equal texts.
    """
    del similarity  # used where states are numbered, in `train.collate`
    steps = split_into_steps(batch)
    found = gigpo_terms(steps.batch, step_reward=REWARD, gamma=gamma, omega=omega, mode=mode, eps=eps)
    return steps.spread(found.advantages)


@dataclass(frozen=True)
class StepBatch:
    """Turns as separate rows.

    `batch` has S rows, ordered by row and turn; `step_of_token` [N,T] is the step of each token, -1 where the mask is
    0.
    """

    batch: RolloutBatch
    step_of_token: Tensor

    def spread(self, values: Tensor) -> Tensor:
        """Expand values of the steps [S] to the trained tokens of each step [N,T]; 0 elsewhere."""
        if not len(values):
            return torch.zeros(self.step_of_token.shape, dtype=values.dtype, device=values.device)
        return torch.where(self.step_of_token >= 0, values[self.step_of_token.clamp(min=0)], 0.0)


def split_into_steps(batch: RolloutBatch) -> StepBatch:
    """Split a batch whose rows are trajectories into turns. A turn without a trained token is not a step.

    rewards [S]: the row's reward. components: REWARD, the rewards of the turn's tokens (`tokens.token_rewards`), and
    the per-turn rewards by name. values [S,1]: at the turn's first trained token, where the critic has seen only the
    state.
    """
    mask, turns = batch.mask, require_field(batch.turn_ids, "turn_ids")
    number, rows, turn = number_turns(turns, mask)
    step_of_token = torch.full(mask.shape, -1, dtype=torch.long, device=mask.device)
    step_of_token[mask] = number
    count = len(rows)
    first = mark_first_trained(step_of_token, mask)

    def sum_by_step(values: Tensor) -> Tensor:
        return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, number, values[mask])

    def take_first(values: Tensor) -> Tensor:
        return values.new_zeros(count).index_put((step_of_token[first],), values[first])

    steps = RolloutBatch(
        group_ids=batch.group_ids[rows],
        mask=torch.ones(count, 1, dtype=torch.bool, device=mask.device),
        rewards=require_rewards(batch)[rows],
        components={
            **{name: sum_by_step(scores) for name, scores in batch.turn_scores.items()},
            REWARD: sum_by_step(token_rewards(batch)),
        },
        trajectory_ids=rows,
        step_ids=turn,
        state_ids=None if batch.turn_states is None else take_first(batch.turn_states),
        values=None if batch.values is None else take_first(batch.values)[:, None],
        dones=torch.cat([rows[1:] != rows[:-1], rows.new_ones(1, dtype=torch.bool)]) if count else rows.bool(),
    )
    return StepBatch(steps, step_of_token)


def mark_first_trained(turns: Tensor, mask: Tensor) -> Tensor:
    """Mark the first trained token of each turn, bool [N,T]. turns [N,T]: ascending within a row where mask is True."""
    seen = torch.where(mask, turns, -1).cummax(-1).values
    return mask & (turns > torch.cat([torch.full_like(seen[:, :1], -1), seen[:, :-1]], -1))


def number_turns(turns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number the turns of trained tokens by row and turn; also return the row and the turn [S] of each number.

    turns [N,T]: counted from 0 where mask is True.
    """
    width = int(torch.where(mask, turns, 0).max()) + 1 if turns.numel() else 1
    cell = (torch.arange(len(turns), device=turns.device)[:, None] * width + turns)[mask]
    occupied = torch.zeros(len(turns) * width, dtype=torch.bool, device=turns.device).index_fill(0, cell, True)
    cells = occupied.nonzero()[:, 0]
    return (occupied.cumsum(0) - 1)[cell], cells // width, cells % width


@dataclass(frozen=True)
class StepAdvantages:
    """Parts of GiGPO, all [N]: step returns, episode and step advantages, and their weighted sum."""

    step_returns: Tensor
    episode_advantages: Tensor
    step_advantages: Tensor
    advantages: Tensor


def gigpo_terms(
    batch: RolloutBatch,
    *,
    step_reward: str = "step",
    gamma: float = 0.95,
    omega: float = 1.0,
    mode: Mode = "mean_norm",
    eps: float = 1e-6,
) -> StepAdvantages:
    """Compute the advantages of `gigpo` and their parts from rows that are steps.

    The batch has trajectory_ids, step_ids and state_ids; `step_reward` names the component with a step's own reward.
    Raises ValueError for a batch without that component.
    """
    if step_reward not in batch.components:
        raise ValueError(f"the batch has no reward component `{step_reward}`")
    trajectories = require_field(batch.trajectory_ids, "trajectory_ids")
    normalizer: dict[str, Any] = {"scale": "group" if mode == "mean_std_norm" else "none", "eps": eps}
    episode = normalize_by_trajectory(require_rewards(batch), batch.group_ids, trajectories, **normalizer)
    steps = require_field(batch.step_ids, "step_ids")
    rewards = batch.components[step_reward].nan_to_num(nan=0.0)
    returns = returns_by_trajectory(rewards, combine_ids(batch.group_ids, trajectories), steps, gamma)
    anchor = combine_ids(batch.group_ids, require_field(batch.state_ids, "state_ids"))
    unscored = require_rewards(batch).isnan()
    step = normalize_by_group(torch.where(unscored, torch.nan, returns), anchor, **normalizer)
    return StepAdvantages(returns, episode, step, episode + omega * step)


def returns_by_trajectory(rewards: Tensor, trajectory: Tensor, steps: Tensor, gamma: float) -> Tensor:
    """Compute the discounted return of each row [N] over the later steps of its trajectory.

    Its reward + gamma * the return of the trajectory's next step, in order of `steps`.
    """
    reward, returns = rewards.tolist(), [0.0] * len(rewards)  # lists need a single transfer from the device
    running: dict[int, float] = {}
    trajectories = trajectory.tolist()
    for row in steps.argsort(descending=True, stable=True).tolist():
        number = trajectories[row]
        returns[row] = running[number] = reward[row] + gamma * running.get(number, 0.0)
    return rewards.new_tensor(returns)


def number_states(states: Sequence[str], group_ids: Sequence[int], similarity: float | None = None) -> list[int]:
    """Return a number for each state; rows of a group with the same state share a number.

    similarity: a state joins the first cluster of its group whose first member has a difflib ratio of at least this
    (about 0.9); None: exact equality.
    """
    if similarity is None:
        known: dict[tuple[int, str], int] = {}
        return [known.setdefault(key, len(known)) for key in zip(group_ids, states, strict=True)]
    members: dict[int, list[tuple[str, int]]] = {}
    numbers: list[int] = []
    made = 0
    for state, group in zip(states, group_ids, strict=True):
        clusters = members.setdefault(group, [])
        found = next((number for first, number in clusters if _alike(state, first, similarity)), None)
        if found is None:
            found, made = made, made + 1
            clusters.append((state, found))
        numbers.append(found)
    return numbers


def _alike(state: str, first: str, similarity: float) -> bool:
    return difflib.SequenceMatcher(None, state, first).ratio() >= similarity
