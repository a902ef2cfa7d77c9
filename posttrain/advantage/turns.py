"""Credit by turn of a trajectory stored as one row: `turn_ids` [N,T] gives the turn that a token belongs to."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from posttrain.advantage.gate import get_component
from posttrain.advantage.group import (
    combine_ids,
    group_mean,
    normalize_by_group,
    number_groups,
    require_field,
    require_rewards,
)
from posttrain.advantage.steps import mark_first_trained, number_turns
from posttrain.advantage.tokens import (
    earned_by_turn,
    returns_of_scored_rows,
    reverse_scan,
    scored_mask,
    token_rewards,
)
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
    note="Reconstructed from a description; the rule for equal turns (one step of history) is a guess.",
)
def salt(batch: RolloutBatch) -> Tensor:
    """Average advantages over turns with the same state and action across trajectories -> [N,T] (SALT).

    `edge_ids` marks such turns within a group (see `number_edges`); a turn that no other rollout took keeps its
    trajectory's advantage. Steps that good and bad rollouts share are thus neither reinforced nor penalized. Raises
    UserError for advantages that already differ by token. Source: "SALT: Step-level Advantage Assignment for
    Long-horizon Agents via Trajectory Graph".
    """
    advantages = require_field(batch.advantages, "advantages")
    if advantages.dim() == 2:
        raise UserError(
            "salt divides the advantage of a row among its turns, but this advantage already differs by token",
            allowed="an advantage by row, such as `group` or `rloo`",
        )
    edge = require_field(batch.edge_ids, "edge_ids")[batch.mask]
    turn, rows, _ = number_turns(require_field(batch.turn_ids, "turn_ids"), batch.mask)
    member = combine_ids(turn, edge)  # a turn counts once, whatever its length
    members = int(member.max()) + 1 if len(member) else 0
    row, taken = (x.new_zeros(members).scatter(0, member, x) for x in (rows[turn], edge))
    keys = combine_ids(batch.group_ids[row], taken)
    means = group_mean(advantages[row], keys)
    by_token = advantages.new_zeros(batch.mask.shape)
    by_token[batch.mask] = means[keys[member]]
    return by_token


def number_edges(trajectories: Sequence[Sequence[Sequence[str]]], history: int = 1) -> list[list[int]]:
    """Number the steps [state, action, next state] of the trajectories of one prompt; equal steps share a number.

    Steps are equal if their action, their next state and the last `history` states up to their own are equal (fewer at
    the start of a trajectory). Runs of white space are equal. A larger history merges less.
    """
    numbers: dict[tuple[tuple[str, ...], str, str], int] = {}
    edges: list[list[int]] = []
    for steps in trajectories:
        texts = [tuple(" ".join(part.split()) for part in step) for step in steps]
        keys = [
            (tuple(state for state, _, _ in texts[max(0, i + 1 - history) : i + 1]), action, after)
            for i, (_, action, after) in enumerate(texts)
        ]
        edges.append([numbers.setdefault(key, len(numbers)) for key in keys])
    return edges


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
    """Reward a turn for how much it raised the probability of the true answer -> [N,T], one value per turn (IGPO).

    `token_rewards` holds those gains (summed by turn). The last turn has the row's reward instead, minus what per-turn
    rewards gave to earlier turns. Values are normalized over the group, then each turn gets the sum of gamma^k times
    the values from that turn on. See `turn_advantages`.
    """
    turn = torch.where(batch.mask, require_field(batch.turn_ids, "turn_ids"), 0)
    turns = torch.where(batch.mask.any(-1), turn.max(-1).values + 1, 0)
    gains = torch.where(batch.mask, require_field(batch.token_rewards, "token_rewards"), 0.0)
    width = int(turns.max()) if len(turns) else 0
    rewards = gains.new_zeros(len(batch), width).scatter_add(1, turn, gains)
    earlier = torch.where(turn < turns[:, None] - 1, earned_by_turn(batch), 0.0).sum(-1)
    rewards = _with_outcome(rewards, require_rewards(batch) - earlier, turns)
    values = turn_advantages(rewards, turns, batch.group_ids, normalise=normalise, gamma=gamma, eps=eps)
    return torch.where(batch.mask, values.gather(1, turn), 0.0)


@register(
    "advantage",
    "decoupled_turns",
    paper="2512.03794",
    needs=("groups", "turn_ids"),
    note="Follows the authors' code, except that means are over the tokens of a step, not of a minibatch.",
)
def decoupled_turns(
    batch: RolloutBatch,
    *,
    tool: ScoreName = "region",
    coef: float = 0.3,
    weight: float | None = 0.5,
    eps: float = 1e-6,
) -> Tensor:
    """Compute separate advantages for the last turn and for earlier, tool-calling turns -> [N,T] (DTPO).

    The last turn has the group advantage of the reward, earlier turns that plus coef times the one of `tool`.

    Both are (r - mean) / (std + eps) within the group, r: the reward, or `tool`. weight: with aggregation `token_mean`
    the loss becomes weight times the mean over tokens of earlier turns, plus the mean over tokens of last turns, so
    that many short calls do not outweigh few long answers; null: one mean over all.
    """
    outcome = normalize_by_group(require_rewards(batch), batch.group_ids, eps=eps)
    called = normalize_by_group(get_component(batch, tool).double(), batch.group_ids, eps=eps)
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


ANSWER_PROMPT = "\nThat is enough information to answer.\n<answer>"


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
    closing: str = ANSWER_PROMPT,
    kind: Literal["prob", "logprob"] = "prob",
    normalise: Pools = "separate",
    gamma: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """Reward a turn for how much it raised the likelihood of the right answer -> [N,T] (IGPO).

    The last turn gets the row's reward.

    Before each turn, a forward pass of the policy at the start of the step computes the mean log-prob of the tokens of
    the column `answer` after the conversation so far and `closing`. prob: a gain is the difference of the exponentials,
    logprob: of the means themselves. In a row without an answer a turn counts as 0. See `turn_advantages` for normalise
    and gamma.
    """
    del answer, closing  # used where `answer_logp` is computed
    turn = torch.where(batch.mask, require_field(batch.turn_ids, "turn_ids"), 0)
    turns = torch.where(batch.mask.any(-1), turn.max(-1).values + 1, 0)
    known = require_field(batch.answer_logp, "answer_logp").double()
    found = information_gain_terms(
        known, require_rewards(batch), turns, batch.group_ids, kind=kind, normalise=normalise, gamma=gamma, eps=eps
    )
    return torch.where(batch.mask, found.advantages.gather(1, turn), 0.0)


@dataclass(frozen=True)
class TurnAdvantages:
    """Turn rewards and turn advantages [N,S]."""

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
) -> TurnAdvantages:
    """Compute turn rewards and advantages from the log-probs of a scoring pass; by default all rows are one group.

    Shapes: answer_mean_logp [N,S], outcome, turns and group_ids [N].
    """
    group_ids = torch.zeros_like(turns) if group_ids is None else group_ids
    rewards = turn_rewards(answer_mean_logp, outcome, turns, kind=kind)
    return TurnAdvantages(
        rewards, turn_advantages(rewards, turns, group_ids, normalise=normalise, gamma=gamma, eps=eps)
    )


def turn_rewards(
    answer_mean_logp: Tensor, outcome: Tensor, turns: Tensor, *, kind: Literal["prob", "logprob"] = "prob"
) -> Tensor:
    """Compute the gain of each turn, and the outcome at the last turn -> [N,S].

    NaN from a row's number of `turns` [N] on. answer_mean_logp [N,S]: mean log-prob of the true answer's tokens before
    the first turn, after the first, ... and before the last one. prob: differences of its exp; logprob: of itself.
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
    """Normalize turn rewards [N,S] and sum them, discounted, over the later turns -> [N,S].

    0 from a row's number of `turns` [N] on.

    separate: (x - mean) / (population std + eps) over all gains of the group in one pool and its outcomes in another;
    joint: in one pool; none: not normalized. A pool of fewer than two values, or with std < eps, gives 0. Rows without
    an outcome (NaN) are excluded and get 0; a turn without a gain counts as 0.
    """
    position = torch.arange(rewards.shape[1], device=rewards.device)
    last = position == turns[:, None] - 1
    scored = ~torch.where(last, rewards, 0.0).isnan().any(-1, keepdim=True)
    inside = (position < turns[:, None]) & scored & ~rewards.isnan()
    values = torch.where(inside, rewards, torch.nan)
    if normalise != "none":
        pool = torch.where(last, 1, 0) if normalise == "separate" else torch.zeros_like(position).expand(last.shape)
        key = combine_ids(group_ids[:, None].expand(last.shape).flatten(), pool.flatten())
        values = _z_scores(values.flatten(), key, eps).reshape(values.shape)
    values = torch.where(inside, values, 0.0)
    returns = reverse_scan(values, torch.full_like(values, gamma))
    return torch.where((position < turns[:, None]) & scored, returns, 0.0)


def _z_scores(values: Tensor, key: Tensor, eps: float) -> Tensor:
    """Standardize values by group key with the population std; 0 where the std is below eps."""
    centered = normalize_by_group(values, key, scale="none")
    number = number_groups(key)
    spread = group_mean(torch.where(values.isnan(), torch.nan, centered.square()), number).sqrt()[number]
    return torch.where(spread < eps, 0.0, centered / (spread + eps))


def _with_outcome(rewards: Tensor, outcome: Tensor, turns: Tensor) -> Tensor:
    """Return turn rewards [N,S] with the row's outcome [N] at its last turn and NaN after it."""
    position = torch.arange(rewards.shape[1], device=rewards.device)
    rewards = torch.where(position == turns[:, None] - 1, outcome[:, None].to(rewards), rewards)
    return torch.where(position < turns[:, None], rewards, torch.nan)


@register(
    "advantage",
    "mc_critic",
    needs=("values", "mc_values", "turn_ids"),
    note="`environment: {simulations: 1000, horizon: 200}` plays from each state; the class needs `actions()`.",
)
def mc_critic(batch: RolloutBatch, *, w: float = 0.9, gamma: float = 0.9, lam: float = 0.0) -> Credit:
    """Compute generalized advantages over turns with values (1 - w) * critic + w * Monte Carlo -> [N,T] (ProAct).

    A turn's values are those at its first trained token. Its reward is the sum over its tokens (`tokens.token_rewards`:
    the rewards by turn, and the remainder of the row's reward at the last turn). The episode ends with the row. The
    critic learns advantage + value. w 1 and lam 0: the pure Monte-Carlo difference. Source: "ProAct: Agentic Lookahead
    in Interactive Environments".
    """
    mask = scored_mask(batch)
    turn = torch.where(mask, require_field(batch.turn_ids, "turn_ids"), 0)
    width = int(turn.max()) + 1 if turn.numel() else 0
    rewards = token_rewards(batch)
    by_turn = rewards.new_zeros(len(batch), width).scatter_add(1, turn, rewards)
    first = mark_first_trained(turn, mask)
    values = [
        rewards.new_zeros(len(batch), width + 1).scatter_add(1, turn, torch.where(first, source, 0.0).to(rewards))
        for source in (require_field(batch.values, "values"), require_field(batch.mc_values, "mc_values"))
    ]
    last = turn.max(-1, keepdim=True).values
    ended = torch.arange(width, device=turn.device) >= last
    found = critic_terms(by_turn, values[0], values[1], ended, w=w, gamma=gamma, lam=lam)
    advantages, returns = (torch.where(mask, x.gather(1, turn), 0.0) for x in (found.advantages, found.returns))
    return Credit(advantages, returns_of_scored_rows(batch, returns))


@dataclass(frozen=True)
class CriticTargets:
    """Result of `critic_terms`: blended values [..., K + 1]; advantages and returns [..., K]."""

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
) -> CriticTargets:
    """Blend V = (1 - w) values + w mc_values [..., K + 1] and compute generalized advantages over K turns.

    values have one more entry than there are turns. delta = r + gamma (1 - terminated) V_next - V; A = delta + gamma
    lam (1 - terminated) A_next; return = A + V.
    """
    blended = (1 - w) * values + w * mc_values
    not_done = 1 - terminated.to(blended)
    delta = turn_rewards + gamma * not_done * blended[..., 1:] - blended[..., :-1]
    advantages = reverse_scan(delta, gamma * lam * not_done)
    return CriticTargets(blended, advantages, advantages + blended[..., :-1])


@register(
    "advantage",
    "mc_actions",
    needs=("groups", "legal_returns", "action_ids"),
    note=(
        "An action's return is its reward + gamma * the mean return of random playouts after it; sources say `return"
        " after the action`. The value of an illegal action is not stated."
    ),
)
def mc_actions(batch: RolloutBatch, *, gamma: float = 0.9, eps: float = 1e-5, illegal: float = -1.0) -> Tensor:
    """Compare actions in one state by the mean return of random playouts after each -> [N] (ProAct's MC-GRPO).

    See `action_advantages`. A turn that is not a legal action has value `illegal`. gamma: of the playouts
    (`environment.simulations`), whose class needs `actions()`; its `action(text)` maps a turn to an action, and without
    it the turn's text must be the action. A group whose state has no legal action gets 0. Source: "ProAct: Agentic
    Lookahead in Interactive Environments".
    """
    del gamma  # used by the playouts, which are already done
    legal, taken = (require_field(getattr(batch, name), name) for name in ("legal_returns", "action_ids"))
    row_advantages = legal.new_zeros(len(batch))
    for group in batch.group_ids.unique():
        rows = (batch.group_ids == group).nonzero()[:, 0]
        values = {number: value for number, value in enumerate(legal[rows[0]].tolist()) if not math.isnan(value)}
        if values:
            advantages = action_advantages(values, taken[rows].tolist(), eps=eps, illegal=illegal)
            row_advantages[rows] = torch.tensor(advantages, dtype=row_advantages.dtype, device=row_advantages.device)
    return row_advantages


def action_advantages(
    action_values: Mapping[Action, float], actions: Sequence[Action], *, eps: float = 1e-5, illegal: float = -1.0
) -> list[float]:
    """Compute advantages of a group of actions sampled in one state, from the Monte-Carlo return of every legal action.

    If the actions differ: (q - mean) / (std + eps) over the group. If all are the same: (q - mean) / std over all legal
    actions, 0 if that std is 0 or one action is legal. Stds have ddof 1. illegal: q of an action that is not legal.
    """
    taken = torch.tensor([action_values.get(action, illegal) for action in actions], dtype=torch.float64)
    if len(set(actions)) > 1:
        return normalize_by_group(taken, torch.zeros(len(taken), dtype=torch.long), eps=eps).tolist()
    legal = torch.tensor(list(action_values.values()), dtype=torch.float64)
    spread = legal.std() if len(legal) > 1 else legal.new_zeros(())
    return (torch.where(spread > 0, (taken - legal.mean()) / spread, 0.0)).tolist()
