"""The output head: from hidden states to log-probs of given tokens, chunk by chunk, so that no logits of all tokens
ever exist together.

A plain head (a linear layer without bias, perhaps with constant scalings) has its backward pass written out here:
d logp / d logits = onehot - softmax, from logits that are computed again. Every other head (capped logits, adapters,
quantised or divided weights) and every extra with a gradient goes through autograd and a checkpoint for each chunk.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.errors import ModelError

MIN_CHUNK = 16  # tokens
CHUNK_CELLS = 1 << 26  # logits of one chunk at most: 256 MiB in float32


def backbone(causal: Any) -> Any:
    """What stands below the head: ids in, hidden states out. Raises ModelError where nothing says what that is."""
    below = causal.base_model
    if below is causal:  # its class names a part that it has not (Llama 4)
        below = getattr(causal, "model", None)
    if below is None:
        raise ModelError(f"{type(causal).__name__} does not say what stands below its output head")
    return below


class Head(nn.Module):
    """The model's own way from hidden states to logits, with the scalings that some architectures add."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        config = causal.config.get_text_config()
        self.project = causal.get_output_embeddings()
        self.softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
        self.multiply = getattr(config, "logit_scale", None) or 1.0  # Cohere
        self.divide = getattr(config, "logits_scaling", None) or 1.0  # Granite

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.project(hidden).float() * (self.multiply / self.divide)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    @property
    def is_plain(self) -> bool:
        """Whether logits are hidden @ weight.T times a constant."""
        weight = getattr(self.project, "weight", None)
        plain_weight = type(weight) in (nn.Parameter, Tensor) and weight is not None and weight.is_floating_point()
        return type(self.project) is nn.Linear and self.project.bias is None and plain_weight and not self.softcap


def chunk_size(vocabulary: int) -> int:
    """Tokens whose logits are held at once."""
    return max(MIN_CHUNK, CHUNK_CELLS // vocabulary)


def token_scores(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    vocab_mean: bool = False,
    entropy: bool = False,
    top_k: int = 0,
) -> dict[str, Tensor]:
    """`logp`, `entropy` [M] of `targets` [M] given hidden states [M,H] under softmax(logits / temperature).

    temperature: a number, or [M,1]. vocab_mean adds `vocab_mean_logp` [M], the mean of the log-probs over the
    vocabulary, with gradient; top_k adds `topk_logp`, `topk_chosen` [M,K]. Entropy (nats) is detached; entropy adds
    `new_entropy` [M], which is not.
    """
    size = chunk_size(head.project.weight.shape[0])
    if head.is_plain and not vocab_mean and not entropy and not top_k:
        weight, scale = head.project.weight, temperature * (head.divide / head.multiply)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        logp, detached = _TokenScores.apply(hidden, weight, targets, scale, size)
        return {"logp": logp, "entropy": detached}
    return _by_autograd(
        head, hidden, targets, temperature, size, vocab_mean=vocab_mean, with_entropy=entropy, top_k=top_k
    )


class _TokenScores(torch.autograd.Function):
    """(logp, entropy) [M] in float32 from hidden [M,H] and weight [V,H]; products are computed in the dtype of hidden,
    the gradient of the weight is added up in float32. What is kept does not grow with the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float | Tensor, size: int
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, w = [], [], weight.to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):  # it would make halves of the entropy's products
            for h, t, s in _chunks(hidden, targets, scale, size):
                every = _scale_logits(h @ w.T, s).log_softmax(-1, dtype=torch.float32)
                logp.append(every.gather(-1, t[:, None])[:, 0])
                entropy.append(-torch.linalg.vecdot(every.exp(), every))
        ctx.save_for_backward(hidden, weight, targets, *([scale] if isinstance(scale, Tensor) else []))
        ctx.scale, ctx.size = None if isinstance(scale, Tensor) else scale, size
        found = torch.cat(entropy)
        ctx.mark_non_differentiable(found)
        return torch.cat(logp), found

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # type: ignore[override]
        hidden, weight, targets, *scales = ctx.saved_tensors
        scale = scales[0] if scales else ctx.scale
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        w, at = weight.to(hidden.dtype), 0
        for h, t, s in _chunks(hidden, targets, scale, ctx.size):
            g = (grad[at : at + len(h)].float() / (s[:, 0] if isinstance(s, Tensor) else s))[:, None]
            to_logits = _scale_logits(h @ w.T, s).softmax(-1, dtype=torch.float32).mul_(-g)
            to_logits = to_logits.scatter_add_(-1, t[:, None], g).to(w.dtype)
            if to_hidden is not None:
                to_hidden[at : at + len(h)] = to_logits @ w
            if to_weight is not None:
                to_weight += to_logits.T @ h
            at += len(h)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None


def _chunks(hidden: Tensor, targets: Tensor, scale: float | Tensor, size: int) -> Any:
    scales = scale.split(size) if isinstance(scale, Tensor) else repeat(scale)
    return zip(hidden.split(size), targets.split(size), scales, strict=False)


def _scale_logits(logits: Tensor, scale: float | Tensor) -> Tensor:
    """logits / scale in float32; as they are where the scale is 1, which spares a pass over them."""
    return logits if isinstance(scale, float | int) and scale == 1.0 else logits.float() / scale


def _by_autograd(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    size: int,
    *,
    vocab_mean: bool,
    with_entropy: bool,
    top_k: int,
) -> dict[str, Tensor]:
    names = ["logp", "entropy", *(["vocab_mean_logp"] if vocab_mean else [])]
    names += ["new_entropy"] if with_entropy else []
    names += ["topk_logp", "topk_chosen"] if top_k else []

    def chunk(h: Tensor, t: Tensor, scale: float | Tensor) -> tuple[Tensor, ...]:
        logp_all = (head(h) / scale).log_softmax(-1)
        found = [logp_all.gather(-1, t[:, None])[:, 0]]
        with torch.no_grad():
            found.append(-(logp_all.exp() * logp_all).sum(-1))
        if vocab_mean:
            found.append(logp_all.mean(-1))
        if with_entropy:
            found.append(-(logp_all.exp() * logp_all).sum(-1))
        if top_k:
            top = logp_all.detach().topk(min(top_k, logp_all.shape[-1]))
            found += [top.values, top.indices == t[:, None]]
        return tuple(found)

    if len(targets) <= size:
        return dict(zip(names, chunk(hidden, targets, temperature), strict=True))
    parts = [checkpoint(chunk, h, t, s, use_reentrant=False) for h, t, s in _chunks(hidden, targets, temperature, size)]
    return {name: torch.cat([part[n] for part in parts]) for n, name in enumerate(names)}
