"""Rendezvous of ranks at a store that contains keys of earlier starts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from posttrain.train import rank_rendezvous
from posttrain.train.rank_rendezvous import agree_on_start


def test_each_start_has_a_unique_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second start, rank 0 finds keys of the first; in the third, of a rank that died before it got its
    answer."""
    monkeypatch.setattr(rank_rendezvous, "POLL_S", 0.01)
    store = dist.HashStore()
    names = []
    with ThreadPoolExecutor(3) as ranks:
        for start in range(3):
            if start == 2:
                store.set("posttrain/here/1", "dead")
            found = [ranks.submit(agree_on_start, store, rank, 3, timeout_s=20) for rank in (0, 2, 1)]
            names.append({one.result() for one in found})
    assert [len(name) for name in names] == [1, 1, 1] and len(set.union(*names)) == 3


def test_missing_rank_times_out() -> None:
    store = dist.HashStore()
    store.set("posttrain/here/1", "dead")
    with pytest.raises(RuntimeError, match="only 1 of 2 ranks arrived"):
        agree_on_start(store, 0, 2, timeout_s=0.2)
