"""Reference policy: the frozen starting point of a KL term.

With LoRA the reference costs nothing: it is the base without its adapter (or with a frozen second adapter). Full
training keeps a copy, on the GPU or, offloaded, in host memory. An offloaded copy is moved to the GPU as a whole, once
a step, and freed before the update begins: the copy is never larger than the gradients, which exist in the update only,
so moving it layer by layer would lower no peak, and would cost a transfer per micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.models import adapters
from posttrain.models import load as models
from posttrain.models.host_memory import copy_to_host
from posttrain.models.load import LoadedModel
from posttrain.recipe.rl_stage import BY_REFERENCE, RlRecipe
from posttrain.train import sharding
from posttrain.train.attention import enable_packing
from posttrain.train.weight_copy import WeightCopy

ReferencePolicy = Callable[[], AbstractContextManager[nn.Module]]


def reference_policy(loaded: LoadedModel, *, offload: bool = False) -> ReferencePolicy:
    """Return a function that opens a context in which the yielded model is the reference, in eval mode.

    Open the context under `torch.no_grad()`. offload: keep a copy of all weights in host memory between uses.
    """
    if loaded.is_lora:
        return lambda: _adapter_off(loaded.model)
    return _frozen_reference(frozen_copy(loaded.model, loaded.half), loaded.device, offload)


def named_reference(recipe: RlRecipe, policy: LoadedModel, *, images: bool = False) -> ReferencePolicy:
    """Like `reference_policy`, for the model `kl.reference`, in the policy's dtype and on its device.

    images: rows may have images. Raises ModelError if its tokens are not the policy's, or if it reads images
    differently.
    """
    assert recipe.kl.reference is not None
    teacher = models.load_companion(
        recipe.model,
        recipe.kl.reference,
        recipe.base_dir,
        policy.tokenizer,
        key="kl.reference",
        seed=recipe.run.seed,
        reader=policy.images if images else None,
    )
    half = policy.half if recipe.model.quantize is None else None
    enable_packing(teacher.model, policy.device)
    return _frozen_reference(_freeze(teacher.model, half), policy.device, recipe.model.offload_reference)


class RenewedReference(WeightCopy):
    """Reference that is renewed once: `first` before step `at` (from 1), then the policy at the start of that step.

    Only the trained weights are copied, at that step.
    """

    file = "reference.safetensors"

    def __init__(self, first: ReferencePolicy, model: nn.Module, at: int) -> None:
        self.first: ReferencePolicy | None = first
        self.model, self.at = model, at
        self.weights: dict[str, torch.Tensor] = {}

    def __call__(self) -> AbstractContextManager[nn.Module]:
        return self.in_place(self.model) if self.first is None else self.first()

    def begin_step(self, step: int) -> None:
        """Copy the policy's weights if step `step` (from 0) is the one."""
        if step + 1 == self.at:
            super().__init__(self.model)
            self.first = None

    def save(self, folder: Path) -> None:
        """Write the copy, if made, into a checkpoint folder."""
        if self.first is None:
            super().save(folder)

    def load(self, folder: Path) -> None:
        """Load the copy from a checkpoint folder, if it has one."""
        if (folder / self.file).is_file():
            super().__init__(self.model)
            super().load(folder)
            self.first = None


def describe_reference(recipe: RlRecipe, needs: Set[str], source: str) -> str:
    """Return one line about the reference of a run and its KL.

    needs: what the run's components read. source: the model in training.
    """
    if not needs & {*BY_REFERENCE}:
        return "reference model: none, because no term of the loss or the reward uses one"
    named = recipe.kl.reference
    which = f"{named} (kl.reference)" if named is not None else f"the starting policy ({source})"
    kl = f"; KL: {recipe.kl.use}, coef {recipe.kl.coef:g}, in the {recipe.kl.where}" if recipe.kl.coef else ""
    return f"reference: {which}{kl}"


def load_reference(recipe: RlRecipe, loaded: LoadedModel, *, images: bool = False) -> ReferencePolicy:
    """Return the reference of a run: the model `kl.reference`, or the current policy `loaded`; sharded if that is.

    images: rows may have images.
    """
    if recipe.kl.reference is not None:
        return named_reference(recipe, loaded, images=images)
    if loaded.is_sharded and not loaded.is_lora:
        model = sharding.load(recipe.model, recipe.base_dir, seed=recipe.run.seed).model
        enable_packing(model, loaded.device)
        return frozen_policy(model)
    first = reference_policy(loaded, offload=recipe.model.offload_reference)
    return first if recipe.kl.reset_at is None else RenewedReference(first, loaded.model, recipe.kl.reset_at)


def _frozen_reference(frozen: nn.Module, device: torch.device, offload: bool) -> ReferencePolicy:
    if not offload:
        return frozen_policy(frozen)
    _to_host(frozen, pinned=device.type == "cuda")
    return lambda: _move_to_device(frozen, device)


def frozen_policy(model: nn.Module) -> ReferencePolicy:
    """Freeze a second model that serves only as the reference; return it as a ReferencePolicy."""
    frozen = model.eval().requires_grad_(False)
    return lambda: nullcontext(frozen)


def frozen_copy(model: nn.Module, half: torch.dtype | None) -> nn.Module:
    """Return a copy without gradients, with linear weights in the half precision to which autocast casts them.

    This gives the same products with half the memory. Weights tied to embeddings stay, since embeddings are not cast.
    """
    return _freeze(copy.deepcopy(model), half)


def _freeze(model: nn.Module, half: torch.dtype | None) -> nn.Module:
    frozen = model.eval().requires_grad_(False)
    embeddings = {id(m.weight) for m in frozen.modules() if isinstance(m, nn.Embedding)}
    for module in frozen.modules():
        if half is not None and isinstance(module, nn.Linear) and id(module.weight) not in embeddings:
            module.to(half)
    return frozen


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _to_host(model: nn.Module, *, pinned: bool) -> None:
    tensors = _tensors(model)
    on_host = copy_to_host((t.data for t in tensors), pinned=True) if pinned else [t.data.cpu() for t in tensors]
    for tensor, data in zip(tensors, on_host, strict=True):
        tensor.data = data


@contextmanager
def _move_to_device(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Context manager in which the model is on `device`; restores its host tensors afterwards, without copying back."""
    host = [(tensor, tensor.data) for tensor in _tensors(model)]
    try:
        for tensor, data in host:
            tensor.data = data.to(device, non_blocking=True)
        with torch.no_grad():
            yield model
    finally:
        for tensor, data in host:
            tensor.data = data


@contextmanager
def _adapter_off(model: Any) -> Iterator[nn.Module]:
    """Context manager that yields the PEFT model with its trained adapter off, or replaced by adapter `reference`."""
    training = model.training
    model.eval()
    with torch.no_grad():
        try:
            if "reference" in model.peft_config:
                model.set_adapter("reference")
                yield model
            else:
                with model.disable_adapter():
                    yield model
        finally:
            if "reference" in model.peft_config:
                model.set_adapter("default")  # also makes it trainable again
                for name, parameter in model.named_parameters():
                    if ".reference." in name:
                        parameter.requires_grad_(False)
            adapters.keep_trainable(model)
            model.train(training)
