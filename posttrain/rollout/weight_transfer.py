"""Sending weights to vLLM engines through vLLM's own weight transfer: the trainer's side. `worker` is the other side.

An update is a start, any number of buckets, and a finish; `EngineClient` passes them to an engine. Transport of a
bucket:

- `LocalSender`, for engines on this machine: memory that both processes map. On a GPU the bucket is copied into one
  buffer whose CUDA handle is sent; without a GPU it is a safetensors file in memory.
- `NcclSender`, for engines on other GPUs or machines: one broadcast per bucket (`nccl_group`).

Weights are read in the thread that calls `send`, which is the trainer's, so that it may gather sharded weights there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from posttrain.errors import EngineError
from posttrain.rollout import loop, nccl_group
from posttrain.rollout.engine_client import EngineClient, ServerLost, run_on_living
from posttrain.rollout.nccl_group import NcclGroup
from posttrain.tools.time_limits import in_thread

LOCAL_BACKEND = "posttrain"  # name under which `worker` registers it
BUCKET_BYTES = 1 << 28
NCCL_HINT = "set NCCL_DEBUG=INFO for NCCL's own messages"
LAST_S = 60.0  # for NCCL threads to end, once all servers have answered or their groups were aborted

Named = list[tuple[str, Tensor]]
T = TypeVar("T")


def buckets(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[Named, int]]:
    """Yield (weights, their size in bytes as sent), up to BUCKET_BYTES each; a larger tensor is alone in its bucket.

    Within a bucket wider dtypes come first, so that every tensor is aligned to its dtype. dtype: see `sent_dtype`.
    """
    bucket, size = Named(), 0
    for name, tensor in weights:
        more = tensor.numel() * sent_dtype(tensor, dtype).itemsize
        if bucket and size + more > BUCKET_BYTES:
            yield sorted(bucket, key=lambda item: -sent_dtype(item[1], dtype).itemsize), size
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += more
    if bucket:
        yield sorted(bucket, key=lambda item: -sent_dtype(item[1], dtype).itemsize), size


def sent_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight is sent: the engine's `dtype` for matrices; vectors, which some architectures
    keep in float32, and integers keep their own."""
    return dtype if tensor.is_floating_point() and tensor.dim() > 1 else tensor.dtype


class LocalSender:
    """Sends weights to engines on this machine; if this process has a GPU, to engines on the same GPU.

    Of an engine that several processes share, each process sends its copy to the worker on its GPU. Without GPUs one
    process writes the file for all; the others have `writes` False and only iterate over the weights.
    """

    def __init__(
        self, clients: Sequence[EngineClient], device: torch.device, dtype: torch.dtype, *, writes: bool = True
    ) -> None:
        self.clients, self.device, self.dtype, self.writes = list(clients), device, dtype, writes
        loop.run_all([client.transfer("init_weight_transfer_engine", {}) for client in clients])

    def add(self, client: EngineClient) -> None:
        """Include this engine in later updates."""
        loop.run(client.transfer("init_weight_transfer_engine", {}))
        self.clients.append(client)

    def remove(self, client: EngineClient) -> None:
        """Exclude this engine from later updates."""
        self.clients.remove(client)

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights. weights: (checkpoint name, tensor). Blocks; raises EngineError. The engines must be
        idle.

        A server that is lost meanwhile gets no more buckets, and the others get the rest, unless all are lost.
        """
        with weight_update(self.clients):
            if self.device.type == "cuda":
                self._send_on_gpu(weights)
            else:
                self._send_files(weights)

    def _send_on_gpu(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        staging: Staging | None = None
        for bucket, size in buckets(weights, self.dtype):
            if staging is None or staging.buffer.numel() < size:
                if staging is not None:
                    staging.release()
                staging = Staging(max(size, BUCKET_BYTES), self.device)
            described = pack(bucket, self.dtype, staging.buffer)
            send_bucket({client: {"gpu": {**described, **staging.export_handle()}} for client in self.clients})
        if staging is not None:
            staging.release()

    def _send_files(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for bucket, _ in buckets(weights, self.dtype):
            if not self.writes:
                send_bucket({client: {} for client in self.clients})
                continue
            state = {name: tensor.to(sent_dtype(tensor, self.dtype)).contiguous() for name, tensor in bucket}
            with memory_file(save(state)) as path:
                send_bucket({client: {"file": path} for client in self.clients})

    def close(self) -> None:
        """Do nothing: no memory is held between updates."""


class NcclSender:
    """Sends weights to engines on other GPUs, of this machine or others.

    Each engine has its own group with the trainer, since NCCL does not allow a GPU twice in a group. A bucket is packed
    once, and broadcast to one group after the other.
    """

    def __init__(self, clients: Sequence[EngineClient], device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.groups: dict[EngineClient, NcclGroup] = {}
        try:
            for client in clients:
                self.add(client)
        except BaseException:
            self.close()
            raise

    def add(self, client: EngineClient) -> None:
        """Include this engine in later updates: create its NCCL group.

        If the engine dies before it has joined, this raises at once, and the thread that waits for it stays blocked
        until the trainer ends (see `NcclGroup`): one thread per engine lost in this moment, which holds no weights.
        """
        group_id, size = nccl_group.new_id(), 1 + client.workers
        joined = run_nccl(functools.partial(NcclGroup, group_id, nccl_group.TRAINER, size, self.device))
        # the thread waits for the workers, which join the group in the request below
        try:
            asked = client.transfer("init_weight_transfer_engine", {"group_id": group_id, "size": size})
            loop.run(await_unless_failed(joined, asked))
            wait_for_nccl([joined], f"NCCL did not join {client.name}")
            self.groups[client] = joined.result()
        except BaseException:
            joined.add_done_callback(leave_group)
            raise

    def remove(self, client: EngineClient) -> None:
        """Exclude this engine from later updates, and leave its group."""
        self.groups.pop(client).abort()

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights (`LocalSender.send`)."""
        buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        clients = list(self.groups)
        with weight_update(clients):
            for bucket, size in buckets(weights, self.dtype):
                if buffer.numel() < size:
                    buffer = torch.empty(max(size, BUCKET_BYTES), dtype=torch.uint8, device=self.device)
                described = {"nccl": pack(bucket, self.dtype, buffer)}
                broadcasts = self._start_broadcasts(buffer[:size])
                try:
                    run_on_living(clients, functools.partial(self._receive, described, broadcasts))
                    wait_for_nccl(broadcasts.values(), "a broadcast of weights did not end")
                except BaseException:
                    self.close()  # otherwise the broadcast waits forever for a worker that has died
                    raise

    def _start_broadcasts(self, buffer: Tensor) -> dict[EngineClient, Future[None]]:
        """Broadcast `buffer` in a thread, to one engine after the other, and return a future for each engine.

        If NCCL fails at an engine, its future raises ServerLost and the broadcasts to the other engines go on.
        """
        groups = self.groups
        broadcasts = {client: Future[None]() for client in groups}

        def broadcast_to_all() -> None:
            for client, broadcast in broadcasts.items():
                try:
                    if client.lost is None:
                        groups[client].broadcast(buffer)
                    broadcast.set_result(None)
                except RuntimeError as cause:
                    broadcast.set_exception(ServerLost(str(cause), where=client.name, hint=NCCL_HINT))

        in_thread(broadcast_to_all, "weights")
        return broadcasts

    async def _receive(
        self, described: dict[str, Any], broadcasts: Mapping[EngineClient, Future[None]], client: EngineClient
    ) -> None:
        """Have an engine take the bucket that is broadcast now. If the engine is lost, abort its group, because the
        broadcast to the next engine waits for the broadcast to this one."""
        try:
            await await_unless_failed(broadcasts[client], client.transfer("update_weights", described))
        except ServerLost:
            await asyncio.to_thread(self.groups[client].abort)
            raise

    def close(self) -> None:
        """Leave all groups; nothing can be sent afterwards."""
        groups, self.groups = self.groups, {}
        for group in groups.values():
            group.abort()


WeightSender = LocalSender | NcclSender


@contextlib.contextmanager
def weight_update(clients: Sequence[EngineClient]) -> Iterator[None]:
    """Start a weight update on all engines, and finish it when the block ends."""
    run_on_living(clients, lambda client: client.transfer("start_weight_update"))
    yield
    run_on_living(clients, lambda client: client.transfer("finish_weight_update"))


def send_bucket(infos: Mapping[EngineClient, dict[str, Any]]) -> None:
    """Send a bucket to all engines and wait until they have loaded it. infos: location of the bucket for each
    engine."""
    run_on_living(list(infos), lambda client: client.transfer("update_weights", infos[client]))


def pack(weights: Named, dtype: torch.dtype, buffer: Tensor) -> dict[str, Any]:
    """Copy weights into `buffer` [bytes], contiguously in the dtypes in which they are sent, and wait for the copies.

    Returns the arguments that `unpack` needs to read them.
    """
    end, kinds = 0, [sent_dtype(tensor, dtype) for _, tensor in weights]
    for (_, tensor), kind in zip(weights, kinds, strict=True):
        begin, end = end, end + tensor.numel() * kind.itemsize
        buffer[begin:end].view(kind).view(tensor.shape).copy_(tensor)
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()
    return {
        "names": [name for name, _ in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
        "dtypes": [str(kind).removeprefix("torch.") for kind in kinds],
    }


def sizes_of(shapes: list[list[int]], dtypes: list[str]) -> list[int]:
    """Return the size of each tensor in bytes."""
    types = [getattr(torch, dtype) for dtype in dtypes]
    return [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, types, strict=True)]


def unpack(buffer: Tensor, names: list[str], shapes: list[list[int]], dtypes: list[str]) -> list[tuple[str, Tensor]]:
    """Return views of the weights that `pack` has put into `buffer` [bytes]."""
    parts = buffer.split(sizes_of(shapes, dtypes))
    return [
        (name, part.view(getattr(torch, dtype)).view(shape))
        for name, part, dtype, shape in zip(names, parts, dtypes, shapes, strict=True)
    ]


def leave_group(joined: Future[NcclGroup]) -> None:
    """Leave a group that was joined although the request for it has failed."""
    if joined.exception() is None:
        joined.result().abort()


def run_nccl(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread, since it waits for other processes. NCCL's errors are raised as EngineError, so that the
    run continues without a server that cannot join."""

    def attempt() -> T:
        try:
            return work()
        except RuntimeError as cause:
            raise EngineError(str(cause), hint=NCCL_HINT) from cause

    return in_thread(attempt, "weights")


async def await_unless_failed(thread: Future[Any], coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of `coroutine`. If the thread fails first, raise its error immediately instead of waiting for a
    server that waits for the thread."""
    asked, work = asyncio.ensure_future(coroutine), asyncio.wrap_future(thread)
    work.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the exception as retrieved
    try:
        await asyncio.wait({asked, work}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            work.result()
        return await asked
    finally:
        asked.cancel()


def wait_for_nccl(work: Iterable[Future[Any]], late: str) -> None:
    """Wait until NCCL has finished what no other process holds up any more. Raise EngineError, which begins with
    `late`, if this takes longer than LAST_S: NCCL waits on the GPU, where nothing else would end it."""
    if futures.wait(work, LAST_S).not_done:
        hint = "look for NCCL errors in the server's output"
        raise EngineError(f"{late} within {LAST_S:g} s", hint=hint)


class Staging:
    """A GPU buffer that another process maps. It must live until that process has read it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.uuid = str(torch.cuda.get_device_properties(device).uuid)
        with plain_segments() as self.pool:
            self.buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def export_handle(self) -> dict[str, Any]:
        """Return what `worker.read_gpu` needs to map the buffer; call it for each reader, since torch counts one reader
        per export."""
        _, (_, shape, _, offset, _, _, *handle) = reduce_tensor(self.buffer)
        return {"buffers": {self.uuid: [shape[0], offset, *handle]}}

    def release(self) -> None:
        """Free the memory, once every export of it has been read."""
        del self.buffer
        torch.cuda.ipc_collect()
        del self.pool  # after the buffer in it


@contextlib.contextmanager
def plain_segments() -> Iterator[Any]:
    """Allocate from cudaMalloc inside the block, also with `expandable_segments:True`. Yields the memory pool, which
    must outlive the allocations; None if the default pool is used.

    Another process can map an expandable segment only if it is allowed to debug this process.
    """
    before = allocator_settings()
    if "expandable_segments:True" not in before:
        yield None
        return
    set_allocator(before.replace("expandable_segments:True", "expandable_segments:False"))
    try:
        pool = torch.cuda.MemPool()  # a free block of the default pool may be in an expandable segment
        with torch.cuda.use_mem_pool(pool):
            yield pool
    finally:
        set_allocator(before)


def allocator_settings() -> str:
    """Return the settings of torch's CUDA allocator, in the format of PYTORCH_ALLOC_CONF."""
    get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return _settings_of_snapshot() if get is None else str(get())


@functools.cache
def _settings_of_snapshot() -> str:
    """Return the same for older versions of torch, which list all memory to report them: once, since a run sets them at
    its start."""
    settings: Any = torch.cuda.memory._snapshot()["allocator_settings"]
    text = str(settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    if settings.get("expandable_segments") and "expandable_segments:True" not in text:
        return ",".join([*filter(None, [text]), "expandable_segments:True"])
    return text


def set_allocator(settings: str) -> None:
    """Set the settings of torch's CUDA allocator; settings that are not named are reset."""
    torch._C._accelerator_setAllocatorSettings(settings)


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[str]:
    """Yield a path under which processes of this user on this machine can read `content` until the block ends. The file
    is in this process's memory, so nothing is left behind if the process is killed."""
    number = os.memfd_create("posttrain-weights")
    try:
        with open(number, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/{os.getpid()}/fd/{number}"
    finally:
        os.close(number)
