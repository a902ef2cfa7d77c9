"""LoRA: put adapters on a model, say which of them it computes with, go on from one, merge one."""

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
from posttrain.models.resized_embeddings import resize_for
from posttrain.recipe.sections import Lora

if TYPE_CHECKING:
    from torch import Tensor

BASE = "base"  # as a role's adapter: the base without any
SINGLE = "default"  # what PEFT calls the adapter of a model that has one
ADAPTER_WEIGHT = re.compile(r"(\.lora_\w+)\.(\w+)(?=\.|$)")  # of a parameter's name: the factor, and the adapter
REFERENCE = "reference"  # frozen copy of the adapter that training started from, where it could not be merged
WHOLE = {"modules_to_save": "modules_to_save", "trainable_tokens_delta": "trainable_token_indices"}  # modules: keys


def add(model: Any, lora: Lora, *, seed: int = 0, task: str = "CAUSAL_LM", without: Sequence[str] = ()) -> Any:
    """`model` with a fresh trainable adapter (PEFT), or one of each name in `lora.adapters`, the first of which is
    active: B matrices are 0, so the policy starts as the base.

    task SEQ_CLS: the classification head is trained as a whole. without: modules that get none.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    first, *others = lora.adapters or [SINGLE]
    parts = {part for path, _ in model.named_modules() for part in path.split(".")}
    if taken := next((name for name in (first, *others) if name in parts), None):
        raise ModelError(f"model.lora.adapters: modules of the model are called `{taken}`", hint="take another name")
    unfit = _unfit_layers(model) if lora.targets == "all-linear" else []
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
    """The trained adapters of a PEFT model, in the recipe's order; () of a model without adapters."""
    return tuple(name for name in getattr(model, "peft_config", ()) if name != REFERENCE)


def activate(model: Any, name: str | None = None) -> None:
    """Compute with the adapter of that name, or the first, from now on; all of them stay trainable. Does nothing to a
    model with fewer than two."""
    known = names_of(model)
    name = name or (known[0] if known else None)
    if len(known) > 1 and model.active_adapter != name:
        model.set_adapter(name)
        keep_trainable(model)


@contextlib.contextmanager
def use(model: Any, name: str | None) -> Iterator[None]:
    """Inside, compute with the adapter of that name, or the first; or with none: `base`."""
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
    """Let every one of several adapters have a gradient: PEFT takes it from those that are not active."""
    for own in parameters_by_adapter(model).values():
        for parameter in own:
            parameter.requires_grad_(True)


def parameters_by_adapter(model: Any) -> dict[str, list[Any]]:
    """The weights of each trained adapter, of a model with several; {} of one with fewer."""
    found: dict[str, list[Any]] = {name: [] for name in names_of(model)}
    if len(found) < 2:
        return {}
    for path, parameter in model.named_parameters():
        if (match := ADAPTER_WEIGHT.search(path)) and match[2] in found:
            found[match[2]].append(parameter)
    return found


READ_BY_SCAN = ("x_proj", "dt_proj", "out_proj")  # in a mixer of Mamba's kind


def _unfit_layers(model: Any) -> list[str]:
    """Names of linear layers by class on which no adapter can be: those that return something else than a product
    (routers of experts), and those of a Mamba mixer whose weights are handed to its scan, past an adapter."""
    return [*_no_plain_layers(model), *_layers_of_scans(model)]


def _layers_of_scans(model: Any) -> list[str]:
    """Layers that a state-space mixer (one with a convolution, decays `A_log` and a skip `D`) may only read."""
    mixers = [name for name, m in model.named_modules() if all(hasattr(m, key) for key in ("conv1d", "A_log", "D"))]
    known = dict(model.named_modules())
    return [layer for name in mixers for key in READ_BY_SCAN if (layer := f"{name}.{key}") in known]


def _no_plain_layers(model: Any) -> list[str]:
    """Linear layers by class that return something else than a product: routers of experts, around which LoRA fails."""
    from torch import nn

    own = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).__module__.startswith("transformers.models.")
        and type(module).forward is not nn.Linear.forward
    ]
    return [name for name, module in own if not _is_product(module)]


def _is_product(linear: Any) -> bool:
    """Whether a linear layer gives one number an output, for rows of numbers."""
    import torch

    weight = linear.weight
    try:
        with torch.no_grad():
            found = linear(torch.zeros(2, weight.shape[1], dtype=weight.dtype, device=weight.device))
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(found, torch.Tensor) and tuple(found.shape) == (2, weight.shape[0])


def continue_from(model: Any, folder: Path) -> Any:
    """The adapter in `folder` as the trainable one, and once more as the frozen adapter `reference`.

    For a 4-bit base, into which nothing may be merged: the reference policy is the base with the old adapter.
    """
    peft = _load(model, folder, trainable=True)
    try:
        peft.load_adapter(str(folder), adapter_name=REFERENCE, is_trainable=False)
    except (ValueError, RuntimeError) as cause:  # PEFT holds one adapter with biases at most
        raise ModelError(
            f"the adapter cannot be trained on over a 4-bit base: {cause}",
            where=str(folder),
            hint="leave model.quantize out: it is merged into the base then",
        ) from cause
    peft.set_adapter("default")
    for name, parameter in peft.named_parameters():
        if f".{REFERENCE}." in name:
            parameter.requires_grad_(False)
    return peft


def load_frozen(model: Any, folder: Path) -> Any:
    """The base with the adapter in `folder`, for generation."""
    return _load(model, folder, trainable=False)


def _load(model: Any, folder: Path, *, trainable: bool) -> Any:
    """The base, resized where the adapter needs it, under the adapter. All of the adapter's weights must be there."""
    from peft import PeftModel

    resize_for(model, folder)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            return PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
    except (ValueError, RuntimeError, OSError, KeyError, IndexError, TypeError, UserWarning) as cause:
        raise ModelError(f"the adapter {folder} does not fit its base: {cause}") from cause


# Kinds of PEFT adapter that are no change of weights: no plain model computes the same.
_OTHER = (
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE", "ADAPTION_PROMPT"),
    *("XLORA", "POLY"),
)


def check_mergeable(folder: Path) -> None:
    """Raises ModelError for an adapter whose configuration says that it cannot be merged into its base."""
    config = json.loads((folder / "adapter_config.json").read_text())
    what = f"an adapter of the kind {config.get('peft_type')}" if config.get("peft_type") in _OTHER else ""
    what = "an adapter with alora_invocation_tokens" if config.get("alora_invocation_tokens") else what
    if what:
        raise ModelError(
            f"{what} is more than other weights, and cannot be merged into its base",
            where=str(folder),
            hint="generate with it in PEFT; posttrain takes LoRA and other adapters that change weights",
        )


def causal_of(model: Any) -> Any:
    """The language model under its adapters, which stay active; the model itself where it has none."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def backbone(causal: Any) -> Any:
    """What stands below the head: ids in, hidden states out. Raises ModelError where nothing says what that is."""
    below = causal.base_model
    if below is causal:  # its class names a part that it has not (Llama 4)
        below = getattr(causal, "model", None)
    if below is None:
        raise ModelError(f"{type(causal).__name__} does not say what stands below its output head")
    return below


def layers_of(base: Any) -> dict[str, Any]:
    """The layers of the model under a PEFT model that carry an adapter, by name."""
    return {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}


def layers_by_weight(base: Any) -> dict[str, Any]:
    """`layers_of` by the names that the weights which they change have without adapters."""
    return {f"{without_layers(name)}.{_leaf(layer)}": layer for name, layer in layers_of(base).items()}


def _leaf(layer: Any) -> str:
    """What the changed weight is called in its module; adapters of experts name it."""
    return str(getattr(layer, "parameter_name", "weight"))


def without_layers(name: str) -> str:
    """The name that a weight or module of the base has without adapters; PEFT may put several around one module."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)


def merge_into_weight(layer: Any, weight: Tensor, adapter: str = "default") -> Tensor:
    """A layer's dense base weight with LoRA's product added: the sum in float32, rounded to the weight's own type.

    The layer is not changed. Raises ModelError for what is more than a sum.
    """
    if more := _more_than_a_sum(layer, adapter):
        raise _not_a_sum(more)
    return (weight.float() + layer.get_delta_weight(adapter).float()).to(weight.dtype)


def on_experts(base: Any) -> bool:
    """Whether the adapter of the model under a PEFT model lies on experts, all of which are one tensor."""
    return any(_leaf(layer) != "weight" for layer in layers_of(base).values())


def check_addable(base: Any, adapter: str = "default") -> None:
    """Check that `merge_into_weight`, layer by layer, gives what the PEFT model computes. Raises ModelError."""
    parameters = dict(base.named_parameters(remove_duplicate=False))
    uses = Counter(map(id, parameters.values()))
    layers = layers_of(base)
    for more in filter(None, (_more_than_a_sum(layer, adapter) for layer in layers.values())):
        raise _not_a_sum(more)
    for name in parameters:
        kind = name.split(f".{adapter}")[0].rpartition(".")[2]
        if kind in WHOLE:
            raise _not_a_sum(WHOLE[kind])
    for name, layer in layers.items():
        if uses[id(getattr(layer.get_base_layer(), _leaf(layer), None))] != 1:
            raise _not_a_sum(f"a part on {name}, whose weight is tied to another or not the layer's own,")


def is_sum(layer: Any, adapter: str = "default") -> bool:
    """Whether `merge_into_weight` gives what the layer computes."""
    return _more_than_a_sum(layer, adapter) is None


def merges_by_weight(model: Any) -> bool:
    """Whether each trained adapter is LoRA whose products are added to weights of their own (`merge_into_weight`):
    nothing else is trained, and no weight that it changes is tied to another."""
    base = model.get_base_model()
    keys = getattr(base, "all_tied_weights_keys", None) or {}
    tied = {*keys, *keys.values()}
    factors = all(ADAPTER_WEIGHT.search(name) for name, p in model.named_parameters() if p.requires_grad)
    sums = all(is_sum(layer, name) for layer in layers_of(base).values() for name in names_of(model))
    return factors and sums and tied.isdisjoint(layers_by_weight(base))


def _not_a_sum(more: str) -> ModelError:
    return ModelError(
        f"an adapter with {more} cannot be added to its base here",
        hint="save it apart; the transformers engine generates with it as it is",
    )


def _more_than_a_sum(layer: Any, adapter: str) -> str | None:
    """What a layer does beside B A x, in PEFT's words."""
    if getattr(layer, "use_dora", {}).get(adapter):
        return "use_dora"
    if getattr(layer, "lora_bias", {}).get(adapter):
        return "lora_bias"
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    return None if variant is None else type(variant).__name__


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a PEFT adapter (its presence decides in transformers, too)."""
    return (folder / "adapter_config.json").is_file()


def base_of(folder: Path) -> str:
    """The base model that an adapter directory names."""
    base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if not base:
        raise ModelError(
            "names no base model (base_model_name_or_path)",
            where=str(folder / "adapter_config.json"),
            hint="an adapter of a run whose base is not stored by itself: use the run's final/, which holds both",
        )
    return str(base)


def need_peft() -> None:
    """Raises MissingExtra where PEFT is not installed."""
    import importlib.util

    if importlib.util.find_spec("peft") is None:
        raise MissingExtra("peft", "LoRA", "train")


def check_start(folder: Path | None, lora: Lora, name: str) -> None:
    """Raises ModelError for `lora.continue` where the model is no adapter, or has another shape than the recipe's.

    folder: where the model is, None for `tiny` and ids of the hub.
    """
    if not lora.continue_:
        return
    if folder is None or not is_adapter(folder):
        merged = folder is not None and is_adapter(folder / "adapter")
        raise ModelError(
            f"model.lora.continue: {name} is no adapter to train on",
            hint="it is a base with its adapter merged in: remove `continue` for a fresh adapter on both"
            if merged
            else "name the adapter's directory in model.path, or remove `continue` for a fresh adapter",
        )
    check_same_shape(folder, lora)


def check_same_shape(folder: Path, lora: Lora) -> None:
    """An adapter that is trained on keeps its shape: a recipe that asks for another one is refused."""
    saved = json.loads((folder / "adapter_config.json").read_text())
    wanted = {"rank": ("r", lora.rank), "alpha": ("lora_alpha", lora.alpha), "dropout": ("lora_dropout", lora.dropout)}
    for key, (theirs, value) in wanted.items():
        if key in lora.model_fields_set and saved.get(theirs) != value:
            raise ModelError(
                f"model.lora.{key} is {value}, but the adapter {folder} that is trained on has {saved.get(theirs)}",
                hint=f"write {saved.get(theirs)}, or start from the base",
            )
