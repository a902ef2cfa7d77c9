"""Merge inputs: any supported model format as a folder of dense safetensors with its config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import MergeError
from posttrain.merge.tensors import Spec, scan
from posttrain.models.model_paths import Place, locate, not_found
from posttrain.recipe.sections import Model

CONFIG = "config.json"
_TOKENIZER_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    CONFIG,
)
# Hash of the last tokenizer's files -> its vocabulary; reading a tokenizer takes a second
_vocabulary_cache: dict[str, dict[str, int]] = {}
_DOWNLOAD_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


@dataclass(frozen=True)
class Source:
    """One model, read from its headers only. `vocabulary` maps token to id; None without a tokenizer."""

    name: str  # as the recipe writes it
    folder: Path  # dense safetensors
    origin: Path | None  # the user's own directory or file; None for `tiny` and downloads
    config: dict[str, Any]
    tensors: dict[str, Spec]
    vocabulary: dict[str, int] | None
    tied: bool  # output embedding shared with the input embedding

    @property
    def rows(self) -> int | None:
        """Rows of the embeddings, possibly fewer or more than the tokenizer has tokens; None if unknown."""
        text = self.config.get("text_config")
        found = self.config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
        return found if isinstance(found, int) else None

    def token_ids(self, limit: int | None = None) -> dict[str, int]:
        """Return token -> id for tokens with an embedding row below `limit`; empty without a tokenizer."""
        rows = min((n for n in (self.rows, limit) if n is not None), default=None)
        return {token: i for token, i in (self.vocabulary or {}).items() if rows is None or i < rows}


def open_source(name: str, base_dir: Path, scratch: Path) -> Source:
    """Find a model and read its config, tensor headers and vocabulary.

    A directory of dense safetensors is used in place, a hub id is downloaded into the cache. An adapter folded into its
    base, a .gguf file and `tiny` are written as dense float32 into a folder under `scratch`. Raises MergeError or
    ModelError that names the problem.
    """
    place = locate(name, base_dir)
    if place.kind == "directory" and place.path is not None:
        folder = place.path
    elif place.kind == "hub":
        folder = _download(place, base_dir)
    else:
        folder = _materialize(name, base_dir, scratch / f"input-{len(list(scratch.glob('input-*')))}")
    config = _read_config(folder)
    if "quantization_config" in config:
        raise MergeError(
            "quantised weights cannot be merged", where=name, hint="dequantise the model and save it first"
        )
    tied = _ties_embeddings(folder)
    tensors = drop_tied_copies(scan(folder)) if tied else scan(folder)
    return Source(name, folder, place.path, config, tensors, _load_vocabulary(folder), tied)


def drop_tied_copies(tensors: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return the tensors of a tied model without the embedding copy that some writers store as `lm_head.weight`."""
    copies = [name for name in tensors if name.endswith("lm_head.weight")]
    shapes = {spec.shape for name, spec in tensors.items() if name not in copies}
    return {name: spec for name, spec in tensors.items() if name not in copies or spec.shape not in shapes}


def _download(place: Place, base_dir: Path) -> Path:
    """Download a model of the hub into the cache and return its folder."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(place.name, allow_patterns=_DOWNLOAD_PATTERNS))
    except Exception as cause:  # the hub raises a dozen types; all mean that the model is not available
        raise not_found(place, base_dir, cause) from cause


def _materialize(name: str, base_dir: Path, folder: Path) -> Path:
    """Load the model densely on the CPU, with an adapter folded in, and save it.

    Both steps are verified: folding by the logits of the base with the adapter, saving by the logits of plain
    transformers.
    """
    from posttrain.models.load import load
    from posttrain.models.save import save

    save(load(Model(path=name, device="cpu", dtype="float32"), base_dir), folder)
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model folder. Raises MergeError if it is missing or unreadable."""
    path = folder / CONFIG
    if not path.is_file():
        raise MergeError(f"no {CONFIG}: not a model directory", where=str(folder))
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as cause:
        raise MergeError(f"unreadable: {cause}", where=str(path)) from cause


def _ties_embeddings(folder: Path) -> bool:
    """Return whether embeddings are tied, from the config class: config.json omits the architecture's defaults."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as cause:  # an unknown model_type, remote code, or a value that the class refuses
        raise MergeError(f"transformers cannot read its config: {cause}", where=str(folder)) from cause
    return bool(config.get_text_config().tie_word_embeddings)


def _load_vocabulary(folder: Path) -> dict[str, int] | None:
    """Return token -> id of the model's tokenizer, including added tokens; None without tokenizer files."""
    files = sorted({path for pattern in _TOKENIZER_PATTERNS for path in folder.glob(pattern) if path.is_file()})
    if not any(path.name.startswith(("tokenizer", "vocab")) for path in files):
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    if digest.hexdigest() not in _vocabulary_cache:
        _vocabulary_cache.clear()  # inputs of one merge usually share a tokenizer, so only the last one is cached
        _vocabulary_cache[digest.hexdigest()] = _read_vocabulary(folder)
    return _vocabulary_cache[digest.hexdigest()]


def _read_vocabulary(folder: Path) -> dict[str, int]:
    """Load the tokenizer and return token -> id. Raises MergeError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return dict(AutoTokenizer.from_pretrained(folder).get_vocab())
    except Exception as cause:  # any error of the tokenizer's loader is caused by this folder's files
        raise MergeError(f"unreadable tokenizer: {type(cause).__name__}: {cause}", where=str(folder)) from cause
