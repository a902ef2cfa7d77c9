"""Checks that the models, data, runs and files that a recipe names exist. Nothing is loaded; no torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError, ModelError, RecipeError, UserError, did_you_mean
from posttrain.path_resolution import ROW_FILES, candidate_paths, find, suggest_file

if TYPE_CHECKING:
    from posttrain.recipe.section import Names
    from posttrain.recipe.sections import Source

ACCEPTED_PREFIX = "accepted:"


def path_exists(path: Path) -> bool:
    """Return whether a path exists; True if the system refuses to tell, because reading the path then raises the right
    error.
    """
    try:
        return path.exists()
    except OSError:
        return True


def check_model(name: str, base_dir: Path) -> str:
    """Return the base that an adapter names, "" for other models. Raises ModelError if the model does not exist."""
    from posttrain import hub
    from posttrain.models import adapters
    from posttrain.models.model_paths import hint_for, locate

    place = locate(name, base_dir)
    if place.kind == "hub" and (why := hub.explain_missing(name, "model")):
        tried = candidate_paths(name, base_dir)
        hint = hint_for(name) or suggest_file(name, tried)
        raise ModelError(f"model not found: {name}; {why}", allowed=f"no directory {tried[0]}", hint=hint)
    if place.kind != "adapter" or place.path is None:
        return ""
    base = adapters.base_of(place.path)
    try:
        twice = locate(base, base_dir).kind == "adapter"
    except ModelError:  # missing base: reported by the caller, which checks the base next
        twice = False
    if twice:
        raise ModelError(f"{place.path} is an adapter on another adapter, {base}", hint="merge the older one first")
    return base


def check_adapter(name: str, section: Mapping[str, Any], base_dir: Path) -> None:
    """Raise ModelError if a `lora` section has `continue` and the model is not an adapter, or is one of another shape.

    section: the keys that the recipe gives, without defaults.
    """
    from pydantic import ValidationError

    from posttrain.models import adapters
    from posttrain.models.model_paths import locate
    from posttrain.recipe.sections import Lora

    if not section.get("continue"):
        return
    given = {key: value for key, value in section.items() if key in ("continue", "rank", "alpha", "dropout")}
    place = locate(name, base_dir)
    try:
        lora = Lora.model_validate(given)
    except ValidationError:  # reported by the schema
        return
    adapters.check_continue(place.path, lora, name)


DEVICES = ("/dev/nvidia*", "/dev/kfd", "/dev/dxg", "/dev/nvhost*", "/dev/nvmap")  # GPU device files: no library needed


def explain_missing_gpu() -> str:
    """Return why no GPU is visible to this process; "" if one is, or if the system has no device files."""
    if sys.platform != "linux":
        return ""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    seen = any(device_path for pattern in DEVICES for device_path in Path("/").glob(pattern.lstrip("/")))
    return "" if seen else "this machine has no GPU"


def check_gpu_needs(section: str, values: Mapping[str, Any]) -> Iterator[tuple[str, UserError]]:
    """Yield (key, error) for each value of a section `model` or `optim` that needs a GPU where none is visible."""
    from posttrain.recipe.training_sections import PAGED

    why = explain_missing_gpu()
    if not why:
        return
    if section == "model" and values.get("device") == "cuda":
        hint = "write `auto` or `cpu`; `posttrain doctor` lists the GPUs"
        yield "device", ModelError(f"cuda, but {why}", hint=hint)
    elif section == "model" and values.get("half_weights") and values.get("dtype", "auto") == "auto":
        what = f"needs matmuls in bfloat16, and `dtype: auto` is float32, because {why}"
        yield "half_weights", ModelError(what, hint="write `model.dtype: bfloat16`")
    if section == "optim" and values.get("use") == PAGED:
        yield "use", RecipeError(f"{PAGED} needs a GPU, but {why}", hint="write `adamw_8bit`")


ALL_LINEAR = "all-linear"  # value of `lora.targets`: every linear layer except the output head


def check_targets(name: str, targets: object, base_dir: Path) -> None:
    """Raise ModelError if a name in `lora.targets` matches no module of a model on this machine."""
    from posttrain.models.model_paths import locate
    from posttrain.models.stored_names import list_module_names

    if isinstance(targets, str) and targets != ALL_LINEAR and (hint := did_you_mean(targets, [ALL_LINEAR])):
        raise ModelError(f"`{targets}` names no module", allowed=f"{ALL_LINEAR}, or a list of names", hint=hint)
    known = list_module_names(locate(name, base_dir)) if isinstance(targets, list) else ()
    for target in targets if isinstance(targets, list) and known else ():
        last = str(target).rpartition(".")[2]
        if last not in known:
            names = ", ".join(sorted(known))
            hint = did_you_mean(last, known) or f"{ALL_LINEAR} suits every model"
            raise ModelError(f"no module of {name} is called `{target}`", allowed=f"modules: {names}", hint=hint)


def could_be_hub_id(name: str) -> bool:
    """Return whether a name could be an id on the model hub."""
    from posttrain import hub

    return name not in ("tiny", "tiny-vision") and not hub.is_only_path(name, (".gguf", *ROW_FILES))


def check_data(name: str, base_dir: Path, source: Source | None) -> None:
    """Raise DataError if the data does not exist or is visibly wrong. source: its section, if that is valid."""
    from posttrain import hub
    from posttrain.data import sources
    from posttrain.recipe.section import EVALUATION

    if name.startswith(ACCEPTED_PREFIX):
        check_run(name.removeprefix(ACCEPTED_PREFIX), EVALUATION, base_dir)
    elif hub.is_only_path(name, ROW_FILES) and not name.startswith(("gym:", "task:")):
        find(name, base_dir, "data", DataError)
    elif _is_hub_only(name, base_dir) and (why := hub.explain_missing(name, "dataset")):
        tried = candidate_paths(name, base_dir)
        problem = f"data not found: {name}; {why}"
        raise DataError(problem, allowed=f"no file or directory {tried[0]}", hint=suggest_file(name, tried))
    if source is not None:
        sources.check(source, base_dir)


def _is_hub_only(name: str, base_dir: Path) -> bool:
    """Return whether a data name can only be an id on the hub."""
    from posttrain.recipe.data_sections import source_form

    made = source_form(name) in ("gym", "task", "function")
    return not made and could_be_hub_id(name) and not any(map(path_exists, candidate_paths(name, base_dir)))


def check_run(name: str, names: Names, base_dir: Path) -> None:
    """Raise DataError if the run or file does not exist, or lacks the file that is read from it."""
    place = find(name, base_dir, names.what, DataError)
    if names.kind == "file":
        text = _read_text(place, names.what)
        if names.what == "template":
            _check_jinja(text, place)
    elif names.holds and place.is_dir() and not any((place / file).is_file() for file in names.holds):
        files = sorted(path.name for path in place.iterdir())
        raise DataError(
            f"{place} holds no {names.what}: {names.holds[0]} is missing",
            allowed=f"it holds: {', '.join(files[:12]) or 'nothing'}",
        )


def _read_text(path: Path, what: str) -> str:
    """Return the text of a file. Raises DataError if it is not a file; names the first byte that is not UTF-8."""
    if not path.is_file():
        raise DataError(f"{what} {path} is a folder, not a file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as cause:
        from posttrain.data.files import not_utf8_error

        raise not_utf8_error(path) from cause


def _check_jinja(text: str, path: Path) -> None:
    """Raise DataError for a template with a Jinja syntax error."""
    if importlib.util.find_spec("jinja2") is None:
        return
    import jinja2

    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as cause:
        if "generation" not in str(cause):  # a tag that transformers adds to Jinja
            raise DataError(f"template {path}:{cause.lineno} is not Jinja: {cause.message}") from cause
