"""Attention over packed sequences: rows behind each other in one line, each attending only to itself.

Registered with transformers as one more attention implementation. Where a batch brings `packed` (the row borders), the
rows are kept apart by torch's variable-length kernel (CUDA, half precision) or row by row (elsewhere); without it, the
call is ordinary SDPA with the mask that it was given, so that generation with the same model is untouched.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.batch import on_device
from posttrain.errors import ModelError

NAME = "posttrain_packed"


@dataclass(eq=False)  # not frozen: torch.compile (2.11) reads every field of a frozen one, and makes a graph for each
class Packed:
    """Borders of n rows in one packed line of tokens. Never changed."""

    borders: Tensor  # [n+1] int32 on the model's device: 0, end of row 0, end of row 1, ...
    lengths: tuple[int, ...]
    keys: Keys | None = None  # None: each row attends to itself

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Packed:
        return cls(_ends(lengths, device), tuple(lengths))

    @classmethod
    def sharing(cls, lengths: list[int], keys: list[int], sources: Tensor, device: torch.device) -> Packed:
        """Rows that also attend to tokens of other rows before their own: see Keys."""
        found = Keys(_ends(keys, device), tuple(keys), sources.to(device))
        return cls(_ends(lengths, device), tuple(lengths), found)


@dataclass(eq=False)
class Keys:
    """What each of n rows attends to: `lengths` tokens, the last of which are the row itself (causally)."""

    borders: Tensor  # [n+1] int32
    lengths: tuple[int, ...]
    sources: Tensor  # [sum of lengths] place of each in the line


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    return on_device(list(itertools.accumulate(lengths, initial=0)), device, torch.int32)


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1,heads,tokens,dim], key and value [1,kv_heads,tokens,dim] -> [1,tokens,heads,dim]; dropout is off.

    Compiled layers call it as it is: the lengths would be constants of their graph.
    """
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    repeats = query.shape[1] // key.shape[1]
    seen = packed.keys or packed
    if packed.keys:
        key, value = key[:, :, packed.keys.sources], value[:, :, packed.keys.sources]
    dtype = _compute_dtype(query)
    if query.is_cuda and dtype in (torch.bfloat16, torch.float16):
        q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # [tokens,heads,dim]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = _varlen()(
            q, k, v, packed.borders, seen.borders, max(packed.lengths), max(seen.lengths),
            scale=scaling, **_causal(sliding_window),
        )  # fmt: skip
        return out[None], None
    rows = [
        _row(q, k, v, scaling, sliding_window, gqa=repeats > 1)
        for q, k, v in zip(
            query.split(packed.lengths, dim=2),
            *(x.split(seen.lengths, dim=2) for x in (key, value)),
            strict=True,
        )
    ]
    return torch.cat(rows, dim=2).transpose(1, 2), None


def _compute_dtype(query: Tensor) -> torch.dtype:
    """What the products are computed in: under autocast, rotary embeddings leave float32 queries behind."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _row(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, *, gqa: bool) -> Tensor:
    """Causal attention of the last tokens of a row [1,heads,L,dim] to all of it [1,kv_heads,S,dim], L <= S."""
    own, length = q.shape[2], k.shape[2]
    if own == length and (window is None or length <= window):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    distance = torch.arange(length - own, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    near = (distance >= 0) & (distance < (window or length))
    return scaled_dot_product_attention(q, k, v, attn_mask=near, scale=scaling, enable_gqa=gqa)


@functools.cache
def _varlen() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@functools.cache
def _causal(window: int | None) -> dict[str, Any]:
    """How this torch release spells "causal, and at most `window` tokens back"."""
    if "window_size" in inspect.signature(_varlen()).parameters:
        return {"window_size": (window - 1 if window else -1, 0)}
    if window:
        raise ModelError("this torch release has no sliding window in varlen_attn", hint="use torch 2.11 or newer")
    return {"is_causal": True}


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask without padding: rows that are packed are kept apart by their borders, a single line is causal."""
    return None if kwargs.get("attention_mask") is None else sdpa_mask(*args, **kwargs)


def use_packed_attention(model: Any) -> bool:
    """Switch the model to packed-aware attention in place; False if its architecture cannot take it."""
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = causal.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) or not getattr(causal, "_supports_attention_backend", False):
        return False
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _mask)
    causal.set_attn_implementation(NAME)
    return True
