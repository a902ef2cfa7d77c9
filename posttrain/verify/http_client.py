"""HTTP client for one JSON POST with limits on total time and size, using httpx2.

huggingface_hub depends on httpx2, too.

Each process has one client with persistent connections, in an event loop in its own thread, because only there can the
total time of a request be limited, whatever the server does between two bytes. Redirects are not followed, so that our
headers reach no other address.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

MAX_REPLY_BYTES = 8 * 2**20  # bytes
_MAX_ERROR_BYTES = 64 * 2**10  # maximum bytes read from the body of an error status
KEEPALIVE_S = 2.0  # idle connections are closed before servers do (uvicorn: 5 s): a request could meet a closing one
_GRACE_SECONDS = 5.0  # extra wait if even the timeout is late, e.g. a hanging name server


class PostError(Exception):
    """Raised if there is no reply; `lasting` if a retry would fail the same way."""

    def __init__(self, what: str, *, lasting: bool = False) -> None:
        super().__init__(what)
        self.lasting = lasting


class Answer(NamedTuple):
    """Reply: status, headers with lowercase names, and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Cancellation:
    """Cancels the requests of a caller that no longer waits for them: those under way, and those not sent yet."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._requests: set[Future[Answer]] = set()

    def cancel(self) -> None:
        self._cancelled.set()
        for request in list(self._requests):
            request.cancel()

    def wait(self, seconds: float) -> None:
        """Sleep, at most until `cancel`."""
        self._cancelled.wait(seconds)

    def result(self, request: Future[Answer], seconds: float) -> Answer:
        """Return a request's answer. Raises PostError if it is cancelled."""
        self._requests.add(request)
        try:
            if self._cancelled.is_set():
                request.cancel()
            return request.result(seconds)
        except CancelledError:
            raise PostError("cancelled: its caller no longer waits", lasting=True) from None
        finally:
            self._requests.discard(request)

    def check(self) -> None:
        """Raise PostError after `cancel`."""
        if self._cancelled.is_set():
            raise PostError("cancelled: its caller no longer waits", lasting=True)


def available() -> bool:
    """Return whether httpx2 is installed."""
    return importlib.util.find_spec("httpx2") is not None


def post_json(
    url: str, body: Any, headers: Mapping[str, str], *, total_s: float, cancellation: Cancellation | None = None
) -> Answer:
    """Send a POST and return the reply of any status except a redirect.

    total_s: time limit from name resolution to the last byte. Raises PostError for: no connection, timeout, a broken or
    truncated reply, a reply larger than `MAX_REPLY_BYTES`, a redirect, a cancelled request.
    """
    data = json.dumps(body).encode()
    loop = _loop(os.getpid())
    future = asyncio.run_coroutine_threadsafe(_post(url, data, headers, total_s), loop)
    try:
        return (cancellation or Cancellation()).result(future, total_s + _GRACE_SECONDS)
    except TimeoutError:
        future.cancel()
        raise PostError(f"TimeoutError: no whole reply in {total_s:g} s") from None


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of this process; a forked process gets its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"http-{pid}", daemon=True).start()
    return loop


@functools.cache
def _client(pid: int) -> Any:
    import httpx2

    del pid  # the cache key; a forked process must not share connections
    limits = httpx2.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S)
    return httpx2.AsyncClient(timeout=None, follow_redirects=False, limits=limits)


async def _post(url: str, data: bytes, headers: Mapping[str, str], total_s: float) -> Answer:
    import httpx2

    sent = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
    try:
        async with (
            asyncio.timeout(total_s),
            _client(os.getpid()).stream("POST", url, content=data, headers=sent) as got,
        ):
            if got.is_redirect:
                target = got.headers.get("location", "another address")
                raise PostError(
                    f"status {got.status_code}: it redirects to {target}; no redirect is followed", lasting=True
                )
            received = {name.lower(): value for name, value in got.headers.items()}
            if received.get("content-encoding", "identity") != "identity":
                raise PostError(f"the reply is compressed ({received['content-encoding']}), which was not asked for")
            return Answer(got.status_code, received, await _body(got))
    except TimeoutError:
        raise PostError(f"TimeoutError: no whole reply in {total_s:g} s") from None
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, UnicodeError) as error:
        raise PostError(f"{type(error).__name__}: the request cannot be sent", lasting=True) from None
    except PostError:
        raise
    except Exception as error:  # httpx2 errors and others from below it: exception groups, OverflowError for a port
        raise PostError(f"{type(error).__name__}: {error}") from None


async def _body(reply: Any) -> bytes:
    """Read the body; for an error status, at most the first _MAX_ERROR_BYTES bytes."""
    good, body = reply.status_code < 400, bytearray()
    async for chunk in reply.aiter_raw():
        body += chunk
        if good and len(body) > MAX_REPLY_BYTES:
            raise PostError(f"the reply is larger than {MAX_REPLY_BYTES >> 20} MiB")
        if not good and len(body) >= _MAX_ERROR_BYTES:
            break
    return bytes(body)
