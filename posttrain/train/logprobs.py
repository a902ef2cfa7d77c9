"""Log-probs of completion tokens under a model, without ever building the full logits.

The backbone runs over rows that are packed behind each other (no padding), or over right-padded rows of similar length
where an architecture cannot be packed. The vocabulary projection then runs over completion positions only, in chunks,
and is recomputed in the backward pass, so memory does not grow with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.train.attention import Packed

CHUNK_CELLS = 1 << 26  # logits of one chunk at most: 256 MiB in float32


@dataclass(frozen=True)
class Sequences:
    """Token ids of N rollouts: what the model reads. Completions are the tail of each row."""

    ids: tuple[tuple[int, ...], ...]  # prompt + completion
    prompt_lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.ids]

    def select(self, rows: Sequence[int]) -> Sequences:
        return Sequences(tuple(self.ids[r] for r in rows), tuple(self.prompt_lengths[r] for r in rows))


def micro_batches(lengths: Sequence[int], max_tokens: int, *, packed: bool) -> list[list[int]]:
    """Row numbers in micro-batches of at most `max_tokens` tokens, padding counted; a longer row stands alone.

    Rows are sorted by length, longest first, so that little is padded and a lack of memory shows at once.
    """
    order = sorted(range(len(lengths)), key=lambda r: (-lengths[r], r))
    batches: list[list[int]] = []
    used = 0
    for row in order:
        grown = used + lengths[row] if packed else lengths[batches[-1][0]] * (len(batches[-1]) + 1) if batches else 0
        if batches and grown <= max_tokens:
            batches[-1].append(row)
            used += lengths[row]
        else:
            batches.append([row])
            used = lengths[row]
    return batches


def completion_logprobs(
    model: nn.Module, sequences: Sequences, width: int, temperature: float = 1.0, *, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """(logp, entropy) [N,width] of each row's completion tokens under softmax(logits / temperature).

    Cells behind a row's completion are 0. Entropy (nats) is detached. `temperature` 0 (greedy) is read as 1.
    packed: the model was switched by `attention.use_packed_attention`; rows then cost no padding.
    """
    device = next(model.parameters()).device
    rows, positions, columns, targets = _completion_positions(sequences, device)
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model  # under PEFT: adapters stay active
    if packed:
        hidden = _packed_states(causal, sequences, device)
        starts = torch.tensor([0, *sequences.lengths[:-1]], device=device).cumsum(0)
        states = hidden[0, starts[rows] + positions]
    else:
        states = _padded_states(causal, sequences, device)[rows, positions]
    logp, entropy = _project(_Head(causal), states, targets, temperature or 1.0)
    empty = logp.new_zeros(len(sequences), width)
    return empty.index_put((rows, columns), logp), empty.index_put((rows, columns), entropy)


def _pad(sequences: Sequences, device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids and attention mask [N,L]. Padded cells hold token 0 and are never attended to."""
    length = max(sequences.lengths)
    ids = torch.zeros(len(sequences), length, dtype=torch.long)
    mask = torch.zeros(len(sequences), length, dtype=torch.long)
    for n, row in enumerate(sequences.ids):
        ids[n, : len(row)] = torch.tensor(row)
        mask[n, : len(row)] = 1
    return ids.to(device), mask.to(device)


def _completion_positions(sequences: Sequences, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flat over all M completion tokens: row, position of the state that predicts it, its column, its id."""
    rows, positions, columns, targets = [], [], [], []
    for n, (row, start) in enumerate(zip(sequences.ids, sequences.prompt_lengths, strict=True)):
        count = len(row) - start
        rows += [n] * count
        positions += range(start - 1, start - 1 + count)
        columns += range(count)
        targets += row[start:]
    return tuple(torch.tensor(x, dtype=torch.long, device=device) for x in (rows, positions, columns, targets))  # type: ignore[return-value]


def _padded_states(causal: nn.Module, sequences: Sequences, device: torch.device) -> Tensor:
    """Last hidden states [N,L,H] of right-padded rows."""
    ids, mask = _pad(sequences, device)
    return causal.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


def _packed_states(causal: nn.Module, sequences: Sequences, device: torch.device) -> Tensor:
    """Last hidden states [1,tokens,H] of all rows in one line; positions start at 0 in each row."""
    ids = torch.tensor([i for row in sequences.ids for i in row], device=device)[None]
    positions = torch.cat([torch.arange(n) for n in sequences.lengths]).to(device)[None]
    borders = Packed.of(sequences.lengths, device)
    return causal.base_model(input_ids=ids, position_ids=positions, packed=borders, use_cache=False).last_hidden_state


class _Head(nn.Module):
    """The model's own way from hidden states to logits, with the scalings that some architectures add."""

    def __init__(self, causal: nn.Module) -> None:
        super().__init__()
        config = causal.config.get_text_config()
        self.project = causal.get_output_embeddings()
        self.softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
        self.multiply = getattr(config, "logit_scale", None) or 1.0  # Cohere
        self.divide = getattr(config, "logits_scaling", None) or 1.0  # Granite

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.project(hidden).float() * (self.multiply / self.divide)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def _project(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(logp, entropy) [M] of `targets` [M] given hidden states [M,H]."""

    def chunk(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(h) / temperature
        logp_all = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(logp_all.exp() * logp_all).sum(-1)
        return logp_all.gather(-1, t[:, None])[:, 0], entropy

    size = max(16, CHUNK_CELLS // head.project.weight.shape[0])
    if len(targets) <= size:
        return chunk(hidden, targets)
    parts = [
        checkpoint(chunk, h, t, use_reentrant=False)
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


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
