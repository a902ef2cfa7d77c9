"""One vLLM engine shared by the training processes of a group, on whose GPUs the engine's workers run.

The first process of a group starts the engine and has an `EngineHub`, which listens on a socket file. Every process of
the group, including the first, connects to the hub with a `SharedClient`. Requests for samples go to the engine as they
arrive. Every other call (pause, weights, probe scores, sleep) is made by all processes and executed once, when the last
has made it: so no process samples while another sends its part of the weights or waits for its scores.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import pickle
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from posttrain.errors import EngineError, PeerLost, PosttrainError
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.engine import Completion
from posttrain.rollout.engine_client import EngineClient, TransferCall
from posttrain.rollout.requests import Request
from posttrain.scratch import Scratch

LENGTH = 8  # bytes of the length prefix of a message
CLOSE_S = 10.0  # time for the first process to end the engine
LEAVE, CANCEL = "leave", "cancel"
ENDED, ENDED_HINT = "the process that holds the engine has ended", "its own message says why"
Arguments = dict[str, Any]
A = TypeVar("A")


class CollectiveCalls(Generic[A]):
    """Executes a call once all `size` members have made it, and gives each member its result or its error.

    When a member leaves, no more calls are executed: members that wait, and later calls, get the reason.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.over: PosttrainError | None = None  # why no more calls are executed
        self._call = ""
        self._asked: dict[int, A] = {}  # arguments by member
        self._work: asyncio.Future[asyncio.Task[Any]] | None = None  # done once all members have made the call

    async def join(
        self, member: int, call: str, argument: A, do: Callable[[Sequence[A]], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Wait for all members to make this call, and return the result of `do` on their arguments, in order of member.

        do: called once, by the last member to arrive. Raises EngineError if members make different calls.
        """
        if self.over is not None:
            raise self.over.copy()
        if self._work is None:
            self._call, self._work = call, asyncio.get_running_loop().create_future()
            self._work.add_done_callback(
                asyncio.Future.exception
            )  # reads it: asyncio warns of an error that nobody read
        work = self._work
        if call != self._call or member in self._asked:
            self.end(EngineError(f"ranks that share an engine call `{self._call}` and `{call}` at the same time"))
        self._asked[member] = argument
        if len(self._asked) == self.size and not work.done():
            work.set_result(asyncio.create_task(do([self._asked[place] for place in range(self.size)])))
            self._asked, self._work = {}, None
        try:
            return await asyncio.shield(await asyncio.shield(work))
        except asyncio.CancelledError:
            self.end(EngineError(f"a rank has cancelled `{call}`, which all ranks of an engine call together"))
            raise

    def end(self, error: PosttrainError) -> None:
        """Execute no more calls because a member leaves; the first reason is kept."""
        self.over = self.over or error
        if self._work is not None and not self._work.done():
            self._work.set_exception(error)


class EngineHub:
    """Server of a group's engine, in the group's first process. Its socket file is in a folder that no other user can
    enter, because messages are pickled objects."""

    def __init__(self, size: int) -> None:
        """Raises EngineError if the socket file cannot be created."""
        self.home = Scratch("group")
        self.path = self.home.path / "engine"
        self.collective = CollectiveCalls[Arguments](size)
        self.client: EngineClient | None = None
        self.sampling = 0  # requests for samples in progress
        self.ready = asyncio.Event()  # set once the engine has started
        self._links: set[asyncio.StreamWriter] = set()
        try:
            self._server = loop.run(asyncio.start_unix_server(self._serve, self.path))
        except OSError as cause:
            self.home.close()
            hint = "set TMPDIR to a folder with a short path"
            raise EngineError(f"no socket file can be made: {cause}", where=str(self.path), hint=hint) from cause

    def attach(self, client: EngineClient) -> None:
        """Pass calls to this engine from now on; earlier calls have waited."""
        self.client = client
        loop.call(self.ready.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one process until its connection ends."""
        tasks = dict[int, asyncio.Task[None]]()
        self._links.add(writer)
        rank, member = -1, -1
        try:
            rank, member = await read(reader)
            while True:
                number, call, arguments = await read(reader)
                if call == CANCEL:
                    if number in tasks:
                        tasks[number].cancel()
                elif call == LEAVE:
                    self.collective.end(arguments)
                else:
                    tasks[number] = asyncio.create_task(self._answer(writer, member, number, call, arguments))
                    tasks[number].add_done_callback(functools.partial(tasks.pop, number))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.collective.end(PeerLost(f"rank {rank} has left the engine", hint=ENDED_HINT))
        finally:
            for task in list(tasks.values()):
                task.cancel()

    async def _answer(
        self, writer: asyncio.StreamWriter, member: int, number: int, call: str, arguments: Arguments
    ) -> None:
        """Execute one call and send its result or its error."""
        try:
            await self.ready.wait()
            if call == "complete":
                answer = await self._sample(arguments)
            else:
                name = arguments.get("call", call)
                answer = await self.collective.join(member, name, arguments, functools.partial(self._do_once, call))
        except PosttrainError as raised:
            answer = raised
        except Exception as raised:
            answer = EngineError(f"{type(raised).__name__}: {raised}")
        write(writer, (number, answer))

    async def _sample(self, arguments: Arguments) -> Any:
        assert self.client is not None
        self.sampling += 1
        try:
            return await self.client.complete(**arguments)
        finally:
            self.sampling -= 1

    async def _do_once(self, call: str, asked: Sequence[Arguments]) -> Any:
        """Execute a call that all processes have made. asked: the arguments of each process."""
        found = await getattr(self.client, call)(**merge_arguments(call, asked))
        while call == "pause" and self.sampling:  # interrupted samples are still being returned
            await asyncio.sleep(0)
        return found

    def close(self) -> None:
        """End the engine, then the connections: a process that sees its connection end may use the memory."""
        if self.client is not None:
            self.client.close()
        loop.run(self._hang_up())
        self.home.close()

    async def _hang_up(self) -> None:
        self._server.close()
        for writer in self._links:
            writer.close()
        self._links.clear()


def merge_arguments(call: str, asked: Sequence[Arguments]) -> Arguments:
    """Return the arguments for the one execution of a call that all processes of a group make. asked: arguments by
    place.

    Arguments are equal except for a bucket of weights: each process has it on its own GPU, where that GPU's worker
    reads it. Without GPUs, and for adapters, the first process has written the file. Raises EngineError for arguments
    that differ.
    """
    first = asked[0]
    if call not in ("transfer", "load_adapters") and any(arguments != first for arguments in asked):
        raise EngineError(f"ranks that share an engine call `{call}` with different arguments")
    if call != "transfer" or not first.get("info") or "gpu" not in first["info"]:
        return first
    gpus = [arguments["info"]["gpu"] for arguments in asked]
    if any(gpu["names"] != gpus[0]["names"] for gpu in gpus):
        raise EngineError("ranks that share an engine send different weights at the same time")
    buffers = {uuid: buffer for gpu in gpus for uuid, buffer in gpu["buffers"].items()}
    return {**first, "info": {"gpu": {**gpus[0], "buffers": buffers}}}


class SharedClient(EngineClient):
    """An `EngineClient` of an engine that the processes of a group share. hub: this process's own hub, which is closed
    with the client; None on all but the group's first process."""

    name = "the engine beside the trainers"

    def __init__(self, path: Path, rank: int, member: int, workers: int, hub: EngineHub | None = None) -> None:
        """path: of the hub's socket file. rank: of this process. member: its place in the group."""
        self.rank, self.workers, self.hub = rank, workers, hub
        self.ended: PosttrainError | None = None  # why the connection has ended
        self._numbers = itertools.count()
        self._waiting = dict[int, asyncio.Future[Any]]()
        self._closed = False
        loop.run(self._connect(path, member))

    async def _connect(self, path: Path, member: int) -> None:
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(path)
        except OSError as cause:
            raise PeerLost(ENDED, hint=ENDED_HINT) from cause
        write(self._writer, (self.rank, member))
        self._answers = asyncio.create_task(self._read_answers())

    async def _read_answers(self) -> None:
        """Pass answers, results or errors, to the calls that wait for them; at the end of the connection an error to
        all."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, answer = await read(self._reader)
                if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                    waiting.set_result(answer)
        self.ended = PeerLost(ENDED, hint=ENDED_HINT)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(self.ended.copy())

    async def _ask(self, method: str, **arguments: Any) -> Any:
        """Make a call at the hub and return its result or raise its error. Cancelling it cancels the call at
        the hub."""
        if self.ended is not None:
            raise self.ended.copy()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        write(self._writer, (number, method, arguments))
        try:
            found = await answer
        except asyncio.CancelledError:
            self._notify(number, CANCEL)
            raise
        finally:
            del self._waiting[number]
        if isinstance(found, PosttrainError):
            raise found
        return found

    def _notify(self, number: int, what: str, arguments: Any = None) -> None:
        """Send a message that is not answered; no-op once the connection has ended."""
        if self.ended is None:
            write(self._writer, (number, what, arguments))

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        found: list[Completion] = await self._ask("complete", request=request, sampling=plain_sampling(sampling))
        return found

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        found: list[float] = await self._ask("score", ids=list(ids), adapter=adapter)
        return found

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def transfer(self, call: TransferCall, info: Mapping[str, Any] | None = None) -> None:
        await self._ask("transfer", call=call, info=info)

    async def load_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        await self._ask("load_adapters", folders=dict(folders), version=version)

    async def sleep(self, *, keep_weights: bool) -> None:
        await self._ask("sleep", keep_weights=keep_weights)

    async def wake(self) -> None:
        await self._ask("wake")

    def leave(self, error: BaseException) -> None:
        """Report to the other processes that this one has failed in a collective call, so that none waits for it.

        error: passed on as it is if it is a PeerLost, which names the rank that failed first.
        """
        if not isinstance(error, PeerLost):
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            error = PeerLost(f"rank {self.rank} failed: {reason}", hint=ENDED_HINT)
        loop.call(self._notify, -1, LEAVE, error)

    def close(self) -> None:
        """End the connection; on the group's first process end the engine first."""
        if self._closed:
            return
        self._closed = True
        if self.hub is not None:
            self.hub.close()
        loop.run(self._close())

    async def _close(self) -> None:
        """Close the sending half of the connection, and wait until the first process has ended the engine, for CLOSE_S
        at most: it may fail before it does so."""
        with contextlib.suppress(OSError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
        await asyncio.wait({self._answers}, timeout=CLOSE_S)
        self._answers.cancel()
        self._writer.close()


def plain_sampling(sampling: Sampling) -> Sampling:
    """Return only the fields of `Sampling`: a recipe's section has many more, which would travel with every request."""
    return Sampling.model_construct(**{name: getattr(sampling, name) for name in Sampling.model_fields})


async def read(reader: asyncio.StreamReader) -> Any:
    """Return the next message. Raises IncompleteReadError at the end of the connection."""
    size = int.from_bytes(await reader.readexactly(LENGTH), "big")
    return pickle.loads(await reader.readexactly(size))


def write(writer: asyncio.StreamWriter, message: Any) -> None:
    """Send a message, pickled and with a length prefix."""
    data = pickle.dumps(message)
    writer.write(len(data).to_bytes(LENGTH, "big") + data)
