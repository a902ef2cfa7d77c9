"""Hints name what was meant."""

from __future__ import annotations

import pytest

from posttrain.errors import nearest


@pytest.mark.parametrize(
    ("written", "meant"),
    [("dpao", "dapo"), ("dapoo", "dapo"), ("grop", "grpo"), ("dpo", "dpo"), ("simp", "simpo"), ("zebra", None)],
)
def test_nearest(written: str, meant: str | None) -> None:
    """Swapped letters first: `mdpo` shares more of its letters in order with `dpao` than `dapo` does."""
    assert nearest(written, ["dpo", "mdpo", "dapo", "grpo", "simpo", "gspo"]) == meant
