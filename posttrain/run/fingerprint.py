"""Hashes of what a run was started with, compared between the ranks of a run, and on resume with the start before."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """A value to compare (`compared`), and its text for messages (`shown`)."""

    compared: str
    shown: str

    @classmethod
    def of(cls, content: bytes, shown: str = "") -> Fact:
        """Return the fact for a content, compared by its hash; messages show the beginning of the hash."""
        return cls.from_hash(hashlib.sha256(content).hexdigest(), shown)

    @classmethod
    def from_hash(cls, digest: str, shown: str = "") -> Fact:
        """Return the fact for a hash."""
        return cls(digest, f"{shown} ({digest[:8]})" if shown else digest[:8])


NOTHING = Fact("", "nothing")


def differences(before: Mapping[str, Fact], now: Mapping[str, Fact]) -> dict[str, tuple[Fact, Fact]]:
    """Return the facts that differ, by name, as (before, now); NOTHING if a name exists on one side only."""
    pairs = {key: (before.get(key, NOTHING), now.get(key, NOTHING)) for key in {**before, **now}}
    return {key: pair for key, pair in pairs.items() if pair[0].compared != pair[1].compared}
