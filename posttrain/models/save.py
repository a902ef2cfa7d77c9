"""Save a model so that it works elsewhere, and prove it: reload with plain transformers, same logits, generates.

Written beside the target, checked there, and only then given its name: a kill leaves the old folder or the new one.
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
from posttrain.models.load import LoadedModel, dense, generation_config, positions
from posttrain.models.merge_adapter import merge, merged_copy
from posttrain.models.pretrained import quiet
from posttrain.models.quantize import leave_unpacked
from posttrain.models.rounding_bounds import TOLERANCE, relative_gap
from posttrain.models.save_adapter import base_is_stored, write_adapter
from posttrain.models.weight_names import save_under_published_names
from posttrain.run.atomic_io import explain_write_errors, put_in_place, sync_file, sync_folder

PROBES = ("What is 17 + 25? Say why.", "def add(a, b):\n    return", 'Größe: {"x": [1, 2.5]} 你好')
NEW_TOKENS = 24
SHARD_SIZE = "5GB"  # of a file of weights
Compare = Callable[[Any, Any, ImageReader | None, Path], dict[str, Any]]  # see `verify_folder`


def save(loaded: LoadedModel, folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """Write weights (safetensors), tokenizer, chat template and generation config; replaces `folder` in one step.

    An adapter whose base stands in a directory or on the hub is saved as an adapter; over any other base (`tiny`, GGUF,
    an older adapter merged in) the whole model is saved, with the adapter in `adapter/`. Of several adapters each is
    saved so in a folder of its name. Nothing is merged into 4-bit weights: the dense base is loaded again for that.

    The result says `kind`, `bytes`, and with `verify` `logit_gap` and `probe_end`, both of what plain transformers, or
    PEFT, loads from the folder; of several adapters (kind `adapters`) it says so of each. Raises RunError if the saved
    model is not the one in memory.
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
    """The report of several adapters from that of each."""
    return {"kind": "adapters", "bytes": sum(part["bytes"] for part in parts.values()), "adapters": parts}


def _save_into(loaded: LoadedModel, folder: Path, adapter: str | None, *, verify: bool) -> dict[str, Any]:
    """Write the model, with that one of its adapters, into a new folder; returns what `save` says of it."""
    adapters.activate(loaded.model, adapter)
    with explain_write_errors(folder), quiet():
        folder.mkdir(parents=True)
        kind, expected = _write(loaded, folder, adapter)
        write_beside(loaded, folder)
        report = {"kind": kind, "bytes": sync_all(folder)}
    if verify:
        compare = bind(compare_logits, expected=expected, allowance=1 if kind == "full" else 2)
        report |= verify_folder(loaded, folder, compare)
    return report


def write_beside(loaded: LoadedModel, folder: Path) -> None:
    """Write what stands beside weights and config: tokenizer, chat template, image processor, generation config."""
    loaded.tokenizer.save_pretrained(folder)
    if loaded.images is not None:
        loaded.images.processor.save_pretrained(folder)
    generation_config(loaded.tokenizer, loaded.eos_ids).save_pretrained(folder)


def _write(loaded: LoadedModel, folder: Path, adapter: str | None) -> tuple[str, Tensor]:
    """Write the weights; returns what they are and the probe logits that they must give. adapter: the active one."""
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
    """All weights, in the precision that products were computed in: float32 masters are for the optimiser only."""
    model = save_under_published_names(loaded.model)
    if loaded.half is None:
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        return probe_logits(model, loaded.tokenizer, reader=loaded.images)
    state = cast_state(model, loaded.half)
    model.save_pretrained(folder, state_dict=dict(state), max_shard_size=SHARD_SIZE)  # it takes tied ones out
    write_dtype(folder, loaded.half)
    return probe_logits(
        model, loaded.tokenizer, state, loaded.images
    )  # as a reload computes: autocast keeps sums in float32


def write_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Say in a folder's config.json in which precision its weights are."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def cast_state(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state_dict with floating numbers in `dtype`. Tied weights stay one tensor, so they are stored once."""
    found: dict[int, Tensor] = {}
    state = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in found:
            found[id(weight)] = weight.detach().to(dtype) if weight.is_floating_point() else weight.detach()
        state[name] = found[id(weight)]
    return state


def _write_merged(loaded: LoadedModel, folder: Path) -> Tensor:
    """The dense base with the adapter merged in, as a plain model. Returns the logits before the merge."""
    origin = loaded.origin
    if origin is None or origin.section.quantize is None:
        with loaded.autocast():
            expected = probe_logits(loaded.model, loaded.tokenizer, reader=loaded.images)
        merged = merged_copy(loaded.model)
    else:
        peft = adapters.load_frozen(dense(origin.section, origin.base, origin.base_dir), folder / "adapter")
        peft = peft.to(loaded.device)
        expected = probe_logits(peft, loaded.tokenizer, reader=loaded.images)
        merged = merge(peft)
    save_under_published_names(merged).save_pretrained(folder, max_shard_size=SHARD_SIZE)
    return expected


@torch.no_grad()
def probe_logits(
    model: Any, tokenizer: Any, state: dict[str, Tensor] | None = None, reader: ImageReader | None = None
) -> Tensor:
    """Logits [T, vocabulary] of fixed texts, one after the other, float32 on the CPU; with `state`, of the model with
    these weights. reader: of a model that sees; the last text then shows an image."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    found = []
    try:
        for ids in _probe_ids(model, tokenizer, reader):
            given = {"input_ids": ids.to(device)}
            if reader is not None and reader.feature_id in ids:
                given |= reader.plain_inputs(causal_of(model), [probe_image()], given["input_ids"])
            found.append(torch.func.functional_call(model, state or {}, (), given, tie_weights=False).logits[0])
    finally:
        model.train(was_training)
    return torch.cat([logits.float().cpu() for logits in found])


def _probe_ids(model: Any, tokenizer: Any, reader: ImageReader | None = None) -> list[Tensor]:
    """Each probe [1,T]: as much of it as leaves room for new tokens among the positions of the model, and an image."""
    texts, limit = list(PROBES), positions(model.config)
    if tokenizer.chat_template:
        texts = [chat.render(tokenizer, [{"role": "user", "content": text}], generation_prompt=True) for text in texts]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    found = [torch.tensor([one if limit is None else one[: limit - _new_tokens(limit)]]) for one in ids]
    if reader is not None:
        shown = tokenizer(reader.read(probe_image()).text + PROBES[0], add_special_tokens=False)["input_ids"]
        found += [torch.tensor([shown])] if limit is None or len(shown) <= limit else []
    return found


def _new_tokens(limit: int | None) -> int:
    return NEW_TOKENS if limit is None else min(NEW_TOKENS, limit // 2)


def verify_folder(loaded: LoadedModel, folder: Path, compare: Compare) -> dict[str, Any]:
    """Reload without any of our own code, compare with the model in memory, and generate. Returns what `compare` found
    and `probe_end`. Raises RunError; the folder stays for a look at it.

    compare: gets the reloaded model, its tokenizer and, of a model that sees, what reads images; returns what it found
    or raises RunError.
    """
    from transformers import AutoTokenizer, GenerationConfig

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        pairs = zip(_probe_ids(loaded.model, tokenizer), _probe_ids(loaded.model, loaded.tokenizer), strict=True)
        if not all(torch.equal(saved, own) for saved, own in pairs):
            raise RunError("the saved tokenizer writes other tokens than the one in memory", where=str(folder))
        model = leave_unpacked(_reload(loaded, folder))
        reader = None if loaded.images is None else _reload_reader(loaded.images, folder, causal_of(model).config)
        model.generation_config = GenerationConfig.from_pretrained(folder)  # an adapter's base came with its own
        found = compare(model, tokenizer, reader, folder)
        return {**found, "probe_end": _generate(model, tokenizer, loaded.eos_ids, folder)}


def compare_logits(
    model: Any, tokenizer: Any, reader: ImageReader | None, folder: Path, *, expected: Tensor, allowance: int
) -> dict[str, Any]:
    """Whether a reloaded model gives the `expected` probe logits, within `allowance` times what its precision rounds
    to. Raises RunError."""
    gap = relative_gap(probe_logits(model, tokenizer, reader=reader), expected)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if not gap <= allowance * TOLERANCE.get(dtype, 5e-2):
        raise RunError(f"the saved model gives other logits than the one in memory (gap {gap:.2g})", where=str(folder))
    return {"logit_gap": gap}


def _reload_reader(own: ImageReader, folder: Path, config: Any) -> ImageReader:
    """The saved processor. Raises RunError if it makes other tensors or tokens of an image than the one in memory."""
    saved = ImageReader(vision.processor_class(config).from_pretrained(folder), config)
    here, there = own.read(probe_image()), saved.read(probe_image())
    same = here.text == there.text and here.tensors.keys() == there.tensors.keys()
    if not same or not all(torch.allclose(value, there.tensors[name]) for name, value in here.tensors.items()):
        raise RunError("the saved processor makes something else of an image than the one in memory", where=str(folder))
    return saved


def _rows(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _reload(loaded: LoadedModel, folder: Path) -> Any:
    """The saved model as plain transformers loads it; of an adapter, its base with the adapter put on by PEFT.

    The base of an adapter has the dtype that it has in memory, and its quantisation: the dense base gives other logits.
    """
    kind = vision.auto_class(causal_of(loaded.model).config, loaded.origin.section if loaded.origin else None)
    device = "cpu" if loaded.is_sharded else str(loaded.device)  # a GPU has no room for all of a divided model
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
    if (rows := _rows(loaded.model)) != _rows(base):
        base.resize_token_embeddings(rows)
    return PeftModel.from_pretrained(base, str(folder)).eval()


@torch.no_grad()
def _generate(model: Any, tokenizer: Any, eos_ids: tuple[int, ...], folder: Path) -> str:
    """Greedy from the first probe with the saved generation config: must end at EOS or the limit, not run past EOS."""
    saved = model.generation_config.eos_token_id
    if set([saved] if isinstance(saved, int) else saved or ()) != set(eos_ids):
        raise RunError(f"the saved generation config ends at {saved}, not at {list(eos_ids)}", where=str(folder))
    ids = _probe_ids(model, tokenizer)[0].to(next(model.parameters()).device)
    new = _new_tokens(positions(model.config))
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, use_cache=True
    )[0, ids.shape[1] :].tolist()
    if any(i in eos_ids for i in out[:-1]):
        raise RunError("the saved model generates on after its end-of-sequence token", where=str(folder))
    return "stop" if out and out[-1] in eos_ids else "length"


def sync_all(folder: Path) -> int:
    """Bring all files to the disk; returns their size in bytes."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    for path in files:
        sync_file(path)
    for inner in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_folder(inner)
    return sum(p.stat().st_size for p in files)
