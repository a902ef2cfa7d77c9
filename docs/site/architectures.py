"""Write the table of docs/architectures.md from docs/architectures.yaml: `python docs/site/architectures.py`, part of
`make index`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

DOCS = Path(__file__).resolve().parents[1]
TABLE, PAGE = DOCS / "architectures.yaml", DOCS / "architectures.md"
BEGIN, END = "<!-- table: architectures.yaml -->\n", "<!-- end of table -->\n"
COLUMNS = ("family", "`model_type`", "full", "LoRA", "resume", "reload", "packing", "stored names", "remarks")
PACKS = {"both": "sft, rl, dpo", "sft": "sft; rl and dpo pad", "neither": "refused; rl and dpo pad"}
NAMES = {"same": "the modules'", "other": "others"}


@dataclass(frozen=True)
class Family:
    """One row: an architecture, its tiny trained configuration, and the tested claims."""

    family: str
    kind: str
    packs: Literal["both", "sft", "neither"]
    keys: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    names: Literal["same", "other"] = "same"
    about: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        packs = PACKS[self.packs] + (", longer than the window" if self.window and self.packs == "both" else "")
        trained = ("sft, rl", "sft, rl", "equal", "equal")  # a row without these results fails its test
        return self.family, f"`{self.kind}`", *trained, packs, NAMES[self.names], self.about or "-"


def read_families() -> list[Family]:
    """Return the rows of architectures.yaml. Raises TypeError for a key that a row cannot have."""
    entries: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return [Family(**entry) for entry in entries]


def page(text: str, families: list[Family]) -> str:
    """Return the page with a new table. Raises ValueError if the page lacks the lines around the table."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} lacks the lines {BEGIN.strip()} and {END.strip()}")
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(family.cells for family in families)]
    return before + BEGIN + "".join(f"| {' | '.join(line)} |\n" for line in lines) + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read_families()), encoding="utf-8")
