"""Requests to a local endpoint: what is sent, retried and cached, and what is never disclosed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from posttrain.verify import endpoint
from posttrain.verify.asking import ask_all
from posttrain.verify.endpoint import Endpoint, JudgeError, ask

Stub = Callable[..., Any]
ASKED = [{"role": "user", "content": "Good?"}]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # above 0: a server closes its side of a connection in the pool first, as it does in the real pause of 0.25 s
    monkeypatch.setattr(endpoint, "_pause", lambda _attempt, _asked_for: 0.02)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_request_body_and_headers(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    judge = stub(lambda _body, _n: (200, "Score: 7"))
    place = Endpoint(judge.url, "m", key_env="MY_KEY", temperature=0.5, max_tokens=64)
    assert ask(place, ASKED, 3) == ("Score: 7", False)
    assert judge.bodies == [
        {
            "path": "/v1/chat/completions",
            **{"model": "m", "messages": ASKED, "temperature": 0.5, "max_tokens": 64, "seed": 3},
        }
    ]
    assert judge.headers[0]["Authorization"] == "Bearer sk-secret"


def test_identical_request_is_sent_once(stub: Stub, tmp_path: Path) -> None:
    judge = stub(lambda _body, n: (200, f"reply {n}"))
    place = Endpoint(judge.url, "m")
    assert [ask(place, ASKED, seed) for seed in (0, 0, 1, 0)] == [
        ("reply 0", False),
        ("reply 0", True),
        ("reply 1", False),
        ("reply 0", True),
    ]
    assert ask(Endpoint(judge.url, "another"), ASKED, 0) == ("reply 2", False)
    assert ask(Endpoint(judge.url, "m", cache="none"), ASKED, 0) == ("reply 3", False)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 3
    for kept in (tmp_path / "cache").rglob("*.json"):
        kept.write_text("{")  # a truncated cache file is not a reply
    assert ask(place, ASKED, 0) == ("reply 4", False)


@pytest.mark.parametrize("fault", [(500, {"error": "down"}), (429, {}), (200, {"choices": []}), (200, None)])
def test_transient_errors_are_retried(stub: Stub, fault: tuple[int, Any]) -> None:
    judge = stub(lambda _body, n: fault if n < 2 else (200, "Score: 1"))
    assert ask(Endpoint(judge.url, "m", retries=2), ASKED, 0).text == "Score: 1"
    assert len(judge.bodies) == 3


def test_client_gives_up_and_reports_the_error(stub: Stub) -> None:
    judge = stub(lambda _body, _n: (503, {"error": "overloaded"}))
    with pytest.raises(JudgeError, match=r"no reply in 3 tries; last error: status 503: .*overloaded"):
        ask(Endpoint(judge.url, "m", retries=2), ASKED, 0)


def test_refusal_is_reported_immediately_without_the_key(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    judge = stub(lambda _body, _n: (401, {"error": "bad key sk-secret"}))
    with pytest.raises(JudgeError, match=r"refused the request: status 401: .*bad key \*\*\*.*see key_env") as caught:
        ask(Endpoint(judge.url, "m", key_env="MY_KEY"), ASKED, 0)
    assert "sk-secret" not in str(caught.value) and caught.value.__cause__ is None
    assert len(judge.bodies) == 1
    assert not any("sk-secret" in p.read_text() for p in tmp_path.rglob("*") if p.is_file())


def test_hanging_server_costs_its_time_limit() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        place = Endpoint(f"http://127.0.0.1:{deaf.getsockname()[1]}/v1", "m", request_s=0.2, retries=1)
        with pytest.raises(JudgeError, match=r"no reply in 2 tries; last error: TimeoutError"):
            ask(place, ASKED, 0)


@contextlib.contextmanager
def speaking(*turns: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[bytes]]]:
    """Factory of raw servers: each request is read and answered by a function on the bare socket; the last function
    repeats.
    """
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(link: socket.socket, turn: Callable[[socket.socket], None]) -> None:
            with link, contextlib.suppress(OSError):
                request = b""
                try:
                    request = link.recv(65536)
                finally:
                    asked.append(request)  # also if the client has disconnected
                turn(link)

        def serve() -> None:
            with contextlib.suppress(OSError):
                for number in itertools.count():
                    link = listener.accept()[0]
                    turn = turns[min(number, len(turns) - 1)]
                    threading.Thread(target=answer, args=(link, turn), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", asked
        listener.shutdown(socket.SHUT_RDWR)


def says(data: bytes) -> Callable[[socket.socket], None]:
    return lambda link: link.sendall(data)


def drips(before: bytes, drop: bytes) -> Callable[[socket.socket], None]:
    """Send the first bytes, then one byte group every 0.02 s forever."""

    def turn(link: socket.socket) -> None:
        link.sendall(before)
        while True:
            link.sendall(drop)
            time.sleep(0.02)

    return turn


def pours(before: bytes, drop: bytes) -> Callable[[socket.socket], None]:
    def turn(link: socket.socket) -> None:
        link.sendall(before)
        while True:
            link.sendall(drop)

    return turn


BODY = json.dumps({"choices": [{"message": {"content": "Score: 1"}}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n"
GOOD = HEAD % len(BODY) + b"\r\n" + BODY
BROKEN = {
    "cut off": HEAD % len(BODY) + b"\r\n" + BODY[:-9],
    "shorter than it says": HEAD % 10**12 + b"\r\n" + BODY,
    "nothing": b"",
    "half a status line": b"HTTP/1.1 2",
    "no http": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "a header without end": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000,
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n" + BODY,
    "a chunk that is none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "half of its chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{'ch",
    "a deep text": HEAD % 200_000 + b"\r\n" + b"[" * 200_000,
    "a long number": HEAD % 20_000 + b"\r\n" + b"1" * 20_000,
    "no text": HEAD % 4 + b"\r\n" + b"\xff\xfe{}",
    "another shape": HEAD % 15 + b"\r\n" + b'{"choices": {}}',
    "no content": HEAD % 44 + b"\r\n" + b'{"choices": [{"message": {"content": null}}]}'[:44],
    "compressed": HEAD % 20 + b"Content-Encoding: gzip\r\n\r\n" + b"\x1f\x8b" * 10,
    "an empty body": HEAD % 0 + b"\r\n",
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_reply_is_requested_again(what: str) -> None:
    with speaking(says(BROKEN[what]), says(BROKEN[what]), says(GOOD)) as (url, asked):
        assert ask(Endpoint(url, "m", retries=2, cache="none"), ASKED, 0).text == "Score: 1"
        assert len(asked) == 3
    with speaking(says(BROKEN[what])) as (url, asked):
        with pytest.raises(JudgeError, match="no reply in 2 tries; last error: ") as caught:
            ask(Endpoint(url, "m", retries=1, cache="none"), ASKED, 0)
        assert len(asked) == 2 and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "turn",
    [
        drips(b"", b"H"),
        drips(b"HTTP/1.1 200 OK\r\n", b"X-Y: z\r\n"),
        drips(HEAD % 10**6 + b"\r\n", b"{"),
        drips(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n"),
        drips(b"HTTP/1.1 500 Oh\r\nContent-Length: 1000000\r\n\r\n", b"x"),
    ],
    ids=["status", "headers", "body", "chunks", "error"],
)
def test_time_limit_covers_the_whole_request(turn: Callable[[socket.socket], None]) -> None:
    with speaking(turn) as (url, _):
        started = time.monotonic()
        with pytest.raises(
            JudgeError, match=r"no reply in 2 tries; last error: TimeoutError: no whole reply in 0\.3 s"
        ):
            ask(Endpoint(url, "m", request_s=0.3, retries=1), ASKED, 0)
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "head", [HEAD % 10**12 + b"\r\n", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["a length", "until it closes"]
)
def test_endless_reply_is_not_read(head: bytes) -> None:
    with (
        speaking(pours(head, b" " * 2**16)) as (url, _),
        pytest.raises(JudgeError, match="last error: the reply is larger than 8 MiB"),
    ):
        ask(Endpoint(url, "m", retries=0), ASKED, 0)


def test_long_error_is_truncated_to_its_beginning() -> None:
    with speaking(pours(b"HTTP/1.1 400 No\r\n\r\n", b"no such model " * 99)) as (url, asked):
        with pytest.raises(JudgeError, match=r"refused the request: status 400: no such model .*\.\.\.$"):
            ask(Endpoint(url, "m"), ASKED, 0)
        assert len(asked) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed_and_the_key_is_not_sent(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    other = stub(lambda _body, _n: (200, "Score: 10"))
    moved = f"HTTP/1.1 {status} Moved\r\nLocation: {other.url}/chat/completions\r\nContent-Length: 0\r\n\r\n"
    with speaking(says(moved.encode())) as (url, asked):
        with pytest.raises(JudgeError, match=rf"cannot be used: status {status}: it redirects to {other.url}"):
            ask(Endpoint(url, "m", key_env="MY_KEY", cache="none"), ASKED, 0)
        assert len(asked) == 1 and other.bodies == []


@pytest.mark.parametrize(
    ("url", "key", "told"),
    [
        ("http://127.0.0.1:1/v1", "k", "ConnectError"),
        ("http://[::1/v1", "k", "not an http address"),
        ("http:///v1", "k", "not an http address"),
        ("http://127.0.0.1:99999/v1", "k", "not an http address"),
        ("http://no-such-host.invalid/v1", "k", "ConnectError"),
        ("http://127.0.0.1:1/v1", "k\u00e9y\nX: y", "the request cannot be sent"),
    ],
)
def test_malformed_replies_are_not_accepted(monkeypatch: pytest.MonkeyPatch, url: str, key: str, told: str) -> None:
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(JudgeError, match=told) as caught:
        ask(Endpoint(url, "m", key_env="MY_KEY", retries=1, request_s=5), ASKED, 0)
    assert "X: y" not in str(caught.value)


def test_reply_that_cannot_be_cached_is_reported(stub: Stub, tmp_path: Path) -> None:
    judge = stub(lambda _body, _n: (200, "Score: 1"))
    (tmp_path / "file").write_text("")
    with pytest.raises(JudgeError, match="cannot be written to the cache"):
        ask(Endpoint(judge.url, "m", cache=str(tmp_path / "file")), ASKED, 0)


def test_threads_share_a_client_and_a_forked_process_has_its_own(stub: Stub) -> None:
    judge = stub(lambda _body, n: (200, f"Score: {n}"))
    place = Endpoint(judge.url, "m", cache="none")
    with ThreadPoolExecutor(8) as threads:
        said = {reply.text for reply in threads.map(lambda seed: ask(place, ASKED, seed), range(24))}
    assert said == {f"Score: {n}" for n in range(24)}
    if (child := os.fork()) == 0:
        os._exit(0 if ask(place, ASKED, 0).text == "Score: 24" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_missing_http_client_is_reported_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint.http_client, "available", lambda: False)
    assert "httpx2, which is not installed" in endpoint.problem_of(Endpoint("http://127.0.0.1:1/v1", "m"))
    assert endpoint.problem_of(Endpoint("scripted:Score: 1", "m")) == ""


def test_request_budget_is_enforced_and_cache_hits_are_free(stub: Stub) -> None:
    judge = stub(lambda _body, _n: (200, "Score: 1"))
    place = Endpoint(judge.url, "m", budget=2)
    for seed in (0, 1, 0, 1):
        ask(place, ASKED, seed)
    with pytest.raises(JudgeError, match=r"budget of 2 requests .* is spent"):
        ask(place, ASKED, 2)
    assert len(judge.bodies) == 2


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (Endpoint("scripted:Score: 1", "m"), ""),
        (Endpoint("http://127.0.0.1:1/v1", "m"), ""),
        (Endpoint("localhost:8000", "m"), "not an http address"),
        (Endpoint("file:///etc/passwd", "m"), "not an http address"),
        (Endpoint("http://host:70000/v1", "m"), "not an http address"),
        (Endpoint("https://", "m"), "not an http address"),
        (Endpoint("http://x/v1", "m", key_env="NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE"),
    ],
)
def test_configuration_errors_are_found_without_a_request(place: Endpoint, problem: str) -> None:
    assert problem in endpoint.problem_of(place) and bool(problem) == bool(endpoint.problem_of(place))


def test_retry_pauses_double_and_retry_after_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 0.25 <= endpoint._pause(0, "") <= 0.5 and 1.0 <= endpoint._pause(2, "") <= 2.0
    assert endpoint._pause(0, "3") == 3.0 and endpoint._pause(0, "900") == endpoint.MAX_PAUSE_SECONDS
    assert endpoint._pause(9, "Fri, 31 Dec 1999 23:59:59 GMT") <= endpoint.MAX_PAUSE_SECONDS


def test_scripted_endpoint_returns_its_reply() -> None:
    assert ask(Endpoint("scripted:Score: 4", "m"), ASKED, 0).text == "Score: 4"


def test_openai_key_variable_is_used_only_for_the_openai_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-open")
    assert endpoint._headers(Endpoint("https://api.openai.com/v1", "m")) == {"Authorization": "Bearer sk-open"}
    for url in ("https://api.example.com/v1", "http://api.openai.com/v1", "https://api.openai.com.example.com/v1"):
        assert endpoint._headers(Endpoint(url, "m")) == {}
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "OPENAI_API_KEY" in endpoint.problem_of(Endpoint("https://api.openai.com/v1", "m"))


def test_truncated_reply_is_neither_used_nor_cached(stub: Stub, tmp_path: Path) -> None:
    """Repeating the same request would be truncated again and would use up the budget."""

    def cut(_body: dict[str, Any], number: int) -> tuple[int, Any]:
        finish = "length" if number == 0 else "stop"
        return 200, {"choices": [{"message": {"content": "Score: 1"}, "finish_reason": finish}]}

    judge = stub(cut)
    place = Endpoint(judge.url, "m", max_tokens=64)
    with pytest.raises(JudgeError, match="the reply of m was cut at 64 tokens and is not used: raise max_tokens"):
        ask(place, ASKED, 0)
    assert len(judge.bodies) == 1 and not list((tmp_path / "cache").rglob("*.json"))
    assert ask(place, ASKED, 0) == ("Score: 1", False)


def test_ended_call_sends_no_further_request(stub: Stub) -> None:
    """One request is in flight, one in its pause, one not sent yet: none is sent again, and the budget is unchanged."""
    answered = threading.Event()

    def answer(_body: dict[str, Any], number: int) -> tuple[int, Any]:
        if number == 0:
            answered.wait(5)
        return 503, {"error": "busy"}

    judge = stub(answer)
    settings = {"url": judge.url, "model": "m", "retries": 50, "budget": 100, "cache": "none"}

    async def call() -> None:
        await asyncio.wait_for(ask_all(settings, ["a", "b", "c"], [0], concurrency=2), 0.3)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "_pause", lambda _attempt, _asked_for: 0.05)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            asyncio.run(call())
        assert time.monotonic() - start < 2
        answered.set()
        time.sleep(0.2)  # a request in flight has arrived
        sent = len(judge.bodies)
        time.sleep(0.3)
    assert 1 < len(judge.bodies) == sent


def test_failed_request_ends_the_other_requests_of_its_call(stub: Stub) -> None:
    def answer(body: dict[str, Any], _number: int) -> tuple[int, Any]:
        return (401, {}) if body["messages"][0]["content"] == "refused" else (503, {})

    judge = stub(answer)
    settings = {"url": judge.url, "model": "m", "retries": 10_000, "cache": "none"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "_pause", lambda _attempt, _asked_for: 0.01)
        with pytest.raises(JudgeError, match="refused the request"):
            asyncio.run(ask_all(settings, ["busy", "refused"], [0], concurrency=2))  # type: ignore[arg-type]
        time.sleep(0.2)
        sent = len(judge.bodies)
        time.sleep(0.2)
    assert len(judge.bodies) == sent
