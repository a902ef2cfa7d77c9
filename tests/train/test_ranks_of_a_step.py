"""Rank queries of a training step: one process answers them itself, and several support all queries of one."""

from __future__ import annotations

import inspect

import pytest
import torch

from posttrain.train.ranks import Ranks, SeveralRanks, ranks_of_run


def test_several_ranks_override_every_query() -> None:
    """A query defined only in `Ranks` would be answered by each of several processes for itself."""
    asked = {name for name, _ in inspect.getmembers(Ranks, inspect.isfunction) if not name.startswith("_")}
    assert asked and asked <= vars(SeveralRanks).keys()


def test_one_process_shares_nothing_and_communicates_nothing() -> None:
    alone, numbers = ranks_of_run(divided=False), torch.tensor([1.0, 2.0])
    assert type(alone) is Ranks and (alone.count, alone.is_main) == (1, True)
    assert alone.gather(3) == [3] and alone.broadcast(3) == 3 and alone.sum(numbers) is numbers
    assert list(alone.my_rows([5.0, 1.0, 2.0], [0, 0, 1])) == [0, 1, 2]
    assert alone.run(max, 1, 2) == alone.run_passes(max, 1, 2) == 2
    assert alone.sum_passes([], dict, {"loss": 1.0}) == alone.total({"loss": 1.0}) == {"loss": 1.0}
    assert alone.idle_passes(4) == 0 and alone.number == 0
    assert alone.gather_results(max, 1, 2) == [2]
    with pytest.raises(ZeroDivisionError):
        alone.gather_results(lambda: 1 / 0)
