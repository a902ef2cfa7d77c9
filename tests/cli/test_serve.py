"""`posttrain serve` as a user types it; the engine behind it is in tests/rollout/test_server.py."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app

find_spec = importlib.util.find_spec


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "vllm" else find_spec(name))


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2 and "posttrain[vllm]" in result.stderr


@pytest.mark.usefixtures("with_vllm")
def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--port", str(port)])
    assert result.exit_code == 2
    first, hint = result.stderr.splitlines()
    assert first == f"cannot listen on 127.0.0.1:{port}: Address already in use" and "--port takes another" in hint


def test_one_run_after_the_other_until_ctrl_c(tmp_path: Path) -> None:
    """Two sessions, each with a process of its own; Ctrl-C ends the third, which still imports."""
    program = """
import importlib.util, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: object() if name == "vllm" else find(name, *more)
from posttrain.__main__ import main
sys.argv[1:] = ["serve", "--port", sys.argv[1]]
main()
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", program, str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    try:
        assert f"server.urls=[http://127.0.0.1:{port}]" in process.stderr.readline()
        names = {begin_and_leave(f"http://127.0.0.1:{port}") for _ in range(2)}
        assert len(names) == 2
        assert [process.stderr.readline() for _ in range(2)] == ["the run has gone; ready again\n"] * 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and "stopped" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def begin_and_leave(url: str) -> Any:
    from posttrain.rollout.client import Client

    client = Client(url, 30)
    client.open()
    client.close()
    return client.name
