"""Log-probs of completion tokens under a model, without ever building the full logits.

The backbone runs once on right-padded rows of similar length; the vocabulary projection then runs over completion
positions only, in chunks, and is recomputed in the backward pass, so memory does not grow with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row numbers in micro-batches of at most `max_tokens` padded tokens; a longer row stands alone.

    Rows are sorted by length, longest first, so that little is padded and a lack of memory shows at once.
    """
    order = sorted(range(len(lengths)), key=lambda r: (-lengths[r], r))
    batches: list[list[int]] = []
    for row in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def completion_logprobs(
    model: nn.Module, sequences: Sequences, width: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(logp, entropy) [N,width] of each row's completion tokens under softmax(logits / temperature).

    Cells behind a row's completion are 0. Entropy (nats) is detached. `temperature` 0 (greedy) is read as 1.
    """
    device = next(model.parameters()).device
    rows, positions, columns, targets = _completion_positions(sequences, device)
    hidden, head = _hidden_states(model, *_pad(sequences, device))
    logp, entropy = _project(head, hidden[rows, positions], targets, temperature or 1.0)
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


def _hidden_states(model: nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, nn.Module]:
    """Last hidden states [N,L,H] and the module that turns them into logits [.., V]."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model  # under PEFT: adapters stay active
    hidden = causal.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return hidden, _Head(causal)


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
