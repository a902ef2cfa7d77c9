"""The processes that train one model together, as the parts of an RL step use them: one object in `TrainContext.ranks`.

`Ranks` is one process alone: it divides nothing and asks nobody. `SeveralRanks` does the same things for several,
by the functions of `distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor, nn

from posttrain.batch import Rollout
from posttrain.rollout.engine_client import TrainingRanks
from posttrain.train import distributed, rollout_exchange, sharding

T = TypeVar("T")


class Ranks(TrainingRanks):
    """One process."""

    count = 1
    number = 0
    model_parallel_size = 1  # ranks that run the same rows as this one, itself included
    loss_share = 1.0  # what this one multiplies the loss of its rows by

    def gather(self, value: T) -> list[T]:
        """Everyone's value, by rank."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        return value

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` on every rank and return this rank's value. If it fails on any, all raise."""
        return function(*args)

    def gather_rollouts(
        self, waiting: AbstractContextManager[None], by_row: bool, function: Callable[..., T], *args: Any
    ) -> list[T]:
        """`gather_results` for what holds rollouts, whose arrays travel packed. by_row: those of other ranks come
        without tokens and text."""
        del waiting, by_row
        return [function(*args)]

    def send_tokens(self, rollouts: Sequence[Rollout], owners: Sequence[int]) -> None:
        """Bring tokens and text of each rollout to the ranks that train on it, in place. owners: their numbers, counted
        in ranks that run the same rows."""

    def run_passes(self, passes: Callable[..., T], *args: Any) -> T:
        """`run` for forward and backward passes of the trained model."""
        return passes(*args)

    def sum_passes(
        self, trained: Sequence[nn.Module], passes: Callable[..., Mapping[str, float]], *args: Any
    ) -> Mapping[str, float]:
        """The same for passes that return numbers by name and leave gradients in the `trained` modules; returns the
        sums over the rows of all ranks, and adds up the gradients."""
        del trained
        return passes(*args)

    def idle_passes(self, passes: int) -> int:
        """How many passes this rank must add to its own, so that all make as many as a divided model needs. Ask before
        the first of them: the others may not be in the middle of a pass."""
        del passes
        return 0

    def total(self, numbers: Mapping[str, float], *, of_rows: bool = True) -> dict[str, float]:
        """Sums over ranks by name; a rank that lacks a name adds nothing. of_rows: the numbers are sums over rows, each
        of which counts once."""
        del of_rows
        return dict(numbers)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of what the rows of all ranks gave, in place."""
        return tensor

    def my_rows(self, costs: Sequence[float], units: Sequence[int] | None = None) -> Sequence[int]:
        """Numbers of the rows that this rank works on, rising; rows of one unit stay together."""
        del units
        return range(len(costs))


class SeveralRanks(Ranks):
    """Several processes. divided: each holds a part of every weight (`model.shard`)."""

    def __init__(self, *, divided: bool) -> None:
        self.count, self.number, self.divided = distributed.world(), distributed.rank(), divided
        self.is_main = self.number == 0
        self.model_parallel_size, self.loss_share = distributed.model_parallel_size(), distributed.loss_share()

    def gather(self, value: T) -> list[T]:
        return distributed.gather(value)

    def broadcast(self, value: T) -> T:
        return distributed.broadcast_from_rank0(value)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        return distributed.run_all_or_raise(function, *args)

    def gather_results(self, waiting: AbstractContextManager[None], function: Callable[..., T], *args: Any) -> list[T]:
        mine = distributed.capture(function, *args)
        with waiting:
            return distributed.gather_or_raise(mine)

    def gather_rollouts(
        self, waiting: AbstractContextManager[None], by_row: bool, function: Callable[..., T], *args: Any
    ) -> list[T]:
        mine = distributed.capture(function, *args)
        with waiting:
            return rollout_exchange.gather_rollouts(mine, by_row=by_row)

    def send_tokens(self, rollouts: Sequence[Rollout], owners: Sequence[int]) -> None:
        rollout_exchange.send_tokens(rollouts, owners, self.model_parallel_size)

    def _capture_passes(self, passes: Callable[..., T], *args: Any) -> distributed.Captured[T]:
        """What passes return or raise. If the model is divided, an error is raised at once: the others wait for this
        rank within a pass, where only `distributed.propagate_failures` reaches them."""
        return distributed.Captured(passes(*args)) if self.divided else distributed.capture(passes, *args)

    def run_passes(self, passes: Callable[..., T], *args: Any) -> T:
        return distributed.value_or_raise(self._capture_passes(passes, *args))

    def sum_passes(
        self, trained: Sequence[nn.Module], passes: Callable[..., Mapping[str, float]], *args: Any
    ) -> Mapping[str, float]:
        sums = distributed.sum_over_ranks(distributed.gather_or_raise(self._capture_passes(passes, *args)))
        distributed.sum_gradients(*trained)
        sharding.drop_unseen_gradients(trained[0])
        return {name: value / self.model_parallel_size for name, value in sums.items()}

    def idle_passes(self, passes: int) -> int:
        return max(distributed.gather(passes)) - passes if self.divided else 0

    def total(self, numbers: Mapping[str, float], *, of_rows: bool = True) -> dict[str, float]:
        times = self.model_parallel_size if of_rows else 1
        return {name: value / times for name, value in distributed.all_reduce_numbers(numbers).items()}

    def sum(self, tensor: Tensor) -> Tensor:
        return distributed.sum_of_passes(tensor)

    def my_rows(self, costs: Sequence[float], units: Sequence[int] | None = None) -> Sequence[int]:
        return distributed.my_rows(costs, units)


def ranks_of_run(*, divided: bool) -> Ranks:
    """The ranks that this process is one of."""
    return SeveralRanks(divided=divided) if distributed.world() > 1 else Ranks()
