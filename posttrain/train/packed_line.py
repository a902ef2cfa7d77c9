"""Layout of a packed line: rows one after another without padding, and which tokens attend to which."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.batch import to_device


@dataclass(eq=False)  # not frozen: torch.compile (2.11) reads every field of a frozen one, and makes a graph for each
class Packed:
    """Layout of n rows in one packed line of tokens. Treated as immutable."""

    borders: Tensor  # [n+1] int32 on the model's device: 0, end of row 0, end of row 1, ...
    lengths: tuple[int, ...]
    longest: int
    keys: Keys | None = None  # None: each row attends to itself only
    group: Any = None  # process group of ranks that hold a part of the line each and gather keys; see `context_split`
    cache: dict[Any, Any] = field(default_factory=dict)  # of `get_cached`

    def get_cached(self, key: Any, make: Callable[[Packed, Any], Any]) -> Any:
        """Return `make(self, key)`, computed once for all layers of a pass."""
        if key not in self.cache:
            self.cache[key] = make(self, key)
        return self.cache[key]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Packed:
        """Build the packed line of rows of these lengths, each attending to itself only."""
        return cls(ends_of(lengths, device), tuple(lengths), max(lengths))

    @classmethod
    def with_shared_keys(cls, lengths: list[int], keys: list[int], sources: Tensor, device: torch.device) -> Packed:
        """Build the layout of rows that also attend to tokens of other rows before their own (`Keys`)."""
        found = Keys(ends_of(keys, device), tuple(keys), max(keys), sources.to(device))
        return cls(ends_of(lengths, device), tuple(lengths), max(lengths), found)


@dataclass(eq=False)
class Keys:
    """The keys of each of n rows: `lengths` tokens, the last of which are the row itself (attended to causally)."""

    borders: Tensor  # [n+1] int32
    lengths: tuple[int, ...]
    longest: int
    sources: Tensor  # [sum of lengths] position of each key in the line


def ends_of(lengths: list[int], device: torch.device) -> Tensor:
    """Return 0 and the cumulative lengths as int32 [n+1] on the device."""
    return to_device(list(itertools.accumulate(lengths, initial=0)), device, torch.int32)
