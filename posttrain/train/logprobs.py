"""Log-probs of completion tokens under a model, without ever building the full logits.

The backbone runs over rows that are packed behind each other (no padding), or over right-padded rows of similar length
where an architecture cannot be packed. The vocabulary projection then runs over completion positions only (`head`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import call
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from posttrain.batch import on_device, ranges
from posttrain.errors import NonFiniteError
from posttrain.loss.router import load_balance
from posttrain.models.adapters import causal_of
from posttrain.models.experts import experts_a_token
from posttrain.models.load import LoadedModel
from posttrain.models.precision import HALF
from posttrain.models.rounding_bounds import relative_gap
from posttrain.rollout.hf import eval_mode
from posttrain.train.attention import Packed, short_windows, takes_borders
from posttrain.train.head import Head, backbone, token_scores
from posttrain.train.load_balancing import partition, units_of
from posttrain.train.prompt_sharing import Prompts, build_shared_line
from posttrain.train.sharding import PASS, as_forward

PROBE = 16  # tokens of a row on which a model is tried
PROBE_ROWS = ((3, 4, 5), (6, 7), (8, 9, 10))  # completions of one prompt, for the same
HEAD_GAP = 0.05  # nats, of one log-prob: the same products, rounded alike


@dataclass(frozen=True)
class Sequences:
    """Token ids of N rollouts: what the model reads. Completions are the tail of each row."""

    ids: tuple[Sequence[int] | NDArray[np.int64], ...]  # prompt + completion; arrays are put together fastest
    prompt_lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.ids]

    @property
    def prompts(self) -> Prompts:
        """Which rows have a prompt in common."""
        return Prompts.of(self.ids, self.prompt_lengths)

    @property
    def flat(self) -> Tensor:
        """The tokens of all rows behind each other."""
        return _concatenate_rows(self.ids)

    def select(self, rows: Sequence[int]) -> Sequences:
        return Sequences(tuple(self.ids[r] for r in rows), tuple(self.prompt_lengths[r] for r in rows))


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    packed: bool,
    groups: Sequence[int] | None = None,
    prompts: Prompts | None = None,
) -> list[list[int]]:
    """Row numbers in micro-batches of at most `max_tokens` tokens, padding counted; a longer row stands alone.

    Rows are taken by length, longest first, so that a lack of memory shows at once. Each goes to the first micro-batch
    that has room for it; where rows are padded, to the newest, whose rows are nearly as long. Packed micro-batches are
    then levelled: no more of them, and none is left short. groups: a number a row; rows of one group then stay
    together, and a group that is too large stands alone. prompts: of these rows, where rows of one prompt share its
    pass; they then come together as far as there is room.
    """
    units = [[row] for row in range(len(lengths))] if groups is None else units_of(groups)
    if prompts is not None and groups is None:
        units = prompts.units(prompts.numbers, max_tokens)
    longest = [max(lengths[r] for r in unit) for unit in units]
    sizes = [sum(lengths[r] for r in unit) if prompts is None else prompts.cost(unit) for unit in units]
    batches: list[list[int]] = []
    taken: list[int] = []  # tokens of each
    width = 0  # of the newest, where rows are padded: its first row is its longest
    for n in sorted(range(len(units)), key=lambda n: (-longest[n], units[n][0])):
        if packed:
            place = next((m for m, tokens in enumerate(taken) if tokens + sizes[n] <= max_tokens), len(batches))
        else:
            fits = bool(batches) and width * (len(batches[-1]) + len(units[n])) <= max_tokens
            place = len(batches) - 1 if fits else len(batches)
        if place == len(batches):
            batches.append([])
            taken.append(0)
            width = longest[n]
        batches[place] += units[n]
        taken[place] += sizes[n]
    return (_level_micro_batches(units, sizes, len(batches), max_tokens) or batches) if packed else batches


def _level_micro_batches(
    units: list[list[int]], sizes: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Units of rows in `count` micro-batches of nearly equal tokens; None if one of them became too large.

    A short micro-batch at the end would be computed less well than the others and, where layers are compiled, by a
    graph of its own: torch's kernels for gradients of norms want 4096 tokens or more.
    """
    parts = partition(sizes, count)
    if any(len(part) > 1 and sum(sizes[n] for n in part) > max_tokens for part in parts):
        return None
    return [[row for n in part for row in units[n]] for part in parts]


@dataclass(frozen=True)
class Extras:
    """What a pass measures besides log-probs and entropies; nothing costs anything unless it is asked for."""

    vocab_mean: bool = False  # mean of the log-probs over the vocabulary, with gradient
    entropy: bool = False  # the entropy once more, with gradient: `new_entropy`
    top_k: int = 0  # the K largest log-probs, and which of them is the sampled token's
    hidden: bool = False  # the last hidden states
    value_head: nn.Module | None = None  # values, read from the hidden states without changing them
    router: bool = False  # the load-balancing loss of each row, with gradient


def completion_scores(
    model: Any,
    sequences: Sequences,
    width: int,
    temperature: float | Tensor = 1.0,
    *,
    packed: bool = False,
    share: bool = False,
    fill: int = 1,
    extras: Extras | None = None,
) -> dict[str, Tensor]:
    """`logp` and `entropy` [N,width] of each row's completion tokens under softmax(logits / temperature), and extras.

    Cells behind a row's completion are 0. Entropy (nats) is detached. A `temperature` [N] is one a row; 0 (greedy) is
    read as 1. packed: where the model was switched by `attention.use_packed_attention`, rows cost no padding, and the
    line is filled up to a multiple of `fill` tokens: memory of a size that comes again is used again. share: rows of
    one prompt share its pass in such a line, if enough falls away (`prompt_sharing`). Extras: `vocab_mean_logp`,
    `values` [N,width], `topk_logp`, `topk_chosen` [N,width,K], `hidden` [N,width,H], `router_loss` [N].
    """
    causal = causal_of(model)
    line = fill if packed and takes_borders(causal) else None
    prompts = sequences.prompts if share and line is not None else None
    prompts = prompts if prompts is not None and prompts.pays() else None
    run_whole = getattr(causal, PASS, call)  # a divided model brings its own weights together around a pass
    scores: dict[str, Tensor] = run_whole(
        lambda: _completion_scores(causal, sequences, width, temperature, line, prompts, extras or Extras())
    )
    return scores


def _completion_scores(
    causal: Any,
    sequences: Sequences,
    width: int,
    temperature: float | Tensor,
    line: int | None,
    prompts: Prompts | None,
    extras: Extras,
) -> dict[str, Tensor]:
    """line: what a packed line is filled up to a multiple of; None = rows are padded."""
    device = next(causal.parameters()).device
    rows, positions, columns, targets = _completion_positions(sequences, device)
    asked = {"output_router_logits": True} if extras.router else {}
    borders = None
    if line is not None:
        borders, starts = _borders(sequences, prompts, line, device)
        out = _packed_states(causal, sequences, borders, asked)
        states = out.last_hidden_state[0, on_device(starts, device)[rows] + positions]
    else:
        ids, mask = _pad(sequences, device)
        out = backbone(causal)(input_ids=ids, attention_mask=mask, use_cache=False, **asked)
        states = out.last_hidden_state[rows, positions]
    scale = temperature[rows, None] if isinstance(temperature, Tensor) else temperature or 1.0
    found = token_scores(
        Head(causal), states, targets, scale, vocab_mean=extras.vocab_mean, entropy=extras.entropy, top_k=extras.top_k
    )
    if extras.hidden:
        found["hidden"] = states.detach().float()
    if extras.value_head is not None:
        found["values"] = extras.value_head(states.detach().float())[:, 0]
    placed = {}
    for name, value in found.items():
        empty = value.new_zeros((len(sequences), width, *value.shape[1:]))
        placed[name] = empty.index_put((rows, columns), value)
    if extras.router:
        placed["router_loss"] = _router_loss(causal, out, sequences, borders, device)
    return placed


def _router_loss(causal: Any, out: Any, sequences: Sequences, borders: Packed | None, device: torch.device) -> Tensor:
    """The load-balancing loss [N] of each row, whose tokens stand in one line or, without borders, in rows padded on
    the right."""
    lengths = on_device(sequences.lengths, device)
    rows = torch.arange(len(sequences), device=device).repeat_interleave(lengths)
    if borders is None:
        length = out.last_hidden_state.shape[1]
        places = on_device(ranges(sequences.lengths, [n * length for n in range(len(sequences))]), device)
    elif borders.keys is None:
        places = torch.arange(len(rows), device=device)
    else:
        places = borders.keys.sources[: len(rows)]
    logits = [layer.reshape(-1, layer.shape[-1])[places] for layer in out.router_logits]
    return load_balance(logits, rows, len(sequences), experts_a_token(causal))


def label_scores(model: Any, inputs: Mapping[str, Any], kept: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """`logp`, `entropy` and `right` [K] of K labels, each predicted at a cell of rows [B,T] where `kept` [B,T-1] is
    True; right: no token is likelier. inputs: what the model is given, without its labels."""
    causal = causal_of(model)

    def compute_scores() -> dict[str, Tensor]:
        states = backbone(causal)(**inputs, use_cache=False).last_hidden_state
        return token_scores(Head(causal), states[:, :-1][kept], labels, top_k=1)

    found = as_forward(causal, compute_scores)
    return {"logp": found["logp"], "entropy": found["entropy"], "right": found["topk_chosen"][:, 0]}


def completion_logprobs(
    model: nn.Module, sequences: Sequences, width: int, temperature: float = 1.0, *, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """(logp, entropy) [N,width]: `completion_scores` without extras."""
    found = completion_scores(model, sequences, width, temperature, packed=packed)
    return found["logp"], found["entropy"]


def _concatenate_rows(rows: Sequence[Sequence[int] | NDArray[np.int64]]) -> Tensor:
    """The numbers of all rows behind each other, int64."""
    return torch.from_numpy(np.concatenate([np.asarray(row, np.int64) for row in rows]))


def _pad(sequences: Sequences, device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids and attention mask [N,L]. Padded cells hold token 0 and are never attended to."""
    length = max(sequences.lengths)
    within = torch.arange(length) < torch.tensor(sequences.lengths)[:, None]
    ids = torch.zeros(len(sequences), length, dtype=torch.long)
    ids[within] = sequences.flat
    return ids.to(device), within.long().to(device)


def _completion_positions(sequences: Sequences, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flat over all M completion tokens: row, position of the state that predicts it, its column, its id."""
    starts = torch.tensor(sequences.prompt_lengths)
    counts = torch.tensor(sequences.lengths) - starts
    rows = torch.arange(len(sequences)).repeat_interleave(counts)
    columns = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    positions = starts[rows] - 1 + columns
    targets = _concatenate_rows(
        [row[start:] for row, start in zip(sequences.ids, sequences.prompt_lengths, strict=True)]
    )
    return tuple(on_device(x, device) for x in (rows, positions, columns, targets))  # type: ignore[return-value]


def _borders(
    sequences: Sequences, prompts: Prompts | None, fill: int, device: torch.device
) -> tuple[Packed, list[int]]:
    """Who attends to what in a line of all rows, and where in it the first token of each row would stand. prompts:
    where rows of one share its pass.

    What fills the line up to a multiple of `fill` is one more row, of token 0, whose states nobody reads.
    """
    lengths = sequences.lengths
    skipped = [0] * len(lengths) if prompts is None else prompts.shared_token_counts(range(len(lengths)))
    own = [length - skip for length, skip in zip(lengths, skipped, strict=True)]
    rest = -sum(own) % fill
    starts = [start - skip for start, skip in zip(accumulate(own, initial=0), skipped, strict=False)]
    if prompts is None:
        return Packed.of([*own, *([rest] if rest else [])], device), starts
    return build_shared_line(prompts, rest, device), starts


def _packed_states(causal: Any, sequences: Sequences, borders: Packed, asked: Mapping[str, Any]) -> Any:
    """The backbone's output, hidden states [1,tokens,H], for all rows in one line; positions start at 0 in each row."""
    device = borders.borders.device
    whole = borders.lengths if borders.keys is None else borders.keys.lengths
    skipped = [length - own for length, own in zip(whole, borders.lengths, strict=True)]
    rest = sum(borders.lengths[len(sequences) :])
    rows = [row[skip:] for row, skip in zip(sequences.ids, skipped, strict=False)]
    ids = on_device(functional.pad(_concatenate_rows(rows), (0, rest)), device)[None]
    positions = on_device(ranges(borders.lengths, skipped), device)[None]
    return backbone(causal)(input_ids=ids, position_ids=positions, packed=borders, use_cache=False, **asked)


def shares_prompts(loaded: LoadedModel) -> bool:
    """Whether rows that share the pass of their prompt in a line have the states that they have alone. It is tried,
    with sliding windows that are shorter than the prompt; rows must be packed already."""
    prompt, model = range(11, 18), loaded.model
    rows = [Sequences(((*prompt, *row),), (len(prompt),)) for row in PROBE_ROWS]
    line = Sequences(tuple(row.ids[0] for row in rows), (len(prompt),) * len(rows))
    states = Extras(hidden=True)
    with eval_mode(model), torch.no_grad(), loaded.autocast(), short_windows(causal_of(model)):
        found = completion_scores(model, line, 3, packed=True, share=True, extras=states)["hidden"]
        alone = [completion_scores(model, row, 3, packed=True, extras=states)["hidden"] for row in rows]
    half = loaded.half is not None or causal_of(model).dtype in HALF
    return relative_gap(found, torch.cat(alone)) < (0.1 if half else 1e-3)


def verify_head(loaded: LoadedModel, sequences: Sequences) -> None:
    """Raises NonFiniteError for a model whose logits are not what its head makes of the last hidden states. It is tried
    on the first tokens of the longest row."""
    longest = max(sequences.ids, key=len)[:PROBE]
    if len(longest) < 2:
        return
    with eval_mode(loaded.model), loaded.autocast():
        gap = check_head(loaded.model, Sequences((longest,), (1,)))
    if not gap <= HEAD_GAP:
        raise NonFiniteError(
            f"log-probs of {loaded.source} differ by {gap:.3f} nats from its own logits",
            hint="this architecture scales its logits in a way that posttrain does not know; please report it",
        )


def check_head(model: nn.Module, sequences: Sequences) -> float:
    """Largest gap between our log-probs and those of the model's own logits; proves that the head is understood."""
    width = max(n - p for n, p in zip(sequences.lengths, sequences.prompt_lengths, strict=True))
    with torch.no_grad():
        ours, _ = completion_logprobs(model, sequences, width)
        device = ours.device
        ids, mask = _pad(sequences, device)
        theirs = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)
        rows, positions, columns, targets = _completion_positions(sequences, device)
        return float((ours[rows, columns] - theirs[rows, positions, targets]).abs().max())
