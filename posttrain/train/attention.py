"""Attention over packed sequences: rows concatenated in one line without padding, each attending only to itself.

Registered with transformers as an additional attention implementation. If a batch contains `packed` (the row
boundaries), rows are separated by torch's variable-length kernel (CUDA, half precision), or by padded blocks and row by
row (elsewhere). Without `packed`, the call is ordinary SDPA with the given mask, so generation with the same model is
unchanged.

Whether an architecture passes the boundaries on to every layer, and has no layer that carries a state along the line
(Mamba, linear attention, convolutions), is tested by a trial pass instead of assumed: see `keeps_rows_apart`.
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
from posttrain.train.packed_line import Packed, attend_in_blocks, blocks_of
from posttrain.train.sharding import as_forward, dtype_of_products

NAME = "posttrain_packed"
PADDED_NOTE = "rows are padded: the attention of this model cannot separate packed rows"
SUPPORTS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 needs equal numbers of heads


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
    """Compute attention over rows packed in one line, or SDPA if `packed` is None; without dropout.

    query [1,heads,tokens,dim], key and value [1,kv_heads,tokens,dim] -> [1,tokens,heads,dim].
    """
    if packed is None:
        if attention_mask is None:
            attention_mask = _mask_if_needed(query.shape[2], key.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if packed.group is not None:
        key, value = (gather_line(x, 2, packed.group) for x in (key, value))
    attend = _attend_varlen if has_kernel(query) else _attend_by_row
    return attend(query, key, value, packed, scaling, sliding_window), None


def has_kernel(query: Tensor) -> bool:
    """Return whether torch's variable-length kernel supports these queries."""
    return query.is_cuda and compute_dtype(query.device, query.dtype) in HALF


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    """Compute attention of all rows in one kernel call.

    A compiled layer stays one graph: of `packed` it reads only tensors, and numbers that can be dynamic in the graph;
    the number of rows is the size of a tensor.
    """
    key, value = _keys_of_rows(packed, key, value)
    dtype = compute_dtype(query.device, query.dtype)  # under autocast, rotary embeddings return float32 queries
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # [tokens,heads,dim]
    if repeats > 1 and not SUPPORTS_GQA:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    grouped: dict[str, Any] = {"enable_gqa": True} if repeats > 1 and SUPPORTS_GQA else {}
    keys = packed if packed.keys is None else packed.keys
    causal = (window - 1 if window else -1, 0)  # tokens back, tokens ahead
    out: Any = varlen_attn(
        q, k, v, packed.borders, keys.borders, packed.longest, keys.longest,
        scale=scaling, window_size=causal, **grouped,
    )  # fmt: skip
    return out[None]


def _keys_of_rows(packed: Packed, *lines: Tensor) -> list[Tensor]:
    """Gather the keys and values of a line in the order in which its rows see them."""
    return list(lines) if packed.keys is None else [line[:, :, packed.keys.sources] for line in lines]


@torch.compiler.disable
def _attend_by_row(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    """Compute attention in padded blocks for short rows, otherwise row by row.

    Excluded from compiled graphs: the lengths would become constants of the graph.
    """
    if packed.group is None and window not in packed.blocks:
        packed.blocks[window] = blocks_of(packed, window)
    if (blocks := packed.blocks.get(window)) is not None:
        return attend_in_blocks(query, key, value, blocks, scaling)
    key, value = _keys_of_rows(packed, key, value)
    repeats = query.shape[1] // key.shape[1]
    keys = packed if packed.keys is None else packed.keys
    rows = [
        _attend_row(q, k, v, scaling, window, gqa=repeats > 1)
        for q, k, v in zip(
            query.split(packed.lengths, dim=2),
            *(x.split(keys.lengths, dim=2) for x in (key, value)),
            strict=True,
        )
    ]
    return torch.cat(rows, dim=2).transpose(1, 2).contiguous()


def _attend_row(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, *, gqa: bool) -> Tensor:
    """Compute causal attention of the last L tokens of a row to the whole row.

    q [1,heads,L,dim], k and v [1,kv_heads,S,dim] -> [1,heads,L,dim], L <= S.
    """
    queries, length = q.shape[2], k.shape[2]
    if queries == length and (window is None or length <= window):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
    mask = _window_mask(queries, length, window or length, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=gqa)


def _window_mask(queries: int, length: int, window: int, device: torch.device) -> Tensor:
    """Return the causal sliding-window mask [queries,length] of the last `queries` of `length` tokens.

    A token sees itself and the `window` - 1 tokens before it.
    """
    distance = torch.arange(length - queries, length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _mask_if_needed(queries: int, length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return a mask [1,1,queries,length] for rows without padding, or None if SDPA's causal order suffices."""
    if (window or length) < length or 1 < queries < length:
        return _window_mask(queries, length, window or length, device)[None, None]
    return None


def _make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return SDPA's mask for padded rows; None for rows without padding.

    Packed rows are separated by `packed`, and other calls build their mask themselves (`_mask_if_needed`).
    """
    return None if kwargs.get("attention_mask") is None else sdpa_mask(*args, **kwargs)


def use_packed_attention(model: Any) -> bool:
    """Switch the model to packed attention in place; return whether its architecture supports it.

    If not, the model is unchanged.
    """
    causal = causal_of(model)
    if not supports_sdpa(causal):
        return False
    text = causal.config.get_text_config()  # of a vision model its language model: a vision tower has no rows
    before = text._attn_implementation
    with short_windows(causal), _record_windows() as windows:
        expected = _probe_states(causal, [PROBE])
        _set_attention(causal, NAME)
        exact = keeps_rows_apart(causal, lambda lengths, device: {"packed": Packed.of(lengths, device)}, expected)
    if exact and windows <= {None, WINDOW}:  # other window sizes were not covered by this trial
        return True
    _set_attention(causal, before)
    return False


def _set_attention(causal: Any, name: str) -> None:
    """Set the attention implementation of the language model; other parts, such as a vision tower, are unchanged."""
    part = next((key for key in causal.config.sub_configs if key == "text_config"), None)
    causal.set_attn_implementation(name if part is None else {part: name})


@contextlib.contextmanager
def _record_windows() -> Iterator[set[int | None]]:
    """Register packed attention and its masks; yield the set of window sizes that the model requests in the block.

    Sizes are in tokens; None means all tokens.
    """
    windows = set[int | None]()

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        windows.add(kwargs.get("local_size"))
        return _make_mask(*args, **kwargs)

    def attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        windows.add(kwargs.get("sliding_window"))
        return packed_attention(*args, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    try:
        yield windows
    finally:
        AttentionInterface.register(NAME, packed_attention)
        AttentionMaskInterface.register(NAME, _make_mask)


WINDOWS = ("sliding_window", "attention_chunk_size")  # names used by configurations and by layers that keep a copy


@contextlib.contextmanager
def short_windows(causal: Any) -> Iterator[None]:
    """Set every sliding window and attention chunk to `WINDOW` tokens inside the block.

    A trial on a row longer than that is then conclusive for any row; windows of thousands of tokens would make the
    trial slow.
    """
    configs = [causal.config.get_text_config(), *(m.config for m in causal.modules() if hasattr(m, "config"))]
    holders = {id(holder): holder for holder in (*configs, *causal.modules())}.values()
    saved = [(h, key, getattr(h, key)) for h in holders for key in WINDOWS if isinstance(getattr(h, key, None), int)]
    for holder, key, _ in saved:
        setattr(holder, key, WINDOW)
    try:
        yield
    finally:
        for holder, key, window in saved:
            setattr(holder, key, window)


def enable_packing(model: Any, device: torch.device) -> bool:
    """Switch the model to packed rows if that saves time and is supported; return whether rows are packed.

    Packing saves time on a GPU, and with images on any device, because rows of one prompt then share its many tokens.
    Raises ModelError if the model cannot pack although ranks divide packed lines (`model.parallel.context`).
    """
    split = is_split(causal_of(model))
    sees = getattr(causal_of(model).config, "vision_config", None) is not None
    found = (split or sees or device.type == "cuda") and use_packed_attention(model)
    if split and not found:
        raise cannot_split_error()
    return found


def cannot_split_error() -> ModelError:
    """Return the error for a model that cannot pack rows, if ranks divide packed lines."""
    return ModelError(
        "model.parallel.context divides packed rows, and the attention of this model cannot separate packed rows",
        hint="use `shard` instead of `context`",
    )


def uses_packed_attention(causal: Any) -> bool:
    """Return whether `use_packed_attention` switched this model; a copy of a model inherits the switch."""
    return bool(causal.config.get_text_config()._attn_implementation == NAME)


def supports_sdpa(causal: Any) -> bool:
    """Return whether the model's attention is plain softmax(q k) v.

    Not supported: capped scores, sinks, chunks defined by a mask only, and dropout, which the kernel for packed rows
    does not have. `eager`, whether set by the recipe or the only implementation of the architecture, is not replaced.
    """
    config = causal.config.get_text_config()
    more = getattr(config, "attn_logit_softcapping", None) or getattr(config, "attention_chunk_size", None)
    if more or config._attn_implementation == "eager" or attention_dropout(causal) > 0:
        return False
    return getattr(causal, "_supports_attention_backend", False) and causal._supports_sdpa


def attention_dropout(model: nn.Module) -> float:
    """Return the largest dropout rate of attention weights in training passes. Granite's is 0.1.

    transformers' attention modules hold a rate or an nn.Dropout, which they pass to the attention function.
    """
    held = (getattr(module, name, 0.0) for module in model.modules() for name in ("attention_dropout", "attn_dropout"))
    return max((rate.p if isinstance(rate, nn.Dropout) else rate for rate in held if rate), default=0.0)


PROBE = range(11, 18)  # tokens of a row
WINDOW = 3  # of a trial
Borders = Callable[[list[int], torch.device], dict[str, Any]]


def keeps_rows_apart(causal: Any, borders: Borders = lambda *_: {}, alone: Tensor | None = None) -> bool:
    """Return whether a row packed after another row gets the same hidden states as alone, whatever the other row is.

    borders: builds the model inputs that mark the row boundaries, besides positions that restart at 0. alone: the
    states of PROBE alone; default: computed with the current model.
    """
    after_first, after_second = (_probe_states(causal, [range(n, n + 5), PROBE], borders) for n in (1, 6))
    alone = _probe_states(causal, [PROBE]) if alone is None else alone
    # tolerances for rounding: expert matmuls depend on the number of tokens, half precision affects everything
    max_same, max_alone = (2e-2, 0.1) if dtype_of_products(causal) in HALF else (1e-4, 1e-3)
    return relative_gap(after_second, after_first) < max_same and relative_gap(alone, after_first) < max_alone


def _probe_states(causal: Any, rows: list[range], borders: Borders = lambda *_: {}) -> Tensor:
    """Return the hidden states [tokens,H] of the last of these rows, run in one packed line."""
    device, size = next(causal.parameters()).device, causal.config.get_text_config().vocab_size
    ids = torch.tensor([[n % size for row in rows for n in row]], device=device)
    positions = torch.tensor([[n for row in rows for n in range(len(row))]], device=device)
    inputs = {"input_ids": ids, "position_ids": positions, **borders([len(row) for row in rows], device)}
    half = causal.dtype in HALF  # adapters on a half-precision model are float32
    products = torch.autocast(device.type, dtype=causal.dtype if half else None, enabled=half)
    with eval_mode(causal), torch.no_grad(), products:
        out = as_forward(causal, lambda: backbone(causal)(**inputs, use_cache=False))
    return out[0][0, -len(rows[-1]) :].float()
