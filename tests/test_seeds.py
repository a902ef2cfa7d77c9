"""Derived seeds, equal on every machine and independent of each other, and the order of prompts."""

import pytest

from posttrain.errors import DataError
from posttrain.seeds import PromptSampler, derive


def test_seed_is_the_same_on_every_machine():
    """First 8 bytes of SHA-256 of `[0, "order", 1]`, without the top bit; computed with `printf | sha256sum`."""
    import hashlib

    digest = hashlib.sha256(b'[0, "order", 1]').hexdigest()
    assert derive(0, "order", 1) == int(digest[:16], 16) // 2


def test_neighboring_seeds_are_independent():
    seen = {derive(seed, name, step) for seed in range(10) for name in ("a", "b") for step in range(10)}
    assert len(seen) == 200
    assert max(seen) < 2**63
    assert derive(1, 23) != derive(12, 3)


def test_rows_of_a_step_depend_only_on_its_number() -> None:
    """7 items, 3 per step: steps 0..6 are 3 epochs.

    A sampler that starts at step 4 gives the same as one from step 0.
    """
    whole = PromptSampler(7, 3, seed=5)
    steps = [whole.step(s) for s in range(7)]
    assert PromptSampler(7, 3, seed=5).step(4) == steps[4]
    stream = [i for step in steps for i in step]
    for epoch in range(3):
        assert sorted(stream[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert stream[:7] != stream[7:14]
    assert stream[:7] != [i for s in range(3) for i in PromptSampler(7, 3, seed=6).step(s)][:7]


def test_take_continues_the_stream_of_the_steps() -> None:
    sampler = PromptSampler(5, 2, seed=1)
    assert sampler.take(2, 4) == sampler.step(1) + sampler.step(2)


def test_order_without_shuffling_is_that_of_the_data() -> None:
    sampler = PromptSampler(3, 2, shuffle=False)
    assert [sampler.step(s) for s in range(3)] == [[0, 1], [2, 0], [1, 2]]


def test_order_is_the_same_in_every_process() -> None:
    """Python's hash() changes between processes; this order must not: the expected order is listed here."""
    assert PromptSampler(6, 6, seed=0).step(0) == [4, 2, 5, 0, 1, 3]


def test_empty_data_is_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        PromptSampler(0, 2)
