"""Weight transfer to engines: bucket contents, and broadcasts that may fail. NCCL is replaced by a queue."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from posttrain.errors import EngineError
from posttrain.rollout import nccl_group, weight_transfer
from posttrain.rollout.engine_client import ServerLost
from posttrain.rollout.nccl_group import NcclGroup
from posttrain.rollout.weight_transfer import NcclSender, buckets, pack, unpack

CPU = torch.device("cpu")
WEIGHTS = [
    ("a", torch.randn(3, 5)),
    ("norm", torch.randn(7)),
    ("count", torch.arange(3)),
    ("flag", torch.tensor([1, 0, 1], dtype=torch.uint8)),
    ("b", torch.randn(2, 4, dtype=torch.bfloat16)),
    ("none", torch.empty(0, 4)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [1, 40, 1 << 20])
def test_weights_are_received_unchanged(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: int) -> None:
    """Weights of all sizes and dtypes, aligned to their dtype; matrices in the engine's dtype, other weights in their
    own."""
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", limit)
    found: dict[str, torch.Tensor] = {}
    for bucket, size in buckets(WEIGHTS, dtype):
        buffer = torch.full((size,), 255, dtype=torch.uint8)
        found |= dict(unpack(buffer, **pack(bucket, dtype, buffer)))
    assert found.keys() == {name for name, _ in WEIGHTS}
    for name, tensor in WEIGHTS:
        assert torch.equal(found[name], tensor.to(dtype) if name in ("a", "b", "none") else tensor)


class Group:
    """A group of one trainer and one worker; the trainer's broadcast waits until the worker has received."""

    made: list[Group]

    def __init__(self, group_id: str, rank: int, size: int, device: torch.device) -> None:
        assert (rank, size, device) == (nccl_group.TRAINER, 2, CPU)
        self.id, self.sent, self.taken = group_id, queue.Queue[torch.Tensor](), threading.Event()
        self.aborted = False
        Group.made.append(self)

    def broadcast(self, buffer: torch.Tensor) -> None:
        self.sent.put(buffer.clone())
        self.taken.wait()
        self.taken.clear()

    def abort(self) -> None:
        self.aborted = True
        self.taken.set()


class Client:
    """An engine that receives what its group sends. dies_at: index of the bucket at which it fails."""

    name, workers = "GPU 1", 1

    def __init__(self, dies_at: int = 99, error: type[EngineError] = EngineError) -> None:
        self.dies_at, self.told, self.held = dies_at, list[str](), dict[str, torch.Tensor]()
        self.error, self.lost = error, None
        self.group_id = ""

    async def transfer(self, call: str, info: Mapping[str, Any] | None = None) -> None:
        if call == "update_weights":
            assert info is not None
            await self.receive(info)
        elif call == "init_weight_transfer_engine":
            assert info is not None and info["size"] == 2
            self.group_id = info["group_id"]
        else:
            self.told.append(call.partition("_")[0])

    async def receive(self, info: Mapping[str, Any]) -> None:
        if self.told.count("bucket") == self.dies_at:
            self.lost = self.error("vLLM on GPU 1 was killed")
            raise self.lost
        self.told.append("bucket")
        (group,) = (group for group in Group.made if group.id == self.group_id)
        buffer = await asyncio.to_thread(group.sent.get)
        self.held |= dict(unpack(buffer, **info["nccl"]))
        group.taken.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    Group.made = []
    ids = iter("abcdef")
    monkeypatch.setattr(nccl_group, "new_id", lambda: next(ids))
    monkeypatch.setattr(weight_transfer, "NcclGroup", Group)
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", 70)


@pytest.mark.usefixtures("nccl")
def test_every_engine_gets_every_bucket() -> None:
    clients: list[Any] = [Client(), Client()]
    sender = NcclSender(clients, CPU, torch.float32)
    for _ in range(2):
        sender.send(WEIGHTS)
    sender.close()
    for client in clients:
        assert client.told == ["start", "bucket", "bucket", "bucket", "finish"] * 2
        assert all(torch.equal(client.held[name], tensor.float()) for name, tensor in WEIGHTS if name in "ab")
    assert [group.aborted for group in Group.made] == [True, True] and len(Group.made) == 2


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("dies_at", [0, 1])
def test_dying_engine_does_not_block_the_trainer(dies_at: int) -> None:
    """The broadcast to it would wait forever: the groups are aborted, and the error is raised."""
    clients: list[Any] = [Client(), Client(dies_at)]
    sender = NcclSender(clients, CPU, torch.float32)
    began = time.monotonic()
    with pytest.raises(EngineError, match="was killed"):
        sender.send(WEIGHTS)
    assert time.monotonic() - began < 5 and all(group.aborted for group in Group.made)
    assert "finish" not in clients[0].told
    deadline = time.monotonic() + 5
    while any(thread.name == "weights" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name == "weights" for thread in threading.enumerate()), "a broadcast goes on"
    with pytest.raises(EngineError, match="no server is left"):
        sender.send(WEIGHTS)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("place", [0, 1])
def test_lost_server_does_not_block_the_others(place: int) -> None:
    """Its group ends, whether the broadcast to it comes first or last; the other server gets all weights, also of later
    updates, and so does a server that joins. When the last server is lost, its error is raised."""
    clients: list[Any] = [Client(), Client()]
    lost = clients[place] = Client(1, ServerLost)
    sender = NcclSender(clients, CPU, torch.float32)
    sender.send(WEIGHTS)
    assert lost.told == ["start", "bucket"] and Group.made[place].aborted
    clients[1 - place].held.clear()
    sender.remove(lost)
    sender.add(other := Client())
    sender.send(WEIGHTS)
    for client in (clients[1 - place], other):
        assert client.told[-5:] == ["start", "bucket", "bucket", "bucket", "finish"]
        assert client.held.keys() == {name for name, _ in WEIGHTS}
    for client in (clients[1 - place], other):
        client.dies_at, client.error = 0, ServerLost
        client.told.clear()
    with pytest.raises(ServerLost, match="was killed"):
        sender.send(WEIGHTS)


@pytest.mark.usefixtures("nccl")
def test_engine_that_cannot_join_raises() -> None:
    class Refusing(Client):
        async def transfer(self, call: str, info: Mapping[str, Any] | None = None) -> None:
            del info
            assert call == "init_weight_transfer_engine"
            raise EngineError("no such GPU")

    clients: list[Any] = [Client(), Refusing()]
    with pytest.raises(EngineError, match="no such GPU"):
        NcclSender(clients, CPU, torch.float32)
    assert all(group.aborted for group in Group.made) and len(Group.made) == 2, "also the one that nobody else joins"


class Waiting(Client):
    """An engine that answers only the first requests of a transfer and waits for the trainer. deaf_to: the requests it
    does not answer."""

    def __init__(self, deaf_to: str) -> None:
        super().__init__()
        self.deaf_to = deaf_to

    async def transfer(self, call: str, info: Mapping[str, Any] | None = None) -> None:
        if call == self.deaf_to:
            await asyncio.Event().wait()
        await super().transfer(call, info)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("call", ["init_weight_transfer_engine", "update_weights"])
def test_nccl_error_of_the_trainer_is_raised_immediately(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits for the trainer and is not the lost side. A run with other servers continues without it."""

    def fail(self: Group, *_: Any) -> None:
        del self
        raise RuntimeError("NCCL error: invalid usage")

    monkeypatch.setattr(Group, "broadcast" if call == "update_weights" else "__init__", fail)
    with pytest.raises(EngineError, match="invalid usage"):
        NcclSender([Waiting(call)], CPU, torch.float32).send(WEIGHTS)  # type: ignore[list-item]


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("place", [0, 1])
def test_nccl_failure_at_one_engine_does_not_end_the_sync_of_the_other(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's NCCL reports the dead engine before its HTTP connection does: only that engine is lost."""
    usual = Group.broadcast

    def broadcast(group: Group, buffer: torch.Tensor) -> None:
        if group is Group.made[place]:
            raise RuntimeError("NCCL error: remote process exited")
        usual(group, buffer)

    monkeypatch.setattr(Group, "broadcast", broadcast)
    clients: list[Any] = [Client(), Client()]
    dead = clients[place] = Waiting("update_weights")
    NcclSender(clients, CPU, torch.float32).send(WEIGHTS)
    assert isinstance(dead.lost, ServerLost) and "remote process exited" in str(dead.lost)
    assert [group.aborted for group in Group.made] == [place == 0, place == 1]
    assert clients[1 - place].told == ["start", "bucket", "bucket", "bucket", "finish"]
    assert dead.told == ["start"] and clients[1 - place].held.keys() == {name for name, _ in WEIGHTS}


@pytest.mark.usefixtures("nccl")
def test_broadcast_that_survives_an_abort_does_not_block_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Client):
        async def receive(self, info: Mapping[str, Any]) -> None:
            await asyncio.to_thread(Group.made[1].sent.get)  # in the middle of the broadcast
            await Client(0, ServerLost).receive(info)

    monkeypatch.setattr(weight_transfer, "LAST_S", 0.1)
    monkeypatch.setattr(Group, "abort", lambda _: None)
    clients: list[Any] = [Client(), Dying()]
    with pytest.raises(EngineError, match=r"a broadcast of weights did not end within 0\.1 s"):
        NcclSender(clients, CPU, torch.float32).send(WEIGHTS)
    for group in Group.made:
        group.taken.set()


def test_aborted_group_does_not_broadcast() -> None:
    """A server may be lost between the check and its broadcast."""
    calls: list[Any] = []
    group = object.__new__(NcclGroup)
    group.communicator = None
    group.library = SimpleNamespace(ncclBroadcast=lambda *given: calls.append(given), ncclCommAbort=calls.append)
    group.abort()
    buffer = torch.ones(3, dtype=torch.uint8)
    group.broadcast(buffer)
    assert calls == [] and buffer.tolist() == [1, 1, 1]


@pytest.mark.parametrize("growing", [True, False])
def test_allocator_settings_of_the_user_are_kept(growing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch drops settings that are not passed again. A separate pool is needed only if free blocks may belong to
    expandable segments."""
    given = f"max_split_size_mb:100,expandable_segments:{growing}"
    settings = [given]
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings[-1], raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _: contextlib.nullcontext())
    with pytest.raises(MemoryError), weight_transfer.plain_segments() as pool:
        assert pool == ("pool" if growing else None)
        assert settings[-1] == "max_split_size_mb:100,expandable_segments:False"
        raise MemoryError
    assert settings[-1] == given


def test_memory_file_is_removed_after_its_block_and_read_tensors_stay_valid() -> None:
    weights = {"a": torch.arange(5.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    with weight_transfer.memory_file(save(weights)) as path:
        read = load_file(path)
        assert path.startswith("/proc/")
    assert not Path(path).exists()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
