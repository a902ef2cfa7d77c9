"""LoRA adapters: add them to a model, select the active one, continue training one, check whether one can be merged."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import MissingExtra, ModelError
from posttrain.models.resized_embeddings import resize_embeddings
from posttrain.recipe.sections import Lora

if TYPE_CHECKING:
    from torch import Tensor

BASE = "base"  # adapter name of a role that uses the base model without an adapter
SINGLE = "default"  # PEFT's name for the only adapter of a model
ADAPTER_WEIGHT = re.compile(r"(\.lora_\w+)\.(\w+)(?=\.|$)")  # in a parameter's name: LoRA factor, adapter name
REFERENCE = "reference"  # frozen copy of the adapter that training started from, if it could not be merged
NOT_LOW_RANK = {
    "modules_to_save": "modules_to_save",
    "trainable_tokens_delta": "trainable_token_indices",
}  # module -> config key


def add(model: Any, lora: Lora, *, seed: int = 0, task: str = "CAUSAL_LM", without: Sequence[str] = ()) -> Any:
    """Return `model` with a fresh trainable adapter (PEFT), or with one per name in `lora.adapters`, the first of them
    active.

    B matrices are 0, so the policy starts as the base. task SEQ_CLS: the classification head is fully trained. without:
    modules that get no adapter.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    first, *others = lora.adapters or [SINGLE]
    parts = {part for path, _ in model.named_modules() for part in path.split(".")}
    if taken := next((name for name in (first, *others) if name in parts), None):
        raise ModelError(f"model.lora.adapters: modules of the model are called `{taken}`", hint="take another name")
    unfit = _list_unsupported_layers(model) if lora.targets == "all-linear" else []
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        exclude_modules=[*unfit, *without] or None,
        bias="none",
        task_type=task,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft: Any = get_peft_model(model, config, adapter_name=first)
        except ValueError as cause:
            raise ModelError(
                f"model.lora.targets {lora.targets}: {cause}", hint="all-linear suits every model"
            ) from cause
        for name in others:
            peft.add_adapter(name, copy.deepcopy(config))
    keep_trainable(peft)
    return peft


def names_of(model: Any) -> tuple[str, ...]:
    """Return the names of a PEFT model's trained adapters, in the recipe's order; () for a model without adapters."""
    return tuple(name for name in getattr(model, "peft_config", ()) if name != REFERENCE)


def activate(model: Any, name: str | None = None) -> None:
    """Select the active adapter: that of the given name, or the first. All adapters stay trainable.

    Does nothing to a model with fewer than two adapters.
    """
    known = names_of(model)
    name = name or (known[0] if known else None)
    if len(known) > 1 and model.active_adapter != name:
        model.set_adapter(name)
        keep_trainable(model)


@contextlib.contextmanager
def use(model: Any, name: str | None) -> Iterator[None]:
    """Context in which the adapter of that name, or the first, is active; with the name `base`, no adapter is."""
    if name != BASE:
        activate(model, name)
        yield
        return
    try:
        with model.disable_adapter():
            yield
    finally:
        keep_trainable(model)


def keep_trainable(model: Any) -> None:
    """Set requires_grad on the weights of all adapters: PEFT clears it on inactive ones."""
    for parameters in parameters_by_adapter(model).values():
        for parameter in parameters:
            parameter.requires_grad_(True)


def parameters_by_adapter(model: Any) -> dict[str, list[Any]]:
    """Return the weights of each trained adapter, for a model with several adapters; {} for a model with fewer."""
    by_adapter: dict[str, list[Any]] = {name: [] for name in names_of(model)}
    if len(by_adapter) < 2:
        return {}
    for path, parameter in model.named_parameters():
        if (match := ADAPTER_WEIGHT.search(path)) and match[2] in by_adapter:
            by_adapter[match[2]].append(parameter)
    return by_adapter


READ_BY_SCAN = ("x_proj", "dt_proj", "out_proj")  # linear layers of a Mamba mixer whose weights the scan reads


def _list_unsupported_layers(model: Any) -> list[str]:
    """Return names of linear layers that cannot carry an adapter.

    These are layers that return something other than a matrix product (routers of experts), and layers of a Mamba mixer
    whose weights are passed to its scan, bypassing an adapter.
    """
    return [*_list_router_layers(model), *_list_scan_layers(model)]


def _list_scan_layers(model: Any) -> list[str]:
    """Return layers whose weights a state-space mixer (it has a convolution, decays `A_log` and a skip `D`) reads
    directly.
    """
    mixers = [name for name, m in model.named_modules() if all(hasattr(m, key) for key in ("conv1d", "A_log", "D"))]
    known = dict(model.named_modules())
    return [layer for name in mixers for key in READ_BY_SCAN if (layer := f"{name}.{key}") in known]


def _list_router_layers(model: Any) -> list[str]:
    """Return linear layers that return something other than a matrix product: routers of experts, where LoRA fails."""
    from torch import nn

    custom = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).__module__.startswith("transformers.models.")
        and type(module).forward is not nn.Linear.forward
    ]
    return [name for name, module in custom if not _is_product(module)]


def _is_product(linear: Any) -> bool:
    """Return whether a linear layer returns [N, out_features] for an input [N, in_features]."""
    import torch

    weight = linear.weight
    try:
        with torch.no_grad():
            found = linear(torch.zeros(2, weight.shape[1], dtype=weight.dtype, device=weight.device))
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(found, torch.Tensor) and tuple(found.shape) == (2, weight.shape[0])


def continue_from(model: Any, folder: Path) -> Any:
    """Load the adapter in `folder` as the trainable adapter, and again as the frozen adapter `reference`.

    For a 4-bit base, into which nothing can be merged: the reference policy is the base with the old adapter.
    """
    peft = _load_adapter(model, folder, trainable=True)
    try:
        peft.load_adapter(str(folder), adapter_name=REFERENCE, is_trainable=False)
    except (ValueError, RuntimeError) as cause:  # PEFT supports at most one adapter with biases
        raise ModelError(
            f"the adapter cannot be trained further on a 4-bit base: {cause}",
            where=str(folder),
            hint="leave out model.quantize: the adapter is then merged into the base",
        ) from cause
    peft.set_adapter("default")
    for name, parameter in peft.named_parameters():
        if f".{REFERENCE}." in name:
            parameter.requires_grad_(False)
    return peft


def load_frozen(model: Any, folder: Path) -> Any:
    """Return the base with the adapter in `folder` loaded for inference."""
    return _load_adapter(model, folder, trainable=False)


def _load_adapter(model: Any, folder: Path, *, trainable: bool) -> Any:
    """Load an adapter onto the base, which is resized if the adapter needs it. Raises ModelError if weights are
    missing.
    """
    from peft import PeftModel

    resize_embeddings(model, folder)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            return PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
    except (ValueError, RuntimeError, OSError, KeyError, IndexError, TypeError, UserWarning) as cause:
        raise ModelError(f"the adapter {folder} does not fit its base: {cause}") from cause


# PEFT adapter types that do not change weights, so that no plain model computes the same.
_NOT_WEIGHT_CHANGES = (
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE", "ADAPTION_PROMPT"),
    *("XLORA", "POLY"),
)


def check_mergeable(folder: Path) -> None:
    """Raise ModelError if an adapter's configuration shows that it cannot be merged into its base."""
    config = json.loads((folder / "adapter_config.json").read_text())
    what = f"an adapter of type {config.get('peft_type')}" if config.get("peft_type") in _NOT_WEIGHT_CHANGES else ""
    what = "an adapter with alora_invocation_tokens" if config.get("alora_invocation_tokens") else what
    if what:
        raise ModelError(
            f"{what} does more than change weights, and cannot be merged into its base",
            where=str(folder),
            hint="generate with it in PEFT; posttrain supports LoRA and other adapters that change weights",
        )


def causal_of(model: Any) -> Any:
    """Return the language model under its adapters, which stay active; the model itself if it has none."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def backbone(causal: Any) -> Any:
    """Return the model below the output head: token ids in, hidden states out. Raises ModelError if there is none."""
    below = causal.base_model
    if below is causal:  # the class names a submodule that it does not have (Llama 4)
        below = getattr(causal, "model", None)
    if below is None:
        raise ModelError(f"{type(causal).__name__} does not expose the model below its output head")
    return below


def layers_of(base: Any) -> dict[str, Any]:
    """Return the layers with an adapter of the model under a PEFT model, by name."""
    return {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}


def layers_by_weight(base: Any) -> dict[str, Any]:
    """Return `layers_of` keyed by the names that the changed weights have without adapters."""
    return {f"{strip_base_layer(name)}.{_weight_name(layer)}": layer for name, layer in layers_of(base).items()}


def _weight_name(layer: Any) -> str:
    """Return the name of the changed weight within its module; adapters of experts store it."""
    return str(getattr(layer, "parameter_name", "weight"))


def strip_base_layer(name: str) -> str:
    """Return the name that a weight or module of the base has without adapters; PEFT may nest several around one
    module.
    """
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)


def merge_into_weight(layer: Any, weight: Tensor, adapter: str = "default") -> Tensor:
    """Return a layer's dense base weight plus LoRA's product, summed in float32 and rounded to the weight's type.

    The layer is not changed. Raises ModelError if the adapter is more than a sum.
    """
    if more := _find_extra_term(layer, adapter):
        raise _make_merge_error(more)
    return (weight.float() + layer.get_delta_weight(adapter).float()).to(weight.dtype)


def adapts_experts(base: Any) -> bool:
    """Return whether an adapter of the model under a PEFT model is on experts, which are one tensor per layer."""
    return any(_weight_name(layer) != "weight" for layer in layers_of(base).values())


def check_plain_lora(base: Any, adapter: str = "default") -> None:
    """Check that `merge_into_weight`, layer by layer, gives what the PEFT model computes. Raises ModelError if not."""
    parameters = dict(base.named_parameters(remove_duplicate=False))
    uses = Counter(map(id, parameters.values()))
    layers = layers_of(base)
    for more in filter(None, (_find_extra_term(layer, adapter) for layer in layers.values())):
        raise _make_merge_error(more)
    for name in parameters:
        kind = name.split(f".{adapter}")[0].rpartition(".")[2]
        if kind in NOT_LOW_RANK:
            raise _make_merge_error(NOT_LOW_RANK[kind])
    for name, layer in layers.items():
        if uses[id(getattr(layer.get_base_layer(), _weight_name(layer), None))] != 1:
            raise _make_merge_error(f"a part on {name}, whose weight is tied to another or not the layer's own,")


def is_plain_lora(layer: Any, adapter: str = "default") -> bool:
    """Return whether `merge_into_weight` gives what the layer computes."""
    return _find_extra_term(layer, adapter) is None


def is_merged_by_weight(model: Any) -> bool:
    """Return whether each trained adapter can be merged weight by weight (`merge_into_weight`).

    True if all trained weights are LoRA factors, their products are added to the base weights, and no changed weight is
    tied to another.
    """
    base = model.get_base_model()
    keys = getattr(base, "all_tied_weights_keys", None) or {}
    tied = {*keys, *keys.values()}
    factors = all(ADAPTER_WEIGHT.search(name) for name, p in model.named_parameters() if p.requires_grad)
    sums = all(is_plain_lora(layer, name) for layer in layers_of(base).values() for name in names_of(model))
    return factors and sums and tied.isdisjoint(layers_by_weight(base))


def _make_merge_error(more: str) -> ModelError:
    return ModelError(
        f"an adapter with {more} cannot be merged into its base here",
        hint="save it separately; the transformers engine generates with it unmerged",
    )


def _find_extra_term(layer: Any, adapter: str) -> str | None:
    """Return PEFT's name for what a layer computes besides B A x; None if nothing."""
    if getattr(layer, "use_dora", {}).get(adapter):
        return "use_dora"
    if getattr(layer, "lora_bias", {}).get(adapter):
        return "lora_bias"
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    return None if variant is None else type(variant).__name__


def is_adapter(folder: Path) -> bool:
    """Return whether the folder holds a PEFT adapter (transformers uses the same file as the criterion)."""
    return (folder / "adapter_config.json").is_file()


def base_of(folder: Path) -> str:
    """Return the base model that an adapter directory names. Raises ModelError if it names none."""
    base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if not base:
        raise ModelError(
            "names no base model (base_model_name_or_path)",
            where=str(folder / "adapter_config.json"),
            hint="the base of this run's adapter is not stored separately: use the run's final/, which holds both",
        )
    return str(base)


def require_peft() -> None:
    """Raise MissingExtra if PEFT is not installed."""
    import importlib.util

    if importlib.util.find_spec("peft") is None:
        raise MissingExtra("peft", "LoRA", "train")


def check_continue(folder: Path | None, lora: Lora, name: str) -> None:
    """Raise ModelError for `lora.continue` if the model is not an adapter, or has another shape than the recipe's.

    folder: where the model is, None for `tiny` and hub ids.
    """
    if not lora.continue_:
        return
    if folder is None or not is_adapter(folder):
        merged = folder is not None and is_adapter(folder / "adapter")
        raise ModelError(
            f"model.lora.continue: {name} is not an adapter",
            hint="it is a base with its adapter merged in: remove `continue` to train a fresh adapter on it"
            if merged
            else "name the adapter's directory in model.path, or remove `continue` for a fresh adapter",
        )
    check_same_shape(folder, lora)


def check_same_shape(folder: Path, lora: Lora) -> None:
    """Raise ModelError if the recipe asks for another rank, alpha or dropout than the adapter that it continues."""
    saved = json.loads((folder / "adapter_config.json").read_text())
    wanted = {"rank": ("r", lora.rank), "alpha": ("lora_alpha", lora.alpha), "dropout": ("lora_dropout", lora.dropout)}
    for key, (theirs, value) in wanted.items():
        if key in lora.model_fields_set and saved.get(theirs) != value:
            raise ModelError(
                f"model.lora.{key} is {value}, but the adapter to continue, {folder}, has {saved.get(theirs)}",
                hint=f"write {saved.get(theirs)}, or start from the base",
            )
