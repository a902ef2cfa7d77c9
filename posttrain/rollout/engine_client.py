"""Interface between `VllmEngine` and a vLLM engine that runs in another process, here or on another machine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, TypeVar, cast

from posttrain.errors import EngineError
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.engine import Completion
from posttrain.rollout.requests import Request

TransferCall = Literal["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
T = TypeVar("T")
C = TypeVar("C", bound="EngineClient")
INFO = {"init_weight_transfer_engine": "init_info", "update_weights": "update_info"}  # vLLM's names of the arguments


class ServerLost(EngineError):
    """A server has ended, cannot be reached or does not answer; other servers can take over its requests."""


class RequestFailed(EngineError):
    """A server failed at one request and keeps running; the request itself may be the cause."""


class EngineClient(Protocol):
    """One vLLM engine in a process of its own.

    Coroutines run in the loop of `posttrain.rollout.loop`. All raise EngineError when the engine fails, and soon after
    its process has ended, whatever they wait for.
    """

    name: str  # location of the engine, for messages
    workers: int  # processes that each hold a shard of the weights: tensor-parallel size
    lost: ServerLost | None = None  # why this engine gets no more requests

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Return n samples. Samples that `pause` interrupts have finish `paused`. Cancelling it aborts the request."""
        ...

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """Return log p(ids[t] | ids[:t]) for t = 1 ... len(ids)-1 at temperature 1. adapter: name of the LoRA adapter
        to use, if there are several."""
        ...

    async def pause(self) -> None:
        """Interrupt running requests. Returns when the engine is idle and every `complete` has returned."""
        ...

    async def resume(self) -> None:
        """Accept requests again."""
        ...

    async def transfer(self, call: TransferCall, info: Mapping[str, Any] | None = None) -> None:
        """Make one call of vLLM's weight transfer, and return when the engine has executed it. The first and the third
        call take `info`.

        `init_weight_transfer_engine` is called once, for an engine that was started with our backend. Between
        `start_weight_update` and `finish_weight_update` nothing is generated; afterwards the prefix cache of the old
        weights is dropped.
        """
        ...

    async def load_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        """Load LoRA adapters, a folder for each name, and use them from now on. A request without an adapter name uses
        the first. The prefix cache is dropped. The folders may be deleted afterwards."""
        ...

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free GPU memory: that of the cache, and that of the weights (kept in host memory, or dropped). No-op for an
        engine that does not share the trainer's GPU."""
        del keep_weights

    async def wake(self) -> None:
        """Allocate the memory again. Dropped weights are undefined until the next update."""
        return

    def close(self) -> None:
        """End the engine. On return its process has ended and its memory is free. May be called twice."""
        ...


def make_completion(
    finish: str | None, ids: Sequence[int], logps: Sequence[float] | None, *, pausing: bool = True, where: str = ""
) -> Completion:
    """Return vLLM's answer for one sample as a Completion. pausing: an aborted sample continues later.

    Raises EngineError for any other end, and for a number of log-probs that differs from the number of tokens.
    """
    if pausing and finish == "abort":
        finish = "paused"
    if finish not in ("stop", "length", "paused"):
        raise EngineError(f"vLLM gave up a request: finish reason {finish}", where=where)
    if logps is not None and len(logps) != len(ids):
        raise EngineError(f"vLLM reported {len(logps)} log-probs for {len(ids)} tokens", where=where)
    return Completion(tuple(ids), None if logps is None else tuple(logps), cast(Any, finish))


class TrainingRanks:
    """The training processes, as far as a sync needs them; this base class is for a single process."""

    is_main = True  # rank 0, which writes to the run directory

    def gather_results(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function` on each rank and return the results by rank. If it fails on any rank, all ranks raise."""
        return [function(*args)]


def run_on_living(clients: Sequence[C], work: Callable[[C], Coroutine[Any, Any, T]]) -> dict[C, T]:
    """Run `work` for all engines that are not lost, concurrently, and return the result of each. Blocks.

    An engine that raises ServerLost is marked as lost and left out. Raises EngineError if one fails in another way, and
    ServerLost if all are lost.
    """
    living = [client for client in clients if client.lost is None]
    found: dict[C, T] = {}
    answers = loop.run_all([loop.catch(work(client), ServerLost) for client in living])
    for client, answer in zip(living, answers, strict=True):
        if isinstance(answer, ServerLost):
            client.lost = client.lost or answer.copy()
        else:
            found[client] = answer
    if not found:
        raise_last(clients)
    return found


def raise_last(clients: Sequence[EngineClient]) -> NoReturn:
    """Raise the error of the last of these engines, all of which are lost."""
    lost = [client.lost for client in clients if client.lost is not None]
    raise lost[-1].copy() if lost else EngineError("no server is left")


def close_all(clients: Iterable[EngineClient]) -> None:
    """End the engines and free their memory."""
    for client in clients:
        client.close()
