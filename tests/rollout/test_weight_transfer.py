"""How weights are cut into what an engine is sent. What a GPU has to do with it is in tests/gpu/test_engine_gpu.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from posttrain.rollout import weight_transfer
from posttrain.rollout.weight_transfer import buckets, memory_file, sent_dtype


def test_matrices_go_in_the_engine_s_type_and_vectors_as_they_are() -> None:
    """Some architectures keep a bias or a decay in float32, and vLLM does as well."""
    matrix, vector, counts = torch.zeros(2, 3), torch.zeros(3), torch.zeros(2, 3, dtype=torch.int32)
    assert [sent_dtype(t, torch.bfloat16) for t in (matrix, vector, counts)] == [
        torch.bfloat16,
        torch.float32,
        torch.int32,
    ]


def test_buckets_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes: a 12, b 12, c 40, d 8, e 12. 24 fit, c is larger and comes alone. The float32 vector comes before bfloat16
    matrices, which may begin at every second byte, as it may begin at every fourth only."""
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", 24)
    shapes = {"a": (3, 2), "b": (6, 1), "c": (4, 5), "d": (4, 1), "e": (3,)}
    named = [(name, torch.zeros(shape)) for name, shape in shapes.items()]
    found = [([name for name, _ in bucket], size) for bucket, size in buckets(iter(named), torch.bfloat16)]
    assert found == [(["a", "b"], 24), (["c"], 40), (["e", "d"], 20)]
    assert list(buckets([], torch.bfloat16)) == []


def test_a_file_in_memory_is_gone_with_its_block_and_what_was_read_stays() -> None:
    weights = {"a": torch.arange(5.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    with memory_file(save(weights)) as path:
        read = load_file(path)
        assert path.startswith("/proc/")
    assert not Path(path).exists()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
