"""transformers' `from_pretrained` with the device, type and attention of the `model` section; failures become
ModelErrors.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from posttrain import hub
from posttrain.errors import ModelError, count_noun
from posttrain.models.model_paths import Place, not_found
from posttrain.recipe.sections import Model


def device_of(section: Model) -> torch.device:
    """Return the device; auto = the GPU if there is one."""
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(auto if section.device == "auto" else section.device)


def dtype_of(section: Model) -> torch.dtype:
    """Return the type of the weights; auto = bfloat16 on a GPU, float32 on a CPU."""
    auto = "bfloat16" if device_of(section).type == "cuda" else "float32"
    return getattr(torch, auto if section.dtype == "auto" else section.dtype)


def attention_of(section: Model) -> dict[str, str]:
    """Return the from_pretrained argument for the recipe's attention implementation."""
    return {} if section.attention == "auto" else {"attn_implementation": section.attention}


def from_pretrained(cls: Any, section: Model, place: Place, base_dir: Path | None, **options: Any) -> Any:
    """Call `cls.from_pretrained` and raise failures as ModelError. Weights missing from the checkpoint are an error."""
    loads_weights = "dtype" in options
    if loads_weights:
        options["output_loading_info"] = True
    options |= hub_options(section, place) | place.gguf | {"trust_remote_code": section.trust_remote_code}
    try:
        loaded = cls.from_pretrained(place.target, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as cause:
        raise explain_failure(section, place, base_dir, cause) from cause
    if not loads_weights:
        return loaded
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{place.name} lacks {count_noun(len(missing), 'weight')} of its architecture, e.g. {missing[0]}"
        )
    return model


def hub_options(section: Model, place: Place) -> dict[str, Any]:
    """Return the from_pretrained arguments for a hub id: revision, and offline mode if the hub is unreachable."""
    if place.kind != "hub":
        return {}
    return {"revision": section.revision or "main", "local_files_only": not hub.is_reachable()}


def explain_failure(section: Model, place: Place, base_dir: Path | None, cause: Exception) -> ModelError:
    """Return the ModelError for a failure of `from_pretrained`, with a hint for its cause."""
    text = str(cause)
    if "trust_remote_code" in text:
        return ModelError(
            f"{place.name} comes with its own Python code, which is not run unless the recipe allows it",
            hint="read that code, then write `model.trust_remote_code: true`",
        )
    if place.kind == "hub" and isinstance(cause, OSError):
        return not_found(place, base_dir, cause)
    if section.attention != "auto" and ("attention" in text.lower() or "flash" in text.lower()):
        package = "install flash-attn, or " if section.attention == "flash_attention_2" else ""
        return ModelError(
            f"model.attention: {section.attention} does not work here: {text.splitlines()[0]}",
            hint=f"{package}write model.attention=auto, which selects what the model and this machine support",
        )
    return ModelError(f"{place.name} cannot be loaded: {type(cause).__name__}: {text}")


@contextlib.contextmanager
def suppress_progress_bars() -> Iterator[None]:
    """Suppress transformers' progress bars, and a PEFT warning about unused rank patterns.

    PEFT warns about its own patterns for experts' gate and up projections, which are one tensor; the patterns are used.
    """
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown, bar = logging.is_progress_bar_enabled(), gguf.tqdm
    logging.disable_progress_bar()
    gguf.tqdm = functools.partial(bar, disable=True)  # the GGUF loader ignores transformers' switch
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            yield
    finally:
        gguf.tqdm = bar
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def parse_gguf_once(place: Place) -> Iterator[None]:
    """Let the calls of `from_pretrained` in this context share one parse of a GGUF file.

    transformers parses the file for the tokenizer, the configuration and the weights, and builds the table of tensor
    names for every module of the model. Slices of a plain array are created faster than slices of a memmap.
    Contexts may be nested: the outermost holds the parse.
    """
    if place.kind != "gguf":
        yield
        return
    import gguf
    import numpy as np

    if not isinstance(gguf.GGUFReader, type):  # an outer context has replaced it
        yield
        return

    class Reader(gguf.GGUFReader):
        data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", mapped.view(np.ndarray)))

    parsers: dict[str, Any] = {"GGUFReader": Reader, "get_tensor_name_map": gguf.get_tensor_name_map}
    before = {name: getattr(gguf, name) for name in parsers}
    vars(gguf).update({name: functools.cache(parser) for name, parser in parsers.items()})
    try:
        yield
    finally:
        vars(gguf).update(before)
