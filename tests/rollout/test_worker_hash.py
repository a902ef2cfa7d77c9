"""Hash of vLLM's compiled workers: a start that knows the size of the KV cache reuses what vLLM compiled."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_hash_does_not_depend_on_the_kv_cache_size() -> None:
    from posttrain.rollout.worker import without_kv_size

    def whole(config: Any) -> str:
        return f"{config.kv_cache_memory_bytes} {config.block_size}"

    hashed = without_kv_size(whole)
    small, large = (SimpleNamespace(kv_cache_memory_bytes=size, block_size=16) for size in (None, 9))
    assert hashed(small) == hashed(large) != hashed(SimpleNamespace(kv_cache_memory_bytes=9, block_size=32))
    assert large.kv_cache_memory_bytes == 9


def test_hash_equals_vllms() -> None:
    from vllm.config import CacheConfig

    import posttrain.rollout.worker  # noqa: F401  as vLLM's processes do

    assert CacheConfig(kv_cache_memory_bytes=9).compute_hash() == CacheConfig().compute_hash()
    assert CacheConfig(cache_dtype="fp8").compute_hash() != CacheConfig().compute_hash()
