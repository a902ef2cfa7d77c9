"""4-bit base weights (NF4, bitsandbytes), on a GPU or a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def nf4_config(dtype: torch.dtype, *, divided: bool = False) -> Any:
    """Return QLoRA's settings: NF4 with doubly quantized scales; products are computed in `dtype`.

    divided: store 4-bit numbers as tensors of `dtype`, like all other weights of a layer, so that FSDP gathers their
    bits unchanged.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        **({"bnb_4bit_quant_storage": dtype} if divided else {}),
    )


def disable_repacking(model: Any) -> Any:
    """Stop bitsandbytes from repacking the weights in place; return the model.

    On CPUs with AVX512-BF16 the first forward pass in eval mode repacks every layer with its scales rounded to bfloat16
    (`Linear4bit.forward` in 0.50), and state_dict() undoes it with a second rounding: the frozen base, and with it the
    reference policy, would change under the adapter.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def find_quant_states(model: nn.Module) -> dict[int, Any]:
    """Return the shape and scales of each 4-bit weight, by the weight's id. Sharded weights no longer hold them."""
    states = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
        if weight is not None and state is not None:
            states[id(weight)] = state
    return states
