"""torch.compile for training passes only.

Each decoder layer is compiled separately: all layers of a model share one graph, and dynamic shapes let one compilation
serve every micro-batch. Attention over packed rows is part of the graph if there is a kernel for it (`attention`); row
by row attention stays outside, because the lengths would require a graph for every number of rows. Generation, probes
and saving run uncompiled, since the layers are switched only inside the context.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as symbolic_shapes
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import ModelError, RecipeError
from posttrain.recipe.sections import Model

Switch = Callable[[], AbstractContextManager[None]]


def check(section: Model, device: torch.device) -> None:
    """Raise RecipeError, before a model is loaded, if `model.compile` is set and no compiler is available."""
    if not section.compile:
        return
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++", "cl"]
    if not any(map(shutil.which, compilers)):
        raise RecipeError(
            "model.compile needs a C++ compiler, and none is on the PATH", hint="install g++, or leave it out"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise RecipeError("model.compile needs triton on a GPU", hint="pip install triton, or leave it out")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of a model. Raises ModelError for an architecture that does not mark them."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"{type(model).__name__} does not say which of its modules are layers")
    return list(layers)


def compile_layers(model: nn.Module, section: Model) -> Switch:
    """Return a function that opens a context in which the layers of `model` are compiled.

    A no-op unless the recipe asks for compilation. The backward pass belongs inside the context: gradient checkpointing
    runs the layers again.
    """
    if not section.compile:
        return nullcontext
    forwards = [(layer, torch.compile(layer.forward, dynamic=True)) for layer in layers_of(model)]
    forwards[0] = (forwards[0][0], _require_input_gradient(forwards[0][1]))
    return lambda: _use_compiled_layers(forwards)


def _require_input_gradient(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the first layer's input require a gradient, as the inputs of other layers do under an adapter.

    Otherwise the first layer would need a graph of its own, with the same compile time again. The gradient is not used.
    """

    @wraps(forward)
    def first(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()
        return forward(hidden_states, *args, **kwargs)

    return first


@contextmanager
def _use_compiled_layers(forwards: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Switch the layers to their compiled forwards, with duck shaping disabled.

    With duck shaping, torch treats sizes that happen to be equal in the first micro-batch (e.g. rows and head
    dimension) as equal forever, and the next micro-batch needs another graph: ten seconds of a step on a GPU.
    """
    try:
        for layer, forward in forwards:
            layer.forward = forward
        with symbolic_shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # made at import
            yield
    finally:
        for layer, _ in forwards:
            layer.__dict__.pop("forward", None)  # restores the class's forward
