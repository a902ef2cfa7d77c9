"""Who may use an engine in another process: whoever has its token, for what is the run's own, within bounds."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from posttrain.errors import EngineError
from posttrain.rollout import client, shared_memory, token, wire
from posttrain.rollout.server import EngineServer

TOKEN = "a-token-of-the-test"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EngineServer, str]]:
    monkeypatch.setattr(client, "PAUSES", (0.05,))
    listener = socket.create_server(("127.0.0.1", 0))
    made = EngineServer(listener, lambda *_: None, token=TOKEN)  # type: ignore[arg-type,return-value]
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    yield made, f"http://127.0.0.1:{listener.getsockname()[1]}"
    made.end()
    thread.join(10)
    assert not thread.is_alive()


def asked(url: str, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.readline())
    finally:
        connection.close()


@pytest.mark.parametrize("shown", ["", "wrong", TOKEN[:-1], TOKEN + "x", "é"])
@pytest.mark.parametrize("request_", ["GET /health", "POST /session", "PUT /files/a/b", "POST /start", "POST /weights"])
def test_without_the_token_nothing_is_answered(server: tuple[EngineServer, str], shown: str, request_: str) -> None:
    made, url = server
    method, _, path = request_.partition(" ")
    headers = {wire.TOKEN: shown.encode().decode("latin1"), wire.SESSION: made.session}
    status, answer = asked(url, method, path, headers if shown else {}, b'{"who": "first comer"}')
    assert status == 403 and "asks for its token" in answer["what"]
    assert made.session == "" and "works_for" not in answer
    assert not list(made.folder.iterdir())


def test_the_first_comer_does_not_take_the_session(server: tuple[EngineServer, str]) -> None:
    made, url = server
    with pytest.raises(EngineError, match=token.TOKEN_VARIABLE):
        client.Client(url, 10, token="guessed").open()
    one = client.Client(url, 10, token=TOKEN)
    one.open()
    assert made.session == one.name
    one.close()


def test_what_a_request_claims_costs_no_memory(server: tuple[EngineServer, str]) -> None:
    """Two gigabytes by its length, three bytes by its content; lengths that are none; more than is ever taken."""
    made, url = server
    one = client.Client(url, 10, token=TOKEN)
    one.open()
    own = f"{wire.TOKEN}: {TOKEN}\r\n{wire.SESSION}: {one.name}\r\n"
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    before = resident()
    with socket.create_connection(address, timeout=10) as sock:
        sock.sendall(f"POST /weights?number=0&last=0 HTTP/1.1\r\n{own}Content-Length: 2147483648\r\n\r\nabc".encode())
        threading.Event().wait(0.3)
        assert resident() - before < 100 << 20
    for length in ("-1", "1e9", "9" * 30, str(1 << 50), ""):
        with socket.create_connection(address, timeout=10) as sock:
            sock.sendall(f"POST /generate HTTP/1.1\r\n{own}Content-Length: {length}\r\n\r\n".encode())
            assert b" 500 " in sock.recv(100)
    assert made.session == one.name
    one.close()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_only_the_runs_own_memory_is_read(server: tuple[EngineServer, str], tmp_path: Path) -> None:
    """It shows that memory is its own by writing the session's name into it; nobody else's is named after that."""
    made, url = server
    one = client.Client(url, 10, token=TOKEN)
    one.open()
    (tmp_path / "secret").write_bytes(b"a secret of another process")
    with shared_memory.lent(tmp_path / "secret") as place, pytest.raises(EngineError, match="not the run's"):
        one.ask("PUT", f"/files/a/b?memory={place}")
    with shared_memory.Memory([b"not the name"]) as memory:
        assert one.ask("POST", "/shared", [json.dumps({"place": memory.place}).encode()]) == {"found": ""}
    assert made.peer == ""
    assert shared_memory.reaches(one) and made.peer == str(os.getpid())
    for other in (f"/proc/{os.getppid()}/fd/0", "/proc/1/fd/0", "/proc/self/environ", "/etc/passwd"):
        with pytest.raises(EngineError, match="not the run's"):
            one.ask("POST", f"/weights?number=0&last=1&memory={other}")
    with shared_memory.lent(tmp_path / "secret") as place:
        one.ask("PUT", f"/files/a/b?memory={place}")
    assert (made.folder / "a" / "b").read_bytes() == b"a secret of another process"
    one.close()


@pytest.mark.parametrize("entry", [["a", "nn", [1]], ["a", "float32", [-1]], ["a", "float32", ["2"]], ["a", "x", []]])
def test_tensors_have_a_type_and_a_shape(entry: list[Any]) -> None:
    header = json.dumps([entry]).encode()
    with pytest.raises((ValueError, TypeError), match=r"type|str"):
        wire.unpack(bytearray(len(header).to_bytes(8, "little") + header + bytes(64)))
    assert torch.equal(wire.unpack(bytearray(b"".join(wire.pack([("a", torch.ones(2))]))))[0][1], torch.ones(2))


def test_the_token_is_made_kept_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(token.TOKEN_VARIABLE, raising=False)
    first, place = token.serving_token(8100)
    assert place is not None and stat.S_IMODE(place.stat().st_mode) == 0o600 and len(first) > 30
    again, _ = token.serving_token(8100)
    assert again != first and token.asking_token("http://127.0.0.1:8100") == again
    assert token.asking_token("http://127.0.0.1:8101") == "" == token.asking_token("http://elsewhere:8100")
    monkeypatch.setenv(token.TOKEN_VARIABLE, "given")
    assert token.serving_token(8100) == ("given", None) and token.asking_token("http://elsewhere:8100") == "given"


def test_a_server_of_a_run_takes_its_token_from_the_run(serving: ModuleType) -> None:
    """In-process servers of tests ask for none; `main` always does."""
    with serving.served() as one:
        assert one.server.allows(None)
    assert not EngineServer(socket.create_server(("127.0.0.1", 0)), token="x").allows(None)
