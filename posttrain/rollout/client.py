"""The HTTP client of one server process. Failed connections are retried; final errors say what to do."""

from __future__ import annotations

import contextlib
import getpass
import http.client
import json
import os
import select
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from posttrain.errors import EngineError, PosttrainError
from posttrain.rollout import wire
from posttrain.rollout.token import asking_token

T = TypeVar("T")
CONNECT_S = 10.0
PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each new try to reach a server
BUSY = 409  # the server belongs to another run, or did a moment ago


class Client:
    """Requests to one server, and the session in which it works for this run.

    A failed request is retried with growing pauses while the session lives; repeating a request is safe. fate: says how
    the server's process ended, if this run started it. token: of the server; None = the one that is known here.
    """

    def __init__(
        self, url: str, timeout_s: float, *, fate: Callable[[], str] = lambda: "", token: str | None = None
    ) -> None:
        self.token = asking_token(url) if token is None else token
        self.url, self.timeout_s, self.fate = url.rstrip("/"), timeout_s, fate
        place = urlsplit(self.url)
        self.host, self.port = place.hostname or "", place.port or 80
        self.name = ""  # of the session
        self._held: socket.socket | None = None
        self._asking: set[socket.socket] = set()  # connections on which an answer is awaited

    def open(self) -> dict[str, Any]:
        """Begin a session and return the server's /health. Raises EngineError."""
        health = self.ask("GET", "/health")
        if health.get("protocol") != wire.PROTOCOL:
            raise EngineError(
                "the engine there speaks another language than this version of posttrain",
                where=self.url,
                hint="use the same version of posttrain on both sides",
            )
        who = json.dumps({"who": f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"}).encode()

        def once() -> tuple[socket.socket, bool, dict[str, Any]]:
            with contextlib.closing(self._connected()) as connection:
                held = connection.sock.dup()  # http.client closes its own once it has read the answer
                response = self._send(connection, "POST", "/session", [who], {})
                answer = json.loads(response.readline())
                if "error" in answer and response.status != BUSY:
                    held.close()
                    raise wire.error_of(answer, self.url)
                return held, response.status == BUSY, answer

        for pause in (*PAUSES, None):
            held, busy, answer = self._trying(once)
            if not busy:
                break
            held.close()
            if pause is None:
                raise wire.error_of(answer, self.url)
            time.sleep(pause)
        self._held, self.name = held, answer["session"]
        return health

    def close(self) -> None:
        """End the session, and so the work of the server for this run. Calling it twice is fine."""
        held, self._held = self._held, None
        for sock in (*([held] if held is not None else []), *tuple(self._asking)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # a thread that waits for an answer stops waiting
        if held is not None:
            held.close()

    @property
    def lost(self) -> bool:
        """Whether the server has ended the session, or is gone."""
        held = self._held
        if held is None:
            return self.name != ""
        try:
            ready, _, _ = select.select([held], [], [], 0)
            return bool(ready) and held.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):  # closed by another thread
            return True

    def ask(self, method: str, path: str, body: wire.Body | Path = ()) -> dict[str, Any]:
        """The server's JSON answer. body: a path is sent as the file's content.

        Raises the server's own error, or EngineError if it cannot be reached or does not answer in time.
        """

        def once() -> dict[str, Any]:
            with contextlib.closing(self._answer(method, path, body)) as lines:
                for values in lines:
                    return values
            raise ConnectionResetError("the answer broke off")

        return self._trying(once)

    def lines(self, path: str, body: wire.Body, heard: Callable[[dict[str, Any]], None]) -> None:
        """Call `heard` with every line of an answer. After a failure the answer starts over, and lines come twice."""

        def once() -> None:
            for values in self._answer("POST", path, body):
                if values.get("end"):
                    return
                heard(values)
            raise ConnectionResetError("the answer broke off")

        self._trying(once)

    def _trying(self, once: Callable[[], T]) -> T:
        for pause in (*PAUSES, None):
            try:
                return once()
            except _SilentError as cause:
                raise EngineError(
                    f"the engine did not answer for {self.timeout_s:g} s",
                    where=self.url,
                    hint="raise rollout.vllm.server.timeout_s if it may take that long; else look at its own output",
                ) from cause
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as cause:
                if self.lost:
                    raise self._gone(cause) from cause
                if pause is None:
                    raise self._unreachable(cause) from cause
                time.sleep(pause)
        raise AssertionError

    def _answer(self, method: str, path: str, body: wire.Body | Path) -> Generator[dict[str, Any], None, None]:
        """The lines of an answer. Raises the error that a line may hold."""
        headers = {wire.SESSION: self.name} if self.name else {}
        if self.name and self._held is None:
            raise ConnectionResetError("this run has ended the session")
        with contextlib.closing(self._connected()) as connection, self._awaited(connection.sock.dup()):
            response = self._send(connection, method, path, body, headers)
            while True:
                try:
                    line = response.readline()
                except TimeoutError as cause:
                    raise _SilentError from cause
                if not line:
                    return
                values = json.loads(line)
                if "error" in values:
                    raise wire.error_of(values, self.url)
                yield values

    @contextlib.contextmanager
    def _awaited(self, sock: socket.socket) -> Generator[None, None, None]:
        """Inside, `close` shuts the connection down. sock: a duplicate of its socket, closed at the end."""
        with sock:
            self._asking.add(sock)
            try:
                yield
            finally:
                self._asking.discard(sock)

    def _connected(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_S)
        connection.connect()
        _keep_alive(connection.sock)
        connection.sock.settimeout(self.timeout_s)
        return connection

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: wire.Body | Path,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        headers = {**headers, wire.TOKEN: self.token}
        try:
            if isinstance(body, Path):
                headers = {**headers, "Content-Length": str(body.stat().st_size)}
                with body.open("rb") as file:
                    connection.request(method, path, file, headers)
            else:
                headers = {**headers, "Content-Length": str(sum(len(part) for part in body))}
                connection.request(method, path, iter(body), headers)
            return connection.getresponse()
        except TimeoutError as cause:
            raise _SilentError from cause

    def _unreachable(self, cause: Exception) -> PosttrainError:
        told = self.fate()
        if self.name:
            what = f"the engine there can be reached no more: {_reason(cause)} (tried for {sum(PAUSES):.0f} s)"
            return EngineError(told or what, where=self.url, hint="go on with the same command and --resume")
        what = f"no engine can be reached there: {_reason(cause)} (tried for {sum(PAUSES):.0f} s)"
        hint = (
            f"start one with `posttrain serve --port {self.port}` on that machine (--host 0.0.0.0 if it is another"
            " than this one); a firewall must let the port through"
        )
        return EngineError(told or what, where=self.url, hint="" if told else hint)

    def _gone(self, cause: Exception) -> PosttrainError:
        told = self.fate()
        return EngineError(
            told or f"the engine there is gone: {_reason(cause)}",
            where=self.url,
            hint="go on with the same command and --resume"
            + ("" if told else ", once `posttrain serve` runs there again"),
        )


class _SilentError(Exception):
    """The server accepted a request and did not answer in time. It is not retried: that would wait as long again."""


def _reason(cause: Exception) -> str:
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _keep_alive(sock: socket.socket) -> None:
    """Turn on TCP keep-alive, so that a vanished machine is noticed within a minute."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
