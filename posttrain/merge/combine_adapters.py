"""`merge_method: lora_combine`: combines several LoRA adapters of one base into one.

The base is only loaded to verify the result.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain import registry, terminal
from posttrain.errors import MergeError, ModelError, RunError, count_noun
from posttrain.merge.arguments import Arguments, TensorPosition
from posttrain.merge.layers import count_layers, layer_of
from posttrain.merge.lora import Factors, distance, scaling
from posttrain.models import adapters
from posttrain.models.load import load
from posttrain.models.model_paths import Place, locate
from posttrain.recipe.sections import Model
from posttrain.recipe.stages import MergeRecipe
from posttrain.run.atomic_io import explain_write_errors, put_in_place, sync_file, write_json
from posttrain.run.directory import RunDirectory

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PROBE = "17 + 25 = 42, because 17 + 20 = 37 and 37 + 5 = 42."
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq")  # initializations that subtract the adapter from the base
# Config keys of what an adapter may contain besides B A -> the value that means "not used"
_UNUSED_FEATURES: dict[str, Any] = {
    **{"use_dora": False, "bias": "none", "lora_bias": False},
    **dict.fromkeys(("modules_to_save", "trainable_token_indices", "alora_invocation_tokens", "layer_replication")),
}
_FACTOR = re.compile(r"\.lora_(embedding_)?A(\.weight)?$")


@dataclass(frozen=True)
class Adapter:
    """One input adapter. modules: name of the factor A in its file -> the module's factors, in float32."""

    name: str
    folder: Path
    base: Place
    config: dict[str, Any]
    modules: dict[str, Factors]
    dtype: torch.dtype


def run(recipe: MergeRecipe, directory: RunDirectory, companions: Any) -> dict[str, Any]:
    """Combine the adapters, write into a temporary folder, load the result on its base, rename the folder.

    companions: function that returns the tokenizer files of a folder, which are copied. Raises MergeError for adapters
    of different bases or modules, and for adapters with more than the factors B and A.
    """
    started = time.perf_counter()
    inputs = [open_adapter(model.model, recipe.base_dir) for model in recipe.models]
    check_adapters(inputs, directory.final)
    combined, shares = combine_modules(recipe, inputs)
    gap, norm = compute_distance_from_sum(recipe, inputs, combined)
    if norm == 0:
        raise MergeError("the combined adapter is zero: the products B A are 0 or cancel")
    partial = directory.path / "final.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with explain_write_errors(partial):
            partial.mkdir(parents=True)
            for file in companions(inputs[0].folder):
                if file.is_file():
                    shutil.copy2(file, partial / file.name)
            ranks = write_adapter(partial, combined, inputs[0], _output_dtype(recipe, inputs))
            probe = verify_adapter(partial, inputs[0], recipe.base_dir)
            counts = {str(rank): count for rank, count in sorted(Counter(ranks.values()).items())}
            summary = {
                "model": str(directory.final),
                "merge_method": recipe.merge_method,
                "parameters": rule_arguments(recipe).params(_position("", inputs)),
                "base_model": adapters.base_of(inputs[0].folder),
                "models": [
                    {"model": x.name, "folder": str(x.folder), "weight": weight}
                    for x, weight in zip(inputs, shares, strict=True)
                ],
                "modules": len(combined),
                "ranks": counts,
                "norm": norm,
                "relative_distance_from_sum": gap / norm,
                "probe": probe,
                "seconds": round(time.perf_counter() - started, 2),
            }
            write_json(partial / "merge_report.json", summary)
        put_in_place(partial, directory.final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    ranks_text = ", ".join(f"{rank} ({count_noun(count, 'module')})" for rank, count in counts.items())
    terminal.note(f"combined {count_noun(len(inputs), 'adapter')} into {directory.final}: rank {ranks_text}")
    return summary


def open_adapter(name: str, base_dir: Path) -> Adapter:
    """Read one adapter. Raises MergeError if it is not a plain LoRA adapter, or is incomplete or not finite."""
    place = locate(name, base_dir)
    if place.kind != "adapter" or place.path is None:
        raise MergeError(
            f"{name} is not an adapter directory: it has no {CONFIG}",
            hint="lora_combine takes adapters only; merge whole models with another method",
        )
    config = _read_config(place.path)
    if not (place.path / WEIGHTS).is_file():
        raise MergeError(f"no {WEIGHTS}", where=str(place.path), hint="save the adapter again with a current PEFT")
    try:
        tensors = load_file(place.path / WEIGHTS)
    except Exception as cause:  # safetensors raises a Rust error without a class of its own
        raise MergeError(f"unreadable: {cause}", where=str(place.path / WEIGHTS)) from cause
    base = locate(adapters.base_of(place.path), base_dir)
    kinds = {tensor.dtype for tensor in tensors.values()}
    return Adapter(
        name, place.path, base, config, _read_factors(tensors, config, place.path), max(kinds, key=_itemsize)
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises MergeError unless it describes a plain LoRA adapter."""
    try:
        config = dict(json.loads((folder / CONFIG).read_text()))
    except ValueError as cause:
        raise MergeError(f"unreadable: {cause}", where=str(folder / CONFIG)) from cause
    if config.get("peft_type") != "LORA":
        raise MergeError(f"an adapter of the kind {config.get('peft_type')}, and only LORA is B A", where=str(folder))
    for key, unused in _UNUSED_FEATURES.items():
        if config.get(key, unused) not in (unused, None, []):
            raise MergeError(
                f"{key}: {config[key]} is more than B A and cannot be combined",
                where=str(folder / CONFIG),
                hint="merge each into its base with `merge_method: linear`, and combine the models",
            )
    start = str(config.get("init_lora_weights"))
    if start.startswith(_BASE_CHANGING_INITS):
        raise MergeError(
            f"init_lora_weights: {start} changed the base that this adapter fits",
            where=str(folder / CONFIG),
            hint="save it as plain LoRA (PEFT: save_pretrained with path_initial_model_for_weight_conversion)",
        )
    return config


def _read_factors(tensors: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> dict[str, Factors]:
    """Return the factors A and B of every module. Raises MergeError for missing, inconsistent or additional tensors."""
    factors: dict[str, Factors] = {}
    used: set[str] = set()
    for name in sorted(filter(_FACTOR.search, tensors)):
        factor_b = factor_b_name(name)
        if factor_b not in tensors:
            raise MergeError(f"{factor_b} is missing", where=str(folder))
        a, b = tensors[name].float(), tensors[factor_b].float()
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise MergeError(f"{name} {list(a.shape)} and {list(b.shape)} are not A and B", where=str(folder))
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise MergeError(f"{name} or {factor_b} has NaN or infinite values", where=str(folder))
        ranks = config.get("rank_pattern") or {}
        if a.shape[0] != (rank := ranks.get(_find_pattern(ranks, module_name(name)), config["r"])):
            raise MergeError(
                f"{name} has {a.shape[0]} rows, and the adapter's rank there is {rank}",
                where=str(folder),
                hint="adapters on the parameters of experts cannot be combined: merge each into its base, and those",
            )
        alphas = config.get("alpha_pattern") or {}
        alpha = alphas.get(_find_pattern(alphas, module_name(name)), config["lora_alpha"])
        factors[name] = Factors(a, b, scaling(alpha, a.shape[0], rslora=bool(config.get("use_rslora"))))
        used |= {name, factor_b}
    if not factors or used != tensors.keys():
        unknown = sorted(tensors.keys() - used)
        raise MergeError(
            f"tensors that are neither A nor B: {', '.join(unknown[:5]) or 'nothing else'}",
            where=str(folder),
            hint="save it in PEFT with save_embedding_layers=False"
            if any("embed" in n or "head" in n for n in unknown)
            else "",
        )
    return factors


def factor_b_name(name: str) -> str:
    """Return the name of the factor B that belongs to a factor A."""
    return name.replace(".lora_A", ".lora_B").replace(".lora_embedding_A", ".lora_embedding_B")


def module_name(name: str) -> str:
    """Return the module name of a factor, as PEFT's patterns name it."""
    return _FACTOR.sub("", name).removeprefix("base_model.model.")


def _find_pattern(patterns: Mapping[str, Any], module: str) -> str:
    """Return the key for a module by PEFT's rule: the first regular expression that matches the end of its name."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def check_adapters(inputs: Sequence[Adapter], final: Path) -> None:
    """Check that the adapters share base, modules and shapes, and that the output is not an input.

    Raises MergeError otherwise.
    """
    first = inputs[0]
    for other in inputs[1:]:
        pair = f"{first.name} and {other.name}"
        for what, ours, theirs in (
            ("bases", first.base.path or first.base.name, other.base.path or other.base.name),
            ("revisions of the base", first.config.get("revision"), other.config.get("revision")),
            ("fan_in_fan_out", bool(first.config.get("fan_in_fan_out")), bool(other.config.get("fan_in_fan_out"))),
        ):
            if ours != theirs:
                raise MergeError(f"{pair} have different {what}: {ours} and {theirs}")
        if differing := sorted(first.modules.keys() ^ other.modules.keys()):
            listed = ", ".join(module_name(name) for name in differing[:5]) + (", ..." if len(differing) > 5 else "")
            raise MergeError(f"{pair} have different targets: only one of them is on {listed}")
        for name, (a, b, _) in first.modules.items():
            x, y = other.modules[name].a, other.modules[name].b
            if (a.shape[1], b.shape[0]) != (x.shape[1], y.shape[0]):
                raise MergeError(f"{pair} do not fit at {module_name(name)}: they are of models of different widths")
    for each in inputs:
        if final.resolve() == each.folder or final.resolve() in each.folder.parents:
            raise MergeError(f"the output {final} is or contains the input {each.name}", hint="give another --output")


def rule_arguments(recipe: MergeRecipe) -> Arguments:
    """Return the arguments of the rule `lora_combine` from a recipe."""
    rule = registry.get("merge", recipe.merge_method)
    return Arguments.of(rule, [recipe.parameters], [model.parameters for model in recipe.models])


def _position(name: str, inputs: Sequence[Adapter]) -> TensorPosition:
    """Return the position of a module, for settings that vary by layer or by name."""
    layer = layer_of(name)
    count = count_layers(inputs[0].modules)[layer[0]] if layer else 1
    depth = layer[1] / (count - 1) if layer and count > 1 else float(layer is not None)
    return TensorPosition(name, [name] * len(inputs), depth)


def combine_modules(recipe: MergeRecipe, inputs: Sequence[Adapter]) -> tuple[dict[str, Factors], list[float]]:
    """Return the combined factors by module, and the weights of the first module.

    Raises MergeError that names the module.
    """
    settings = rule_arguments(recipe)
    combined = {}
    for name in inputs[0].modules:
        own = [each.modules[name] for each in inputs]
        try:
            combined[name] = settings.rule.function(
                own, settings.weights(_position(name, inputs)), **settings.params(_position(name, inputs))
            )
        except MergeError as cause:
            problem = cause.problems[0]
            raise MergeError(f"{module_name(name)}: {problem.what}", hint=problem.hint) from cause
    return combined, settings.weights(_position(next(iter(inputs[0].modules)), inputs))


def compute_distance_from_sum(
    recipe: MergeRecipe, inputs: Sequence[Adapter], combined: Mapping[str, Factors]
) -> tuple[float, float]:
    """Return (distance from the exact weighted sum, norm of that sum), over all modules together."""
    settings = rule_arguments(recipe)
    gaps = [
        distance([each.modules[name] for each in inputs], settings.weights(_position(name, inputs)), made)
        for name, made in combined.items()
    ]
    return math.hypot(*(gap for gap, _ in gaps)), math.hypot(*(norm for _, norm in gaps))


def write_adapter(folder: Path, combined: Mapping[str, Factors], first: Adapter, dtype: torch.dtype) -> dict[str, int]:
    """Write weights and config with alpha = rank in each module, so that its scale is 1; return the ranks by module.

    Raises MergeError for weights that overflow the dtype, RunError if the written file does not read back.
    """
    tensors = {}
    for name, (a, b, scale) in combined.items():
        tensors[name], tensors[factor_b_name(name)] = (scale * a).to(dtype).contiguous(), b.to(dtype).contiguous()
    if overflowing := next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None):
        raise MergeError(f"the combined {overflowing} overflows {dtype}", hint="set `dtype: bfloat16` or `float32`")
    ranks = {module_name(name): factors.a.shape[0] for name, factors in combined.items()}
    most_common = Counter(ranks.values()).most_common(1)[0][0]
    other_ranks = {re.escape(module): rank for module, rank in ranks.items() if rank != most_common}
    config = {
        **first.config,
        "r": most_common,
        "lora_alpha": most_common,
        "rank_pattern": other_ranks,
        "alpha_pattern": other_ranks,
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    sync_file(folder / WEIGHTS)
    stored = load_file(folder / WEIGHTS)
    if stored.keys() != tensors.keys() or any(not torch.equal(stored[name], tensors[name]) for name in tensors):
        raise RunError("the written file does not read back", where=str(folder / WEIGHTS))
    return ranks


@torch.no_grad()
def verify_adapter(folder: Path, first: Adapter, base_dir: Path) -> dict[str, float]:
    """Load the adapter on its base as a run would; return the largest logit and the largest gap to the base's logits.

    Raises RunError if the logits are not finite, MergeError if the base cannot be loaded.
    """
    try:
        before = load(Model(path=adapters.base_of(first.folder), device="cpu"), base_dir)
        after = load(Model(path=str(folder), device="cpu"), base_dir)
    except ModelError as cause:
        raise MergeError(f"the result cannot be loaded on its base: {cause}") from cause
    ids = torch.tensor([before.tokenizer(PROBE)["input_ids"][: before.window]])
    old, new = (each.model.eval()(input_ids=ids).logits.float() for each in (before, after))
    if not torch.isfinite(new).all():
        raise RunError("the logits of the base with the combined adapter are not finite", where=str(folder))
    return {"logit_gap": float((new - old).abs().max()), "largest_logit": float(new.abs().max())}


def _itemsize(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _output_dtype(recipe: MergeRecipe, inputs: Sequence[Adapter]) -> torch.dtype:
    """Return the dtype to write: the recipe's, else the widest of the inputs."""
    return getattr(torch, recipe.dtype) if recipe.dtype else max((x.dtype for x in inputs), key=_itemsize)
