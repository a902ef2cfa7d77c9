"""Batch fields that are known per turn: of rollouts with tools or an environment, or divided into parts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.advantage.steps import number_states
from posttrain.advantage.turns import number_edges
from posttrain.batch import Rollout, pad_rows
from posttrain.train.load_balancing import group_rows


def turn_of_each(rollout: Rollout) -> NDArray[np.int64]:
    """Return the turn index of each token of the completion, from 0; a reply belongs to the turn that it answers.

    For a single turn divided into steps: the step index.
    """
    if not rollout.turns and rollout.part_ends:
        return np.searchsorted(rollout.part_ends, np.arange(len(rollout.ids)))
    turns = np.cumsum([segment.kind == "model" for segment in rollout.segments]) - 1
    return rollout.by_segment(turns.clip(min=0))


def _of_turn(rollout: Rollout, numbers: Sequence[float]) -> NDArray[Any]:
    """Expand one number per turn to the tokens of the turn; tokens after the last turn get its number."""
    return np.array(numbers)[turn_of_each(rollout).clip(max=len(numbers) - 1)]


def numbers_at_ends(rollouts: Sequence[Rollout], width: int, numbers: Sequence[Sequence[float]]) -> Tensor:
    """Return the numbers of each part [N,T], at the token that ends the part, 0 elsewhere."""
    out = np.zeros((len(rollouts), width))
    for row, r, own in zip(out, rollouts, numbers, strict=True):
        for end, number in zip(r.part_ends, own, strict=False):  # a row without scores has ends but no numbers
            if 0 <= end < width:
                row[end] += number
    return torch.from_numpy(out)


def _edge_ids(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """Number the turns of each group by (text shown before, text written, text shown after): equal turns share a
    number.
    """
    edges: dict[int, list[int]] = {}
    for own in group_rows([rollout.group for rollout in rollouts]):
        edges |= zip(own, number_edges([_steps(rollouts[n]) for n in own]), strict=True)
    return pad_rows([_of_turn(r, edges[n] or [0]) for n, r in enumerate(rollouts)], width, 0, np.int64)


def _steps(rollout: Rollout) -> list[tuple[str, str, str]]:
    """Return (text shown before the turn, text written, text shown after it) of each turn."""
    before, steps = "", []
    for turn, reply in zip(rollout.turns, _replies(rollout), strict=True):
        steps.append((before, turn.text, reply))
        before = reply
    return steps


def _replies(rollout: Rollout) -> list[str]:
    """Return what was shown after each turn: the text, with a hash of each image's source."""
    tool_images = iter([segment.images for segment in rollout.segments if segment.kind == "tool"])
    replies = []
    for turn in rollout.turns:
        images = None if turn.reply is None else next(tool_images)
        names = [zlib.crc32(image.source.encode()) for image in images.shown] if images else []
        replies.append(" ".join([turn.reply or "", *map(str, names)]) if names else turn.reply or "")
    return replies


def turn_states(rollouts: Sequence[Rollout], width: int, similarity: float | None) -> Tensor:
    """Number the turns of each group by what was shown before them, for a first turn the prompt; equal ones share a
    number.

    similarity: see `number_states`.
    """
    contexts = [[r.prompt.text, *_replies(r)[:-1]] for r in rollouts]
    groups = [r.group for r, texts in zip(rollouts, contexts, strict=True) for _ in texts]
    numbers = iter(number_states([text for texts in contexts for text in texts], groups, similarity))
    ids_of_row = [[next(numbers) for _ in texts] for texts in contexts]
    return pad_rows([_of_turn(r, ids) for r, ids in zip(rollouts, ids_of_row, strict=True)], width, 0, np.int64)


def _token_rewards(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """Return each turn's reward [N,T], from the environment and from per-turn rewards, at the turn's last token."""
    scored = numbers_at_ends(rollouts, width, [r.turn_rewards for r in rollouts])
    rewards = np.zeros((len(rollouts), width))
    for row, r in zip(rewards, rollouts, strict=True):
        ends = np.cumsum([len(s.ids) for s in r.segments])
        written = [end for end, s in zip(ends, r.segments, strict=True) if s.kind == "model" and s.ids]
        for end, turn in zip(written, r.turns, strict=False):  # the last turn may have been cut before its first token
            row[end - 1] = turn.reward or 0.0
    return torch.from_numpy(rewards) + scored


def _mc_values(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """Return the mean return [N,T] of random plays from the state before each turn, at all tokens of the turn."""
    values = [[turn.mc_value or 0.0 for turn in r.turns] or [0.0] for r in rollouts]
    return pad_rows([_of_turn(r, own) for r, own in zip(rollouts, values, strict=True)], width, 0.0, np.float64)


def _legal_returns(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """Return the return of each legal action in the state before the first turn, in the environment's order.

    NaN-padded to the largest number of actions.
    """
    del width
    returns = [list(r.turns[0].returns.values()) if r.turns else [] for r in rollouts]
    return pad_rows(returns, max(map(len, returns)), torch.nan, np.float64)


def _action_ids(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """Return the index of the first turn's action among these [N], -1 = none."""
    del width
    firsts = [r.turns[0] if r.turns else None for r in rollouts]
    return torch.tensor([-1 if t is None or t.action is None else list(t.returns).index(t.action) for t in firsts])


def _part_ids(rollouts: Sequence[Rollout], width: int) -> Tensor:
    """Return the part index of each token [N,T], as divided by a shape; 0 in rows with one part."""
    return pad_rows([np.searchsorted(r.ends, np.arange(len(r.ids))) for r in rollouts], width, 0, np.int64)


BY_TURN: dict[str, Callable[[Sequence[Rollout], int], Tensor]] = {
    "part_ids": _part_ids,
    "finished": lambda rollouts, _: torch.tensor([not r.unfinished for r in rollouts]),
    "new_tokens": lambda rollouts, width: pad_rows(
        [np.arange(len(r.ids)) >= r.older for r in rollouts], width, False, np.bool_
    ),
    "turn_ids": lambda rollouts, width: pad_rows([turn_of_each(r) for r in rollouts], width, 0, np.int64),
    "edge_ids": _edge_ids,
    "token_rewards": _token_rewards,
    "mc_values": _mc_values,
    "legal_returns": _legal_returns,
    "action_ids": _action_ids,
}
