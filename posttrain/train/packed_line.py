"""Which tokens of a line of rows attend to which: rows one after another, without padding, each kept to itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.batch import on_device


@dataclass(eq=False)  # not frozen: torch.compile (2.11) reads every field of a frozen one, and makes a graph for each
class Packed:
    """Borders of n rows in one packed line of tokens. Never changed."""

    borders: Tensor  # [n+1] int32 on the model's device: 0, end of row 0, end of row 1, ...
    lengths: tuple[int, ...]
    longest: int
    keys: Keys | None = None  # None: each row attends to itself
    group: Any = None  # of ranks that hold a part of the line each, whose keys come together first; see `context_split`
    kept: dict[Any, Any] = field(default_factory=dict)  # what `keep` made

    def keep(self, key: Any, make: Callable[[Packed, Any], Any]) -> Any:
        """What `make` makes of this line and the key; once, for all layers of a pass."""
        if key not in self.kept:
            self.kept[key] = make(self, key)
        return self.kept[key]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Packed:
        return cls(ends_of(lengths, device), tuple(lengths), max(lengths))

    @classmethod
    def with_shared_keys(cls, lengths: list[int], keys: list[int], sources: Tensor, device: torch.device) -> Packed:
        """Rows that also attend to tokens of other rows before their own: see Keys."""
        found = Keys(ends_of(keys, device), tuple(keys), max(keys), sources.to(device))
        return cls(ends_of(lengths, device), tuple(lengths), max(lengths), found)


@dataclass(eq=False)
class Keys:
    """What each of n rows attends to: `lengths` tokens, the last of which are the row itself (causally)."""

    borders: Tensor  # [n+1] int32
    lengths: tuple[int, ...]
    longest: int
    sources: Tensor  # [sum of lengths] place of each in the line


def ends_of(lengths: list[int], device: torch.device) -> Tensor:
    return on_device(list(itertools.accumulate(lengths, initial=0)), device, torch.int32)
