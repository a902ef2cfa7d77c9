"""Merging of a PEFT adapter into its base: a plain model that computes what the base with the adapter computes.

PEFT's own merge changes a weight in place, so every module that shares it changes too: the output embedding of a model
with tied embeddings, a layer that the adapter repeats. Here each module gets its own weight first, and embeddings stay
tied only if they are equal afterwards. At the end the logits before and after the merge are compared.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import ModelError
from posttrain.models import adapters
from posttrain.models.precision import HALF
from posttrain.models.resized_embeddings import token_indices
from posttrain.models.rounding_bounds import TOLERANCE, relative_gap

PROBE_TOKENS = 24


def load_merged(model: Any, folder: Path) -> Any:
    """Return the dense base with the adapter in `folder` merged into its weights: a plain, fully trainable model.

    Raises ModelError if that is not equivalent to the base with the adapter.
    """
    try:
        return merge(adapters.load_frozen(model, folder)).requires_grad_(True)
    except ModelError as error:
        raise error.at(str(folder)) from error


def merged_copy(peft: Any) -> Any:
    """Return `merge` of a copy of the model; the model itself keeps its adapter."""
    made = copy.deepcopy(peft)
    for module in made.modules():
        module.__dict__.pop("forward", None)  # a trainer's patch would still call the original model
    return merge(made)


def merge(peft: Any) -> Any:
    """Merge the active adapter of a PEFT model into its base in place; return the base as a model without adapters.

    LoRA's products are added in float32 and the sum is rounded once to the weight's type; everything else in the
    adapter is merged by PEFT. Embeddings that differ afterwards are untied, and the configuration says so.

    Raises ModelError if the adapter cannot be merged, or if the logits change.
    """
    was_training = peft.training
    peft.eval()
    ids = _probe_ids(peft)
    expected = _logits(peft, ids)
    base = peft.get_base_model()
    _untie_adapted_weights(base)
    try:
        _unwrap_inner(base)
        _add_products(base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about layers merged already, and weights that were tied
            merged = peft.merge_and_unload(safe_merge=True)
    except (NotImplementedError, RuntimeError, ValueError, AttributeError, TypeError) as cause:
        raise _make_merge_error(str(cause).splitlines()[0] if str(cause) else type(cause).__name__) from cause
    _retie_embeddings(merged)
    gap = _finite_gap(_logits(merged, ids), expected)
    if not gap <= 2 * TOLERANCE.get(merged.dtype, TOLERANCE[torch.bfloat16]):
        raise _make_merge_error(f"logits change by {gap:.2g} of their size")
    return merged.train(was_training)


def _make_merge_error(why: str) -> ModelError:
    return ModelError(
        f"the adapter cannot be merged into its base: {why}",
        hint="generate with it in PEFT, or train a plain LoRA adapter with weights of the base's own shapes",
    )


@torch.no_grad()
def _untie_adapted_weights(base: Any) -> None:
    """Give each module its own weight where an adapted weight is shared, or where the adapter has repeated a layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds: tuple[Any, ...] = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    adapted = {id(p) for module in base.modules() if isinstance(module, kinds) for p in module.parameters()}
    keys = getattr(base, "all_tied_weights_keys", None) or {}
    declared = {*keys, *keys.values()}
    tied = {
        id(p)
        for name, p in base.named_parameters(remove_duplicate=False)
        if adapters.strip_base_layer(name) in declared
    }
    for number, holders in _find_parameter_holders(base).items():
        for module, name in holders[1:] if number in adapted or number not in tied else ():
            weight = module._parameters[name]
            assert weight is not None
            module._parameters[name] = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)


def _find_parameter_holders(base: Any) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return, for every parameter by its id, the modules that hold it, each once, with its name there."""
    found: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in base.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[id(parameter)].append((module, name))
    return found


@torch.no_grad()
def _unwrap_inner(base: Any) -> None:
    """Merge wrappers between a LoRA layer and its weight: separately trained tokens of a tied output embedding."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    for layer in adapters.layers_of(base).values():
        if isinstance(layer.base_layer, AuxiliaryTrainingWrapper):
            layer.base_layer = layer.base_layer.unload_and_optionally_merge_module(True, True, None)


@torch.no_grad()
def _add_products(base: Any) -> None:
    """Add LoRA's products to the weights in float32, and mark these layers as merged so that PEFT skips them."""
    for layer, name in _find_lora_products(base):
        layer.base_layer.weight.data = adapters.merge_into_weight(layer, layer.base_layer.weight.data, name)
        layer.merged_adapters.append(name)


def _find_lora_products(base: Any) -> Iterator[tuple[Any, str]]:
    """Yield the layers whose adapter is a product added to a dense weight, each with the adapter's name."""
    from peft.tuners import lora

    for layer in adapters.layers_of(base).values():
        for name in layer.active_adapters:
            plain = isinstance(layer, (lora.Linear, lora.Embedding)) and adapters.is_plain_lora(layer, name)
            if plain and (name in layer.lora_A or name in layer.lora_embedding_A):
                yield layer, name


@torch.no_grad()
def _retie_embeddings(model: Any) -> None:
    """Tie the embeddings again if they are equal; otherwise set the configuration to untied."""
    keys = dict(getattr(model, "all_tied_weights_keys", None) or {})
    weights = dict(model.named_parameters(remove_duplicate=False))
    equal = {one: other for one, other in keys.items() if _equal(weights.get(one), weights.get(other))}
    for config in (model.config, model.config.get_text_config()) if keys else ():
        config.tie_word_embeddings = equal == keys  # PEFT sets this to False whenever it writes a weight
    model.all_tied_weights_keys = equal
    model.tie_weights(recompute_mapping=False)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _probe_ids(peft: Any) -> Tensor:
    """Return token ids [1,T] spread over the vocabulary, and the tokens that the adapter trains separately."""
    size = peft.get_input_embeddings().weight.shape[0]
    room = getattr(peft.config.get_text_config(), "max_position_embeddings", None) or PROBE_TOKENS
    own = [token for config in peft.peft_config.values() for token in token_indices(config)]
    spread = torch.linspace(0, size - 1, PROBE_TOKENS).long().tolist()
    return torch.tensor([[*spread, *own[:PROBE_TOKENS]][-min(room, 2 * PROBE_TOKENS) :]])


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    """Return logits [T, vocabulary], float32 on the CPU, computed in half precision if some weights are in half
    precision.
    """
    device, dtypes = next(model.parameters()).device, {p.dtype for p in model.parameters()}
    half = next((dtype for dtype in HALF if dtype in dtypes), None)
    with torch.autocast(device.type, dtype=half, enabled=half is not None):
        logits: Tensor = model(input_ids=ids.to(device), use_cache=False).logits
    return logits[0].float().cpu()


def _finite_gap(found: Tensor, expected: Tensor) -> float:
    """Return `relative_gap` over the finite expected logits: half precision overflows on some tokens of some models."""
    finite = torch.isfinite(expected)
    return relative_gap(found[finite], expected[finite])
