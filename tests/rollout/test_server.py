"""The engine in another process, without vLLM: the real server, client and wire around a transformers model."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt
from posttrain.errors import EngineError, RecipeError
from posttrain.models.load import LoadedModel
from posttrain.models.rounding import logp_tolerance
from posttrain.recipe.rollout_sections import EngineSection, Sampling
from posttrain.rollout import client, local_server, remote, shared_memory, wire
from posttrain.rollout.engine import make_engine
from posttrain.rollout.hf import TransformersEngine

SAMPLED = Sampling(temperature=0.7, max_new_tokens=12)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.05, 0.1, 0.2))


def engine_at(loaded: LoadedModel, folder: Path, *urls: str, merge_adapter: bool = False, **server: Any) -> Any:
    vllm = {"server": {"urls": list(urls), **server}, "merge_adapter": merge_adapter}
    section = EngineSection.model_validate({"engine": "vllm", "vllm": vllm})
    return make_engine(section, loaded, scratch=folder, max_len=64)


def disturb(model: Any, scale: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * scale)


def lora_of(loaded: LoadedModel) -> LoadedModel:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(loaded.model, LoraConfig(r=3, lora_alpha=6, target_modules="all-linear"))
    return LoadedModel(model, loaded.tokenizer, loaded.eos_ids, loaded.pad_id, "test")


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("kind", ["full", "lora", "merged"])
def test_it_draws_what_an_engine_here_would(
    serving: ModuleType,
    loaded: LoadedModel,
    prompts: list[Prompt],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    servers: int,
) -> None:
    """Weights in several buckets (an adapter alone, with LoRA), samples, log-probs, shares and versions."""
    monkeypatch.setattr(wire, "BUCKET_BYTES", 20_000)
    loaded = loaded if kind == "full" else lora_of(loaded)
    here = TransformersEngine(loaded, batch_size=64)
    ones = [serving.Served() for _ in range(servers)]
    engine = engine_at(loaded, tmp_path, *(one.url for one in ones), merge_adapter=kind == "merged")
    try:
        disturb(loaded.model)
        assert engine.probe(loaded.model) > 0.01, "a skipped sync goes unseen"
        engine.sync(loaded.model, 1)
        here.sync(loaded.model, 1)
        assert engine.gap < 1e-5 and engine.version == 1
        for choice in ({}, {"share": [1, 4], "logprobs": 2, "first_group": 3}):
            found = engine.generate(prompts, 3, SAMPLED, seed=5, **choice)
            expected = here.generate(prompts, 3, SAMPLED, seed=5, **choice)
            assert [(r.ids, r.finish, r.group, r.version) for r in found] == [
                (r.ids, r.finish, r.group, r.version) for r in expected
            ]
        assert [r.segments[0].logps is None for r in found] == [False] * 3 + [True] * 3
        whole = engine.generate(prompts, 2, SAMPLED, seed=5)
        gaps = [
            abs(a - b)
            for r, e in zip(whole, here.generate(prompts, 2, SAMPLED, seed=5), strict=True)
            for a, b in zip(r.logps, e.logps, strict=True)
        ]
        assert max(gaps) < 1e-4
    finally:
        engine.close()
    engine.close()  # twice is fine
    for one in ones:
        one.thread.join(10)
        assert not one.thread.is_alive() and not one.server.folder.exists()
        told = one.core.told
        first = {"full": "load", "lora": "adapter 0", "merged": "factors"}[kind]
        assert told[0] == first and told.count("load") == (0 if kind == "lora" else 2)
    assert not list(tmp_path.rglob("*.safetensors")), "weights stay on the disk"


def test_engines_of_one_gpu_start_one_after_the_other(
    serving: ModuleType, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another GPU do not wait for them, and the memory that each is given is the half."""
    began, ended = dict[str, float](), dict[str, float]()
    ones: list[Any] = []

    def start(_: Any, log: Path) -> Any:
        name = log.stem

        def make(settings: dict[str, Any], folder: Path) -> Any:
            assert settings["vllm"]["gpu_memory"] == 0.45
            began[name] = time.monotonic()
            time.sleep(0.3)
            ended[name] = time.monotonic()
            return serving.TransformersCore(settings, folder)

        ones.append(serving.Served(make))
        return SimpleNamespace(url=ones[-1].url, fate=lambda: "", close=lambda: None)

    monkeypatch.setattr(remote.LocalServer, "start", start)
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda _: object())
    section = EngineSection.model_validate({"engine": "vllm", "vllm": {"server": {"devices": [1, 2, 1]}}})
    engine = make_engine(section, loaded, scratch=tmp_path, max_len=64)
    engine.close()
    for one in ones:
        one.thread.join(10)
    first, second = sorted((began[name], ended[name]) for name in ("server-0", "server-2"))
    assert first[1] <= second[0], "two on GPU 1 at once"
    assert began["server-1"] < first[1]


def test_a_request_is_told_once_and_as_soon_as_it_is_finished(
    serving: ModuleType, loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path
) -> None:
    from posttrain.rollout.pushed import requests_of

    with serving.served(lambda s, f: serving.TransformersCore(s, f, slow_s=0.05)) as one:
        engine = engine_at(loaded, tmp_path, one.url)
        heard: list[tuple[int, float]] = []
        requests = requests_of(prompts, 2, SAMPLED, seed=1, logprobs=True, share=None)
        found = engine.complete(
            requests, SAMPLED, seed=1, done=lambda place, _: heard.append((place, time.monotonic()))
        )
        ended = time.monotonic()
        engine.close()
    assert [place for place, _ in heard] == list(range(len(prompts))) == list(range(len(found)))
    assert ended - heard[0][1] > 0.05 * (len(prompts) - 1) * 0.8


@pytest.mark.parametrize("kind", ["full", "lora", "merged"])
@pytest.mark.parametrize("reached", [True, False], ids=["memory", "http"])
def test_weights_go_through_memory_where_it_can_be_mapped(
    serving: ModuleType,
    loaded: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reached: bool,
    kind: str,
) -> None:
    """Bytes of weights and files over HTTP: none, or all. Either way the probe finds them, and no file stays open."""
    loaded = loaded if kind == "full" else lora_of(loaded)
    monkeypatch.setattr(wire, "BUCKET_BYTES", 20_000)
    if not reached:
        monkeypatch.setattr(shared_memory, "found", lambda _: "")  # another machine
    sent: list[int] = []
    ask = client.Client.ask

    def asking(self: Any, method: str, path: str, body: Any = ()) -> Any:
        if path.startswith(("/weights", "/files")):
            sent.append(body.stat().st_size if isinstance(body, Path) else sum(len(part) for part in body))
        return ask(self, method, path, body)

    monkeypatch.setattr(client.Client, "ask", asking)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    with serving.served() as one:
        engine = engine_at(loaded, tmp_path, one.url, merge_adapter=kind == "merged")
        way = {True: "files of this machine" if kind == "lora" else "shared memory", False: "HTTP"}[reached]
        assert engine.route == f"{'weights' if kind == 'full' else 'adapters'} go to {one.url} by {way}"
        disturb(loaded.model)
        engine.sync(loaded.model, 1)
        assert engine.gap < 1e-5 and len(sent) > 4
        engine.close()
    assert (sum(sent) == 0) == reached
    assert len(list(Path("/proc/self/fd").iterdir())) <= opened + 1


def test_only_memory_of_a_process_is_mapped() -> None:
    with shared_memory.Memory([b"abc", b"defg"]) as memory:
        assert shared_memory.found(memory.place) == "abcdefg"
        mapped = shared_memory.mapped(memory.place)
    assert mapped[:] == b"abcdefg", "gone when its maker has closed it"
    assert shared_memory.found(memory.place) == "" == shared_memory.found("/proc/self/environ")
    with pytest.raises(ValueError, match="no place of shared memory"):
        shared_memory.mapped("/proc/1/fd/../environ")


def test_a_file_is_copied_from_where_it_is_open(tmp_path: Path) -> None:
    (tmp_path / "a file").write_bytes(b"adapter")
    with shared_memory.lent(tmp_path / "a file") as place:
        (tmp_path / "a file").unlink()  # as for one who does not see the folder
        shared_memory.copied(place, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"adapter"
    with pytest.raises(ValueError, match="no place of shared memory"):
        shared_memory.copied("/etc/passwd", tmp_path / "copy")


@pytest.mark.parametrize("cause", [AttributeError(), PermissionError()])
def test_where_memory_cannot_be_had_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    def refuse(parts: Any) -> Any:
        del parts
        raise cause

    monkeypatch.setattr(shared_memory, "Memory", refuse)
    assert not shared_memory.reaches(None)  # type: ignore[arg-type]


def test_a_sync_that_is_lost_stops_the_run(serving: ModuleType, loaded: LoadedModel, tmp_path: Path) -> None:
    with serving.served() as one:
        engine = engine_at(loaded, tmp_path, one.url)
        one.core.load = lambda named: [None for _ in named]
        disturb(loaded.model)
        with pytest.raises(EngineError, match="stale engine: after syncing version 1"):
            engine.sync(loaded.model, 1)
        assert engine.version == 0
        engine.close()


@pytest.mark.parametrize("late", [False, True], ids=["never", "a step late"])
def test_a_sync_that_is_lost_after_a_small_step(
    serving: ModuleType, loaded: LoadedModel, tmp_path: Path, late: bool
) -> None:
    """Its gap alone would pass for rounding: the engine stays where it was, or moves to where the trainer was."""
    with serving.served() as one:
        engine = engine_at(loaded, tmp_path, one.url)
        disturb(loaded.model, 1e-5)
        engine.sync(loaded.model, 1)
        load, before = one.core.load, [(n, w * (1 + 1e-6)) for n, w in loaded.model.state_dict().items()]
        one.core.load = lambda named: ([None for _ in named], load(iter(before)) if late else None)[0]
        disturb(loaded.model, 5e-5)
        tolerance = logp_tolerance(torch.float32, other_kernels=True)
        assert tolerance / 100 < engine.probe(loaded.model) < tolerance
        with pytest.raises(EngineError, match="stale engine: after syncing version 2 it still has the weights"):
            engine.sync(loaded.model, 2)
        one.core.load = load
        engine.sync(loaded.model, 2)
        engine.close()


def test_what_a_server_raises_is_told_with_its_address(
    serving: ModuleType, loaded: LoadedModel, tmp_path: Path
) -> None:
    def refuse(settings: Any, folder: Path) -> Any:
        del settings, folder
        raise RecipeError("gpu_memory is too much", hint="take less")

    with serving.served(refuse) as one, pytest.raises(RecipeError, match=rf"{one.url}  gpu_memory is too much"):
        engine_at(loaded, tmp_path, one.url)


def test_a_failure_in_the_middle_of_an_answer_is_an_error(
    serving: ModuleType, loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path
) -> None:
    with serving.served() as one:
        engine = engine_at(loaded, tmp_path, one.url)
        one.core.logps = None
        with pytest.raises(EngineError, match="TypeError"):
            engine.probe(loaded.model)
        assert engine.generate(prompts[:1], 1, SAMPLED, seed=0)
        engine.close()


def test_a_server_works_for_one_run(serving: ModuleType, loaded: LoadedModel, tmp_path: Path) -> None:
    with serving.served() as one:
        engine = engine_at(loaded, tmp_path, one.url)
        with pytest.raises(EngineError, match=r"works for another run \(.*process \d+\)"):
            engine_at(loaded, tmp_path / "other", one.url)
        engine.close()


def test_nobody_answers(loaded: LoadedModel, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(EngineError, match=rf"http://127.0.0.1:{port}  no engine can be reached(.|\n)*--port {port}"):
        engine_at(loaded, tmp_path, f"http://127.0.0.1:{port}")


def test_silence_is_told(loaded: LoadedModel, tmp_path: Path) -> None:
    """It takes connections and never answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises(EngineError, match=r"did not answer for 0.3 s(.|\n)*server.timeout_s"),
    ):
        engine_at(loaded, tmp_path, f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.3)


def test_another_program_on_that_port_is_told(loaded: LoadedModel, tmp_path: Path) -> None:
    def answer(listener: socket.socket) -> None:
        for _ in range(len(client.PAUSES) + 1):
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=answer, args=(other,), daemon=True).start()
        with pytest.raises(EngineError, match="no engine can be reached there"):
            engine_at(loaded, tmp_path, f"http://127.0.0.1:{other.getsockname()[1]}")


class Dropping:
    """A proxy in front of a server that cuts the first connections after so many bytes of the answer."""

    def __init__(self, url: str, cut: list[int]) -> None:
        self.target, self.cut = int(url.rpartition(":")[2]), cut
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(connection,), daemon=True).start()

    def _relay(self, connection: socket.socket) -> None:
        first = connection.recv(1 << 20)
        drop = self.cut.pop(0) if b"/generate" in first[:64] and self.cut else None
        with socket.create_connection(("127.0.0.1", self.target)) as server, connection:
            threading.Thread(target=self._pump, args=(connection, server, first), daemon=True).start()
            sent = 0
            while (piece := server.recv(1 << 16)) and (drop is None or sent < drop):
                connection.sendall(piece)
                sent += len(piece)
            connection.shutdown(socket.SHUT_RDWR)  # closing alone waits for the other thread

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, first: bytes) -> None:
        try:
            target.sendall(first)
            while piece := source.recv(1 << 20):
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


def test_a_broken_connection_is_tried_again(
    serving: ModuleType, loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path
) -> None:
    """Cut before the answer, and in its middle: what is asked twice is answered twice alike."""
    with serving.served() as one:
        direct = Dropping(one.url, [0, 300])
        engine = engine_at(loaded, tmp_path, direct.url)
        found = engine.generate(prompts, 2, SAMPLED, seed=3)
        expected = TransformersEngine(loaded, batch_size=64).generate(prompts, 2, SAMPLED, seed=3)
        assert [r.ids for r in found] == [r.ids for r in expected]
        assert not direct.cut and one.core.told.count("complete") == 3
        engine.close()
        direct.listener.close()


@pytest.fixture
def process(serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers that a run starts are real processes around the stand-in."""
    stand_in = f"import runpy; sys.argv[1:] = ['{{fd}}']; runpy.run_path({serving.__file__!r}, run_name='__main__')"
    monkeypatch.setattr(local_server, "_SERVE", stand_in)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "vllm" else find(name))
    yield


def test_a_server_ends_with_the_run_that_was_killed(process: None, tmp_path: Path) -> None:
    """kill -9 of the run: its server ends by itself, and leaves no files."""
    del process
    program = f"""
import os, runpy, sys
from pathlib import Path
from posttrain.rollout import local_server
local_server._SERVE = {local_server._SERVE!r}
server = local_server.LocalServer.start((1,), Path({str(tmp_path / "log")!r}))
from posttrain.rollout.client import Client
client = Client(server.url, 60)
client.open()
print(server.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert run.returncode == -9, run.stderr
    pid = int(run.stdout)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists() and not zombie(pid):
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() or zombie(pid)


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "server killed"])
def test_what_a_server_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, killed: bool) -> None:
    """vLLM's workers: here a process that sleeps. It ends with the session, and with a server that dies of kill -9."""
    entry = "import multiprocessing, time; from posttrain.rollout.server import main; "
    entry += "c = multiprocessing.get_context('fork').Process(target=time.sleep, args=(99,)); c.start(); "
    entry += "print(c.pid, flush=True); main({fd})"
    monkeypatch.setattr(local_server, "_SERVE", entry)
    server = local_server.LocalServer.start((1,), tmp_path / "log")
    one = client.Client(server.url, 60)
    deadline = time.monotonic() + 30
    while not server.log.read_text().endswith("\n") and time.monotonic() < deadline:
        time.sleep(0.05)
    one.open()
    child = int(server.log.read_text().split()[0])
    if killed:
        server.process.kill()
    one.close()
    server.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not zombie(child):
        time.sleep(0.05)
    assert zombie(child)


def test_a_server_that_still_imports_ends_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It need not be killed after GRACE_S: closing its stdin is enough, whatever it does."""
    monkeypatch.setattr(local_server, "_SERVE", "import time; time.sleep(99)")
    server = local_server.LocalServer.start((1,), tmp_path / "log")
    server.close()
    assert server.process.returncode == 0


def test_ctrl_c_between_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """While `serve` tells that a run has gone, it is not waiting for a process: it stops as quietly then."""
    monkeypatch.setattr(local_server, "_SERVE", "")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if text != "stopped":
            raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as listener:
        local_server.serve_runs(listener, {}, say)
    assert said == ["the run has gone; ready again", "stopped"]


def zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_gpu_that_trains_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7")
    assert [local_server.visible_device(n, "--gpu") for n in (1, 2)] == ["5", "GPU-7"]
    assert local_server.not_training(1) == 1
    with pytest.raises(RecipeError, match=r"GPU 0 trains(.|\n)*from 1 on"):
        local_server.not_training(0)
    with pytest.raises(RecipeError, match="--gpu: there is no GPU 3: CUDA_VISIBLE_DEVICES lists 3"):
        local_server.visible_device(3, "--gpu")


def test_tensors_travel_as_they_are() -> None:
    """Odd sizes, an empty tensor and bfloat16: each begins where its type may begin."""
    named = [
        ("a", torch.arange(5, dtype=torch.uint8)),
        ("b", torch.randn(3, 2, dtype=torch.bfloat16)),
        ("none", torch.empty(0, 4)),
        ("c", torch.randn(2, 3, dtype=torch.float64)),
    ]
    body = bytearray(b"".join(wire.pack(named)))
    back = wire.unpack(body)
    assert [n for n, _ in back] == [n for n, _ in named]
    assert all(torch.equal(x, y) and x.dtype == y.dtype for (_, x), (_, y) in zip(back, named, strict=True))
    with pytest.raises(ValueError, match="tensor c is cut short"):
        wire.unpack(body[:-64])
    parts = list(wire.buckets([(n, t) for n, t in named if t.is_floating_point()], torch.float16, 12))
    assert [[n for n, _ in part] for part in parts] == [["b"], ["none", "c"], []]
    assert all(t.dtype == torch.float16 for part in parts for _, t in part)


@pytest.mark.parametrize("name", ["../x", "a/../x", "/etc/x", "a/b/c", "", "a/%2e%2e"])
def test_files_stay_where_they_belong(serving: ModuleType, name: str) -> None:
    with serving.served() as one, pytest.raises(ValueError, match="no name of a file"):
        one.server.place(name)
