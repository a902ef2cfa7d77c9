"""Vision models: which configurations are vision models, which class loads them, and which weights belong to vision."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from typing import Any, Literal

from posttrain.errors import DataError, ModelError
from posttrain.recipe.sections import Model

Part = Literal["language", "projector", "vision"]
TOWERS = frozenset({"visual", "vision_tower", "vision_model", "image_encoder", "vision_encoder"})
PROJECTORS = frozenset(
    {"multi_modal_projector", "connector", "merger", "deepstack_merger_list", "image_newline", "embed_vision"}
)


def find_part(name: str) -> Part:
    """Return the part of the model that a weight or module name belongs to; a text model is all `language`."""
    words = set(name.split("."))
    if words & PROJECTORS:
        return "projector"
    return "vision" if words & TOWERS else "language"


def sees_images(config: Any, section: Model | None) -> bool:
    """Return whether the model reads images.

    Families whose checkpoints also load as a text model read images only if the recipe sets `model.vision`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as TEXT
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as SEEING

    if type(config) not in SEEING:
        return False
    return (
        (section is not None and section.vision is not None)
        or type(config) not in TEXT
        or TEXT[type(config)] is SEEING[type(config)]
    )


def auto_class(config: Any, section: Model | None) -> Any:
    """Return the transformers class that loads the model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config, section) else AutoModelForCausalLM


def processor_class(config: Any) -> Any:
    """Return the class that loads the model's processor, without its video part if torchvision is not installed.

    SmolVLM's video part also needs num2words. Nothing else needs these packages.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    cls: Any = getattr(transformers, name, None) if name else None
    if cls is None or "video_processor" not in cls.get_attributes():
        return transformers.AutoProcessor
    module = sys.modules[cls.__module__]
    wordless = getattr(module, "num2words", ...) in (None, refuse_video)
    if importlib.util.find_spec("torchvision") and not wordless:
        return transformers.AutoProcessor
    if wordless:  # otherwise SmolVLM's class would refuse images as well
        vars(module)["num2words"] = refuse_video
    attributes = [attribute for attribute in cls.get_attributes() if attribute != "video_processor"]
    own: dict[str, Any] = {"get_attributes": classmethod(lambda _: attributes)}
    if inspect.signature(cls.__init__).parameters["video_processor"].default is inspect.Parameter.empty:
        own["__init__"] = _add_none_defaults(cls.__init__)
    return type(cls.__name__, (cls,), own)


def _add_none_defaults(function: Any) -> Any:
    """Return the same function with default None for arguments without a default.

    transformers reads argument names from the function's code, so a wrapper function does not work.
    """
    code, given = function.__code__, function.__defaults__ or ()
    missing = code.co_argcount - 1 - len(given)  # without self
    return types.FunctionType(code, function.__globals__, None, (*[None] * missing, *given), function.__closure__)


def refuse_video(number: int) -> str:
    """Raise DataError. Replaces num2words, which SmolVLM's processor uses to write the number of a video's frames."""
    raise DataError(f"a video of {number} frames: only images are read")


def frozen_parts(section: Model) -> tuple[Part, ...]:
    """Return the parts of the model that are not trained."""
    if section.vision == "all":
        return ()
    return ("vision",) if section.vision == "projector" else ("vision", "projector")


def check_parts(model: Any, section: Model) -> None:
    """Raise ModelError for `model.vision` on a model without vision tower, or if the tower's weights cannot be
    identified.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as SEEING

    name = type(model).__name__
    if type(model.config) not in SEEING:
        if section.vision is not None:
            raise ModelError(f"model.vision is {section.vision}, but {section.path} ({name}) does not read images")
        return
    known = any(find_part(key) == "vision" for key, _ in model.named_parameters())
    if frozen_parts(section) and not known and sees_images(model.config, section):
        raise ModelError(f"the vision tower's weights of {name} are not known", hint="write `model.vision: all`")


def freeze_parts(model: Any, section: Model) -> None:
    """Freeze the parts that `model.vision` does not train. Under adapters all weights are already frozen."""
    if hasattr(model, "peft_config"):
        return
    check_parts(model, section)
    frozen = frozen_parts(section)
    for name, parameter in model.named_parameters():
        if find_part(name) in frozen:
            parameter.requires_grad_(False)


def modules_without_adapters(model: Any, section: Model) -> list[str]:
    """Return the names of linear layers that get no adapter under `model.vision`."""
    from torch import nn

    check_parts(model, section)
    frozen = frozen_parts(section)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linear if find_part(name) in frozen]
