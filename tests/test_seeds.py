"""Derived seeds: equal on every machine and independent of each other."""

from posttrain.seeds import derive


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
