"""`posttrain serve` as a user types it; vLLM behind it is in tests/rollout/test_served.py."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app

find_spec = importlib.util.find_spec
RECIPE = """
stage: rl
model: {path: tiny}
data: {source: "gym:chain_sum", size: 8}
rollout: {max_new_tokens: 8}
rewards: [{use: gym.score}]
run: {steps: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "r.yaml").write_text(RECIPE)
    return str(tmp_path / "r.yaml")


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "vllm" else find_spec(name))


def test_serve_without_vllm_raises(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    result = CliRunner().invoke(app, ["serve", recipe])
    assert result.exit_code == 2 and "posttrain[vllm]" in result.stderr


@pytest.mark.usefixtures("with_vllm")
def test_used_port_raises(recipe: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", recipe, "--port", str(port)])
    assert result.exit_code == 2
    first, hint = result.stderr.splitlines()
    assert (
        first == f"cannot listen on 127.0.0.1:{port}: Address already in use"
        and "choose another one with --port" in hint
    )


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["RECIPE", "--devices", "1,x"], "--devices 1,x: not a list of GPUs"),
        (["debug/sft"], "a recipe of stage sft, which generates nothing"),
        (["RECIPE", "rollout.max_new_token=8"], "did you mean"),
    ],
)
def test_invalid_options_raise(recipe: str, arguments: list[str], told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = [recipe if argument == "RECIPE" else argument for argument in arguments]
    result = CliRunner().invoke(app, ["serve", *given, "--port", str(port)])
    assert result.exit_code == 2 and told in result.stderr


def test_serve_accepts_runs_one_after_another_until_ctrl_c(recipe: str, tmp_path: Path, serving: ModuleType) -> None:
    """Two sessions, each with a process of its own; Ctrl-C ends the third."""
    tests = str(Path(str(serving.__file__)).parent)
    entry = f"import gc, sys; gc.disable(); sys.path[:0] = [{{root!r}}, {tests!r}]; import serving; "
    entry += "serving.engine_process.end_with({parent}, serving.vllm_process.end_group); "
    entry += "serving.serve_idle(sys.argv[1:])"
    program = f"""
import importlib.util, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: object() if name == "vllm" else find(name, *more)
from posttrain.rollout import local_server, vllm_start
local_server._ENTRY = {entry!r}
vllm_start.cache_folder = lambda: Path({str(tmp_path / "cache")!r})
vllm_start.check_heads = lambda config: config()
from posttrain.__main__ import main
main()
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", program, "serve", recipe, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    late = threading.Timer(120, process.kill)  # nothing it says is waited for longer
    late.start()
    try:
        assert "only programs on this machine" in process.stderr.readline()
        assert process.stderr.readline() == "loading tiny\n"
        names = set()
        for _ in range(2):
            assert f"rollout.vllm.server.urls=[http://127.0.0.1:{port}]" in process.stderr.readline()
            names.add(begin_and_leave(port))
            assert process.stderr.readline() == "the run has ended: restarting vLLM\n"
        assert len(names) == 2, "a process has served two runs"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and "stopped" in process.stderr.read()
    finally:
        late.cancel()
        process.kill()
        process.communicate()


def begin_and_leave(port: int) -> int:
    """The process that served a run, which only looks who is there."""
    from posttrain.rollout import loop
    from posttrain.rollout.server_client import ServerClient
    from posttrain.rollout.server_key import client_key

    url = f"http://127.0.0.1:{port}"
    client = ServerClient(url, client_key(url), timeout_s=30, eos_ids=())
    loop.run(client.open({"max_model_len": 8, "model": {}}))
    client.close()
    return int(client.about["pid"])
