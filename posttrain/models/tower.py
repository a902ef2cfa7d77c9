"""The vision tower's part of a pass: features of the images that stand in its rows, in place of their pixels."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EVERY_PASS = (
    "images_since_update"  # an attribute of models of which `run_in_every_pass` was asked: whether some had any
)


@dataclass(frozen=True)
class Shown:
    """The images of a pass, as the tower reads them. counts: tokens of each; order: which of them stands at each of the
    places of images in the rows."""

    tensors: Mapping[str, Tensor]
    counts: Sequence[int]
    order: Sequence[int]


@dataclass(frozen=True)
class Features:
    """What `get_image_features` has made of the images of a pass, in place of their pixels: models of transformers
    before 5.19 take no features."""

    found: Any


def project_patches(model: nn.Module) -> None:
    """Have convolutions over whole patches (of Qwen's towers: Conv3d, whose stride is its kernel) computed as matrix
    products, in place. Their sums are the same; a GPU takes many times as long for the convolution in bfloat16."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d) and module.kernel_size == module.stride and module.groups == 1:
            module.forward = functools.partial(_project, module)  # type: ignore[method-assign]


def _project(conv: nn.Conv3d, patches: Tensor) -> Tensor:
    if patches.shape[2:] != conv.kernel_size or conv.padding != (0, 0, 0) or conv.dilation != (1, 1, 1):
        return conv._conv_forward(patches, conv.weight, conv.bias)
    return functional.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)[:, :, None, None, None]


def image_arguments(model: Any, shown: Shown) -> dict[str, Any]:
    """Arguments of a forward pass by which the model is given these images: their features, unless the tower runs
    within the pass. model: what is below the head, without adapters around it."""
    return _arguments(model, shown if runs_in_every_pass(model) else compute_features(model, shown))


def compute_features(model: Any, shown: Shown) -> Any:
    """Features of images as `get_image_features` gives them, at each of their places; each goes through the tower once,
    with a gradient of all places."""
    features = model.get_image_features(**shown.tensors, return_dict=True)
    if len(shown.order) > len(shown.counts):
        features.pooler_output = _reorder(features.pooler_output, shown)
        if layers := getattr(features, "deepstack_features", None):
            features.deepstack_features = [_reorder(layer, shown) for layer in layers]
    return features


def run_in_every_pass(model: Any, probe: Mapping[str, Tensor]) -> None:
    """Have each forward pass of the model run its tower once, within the pass; if its rows have no image, on a probe
    whose features count 0 times. Pixels that the model is given itself are images of its rows as well.

    Ranks that hold parts of the tower's weights bring them together when it runs, forward and backward: one that
    skipped it would leave the others waiting. model: what is below the head. probe: tensors of one image.
    """
    forward, features = model.forward, "mm_encoder_outputs" if takes_features(model) else "pixel_values"

    @functools.wraps(forward)
    def run(*args: Any, **given: Any) -> Any:
        shown = _shown_in(given.get(features))
        if shown is not None or given.get("pixel_values") is not None:
            setattr(model, EVERY_PASS, getattr(model, EVERY_PASS) or torch.is_grad_enabled())
            seen = {} if shown is None else _arguments(model, compute_features(model, shown))
            return forward(*args, **{**given, **seen})
        tensors = {name: value.to(model.device) for name, value in probe.items()}
        nothing = 0.0 * _sum(model.get_image_features(**tensors, return_dict=True))
        out = forward(*args, **given)
        out.last_hidden_state = out.last_hidden_state + nothing.to(out.last_hidden_state.dtype)
        return out

    model.forward = run
    setattr(model, EVERY_PASS, False)


def runs_in_every_pass(model: Any) -> bool:
    """Whether `run_in_every_pass` was asked of the model."""
    return hasattr(model, EVERY_PASS)


def take_images_seen(model: Any) -> bool:
    """Whether a pass with gradient has had images since this was last asked, of a model that runs its tower in all."""
    seen: bool = getattr(model, EVERY_PASS)
    setattr(model, EVERY_PASS, False)
    return seen


@contextlib.contextmanager
def without_counting_images(model: Any) -> Iterator[None]:
    """Inside, images of passes do not count for `take_images_seen`."""
    seen = getattr(model, EVERY_PASS, None)
    yield
    if seen is not None:
        setattr(model, EVERY_PASS, seen)


def takes_features(model: Any) -> bool:
    """Whether the model's forward pass takes features of images as they are."""
    return "mm_encoder_outputs" in inspect.signature(model.forward).parameters


def _arguments(model: Any, found: Any) -> dict[str, Any]:
    if takes_features(model):
        return {"mm_encoder_outputs": {"image": found}}
    _accept_features(type(model))
    return {"pixel_values": Features(found)}


def _shown_in(argument: Any) -> Shown | None:
    """The images of an argument that `_arguments` made of them."""
    found = argument.get("image") if isinstance(argument, dict) else getattr(argument, "found", None)
    return found if isinstance(found, Shown) else None


def _accept_features(kind: Any) -> None:
    """Have models of this class return the features that they are given in place of pixels."""
    see = kind.get_image_features
    if hasattr(see, "accepts_features"):
        return

    @functools.wraps(see)
    def see_or_return(self: Any, pixel_values: Any = None, *args: Any, **more: Any) -> Any:
        return pixel_values.found if isinstance(pixel_values, Features) else see(self, pixel_values, *args, **more)

    see_or_return.accepts_features = True  # type: ignore[attr-defined]
    kind.get_image_features = see_or_return


def _reorder(features: Any, shown: Shown) -> Any:
    """Features of the images at their places. Features are a list of them, all tokens [M,H] after each other, or tiles
    of all [K,tokens,H]."""
    if not isinstance(features, Tensor):
        return [features[n] for n in shown.order]
    flat = features.reshape(-1, features.shape[-1])
    parts = flat.split(list(shown.counts))
    return torch.cat([parts[n] for n in shown.order]).reshape(-1, *features.shape[1:])


def _sum(features: Any) -> Tensor:
    """All that a model reads of features, added up."""
    read = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    parts = [part for one in read for part in ([one] if isinstance(one, Tensor) else one)]
    return torch.stack([part.float().sum() for part in parts]).sum()
