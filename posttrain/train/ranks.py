"""Interface to the training processes as the parts of an RL step use it: one object in `TrainContext.ranks`.

`Ranks` is a single process: nothing is divided or communicated. `SeveralRanks` implements the same methods for several
processes with the functions of `distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor, nn

from posttrain.batch import Rollout
from posttrain.rollout.engine_client import TrainingRanks
from posttrain.train import data_parallel, distributed, rollout_exchange, sharding

T = TypeVar("T")


class Ranks(TrainingRanks):
    """A single training process."""

    count = 1
    number = 0
    model_parallel_size = 1  # number of ranks that run the same rows, including this one
    loss_share = 1.0  # factor of this rank on the loss of its rows

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value."""
        return value

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` on every rank and return this rank's value. If the call fails on any rank, all raise."""
        return function(*args)

    def gather_rollouts(
        self, waiting: AbstractContextManager[None], by_row: bool, function: Callable[..., T], *args: Any
    ) -> list[T]:
        """Like `gather_results`, for values that hold rollouts, whose arrays are sent packed.

        waiting: context entered while a rank waits for other ranks; unused with one process. by_row: rollouts of other
        ranks come without tokens and text.
        """
        del waiting, by_row
        return [function(*args)]

    def send_tokens(self, rollouts: Sequence[Rollout], owners: Sequence[int]) -> None:
        """Move tokens and text of each rollout to the ranks that train on it, in place.

        owners: for each rollout, the index of its group of ranks that run the same rows.
        """

    def run_passes(self, passes: Callable[..., T], *args: Any) -> T:
        """Call `passes`, which runs forward and backward passes of the trained model; otherwise like `run`."""
        return passes(*args)

    def sum_passes(
        self, trained: Sequence[nn.Module], passes: Callable[..., Mapping[str, float]], *args: Any
    ) -> Mapping[str, float]:
        """Call `passes`, which returns numbers by name and leaves gradients in the `trained` modules.

        Returns the sums of the numbers over the rows of all ranks, and sums the gradients over ranks.
        """
        del trained
        return passes(*args)

    def idle_passes(self, passes: int) -> int:
        """Return how many passes this rank must add so that all ranks run equally many, as a divided model needs.

        Call this before the first of the passes: other ranks must not be in the middle of a pass.
        """
        del passes
        return 0

    def total(self, numbers: Mapping[str, float], *, of_rows: bool = True) -> dict[str, float]:
        """Sum numbers over ranks by name; a rank that lacks a name adds nothing.

        of_rows: the numbers are sums over rows, so ranks that run the same rows count once.
        """
        del of_rows
        return dict(numbers)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the rows of all ranks, in place."""
        return tensor

    def my_rows(self, costs: Sequence[float], units: Sequence[int] | None = None) -> Sequence[int]:
        """Return the indices of the rows that this rank works on, ascending; rows of one unit stay together."""
        del units
        return range(len(costs))


class SeveralRanks(Ranks):
    """Several training processes. divided: each holds a part of every weight (`model.shard`)."""

    def __init__(self, *, divided: bool) -> None:
        self.count, self.number, self.divided = distributed.world(), distributed.rank(), divided
        self.is_main = self.number == 0
        self.model_parallel_size, self.loss_share = data_parallel.model_parallel_size(), data_parallel.loss_share()

    def gather(self, value: T) -> list[T]:
        return distributed.gather(value)

    def broadcast(self, value: T) -> T:
        return distributed.broadcast_from_rank0(value)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        return distributed.run_all_or_raise(function, *args)

    def gather_results(self, function: Callable[..., T], *args: Any) -> list[T]:
        return distributed.gather_or_raise(distributed.capture(function, *args))

    def gather_rollouts(
        self, waiting: AbstractContextManager[None], by_row: bool, function: Callable[..., T], *args: Any
    ) -> list[T]:
        own = distributed.capture(function, *args)
        with waiting:
            return rollout_exchange.gather_rollouts(own, by_row=by_row)

    def send_tokens(self, rollouts: Sequence[Rollout], owners: Sequence[int]) -> None:
        rollout_exchange.send_tokens(rollouts, owners, self.model_parallel_size)

    def run_passes(self, passes: Callable[..., T], *args: Any) -> T:
        return distributed.value_or_raise(sharding.capture_passes(self.divided, passes, *args))

    def sum_passes(
        self, trained: Sequence[nn.Module], passes: Callable[..., Mapping[str, float]], *args: Any
    ) -> Mapping[str, float]:
        captured = sharding.capture_passes(self.divided, passes, *args)
        sums = distributed.sum_by_name(distributed.gather_or_raise(captured))
        data_parallel.sum_gradients(*trained)
        sharding.drop_unseen_gradients(trained[0])
        return {name: value / self.model_parallel_size for name, value in sums.items()}

    def idle_passes(self, passes: int) -> int:
        return sharding.idle_passes(passes, self.divided)

    def total(self, numbers: Mapping[str, float], *, of_rows: bool = True) -> dict[str, float]:
        times = self.model_parallel_size if of_rows else 1
        return {name: value / times for name, value in distributed.all_reduce_numbers(numbers).items()}

    def sum(self, tensor: Tensor) -> Tensor:
        return data_parallel.sum_of_passes(tensor)

    def my_rows(self, costs: Sequence[float], units: Sequence[int] | None = None) -> Sequence[int]:
        return data_parallel.my_rows(costs, units)


def ranks_of_run(*, divided: bool) -> Ranks:
    """Return the ranks of this run."""
    return SeveralRanks(divided=divided) if distributed.world() > 1 else Ranks()
