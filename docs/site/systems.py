"""Write docs/systems.md from docs/systems.yaml and the presets: `python docs/site/systems.py`, part of `make index`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.recipe import presets

DOCS = Path(__file__).resolve().parents[1]
TABLE, PAGE = DOCS / "systems.yaml", DOCS / "systems.md"
HEAD = """# Published systems

{count} published systems: which parts run in posttrain, with which recipe lines, and how they depart from the paper.
{offered} run, {partly} of them without a part that their row lists under **not offered**; {absent} do not run.
`posttrain methods show NAME` has a preset's formula and keys. "Guess" and "ours" mean that the paper does not state it;
most systems were read with a summary beside the paper, and few of their results were reproduced. Systems for images
train on rows with pictures ([models that see](vision.md)); graphical desktops are not shipped.

Made by `make index` from [systems.yaml](systems.yaml), which also names the test of each row.

| system | stage | write | what runs | what departs |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class System:
    """One published system: what runs it here, and what is not here."""

    system: str
    paper: str
    presets: Sequence[str] = ()
    shipped: str = ""
    recipe: dict[str, Any] | None = None
    write: str = ""
    also: str = ""
    runs: str = ""
    departs: str = ""
    missing: str = ""
    tests: Sequence[str] = ()

    @property
    def is_offered(self) -> bool:
        return bool(self.presets or self.shipped or self.recipe)


def read_table() -> list[System]:
    """The entries of systems.yaml. Raises TypeError for a key that an entry cannot have."""
    entries: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return [System(**entry) for entry in entries]


def page(systems: list[System]) -> str:
    """The whole page."""
    offered = [one for one in systems if one.is_offered]
    partly = sum(bool(one.missing) for one in offered)
    head = HEAD.format(count=len(systems), offered=len(offered), partly=partly, absent=len(systems) - len(offered))
    return head + "".join(f"| {' | '.join(row(one))} |\n" for one in systems)


def row(one: System) -> tuple[str, ...]:
    """The cells of one system."""
    found = [presets.preset(name) for name in one.presets]
    title = f"[{cell(one.system)}](https://arxiv.org/abs/{one.paper})" if one.paper else cell(one.system)
    runs = one.runs or " ".join(preset.purpose.strip() for preset in found)
    departs = one.departs or " ".join(preset.not_stated.strip() for preset in found)
    missing = f"**Not offered:** {one.missing}" if one.missing else ""
    return title, stage(one), lines(one), cell(runs) or "-", cell(f"{departs} {missing}".strip()) or "-"


def stage(one: System) -> str:
    """The stages that it takes, as the commands are called."""
    found = [presets.preset(name).stage.replace("_", "-") for name in one.presets]
    if one.recipe:
        found.append(one.recipe["stage"].replace("_", "-"))
    if one.shipped:
        folder = one.shipped.partition("/")[0] if "/" in one.shipped else "run"
        found.append(folder)
    return ", ".join(dict.fromkeys(found)) or "-"


def lines(one: System) -> str:
    """What a recipe or a command line has."""
    found = [f"`algorithm: {name}`" for name in one.presets]
    found += [f"recipe `{one.shipped}`"] if one.shipped else []
    if one.write:
        found.append(f"`{one.write}`")
    elif one.recipe:
        found += [f"`{key}: {flow(value)}`" for key, value in one.recipe.items() if key != "stage"]
    found += [f"`{one.also}`"] if one.also else []
    return cell("<br>".join(found)) or "-"


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()


def cell(text: str) -> str:
    """A text that stays in its cell."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


if __name__ == "__main__":
    PAGE.write_text(page(read_table()), encoding="utf-8")
