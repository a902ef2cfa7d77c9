"""Stand-ins for `vllm serve`: an HTTP server whose answers a test defines, and one that samples from a transformers
model.

The second is also a program that takes the arguments which a run passes to `vllm serve`; `serve_idle` only identifies
itself, and starts in a tenth of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from posttrain.rollout import engine_process, vllm_process

GENERATE = vllm_process.GENERATE


class StandIn:
    """Answers like a vLLM server behind our middleware. `answers`: path -> (status, body) of a call; `asked`: calls.

    Its session lasts until `over` is set.
    """

    def __init__(self, key: str, listener: socket.socket) -> None:
        self.session = f"s{listener.getsockname()[1]}" if listener.family == socket.AF_INET else "s1"
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, Callable[[Any], tuple[int, Any]]] = {}
        self.over = threading.Event()
        self.left: Callable[[], object] = lambda: None  # called when the session has ended
        self.who: str | None = None  # holds the session
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = listener.family == socket.AF_INET

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Authorization") != f"Bearer {key}":
                    self.answer(401, {"error": "the key is missing or wrong"})
                elif self.path == vllm_process.SESSION and self.path not in stand_in.answers:
                    self.hold()
                else:
                    values = json.loads(body) if body else None
                    stand_in.asked.append((self.path, values))
                    outside = (vllm_process.ABOUT, vllm_process.SESSION)
                    assert self.path in outside or self.headers[vllm_process.SESSION_HEADER] == stand_in.session
                    self.answer(*stand_in.answers.get(self.path, lambda _: (200, {}))(values))

            def hold(self) -> None:
                stand_in.who = self.headers["x-posttrain-who"]
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                line = json.dumps({"session": stand_in.session}) + "\n"
                self.wfile.write(f"{len(line):x}\r\n{line}\r\n".encode())
                self.wfile.flush()
                self.connection.settimeout(0.05)
                while not stand_in.over.is_set():
                    try:
                        if not self.connection.recv(1):
                            break
                    except TimeoutError:
                        continue
                self.close_connection = True
                stand_in.left()

            def answer(self, status: int, values: Any) -> None:
                body = values if isinstance(values, bytes) else json.dumps(values).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
        self.http.socket.close()
        self.http.socket, self.http.daemon_threads = listener, True
        self.http.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that went away
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}" if listener.family == socket.AF_INET else ""

    def serve(self) -> None:
        """Serve until `close`."""
        self.http.serve_forever(poll_interval=0.02)

    def close(self) -> None:
        self.over.set()
        self.http.shutdown()
        self.http.server_close()

    def samples(self, *found: tuple[list[int], str]) -> None:
        """Answer requests with these (ids, finish reason)."""
        choices = [{"finish_reason": why, "token_ids": ids, "logprobs": [-i / 3 for i in ids]} for ids, why in found]
        self.answers[GENERATE] = lambda _: (200, {"choices": choices})

    def bodies(self, path: str) -> list[Any]:
        """Return the bodies sent to this path, call by call."""
        return [body for asked, body in self.asked if asked == path]


@contextlib.contextmanager
def open_listener(arguments: list[str]) -> Iterator[tuple[socket.socket, argparse.Namespace]]:
    """Return the socket named by the arguments of `vllm serve`, and the arguments."""
    parser = argparse.ArgumentParser()
    for name in ("command", "model", "--uds", "--host", "--port", "--dtype", "--max-model-len"):
        parser.add_argument(name)
    parser.add_argument("--enable-lora", action="store_true")
    given, _ = parser.parse_known_args(arguments)
    here = socket.AF_UNIX if given.uds else socket.AF_INET
    with socket.create_server(given.uds or (given.host, int(given.port)), family=here) as listener:
        yield listener, given


def serve_idle(arguments: list[str]) -> None:
    """Run `vllm serve` without a model, until its run has ended."""
    with open_listener(arguments) as (listener, given):
        one = StandIn(os.environ[vllm_process.KEY_VARIABLE], listener)
        about = {"boot_id": vllm_process.boot_id(), "workers": 1, "model": {}, "pid": os.getpid(), "vllm": "0"}
        one.answers[vllm_process.ABOUT] = lambda _: (200, {**about, "max_model_len": int(given.max_model_len)})
        one.left = lambda: os._exit(0)
        one.serve()


def serve_transformers(arguments: list[str]) -> None:
    """Run a minimal `vllm serve`, until its run has ended."""
    with open_listener(arguments) as (listener, given):
        key, window = os.environ[vllm_process.KEY_VARIABLE], int(given.max_model_len)
        one = transformers_server(listener, key, Path(given.model), given.dtype, window, lora=given.enable_lora)
        one.left = lambda: os._exit(0)
        one.serve()


def transformers_server(
    listener: socket.socket, key: str, folder: Path, dtype: str, window: int, *, lora: bool = False
) -> StandIn:
    """Server with weights by files in memory or adapters, which samples as `engine_clients` does."""
    import torch
    from engine_clients import TransformersClient

    from posttrain.recipe.engine_sections import Vllm
    from posttrain.recipe.sampling_sections import Sampling
    from posttrain.rollout import loop
    from posttrain.rollout.requests import Request
    from posttrain.rollout.vllm_start import EngineSpec

    rank, torch_dtype = 4 if lora else None, getattr(torch, dtype)
    client = TransformersClient(EngineSpec(Vllm(), torch_dtype, window, rank, ()), folder)

    def generate(body: Any) -> tuple[int, Any]:
        values = body["sampling_params"]
        if "prompt_logprobs" in values:
            return 200, {"prompt_logprobs": loop.run(client.score(body["token_ids"]))}
        client.spec = EngineSpec(Vllm(), torch_dtype, window, rank, tuple(values["stop_token_ids"] or ()))
        asked = Request(
            0,
            tuple(body["token_ids"]),
            values["n"],
            values["seed"],
            values["max_tokens"],
            values["logprobs"] is not None,
        )
        sampling = Sampling(temperature=values["temperature"], max_new_tokens=values["max_tokens"])
        found = loop.run(client.complete(asked, sampling))
        return 200, {
            "choices": [
                {
                    "finish_reason": "abort" if sample.finish == "paused" else sample.finish,
                    "token_ids": sample.ids,
                    "logprobs": sample.logps,
                }
                for sample in found
            ]
        }

    def calling(work: Callable[[Any], Any]) -> Callable[[Any], tuple[int, Any]]:
        return lambda body: (loop.run(work(body)), (200, {}))[1]

    one = StandIn(key, listener)
    model = json.loads(client.model.config.to_json_string(use_diff=False))
    about = {"boot_id": vllm_process.boot_id(), "workers": 1, "device": "cpu", "dtype": dtype, "model": model}
    about |= {"max_model_len": window, "logprobs_mode": "processed_logprobs"}
    about |= {"lora_rank": 8 if rank else None, "pid": os.getpid(), "vllm": "0"}
    one.answers = {
        vllm_process.ABOUT: lambda _: (200, about),
        GENERATE: generate,
        "/pause?mode=abort": calling(lambda _: client.pause()),
        "/resume": calling(lambda _: client.resume()),
        "/start_weight_update": calling(lambda _: client.transfer("start_weight_update")),
        "/update_weights": calling(lambda body: client.transfer("update_weights", body["update_info"])),
        "/finish_weight_update": calling(lambda _: client.transfer("finish_weight_update")),
        "/v1/load_lora_adapter": calling(lambda body: client.load_adapters({"default": Path(body["lora_path"])}, 0)),
    }
    return one


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    engine_process.end_with(int(sys.argv[1]), vllm_process.end_group)
    serve_transformers(sys.argv[2:])
