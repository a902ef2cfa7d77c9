"""One POST of JSON within a total time and a size, through httpx2 (the client that huggingface_hub brings).

A process has one client with kept connections, in an event loop of its own thread: only there can the time of a whole
request be limited, whatever the server does between two bytes. No redirect is followed, so that no header of ours
reaches another address.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

LARGEST_REPLY = 8 * 2**20  # bytes
_LARGEST_ERROR = 64 * 2**10  # bytes of the body of an error status
_BESIDE_S = 5.0  # what a request may be late when even its own end is late, as with a name server that hangs


class PostError(Exception):
    """No reply was had; `lasting` if another try would end the same."""

    def __init__(self, what: str, *, lasting: bool = False) -> None:
        super().__init__(what)
        self.lasting = lasting


class Answer(NamedTuple):
    """status, headers with lower-case names, and body of a reply."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def available() -> bool:
    """Whether the client is installed."""
    return importlib.util.find_spec("httpx2") is not None


def post_json(url: str, body: Any, headers: Mapping[str, str], *, total_s: float) -> Answer:
    """The reply to a POST, of any status but a redirect. total_s: for all of it, from the name to the last byte.

    Raises PostError: no connection, no time left, a broken or cut reply, one beyond `LARGEST_REPLY`, a redirect.
    """
    data = json.dumps(body).encode()
    loop = _loop(os.getpid())
    future = asyncio.run_coroutine_threadsafe(_post(url, data, headers, total_s), loop)
    try:
        return future.result(total_s + _BESIDE_S)
    except TimeoutError:
        future.cancel()
        raise PostError(f"TimeoutError: no whole reply in {total_s:g} s") from None


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """The event loop of this process; a forked one gets its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"http-{pid}", daemon=True).start()
    return loop


@functools.cache
def _client(pid: int) -> Any:
    import httpx2

    del pid  # connections are not shared with a forked process
    return httpx2.AsyncClient(timeout=None, follow_redirects=False, limits=httpx2.Limits(max_connections=None))


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
            found = {name.lower(): value for name, value in got.headers.items()}
            if found.get("content-encoding", "identity") != "identity":
                raise PostError(f"the reply is compressed ({found['content-encoding']}), which was not asked for")
            return Answer(got.status_code, found, await _body(got))
    except TimeoutError:
        raise PostError(f"TimeoutError: no whole reply in {total_s:g} s") from None
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, UnicodeError) as error:
        raise PostError(f"{type(error).__name__}: the request cannot be sent", lasting=True) from None
    except PostError:
        raise
    except Exception as error:  # the library's, and what its parts raise: a group, an OverflowError of a port
        raise PostError(f"{type(error).__name__}: {error}") from None


async def _body(reply: Any) -> bytes:
    """The body; of an error status its beginning."""
    good, found = reply.status_code < 400, bytearray()
    async for chunk in reply.aiter_raw():
        found += chunk
        if good and len(found) > LARGEST_REPLY:
            raise PostError(f"the reply is larger than {LARGEST_REPLY >> 20} MiB")
        if not good and len(found) >= _LARGEST_ERROR:
            break
    return bytes(found)
