"""Export run: load, write next to the target, reload, compare, and only then rename to the target."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from posttrain import terminal
from posttrain.errors import ModelError, RunError, UserError
from posttrain.export import card, gguf_model, ollama
from posttrain.export.card import Facts
from posttrain.export.gguf_tokenizer import adds_bos
from posttrain.export.source import Source
from posttrain.models import adapters
from posttrain.models.load import LoadedModel, config_of, load, load_tokenizer
from posttrain.models.model_paths import locate
from posttrain.models.save import save, sync_all
from posttrain.recipe.sections import Model
from posttrain.run.atomic_io import explain_write_errors, put_in_place, write_json, write_text
from posttrain.run.checkpoints import require_space
from posttrain.scratch import scratch

REPORT = "export.json"  # in every export; only folders that contain it may be overwritten
Kind = Literal["merged", "adapter", "gguf", "ollama"]
BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "q8_0": 34 / 32}


@dataclass(frozen=True)
class Plan:
    """A checked export.

    model: how the model is loaded. dtype: of the written weights. nbytes: approximate size of the weights; None if
    unknown before loading. output: the target folder.
    """

    source: Source
    kind: Kind
    model: Model
    dtype: str
    output: Path
    facts: Facts
    nbytes: int | None = None
    name: str = ""  # hub repository


def make_plan(
    source: Source, kind: Kind | None, model: Model, dtype: str, output: Path, facts: Facts, *, name: str = ""
) -> Plan:
    """Return the plan of an export, checked from configuration and tokenizer alone.

    kind: None exports an adapter as it is if its base is on the hub, and anything else merged. dtype: auto means the
    dtype in which the base is stored. Raises ModelError for a model that this kind cannot represent.
    """
    place = locate(source.path, Path.cwd())
    base_is_public = place.kind == "adapter" and place.path is not None and _is_on_hub(adapters.base_of(place.path))
    kind = kind or ("adapter" if base_is_public else "merged")
    config = config_of(model, Path.cwd())
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    chosen = stored if dtype == "auto" else dtype
    if chosen not in BYTES:
        raise ModelError(f"the model is stored as {stored}", hint="name what to write: --dtype bfloat16")
    if kind in ("merged", "adapter") and chosen == "q8_0":
        raise UserError("--dtype q8_0 is for gguf and ollama", allowed="float32, bfloat16, float16")
    if kind in ("gguf", "ollama"):
        gguf_model.check(config, load_tokenizer(model, Path.cwd()))
    if source.recipe.get("model", {}).get("quantize") and kind != "adapter":
        note = "The adapter was trained over its base in 4 bits and is merged into the base's own weights."
        facts = replace(facts, notes=[*facts.notes, note])
    loaded_as = chosen if kind == "merged" else stored if stored in ("float32", "bfloat16", "float16") else "float32"
    section = Model.model_validate({**model.model_dump(), "dtype": loaded_as, "device": "cpu"})
    return Plan(source, kind, section, chosen, output, facts, _estimate_bytes(place.path, stored, chosen), name)


def _is_on_hub(base: str) -> bool:
    return locate(base, Path.cwd()).kind == "hub"


def _estimate_bytes(folder: Path | None, stored: str, chosen: str) -> int | None:
    """Return the approximate size of the written weights in bytes; None for adapters and models without a folder."""
    if folder is None or not folder.is_dir() or adapters.is_adapter(folder):
        return None
    there = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return int(there * BYTES[chosen] / BYTES.get(stored, 2.0)) or None


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise UserError for an existing folder that may not be replaced: only exports are, and only with `overwrite`."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"{output} is a file", hint="name a folder: --output DIR")
    if not any(output.iterdir()):
        return
    if not (output / REPORT).is_file():
        raise UserError(f"{output} is not an export and not empty", hint="name another --output")
    if not overwrite:
        raise UserError(f"{output} holds an export", hint="--overwrite replaces it, --output names another folder")


def run(plan: Plan) -> dict[str, Any]:
    """Run the export and return the contents of export.json.

    The export has a temporary name until all checks have passed; it is removed after an error or a signal. Raises
    ModelError or RunError if the written model differs from the source.
    """
    staging = plan.output.with_name(f".{plan.output.name}.partial")
    leftovers = (staging, staging.with_name(staging.name + ".tmp"))
    with _explain_errors(plan.output), _remove_leftovers(leftovers):
        plan.output.parent.mkdir(parents=True, exist_ok=True)
        if plan.nbytes:
            _require_space(plan.output.parent, plan.nbytes)
        found = _copy_adapter(plan, staging) if plan.kind == "adapter" else _convert(plan, staging)
        files = sorted(p.name for p in staging.glob("*.gguf"))
        write_text(staging / "README.md", card.write_card(plan.facts, plan.kind, plan.name or plan.output.name, files))
        report = {
            "path": str(plan.output),
            "to": plan.kind,
            "source": plan.source.path,
            "base": plan.facts.base,
            "license": plan.facts.license or "unknown",
            "dtype": plan.dtype,
            **found,
            "files": sorted(p.relative_to(staging).as_posix() for p in staging.rglob("*") if p.is_file()),
        }
        report["bytes"] = sync_all(staging)
        write_json(staging / REPORT, report)
        put_in_place(staging, plan.output)
    return report


def _convert(plan: Plan, staging: Path) -> dict[str, Any]:
    """Write the model with all its weights and return the results of its verification."""
    terminal.note(f"loading {plan.source.path}")
    loaded = load(plan.model, Path.cwd())
    if plan.kind == "merged":
        saved = save(loaded, staging)
        return {"logit_gap": saved["logit_gap"], "probe_end": saved["probe_end"]}
    staging.mkdir()
    file = staging / _gguf_name(plan)
    about = {"name": plan.source.name, "license": plan.facts.license or "", "base": plan.facts.public_base or ""}
    terminal.note(f"writing {file.name}")
    gguf_model.write(loaded, file, plan.dtype, {key: value for key, value in about.items() if value})
    terminal.note("reading it again")
    found = gguf_model.verify(loaded, file, plan.dtype)
    return {**found, **(_add_modelfile(loaded, file) if plan.kind == "ollama" else {})}


def _add_modelfile(loaded: LoadedModel, file: Path) -> dict[str, Any]:
    """Write the Modelfile and return whether the template was translated."""
    tokenizer = loaded.tokenizer
    turns, why = ollama.translate(tokenizer, add_bos=adds_bos(tokenizer))
    stops = [str(tokenizer.convert_ids_to_tokens(number)) for number in loaded.eos_ids]
    write_text(file.parent / "Modelfile", ollama.build_modelfile(file.name, turns, why, stops, tokenizer.chat_template))
    if turns is None:
        terminal.note(f"the chat template is not in the Modelfile, because {why}; the Modelfile says what to compare")
    return {"template": "translated" if turns else f"not translated: {why}"}


def _copy_adapter(plan: Plan, staging: Path) -> dict[str, Any]:
    """Copy the adapter's files, after loading it with its base as a check."""
    terminal.note(f"loading {plan.source.path}")
    load(plan.model, Path.cwd())
    staging.mkdir()
    for path in _adapter_files(Path(plan.source.path).expanduser()):
        shutil.copy2(path, staging / path.name)
    return {}


def _require_space(folder: Path, nbytes: int) -> None:
    """Raise RunError if the disk has too little space for the export."""
    try:
        require_space(folder, nbytes)
    except RunError as error:
        (problem,) = error.problems
        what = problem.what.replace("a checkpoint", "the export")
        raise RunError(what, where=problem.where, hint="free some space, or name another --output") from None


@contextlib.contextmanager
def _remove_leftovers(places: tuple[Path, ...]) -> Iterator[None]:
    """Remove these folders before the block, left by an earlier export, and after it."""
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    try:
        yield
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _explain_errors(output: Path) -> Iterator[None]:
    """Name the file in system errors, without advice about resuming: an export always starts from the beginning."""
    try:
        with explain_write_errors(output):
            yield
    except RunError as error:
        raise type(error).of(
            [
                replace(
                    problem,
                    what=problem.what.replace("; complete checkpoints are kept", "; nothing of the export is left"),
                    hint=problem.hint.replace(" with --resume", " again"),
                )
                for problem in error.problems
            ]
        ) from error


def default_output(source: Source, to: str) -> Path:
    """Return the default output folder of an export.

    RUN/exports/TO for the final model of a run, RUN/exports/PART-TO for another model of it, else exports/NAME/TO in
    the working directory. to: a kind, or hub-NAME.
    """
    if source.run is None:
        return Path("exports") / source.name / to
    return source.run / "exports" / (f"{source.part}-{to}" if source.part else to)


def planned_files(plan: Plan) -> list[str]:
    """Return the file names of an export as far as the plan determines them: weights may be sharded."""
    if plan.kind in ("gguf", "ollama"):
        names = [_gguf_name(plan), *(["Modelfile"] if plan.kind == "ollama" else [])]
    elif plan.kind == "adapter":
        names = [path.name for path in _adapter_files(Path(plan.source.path).expanduser())]
    else:
        with scratch("export") as folder:
            load_tokenizer(plan.model, Path.cwd()).save_pretrained(folder)
            names = [path.name for path in folder.iterdir()]
        names += ["config.json", "generation_config.json", "model.safetensors"]
    return sorted({"README.md", REPORT, *names})


def _gguf_name(plan: Plan) -> str:
    return f"{plan.source.name}-{plan.dtype}.gguf"


def _adapter_files(folder: Path) -> list[Path]:
    """Return the files needed to use an adapter, without optimizer states and checkpoint manifests."""
    kept = ("adapter_config.json", "adapter_model.safetensors", "tokenizer*", "special_tokens_map.json", "vocab*")
    more = ("merges.txt", "added_tokens.json", "chat_template*", "generation_config.json")
    return sorted(path for pattern in (*kept, *more) for path in folder.glob(pattern) if path.is_file())
