"""Collation of rollouts: token sequences for the model, and the typed batch that advantages and losses read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from posttrain.batch import TRAINED, Rollout, RolloutBatch, pad_rows, to_device
from posttrain.images import Image
from posttrain.recipe.reward_sections import Reward
from posttrain.train.prompt_sharing import Prompts
from posttrain.train.roles import role_fields
from posttrain.train.turn_fields import BY_TURN, numbers_at_ends, turn_states
from posttrain.verify.extract import Extractor, extract

IGNORED = -100  # label of a token that is not scored


@dataclass(frozen=True)
class Sequences:
    """Token ids of N rollouts, as read by the model. Completions are the tail of each row."""

    ids: tuple[Sequence[int] | NDArray[np.int64], ...]  # prompt + completion; arrays are concatenated fastest
    prompt_lengths: tuple[int, ...]
    images: tuple[tuple[Image, ...], ...] | None = None  # images of each row; None = no images
    prompt_images: tuple[int, ...] | None = None  # number of images in the prompt of each row; None = all
    adapters: tuple[str | None, ...] | None = None  # name of each row's LoRA adapter; None = the first adapter
    own: bool = False  # only rows of this rank; other ranks run passes on theirs at the same time

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.ids]

    @property
    def prompts(self) -> Prompts:
        """Groups of rows that share a prompt, including its images."""
        shown = None if self.images is None else [row[: self.shown_in_prompt(n)] for n, row in enumerate(self.images)]
        return Prompts.of(self.ids, self.prompt_lengths, shown)

    def shown_in_prompt(self, row: int) -> int:
        """Return the number of images in the prompt of a row."""
        if self.prompt_images is not None:
            return self.prompt_images[row]
        return 0 if self.images is None else len(self.images[row])

    def select(self, rows: Sequence[int]) -> Sequences:
        ids, lengths = tuple(self.ids[r] for r in rows), tuple(self.prompt_lengths[r] for r in rows)
        images = None if self.images is None else tuple(self.images[r] for r in rows)
        counts = None if self.prompt_images is None else tuple(self.prompt_images[r] for r in rows)
        adapters = None if self.adapters is None else tuple(self.adapters[r] for r in rows)
        return Sequences(ids, lengths, images, counts, adapters, self.own)

    def by_adapter(self, rows: Sequence[int]) -> dict[str | None, list[int]]:
        """Group these rows by adapter."""
        rows_by_adapter: dict[str | None, list[int]] = {}
        for row in rows:
            rows_by_adapter.setdefault(None if self.adapters is None else self.adapters[row], []).append(row)
        return rows_by_adapter


def sequences_of(rollouts: Sequence[Rollout], *, sampled: bool = False) -> Sequences:
    """Build the model inputs of rollouts: prompt and completion tokens exactly as the engine read and sampled them.

    Text is never tokenized again. With `Rollout.loss_ids`, the loss sees another prompt, unless `sampled` is True.
    """
    prompts = [r.prompt.ids if sampled or r.loss_ids is None else r.loss_ids for r in rollouts]
    ids = tuple(np.array(prompt + r.ids, np.int64) for prompt, r in zip(prompts, rollouts, strict=True))
    lengths, adapters = tuple(map(len, prompts)), tuple(r.prompt.adapter for r in rollouts)
    found = Sequences(ids, lengths, adapters=adapters if any(adapters) else None)
    if not any(r.prompt.images or any(s.images for s in r.segments) for r in rollouts):
        return found
    images = tuple(r.images for r in rollouts)
    counts = tuple(len(r.prompt.images.shown) if r.prompt.images else 0 for r in rollouts)
    return dataclasses.replace(found, images=images, prompt_images=counts)


def with_images(
    ids: tuple[NDArray[np.int64] | Sequence[int], ...], lengths: tuple[int, ...], images: Sequence[tuple[Image, ...]]
) -> Sequences:
    """Build sequences whose images are all in the prompt; images: those of each row."""
    return Sequences(ids, lengths, tuple(images) if any(images) else None)


def pad_right(sequences: Sequences, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return right-padded ids and attention mask [N,L]. Padding is token 0 and is never attended to."""
    lengths = torch.tensor(sequences.lengths)
    within = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.zeros(within.shape, dtype=torch.long)
    ids[within] = torch.from_numpy(np.concatenate(sequences.ids))
    return ids.to(device), within.long().to(device)


def completion_positions(sequences: Sequences, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four flat tensors [M] over all completion tokens.

    They are: row, position of the state that predicts the token, column within the completion, token id.
    """
    lengths, starts = torch.tensor(sequences.lengths), torch.tensor(sequences.prompt_lengths)
    counts = lengths - starts
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    columns = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    positions = starts[rows] - 1 + columns
    targets = torch.from_numpy(np.concatenate(sequences.ids))[(lengths.cumsum(0) - lengths)[rows] + positions + 1]
    return tuple(to_device(x, device) for x in (rows, positions, columns, targets))  # type: ignore[return-value]


def row_lengths(rollouts: Sequence[Rollout]) -> list[int]:
    """Return the number of tokens of each row of `sequences_of`."""
    return [len(r.prompt.ids if r.loss_ids is None else r.loss_ids) + r.length for r in rollouts]


def row_batch(rollouts: Sequence[Rollout]) -> RolloutBatch:
    """Build a RolloutBatch of per-row fields only, which are known on every rank.

    Its mask [N,1] marks rows with a trained token. columns: data columns that hold numbers (or None in some rows).
    `tool_seconds` are the rollouts' own if the data has no such column, even if no rollout called a tool.
    """
    names = list(dict.fromkeys(name for r in rollouts for name in r.scores))
    data = [{"tool_seconds": r.tool_seconds, **r.prompt.row} if r.turns else r.prompt.row for r in rollouts]
    columns = {name: [row.get(name) for row in data] for name in dict.fromkeys(name for row in data for name in row)}
    acting = any(r.turns for r in rollouts)
    return RolloutBatch(
        group_ids=torch.tensor([r.group for r in rollouts]),
        mask=torch.tensor([[any(s.kind in TRAINED and len(s.ids) > 0 for s in r.segments)] for r in rollouts]),
        rewards=_column([r.reward for r in rollouts]),
        components={name: _column([r.scores.get(name) for r in rollouts]) for name in names},
        columns={
            name: _column(values)
            for name, values in columns.items()
            if all(value is None or isinstance(value, int | float) for value in values)
            and (any(value is not None for value in values) or (acting and name == "tool_seconds"))
        },
        correct=_column([r.correct for r in rollouts]),
        truncated=torch.tensor([r.finish == "length" for r in rollouts]),
        opponent_rewards=torch.stack([_column(r.against) for r in rollouts]) if rollouts[0].against else None,
        greedy_rewards=_column([r.greedy_reward for r in rollouts]),
        lengths=torch.tensor([r.sampled_length for r in rollouts]),
        bins=None if any(r.bin is None for r in rollouts) else torch.tensor([r.bin for r in rollouts]),
    )


def with_tokens(rows: RolloutBatch, tokens: RolloutBatch) -> RolloutBatch:
    """Add per-token fields to a batch of `row_batch`, which may already have advantages.

    tokens: the `rollout_batch` of the same rollouts.
    """
    by_row = {item.name: getattr(rows, item.name) for item in dataclasses.fields(rows)}
    empty = [name for name, value in by_row.items() if value is None or (isinstance(value, Mapping) and not value)]
    chosen = {name: by_row[name] & tokens.mask for name in ("mask", "selected") if by_row[name] is not None}
    return rows.replace(**{name: getattr(tokens, name) for name in empty}, **chosen)


def rollout_batch(
    rollouts: Sequence[Rollout],
    answers: Sequence[Extractor] | None = None,
    needs: Collection[str] = (),
    similarity: float | None = None,
) -> RolloutBatch:
    """Build the RolloutBatch of scored rollouts, on the CPU. T is the longest completion; unscored values are NaN.

    answers: extractors of the answer in a completion, for `answer_ids`; None = not needed. needs: only the per-turn
    fields named here (`turn_ids`, `edge_ids`, `token_rewards`) are built. similarity: threshold at which two texts are
    the same state, in `turn_states`; None = only equal texts.
    """
    width = max(r.length for r in rollouts)
    batch = row_batch(rollouts).replace(
        mask=pad_rows(
            [r.by_segment([s.kind in TRAINED for s in r.segments]) for r in rollouts], width, False, np.bool_
        ),
        answer_ids=None if answers is None else _number_answers(rollouts, answers),
        rollout_logp=pad_rows([r.logps for r in rollouts], width, np.nan, np.float32),
        versions=pad_rows(
            [r.versions if any(s.versions for s in r.segments) else np.full(len(r.ids), r.version) for r in rollouts],
            width,
            0,
            np.int32,
        ),
    )
    batch = batch.replace(**{name: make(rollouts, width) for name, make in BY_TURN.items() if name in needs})
    if {"hinted", "hint_mask", "external"} & set(needs) or any(r.variant is not None for r in rollouts):
        batch = batch.replace(**_external_fields(rollouts, width))
    if any(r.trajectory is not None for r in rollouts):
        batch = batch.replace(
            trajectory_ids=torch.tensor([-1 if r.trajectory is None else r.trajectory for r in rollouts]),
            step_ids=torch.tensor([r.part for r in rollouts]),
            **role_fields(rollouts),
        )
    if any(r.nodes for r in rollouts):
        batch = batch.replace(
            node_ids=_node_field(rollouts, width, "number", -1, np.int64),
            node_values=_node_field(rollouts, width, "value", 0.0, np.float64),
        )
    if "turn_states" in needs:
        batch = batch.replace(turn_states=turn_states(rollouts, width, similarity))
    if any(r.stored is not None for r in rollouts):
        batch = batch.replace(replayed=torch.tensor([r.stored is not None for r in rollouts]))
    scored = dict.fromkeys(name for r in rollouts for name in r.turn_scores)
    if not scored:
        return batch
    return batch.replace(
        turn_rewards=numbers_at_ends(rollouts, width, [r.turn_rewards for r in rollouts]),
        turn_scores={
            name: numbers_at_ends(rollouts, width, [r.turn_scores.get(name, ()) for r in rollouts]) for name in scored
        },
    )


def _node_field(rollouts: Sequence[Rollout], width: int, name: str, none: float, dtype: DTypeLike) -> Tensor:
    """Return the attribute `name` of each token's tree node [N,T]; `none` for rows that are not a path of a tree."""
    values_by_rollout = [[getattr(node, name) for node in r.nodes] or [none] * len(r.segments) for r in rollouts]
    return pad_rows(
        [r.by_segment(values) for r, values in zip(rollouts, values_by_rollout, strict=True)], width, none, dtype
    )


def _external_fields(rollouts: Sequence[Rollout], width: int) -> dict[str, Tensor]:
    """Return masks of what the policy did not choose: hinted rows, tokens of hints, tokens of given solutions."""
    hinted = [r.variant is not None and r.variant.hinted for r in rollouts]
    hints = [r.by_segment([s.kind in ("injected", "given") and h for s in r.segments])
             for r, h in zip(rollouts, hinted, strict=True)]  # fmt: skip
    given = [r.by_segment([s.kind == "given" for s in r.segments]) for r in rollouts]
    return {
        "hinted": torch.tensor(hinted),
        "hint_mask": pad_rows(hints, width, False, np.bool_),
        "external": pad_rows(given, width, False, np.bool_),
    }


def answer_extractors(rewards: Sequence[Reward]) -> Sequence[Extractor]:
    """Return the `extract` of the correctness reward; default: a box, an answer tag, or the last number."""
    correct = next((r for r in rewards if r.correct), rewards[0])
    return correct.params.get("extract") or ("boxed", "answer_tag", "last_number")


def _number_answers(rollouts: Sequence[Rollout], order: Sequence[Extractor]) -> Tensor:
    """Number the answers [N]: equal answers share a number; -1 for completions without an answer."""
    extracted = [extract(r.text, order) for r in rollouts]
    answers = [None if answer is None else answer.strip() for answer in extracted]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(w for w in answers if w is not None))}
    return torch.tensor([-1 if word is None else numbers[word] for word in answers])


def _column(values: Sequence[float | bool | None]) -> Tensor:
    return torch.tensor([float("nan") if v is None else float(v) for v in values], dtype=torch.float64)


def join_batches(first: RolloutBatch, more: RolloutBatch) -> RolloutBatch:
    """Concatenate the rows of two batches, padded to the longer; non-tensor fields are taken from the first.

    A per-row or per-token field that only one batch has is filled for the other: `keep` and `selected` with all trained
    rows or tokens, numbers with NaN if their columns may have gaps, otherwise with 0 and False.
    """
    filled = {"keep": lambda b: b.mask.any(-1), "selected": lambda b: b.mask}
    joined: dict[str, Any] = {}
    for item in dataclasses.fields(first):
        one, other = getattr(first, item.name), getattr(more, item.name)
        if isinstance(one, Mapping) and any(isinstance(value, Tensor) for value in (*one.values(), *other.values())):
            joined[item.name] = {name: _join(one.get(name), other.get(name), len(first), len(more), torch.nan)
                                for name in dict.fromkeys((*one, *other))}  # fmt: skip
        elif isinstance(one, Tensor) or isinstance(other, Tensor):
            make = filled.get(item.name)
            one = make(first) if one is None and make else one
            other = make(more) if other is None and make else other
            joined[item.name] = _join(
                one, other, len(first), len(more), torch.nan if item.name == "rollout_logp" else 0
            )
    return dataclasses.replace(first, **joined)


def _join(one: Tensor | None, other: Tensor | None, rows: int, more: int, fill: float) -> Tensor:
    known = one if one is not None else other
    assert known is not None
    fill = fill if known.is_floating_point() else 0
    parts = [known.new_full((count, *known.shape[1:]), fill) if part is None else part
             for part, count in ((one, rows), (other, more))]  # fmt: skip
    return join_rows(parts[0], parts[1], fill)


def join_rows(one: Tensor, more: Tensor, fill: float = 0.0) -> Tensor:
    """Concatenate the rows of two tensors [N,...]; shorter rows are padded on the right with `fill`."""
    parts = [one, more]
    if one.dim() > 1:
        width = max(part.shape[1] for part in parts)
        parts = [torch.cat([p, p.new_full((len(p), width - p.shape[1], *p.shape[2:]), fill)], 1) for p in parts]
    return torch.cat([parts[0], parts[1].to(parts[0].dtype)])
