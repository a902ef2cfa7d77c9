"""Conversion of the trainer's weights for vLLM: checkpoint names, dense tensors, no unnecessary copies."""

from __future__ import annotations

import contextlib
import copy
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from posttrain.models import adapters, quantize, weight_names

# Text models of transformers that always interleave time, height and width positions within a head.
INTERLEAVED = ("qwen3_vl", "qwen3_5", "qwen3_omni")

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel


def dense_weights(model: Any, *, merged: bool = False, adapter: str = adapters.SINGLE) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every weight of the model, or of the base under its adapters, by module names.

    merged: add the trained adapter, or the one named `adapter`, in float32 and round the sum to the base's type; the
    model is unchanged. Tied weights are yielded once, under their stored name. 4-bit weights are dequantized, so the
    engine holds exactly the base that the trainer computes with, not the original that it was quantized from. Sharded
    weights are gathered one at a time; all ranks must iterate.
    """
    base = adapters.causal_of(model)
    layers = adapters.layers_by_weight(base) if merged else {}
    tied = getattr(base, "all_tied_weights_keys", None) or {}  # name of the copy -> name in checkpoints
    state = base.state_dict(keep_vars=True)
    packed = quantize.find_quant_states(base)
    stored = {id(state[tied[name]]) for name in tied if tied[name] in state}
    seen: set[int] = set()
    for name, tensor in state.items():
        if ".lora_" in name or ".quant_state." in name or _is_quantization_state(name) or id(tensor) in seen:
            continue
        if name in tied and id(tensor) in stored:
            continue
        seen.add(id(tensor))
        dense, plain = _to_dense(tensor, base.dtype, packed.get(id(tensor))), adapters.strip_base_layer(name)
        yield plain, adapters.merge_into_weight(layers[plain], dense, adapter) if plain in layers else dense


@contextlib.contextmanager
def weight_stream(
    model: Any, *, merged: bool = False, names: Literal["modules", "published"] = "published"
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Context with the weights of `dense_weights`, for a reader that may fail; by default under published names.

    For a sharded model, unread weights are read when the block ends: other ranks, whose readers continue, would
    otherwise wait for this rank's parts.
    """
    named = dense_weights(model, merged=merged)
    if names == "published":
        named = weight_names.published_stream(adapters.causal_of(model), named)
    try:
        yield itertools.chain(named)  # a reader's `yield from` cannot close the generator inside a chain
    finally:
        drain_stream(model, named)


def drain_stream(model: Any, stream: Iterator[Any]) -> None:
    """Read the remaining weights of a stream of a sharded model, as all ranks must."""
    for _ in stream if isinstance(adapters.causal_of(model), FSDPModule) else ():
        pass


def _is_quantization_state(name: str) -> bool:
    return name.endswith((".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")) or ".quant_state" in name


def _to_dense(tensor: Tensor, dtype: torch.dtype, state: Any) -> Tensor:
    """Return the full, dequantized tensor. state: shape and scales of a 4-bit weight."""
    whole: Tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    if state is None:
        return whole
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(whole, state).to(dtype)


def published_config(loaded: LoadedModel) -> Any:
    """Return the configuration that vLLM gets: without adapters or quantization."""
    config = copy.deepcopy(loaded.model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [weight_names.class_of(adapters.causal_of(loaded.model)).__name__]
    if loaded.images is not None:
        _write_position_layout(config.get_text_config(), adapters.causal_of(loaded.model))
    return config


def _write_position_layout(text: Any, model: Any) -> None:
    """Write into a text configuration how height and width positions are laid out in a head.

    Published checkpoints of Qwen3-VL contain it. If a checkpoint does not, transformers assumes these values, but vLLM
    assumes the order of Qwen2-VL, or positions without height and width: wrong log-probs for rows with images, no
    error.
    """
    found = (getattr(module, "mrope_section", None) for module in model.modules())
    sections = next((sections for sections in found if isinstance(sections, list)), None)
    if sections is not None:
        more = {"mrope_interleaved": True} if text.model_type.startswith(INTERLEAVED) else {}
        text.rope_parameters = {"mrope_section": sections, **text.rope_parameters, **more}


def write_config(loaded: LoadedModel, folder: Path) -> Path:
    """Write config.json and the tokenizer into a new `folder`: all that vLLM needs if weights are pushed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    published_config(loaded).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    if loaded.images is not None:
        loaded.images.processor.save_pretrained(folder)
    return folder


def write_base(loaded: LoadedModel, folder: Path, dtype: torch.dtype) -> Path:
    """Write the dense base under the adapter in `dtype`, beside the files of `write_config`.

    A base under adapters cannot be pushed to vLLM.
    """
    from huggingface_hub import save_torch_state_dict

    base = adapters.causal_of(loaded.model)
    state = {
        name: _copy_if_view(tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu())
        for name, tensor in weight_names.published_stream(base, dense_weights(loaded.model))
    }
    save_torch_state_dict(state, folder)
    return folder


def _copy_if_view(tensor: Tensor) -> Tensor:
    """Return the tensor with its own storage: one expert's view of the tensor of all experts cannot be saved."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_adapter(model: Any, folder: Path, dtype: torch.dtype, adapter: str = adapters.SINGLE) -> Path:
    """Write a trained adapter to `folder` in PEFT's format, which vLLM reads; usually a few megabytes.

    Written in `dtype`, to which vLLM would round it, with one copy from the GPU. PEFT's own method would collect the
    state of the whole model and write a model card at every sync; it is used for adapters that are more than low-rank
    matrices.
    """
    config = model.peft_config[adapter]
    if config.modules_to_save or config.bias != "none" or getattr(config, "use_dora", False):
        model.save_pretrained(folder, selected_adapters=[adapter], save_embedding_layers=False)
        return folder
    trained = {
        adapters.ADAPTER_WEIGHT.sub(r"\1", name): parameter
        for name, parameter in model.named_parameters()
        if (match := adapters.ADAPTER_WEIGHT.search(name)) and match[2] == adapter
    }
    flat = torch.cat([parameter.detach().to(dtype).flatten() for parameter in trained.values()]).cpu()
    parts = flat.split([parameter.numel() for parameter in trained.values()])
    state = {name: part.view(of.shape).clone() for (name, of), part in zip(trained.items(), parts, strict=True)}
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted attempt of this run
    folder.mkdir(parents=True)
    save_file(state, folder / "adapter_model.safetensors")
    config.save_pretrained(folder)
    return folder
