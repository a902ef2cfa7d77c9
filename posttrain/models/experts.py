"""Mixture-of-experts models: expert products in autocast's type, and the routers' settings."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface, grouped_mm_experts_forward

from posttrain.errors import ModelError
from posttrain.models.weight_names import class_of

GROUPED = "grouped_mm"  # transformers' default experts implementation


class _Cast:
    """An experts' module whose weights are read in another type; all other attributes are the module's own."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def grouped_in_compute_type(experts: Any, hidden: Tensor, *routed: Tensor) -> Tensor:
    """Run transformers' `grouped_mm` in autocast's type: hidden states [T,H] -> [T,H] of the same type.

    Autocast does not cast torch's grouped product, so float32 master weights, or frozen weights with an adapter's
    float32 product added, would be multiplied in float32. Linear layers are cast under autocast, and so are these.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        cast: Any = _Cast(experts, dtype)
        out: Tensor = grouped_mm_experts_forward(cast, hidden.to(dtype), *routed)
        return out.to(hidden.dtype)
    return grouped_mm_experts_forward(experts, hidden, *routed)


def compute_experts_in_half() -> None:
    """Register `grouped_in_compute_type`, so that experts computed by `grouped_mm` use autocast's type from now on."""
    if ALL_EXPERTS_FUNCTIONS[GROUPED] is grouped_mm_experts_forward:
        ExpertsInterface.register(GROUPED, grouped_in_compute_type)


def experts_a_token(causal: Any) -> int:
    """Return how many experts a token of this model is routed to. Raises ModelError if transformers has no
    load-balancing loss for the architecture.
    """
    chosen = getattr(causal.config.get_text_config(), "num_experts_per_tok", None)
    if chosen is None or not hasattr(sys.modules[class_of(causal).__module__], "load_balancing_loss_func"):
        raise ModelError(
            f"{class_of(causal).__name__} has no router whose load could be balanced",
            hint="remove `router_balance` from `regularisers`: it needs a mixture of experts, e.g. Mixtral",
        )
    return int(chosen)
