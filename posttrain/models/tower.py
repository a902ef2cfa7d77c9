"""Vision tower: computes features of the images in a pass, which replace their pixels."""

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

# Attribute of models changed by `run_in_every_pass`: whether a pass with gradient had images since the last update.
IMAGES_SEEN = "images_since_update"


@dataclass(frozen=True)
class PassImages:
    """Images of a pass, as the tower reads them.

    counts: tokens of each image. order: index of the image at each image position in the rows.
    """

    tensors: Mapping[str, Tensor]
    counts: Sequence[int]
    order: Sequence[int]


@dataclass(frozen=True)
class Features:
    """Result of `get_image_features` for the images of a pass, passed as pixel values: transformers before 5.19 has no
    argument for features.
    """

    found: Any


def project_patches(model: nn.Module) -> None:
    """Compute convolutions over whole patches (Conv3d with stride = kernel, in Qwen's towers) as matrix products, in
    place.

    The results are the same sums; a GPU takes many times as long for the convolution in bfloat16.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv3d) and module.kernel_size == module.stride and module.groups == 1:
            module.forward = functools.partial(_apply_patch_projection, module)  # type: ignore[method-assign]


def _apply_patch_projection(conv: nn.Conv3d, patches: Tensor) -> Tensor:
    """Compute a patch convolution as a linear layer over flattened patches; other inputs use the convolution."""
    if patches.shape[2:] != conv.kernel_size or conv.padding != (0, 0, 0) or conv.dilation != (1, 1, 1):
        return conv._conv_forward(patches, conv.weight, conv.bias)
    return functional.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)[:, :, None, None, None]


def image_arguments(model: Any, shown: PassImages) -> dict[str, Any]:
    """Return the forward arguments that give the model these images: their features, unless the tower runs inside the
    pass.

    model: the model below the head, without adapters around it.
    """
    return _arguments(model, shown if runs_in_every_pass(model) else compute_features(model, shown))


def compute_features(model: Any, shown: PassImages) -> Any:
    """Return image features from `get_image_features`, one per image position.

    Each distinct image goes through the tower once, with the summed gradient of all its positions.
    """
    features = model.get_image_features(**shown.tensors, return_dict=True)
    if len(shown.order) > len(shown.counts):
        features.pooler_output = _reorder(features.pooler_output, shown)
        if layers := getattr(features, "deepstack_features", None):
            features.deepstack_features = [_reorder(layer, shown) for layer in layers]
    return features


def run_in_every_pass(model: Any, probe: Mapping[str, Tensor]) -> None:
    """Make each forward pass of the model run its tower exactly once; without images, on a probe whose features are
    multiplied by 0.

    Ranks with sharded tower weights gather them when the tower runs, in forward and backward: a rank that skipped the
    tower would leave the others waiting. Pixels passed directly to the model count as images too. model: the model
    below the head. probe: tensors of one image.
    """
    forward, features = model.forward, "mm_encoder_outputs" if takes_features(model) else "pixel_values"

    @functools.wraps(forward)
    def run(*args: Any, **given: Any) -> Any:
        shown = _find_pass_images(given.get(features))
        if shown is not None or given.get("pixel_values") is not None:
            setattr(model, IMAGES_SEEN, getattr(model, IMAGES_SEEN) or torch.is_grad_enabled())
            seen = {} if shown is None else _arguments(model, compute_features(model, shown))
            return forward(*args, **{**given, **seen})
        tensors = {name: value.to(model.device) for name, value in probe.items()}
        nothing = 0.0 * _sum_features(model.get_image_features(**tensors, return_dict=True))
        out = forward(*args, **given)
        out.last_hidden_state = out.last_hidden_state + nothing.to(out.last_hidden_state.dtype)
        return out

    model.forward = run
    setattr(model, IMAGES_SEEN, False)


def runs_in_every_pass(model: Any) -> bool:
    """Return whether `run_in_every_pass` was applied to the model."""
    return hasattr(model, IMAGES_SEEN)


def pop_images_seen(model: Any) -> bool:
    """Return whether a pass with gradient had images since the last call, and reset that. Needs `run_in_every_pass`."""
    seen: bool = getattr(model, IMAGES_SEEN)
    setattr(model, IMAGES_SEEN, False)
    return seen


@contextlib.contextmanager
def without_counting_images(model: Any) -> Iterator[None]:
    """Context whose passes do not count for `pop_images_seen`."""
    seen = getattr(model, IMAGES_SEEN, None)
    yield
    if seen is not None:
        setattr(model, IMAGES_SEEN, seen)


def takes_features(model: Any) -> bool:
    """Return whether the model's forward pass accepts image features directly."""
    return "mm_encoder_outputs" in inspect.signature(model.forward).parameters


def _arguments(model: Any, found: Any) -> dict[str, Any]:
    """Return the forward arguments that pass image features to the model."""
    if takes_features(model):
        return {"mm_encoder_outputs": {"image": found}}
    _accept_features(type(model))
    return {"pixel_values": Features(found)}


def _find_pass_images(argument: Any) -> PassImages | None:
    """Return the images in an argument made by `_arguments`; None if it holds none."""
    found = argument.get("image") if isinstance(argument, dict) else getattr(argument, "found", None)
    return found if isinstance(found, PassImages) else None


def _accept_features(kind: Any) -> None:
    """Make `get_image_features` of this class return `Features` that are passed in place of pixels."""
    see = kind.get_image_features
    if hasattr(see, "accepts_features"):
        return

    @functools.wraps(see)
    def see_or_return(self: Any, pixel_values: Any = None, *args: Any, **more: Any) -> Any:
        return pixel_values.found if isinstance(pixel_values, Features) else see(self, pixel_values, *args, **more)

    see_or_return.accepts_features = True  # type: ignore[attr-defined]
    kind.get_image_features = see_or_return


def _reorder(features: Any, shown: PassImages) -> Any:
    """Return features in the order of the image positions.

    features: a list with one entry per image, all tokens [M,H] concatenated, or tiles of all images [K,tokens,H].
    """
    if not isinstance(features, Tensor):
        return [features[n] for n in shown.order]
    flat = features.reshape(-1, features.shape[-1])
    parts = flat.split(list(shown.counts))
    return torch.cat([parts[n] for n in shown.order]).reshape(-1, *features.shape[1:])


def _sum_features(features: Any) -> Tensor:
    """Return the sum of all features that a model reads, as a scalar."""
    read = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
    parts = [part for output in read for part in ([output] if isinstance(output, Tensor) else output)]
    return torch.stack([part.float().sum() for part in parts]).sum()
