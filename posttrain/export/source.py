"""Resolution of the MODEL argument of an export: a run's final model, a checkpoint, an adapter, or another model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import ModelError
from posttrain.models.lineage import RESOLVED
from posttrain.run.atomic_io import read_json
from posttrain.run.checkpoints import MANIFEST

_QUANTIZED = re.compile(r"([.-](q\d\w*|iq\d\w*|b?f16|f32))?\.gguf$", re.IGNORECASE)
MODEL_FILES = ("config.json", "adapter_config.json")
TRAININGS = ("sft", "dpo", "rl", "reward_model")  # stages that save a model


@dataclass(frozen=True)
class Source:
    """A model to export. path: as in `model.path`. name: for titles and file names. run: the run that trained it."""

    path: str
    name: str
    run: Path | None = None

    @property
    def part(self) -> str:
        """Name of a model that is not the final one of its run, e.g. `step-00000100` or `best`; else ""."""
        name = Path(self.path).resolve().name
        return name if self.run is not None and name != "final" else ""

    @property
    def recipe(self) -> dict[str, Any]:
        """All values of the run that trained the model; {} for a model without a run directory."""
        return (read_json(self.run / RESOLVED) or {}) if self.run else {}


def find_source(given: str) -> Source:
    """Return the model that `given` names; a run directory means its final/.

    Raises ModelError for a run without a final model, and for a reward model.
    """
    folder = Path(given).expanduser()
    if not folder.is_dir():
        return Source(given, _slug(_QUANTIZED.sub("", given.rpartition("/")[2])))
    if (folder / RESOLVED).is_file():
        final = folder / "final"
        if not _is_model(final):
            raise _missing_final_error(folder)
        return _check_source(Source(str(final), _slug(folder.resolve().name), folder))
    inside = folder.resolve()
    run = next((p for p in (inside.parent, inside.parent.parent) if (p / RESOLVED).is_file()), None)
    if run is None:
        return _check_source(Source(given, _slug(inside.name)))
    name = run.name if inside.name == "final" else f"{run.name}-{inside.name}"
    return _check_source(Source(given, _slug(name), run))


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_FILES)


def _missing_final_error(run: Path) -> ModelError:
    """Return the error for a run without a final model, with the models that it has instead."""
    stage = (read_json(run / RESOLVED) or {}).get("stage", "pipeline")
    inner = sorted(str(p.parent) for p in run.glob("**/final") if _is_model(p))
    steps = sorted(p for p in (run / "checkpoints").glob("step-*") if _is_model(p) and (p / MANIFEST).is_file())
    if inner:
        return ModelError(f"{run} is a run of several stages", hint=f"name one of them: {', '.join(inner[:6])}")
    if steps:
        return ModelError(f"{run} is not finished: it has no final/", hint=f"its newest checkpoint is {steps[-1]}")
    if stage in TRAININGS:
        return ModelError(f"{run} has no trained model yet: it has neither final/ nor a checkpoint")
    return ModelError(f"{run} has no trained model (stage {stage})", hint="name the run directory of a training")


def _check_source(source: Source) -> Source:
    """Return the source. Raises ModelError for a reward model, which gives scores instead of texts."""
    config = read_json(Path(source.path).expanduser() / "config.json") or {}
    kinds = " ".join(config.get("architectures") or ())
    if "SequenceClassification" in kinds or source.recipe.get("stage") == "reward_model":
        raise ModelError(
            f"{source.path} is a reward model, which gives scores; exports are for models that write",
            hint="its final/ is an ordinary transformers folder and can be copied as it is",
        )
    return source


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def read_license(folder: Path | None) -> str | None:
    """Return the license named in the card (README.md) of a model folder, or None."""
    card = read_front_matter(folder / "README.md") if folder else {}
    named = card.get("license")
    return str(named) if isinstance(named, str) and named else None


def read_front_matter(path: Path) -> dict[str, Any]:
    """Return the YAML front matter of a model card; {} if it is missing or unreadable."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    found = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    try:
        values = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def read_adapter_base(folder: Path) -> str | None:
    """Return the base model named by an adapter folder; None for other folders."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return None
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    return str(base) if base else None
