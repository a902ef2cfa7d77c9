"""A `vllm serve` process started by us, without vLLM: access control, arguments, and when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image as Pillow

from posttrain.errors import RecipeError
from posttrain.images import png_url
from posttrain.recipe.engine_sections import Vllm
from posttrain.rollout import local_server, vllm_process, vllm_start
from posttrain.rollout.local_server import LocalServer, options
from posttrain.rollout.vllm_process import ABOUT, ALLOWED_PATHS, SESSION, SESSION_HEADER, Guard

KEY = "key-of-the-test"


@pytest.fixture
def exit_signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records attempts to end the process; the process is never really ended."""
    ends: list[int] = []
    monkeypatch.setattr(vllm_process, "end_group", lambda: ends.append(1))
    monkeypatch.setenv(vllm_process.KEY_VARIABLE, KEY)
    return ends


async def application(scope: Any, receive: Any, send: Any) -> None:
    """The application that the middleware wraps."""
    del scope, receive
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"vllm"})


async def ask(guard: Guard, path: str, key: str | None = KEY, disconnect: Any = None, **headers: str) -> Any:
    """Return (status, body) of a request whose connection ends with the event `disconnect`."""
    sent: list[Any] = []
    given = {"authorization": f"Bearer {key}"} if key is not None else {}
    named = [(n.replace("_", "-").encode(), v.encode()) for n, v in {**given, **headers}.items()]

    async def receive() -> Any:
        await (disconnect.wait() if disconnect else asyncio.sleep(30))
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = SimpleNamespace(state=None)
    await guard({"type": "http", "path": path, "headers": named, "app": app}, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], body


@pytest.mark.parametrize("key", [None, "", "guessed", KEY[:-1], KEY + "x", "\xe9"])
@pytest.mark.parametrize("path", ["/health", ABOUT, SESSION, "/update_weights", "/collective_rpc", "/v1/models"])
def test_requests_without_the_key_are_refused(exit_signals: list[int], path: str, key: str | None) -> None:
    """vLLM itself requires the key on some paths only."""
    guard = Guard(application)
    assert asyncio.run(ask(guard, path, key))[0] == 401
    assert not guard.session and not exit_signals


def test_one_run_at_a_time_uses_the_server(exit_signals: list[int]) -> None:
    """A run holds the server while its session's connection is open; the process ends with it."""

    async def both() -> None:
        guard, disconnected = Guard(application), asyncio.Event()
        for path in ALLOWED_PATHS:
            assert (await ask(guard, path))[0] == 410, "before any session"
        holding = asyncio.create_task(ask(guard, SESSION, disconnect=disconnected, x_posttrain_who="node1" + "x" * 500))
        while not guard.session:
            await asyncio.sleep(0)
        for path in ALLOWED_PATHS - {vllm_process.GENERATE}:  # which is answered here, not by vLLM
            assert await ask(guard, path, **{SESSION_HEADER: guard.session}) == (200, b"vllm")
            assert (await ask(guard, path, **{SESSION_HEADER: "another"}))[0] == 410
        for path in ("/collective_rpc", "/server_info", "/sleep", "/docs", "/v1/completions", "/adapters"):
            assert (await ask(guard, path, **{SESSION_HEADER: guard.session}))[0] == 404, "no run needs it"
        status, body = await ask(guard, SESSION)
        assert status == 409 and json.loads(body)["works_for"] == ("node1" + "x" * 500)[: vllm_process.MAX_WHO]
        assert not exit_signals
        disconnected.set()
        status, body = await holding
        assert status == 200 and json.loads(body.splitlines()[0]) == {"session": guard.session}
        assert exit_signals == [1]

    asyncio.run(both())


def test_session_sends_heartbeats(exit_signals: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line now and then, so that the connection of a dead machine breaks."""
    monkeypatch.setattr(vllm_process, "HEARTBEAT_S", 0.01)

    async def some() -> Any:
        disconnected = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, disconnected.set)
        return await ask(Guard(application), SESSION, disconnect=disconnected)

    assert len(asyncio.run(some())[1].splitlines()) > 2 and exit_signals == [1]


@pytest.fixture
def _vllm_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's classes that a request for samples needs, where vLLM is not installed."""
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace, sampling_params=kinds))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)


def generate(work: Callable[..., Any], body: Any, connection: list[Any], adapters: Any = None) -> tuple[int, Any]:
    """Return the answer to a request. work: AsyncLLM's `generate`. connection: messages after the request's body, one
    of which may be an event to wait for; then nothing comes."""

    async def answer() -> tuple[int, Any]:
        sent = json.dumps(body).encode()
        messages = [
            {"type": "http.request", "body": sent[:10], "more_body": True},
            {"type": "http.request", "body": sent[10:]},
            *connection,
        ]

        async def receive() -> Any:
            if not messages:
                await asyncio.sleep(30)
            return messages.pop(0)

        engine = SimpleNamespace(generate=work)
        state = SimpleNamespace(
            engine_client=engine, openai_serving_models=SimpleNamespace(lora_requests=adapters or {})
        )
        return await vllm_process.answer_generate(state, receive)

    return asyncio.run(answer())


@pytest.mark.usefixtures("_vllm_types")
def test_samples_are_answered_in_plain_lists() -> None:
    """Tokens, log-probs and end of each sample; a bias has numbers as token ids; the adapter is vLLM's object."""
    asked: list[Any] = []

    async def work(prompt: Any, params: Any, _: str, lora_request: Any) -> Any:
        asked.append((prompt, vars(params), lora_request))
        flat = SimpleNamespace(logprobs=[-0.25, -9.0, -1 / 3], start_indices=[0, 2])
        ended = SimpleNamespace(token_ids=(7, 2), logprobs=flat, finish_reason="stop")
        short = SimpleNamespace(token_ids=(9,), logprobs=None, finish_reason="length")
        yield SimpleNamespace(outputs=[ended, short], prompt_logprobs=None)

    body = {"token_ids": [5, 6], "sampling_params": {"n": 2, "logit_bias": {"4": -100.0}}, "adapter": "version-1"}
    status, found = generate(work, body, [], {"version-1": "an adapter"})
    assert (status, found) == (
        200,
        {
            "choices": [
                {"token_ids": [7, 2], "logprobs": [-0.25, -1 / 3], "finish_reason": "stop"},
                {"token_ids": [9], "logprobs": None, "finish_reason": "length"},
            ],
            "prompt_logprobs": None,
        },
    )
    ((prompt, params, adapter),) = asked
    assert prompt == {"type": "token", "prompt_token_ids": [5, 6]} and adapter == "an adapter"
    assert params == {"n": 2, "logit_bias": {4: -100.0}, "output_kind": "final"}


@pytest.mark.usefixtures("_vllm_types")
def test_images_arrive_as_the_client_sent_them() -> None:
    picture, asked = Pillow.new("RGB", (30, 20), (30, 90, 200)), list[Any]()

    async def work(prompt: Any, *_: Any, **__: Any) -> Any:
        asked.append(prompt)
        yield SimpleNamespace(outputs=[], prompt_logprobs=None)

    body = {"token_ids": [5, 6], "sampling_params": {}, "images": [png_url(picture)]}
    assert generate(work, body, [])[0] == 200
    (shown,) = asked[0]["multi_modal_data"]["image"]
    assert asked[0]["prompt_token_ids"] == [5, 6] and shown.size == (30, 20) and shown.tobytes() == picture.tobytes()


@pytest.mark.usefixtures("_vllm_types")
def test_prompt_log_probs_are_those_of_the_prompts_tokens() -> None:
    async def work(*_: Any, lora_request: Any) -> Any:
        assert lora_request is None
        entry = [None, {6: SimpleNamespace(logprob=-0.5), 3: SimpleNamespace(logprob=-0.1)}]
        yield SimpleNamespace(outputs=[], prompt_logprobs=entry)

    status, found = generate(work, {"token_ids": [5, 6], "sampling_params": {}}, [])
    assert status == 200 and found == {"choices": [], "prompt_logprobs": [-0.5]}


@pytest.mark.usefixtures("_vllm_types")
@pytest.mark.parametrize(
    ("error", "adapter", "status", "said"),
    [
        (ValueError("out of the vocabulary"), None, 400, "out of the vocabulary"),
        (RuntimeError("CUDA error"), None, 500, "RuntimeError: CUDA error"),
        (None, "version-9", 400, "the server has no adapter version-9"),
    ],
)
def test_failed_request_is_answered_with_its_error(
    error: Exception | None, adapter: str | None, status: int, said: str
) -> None:
    """400 for the request's own fault, 500 for vLLM's: after the latter the client asks whether the server is well."""

    async def work(*_: Any, **__: Any) -> Any:
        if error is not None:
            raise error
        yield

    body = {"token_ids": [5], "sampling_params": {}} | ({"adapter": adapter} if adapter else {})
    assert generate(work, body, []) == (status, {"error": said})


@pytest.mark.usefixtures("_vllm_types")
def test_request_of_a_closed_connection_is_aborted() -> None:
    aborted: list[bool] = []

    async def work(*_: Any, **__: Any) -> Any:
        try:
            await asyncio.sleep(30)
            yield
        except asyncio.CancelledError:
            aborted.append(True)
            raise

    status, _ = generate(work, {"token_ids": [5], "sampling_params": {}}, [{"type": "http.disconnect"}])
    assert status == 499 and aborted == [True]


@pytest.mark.parametrize(
    ("messages", "status", "said"),
    [
        ([{"type": "http.request", "body": b'{"token'}, {"type": "http.disconnect"}], 400, "the body is not JSON: "),
        ([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}], 499, ""),
    ],
)
def test_incomplete_request_does_not_reach_vllm(messages: list[Any], status: int, said: str) -> None:
    """A body that is not JSON, and a connection that closes before the whole body has arrived."""

    async def receive() -> Any:
        return messages.pop(0)

    found, answer = asyncio.run(vllm_process.answer_generate(None, receive))
    assert (found, answer.get("error", "").startswith(said)) == (status, True)


def test_arguments_become_command_line_options() -> None:
    given = {"max_model_len": 64, "model": "/a b", "enforce_eager": True, "enable_sleep_mode": False, "sizes": [1, 2]}
    assert options({**given, "weight_transfer_config": {"backend": "x"}}) == [
        *("/a b", "--max-model-len", "64", "--enforce-eager", "--no-enable-sleep-mode"),
        *("--sizes", "1", "2"),
        *("--weight-transfer-config", '{"backend": "x"}'),
    ]


@pytest.fixture
def start_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LocalServer]:
    """Return a function that starts a LocalServer whose process runs `program` instead of vLLM; running servers are
    ended after the test."""
    made: list[LocalServer] = []

    def start(program: str, devices: tuple[str, ...] = ()) -> LocalServer:
        monkeypatch.setattr(local_server, "_ENTRY", "import sys; sys.path.insert(0, {root!r}); " + program)
        log = tmp_path / "logs" / "log"
        made.append(LocalServer.start(Vllm(), {"model": "m"}, KEY, devices=devices, log=log))
        return made[-1]

    yield start  # type: ignore[misc]
    for server in made:
        server.close()


def read_log(server: LocalServer, lines: int = 1) -> list[str]:
    """Return the first lines of the server's log, waiting for them."""
    assert server.log is not None
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = server.log.read_text().splitlines()
        if len(found) >= lines:
            return found
        time.sleep(0.02)
    raise AssertionError("it says nothing")


def test_process_gets_key_and_gpus_by_the_environment(
    start_server: Callable[..., LocalServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is passed by the environment, never on the command line; only its GPUs are visible; variables of a
    training rank are removed."""
    monkeypatch.setenv("RANK", "1")
    names = ("VLLM_API_KEY", "CUDA_VISIBLE_DEVICES", "RANK", "VLLM_SERVER_DEV_MODE", "VLLM_RPC_BASE_PATH")
    program = f"import os, json; print(json.dumps([sys.argv[1:], [os.environ.get(n) for n in {names}]]), flush=True)"
    server = start_server(program, ("6", "7"))
    arguments, environment = json.loads(read_log(server)[0])
    assert arguments == ["serve", "m", "--uds", str(server.uds)] and KEY not in " ".join(server.process.args)  # type: ignore[arg-type]
    assert environment == [KEY, "6,7", None, "1", str(server.home.path)] and server.place == "GPU 6 and 7"
    assert server.uds is not None and server.uds.parent.stat().st_mode & 0o777 == 0o700, "no other user's"
    server.close()
    assert not server.uds.parent.exists()


def test_exit_error_has_vllms_error_or_the_last_log_lines(start_server: Callable[..., LocalServer]) -> None:
    """The message has the path of the log, and what to change in the recipe."""
    server = start_server("print(*'abcdefg', sep='\\n', flush=True); sys.exit(3)")
    told = f"vLLM on the CPU ended with code 3; the last lines of {server.log}:\n    e\n    f\n    g"
    assert f"{server.log}  {told}\n  hint: " in str(server.exit_error(30))
    reason = start_server("print('ValueError: No available memory for the cache blocks.', flush=True); sys.exit(1)")
    told = f"{reason.log}  vLLM on the CPU failed: ValueError: No available memory for the cache blocks.\n  hint: "
    assert str(reason.exit_error(30)) == told + vllm_start.memory_hint(Vllm())
    killed = start_server("import time; time.sleep(99)")
    assert killed.exit_error() is None
    killed.process.kill()
    assert "vLLM on the CPU was killed by SIGKILL" in str(killed.exit_error(30))


CHILD = "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); print(c.pid, flush=True); "


@pytest.mark.parametrize("way", ["closed", "deaf", "killed"])
def test_children_of_a_process_end_with_it(
    start_server: Callable[..., LocalServer], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Also a child that ignores SIGTERM, and if the process itself was killed."""
    monkeypatch.setattr(local_server, "GRACE_S", 0.3)
    monkeypatch.setattr(local_server, "GROUP_EXIT_S", 0.3)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if way == "deaf" else ""
    server = start_server(f"import subprocess, time; {deaf}{CHILD}time.sleep(99)")
    child = int(read_log(server)[0])
    if way == "killed":
        server.process.kill()
    server.close()
    assert server.process.returncode is not None and wait_until_ended(child)
    server.close()  # twice is fine


def test_shared_memory_is_removed_with_the_process(start_server: Callable[..., LocalServer]) -> None:
    """vLLM leaves it behind on a CPU with tensor parallelism; memory of other processes is kept."""
    names = [f"{name}-{os.getpid()}-{time.monotonic_ns()}" for name in ("vllm_dist", "other")]
    program = f"""import mmap, os, time
for name in {names}:
    with open("/dev/shm/" + name, "wb+") as file:
        file.truncate(4096)
        globals()[name] = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
time.sleep(99)
"""
    server = start_server(f"exec({program!r})")
    ours, other = (Path("/dev/shm", name) for name in names)
    try:
        assert read_log(server) == ["mapped"] and ours.exists()
        server.close()
        assert not ours.exists() and other.exists()
    finally:
        other.unlink()


def test_server_ends_with_a_killed_run(tmp_path: Path) -> None:
    """After kill -9 of the run, its server ends with its children."""
    entry = (
        "import subprocess, time; from posttrain.rollout import vllm_process as v; v.end_with({parent}, v.end_group); "
    )
    program = f"""
import os, time
from pathlib import Path
from posttrain.recipe.engine_sections import Vllm
from posttrain.rollout import local_server
local_server._ENTRY = {"import sys; sys.path.insert(0, {root!r}); " + entry + CHILD + "time.sleep(99)"!r}
log = Path({str(tmp_path / "log")!r})
server = local_server.LocalServer.start(Vllm(), {{"model": "m"}}, "key", log=log)
while not log.read_text():
    time.sleep(0.02)
print(server.process.pid, log.read_text(), flush=True)
os.kill(os.getpid(), 9)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == -signal.SIGKILL, run.stderr
    server, child = map(int, run.stdout.split())
    assert wait_until_ended(server) and wait_until_ended(child)


def wait_until_ended(pid: int) -> bool:
    """Return whether the process ends within 20 seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_training_gpu_is_refused_for_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7")
    assert [local_server.visible_device(n, "--devices") for n in (1, 2)] == ["5", "GPU-7"]
    assert local_server.check_not_training(1) == 1
    with pytest.raises(RecipeError, match=r"GPU 0 trains(.|\n)*from 1 on"):
        local_server.check_not_training(0)
    with pytest.raises(RecipeError, match="--devices: there is no GPU 3: CUDA_VISIBLE_DEVICES lists 3"):
        local_server.visible_device(3, "--devices")


def test_group_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """`end_group` in a process that ignores SIGTERM: its group ends after the grace period."""
    program = (
        "import os, signal, time; from posttrain.rollout import vllm_process as v; v.GRACE_S = 0.2; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); v.end_group(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, cwd=tmp_path, env=os.environ)
    assert process.wait(30) == -signal.SIGKILL
