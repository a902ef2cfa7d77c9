"""Saving of a model with proof that it works elsewhere: reload with plain transformers, compare logits, generate.

A model is written beside the target, verified there, and then renamed: a kill leaves the old folder or the new one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain import chat
from posttrain.errors import RunError
from posttrain.models import adapters, vision
from posttrain.models.adapters import causal_of
from posttrain.models.images import ImageReader, probe_image
from posttrain.models.load import LoadedModel, generation_config, load_dense_base, max_positions
from posttrain.models.merge_adapter import merge, merged_copy
from posttrain.models.pretrained import suppress_progress_bars
from posttrain.models.quantize import disable_repacking
from posttrain.models.rounding_bounds import TOLERANCE, relative_gap
from posttrain.models.save_adapter import base_is_stored, write_adapter
from posttrain.models.weight_names import save_under_published_names
from posttrain.run.atomic_io import explain_write_errors, put_in_place, sync_file, sync_folder

PROBES = ("What is 17 + 25? Say why.", "def add(a, b):\n    return", 'Größe: {"x": [1, 2.5]} 你好')
NEW_TOKENS = 24
SHARD_SIZE = "5GB"  # maximum size of a weight file
Compare = Callable[[Any, Any, ImageReader | None, Path], dict[str, Any]]  # see `verify_folder`


def save(loaded: LoadedModel, folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """Write weights (safetensors), tokenizer, chat template and generation config; replace `folder` in one step.

    An adapter whose base is in a directory or on the hub is saved as an adapter; for any other base (`tiny`, GGUF, an
    older adapter merged in) the merged model is saved, with the adapter in `adapter/`. Several adapters are each saved
    this way in a subfolder of their name. Nothing is merged into 4-bit weights: the dense base is loaded again for the
    merge.

    Returns `kind`, `bytes`, and with `verify` `logit_gap` and `probe_end`, both measured on what plain transformers, or
    PEFT, loads from the folder; for several adapters (kind `adapters`) a report of each. Raises RunError if the saved
    model differs from the one in memory.
    """
    partial = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    if len(loaded.adapters) > 1:
        parts = {name: _save_into(loaded, partial / name, name, verify=verify) for name in loaded.adapters}
        report = adapters_report(parts)
    else:
        report = _save_into(loaded, partial, next(iter(loaded.adapters), None), verify=verify)
    put_in_place(partial, folder)
    return {"path": str(folder), **report}


def adapters_report(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the report of several adapters, from the report of each."""
    return {"kind": "adapters", "bytes": sum(part["bytes"] for part in parts.values()), "adapters": parts}


def _save_into(loaded: LoadedModel, folder: Path, adapter: str | None, *, verify: bool) -> dict[str, Any]:
    """Write the model, with the given adapter, into a new folder; return its part of the report of `save`."""
    adapters.activate(loaded.model, adapter)
    with explain_write_errors(folder), suppress_progress_bars():
        folder.mkdir(parents=True)
        kind, expected = _write(loaded, folder, adapter)
        write_beside(loaded, folder)
        report = {"kind": kind, "bytes": sync_all(folder)}
    if verify:
        compare = bind(compare_logits, expected=expected, allowance=1 if kind == "full" else 2)
        report |= verify_folder(loaded, folder, compare)
    return report


def write_beside(loaded: LoadedModel, folder: Path) -> None:
    """Write everything besides weights and config: tokenizer, chat template, image processor, generation config."""
    loaded.tokenizer.save_pretrained(folder)
    if loaded.images is not None:
        loaded.images.processor.save_pretrained(folder)
    generation_config(loaded.tokenizer, loaded.eos_ids).save_pretrained(folder)


def _write(loaded: LoadedModel, folder: Path, adapter: str | None) -> tuple[str, Tensor]:
    """Write the weights; return their kind and the probe logits that they must reproduce. adapter: the active one."""
    model = loaded.model
    if adapter is None:
        return "full", _write_full(loaded, folder)
    if base_is_stored(loaded):
        write_adapter(loaded, folder, adapter)
        with loaded.autocast():
            return "adapter", probe_logits(model, loaded.tokenizer, reader=loaded.images)
    write_adapter(loaded, folder / "adapter", adapter)
    return "merged", _write_merged(loaded, folder)


def _write_full(loaded: LoadedModel, folder: Path) -> Tensor:
    """Write all weights in the precision that products were computed in: float32 masters are for the optimizer only."""
    model = save_under_published_names(loaded.model)
    if loaded.half is None:
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        return probe_logits(model, loaded.tokenizer, reader=loaded.images)
    state = cast_state(model, loaded.half)
    model.save_pretrained(folder, state_dict=dict(state), max_shard_size=SHARD_SIZE)  # removes tied weights from dict
    write_dtype(folder, loaded.half)
    # Computed with the cast weights, as a reloaded model does: autocast would keep sums in float32.
    return probe_logits(model, loaded.tokenizer, state, loaded.images)


def write_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Write the type of the weights into a folder's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def cast_state(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the state_dict with floating-point tensors in `dtype`. Tied weights stay one tensor, so they are stored
    once.
    """
    cast: dict[int, Tensor] = {}
    state = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in cast:
            cast[id(weight)] = weight.detach().to(dtype) if weight.is_floating_point() else weight.detach()
        state[name] = cast[id(weight)]
    return state


def _write_merged(loaded: LoadedModel, folder: Path) -> Tensor:
    """Write the dense base with the adapter merged in, as a plain model; return the logits before the merge."""
    origin = loaded.origin
    if origin is None or origin.section.quantize is None:
        with loaded.autocast():
            expected = probe_logits(loaded.model, loaded.tokenizer, reader=loaded.images)
        merged = merged_copy(loaded.model)
    else:
        peft = adapters.load_frozen(load_dense_base(origin.section, origin.base, origin.base_dir), folder / "adapter")
        peft = peft.to(loaded.device)
        expected = probe_logits(peft, loaded.tokenizer, reader=loaded.images)
        merged = merge(peft)
    save_under_published_names(merged).save_pretrained(folder, max_shard_size=SHARD_SIZE)
    return expected


@torch.no_grad()
def probe_logits(
    model: Any, tokenizer: Any, state: dict[str, Tensor] | None = None, reader: ImageReader | None = None
) -> Tensor:
    """Return logits [T, vocabulary] of fixed texts, concatenated, float32 on the CPU.

    state: weights to use instead of the model's own. reader: of a vision model; the last text then includes an image.
    """
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    outputs = []
    try:
        for ids in _probe_ids(model, tokenizer, reader):
            given = {"input_ids": ids.to(device)}
            if reader is not None and reader.feature_id in ids:
                given |= reader.plain_inputs(causal_of(model), [probe_image()], given["input_ids"])
            outputs.append(torch.func.functional_call(model, state or {}, (), given, tie_weights=False).logits[0])
    finally:
        model.train(was_training)
    return torch.cat([logits.float().cpu() for logits in outputs])


def _probe_ids(model: Any, tokenizer: Any, reader: ImageReader | None = None) -> list[Tensor]:
    """Return token ids [1,T] of each probe, truncated to leave positions for new tokens; with a reader also an image
    probe.
    """
    texts, limit = list(PROBES), max_positions(model.config)
    if tokenizer.chat_template:
        texts = [chat.render(tokenizer, [{"role": "user", "content": text}], generation_prompt=True) for text in texts]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    probes = [torch.tensor([row if limit is None else row[: limit - _new_tokens(limit)]]) for row in ids]
    if reader is not None:
        shown = tokenizer(reader.read(probe_image()).text + PROBES[0], add_special_tokens=False)["input_ids"]
        probes += [torch.tensor([shown])] if limit is None or len(shown) <= limit else []
    return probes


def _new_tokens(limit: int | None) -> int:
    return NEW_TOKENS if limit is None else min(NEW_TOKENS, limit // 2)


def verify_folder(loaded: LoadedModel, folder: Path, compare: Compare) -> dict[str, Any]:
    """Reload the folder with plain transformers, compare it with the model in memory, and generate.

    compare: receives the reloaded model, its tokenizer, the image reader of a vision model, and the folder; returns its
    findings or raises RunError. Returns the findings and `probe_end`. Raises RunError; the folder is left for
    inspection.
    """
    from transformers import AutoTokenizer, GenerationConfig

    with suppress_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        pairs = zip(_probe_ids(loaded.model, tokenizer), _probe_ids(loaded.model, loaded.tokenizer), strict=True)
        if not all(torch.equal(saved, own) for saved, own in pairs):
            raise RunError("the saved tokenizer gives other tokens than the one in memory", where=str(folder))
        model = disable_repacking(_reload(loaded, folder))
        reader = None if loaded.images is None else _reload_reader(loaded.images, folder, causal_of(model).config)
        model.generation_config = GenerationConfig.from_pretrained(folder)  # an adapter's base has another one
        found = compare(model, tokenizer, reader, folder)
        return {**found, "probe_end": _generate(model, tokenizer, loaded.eos_ids, folder)}


def compare_logits(
    model: Any, tokenizer: Any, reader: ImageReader | None, folder: Path, *, expected: Tensor, allowance: int
) -> dict[str, Any]:
    """Return the gap between a reloaded model's probe logits and the `expected` ones. Raises RunError if it exceeds
    rounding.

    allowance: multiple of the rounding tolerance of the model's precision.
    """
    gap = relative_gap(probe_logits(model, tokenizer, reader=reader), expected)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if not gap <= allowance * TOLERANCE.get(dtype, 5e-2):
        raise RunError(f"the saved model gives other logits than the one in memory (gap {gap:.2g})", where=str(folder))
    return {"logit_gap": gap}


def _reload_reader(own: ImageReader, folder: Path, config: Any) -> ImageReader:
    """Load the saved processor. Raises RunError if it gives other tensors or tokens for an image than the one in
    memory.
    """
    saved = ImageReader(vision.processor_class(config).from_pretrained(folder), config)
    here, there = own.read(probe_image()), saved.read(probe_image())
    same = here.text == there.text and here.tensors.keys() == there.tensors.keys()
    if not same or not all(torch.allclose(value, there.tensors[name]) for name, value in here.tensors.items()):
        raise RunError("the saved processor reads an image differently than the one in memory", where=str(folder))
    return saved


def _vocabulary_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _reload(loaded: LoadedModel, folder: Path) -> Any:
    """Load the saved model with plain transformers; an adapter is loaded by PEFT onto its base.

    The base of an adapter gets the dtype and quantization that it has in memory: a dense base would give other logits.
    """
    kind = vision.auto_class(causal_of(loaded.model).config, loaded.origin.section if loaded.origin else None)
    device = "cpu" if loaded.is_sharded else str(loaded.device)  # a sharded model may not fit onto one GPU
    options: dict[str, Any] = {"device_map": {"": device}, "dtype": "auto"}
    if loaded.origin is not None:
        options["trust_remote_code"] = loaded.origin.section.trust_remote_code
    if not adapters.is_adapter(folder):
        return kind.from_pretrained(folder, **options)
    from peft import PeftModel

    options["dtype"] = next(p.dtype for n, p in loaded.model.named_parameters() if "lora_" not in n)
    if quantization := getattr(loaded.model.config, "quantization_config", None):
        options["quantization_config"] = quantization
    config = json.loads((folder / "adapter_config.json").read_text())
    base = kind.from_pretrained(config["base_model_name_or_path"], revision=config.get("revision"), **options)
    if (rows := _vocabulary_size(loaded.model)) != _vocabulary_size(base):
        base.resize_token_embeddings(rows)
    return PeftModel.from_pretrained(base, str(folder)).eval()


@torch.no_grad()
def _generate(model: Any, tokenizer: Any, eos_ids: tuple[int, ...], folder: Path) -> str:
    """Generate greedily from the first probe with the saved generation config; return "stop" or "length".

    Raises RunError if the end tokens are wrong, or if generation continues after an end token.
    """
    saved = model.generation_config.eos_token_id
    if set([saved] if isinstance(saved, int) else saved or ()) != set(eos_ids):
        raise RunError(f"the saved generation config stops at {saved}, not at {list(eos_ids)}", where=str(folder))
    ids = _probe_ids(model, tokenizer)[0].to(next(model.parameters()).device)
    new = _new_tokens(max_positions(model.config))
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, use_cache=True
    )[0, ids.shape[1] :].tolist()
    if any(i in eos_ids for i in out[:-1]):
        raise RunError("the saved model continues to generate after its end-of-sequence token", where=str(folder))
    return "stop" if out and out[-1] in eos_ids else "length"


def sync_all(folder: Path) -> int:
    """Flush all files of a folder to disk; return their size in bytes."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    for path in files:
        sync_file(path)
    for inner in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_folder(inner)
    return sum(p.stat().st_size for p in files)
