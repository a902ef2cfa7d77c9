"""Engine groups: which training processes share an engine, on which GPUs, and which settings are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig

from posttrain.errors import RecipeError
from posttrain.recipe.engine_sections import EngineSection
from posttrain.rollout import vllm_start
from posttrain.rollout.engine_group import EngineGroup, check_groups, devices_of, group_here, group_of
from posttrain.rollout.make_engine import check_engine
from posttrain.run import ranks


def test_neighboring_ranks_form_a_group() -> None:
    groups = [group_of(rank, 2) for rank in range(6)]
    assert [(group.first, group.place) for group in groups] == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1)]
    assert [group.is_first for group in groups] == [True, False] * 3
    assert group_of(5, 1) == EngineGroup(first=5, size=1, place=0)


@pytest.mark.parametrize(
    ("size", "world", "on_machine", "told"),
    [
        (2, 1, 1, r"1 training process cannot be divided into engines of 2 GPUs(.|\n)*multiple of 2(.|\n)*server"),
        (4, 6, 6, "6 training processes cannot be divided into engines of 4 GPUs"),
        (2, 6, 3, "an engine's GPUs are in one machine, and 3 of the 6 training processes"),
        (4, 8, 2, "2 of the 8 training processes are on this one"),
    ],
)
def test_invalid_groups_raise(size: int, world: int, on_machine: int, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        check_groups(size, world, on_machine)


def test_groups_of_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 6 of 8 on two machines is its machine's third: its group has the third and fourth of the machine's GPUs."""
    check_groups(2, 8, 4)
    check_groups(1, 3, 1)
    for name, value in {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    monkeypatch.setenv(ranks.VISIBLE_DEVICES, "4,5,6,7")
    assert group_here(2) == EngineGroup(first=6, size=2, place=0) and devices_of(group_here(2)) == ["6", "7"]
    monkeypatch.setenv(ranks.VISIBLE_DEVICES, "")
    assert devices_of(group_here(2)) == ["2", "3"]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert devices_of(group_here(4)) == ["4", "5", "6", "7"]


def section(**vllm: Any) -> EngineSection:
    return EngineSection.model_validate({"engine": "vllm", "vllm": vllm})


def test_tensor_parallel_engine_cannot_be_combined_with_several_engines() -> None:
    assert section(tensor_parallel=2).vllm.share == 0.3, "of each GPU"
    with pytest.raises(ValidationError, match=r"one engine of the GPUs of 2 training .*: vllm\.engines must be 1"):
        section(tensor_parallel=2, engines=2)


def test_invalid_engine_groups_raise_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few ranks; heads not divisible by two GPUs."""
    monkeypatch.setattr(vllm_start, "require_vllm", lambda: None)
    config = LlamaConfig(hidden_size=9 * 64, num_attention_heads=9, num_key_value_heads=3)
    with pytest.raises(RecipeError, match="1 training process cannot be divided into engines of 2 GPUs"):
        check_engine(section(tensor_parallel=2), lambda: config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match="2 GPUs cannot divide the model's 9 attention heads and 3 KV heads"):
        check_engine(section(tensor_parallel=2), lambda: config)
