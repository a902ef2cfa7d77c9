"""Fields of a batch that are known by turn: of rollouts with tools or an environment, or in parts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.advantage.steps import state_numbers
from posttrain.advantage.turns import edge_numbers
from posttrain.batch import Rollout, pad_rows


def turn_of_each(rollout: Rollout) -> NDArray[np.int64]:
    """The turn that each token of the completion belongs to, from 0; a reply belongs to the turn that it answers.

    Of a single turn that was divided into steps: the step.
    """
    if not rollout.turns and rollout.part_ends:
        return np.searchsorted(rollout.part_ends, np.arange(len(rollout.ids)))
    turns = np.cumsum([segment.kind == "model" for segment in rollout.segments]) - 1
    return rollout.by_segment(turns.clip(min=0))


def _of_turn(rollout: Rollout, numbers: Sequence[float]) -> NDArray[Any]:
    """A number for each turn, at all its tokens; the last number also after it."""
    return np.array(numbers)[turn_of_each(rollout).clip(max=len(numbers) - 1)]


def numbers_at_ends(rollouts: Sequence[Rollout], width: int, numbers: Sequence[Sequence[float]]) -> Tensor:
    """Numbers of each part [N,T], at the token that ends it, 0 elsewhere."""
    out = np.zeros((len(rollouts), width))
    for row, r, own in zip(out, rollouts, numbers, strict=True):
        for end, number in zip(r.part_ends, own, strict=False):  # a row without scores has ends alone
            if 0 <= end < width:
                row[end] += number
    return torch.from_numpy(out)


def _turn_ids(rollouts: Sequence[Rollout], width: int) -> Tensor:
    return pad_rows([turn_of_each(r) for r in rollouts], width, 0, np.int64)


def _edge_ids(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """Turns of a group that write the same after the same reply and get the same reply share a number."""
    members: dict[int, list[int]] = {}
    for n, rollout in enumerate(rollouts):
        members.setdefault(rollout.group, []).append(n)
    edges: dict[int, list[int]] = {}
    for own in members.values():
        edges |= zip(own, edge_numbers([_steps(rollouts[n]) for n in own]), strict=True)
    return pad_rows([_of_turn(r, edges[n] or [0]) for n, r in enumerate(rollouts)], width, 0, np.int64)


def _steps(rollout: Rollout) -> list[tuple[str, str, str]]:
    """(what was shown before, what was written, what was shown then) of each turn."""
    before, steps = "", []
    for turn, then in zip(rollout.turns, _replies(rollout), strict=True):
        steps.append((before, turn.text, then))
        before = then
    return steps


def _replies(rollout: Rollout) -> list[str]:
    """What was shown after each turn: the text, and for each image in it a name that tells it from others."""
    shown = iter([segment.images for segment in rollout.segments if segment.kind == "tool"])
    found = []
    for turn in rollout.turns:
        images = None if turn.reply is None else next(shown)
        names = [zlib.crc32(image.source.encode()) for image in images.shown] if images else []
        found.append(" ".join([turn.reply or "", *map(str, names)]) if names else turn.reply or "")
    return found


def turn_states(rollouts: Sequence[Rollout], width: int, similarity: float | None) -> Tensor:
    """Turns of a group that were shown the same before share a number; what a first turn was shown is the prompt."""
    shown = [[r.prompt.text, *_replies(r)[:-1]] for r in rollouts]
    groups = [r.group for r, texts in zip(rollouts, shown, strict=True) for _ in texts]
    numbers = iter(state_numbers([text for texts in shown for text in texts], groups, similarity))
    own = [[next(numbers) for _ in texts] for texts in shown]
    return pad_rows([_of_turn(r, ids) for r, ids in zip(rollouts, own, strict=True)], width, 0, np.int64)


def _token_rewards(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """An environment's reward of each turn and what rewards by turn gave it, at the turn's last token."""
    given = numbers_at_ends(rollouts, width, [r.turn_rewards for r in rollouts])
    rewards = np.zeros((len(rollouts), width))
    for row, r in zip(rewards, rollouts, strict=True):
        ends = np.cumsum([len(s.ids) for s in r.segments])
        written = [end for end, s in zip(ends, r.segments, strict=True) if s.kind == "model" and s.ids]
        for end, turn in zip(written, r.turns, strict=False):  # the last turn may have been cut before a token
            row[end - 1] = turn.reward or 0.0
    return torch.from_numpy(rewards) + given


def _mc_values(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """What random plays earned from the state before each turn, at all its tokens."""
    values = [[turn.mc_value or 0.0 for turn in r.turns] or [0.0] for r in rollouts]
    return pad_rows([_of_turn(r, own) for r, own in zip(rollouts, values, strict=True)], width, 0.0, np.float64)


def _legal_returns(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """What each legal action of the state before the first turn returns, in the environment's order."""
    del width
    returns = [list(r.turns[0].returns.values()) if r.turns else [] for r in rollouts]
    return pad_rows(returns, max(map(len, returns)), torch.nan, np.float64)


def _action_ids(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """Which of these the first turn was, -1 = none."""
    del width
    firsts = [r.turns[0] if r.turns else None for r in rollouts]
    return torch.tensor([-1 if t is None or t.action is None else list(t.returns).index(t.action) for t in firsts])


def _part_ids(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """The part that each token belongs to, as a shape has divided its row; 0 in rows that are one part."""
    return pad_rows([np.searchsorted(r.ends, np.arange(len(r.ids))) for r in rollouts], width, 0, np.int64)


BY_TURN: dict[str, Callable[[Sequence[Rollout], int], Tensor]] = {
    "part_ids": _part_ids,
    "finished": lambda rollouts, _: torch.tensor([not r.unfinished for r in rollouts]),
    "new_tokens": lambda rollouts, width: pad_rows(
        [np.arange(len(r.ids)) >= r.older for r in rollouts], width, False, np.bool_
    ),
    "turn_ids": _turn_ids,
    "edge_ids": _edge_ids,
    "token_rewards": _token_rewards,
    "mc_values": _mc_values,
    "legal_returns": _legal_returns,
    "action_ids": _action_ids,
}
