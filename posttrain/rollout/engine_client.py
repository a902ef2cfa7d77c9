"""What `VllmEngine` asks of a vLLM that runs in a process of its own, wherever that is."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, TypeVar

from posttrain.errors import EngineError
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.engine import Completion
from posttrain.rollout.requests import Request

TransferCall = Literal["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
T = TypeVar("T")
C = TypeVar("C", bound="EngineClient")
INFO = {"init_weight_transfer_engine": "init_info", "update_weights": "update_info"}  # what vLLM calls it


class ServerLost(EngineError):
    """A server has ended, cannot be reached or does not answer: others may be asked what it was asked."""


class RequestFailed(EngineError):
    """A server failed at one request and works on: the request itself may be at fault."""


class EngineClient(Protocol):
    """One vLLM engine in a process of its own.

    Coroutines run in the loop of `posttrain.rollout.loop`. All raise EngineError when the engine fails, and soon after
    its process has ended, whatever they wait for.
    """

    name: str  # where the engine is, for messages
    workers: int  # processes that each hold a part of the weights: GPUs of tensor parallelism
    lost: ServerLost | None = None  # why it is not asked anything any more

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        """n samples. Those that `pause` cut short have finish `paused`. Cancelling it gives the request up."""
        ...

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """log p(ids[t] | ids[:t]) for t = 1 ... len(ids)-1, at temperature 1; of several adapters, with that one."""
        ...

    async def pause(self) -> None:
        """Cut short what is under way. Returns when the engine is idle and every `complete` has returned."""
        ...

    async def resume(self) -> None:
        """Take requests again."""
        ...

    async def transfer(self, call: TransferCall, info: Mapping[str, Any] | None = None) -> None:
        """One call of vLLM's weight transfer, once the engine has obeyed it. `info` goes with the first and the third.

        The first comes once, to an engine that was started with our backend. Between `start_weight_update` and
        `finish_weight_update` nothing is generated; afterwards the prefix cache of the old weights is dropped.
        """
        ...

    async def load_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        """Use these LoRA adapters from now on: a folder for each name. A request that names none has the first. The
        prefix cache is dropped. The folders may go afterwards."""
        ...

    async def sleep(self, *, keep_weights: bool) -> None:
        """Give the GPU's memory back: the cache's, and the weights' (kept in the host's memory, or dropped). An engine
        whose GPU is not the trainer's does nothing."""
        del keep_weights

    async def wake(self) -> None:
        """Take the memory again. Dropped weights are undefined until an update."""
        return

    def close(self) -> None:
        """End the engine. When it returns, the process is gone and its memory is free. Calling it twice is fine."""
        ...


class TrainingRanks:
    """The processes that train one model together, as a sync needs them; here one alone."""

    is_main = True  # the rank that writes to the run directory, rank 0

    def gather_results(self, waiting: AbstractContextManager[None], function: Callable[..., T], *args: Any) -> list[T]:
        """What `function` returns on each rank, by rank. If it fails on any, all raise. waiting: opened while a rank
        waits for the others; one alone does not."""
        del waiting
        return [function(*args)]


def run_on_living(clients: Sequence[C], work: Callable[[C], Coroutine[Any, Any, T]]) -> dict[C, T]:
    """What `work` returns for each engine that is not lost, side by side. Blocks.

    An engine that is lost meanwhile is left out. Raises EngineError of one that fails in another way, and ServerLost
    where none is left.
    """

    async def attempt(client: C) -> T | ServerLost:
        try:
            return await work(client)
        except ServerLost as error:
            client.lost = client.lost or error.copy()
            return error

    living = [client for client in clients if client.lost is None]
    answers = dict(zip(living, loop.run_all([attempt(client) for client in living]), strict=True))
    found = {client: answer for client, answer in answers.items() if not isinstance(answer, ServerLost)}
    if not found:
        raise_last(clients)
    return found


def raise_last(clients: Sequence[EngineClient]) -> NoReturn:
    """Raise the error of the last of these engines, which are all lost."""
    lost = [client.lost for client in clients if client.lost is not None]
    raise lost[-1].copy() if lost else EngineError("no server is left")


def close_all(clients: Iterable[EngineClient]) -> None:
    """End the engines, and free their memory."""
    for client in clients:
        client.close()
