"""Steps of agents: the turns of trajectories, as rows of their own. GiGPO compares actions taken in the same state."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.advantage.group import by_trajectory, centred_and_scaled, joint, require_field, rewards_of
from posttrain.advantage.tokens import token_rewards
from posttrain.batch import RolloutBatch
from posttrain.registry import register

REWARD = "/reward"  # component of the batch of steps that is all a step earned; no reward has such a name
Mode = Literal["mean_norm", "mean_std_norm"]


@register(
    "advantage",
    "gigpo",
    paper="2505.10978",
    needs=("groups", "turn_ids", "turn_states"),
    note="A state is what was shown before a turn; the authors also take 0.1 off the reward of an invalid action.",
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
    """Episode advantage + omega * step advantage, one value a turn -> [N,T]. A turn of the model is a step.

    Episode: the row's reward, normalised within the prompt. Step: the discounted return of a turn's rewards (those by
    turn; the rest of the row's reward stands at its last turn), normalised over the turns of the prompt's rollouts that
    were shown the same before (`turn_states`; the first turns share the prompt). A state seen once gives 0. mean_norm
    subtracts the mean, mean_std_norm also divides by std + eps. similarity: texts with a difflib ratio of at least this
    are one state (0.9, say); null: equal texts.
    """
    del similarity  # read where states are numbered: `train.collate`
    steps = steps_of(batch)
    found = gigpo_terms(steps.batch, step_reward=REWARD, gamma=gamma, omega=omega, mode=mode, eps=eps)
    return steps.spread(found.advantages)


@dataclass(frozen=True)
class Steps:
    """Turns as rows of their own: `batch` has S of them, in order of row and turn; `place` [N,T] is each token's step,
    -1 where the mask is 0."""

    batch: RolloutBatch
    place: Tensor

    def spread(self, values: Tensor) -> Tensor:
        """Values of the steps [S] at the trained tokens of each [N,T], 0 elsewhere."""
        if not len(values):
            return torch.zeros(self.place.shape, dtype=values.dtype, device=values.device)
        return torch.where(self.place >= 0, values[self.place.clamp(min=0)], 0.0)


def steps_of(batch: RolloutBatch) -> Steps:
    """The turns of a batch whose rows are trajectories. A turn without a trained token is no step.

    rewards [S]: the row's. components: REWARD, the rewards of the turn's tokens (`tokens.token_rewards`), and the
    rewards by turn by name. values [S,1]: at the turn's first trained token, where the critic has seen the state only.
    """
    mask, turns = batch.mask, require_field(batch.turn_ids, "turn_ids")
    number, rows, turn = numbered_turns(turns, mask)
    place = torch.full(mask.shape, -1, dtype=torch.long, device=mask.device)
    place[mask] = number
    count = len(rows)
    seen = torch.where(mask, place, -1).cummax(-1).values  # of a row, later tokens have later steps
    first = mask & (place > torch.cat([torch.full_like(seen[:, :1], -1), seen[:, :-1]], -1))

    def sum_by_step(values: Tensor) -> Tensor:
        return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, number, values[mask])

    def take_first(values: Tensor) -> Tensor:
        return values.new_zeros(count).index_put((place[first],), values[first])

    made = RolloutBatch(
        group_ids=batch.group_ids[rows],
        mask=torch.ones(count, 1, dtype=torch.bool, device=mask.device),
        rewards=rewards_of(batch)[rows],
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
    return Steps(made, place)


def numbered_turns(turns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A number for each trained token's turn, in order of row and turn; the row and the turn [S] of each number.

    turns [N,T], counted from 0 where mask is True.
    """
    width = int(torch.where(mask, turns, 0).max()) + 1 if turns.numel() else 1
    cell = (torch.arange(len(turns), device=turns.device)[:, None] * width + turns)[mask]
    taken = torch.zeros(len(turns) * width, dtype=torch.bool, device=turns.device).index_fill(0, cell, True)
    found = taken.nonzero()[:, 0]
    return (taken.cumsum(0) - 1)[cell], found // width, found % width


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
    """The advantages of `gigpo` and what they are made of, of rows that are steps: marked with their trajectory, step
    and state; `step_reward` names the component with a step's own reward.

    Raises ValueError for a batch without that component.
    """
    if step_reward not in batch.components:
        raise ValueError(f"the batch has no reward component `{step_reward}`")
    trajectories = require_field(batch.trajectory_ids, "trajectory_ids")
    normaliser: dict[str, Any] = {"scale": "group" if mode == "mean_std_norm" else "none", "eps": eps}
    episode = by_trajectory(rewards_of(batch), batch.group_ids, trajectories, **normaliser)
    steps = require_field(batch.step_ids, "step_ids")
    rewards = batch.components[step_reward].nan_to_num(nan=0.0)
    returns = returns_by_trajectory(rewards, joint(batch.group_ids, trajectories), steps, gamma)
    anchor = joint(batch.group_ids, require_field(batch.state_ids, "state_ids"))
    unscored = rewards_of(batch).isnan()
    step = centred_and_scaled(torch.where(unscored, torch.nan, returns), anchor, **normaliser)
    return StepAdvantages(returns, episode, step, episode + omega * step)


def returns_by_trajectory(rewards: Tensor, trajectory: Tensor, steps: Tensor, gamma: float) -> Tensor:
    """Return of each row [N]: its reward + gamma * the return of the trajectory's next step, in order of `steps`."""
    own, found = rewards.tolist(), [0.0] * len(rewards)  # as numbers: one transfer, whatever the device
    running: dict[int, float] = {}
    places = trajectory.tolist()
    for row in steps.argsort(descending=True, stable=True).tolist():
        found[row] = running[places[row]] = own[row] + gamma * running.get(places[row], 0.0)
    return rewards.new_tensor(found)


def state_numbers(states: Sequence[str], group_ids: Sequence[int], similarity: float | None = None) -> list[int]:
    """A number for each state: rows of a group with the same state share it.

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
