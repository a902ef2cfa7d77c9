"""Imports of large packages without Python's cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_collection(*, freeze: bool = False) -> Iterator[None]:
    """Turn the garbage collector off inside the block, for imports. No-op if it is off.

    Torch, transformers and vLLM create half a million objects that live as long as the process; collections during
    their import take a quarter of its time. freeze: later collections skip all objects that exist at the end of the
    block, which otherwise take 0.3 s each. Not for blocks during which another thread leaves garbage: it would be kept.
    """
    if not gc.isenabled():
        yield
        return
    if freeze:
        gc.collect()  # `gc.freeze` would keep existing garbage
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        gc.enable()
