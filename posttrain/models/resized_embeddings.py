"""Adapters trained with another vocabulary size than their base, because tokens were added before training.

PEFT stores the embeddings of such a model with the adapter, and expects the base to be resized before loading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import ModelError, count_noun

Shapes = Mapping[str, Sequence[int]]
# Suffixes after the name of an embedding that is stored in full.
_FULL_SUFFIXES = (".weight", ".base_layer.weight", ".modules_to_save.weight", ".token_adapter.base_layer.weight")


def resize_embeddings(model: Any, folder: Path) -> None:
    """Resize the dense base's embeddings in place to the vocabulary size that the adapter in `folder` was trained with.

    Raises ModelError if the adapter does not store the embeddings of the added tokens.
    """
    shapes = stored_shapes(folder)
    indices = token_indices(_read_config(folder))
    before = model.get_input_embeddings().weight.shape[0]
    rows = _trained_vocabulary_size(model, shapes, indices, before)
    if rows == before:
        return
    if missing := [
        name for name in _embedding_names(model) if not _stores_new_rows(name, shapes, indices, before, rows)
    ]:
        raise ModelError(
            f"the adapter was trained with {count_noun(rows, 'token')}, its base has {before}, and the adapter does"
            f" not store the new embeddings of {missing[0]}",
            where=str(folder),
            hint="resize and save the base first, or save the adapter in PEFT with save_embedding_layers=True",
        )
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(rows, mean_resizing=False)


def stored_shapes(folder: Path) -> Shapes:
    """Return name -> shape of an adapter's tensors, without PEFT's prefix."""
    path = folder / "adapter_model.safetensors"
    if path.is_file():
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            shapes: dict[str, Sequence[int]] = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    elif (pickled := folder / "adapter_model.bin").is_file():
        import torch

        tensors = torch.load(pickled, map_location="cpu", weights_only=True, mmap=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    else:
        raise ModelError("the adapter has no weights: adapter_model.safetensors is missing", where=str(folder))
    return {name.removeprefix("base_model.model."): shape for name, shape in shapes.items()}


def token_indices(config: Any) -> list[int]:
    """Return the token ids that an adapter trains separately."""
    found = getattr(config, "trainable_token_indices", None) or []
    return [token for tokens in found.values() for token in tokens] if isinstance(found, dict) else list(found)


def _read_config(folder: Path) -> Any:
    from peft import PeftConfig

    return PeftConfig.from_pretrained(str(folder))


def _embedding_names(model: Any) -> list[str]:
    """Return the names of the input embedding and, if it has its own weight, of the output embedding."""
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    own = [inner] if outer is None or outer.weight is inner.weight else [inner, outer]
    return [name for name, module in model.named_modules() if any(module is each for each in own)]


def _trained_vocabulary_size(model: Any, shapes: Shapes, indices: Sequence[int], before: int) -> int:
    """Return the vocabulary size of the model that the adapter was trained on."""
    both = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if any(module is each for each in both)]
    for name in names:
        for key, shape in shapes.items():
            if key == f"{name}.lora_embedding_A":
                return int(shape[1])
            if key in {f"{name}.lora_B.weight", *(name + end for end in _FULL_SUFFIXES)}:
                return int(shape[0])
    return max([before, *(token + 1 for token in indices)])


def _stores_new_rows(name: str, shapes: Shapes, indices: Sequence[int], before: int, rows: int) -> bool:
    """Return whether the adapter stores every row of this embedding beyond the base's."""
    return any(name + end in shapes for end in _FULL_SUFFIXES) or set(range(before, rows)) <= set(indices)
