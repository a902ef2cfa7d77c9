"""Steps of agents: one row is one step of a trajectory. GiGPO compares actions that were taken in the same state."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.advantage.group import by_trajectory, centred_and_scaled, joint, required, rewards_of
from posttrain.batch import RolloutBatch
from posttrain.registry import register

Mode = Literal["mean_norm", "mean_std_norm"]


@register(
    "advantage",
    "gigpo",
    paper="2505.10978",
    needs=("groups", "trajectory_ids", "step_ids", "state_ids"),
    note="For environments with text states; rows must be marked with their trajectory, step and state.",
)
def gigpo(
    batch: RolloutBatch,
    *,
    step_reward: str = "step",
    gamma: float = 0.95,
    omega: float = 1.0,
    mode: Mode = "mean_norm",
    eps: float = 1e-6,
) -> Tensor:
    """Episode advantage + omega * step advantage, one a step -> [N].

    Episode: the trajectory's reward (its rows all have it), each trajectory once, normalised within the prompt. Step:
    the discounted return of the reward component `step_reward`, normalised over the rows of the prompt that were in the
    same state; a state seen once gives 0. mean_norm subtracts the mean, mean_std_norm also divides by std + eps.
    """
    return gigpo_terms(batch, step_reward=step_reward, gamma=gamma, omega=omega, mode=mode, eps=eps).advantages


@dataclass(frozen=True)
class StepAdvantages:
    """All [N]: step_returns, the two parts, and their sum."""

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
    """The advantages of `gigpo` and what they are made of."""
    if step_reward not in batch.components:
        raise ValueError(f"the batch has no reward component `{step_reward}`")
    trajectories = required(batch.trajectory_ids, "trajectory_ids")
    normaliser: dict[str, Any] = {"scale": "group" if mode == "mean_std_norm" else "none", "eps": eps}
    episode = by_trajectory(rewards_of(batch), batch.group_ids, trajectories, **normaliser)
    steps = required(batch.step_ids, "step_ids")
    rewards = batch.components[step_reward].nan_to_num(nan=0.0)
    returns = returns_by_trajectory(rewards, joint(batch.group_ids, trajectories), steps, gamma)
    anchor = joint(batch.group_ids, required(batch.state_ids, "state_ids"))
    unscored = rewards_of(batch).isnan()
    step = centred_and_scaled(torch.where(unscored, torch.nan, returns), anchor, **normaliser)
    return StepAdvantages(returns, episode, step, episode + omega * step)


def returns_by_trajectory(rewards: Tensor, trajectory: Tensor, steps: Tensor, gamma: float) -> Tensor:
    """Return of each row [N]: its reward + gamma * the return of the trajectory's next step, in order of `steps`."""
    returns = torch.zeros_like(rewards)
    for number in trajectory.unique():
        rows = (trajectory == number).nonzero()[:, 0]
        running = rewards.new_zeros(())
        for row in rows[steps[rows].argsort(descending=True, stable=True)].tolist():
            running = rewards[row] + gamma * running
            returns[row] = running
    return returns


def state_numbers(states: Sequence[str], group_ids: Sequence[int], similarity: float | None = None) -> list[int]:
    """A number for each state: rows of a group with the same state share it.

    similarity: a state joins the first cluster of its group whose first member has a difflib ratio of at least this
    (about 0.9); None: exact equality.
    """
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


def _alike(state: str, first: str, similarity: float | None) -> bool:
    if similarity is None:
        return state == first
    return difflib.SequenceMatcher(None, state, first).ratio() >= similarity
