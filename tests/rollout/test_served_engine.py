"""Servers that join and leave while an engine uses them. The servers are stand-ins in this process."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt
from posttrain.errors import EngineError, RecipeError
from posttrain.models import weights
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import EngineSection
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import served_engine, server_client
from posttrain.rollout.hf import TransformersEngine
from posttrain.rollout.make_engine import make_engine
from posttrain.rollout.server_key import TOKEN_VARIABLE
from posttrain.rollout.vllm_process import ABOUT

sys.path.append(str(Path(__file__).parents[1]))  # lets a server import engine_clients.py
KEY = "the key of this test"
GREEDY = Sampling(temperature=0.0, max_new_tokens=6)


@pytest.fixture
def start(
    serving: ModuleType, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Any]]:
    """Return a function that starts a server."""
    monkeypatch.setattr(server_client, "CONNECT_RETRY_S", 0.1)
    monkeypatch.setenv(TOKEN_VARIABLE, KEY)
    folder = weights.write_config(loaded, tmp_path / "served")
    started = []

    def start() -> Any:
        listener = socket.create_server(("127.0.0.1", 0))
        started.append(serving.transformers_server(listener, KEY, folder, "float32", 64))
        threading.Thread(target=started[-1].serve, daemon=True).start()
        return started[-1]

    yield start
    for one in started:
        one.close()


def engine_on(file: Path, loaded: LoadedModel) -> Any:
    section = EngineSection.model_validate({"engine": "vllm", "vllm": {"server": str(file)}})
    return make_engine(section, loaded, scratch=file.parent / "engine", max_len=64)


def name(file: Path, *servers: Any) -> None:
    file.write_text("".join(f"{server.url}\n" for server in servers))


def change(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def test_servers_can_join_leave_and_fail_during_a_run(
    serving: ModuleType,
    start: Callable[[], Any],
    loaded: LoadedModel,
    prompts: list[Prompt],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One server leaves the file, one joins with the newest weights, one has another model, one fails during its
    requests; each samples what transformers samples. The last server's error ends the run."""
    file, first, second = tmp_path / "servers.txt", start(), start()
    name(file, first, second)
    engine = engine_on(file, loaded)
    other = TransformersEngine(loaded, batch_size=64)

    def check(version: int) -> None:
        change(loaded.model)
        engine.sync(loaded.model, version)
        found = engine.generate(prompts, 2, GREEDY, seed=version)
        assert [r.ids for r in found] == [r.ids for r in other.generate(prompts, 2, GREEDY, seed=version)]
        assert {r.version for r in found} == {version}

    def drawn(server: Any) -> int:
        return sum("prompt_logprobs" not in body["sampling_params"] for body in server.bodies(serving.GENERATE))

    check(1)
    assert drawn(first) == drawn(second) == 3, "the least busy gets the next request"
    third, strange, far = start(), start(), start()
    about = strange.answers[ABOUT](None)[1]
    strange.answers[ABOUT] = lambda _: (200, {**about, "model": {**about["model"], "hidden_size": 128}})
    far.answers[ABOUT] = lambda _: (200, {**about, "boot_id": "another machine"})
    sessions: list[Any] = []
    strange.left = far.left = lambda: sessions.append(1)
    name(file, second, strange, far, third)
    check(2)
    assert [client.url for client in engine.clients] == [second.url, third.url]
    assert engine.take_counts() == {
        "rollout/servers": 2,
        "rollout/servers_lost": 0,
        "rollout/servers_joined": 1,
        "rollout/repeated_requests": 0,
    }
    assert drawn(third) == 3 and drawn(first) == 3
    make_server_fail(serving, second)
    second.answers["/health"] = lambda _: (503, {})
    check(3)
    said = capsys.readouterr().err
    assert f"{third.url}  joins with version 2 (3 servers now)" in said
    assert f"{first.url}  leaves: it is no longer named (2 servers now)" in said
    assert said.count(f"{strange.url}  cannot join: the server was started with a model with hidden_size 128") == 1
    assert (
        f"{far.url}  cannot join: without a GPU, weights can only be sent to servers on the trainer's machine" in said
    )
    assert f"{second.url}  is dropped: vLLM refused a request with status 500: out of memory (1 server now)" in said
    counts = engine.take_counts()
    assert counts["rollout/servers"] == counts["rollout/servers_lost"] == 1
    assert 1 <= counts["rollout/repeated_requests"] <= 3
    assert sessions == [], "those that cannot join are refused before a session begins"
    file.unlink()  # no server can be added; the current ones are still used
    check(4)
    assert "the servers stay as they are: rollout.vllm.server.file not found" in capsys.readouterr().err
    third.over.set()
    deadline = time.monotonic() + 20
    with pytest.raises(EngineError, match=f"{third.url}  the server is gone(.|\n)*--resume"):
        while time.monotonic() < deadline:  # it may still answer briefly
            engine.generate(prompts, 2, GREEDY, seed=9)
    engine.close()


def make_server_fail(serving: ModuleType, server: Any, length: int | None = None) -> None:
    """Make the server fail at requests with this number of tokens, or at all requests, but not at the probe."""
    answer = server.answers[serving.GENERATE]

    def generate(body: Any) -> tuple[int, Any]:
        probe = "prompt_logprobs" in body["sampling_params"]
        fails = not probe and length in (None, len(body["token_ids"]))
        return (500, {"error": "out of memory"}) if fails else answer(body)

    server.answers[serving.GENERATE] = generate


def test_failing_request_does_not_end_a_server(
    serving: ModuleType, start: Callable[[], Any], loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path
) -> None:
    """A request at which one server fails is sent to another; if two fail, the request raises, and both servers are
    still used."""
    file, one, other = tmp_path / "servers.txt", start(), start()
    name(file, one, other)
    engine = engine_on(file, loaded)
    make_server_fail(serving, one)
    assert len(engine.generate(prompts, 1, GREEDY, seed=0)) == len(prompts)
    assert engine.take_counts()["rollout/repeated_requests"] == len(prompts) / 2
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    make_server_fail(serving, other, len(longest.ids))
    with pytest.raises(EngineError, match="vLLM refused a request with status 500: out of memory") as error:
        engine.generate(prompts, 1, GREEDY, seed=0)
    assert error.value.problems[0].where in (one.url, other.url)
    assert len(engine.generate([p for p in prompts if p is not longest], 1, GREEDY, seed=0)) == len(prompts) - 1
    assert engine.take_counts()["rollout/servers"] == 2
    engine.close()


def test_server_that_fails_to_join_is_retried_with_backoff(
    start: Callable[[], Any],
    loaded: LoadedModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server restarts vLLM when a session ends, so a server that fails to join is retried after 30 s, then 60 s. A
    server that has not yet ended this run's earlier session is not another run's and joins as soon as it has."""
    now = [1000.0]
    monkeypatch.setattr(served_engine, "time", SimpleNamespace(monotonic=lambda: now[0]))
    file, one, broken = tmp_path / "servers.txt", start(), start()
    sessions: list[float] = []
    broken.left = lambda: sessions.append(now[0])
    broken.answers["/init_weight_transfer_engine"] = lambda _: (400, {"error": "no such GPU"})
    name(file, one)
    engine = engine_on(file, loaded)
    name(file, one, broken)
    for version in range(1, 13):
        engine.sync(loaded.model, version)
        now[0] += 10
    deadline = time.perf_counter() + 10
    while len(sessions) < 3 and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert sorted(sessions) == [1000, 1030, 1090]
    assert capsys.readouterr().err.count("cannot join: vLLM refused a request with status 400: no such GPU") == 1
    del broken.answers["/init_weight_transfer_engine"]
    now[0] += 240
    about = broken.answers[ABOUT](None)[1]
    broken.answers[ABOUT] = lambda _: (200, {**about, "works_for": server_client.describe_process()})
    engine.sync(loaded.model, 20)
    assert capsys.readouterr().err == "" and len(engine.clients) == 1
    broken.answers[ABOUT] = lambda _: (200, {**about, "works_for": "another machine, process 7"})
    engine.sync(loaded.model, 21)
    assert "cannot join: the server works for another run (another machine, process 7)" in capsys.readouterr().err
    now[0] += 480
    broken.answers[ABOUT] = lambda _: (200, {**about, "works_for": ""})
    engine.sync(loaded.model, 22)
    assert [client.url for client in engine.clients] == [one.url, broken.url] and len(sessions) == 3
    engine.close()


def test_run_starts_with_the_servers_that_answer(
    start: Callable[[], Any], loaded: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run starts with those of its servers that answer in time; a server of another kind is a user error."""
    file, one, missing = tmp_path / "servers.txt", start(), start()
    missing.close()
    name(file, missing, one)
    engine = engine_on(file, loaded)
    assert [client.url for client in engine.clients] == [one.url]
    assert f"{missing.url}  is not reachable, and joins when it is: no server can be reached" in capsys.readouterr().err
    engine.close()
    name(file, missing)
    with pytest.raises(EngineError, match=f"{missing.url}  no server can be reached there(.|\n)*posttrain serve"):
        engine_on(file, loaded)
    strange, more = start(), start()
    strange.answers[ABOUT] = lambda _: (200, {**one.answers[ABOUT](None)[1], "max_model_len": 8})
    name(file, more, strange)
    with pytest.raises(RecipeError, match="max_model_len 8, and this run needs 64"):
        engine_on(file, loaded)
