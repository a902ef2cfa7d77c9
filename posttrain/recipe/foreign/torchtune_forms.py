"""Conversion of torchtune's components: data set builders, modules with an adapter, 4-bit weights, steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.recipe.foreign import data_forms, words
from posttrain.recipe.foreign.draft import Draft
from posttrain.recipe.foreign.source import Given

_PROJECTIONS = {"output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_READ = {"_component_", "source", "data_files", "split", "name", "column_map", "conversation_column", "column"}
_UNUSED = ("filter_fn", "split_across_pack", "max_packs")
_MASKS = {"train_on_input", "masking_strategy", "new_system_prompt", "packed", "conversation_style"}
_TRAINED = {"train_on_all": "all", "train_on_assistant": "assistant", "train_on_last": "completion"}


def _datasets(draft: Draft, given: Given, _: str) -> None:
    """Convert a data set builder, or a list of them. The other keys of `dataset` are read with `_component_`."""
    section = draft.foreign.nested.get("dataset")
    entries = [entry for entry in (section if isinstance(section, list) else [section]) if isinstance(entry, Mapping)]
    if given.key not in ("dataset", "dataset._component_"):
        draft.read.add(given.key)
        return
    data_forms.put_sources(draft, [_source(draft, entry) for entry in entries], draft.origin(given.key))
    packed = any(entry.get("packed") is True for entry in entries)
    if packed and draft.stage == "sft":
        draft.set_default("batch.packing", True, "dataset.packed")
        draft.note("batch.size counts rows: there an update had batch_size x accumulation packs of max_seq_len tokens")


def _source(draft: Draft, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the source of one builder, and write what it trains on, which all sources share."""
    name = str(entry.get("_component_")).rpartition(".")[2]
    builder = words.values("torchtune_datasets").get(name, {})
    files = entry.get("data_files")
    source: dict[str, Any] = {"source": str(files or entry.get("source") or builder.get("source"))}
    if entry.get("name"):
        source["config"] = str(entry["name"])
    if not files and entry.get("split") not in (None, "train"):
        source["split"] = str(entry["split"])
    mapping = entry.get("column_map") or {}
    theirs = {"conversation_column": entry.get("conversation_column"), "column": entry.get("column"), **mapping}
    columns = {ours: theirs.get(key) or theirs.get(ours) or key for key, ours in builder.get("columns", {}).items()}
    columns = {ours: str(column) for ours, column in columns.items() if column not in (ours, "conversation_column")}
    if columns.get("messages") == "conversations":  # a known column name
        del columns["messages"]
    if columns:
        source["columns"] = columns
    if not builder:
        draft.note(f"{name} writes its prompts itself: write `data.prompt_template` and `data.completion_template`")
    for path, value in builder.get("recipe", {}).items():
        draft.set_default(path, value, name)
    if builder.get("recipe", {}).get("data.prompt_template"):
        draft.note("rows with an `input`: torchtune writes them in other words, with the input below `### Input:`")
    if draft.stage == "sft":
        trained = "all" if entry.get("train_on_input", builder.get("train_on_input")) else "assistant"
        draft.set_default("data.train_on", _TRAINED.get(str(entry.get("masking_strategy")), trained), name)
    if entry.get("new_system_prompt"):
        draft.set_default("data.system", str(entry["new_system_prompt"]), "dataset.new_system_prompt")
        draft.note("dataset.new_system_prompt replaces system messages there; here rows with one keep it")
    for key in (key for key in _UNUSED if entry.get(key)):
        draft.note(f"dataset.{key}: {entry[key]} has no counterpart: packs hold whole rows, and all rows are read")
    for key in sorted(entry.keys() - _READ - _MASKS - set(_UNUSED)):
        draft.note(f"dataset.{key}: {entry[key]} is left out: a source has no such key")
    return source


def _targets(draft: Draft, given: Given, target: str) -> None:
    """Convert the attention modules with an adapter, and the switch for those of the MLP."""
    names = [_PROJECTIONS.get(str(name), str(name)) for name in given.value]
    if draft.get("model.apply_lora_to_mlp") is True:
        names += _MLP
    draft.set_default(target, names, draft.origin(given.key))


def _model(draft: Draft, given: Given, _: str) -> None:
    """Write 4-bit weights for builders named `qlora_*`. The model itself is that of the checkpoint."""
    if str(given.value).rpartition(".")[2].startswith("qlora_"):
        draft.set_default("model.quantize", "nf4", draft.origin(given.key))


def _steps(draft: Draft, given: Given, target: str) -> None:
    """Convert steps per epoch to steps of the run."""
    epochs = int(draft.get("epochs", default=1))
    origin = draft.origin(given.key)
    draft.set_default(target, int(given.value) * epochs, origin if epochs == 1 else f"{origin} x {epochs} epochs")


TRANSFORMS: dict[str, Callable[[Draft, Given, str], None]] = {
    "torchtune_datasets": _datasets,
    "torchtune_model": _model,
    "torchtune_steps": _steps,
    "torchtune_targets": _targets,
}
