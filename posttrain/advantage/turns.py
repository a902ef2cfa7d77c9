"""Credit by turn of a trajectory that is one row: `turn_ids` [N,T] says which turn a token belongs to."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from posttrain.advantage.gate import component
from posttrain.advantage.group import centred_and_scaled, group_mean, joint, number_groups, require_field, rewards_of
from posttrain.advantage.steps import numbered_turns
from posttrain.advantage.tokens import earned_by_turn, scored_mask, token_rewards
from posttrain.batch import Credit, RolloutBatch
from posttrain.errors import UserError
from posttrain.options import ScoreName, TextColumn
from posttrain.registry import register

Pools = Literal["separate", "joint", "none"]
Action = TypeVar("Action", bound=Hashable)


@register(
    "credit_assignment",
    "salt",
    needs=("groups", "turn_ids", "edge_ids"),
    note="Reconstructed from a description; which turns count as the same (one step of history) is a guess.",
)
def salt(batch: RolloutBatch) -> Tensor:
    """SALT: turns that do the same in the same state share the mean of their trajectories' advantages -> [N,T].

    `edge_ids` marks such turns within a group (see `edge_numbers`); a turn that no other rollout took keeps its
    trajectory's advantage. So steps that good and bad rollouts share are neither praised nor blamed. Raises UserError
    for advantages that differ by token already. Source: "SALT: Step-level Advantage Assignment for Long-horizon Agents
    via Trajectory Graph".
    """
    advantages = require_field(batch.advantages, "advantages")
    if advantages.dim() == 2:
        raise UserError(
            "salt divides the advantage of a row among its turns, and this one differs by token already",
            allowed="an advantage by row, such as `group` or `rloo`",
        )
    edge = require_field(batch.edge_ids, "edge_ids")[batch.mask]
    turn, rows, _ = numbered_turns(require_field(batch.turn_ids, "turn_ids"), batch.mask)
    member = joint(turn, edge)  # a turn counts once, however long it is
    members = int(member.max()) + 1 if len(member) else 0
    row, taken = (x.new_zeros(members).scatter(0, member, x) for x in (rows[turn], edge))
    keys = joint(batch.group_ids[row], taken)
    means = group_mean(advantages[row], keys)
    spread = advantages.new_zeros(batch.mask.shape)
    spread[batch.mask] = means[keys[member]]
    return spread


def edge_numbers(trajectories: Sequence[Sequence[Sequence[str]]], history: int = 1) -> list[list[int]]:
    """A number for each step [state, action, next state] of the trajectories of one prompt.

    Steps share it if their action, their next state and the last `history` states up to their own are equal (fewer at
    the start of a trajectory). Runs of white space are equal. A larger history merges less.
    """
    numbers: dict[tuple[tuple[str, ...], str, str], int] = {}
    found: list[list[int]] = []
    for steps in trajectories:
        texts = [tuple(" ".join(part.split()) for part in step) for step in steps]
        keys = [
            (tuple(state for state, _, _ in texts[max(0, i + 1 - history) : i + 1]), action, after)
            for i, (_, action, after) in enumerate(texts)
        ]
        found.append([numbers.setdefault(key, len(numbers)) for key in keys])
    return found


@register(
    "advantage",
    "information_gain",
    paper="2510.14967",
    needs=("groups", "turn_ids", "token_rewards"),
    note="Sources disagree on the normalisation; the authors' release centres by turn position without a std.",
)
def information_gain(
    batch: RolloutBatch, *, normalise: Pools = "separate", gamma: float = 1.0, eps: float = 1e-6
) -> Tensor:
    """IGPO: a turn is worth how much it raised the probability of the true answer -> [N,T], one value a turn.

    `token_rewards` holds those gains (summed by turn); the last turn has the row's reward instead, less what rewards
    by turn gave to others. Values are
    normalised over the group, then each turn gets the sum of gamma^k times those from it on. See `turn_advantages`.
    """
    turn = torch.where(batch.mask, require_field(batch.turn_ids, "turn_ids"), 0)
    turns = torch.where(batch.mask.any(-1), turn.max(-1).values + 1, 0)
    gains = torch.where(batch.mask, require_field(batch.token_rewards, "token_rewards"), 0.0)
    width = int(turns.max()) if len(turns) else 0
    rewards = gains.new_zeros(len(batch), width).scatter_add(1, turn, gains)
    earlier = torch.where(turn < turns[:, None] - 1, earned_by_turn(batch), 0.0).sum(-1)
    rewards = _with_outcome(rewards, rewards_of(batch) - earlier, turns)
    values = turn_advantages(rewards, turns, batch.group_ids, normalise=normalise, gamma=gamma, eps=eps)
    return torch.where(batch.mask, values.gather(1, turn), 0.0)


@register(
    "advantage",
    "decoupled_turns",
    paper="2512.03794",
    needs=("groups", "turn_ids"),
    note="After the authors' code; the means are over the tokens of a step, there over those of a minibatch.",
)
def decoupled_turns(
    batch: RolloutBatch,
    *,
    tool: ScoreName = "region",
    coef: float = 0.3,
    weight: float | None = 0.5,
    eps: float = 1e-6,
) -> Tensor:
    """DTPO: the last turn has the group advantage of the reward, turns before it also coef times that of `tool`; [N,T].

    Both are (r - mean) / (std + eps) within the group. weight: with aggregation `token_mean` the loss becomes weight
    times the mean over tokens of earlier turns, plus the mean over those of last turns, so that many short calls do not
    drown few long answers; null: one mean over all.
    """
    outcome = centred_and_scaled(rewards_of(batch), batch.group_ids, eps=eps)
    called = centred_and_scaled(component(batch, tool).double(), batch.group_ids, eps=eps)
    scored = scored_mask(batch)
    turn = torch.where(scored, require_field(batch.turn_ids, "turn_ids"), -1)
    last = scored & (turn == turn.max(-1, keepdim=True).values)
    earlier = scored & ~last
    values = torch.where(earlier, (outcome + coef * called)[:, None], outcome[:, None])
    if weight is not None:
        count = scored.sum()
        share = torch.where(earlier, weight * count / earlier.sum().clamp(min=1), count / last.sum().clamp(min=1))
        values = values * share
    return torch.where(scored, values, 0.0)


ENOUGH = "\nThat is enough information to answer.\n<answer>"


@register(
    "advantage",
    "answer_gain",
    paper="2510.14967",
    needs=("groups", "turn_ids", "answer_logp"),
    note="Sources disagree on the normalisation; the authors' release centres by turn position without a std.",
)
def answer_gain(
    batch: RolloutBatch,
    *,
    answer: TextColumn = "answer",
    closing: str = ENOUGH,
    kind: Literal["prob", "logprob"] = "prob",
    normalise: Pools = "separate",
    gamma: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """IGPO: a turn is worth how much likelier it made the right answer; the last turn has the row's reward -> [N,T].

    Before each turn the policy of the step's start is asked, by a pass without gradient, for the mean log-prob of the
    tokens of the column `answer` behind what was said so far and `closing`. prob: a gain is the difference of the
    exponentials, logprob: of the means themselves. In a row without an answer a turn counts as 0. See
    `turn_advantages` for normalise and gamma.
    """
    del answer, closing  # read by who measures `answer_logp`
    turn = torch.where(batch.mask, require_field(batch.turn_ids, "turn_ids"), 0)
    turns = torch.where(batch.mask.any(-1), turn.max(-1).values + 1, 0)
    known = require_field(batch.answer_logp, "answer_logp").double()
    found = information_gain_terms(
        known, rewards_of(batch), turns, batch.group_ids, kind=kind, normalise=normalise, gamma=gamma, eps=eps
    )
    return torch.where(batch.mask, found.advantages.gather(1, turn), 0.0)


@dataclass(frozen=True)
class Turns:
    """Turn rewards and advantages [N,S]."""

    rewards: Tensor
    advantages: Tensor


def information_gain_terms(
    answer_mean_logp: Tensor,
    outcome: Tensor,
    turns: Tensor,
    group_ids: Tensor | None = None,
    *,
    kind: Literal["prob", "logprob"] = "prob",
    normalise: Pools = "separate",
    gamma: float = 1.0,
    eps: float = 1e-6,
) -> Turns:
    """Turn rewards and advantages from what a scoring pass measured; by default the rows are one group.

    Shapes: answer_mean_logp [N,S], outcome, turns and group_ids [N].
    """
    group_ids = torch.zeros_like(turns) if group_ids is None else group_ids
    rewards = turn_rewards(answer_mean_logp, outcome, turns, kind=kind)
    return Turns(rewards, turn_advantages(rewards, turns, group_ids, normalise=normalise, gamma=gamma, eps=eps))


def turn_rewards(
    answer_mean_logp: Tensor, outcome: Tensor, turns: Tensor, *, kind: Literal["prob", "logprob"] = "prob"
) -> Tensor:
    """Gain of each turn, and the outcome at the last -> [N,S]; cells past a row's `turns` [N] are NaN.

    answer_mean_logp [N,S]: mean log-prob of the true answer's tokens before the first turn, after the first, ... and
    before the last one. prob: gains of exp of it; logprob: of itself.
    """
    known = answer_mean_logp.exp() if kind == "prob" else answer_mean_logp
    gains = torch.full_like(known, torch.nan)
    gains[:, :-1] = known[:, 1:] - known[:, :-1]
    return _with_outcome(gains, outcome, turns)


def turn_advantages(
    rewards: Tensor,
    turns: Tensor,
    group_ids: Tensor,
    *,
    normalise: Pools = "separate",
    gamma: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """Discounted sums over the turns of normalised turn rewards [N,S] -> [N,S], 0 past a row's `turns` [N].

    separate: (x - mean) / (population std + eps) of all gains of the group in one pool and of its outcomes in another;
    joint: in one pool; none: as they are. A pool of fewer than two values, or with std < eps, gives 0. Rows without an
    outcome (NaN) are left out and get 0; a turn without a gain counts as 0.
    """
    place = torch.arange(rewards.shape[1], device=rewards.device)
    last = place == turns[:, None] - 1
    scored = ~torch.where(last, rewards, 0.0).isnan().any(-1, keepdim=True)
    inside = (place < turns[:, None]) & scored & ~rewards.isnan()
    values = torch.where(inside, rewards, torch.nan)
    if normalise != "none":
        pool = torch.where(last, 1, 0) if normalise == "separate" else torch.zeros_like(place).expand(last.shape)
        key = joint(group_ids[:, None].expand(last.shape).flatten(), pool.flatten())
        values = _z_scores(values.flatten(), key, eps).reshape(values.shape)
    values = torch.where(inside, values, 0.0)
    sums = torch.zeros_like(values)
    running = values.new_zeros(len(values))
    for turn in reversed(range(values.shape[1])):
        running = values[:, turn] + gamma * running
        sums[:, turn] = running
    return torch.where((place < turns[:, None]) & scored, sums, 0.0)


def _z_scores(values: Tensor, key: Tensor, eps: float) -> Tensor:
    centred = centred_and_scaled(values, key, scale="none")
    number = number_groups(key)
    spread = group_mean(torch.where(values.isnan(), torch.nan, centred.square()), number).sqrt()[number]
    return torch.where(spread < eps, 0.0, centred / (spread + eps))


def _with_outcome(rewards: Tensor, outcome: Tensor, turns: Tensor) -> Tensor:
    """Turn rewards [N,S] with the row's outcome [N] at its last turn, NaN after it."""
    place = torch.arange(rewards.shape[1], device=rewards.device)
    rewards = torch.where(place == turns[:, None] - 1, outcome[:, None].to(rewards), rewards)
    return torch.where(place < turns[:, None], rewards, torch.nan)


@register(
    "advantage",
    "mc_critic",
    needs=("values", "mc_values", "turn_ids"),
    note="`environment: {simulations: 1000, horizon: 200}` plays from each state; the class needs `actions()`.",
)
def mc_critic(batch: RolloutBatch, *, w: float = 0.9, gamma: float = 0.9, lam: float = 0.0) -> Credit:
    """ProAct: generalised advantages over turns, with values (1 - w) * critic + w * Monte Carlo -> [N,T].

    A turn's values are those of its first trained token, its reward what its tokens earned (`tokens.token_rewards`: the
    rewards by turn, and the rest of the row's reward at the last); the episode ends with the row. The critic learns
    advantage + value. w 1 and lam 0: the pure Monte-Carlo difference. Source: "ProAct: Agentic Lookahead in Interactive
    Environments".
    """
    mask = scored_mask(batch)
    turn = torch.where(mask, require_field(batch.turn_ids, "turn_ids"), 0)
    width = int(turn.max()) + 1 if turn.numel() else 0
    rewards = token_rewards(batch)
    by_turn = rewards.new_zeros(len(batch), width).scatter_add(1, turn, rewards)
    first = mask & (turn > _before(mask, turn))
    values = [
        rewards.new_zeros(len(batch), width + 1).scatter_add(1, turn, torch.where(first, source, 0.0).to(rewards))
        for source in (require_field(batch.values, "values"), require_field(batch.mc_values, "mc_values"))
    ]
    last = turn.max(-1, keepdim=True).values
    ended = torch.arange(width, device=turn.device) >= last
    found = critic_terms(by_turn, values[0], values[1], ended, w=w, gamma=gamma, lam=lam)
    advantages, returns = (torch.where(mask, x.gather(1, turn), 0.0) for x in (found.advantages, found.returns))
    return Credit(advantages, returns)


def _before(mask: Tensor, turn: Tensor) -> Tensor:
    """Largest turn number of the trained tokens before each position [N,T], -1 if there is none."""
    seen = torch.where(mask, turn, -1).cummax(-1).values
    return torch.cat([torch.full_like(seen[:, :1], -1), seen[:, :-1]], -1)


@dataclass(frozen=True)
class Critic:
    """blended values [..., K + 1]; advantages and returns [..., K]."""

    blended: Tensor
    advantages: Tensor
    returns: Tensor


def critic_terms(
    turn_rewards: Tensor,
    values: Tensor,
    mc_values: Tensor,
    terminated: Tensor,
    *,
    w: float = 0.9,
    gamma: float = 0.9,
    lam: float = 0.0,
) -> Critic:
    """Blend V = (1 - w) values + w mc_values [..., K + 1], one more than turns; generalised advantages over K turns.

    delta = r + gamma (1 - terminated) V_next - V; A = delta + gamma lam (1 - terminated) A_next; return = A + V.
    """
    blended = (1 - w) * values + w * mc_values
    going = 1 - terminated.to(blended)
    advantages = torch.zeros_like(turn_rewards)
    running = turn_rewards.new_zeros(turn_rewards.shape[:-1])
    for t in reversed(range(turn_rewards.shape[-1])):
        delta = turn_rewards[..., t] + gamma * going[..., t] * blended[..., t + 1] - blended[..., t]
        running = delta + gamma * lam * going[..., t] * running
        advantages[..., t] = running
    return Critic(blended, advantages, advantages + blended[..., :-1])


@register(
    "advantage",
    "mc_actions",
    needs=("groups", "legal_returns", "action_ids"),
    note=(
        "An action's return is its reward + gamma * the mean return of random plays behind it; sources say `return"
        " after the action`. What an illegal action is worth is not stated."
    ),
)
def mc_actions(batch: RolloutBatch, *, gamma: float = 0.9, eps: float = 1e-5, illegal: float = -1.0) -> Tensor:
    """ProAct's MC-GRPO: a group of actions in one state, each worth what random plays behind it return -> [N].

    See `action_advantages`. A turn that is no legal action is worth `illegal`. gamma: of the plays
    (`environment.simulations`), whose class needs `actions()`; `action(text)` says which of them a turn is, without it
    the turn must be the action. A group whose state has no legal action gets 0. Source: "ProAct: Agentic Lookahead in
    Interactive Environments".
    """
    del gamma  # it is that of the plays, which are over
    legal, taken = (require_field(getattr(batch, name), name) for name in ("legal_returns", "action_ids"))
    found = legal.new_zeros(len(batch))
    for group in batch.group_ids.unique():
        rows = (batch.group_ids == group).nonzero()[:, 0]
        values = {number: value for number, value in enumerate(legal[rows[0]].tolist()) if not math.isnan(value)}
        if values:
            own = action_advantages(values, taken[rows].tolist(), eps=eps, illegal=illegal)
            found[rows] = torch.tensor(own, dtype=found.dtype, device=found.device)
    return found


def action_advantages(
    action_values: Mapping[Action, float], actions: Sequence[Action], *, eps: float = 1e-5, illegal: float = -1.0
) -> list[float]:
    """Advantages of a group of actions sampled in one state, from the Monte-Carlo return of every legal action.

    Actions that differ: (q - mean) / (std + eps) over the group. All the same: (q - mean) / std over all legal actions,
    0 if that std is 0 or one action is legal. Stds have ddof 1. illegal: q of an action that is none of them.
    """
    taken = torch.tensor([action_values.get(action, illegal) for action in actions], dtype=torch.float64)
    if len(set(actions)) > 1:
        return centred_and_scaled(taken, torch.zeros(len(taken), dtype=torch.long), eps=eps).tolist()
    legal = torch.tensor(list(action_values.values()), dtype=torch.float64)
    spread = legal.std() if len(legal) > 1 else legal.new_zeros(())
    return (torch.where(spread > 0, (taken - legal.mean()) / spread, 0.0)).tolist()
