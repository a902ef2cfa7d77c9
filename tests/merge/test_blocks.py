"""Block-wise merging equals merging whole tensors; blocks of 4 entries here."""

from __future__ import annotations

import pytest
import torch

from posttrain.merge import blocks, rules, selective, sparsify


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ENTRIES", 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_single_non_finite_entry_is_detected(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5, dtype=dtype)
    assert blocks.all_finite(tensor)
    tensor[2, 3] = bad
    assert not blocks.all_finite(tensor)


def test_finite_tensor_with_overflowing_sum_passes() -> None:
    assert blocks.all_finite(torch.full((8,), torch.finfo(torch.float32).max))
    assert blocks.all_finite(torch.full((8,), 65504.0, dtype=torch.float16))


def test_cancelling_infinities_are_detected() -> None:
    assert not blocks.all_finite(torch.tensor([float("inf"), -float("inf")]))


def test_distance_and_equality() -> None:
    """(1, 2, ..., 6) against zeros: 91. bfloat16 and float32 of the same numbers are equal."""
    a = torch.arange(1.0, 7.0)
    assert blocks.squared_distance(a, torch.zeros(6)) == 91
    assert blocks.squared_distance(a.bfloat16(), torch.zeros(6)) == 91
    assert blocks.equal(a, a.bfloat16())
    assert not blocks.equal(a, a.bfloat16() + torch.tensor([0, 0, 0, 0, 0, 1.0]))


def test_rule_applied_by_blocks_equals_the_rule() -> None:
    torch.manual_seed(0)
    models, base = list(torch.rand(3, 3, 5)), torch.rand(3, 5)
    whole = selective.ram(models, base, [], eps=0.2)
    parts = torch.empty(3, 5)
    blocks.apply_rule_by_block(parts, selective.ram, models, base, [1.0] * 3, {"eps": 0.2})
    assert torch.equal(whole, parts)
    scalar, merged = [torch.tensor(1.0), torch.tensor(3.0)], torch.empty(())
    blocks.apply_rule_by_block(merged, rules.linear, scalar, None, [1.0, 1.0], {"normalize": True})
    assert merged == 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64])
def test_fingerprint_depends_on_bits_positions_and_length(dtype: torch.dtype) -> None:
    """11 entries: blocks of 4 words of 8 bytes, and a remainder of less than 8 bytes."""
    tensor = torch.arange(11).to(dtype)
    assert blocks.fingerprint(tensor) == blocks.fingerprint(tensor.clone())
    assert blocks.fingerprint(tensor) != blocks.fingerprint(tensor[:10])
    for place in range(tensor.numel() * tensor.element_size()):
        changed = tensor.clone()
        changed.view(torch.uint8)[place] ^= 1
        assert blocks.fingerprint(changed) != blocks.fingerprint(tensor)
    moved = torch.arange(64.0, dtype=torch.float64)
    assert blocks.fingerprint(moved) != blocks.fingerprint(moved.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mask_largest_equals_a_stable_sort(dtype: torch.dtype) -> None:
    """Few distinct values, so that the threshold falls among equal ones; the first of them are taken."""
    torch.manual_seed(1)
    for rows, columns in ((1, 1), (3, 5), (7, 2)):
        delta = torch.randint(-3, 4, (rows, columns)).to(dtype) / 3
        order = delta.reshape(-1).abs().argsort(descending=True, stable=True)
        for count in range(1, delta.numel() + 1):
            expected = torch.zeros(delta.numel(), dtype=torch.bool)
            expected[order[:count]] = True
            assert torch.equal(sparsify.mask_largest(delta, count).reshape(-1), expected)


def test_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with blocks.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
