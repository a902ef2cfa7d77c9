"""Attention over packed sequences: rows one after another in one line, each attending only to itself.

Registered with transformers as one more attention implementation. Where a batch brings `packed` (the row borders), the
rows are kept apart by torch's variable-length kernel (CUDA, half precision), or in padded blocks and row by row
(elsewhere); without it, the call is ordinary SDPA with the mask that it was given, so that generation with the same
model is untouched.

Whether an architecture hands the borders on to each of its layers, and has no layer that carries a state along the line
(Mamba, linear attention, convolutions), is tried and not believed: see `keeps_rows_apart`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.errors import ModelError
from posttrain.models.adapters import backbone, causal_of
from posttrain.models.precision import HALF, compute_dtype
from posttrain.models.rounding_bounds import relative_gap
from posttrain.rollout.hf import eval_mode
from posttrain.train.context_split import gather_line, is_split
from posttrain.train.packed_blocks import attend_in_blocks, blocks_of
from posttrain.train.packed_line import Packed
from posttrain.train.sharding import as_forward

NAME = "posttrain_packed"
PADDED = "rows are padded: the attention of this model, as it is, cannot keep them apart in one line"  # a note
GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters  # 2.11 wants as many keys as queries


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
    """query [1,heads,tokens,dim], key and value [1,kv_heads,tokens,dim] -> [1,tokens,heads,dim]; dropout is off."""
    if packed is None:
        if attention_mask is None:
            attention_mask = _needed_mask(query.shape[2], key.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if packed.group is not None:
        key, value = (gather_line(x, 2, packed.group) for x in (key, value))
    attend = _by_kernel if has_kernel(query) else _without_kernel
    return attend(query, key, value, packed, scaling, sliding_window), None


def has_kernel(query: Tensor) -> bool:
    """Whether torch's variable-length kernel takes such queries."""
    return query.is_cuda and compute_dtype(query.device, query.dtype) in HALF


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    """One kernel for all rows. A compiled layer stays one graph: of `packed` it reads tensors, and numbers that a graph
    can leave open; how many rows there are is the size of a tensor."""
    key, value = _keys_of_rows(packed, key, value)
    dtype = compute_dtype(query.device, query.dtype)  # under autocast, rotary embeddings leave float32 queries behind
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # [tokens,heads,dim]
    if repeats > 1 and not GROUPED:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    grouped: dict[str, Any] = {"enable_gqa": True} if repeats > 1 and GROUPED else {}
    seen = packed if packed.keys is None else packed.keys
    causal = (window - 1 if window else -1, 0)  # tokens back, tokens ahead
    out: Any = varlen_attn(
        q, k, v, packed.borders, seen.borders, packed.longest, seen.longest,
        scale=scaling, window_size=causal, **grouped,
    )  # fmt: skip
    return out[None]


def _keys_of_rows(packed: Packed, *lines: Tensor) -> list[Tensor]:
    """Keys and values of a line as its rows see them, behind each other."""
    return list(lines) if packed.keys is None else [line[:, :, packed.keys.sources] for line in lines]


@torch.compiler.disable
def _without_kernel(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    """Short rows in padded blocks, others each by itself. Compiled layers call it as it is: the lengths would be
    constants of their graph."""
    blocks = packed.get_cached(window, blocks_of) if packed.group is None else None
    if blocks is not None:
        return attend_in_blocks(query, key, value, blocks, scaling)
    key, value = _keys_of_rows(packed, key, value)
    repeats = query.shape[1] // key.shape[1]
    seen = packed if packed.keys is None else packed.keys
    rows = [
        _row(q, k, v, scaling, window, gqa=repeats > 1)
        for q, k, v in zip(
            query.split(packed.lengths, dim=2),
            *(x.split(seen.lengths, dim=2) for x in (key, value)),
            strict=True,
        )
    ]
    return torch.cat(rows, dim=2).transpose(1, 2).contiguous()


def _row(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, *, gqa: bool) -> Tensor:
    """Causal attention of the last tokens of a row [1,heads,L,dim] to all of it [1,kv_heads,S,dim], L <= S."""
    own, length = q.shape[2], k.shape[2]
    if own == length and (window is None or length <= window):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    near = _near(own, length, window or length, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=near, scale=scaling, enable_gqa=gqa)


def _near(own: int, length: int, window: int, device: torch.device) -> Tensor:
    """[own,length] bool: what each of the last `own` of `length` tokens sees, itself and `window` - 1 before it."""
    distance = torch.arange(length - own, length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _needed_mask(own: int, length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[1,1,own,length] bool for rows without padding, where SDPA's own causal order is not all that is asked for."""
    if (window or length) < length or 1 < own < length:
        return _near(own, length, window or length, device)[None, None]
    return None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """None without padding: rows that are packed are kept apart by their borders, and of others the call itself knows
    what they see (`_needed_mask`)."""
    return None if kwargs.get("attention_mask") is None else sdpa_mask(*args, **kwargs)


def use_packed_attention(model: Any) -> bool:
    """Switch the model to packed-aware attention in place; False, and nothing is changed, if its architecture cannot
    take it."""
    causal = causal_of(model)
    if not takes_sdpa(causal):
        return False
    text = causal.config.get_text_config()  # of a model that sees, its language model: a vision tower has no rows
    before = text._attn_implementation
    with short_windows(causal), _record_windows() as windows:
        alone = _probe_states(causal, [PROBE])
        _set_attention(causal, NAME)
        exact = keeps_rows_apart(causal, lambda lengths, device: {"packed": Packed.of(lengths, device)}, alone)
    if exact and windows <= {None, WINDOW}:  # another one was out of reach of this trial
        return True
    _set_attention(causal, before)
    return False


def _set_attention(causal: Any, name: str) -> None:
    """Set how the language model attends; nothing else that a model consists of changes."""
    part = next((key for key in causal.config.sub_configs if key == "text_config"), None)
    causal.set_attn_implementation(name if part is None else {part: name})


@contextlib.contextmanager
def _record_windows() -> Iterator[set[int | None]]:
    """Register our attention and masks. Inside, the set gets every window that one of the two is asked for, in tokens;
    None: all tokens."""
    heard = set[int | None]()

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        heard.add(kwargs.get("local_size"))
        return _mask(*args, **kwargs)

    def attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        heard.add(kwargs.get("sliding_window"))
        return packed_attention(*args, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    try:
        yield heard
    finally:
        AttentionInterface.register(NAME, packed_attention)
        AttentionMaskInterface.register(NAME, _mask)


WINDOWS = ("sliding_window", "attention_chunk_size")  # what configurations, and layers that keep a copy, call them


@contextlib.contextmanager
def short_windows(causal: Any) -> Iterator[None]:
    """Inside, every sliding window and every chunk of attention is `WINDOW` tokens: a trial on a row that is longer
    says what happens on any row, and a window of thousands costs nothing."""
    configs = [causal.config.get_text_config(), *(m.config for m in causal.modules() if hasattr(m, "config"))]
    holders = {id(holder): holder for holder in (*configs, *causal.modules())}.values()
    kept = [(h, key, getattr(h, key)) for h in holders for key in WINDOWS if isinstance(getattr(h, key, None), int)]
    for holder, key, _ in kept:
        setattr(holder, key, WINDOW)
    try:
        yield
    finally:
        for holder, key, window in kept:
            setattr(holder, key, window)


def packs(model: Any, device: torch.device) -> bool:
    """Whether rows are laid in lines without padding, for which the model is switched: where that saves time, if the
    architecture can take it. It does on a GPU, and with images anywhere: rows of a prompt then share its many tokens.
    Raises ModelError where it cannot, and ranks divide lines among them."""
    split = is_split(causal_of(model))
    sees = getattr(causal_of(model).config, "vision_config", None) is not None
    found = (split or sees or device.type == "cuda") and use_packed_attention(model)
    if split and not found:
        raise cannot_split()
    return found


def cannot_split() -> ModelError:
    """The error of a model whose rows cannot be packed, where ranks divide packed lines among them."""
    return ModelError(
        "model.parallel.context divides lines of rows, and the attention of this model cannot keep rows apart in one",
        hint="write `shard` in its place",
    )


def takes_borders(causal: Any) -> bool:
    """Whether `use_packed_attention` switched this model; a copy is what its original was."""
    return bool(causal.config.get_text_config()._attn_implementation == NAME)


def takes_sdpa(causal: Any) -> bool:
    """Whether softmax(q k) v is all that its attention does: no capped scores, no sinks, no chunks that only a mask
    knows of. `eager`, by the recipe or because the architecture knows nothing else, stays what it is."""
    config = causal.config.get_text_config()
    more = getattr(config, "attn_logit_softcapping", None) or getattr(config, "attention_chunk_size", None)
    eager = config._attn_implementation == "eager"
    return not (more or eager) and getattr(causal, "_supports_attention_backend", False) and causal._supports_sdpa


PROBE = range(11, 18)  # tokens of a row
WINDOW = 3  # of a trial
Borders = Callable[[list[int], torch.device], dict[str, Any]]


def keeps_rows_apart(causal: Any, borders: Borders = lambda *_: {}, alone: Tensor | None = None) -> bool:
    """Whether a row after another one gets the states that it gets alone, whatever the other one is.

    borders: what tells the model where rows of these lengths end, besides positions that start at 0 again. alone: the
    states of PROBE alone, if not those of the model as it is.
    """
    one, other = (_probe_states(causal, [range(n, n + 5), PROBE], borders) for n in (1, 6))
    alone = _probe_states(causal, [PROBE]) if alone is None else alone
    # rounding: experts' products depend on how many tokens they get, half precision on everything
    same, close = (2e-2, 0.1) if causal.dtype in HALF else (1e-4, 1e-3)
    return relative_gap(other, one) < same and relative_gap(alone, one) < close


def _probe_states(causal: Any, rows: list[range], borders: Borders = lambda *_: {}) -> Tensor:
    """The states [tokens,H] of the last of these rows in one line."""
    device, size = next(causal.parameters()).device, causal.config.get_text_config().vocab_size
    ids = torch.tensor([[n % size for row in rows for n in row]], device=device)
    positions = torch.tensor([[n for row in rows for n in range(len(row))]], device=device)
    inputs = {"input_ids": ids, "position_ids": positions, **borders([len(row) for row in rows], device)}
    half = causal.dtype in HALF  # adapters on it are float32
    products = torch.autocast(device.type, dtype=causal.dtype if half else None, enabled=half)
    with eval_mode(causal), torch.no_grad(), products:
        out = as_forward(causal, lambda: backbone(causal)(**inputs, use_cache=False))
    return out[0][0, -len(rows[-1]) :].float()
