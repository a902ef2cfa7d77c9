"""The trainer's weights in the form that vLLM loads: checkpoint names, dense tensors, no needless copies."""

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

# Text models of transformers whose heads take time, height and width in turns, whatever their configuration says.
INTERLEAVED = ("qwen3_vl", "qwen3_5", "qwen3_omni")

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel


def dense_weights(model: Any, *, merged: bool = False, adapter: str = adapters.SINGLE) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight of the model, or of the base under its adapters, by the names of the model's
    modules. Streams.

    merged: the trained adapter, or that of the name `adapter`, is added in float32, and the sum rounded to the base's
    type; the model stays as it is.
    Tied weights come once, under the name that they are stored by. 4-bit weights come dequantised, so that the engine
    holds the very base that the trainer computes with and not the one it was rounded from. Weights that are divided
    among ranks come whole, one at a time; all ranks must ask.
    """
    base = adapters.causal_of(model)
    layers = adapters.layers_by_weight(base) if merged else {}
    tied = getattr(base, "all_tied_weights_keys", None) or {}  # name of the copy -> name in checkpoints
    state = base.state_dict(keep_vars=True)
    packed = quantize.find_quant_states(base)
    stored = {id(state[tied[name]]) for name in tied if tied[name] in state}
    seen: set[int] = set()
    for name, tensor in state.items():
        if ".lora_" in name or ".quant_state." in name or _is_quantisation_detail(name) or id(tensor) in seen:
            continue
        if name in tied and id(tensor) in stored:
            continue
        seen.add(id(tensor))
        dense, plain = _dense(tensor, base.dtype, packed.get(id(tensor))), adapters.without_layers(name)
        yield plain, adapters.merge_into_weight(layers[plain], dense, adapter) if plain in layers else dense


@contextlib.contextmanager
def weight_stream(
    model: Any, *, merged: bool = False, names: Literal["modules", "published"] = "published"
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """`dense_weights` for a reader that may fail, as its architecture's checkpoints name and store them. Of a model
    that is divided among ranks, what it has left is read when the block ends: the others, whose readers go on, would
    wait for this rank's parts."""
    named = dense_weights(model, merged=merged)
    if names == "published":
        named = weight_names.published_stream(adapters.causal_of(model), named)
    try:
        yield itertools.chain(named)  # which no `yield from` of a reader can close
    finally:
        read_rest(model, named)


def read_rest(model: Any, stream: Iterator[Any]) -> None:
    """Read what is left of a stream of weights that are divided among ranks."""
    for _ in stream if isinstance(adapters.causal_of(model), FSDPModule) else ():
        pass


def _is_quantisation_detail(name: str) -> bool:
    return name.endswith((".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")) or ".quant_state" in name


def _dense(tensor: Tensor, dtype: torch.dtype, state: Any) -> Tensor:
    """state: shape and scales of a 4-bit weight."""
    whole: Tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    if state is None:
        return whole
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(whole, state).to(dtype)


def published_config(loaded: LoadedModel) -> Any:
    """The configuration that vLLM gets of a model: without adapters, and dense."""
    config = copy.deepcopy(loaded.model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [weight_names.class_of(adapters.causal_of(loaded.model)).__name__]
    if loaded.images is not None:
        _state_positions(config.get_text_config(), adapters.causal_of(loaded.model))
    return config


def _state_positions(text: Any, model: Any) -> None:
    """Write into a text configuration how positions by height and width are laid out in a head.

    Published checkpoints of Qwen3-VL say it. Where one does not, transformers computes what they say, and vLLM the
    order of Qwen2-VL, or positions without height and width: other log-probs for rows with images, and no error.
    """
    found = (getattr(module, "mrope_section", None) for module in model.modules())
    sections = next((sections for sections in found if isinstance(sections, list)), None)
    if sections is not None:
        more = {"mrope_interleaved": True} if text.model_type.startswith(INTERLEAVED) else {}
        text.rope_parameters = {"mrope_section": sections, **text.rope_parameters, **more}


def write_config(loaded: LoadedModel, folder: Path) -> Path:
    """config.json and the tokenizer in a new `folder`: all that vLLM needs of a model whose weights are pushed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    published_config(loaded).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    if loaded.images is not None:
        loaded.images.processor.save_pretrained(folder)
    return folder


def write_base(loaded: LoadedModel, folder: Path, dtype: torch.dtype) -> Path:
    """The dense base under the adapter in `dtype`, beside what `write_config` has written. vLLM cannot be pushed a base
    under adapters."""
    from huggingface_hub import save_torch_state_dict

    base = adapters.causal_of(loaded.model)
    state = {
        name: _alone(tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu())
        for name, tensor in weight_names.published_stream(base, dense_weights(loaded.model))
    }
    save_torch_state_dict(state, folder)
    return folder


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own: an expert's part of all experts' cannot be stored as it is."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_adapter(model: Any, folder: Path, dtype: torch.dtype, adapter: str = adapters.SINGLE) -> Path:
    """A trained adapter in `folder`, in PEFT's format, which vLLM reads. Some megabytes, seldom more.

    In `dtype`, which is what vLLM would round it to, and in one copy from the GPU. PEFT's own way asks the whole model
    for its state and writes a model card, at every sync. An adapter that is more than low-rank matrices goes that way.
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
    shutil.rmtree(folder, ignore_errors=True)  # of a run that broke, where this one goes on from
    folder.mkdir(parents=True)
    save_file(state, folder / "adapter_model.safetensors")
    config.save_pretrained(folder)
    return folder
