"""The trainer's client of a vLLM server, against a small HTTP server that answers as vLLM does, or wrongly."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from posttrain.errors import EngineError, RecipeError
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import local_server, loop, server_client, server_key, vllm_process, vllm_start
from posttrain.rollout.engine import Completion
from posttrain.rollout.engine_client import RequestFailed, ServerLost
from posttrain.rollout.requests import Request
from posttrain.rollout.server_answers import check_matches
from posttrain.rollout.server_client import ServerClient

KEY = "key-of-the-test"
SAMPLED = Sampling(temperature=0.7, max_new_tokens=12)
REQUEST = Request(0, (5, 6), 2, seed=2**33 + 7, max_new_tokens=9, logprobs=True)
ABOUT = {
    **{"boot_id": vllm_process.boot_id(), "workers": 1, "vllm": "0.32.0", "device": "cpu", "dtype": "float32"},
    **{"max_model_len": 64, "lora_rank": None, "model": {"hidden_size": 64, "num_hidden_layers": 2}},
}
WANTED = {"vllm": "0.32.0", "dtype": "float32", "max_model_len": 64, "model": {"hidden_size": 64}}


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "CONNECT_RETRY_S", 0.1)


@pytest.fixture
def fake(serving: ModuleType) -> Iterator[Any]:
    """A `StandIn` of tests/serving.py."""
    one = serving.StandIn(KEY, socket.create_server(("127.0.0.1", 0)))
    one.answers[vllm_process.ABOUT] = lambda _: (200, ABOUT)
    threading.Thread(target=one.serve, daemon=True).start()
    yield one
    one.close()


@pytest.fixture
def client(fake: Any) -> Iterator[ServerClient]:
    one = client_of(fake)
    loop.run(one.open(WANTED))
    yield one
    one.close()


def client_of(fake: Any, key: str = KEY, **settings: Any) -> ServerClient:
    return ServerClient(fake.url, key, **{"timeout_s": 10, "eos_ids": (2, 1), **settings})


def test_token_ids_and_log_probs_are_exact(fake: Any, client: ServerClient) -> None:
    """Token ids and log-probs equal the answer's to the last bit; every sampling setting is sent."""
    fake.samples(([7, 8, 2], "stop"), ([9], "length"))
    found = loop.run(client.complete(REQUEST, SAMPLED))
    assert found == [
        Completion((7, 8, 2), (-7 / 3, -8 / 3, -2 / 3), "stop"),
        Completion((9,), (-3.0,), "length"),
    ]
    (body,) = fake.bodies(vllm_process.GENERATE)
    assert body["token_ids"] == [5, 6] and body.keys() == {"token_ids", "sampling_params"}
    assert body["sampling_params"] == {
        **{"n": 2, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 9, "seed": 7, "stop": None},
        **{"stop_token_ids": [1, 2], "include_stop_str_in_output": True, "ignore_eos": True, "detokenize": False},
        **{"skip_special_tokens": False, "logprobs": 0, "flat_logprobs": True},
    }


def test_another_process_joins_by_a_session_that_does_not_contain_the_key(fake: Any, client: ServerClient) -> None:
    fake.samples(([7, 2], "stop"))
    session = client.session()
    assert session.key == KEY and KEY not in repr(session) and fake.session in repr(session)
    other = loop.run(client_of(fake, key="").join(session))
    assert loop.run(other.complete(Request(0, (5,), 1, 0, 9, logprobs=False), SAMPLED)) == [
        Completion((7, 2), None, "stop")
    ]
    other.close()


def test_greedy_samples_are_generated_once(fake: Any, client: ServerClient) -> None:
    fake.samples(([7, 2], "stop"))
    found = loop.run(client.complete(REQUEST, SAMPLED.model_copy(update={"temperature": 0.0, "stop": ["x"]})))
    assert len(found) == 2 and found[0] == found[1]
    (body,) = fake.bodies(vllm_process.GENERATE)
    assert body["sampling_params"]["n"] == 1 and body["sampling_params"]["stop"] == ["x"]
    assert body["sampling_params"]["detokenize"] is True, "a stop string is looked for in text"


def test_probe_requests_prompt_log_probs(fake: Any, client: ServerClient) -> None:
    fake.answers[vllm_process.GENERATE] = lambda _: (200, {"prompt_logprobs": [-0.25, -1 / 3]})
    assert loop.run(client.score((4, 6, 5))) == [-0.25, -1 / 3]


def test_pause_returns_requests_that_arrive_while_paused(fake: Any, client: ServerClient) -> None:
    """vLLM queues requests that arrive while it is paused; only the next pause returns them."""
    pauses, first = threading.Semaphore(0), threading.Event()

    def generate(_: Any) -> tuple[int, Any]:
        first.set()
        assert pauses.acquire(timeout=10) and pauses.acquire(timeout=10)
        return 200, {"choices": [{"finish_reason": "abort", "token_ids": [7], "logprobs": [0]}]}

    def pause(_: Any) -> tuple[int, Any]:
        pauses.release()
        return 200, {}

    fake.answers |= {vllm_process.GENERATE: generate, "/pause?mode=abort": pause}
    future = loop.submit(client.complete(REQUEST, SAMPLED))
    assert first.wait(10)
    loop.run(client.pause())
    assert future.done() and {c.finish for c in future.result()} == {"paused"}
    assert len(fake.bodies("/pause?mode=abort")) >= 2


def test_adapters_are_named_in_requests(fake: Any, client: ServerClient, tmp_path: Path) -> None:
    fake.samples(([7, 2], "stop"))
    for version in (0, 1):
        loop.run(client.load_adapters({"default": tmp_path}, version))
        loop.run(client.complete(REQUEST, SAMPLED))
    assert [body["adapter"] for body in fake.bodies(vllm_process.GENERATE)] == ["version-0", "version-1"]
    assert fake.bodies("/v1/unload_lora_adapter") == [{"lora_name": "version-0"}]
    assert [body["lora_path"] for body in fake.bodies("/v1/load_lora_adapter")] == [str(tmp_path)] * 2
    assert len(fake.bodies("/reset_prefix_cache")) == 2


def test_folder_not_visible_to_the_server_raises(fake: Any, client: ServerClient, tmp_path: Path) -> None:
    fake.answers["/v1/load_lora_adapter"] = lambda _: (404, {"error": {"message": "no adapter found"}})
    with pytest.raises(EngineError, match="status 404: no adapter found"):
        loop.run(client.load_adapters({"default": tmp_path}, 0))
    client.about["boot_id"] = "another machine"
    with pytest.raises(EngineError, match=r"this machine's disk(.|\n)*merge_adapter: true"):
        loop.run(client.load_adapters({"default": tmp_path}, 0))


def test_weight_updates_are_announced_in_vllms_format(fake: Any, client: ServerClient) -> None:
    for call in (
        client.transfer("init_weight_transfer_engine", {"a": 1}),
        client.transfer("start_weight_update"),
        client.transfer("update_weights", {"file": "/x"}),
        client.transfer("finish_weight_update"),
        client.resume(),
    ):
        loop.run(call)
    assert [entry for entry in fake.asked if entry[0] != vllm_process.ABOUT] == [
        ("/init_weight_transfer_engine", {"init_info": {"a": 1}}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"file": "/x"}}),
        ("/finish_weight_update", {}),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((500, {"error": {"message": "CUDA out of memory", "code": 500}}), "status 500: CUDA out of memory"),
        ((400, {"error": "no such token"}), "status 400: no such token"),
        ((503, b"<html>proxy</html>"), "status 503: <html>proxy"),
        ((410, {"error": "no such session"}), r"was restarted(.|\n)*--resume"),
        ((200, {"choices": [{"finish_reason": "error", "token_ids": [], "logprobs": None}]}), "finish reason error"),
        ((200, b"[1]"), "cannot be read"),
        ((200, {"choices": [{"finish_reason": "stop", "token_ids": [1, 2]}]}), "cannot be read"),
    ],
)
def test_invalid_answers_raise_with_one_sentence(
    fake: Any, client: ServerClient, answer: tuple[int, Any], told: str
) -> None:
    fake.answers[vllm_process.GENERATE] = lambda _: answer
    with pytest.raises(EngineError, match=told) as error:
        loop.run(client.complete(REQUEST, SAMPLED))
    assert error.value.problems[0].where == fake.url


@pytest.mark.parametrize("healthy", [True, False])
def test_only_unhealthy_servers_are_lost(fake: Any, client: ServerClient, healthy: bool) -> None:
    """A server that fails at a request for samples but passes its health check stays. It is lost if it fails that too,
    or fails at the probe; each later request raises a new error whose traceback does not grow."""
    fake.answers[vllm_process.GENERATE] = lambda _: (500, {"error": "too long"})
    fake.answers["/health"] = lambda _: (200 if healthy else 503, {})
    with pytest.raises(RequestFailed if healthy else ServerLost, match="status 500: too long"):
        loop.run(client.complete(REQUEST, SAMPLED))
    assert (client.lost is None) == healthy
    with pytest.raises(ServerLost, match="status 500: too long"):
        loop.run(client.score((4, 6, 5)))
    raised = []
    for _ in range(2):
        with pytest.raises(ServerLost, match="status 500: too long") as error:
            loop.run(client.resume())
        raised.append(error.value)
    assert raised[0] is not raised[1] and client.lost is not None and client.lost.__traceback__ is None


def test_fewer_log_probs_than_tokens_raises(fake: Any, client: ServerClient) -> None:
    choice = {"finish_reason": "stop", "token_ids": [1, 2], "logprobs": [-1.0]}
    fake.answers[vllm_process.GENERATE] = lambda _: (200, {"choices": [choice]})
    with pytest.raises(EngineError, match="1 log-probs for 2 tokens"):
        loop.run(client.complete(REQUEST, SAMPLED))


def test_wrong_key_raises(fake: Any) -> None:
    one = client_of(fake, "guessed")
    with pytest.raises(EngineError, match=rf"asks for its key(.|\n)*{server_key.TOKEN_VARIABLE}"):
        loop.run(one.open(WANTED))
    one.close()
    assert not fake.asked


@pytest.mark.parametrize("typed", [[], ["rl", "a\nb \u00e9", "x" * 999]])
def test_any_command_line_is_a_valid_run_name(fake: Any, monkeypatch: pytest.MonkeyPatch, typed: list[str]) -> None:
    """An HTTP header allows no line ends, no accents, and no blank at its end."""
    monkeypatch.setattr(server_client.sys, "argv", ["posttrain", *typed])
    one = client_of(fake)
    loop.run(one.open(WANTED))
    one.close()
    shown = f"{socket.gethostname()}, process {os.getpid()}," + (" rl a b " + "x" * 999 if typed else "")
    assert fake.who == shown[: vllm_process.MAX_WHO]


def test_server_used_by_another_run_raises(fake: Any) -> None:
    one = client_of(fake)
    fake.answers[vllm_process.SESSION] = lambda _: (409, {"error": "taken", "works_for": "node1, process 77"})
    with pytest.raises(EngineError, match=r"works for another run \(node1, process 77\)"):
        loop.run(one.open(WANTED))
    one.close()


def test_closed_port_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    one = ServerClient(f"http://127.0.0.1:{port}", KEY, timeout_s=5, eos_ids=())
    with pytest.raises(
        EngineError, match=rf"127.0.0.1:{port}  no server can be reached(.|\n)*serve RECIPE --port {port}"
    ):
        loop.run(one.open(WANTED))
    one.close()


def test_non_http_program_on_the_port_raises() -> None:
    """The program sends first, and not HTTP."""

    def answer() -> None:
        while True:
            try:
                connection, _ = other.accept()
            except OSError:
                return
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=answer, daemon=True).start()
        one = ServerClient(f"http://127.0.0.1:{other.getsockname()[1]}", KEY, timeout_s=5, eos_ids=())
        with pytest.raises(EngineError, match="no server can be reached there"):
            loop.run(one.open(WANTED))
        one.close()


def test_other_web_server_on_the_port_raises(fake: Any) -> None:
    fake.answers[vllm_process.ABOUT] = lambda _: (200, {"hello": "world"})
    one = client_of(fake)
    with pytest.raises(EngineError, match="the server at this address is no `posttrain serve`"):
        loop.run(one.open(WANTED))
    one.close()


def test_idle_connections_are_closed_by_the_client_first(client: ServerClient) -> None:
    """A request on a connection that the server is just closing ends without an answer, like a dead server."""
    assert client._http._transport._pool._keepalive_expiry == server_client.KEEPALIVE_S
    idle_s = int(local_server._SERVER_VARIABLES["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"])
    assert idle_s > 100 * server_client.KEEPALIVE_S


def test_more_requests_than_open_files_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, 5000]
    monkeypatch.setattr(server_client.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(server_client.resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0]))
    server_client.allow_many_files()
    assert limits == [5000, 5000]
    limits[:] = [1 << 20, 1 << 20]
    server_client.allow_many_files()
    assert limits[0] == 1 << 20, "a limit that is high enough stays"


def test_server_without_any_answer_for_timeout_s_ends_the_run(fake: Any) -> None:
    """The timeout counts from the server's last answer to any request, not from the start of the hanging request."""
    free = threading.Event()
    fake.answers[vllm_process.GENERATE] = lambda _: (free.wait(20), (200, {}))[1]
    one = client_of(fake, timeout_s=2)
    loop.run(one.open(WANTED))
    future = loop.submit(one.complete(REQUEST, SAMPLED))
    began = time.monotonic()
    for _ in range(5):
        time.sleep(0.5)
        loop.run(one.resume())  # it answers other requests
    assert not future.done()
    with pytest.raises(EngineError, match=r"did not answer anything for 2 s(.|\n)*server.timeout_s"):
        future.result(10)
    assert 4 < time.monotonic() - began < 15
    free.set()
    one.close()


def test_server_exit_during_a_request_raises_with_its_last_output(fake: Any) -> None:
    """The session's connection ends: waiting requests raise immediately, with the last lines of the process's log."""
    free = threading.Event()
    fake.answers[vllm_process.GENERATE] = lambda _: (free.wait(20), (200, {}))[1]
    one = client_of(fake)
    loop.run(one.open(WANTED))
    died = EngineError("vLLM on GPU 1 was killed by SIGKILL", hint=vllm_start.RESUME)
    one.process = SimpleNamespace(exit_error=lambda _: died, close=lambda: None)  # type: ignore[assignment]
    future = loop.submit(one.complete(REQUEST, SAMPLED))
    while not fake.bodies(vllm_process.GENERATE):
        time.sleep(0.01)
    began = time.monotonic()
    fake.over.set()
    with pytest.raises(EngineError, match=r"vLLM on GPU 1 was killed by SIGKILL\n  hint: go on(.|\n)*--resume"):
        future.result(10)
    assert time.monotonic() - began < 5
    died = EngineError("vLLM on GPU 1 failed: CUDA out of memory", where="log", hint="lower gpu_memory")
    assert "hint: lower gpu_memory; go on with" in str(one._connection_error())
    with pytest.raises(EngineError, match="SIGKILL"):
        loop.run(one.pause())
    free.set()
    one.close()
    one.close()  # twice is fine
    with pytest.raises(EngineError, match="has left the server"):
        loop.run(one.resume())


def test_cancelled_request_is_not_awaited(fake: Any, client: ServerClient) -> None:
    free = threading.Event()
    fake.answers[vllm_process.GENERATE] = lambda _: (free.wait(20), (200, {}))[1]
    future = loop.submit(client.complete(REQUEST, SAMPLED))
    while not fake.bodies(vllm_process.GENERATE):
        time.sleep(0.01)
    future.cancel()
    began = time.monotonic()
    loop.run(client.pause())  # would wait for the request, and pause once more
    assert time.monotonic() - began < 10 and not free.is_set()
    assert future.cancelled() and not client.is_busy and len(fake.bodies("/pause?mode=abort")) == 1
    free.set()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"vllm": "0.23.0"}, "vllm 0.23.0, and this run needs 0.32.0"),
        ({"max_model_len": 32}, "max_model_len 32, and this run needs 64"),
        ({"model": {"hidden_size": 128}}, "hidden_size 128, and this run's has 64"),
        ({"dtype": "bfloat16"}, "dtype bfloat16, and this run needs float32"),
    ],
)
def test_server_with_other_settings_raises(fake: Any, change: dict[str, Any], told: str) -> None:
    fake.answers[vllm_process.ABOUT] = lambda _: (200, {**ABOUT, **change})
    one = client_of(fake)
    with pytest.raises(RecipeError, match=rf"{told}(.|\n)*posttrain serve RECIPE"):
        loop.run(one.open(WANTED))
    one.close()


def test_irrelevant_settings_may_differ() -> None:
    config = {"transformers_version": "5.1", "use_cache": True, "pad_token_id": 0, "num_attention_heads": 4}
    wanted = {**WANTED, "model": config, "max_model_len": 10}
    check_matches({**ABOUT, "model": {**config, "transformers_version": "5.9", "pad_token_id": 3}}, wanted, "a server")
    nested = {"text_config": {"num_experts": 8}}
    with pytest.raises(RecipeError, match="num_experts 8, and this run's has 4"):
        check_matches({**ABOUT, "model": nested}, {**wanted, "model": {"text_config": {"num_experts": 4}}}, "a server")


def test_missing_http_library_raises_with_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Exception, match="httpx2"):
        server_client.http_library()
