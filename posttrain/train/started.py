"""What all ranks of a run must have been started with, wherever they are: posttrain, the recipe, and what it names.

Each rank prepares the data, loads the model and scores by itself; nothing would say that they do not do the same. Paths
may differ between machines, what is found there may not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from posttrain import places
from posttrain.errors import RewardError, UserError
from posttrain.models.places import locate
from posttrain.recipe import named
from posttrain.recipe.load import Loaded
from posttrain.recipe.reward_sections import Reward
from posttrain.recipe.section import Names
from posttrain.recipe.tree import Path_
from posttrain.run.directory import flatten
from posttrain.run.environment import package_version
from posttrain.train.alike import Fact
from posttrain.verify import load as rewards

LIBRARIES = ("torch", "transformers", "tokenizers")  # they make the numbers
MAY_DIFFER = ("run.output",)  # rank 0 writes
LONG = 60  # characters of a value that are shown
LARGE, MANY = 4 << 20, 64  # bytes of a file, files of a folder: of more only a part is read
BLOCKS, BLOCK = 256, 4096  # of a large file; of many one each
SOURCE = (".py", ".json", ".yaml")  # endings of what posttrain is made of


def started_with(loaded: Loaded) -> dict[str, Fact]:
    """By name: posttrain and libraries; each key of the recipe, or what is found where it names something."""
    facts = {"posttrain": _content(sorted(_own_files()), str(package_version("posttrain")), whole=True)}
    facts |= {name: Fact(version, version) for name in LIBRARIES if (version := package_version(name))}
    values = json.loads(json.dumps(loaded.resolved))
    facts |= {key: _text(value) for key, value in flatten(values).items() if key not in MAY_DIFFER}
    for _, model, section in named.stages(values, type(loaded.recipe)):
        for part in named.parts(model, section):
            for path, files, shown in _named(part, loaded.recipe.base_dir):
                facts[_key(path)] = _content(files, shown)
    return facts


def _text(value: object) -> Fact:
    text = json.dumps(value)
    return Fact(text, text) if len(text) <= LONG else Fact.of(text.encode(), f"{text[:LONG]}...")


def _named(part: named.Part, base_dir: Path) -> Iterator[tuple[Path_, list[Path], str]]:
    """(place, files, name) of each thing that a section names and that is on this machine."""
    use = part.values.get("use")
    if isinstance(use, str) and (script := _script(use, base_dir, reward=part.model is Reward)):
        yield (*part.path, "use"), [script], use
    for path, mark, name in named.names(part):
        script = _script(name, base_dir) if mark.kind == "data" else None
        if files := [script] if script else _files(mark, name, base_dir):
            yield path, files, name
    if part.model is Reward:
        reward = Reward.model_validate(part.values)
        for name, value in rewards.load_reward(reward, base_dir).params.items():
            if isinstance(value, Path) and name in reward.params:
                yield (*part.path, "params", name), [value], str(reward.params[name])


def _script(use: str, base_dir: Path, *, reward: bool = False) -> Path | None:
    """The file of a function; None for a registered one, and for what is compiled."""
    if reward:
        try:
            use = rewards.locate(use, base_dir)
        except RewardError:
            return None
    split = places.split_function(use)
    if split is None:
        return None
    if split[0].endswith(".py"):
        return next((place for place in places.candidates(split[0], base_dir) if place.is_file()), None)
    spec = places.find_module(split[0])
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _files(mark: Names, name: str, base_dir: Path) -> list[Path]:
    """The files of a model, of data or of a run; none where it is not on this machine."""
    if mark.kind == "model":
        try:
            place = locate(name, base_dir).path
        except UserError:
            return []
    else:
        place = next((path for path in places.candidates(name, base_dir) if path.exists()), None)
    if place is None or place.is_file():
        return [place] if place else []
    listed = [place / file for file in mark.holds] if mark.holds else sorted(place.iterdir())
    return [path for path in listed if path.is_file() and not path.name.startswith(".") and path.suffix != ".md"]


def _own_files() -> Iterator[Path]:
    root = Path(places.__file__).parent
    return (path for path in root.rglob("*") if path.suffix in SOURCE and path.is_file())


def _content(files: Sequence[Path], shown: str, *, whole: bool = False) -> Fact:
    """The names, sizes and contents of files; of large ones, and of many, a part."""
    blocks = BLOCKS if len(files) <= MANY else 1
    return Fact.of(
        b"".join(_read(path, whole or (blocks > 1 and _size(path) <= LARGE), blocks) for path in files), shown
    )


def _read(path: Path, whole: bool, blocks: int) -> bytes:
    size = _size(path)
    parts = [f"{path.name} {size}\n".encode()]
    with path.open("rb") as file:
        if whole:
            return parts[0] + file.read()
        for number in range(1, blocks + 1):
            file.seek(max(0, size - BLOCK) * number // blocks)
            parts.append(file.read(BLOCK))
    return b"".join(parts)


def _size(path: Path) -> int:
    return path.stat().st_size


def _key(path: Path_) -> str:
    """As `flatten` calls it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
