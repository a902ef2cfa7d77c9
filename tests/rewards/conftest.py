"""Shipped reward functions by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from posttrain.verify.load import shipped_function


@pytest.fixture
def reward() -> Callable[[str], Callable[..., Any]]:
    """`reward("length.cosine")` -> the function."""
    return shipped_function
