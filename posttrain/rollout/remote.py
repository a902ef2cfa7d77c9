"""The trainer's half of `rollout.vllm.server`: vLLM in processes on other GPUs or machines. `server` is the other."""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from posttrain.errors import MissingExtra, RecipeError, counted
from posttrain.recipe.rollout_sections import Sampling, Server, Vllm
from posttrain.rollout import vllm_start, weights, wire
from posttrain.rollout.client import Client
from posttrain.rollout.engine import Completion
from posttrain.rollout.local_server import LocalServer
from posttrain.rollout.pushed import Done, PushedEngine, Request
from posttrain.rollout.shared_memory import Memory, lent, reaches
from posttrain.run import ranks

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

T = TypeVar("T")


class ServerEngine(PushedEngine):
    """An Engine whose vLLM runs in one or several server processes. They share the prompts and hold equal weights.

    A server gets everything from the run. First come the model's configuration and tokenizer, and under LoRA the dense
    base. At every sync, LoRA sends the adapter, and full training sends all weights in buckets, without a disk. With
    `merge_adapter` a server keeps the base in its host's memory and adds each adapter to it. Every sync ends with a
    probe of every server. Failures raise an EngineError that names the server.
    """

    def __init__(self, section: Vllm, loaded: LoadedModel, *, scratch: Path, max_len: int) -> None:
        assert section.server is not None
        vllm_start.check_divisible(loaded.model.config, section.tensor_parallel)
        super().__init__(section, loaded, max_len=max_len)
        self.apart = True
        self.scratch = scratch
        self.pushes = 0
        self.processes: list[LocalServer] = []
        self.clients: list[Client] = []
        self.shared: list[bool] = []  # by client: it can map our memory
        self.adds = section.merge_adapter and loaded.is_lora and weights.factors(loaded.model) is not None
        try:
            self._begin(section.server)
            self.sync(loaded.model, 0)
        except BaseException:
            self.close()
            raise

    def _begin(self, server: Server) -> None:
        """Start the servers of this run, open a session with every server, and start vLLM in each."""
        for number, devices in own_servers(self.section.places, "devices"):
            if importlib.util.find_spec("vllm") is None:
                raise MissingExtra("vllm", "rollout.engine: vllm", "vllm")
            self.processes.append(LocalServer.start(devices, self.scratch / f"server-{number}.log"))
        self.clients = [Client(p.url, server.timeout_s, fate=p.fate) for p in self.processes]
        self.clients += [Client(url, server.timeout_s) for _, url in own_servers(server.urls, "urls")]
        for client in self.clients:
            client.open()
        self.shared = [reaches(client) for client in self.clients]
        folder = self._write_model()
        self._start(folder)
        shutil.rmtree(folder)  # read, and under LoRA as large as the model

    def _write_model(self) -> Path:
        """What vLLM is started on: the dense base under LoRA, else no weights."""
        folder = self.scratch / "engine-model"
        if self.adds:  # in the type that the sums start from
            return weights.write_base(self.loaded, folder, self.loaded.model.get_base_model().dtype)
        if self.lora_rank is not None:
            return weights.write_base(self.loaded, folder, self.dtype)
        return weights.write_config(self.loaded, folder)

    def _start(self, folder: Path) -> None:
        """Start vLLM in every server. On a shared GPU they start in turns, since each measures the free memory."""
        settings = {
            "vllm": self.section.model_dump(exclude={"server"}) | {"gpu_memory": self.section.share},
            "dtype": str(self.dtype).removeprefix("torch."),
            "window": self.window,
            "lora_rank": self.lora_rank,
            "holds_base": self.adds,
            "eos_ids": list(self.loaded.eos_ids),
        }
        locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        turns: list[AbstractContextManager[Any] | None] = [
            locks[devices[0]] for _, devices in own_servers(self.section.places, "devices")
        ]
        turns += [None] * (len(self.clients) - len(turns))  # of a server that this run did not start

        def start(client: Client, shared: bool, turn: AbstractContextManager[Any] | None) -> None:
            if turn is None:
                send_folder(client, folder, shared=shared)
            with turn or nullcontext():
                place = None if turn is None else str(folder.absolute())
                client.ask("POST", "/start", as_json({**settings, "folder": place}))

        self._everywhere(start, self.shared, turns)

    def _everywhere(self, work: Callable[..., T], *of_each: Iterable[Any]) -> list[T]:
        """`work(client, ...)` for each server, side by side. An error is raised; the others are not waited for."""
        waits = [in_thread(partial(work, *given)) for given in zip(self.clients, *of_each, strict=True)]
        return [wait() for wait in waits]

    def complete(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, done: Done | None = None
    ) -> list[list[Completion]]:
        """See `PushedEngine.complete`. Server k of K takes every K-th request."""
        found: dict[int, list[Completion]] = {}
        lock = threading.Lock()

        def ask(client: Client, places: Sequence[int]) -> None:
            def heard(line: dict[str, Any]) -> None:
                place, samples = places[line["at"]], wire.read_samples(line["samples"])
                with lock:
                    if place not in found:  # a call that was tried again tells a request twice
                        found[place] = samples
                        if done is not None:
                            done(place, samples)

            if places:
                asked = wire.generation([requests[p] for p in places], sampling, seed)
                client.lines("/generate", as_json(asked), heard)

        count = len(self.clients)
        self._everywhere(ask, [range(n, len(requests), count) for n in range(count)])
        return [found[place] for place in range(len(requests))]

    @property
    def route(self) -> str:
        """How weights get to the servers, for the run's log."""
        files, lora = self.lora_rank is not None, self.lora_rank is not None or self.adds
        ways = {True: "files of this machine" if files else "shared memory", False: "HTTP"}
        named = [f"{client.url} by {ways[shared]}" for client, shared in zip(self.clients, self.shared, strict=True)]
        return f"{'adapters' if lora else 'weights'} go to {', '.join(named)}"

    def pause(self) -> None:
        """See `PushedEngine.pause`."""
        self._everywhere(lambda client: client.ask("POST", "/pause", as_json({})))

    def push(self, model: Any, version: int, whole: Iterator[tuple[str, Tensor]]) -> None:
        """See `PushedEngine.push`."""
        if self.lora_rank is None:
            self._push_tensors(self._buckets(model, whole))
            return
        self.pushes += 1
        folder = weights.write_adapter(model, self.scratch / f"engine-adapter-{self.pushes}", self.dtype)

        def send(client: Client, shared: bool) -> None:
            send_folder(client, folder, shared=shared)
            client.ask("POST", "/adapter", as_json({"folder": folder.name, "version": version}))

        self._everywhere(send, self.shared)
        shutil.rmtree(folder)

    def _buckets(self, model: Any, whole: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        """All weights in the engine's type, or the LoRA factors if the servers add them to their base."""
        if self.adds:
            added = weights.factors(model)
            assert added is not None  # as at the start
            return wire.buckets(added.items(), None, wire.BUCKET_BYTES)
        return wire.buckets(whole, self.dtype, wire.BUCKET_BYTES)

    def _push_tensors(self, buckets: Iterator[list[tuple[str, Tensor]]]) -> None:
        """Send the buckets. While one is sent, the next is copied from the GPU."""
        number = 0
        bucket: list[tuple[str, Tensor]] | None = next(buckets)
        travelling: Callable[[], object] = list  # the first waits for nothing
        while bucket is not None:
            following = next(buckets, None)
            travelling()
            travelling = in_thread(partial(self._push_bucket, number, bucket, last=following is None))
            number, bucket = number + 1, following
        travelling()

    def _push_bucket(self, number: int, bucket: list[tuple[str, Tensor]], *, last: bool) -> None:
        path = f"/weights?number={number}&last={int(last)}&factors={int(self.adds)}"
        body = wire.pack(bucket)
        with Memory(body) if any(self.shared) else nullcontext() as memory:

            def send(client: Client, shared: bool) -> None:
                if shared and memory is not None:
                    client.ask("POST", f"{path}&memory={memory.place}")
                else:
                    client.ask("POST", path, body)

            self._everywhere(send, self.shared)

    def logps(self) -> list[list[float]]:
        """See `PushedEngine.logps`: a row a server."""
        return self._everywhere(lambda client: client.ask("POST", "/logps", as_json({"ids": list(self.ids)}))["logps"])

    def sleep(self) -> None:
        """Do nothing: its GPU is not the trainer's."""

    def wake(self) -> None:
        """Do nothing: it never sleeps."""

    def close(self) -> None:
        """End the sessions, and the processes that this run started. Calling it twice is fine."""
        for client in self.clients:
            client.close()
        for process in self.processes:
            process.close()


def in_thread(work: Callable[[], T]) -> Callable[[], T]:
    """Run `work` in a daemon thread. Returns a function that waits for its result, or raises its error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result


def own_servers(places: Sequence[T], key: str) -> list[tuple[int, T]]:
    """(number, server) of the servers of this training process. Raises RecipeError if there are too few."""
    if places and len(places) < ranks.world():
        raise RecipeError(
            f"rollout.vllm.server.{key} names {counted(len(places), 'server')} for "
            f"{counted(ranks.world(), 'training process', 'training processes')}",
            hint="each needs a server of its own: name more, or train with fewer --gpus",
        )
    return list(enumerate(places))[ranks.rank() :: ranks.world()]


def send_folder(client: Client, folder: Path, *, shared: bool) -> None:
    """Every file of a flat folder, under the folder's name. shared: the server is here and reads them itself."""
    for path in sorted(folder.iterdir()):
        name = f"/files/{folder.name}/{path.name}"
        if shared:
            with lent(path) as place:
                client.ask("PUT", f"{name}?memory={place}")
        else:
            client.ask("PUT", name, path)


def as_json(values: dict[str, Any]) -> wire.Body:
    return [json.dumps(values).encode()]
