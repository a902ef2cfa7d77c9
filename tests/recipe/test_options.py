"""Gates and channels in a recipe are checked key by key before a run starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from posttrain.recipe.section import component_params


def problems(kind: Any, use: str, values: dict[str, Any]) -> list[tuple[str, ...]]:
    with pytest.raises(ValidationError) as caught:
        component_params((kind,), use, values)
    return [tuple(map(str, error["loc"])) for error in caught.value.errors()]


def test_gate_keeps_its_given_keys() -> None:
    gate = {"pass_rate": 1.0, "from_step": 5}
    assert component_params(("group_reward",), "kimi_length", {"gate": gate}) == {"weight": 0.5, "gate": gate}


def test_unknown_key_or_wrong_type_raises_with_its_position() -> None:
    assert problems("group_reward", "kimi_length", {"gate": {"pass_rat": 1.0}}) == [("gate", "pass_rat")]
    assert problems("group_reward", "gated", {"gate": {"min": "1"}}) == [("gate", "min")]
    assert problems("group_reward", "gated", {}) == [("gate",)]
    channels = [{"rewards": {"a": 1.0}}, {"reward": {"a": 1.0}}]
    assert problems("advantage", "channels", {"channels": channels}) == [("channels", "1", "reward")]
