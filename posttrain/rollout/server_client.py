"""Client of a vLLM server (`vllm serve` on this machine or another); `vllm_process` is the server's side.

Token ids, log-probs and images travel as JSON over HTTP. Weights take another path: `weight_transfer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from posttrain import terminal
from posttrain.batch import PromptImages
from posttrain.errors import EngineError, MissingExtra
from posttrain.images import open_image, png_url
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop, vllm_process, vllm_start
from posttrain.rollout.engine import Completion
from posttrain.rollout.engine_client import INFO, EngineClient, RequestFailed, ServerLost, TransferCall, make_completion
from posttrain.rollout.local_server import LocalServer
from posttrain.rollout.requests import Request
from posttrain.rollout.server_answers import check_matches, connection_reason, read_values
from posttrain.rollout.server_key import TOKEN_VARIABLE
from posttrain.rollout.vllm_start import RESUME

CONNECT_RETRY_S = 120.0  # for a server that does not listen: it may be restarting vLLM after another run
START_S = 1800.0  # the same for a server process that this run started, as long as it lives
RETRY_S = 0.5
CONNECT_S = 10.0
EXIT_WAIT_S = 1.0  # for a process to end after its connections have closed
DRAIN_S = 0.2  # between two pauses: a request may arrive after the first
HEALTH_S = 10.0  # for a server to answer its health check
KEEPALIVE_S = 5.0  # an idle connection is closed here, before the server closes it (local_server.IDLE_CONNECTION_S)
FILES = 65536


class ServerMissing(EngineError):
    """Nothing listens at a server's address."""


@dataclass(frozen=True)
class Session:
    """What another process of the run needs to use a server that one process has opened (`ServerClient.join`)."""

    name: str
    url: str
    socket: str
    session_id: str
    workers: int
    adapter: str | None
    about: dict[str, Any] = field(repr=False)
    key: str = field(repr=False)  # the server's API key: it must not appear in logs and tracebacks


class ServerClient(EngineClient):
    """Client of one server, which the run has to itself from one process's `open` to its `close`; other processes of
    the run `join`.

    url: http://HOST:PORT; "" for `process`, a server that this run started and that `close` ends. key: API key sent
    with every request. timeout_s: longest time without any answer while a request is open. eos_ids: tokens that end a
    completion. image_ids: image placeholder tokens, which are never sampled.

    A server is lost if it has ended, breaks a connection, does not answer, fails in a sync, or fails at a request
    (status 500 and above) and at its health check: everything that waits for it gets ServerLost immediately, and so do
    later requests. A server that fails only at one request for samples raises RequestFailed and stays in use.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        timeout_s: float,
        eos_ids: Sequence[int],
        image_ids: Sequence[int] = (),
        process: LocalServer | None = None,
    ) -> None:
        """process: a server that this run has started."""
        self.url, self.key, self.process = url.rstrip("/"), key, process
        self.socket = str(process.uds) if process else ""
        self.name = self.url or (f"vLLM on {process.place}" if process else "")
        self.timeout_s, self.eos_ids, self.image_ids = timeout_s, sorted(eos_ids), sorted(image_ids)
        self.workers = 0  # until `open`
        self.about: dict[str, Any] = {}
        self.adapter: str | None = None  # vLLM's name of the newest adapter
        self._http: Any = None
        self._session_task: asyncio.Task[None] | None = None  # holds the session; done when the server is gone
        self._in_progress: set[asyncio.Task[Any]] = set()
        self._answered = 0.0  # when the server last answered anything
        self.session_id = ""  # id of the session
        self._lost_future: asyncio.Future[None]  # done once the server is lost; belongs to the loop

    @property
    def is_here(self) -> bool:
        """Whether the server runs on this machine."""
        return bool(self.about["boot_id"]) and self.about["boot_id"] == vllm_process.boot_id()

    @property
    def is_busy(self) -> bool:
        """Whether a request of this process is in progress."""
        return bool(self._in_progress)

    # --- the session ---

    def _connect(self) -> None:
        """Create the HTTP client, in the loop; it connects at the first request."""
        http = http_library()
        allow_many_files()
        self._http = http.AsyncClient(
            transport=http.AsyncHTTPTransport(
                uds=self.socket or None,
                limits=http.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S),
            ),
            base_url=self.url or "http://server",
            headers={"Authorization": f"Bearer {self.key}", "Accept-Encoding": "identity"},
            timeout=http.Timeout(None, connect=CONNECT_S),
            trust_env=False,
        )
        self._lost_future = asyncio.get_running_loop().create_future()

    async def open(self, wanted: Mapping[str, Any], *, wait: bool = True) -> None:
        """Reach the server and begin the session.

        wanted: see `check_matches`. wait: whether to retry for a while if nothing listens yet. Raises EngineError if no
        session can be had, RecipeError for a server of other settings. An unsuitable server is refused before a session
        begins, because the end of a session makes the server restart vLLM.
        """
        self._connect()
        self.about = await self._wait_until_ready(wait)
        if not self.about.keys() >= {"boot_id", "max_model_len", "model", "workers"}:
            raise EngineError("the server at this address is no `posttrain serve`", where=self.name)
        check_matches(self.about, wanted, self.name)
        if who := self.about.get("works_for"):
            raise self._busy_error(who)
        self.workers = int(self.about["workers"])
        begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._session_task = asyncio.create_task(self._hold_session(begun))
        either: set[asyncio.Future[Any]] = {begun, self._session_task}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=self.timeout_s)
        if not begun.done():
            cause = self._session_task.exception() if self._session_task.done() else None
            if isinstance(cause, EngineError):
                raise cause
            raise self._connection_error(cause) if self._session_task.done() else self._timeout_error()
        self._session_task.add_done_callback(self._end_session)
        self.session_id = self._http.headers[vllm_process.SESSION_HEADER] = begun.result()

    def _end_session(self, session: asyncio.Task[None]) -> None:
        """The server is lost when it ends the session."""
        if not session.cancelled():
            self._mark_lost(self._connection_error(session.exception()))

    def session(self) -> Session:
        """Return what another process of this run needs to `join`."""
        return Session(**{field.name: getattr(self, field.name) for field in fields(Session)})

    async def join(self, session: Session) -> ServerClient:
        """Use the session that another process of this run has opened. Returns this client."""
        vars(self).update(vars(session))
        self._connect()
        self._http.headers[vllm_process.SESSION_HEADER] = self.session_id
        return self

    async def _wait_until_ready(self, wait: bool) -> dict[str, Any]:
        """Return the server's description (`vllm_process.about`) once it listens."""
        began, patience = time.monotonic(), START_S if self.process else CONNECT_RETRY_S if wait else 0.0
        while True:
            try:
                about = await self._ask("GET", vllm_process.ABOUT)
                if self.process is not None or about.get("works_for") != describe_process():
                    return about
                why = "it has not yet ended this run's last session"
            except http_library().TransportError as cause:
                why = connection_reason(cause)
            waited = time.monotonic() - began
            if waited > patience or (self.process and self.process.exit_error()):
                raise self._unreachable_error(why, waited)
            if wait and waited < RETRY_S and self.process is None:
                terminal.note(f"{self.name}  {why}: trying for {patience:.0f} s")
            await asyncio.sleep(RETRY_S)

    async def _hold_session(self, begun: asyncio.Future[str]) -> None:
        """Keep the session's request open. Returns, or raises, when the server has ended it."""
        headers = {"x-posttrain-who": describe_process()}
        async with self._http.stream("POST", vllm_process.SESSION, headers=headers) as answer:
            if answer.status_code != 200:
                raise self._status_error(answer.status_code, read_values(await answer.aread()), vllm_process.SESSION)
            async for line in answer.aiter_lines():
                if not begun.done():
                    begun.set_result(json.loads(line)["session"])

    def close(self) -> None:
        """End the session. A server that this run did not start keeps running, for other runs."""
        if self._http is not None:
            http, self._http = self._http, None
            with contextlib.suppress(Exception):
                loop.run(self._disconnect(http))
        if self.process is not None:
            self.process.close()

    async def _disconnect(self, http: Any) -> None:
        if self._session_task is not None:
            self._session_task.cancel()
            await asyncio.gather(self._session_task, return_exceptions=True)
        await http.aclose()

    # --- generation ---

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        values = vllm_start.sampling_values(sampling, request, self.eos_ids, self.image_ids)
        task = asyncio.create_task(self._generate(request.ids, values, request.images))
        self._in_progress.add(task)
        try:
            answer = await task
        finally:
            task.cancel()
            self._in_progress.discard(task)
        with self._parse_response():
            found = [
                make_completion(
                    choice["finish_reason"],
                    choice["token_ids"],
                    choice["logprobs"] if request.logprobs else None,
                    where=self.name,
                )
                for choice in answer["choices"]
            ]
            return found * (request.n // len(found))  # greedy samples are equal and sampled once

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        del adapter  # a server holds one adapter
        try:
            answer = await self._generate(ids, vllm_start.SCORING)
        except RequestFailed as error:  # a server that fails the probe of a sync cannot be trusted
            raise self._mark_lost(ServerLost.of(error.problems)) from error
        with self._parse_response():
            return [float(logp) for logp, _ in zip(answer["prompt_logprobs"], ids[1:], strict=True)]

    @contextlib.contextmanager
    def _parse_response(self) -> Iterator[None]:
        """Raise EngineError if the block cannot read vLLM's answer."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as cause:
            what = f"an answer of vLLM cannot be read: {type(cause).__name__}: {cause}"
            raise EngineError(what, where=self.name) from cause

    async def _generate(
        self, ids: Sequence[int], sampling: Mapping[str, Any], images: PromptImages | None = None
    ) -> dict[str, Any]:
        """Request samples of token ids. An image is sent as a PNG of what the trainer's processor gets, with one
        placeholder token each."""
        body: dict[str, Any] = {"token_ids": list(ids), "sampling_params": dict(sampling)}
        if self.adapter:
            body["adapter"] = self.adapter
        if images is not None:
            body["token_ids"] = list(images.shorten(tuple(ids)))
            body["images"] = [png_url(open_image(image)) for image in images.shown]
        return await self._ask("POST", vllm_process.GENERATE, body)

    async def pause(self) -> None:
        """Interrupt requests until none is in progress. vLLM also drops its prefix cache: weights change next."""
        while True:
            await self._ask("POST", "/pause?mode=abort")
            if not self._in_progress:
                return
            await asyncio.wait(self._in_progress, timeout=DRAIN_S)

    async def resume(self) -> None:
        await self._ask("POST", "/resume")

    # --- weights ---

    async def transfer(self, call: TransferCall, info: Mapping[str, Any] | None = None) -> None:
        await self._ask("POST", f"/{call}", {INFO[call]: dict(info)} if info is not None else {})
        if call == "finish_weight_update":
            await self._ask("POST", "/reset_prefix_cache")
            if self.image_ids:
                await self._ask("POST", "/reset_encoder_cache")  # image features of the old vision tower

    async def load_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        """Load the adapter, which the server reads under the same path. A server holds one adapter: recipes with
        several are refused."""
        (folder,) = folders.values()
        old, new = self.adapter, f"version-{version}"
        if old is not None:
            await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": old})
        try:
            await self._ask("POST", "/v1/load_lora_adapter", {"lora_name": new, "lora_path": str(folder.absolute())})
        except EngineError as error:
            if self.is_here:
                raise
            raise EngineError(
                f"the server could not load the adapter from {folder.absolute()}, which is on this machine's disk",
                where=self.name,
                allowed=str(error),
                hint="rollout.vllm.merge_adapter: true sends merged weights; or let --output be in a folder that both"
                " machines see under the same path",
            ) from error
        self.adapter = new
        await self._ask("POST", "/reset_prefix_cache")

    # --- requests ---

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one request and return its answer. Raises ServerLost if the server fails, ends or does not answer,
        EngineError if it refuses."""
        if self._http is None:
            raise EngineError("this run has left the server", where=self.name)
        if self.lost is not None:
            raise self.lost.copy()
        try:
            return await self._exchange(method, path, body)
        except RequestFailed as error:
            if await self._is_healthy():
                raise
            raise self._mark_lost(ServerLost.of(error.problems)) from error
        except ServerLost as error:
            self._mark_lost(error)
            raise

    def _mark_lost(self, error: ServerLost) -> ServerLost:
        """Mark the server as lost and wake everything that waits for it. Returns the error."""
        self.lost = self.lost or error.copy()
        if not self._lost_future.done():
            self._lost_future.set_result(None)
        return error

    async def _is_healthy(self) -> bool:
        """Return whether vLLM answers its health check in time."""
        try:
            answer = await asyncio.wait_for(self._http.get("/health"), min(HEALTH_S, self.timeout_s))
        except (http_library().HTTPError, TimeoutError):
            return False
        return bool(answer.status_code == 200)

    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send a request and wait for its answer, the end of the session, or the time limit."""
        began = time.monotonic()
        asked = asyncio.ensure_future(self._http.request(method, path, json=body))
        either: set[asyncio.Future[Any]] = {asked, self._lost_future}
        try:
            while not asked.done():
                left = max(began, self._answered) + self.timeout_s - time.monotonic()
                if left <= 0:
                    raise self._timeout_error()
                await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if self.lost is not None and not asked.done():
                    raise self.lost.copy()
            answer = asked.result()
        except http_library().TransportError as cause:
            if not self.session_id:
                raise
            raise self._connection_error(cause) from cause
        finally:
            asked.cancel()
        self._answered = time.monotonic()
        values = read_values(answer.content)
        if answer.status_code != 200:
            raise self._status_error(answer.status_code, values, path)
        return values

    def _status_error(self, status: int, values: dict[str, Any], path: str) -> EngineError:
        """Return the error that the status of an answer from `path` means."""
        if status == 401:
            return EngineError(
                "the server asks for its key",
                where=self.name,
                hint=f"`posttrain serve` says where it is; set {TOKEN_VARIABLE} to it for this run",
            )
        if status == 410:
            what = "the server was restarted and has no session of this run"
            return ServerLost(what, where=self.name, hint=RESUME)
        if status == 409:
            return self._busy_error(values.get("works_for"))
        message = values.get("error", values)
        message = message.get("message", message) if isinstance(message, dict) else message
        kind = EngineError if status < 500 else RequestFailed if path == vllm_process.GENERATE else ServerLost
        return kind(f"vLLM refused a request with status {status}: {message}", where=self.name)

    def _busy_error(self, who: str | None) -> EngineError:
        return EngineError(
            f"the server works for another run ({who})",
            where=self.name,
            hint="wait for that run, or start another server with `posttrain serve RECIPE --port ...`",
        )

    def _timeout_error(self) -> ServerLost:
        return ServerLost(
            f"the server did not answer anything for {self.timeout_s:g} s",
            where=self.name,
            hint="raise rollout.vllm.server.timeout_s if it may take that long; else look at its own output",
        )

    def _connection_error(self, cause: BaseException | None = None) -> ServerLost:
        """Return the error for a server, or a connection to it, that has ended. cause: the exception of the session or
        of a request, if any."""
        if self.process is not None and (ended := self.process.exit_error(EXIT_WAIT_S)) is not None:
            (problem,) = ended.problems
            hint = problem.hint if problem.hint == RESUME else f"{problem.hint}; {RESUME}"
            return ServerLost(problem.what, where=problem.where, hint=hint)
        why = connection_reason(cause) if cause else "it ended the session"
        hint = f"{RESUME}, once `posttrain serve` is ready there again"
        return ServerLost(f"the server is gone: {why}", where=self.name, hint=hint)

    def _unreachable_error(self, why: str, waited: float) -> EngineError:
        if self.process is not None:
            late = f"vLLM on {self.process.place} did not begin to answer in {waited:.0f} s: see {self.process.log}"
            return self.process.exit_error() or EngineError(late)
        return ServerMissing(
            f"no server can be reached there: {why} (tried for {waited:.0f} s)",
            where=self.name,
            hint=f"start one with `posttrain serve RECIPE --port {self.url.rpartition(':')[2]}` on that machine (--host"
            " 0.0.0.0 if it is another than this one); a firewall must let the port through",
        )


def describe_process() -> str:
    """Return this machine, process and command as a header value: servers show whom they work for."""
    who = f"{socket.gethostname()}, process {os.getpid()}, {' '.join(sys.argv[1:4])}"
    return re.sub(r"[^!-~]+", " ", who)[: vllm_process.MAX_WHO].strip()


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as allowed, since each request in progress has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def http_library() -> Any:
    """Return httpx, or httpx2, its successor in huggingface_hub: one of them is installed with transformers."""
    for name in ("httpx2", "httpx"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise MissingExtra("httpx2", "rollout.vllm.server", "train")
