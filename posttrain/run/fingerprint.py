"""What a run was started with, as hashes to compare: by the ranks of a run with each other, on resume with before."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """What is compared, and what people are told of it."""

    compared: str
    shown: str

    @classmethod
    def of(cls, content: bytes, shown: str = "") -> Fact:
        """By a hash of the content, of which people see the beginning."""
        return cls.from_hash(hashlib.sha256(content).hexdigest(), shown)

    @classmethod
    def from_hash(cls, digest: str, shown: str = "") -> Fact:
        """By that hash."""
        return cls(digest, f"{shown} ({digest[:8]})" if shown else digest[:8])


NOTHING = Fact("", "nothing")


def differences(before: Mapping[str, Fact], now: Mapping[str, Fact]) -> dict[str, tuple[Fact, Fact]]:
    """The facts of both that are not the same, by name; NOTHING where one of them has none."""
    pairs = {key: (before.get(key, NOTHING), now.get(key, NOTHING)) for key in {**before, **now}}
    return {key: pair for key, pair in pairs.items() if pair[0].compared != pair[1].compared}
