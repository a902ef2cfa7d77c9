"""Export of a model as a GGUF file (github.com/ggml-org/ggml, docs/gguf.md), and its verification.

Supports the architectures that posttrain reads. The file is then loaded like any GGUF model, and every weight is
compared with its value in the file's format: float32 exactly, other types rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from posttrain.errors import ModelError
from posttrain.export.gguf_tokenizer import Vocabulary, build_vocabulary, check_tokenizer
from posttrain.models.load import LoadedModel, load
from posttrain.models.rounding_bounds import relative_gap
from posttrain.models.save import probe_logits
from posttrain.recipe.sections import Model

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

ARCHITECTURES = {  # transformers' model_type -> llama.cpp's; Mistral without a sliding window is a Llama
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}  # dtype -> ggml's name
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama.cpp's LLAMA_FTYPE
SUFFIXES = (".weight", ".bias")
FLOAT16_MAX = 65504.0
COMPARED_KEYS = (  # config keys that must be unchanged when the file is read
    *("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)


def unsupported_error(what: str) -> ModelError:
    """Return the error for a model that cannot be written as GGUF."""
    convert = "posttrain export MODEL --to merged, then python convert_hf_to_gguf.py FOLDER"
    return ModelError(
        f"this model cannot be written as GGUF here: {what}",
        allowed=f"written are the architectures {', '.join(ARCHITECTURES)}, with a byte-level BPE tokenizer",
        hint=f"llama.cpp's own converter may: {convert}",
    )


def check(config: Any, tokenizer: Any) -> Vocabulary:
    """Return the vocabulary in GGUF's form. Raises ModelError for a model that cannot be written as GGUF.

    config: a transformers config. Only config and tokenizer are needed.
    """
    if config.model_type not in ARCHITECTURES:
        raise unsupported_error(f"its architecture is {config.model_type}")
    rope = _rope_parameters(config)
    if rope.get("rope_type", "default") != "default":
        raise unsupported_error(
            f"its positions are scaled (rope_type {rope['rope_type']}), which is lost when the file is read"
        )
    if config.hidden_act != "silu":
        raise unsupported_error(f"its activation is {config.hidden_act}, not silu")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and window < config.max_position_embeddings:
        raise unsupported_error(f"its attention has a sliding window of {window}")
    return build_vocabulary(tokenizer, config.vocab_size, unsupported_error)


def write(loaded: LoadedModel, path: Path, dtype: str, about: dict[str, str]) -> None:
    """Write the model to the file `path`.

    dtype: one of TYPES, for the matrices; vectors are float32. about: `name` and, if known, `license` and `base`.
    Raises ModelError for models that `check` refuses, and for a weight outside the range of float16.
    """
    from gguf import GGUFWriter, get_tensor_name_map
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.quants import quant_shape_to_byte_shape, quantize

    config = loaded.model.config
    words = check(config, loaded.tokenizer)
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, architecture)
    _add_metadata(writer, config, dtype, about)
    _add_tokenizer(writer, loaded, words)
    (number,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    weights = list(_named_weights(loaded.model))
    for name, weight in weights:
        there = names.get_name(name, SUFFIXES)
        if there is None:
            raise unsupported_error(f"llama.cpp has no place for its weight {name}")
        kind, shape = _select_type(weight, dtype), tuple(weight.shape)
        if kind.name in ("F32", "F16"):
            plain = np.dtype(np.float32 if kind.name == "F32" else np.float16)
            writer.add_tensor_info(there, shape, plain, weight.numel() * plain.itemsize)
        else:
            stored = quant_shape_to_byte_shape(shape, kind)
            writer.add_tensor_info(there, stored, np.dtype(np.uint8), int(np.prod(stored)), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, weight in weights:
        kind = _select_type(weight, dtype)
        values = _convert_weight(name, weight, config, architecture)
        if kind.name == "F16" and float(np.abs(values).max()) > FLOAT16_MAX:
            raise ModelError(f"{name} has a weight above {FLOAT16_MAX:g}, float16's largest", hint="--dtype bfloat16")
        writer.write_tensor_data(quantize(values, kind))
    writer.close()


def _named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over named weights, tied ones once."""
    return ((name, weight.detach()) for name, weight in model.named_parameters())


def _select_type(weight: torch.Tensor, dtype: str) -> GGMLQuantizationType:
    """Return the type of a weight in the file.

    Vectors are float32; a matrix whose rows are no multiple of q8_0's block of 32 is float16, as in llama.cpp.
    """
    from gguf import GGMLQuantizationType

    if weight.dim() == 1:
        return GGMLQuantizationType.F32
    name = TYPES[dtype]
    return GGMLQuantizationType["F16" if name == "Q8_0" and weight.shape[-1] % 32 else name]


def _convert_weight(name: str, weight: torch.Tensor, config: Any, architecture: str) -> np.ndarray:
    """Return a weight in float32 with llama.cpp's row order.

    llama.cpp interleaves the rotary pairs of a Llama; transformers stores them half a head apart.
    """
    values = weight.float().cpu().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture != "llama" or heads is None:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _rope_parameters(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add_metadata(writer: GGUFWriter, config: Any, dtype: str, about: dict[str, str]) -> None:
    """Write GGUF's metadata keys about the model."""
    writer.add_type("model")
    writer.add_name(about["name"])
    if "license" in about:
        writer.add_license(about["license"])
    if "base" in about:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, about["base"])
    writer.add_file_type(FILE_TYPES[TYPES[dtype]])
    writer.add_quantization_version(2)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(_rope_parameters(config).get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: GGUFWriter, loaded: LoadedModel, words: Vocabulary) -> None:
    """Write the tokenizer's metadata: tokens, merges, special tokens and chat template."""
    tokenizer = loaded.tokenizer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(list(words.tokens))
    writer.add_token_types(list(words.types))
    writer.add_token_merges(list(words.merges))
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id in loaded.eos_ids else loaded.eos_ids[0]
    writer.add_eos_token_id(eos)
    others = [number for number in loaded.eos_ids if number != eos]
    if others:
        writer.add_eot_token_id(others[0])
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_add_bos_token(words.add_bos)
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def verify(loaded: LoadedModel, path: Path, dtype: str) -> dict[str, Any]:
    """Read the file as `model.path` does, and compare configuration, tokenizer and every weight.

    Returns `weights` (number compared) and `logit_gap` between the file's model and the exported one. Raises ModelError
    if anything differs from what the format should hold.
    """
    from gguf.quants import dequantize, quantize

    section = Model.model_validate({"path": str(path), "device": "cpu", "dtype": "float32"})
    again = load(section, path.parent)
    check_tokenizer(again.tokenizer, loaded.tokenizer)
    _check_config(again.model.config, loaded.model.config)
    stored = dict(_named_weights(again.model))
    for name, weight in _named_weights(loaded.model):
        values, kind = weight.float().cpu().numpy(), _select_type(weight, dtype)
        held = dequantize(quantize(values, kind), kind).reshape(values.shape)
        if name not in stored or not np.array_equal(stored[name].numpy(), held):
            raise ModelError(f"the file's weight {name} is not the model's", where=str(path))
    with torch.no_grad():
        gap = relative_gap(probe_logits(again.model, loaded.tokenizer), probe_logits(loaded.model, loaded.tokenizer))
    return {"weights": len(stored), "logit_gap": gap}


def _check_config(found: Any, expected: Any) -> None:
    """Raise ModelError if the configuration that was read back differs."""
    pairs = {key: (getattr(found, key), getattr(expected, key)) for key in COMPARED_KEYS}
    pairs["head_dim"] = (_head_dim(found), _head_dim(expected))
    pairs["rope_theta"] = (_rope_parameters(found).get("rope_theta"), _rope_parameters(expected).get("rope_theta"))
    for key, (one, other) in pairs.items():
        if one != other:
            raise unsupported_error(f"its {key} is {other}, and reading the file gives {one}")
    if abs(found.rms_norm_eps - expected.rms_norm_eps) > 1e-4 * expected.rms_norm_eps:
        raise unsupported_error(
            f"its rms_norm_eps is {expected.rms_norm_eps}, and reading the file gives {found.rms_norm_eps}"
        )
