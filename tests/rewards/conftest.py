"""Fixture for shipped reward functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from posttrain.verify.load import shipped_function


@pytest.fixture
def reward() -> Callable[[str], Callable[..., Any]]:
    """`reward("length.cosine")` returns the reward function of that name."""
    return shipped_function
