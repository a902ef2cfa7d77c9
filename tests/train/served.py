"""Trains on servers shared by all ranks, in child processes. See test_served_ranks.py and forked.py.

A job is one of ranked.py with {"servers", "spare", "dies_at"}: the servers present from the start (stand-ins that
sample as transformers does), the number of servers that join when one dies, and the request in which the first server
kills itself. The answer is the exit statuses of the ranks, and the seeds requested from each server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import ranked
import serving
import torch

from posttrain.recipe.load import load_dict
from posttrain.rollout import served_engine
from posttrain.rollout.server_key import TOKEN_VARIABLE
from posttrain.rollout.serving import write_served_model

KEY = "the key of this test"


def answer(job: dict[str, Any]) -> dict[str, Any]:
    home = Path(job["output"]).with_name("servers")
    home.mkdir(exist_ok=True)
    addresses = home / "addresses.txt"
    whole = {key: value for key, value in job["recipe"]["model"].items() if key != "shard"}
    recipe: Any = load_dict({**job["recipe"], "model": whole}, base_dir=home, where="job").recipe
    spec = write_served_model(recipe, recipe.rollout.vllm, home / "model")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(job["servers"] + job["spare"])]
    urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    addresses.write_text("\n".join(urls[: job["servers"]]) + "\n")
    children = []
    for number, listener in enumerate(listeners):
        if (child := os.fork()) == 0:
            dying = job["dies_at"] if number == 0 else None
            for other in {*listeners} - {listener}:
                other.close()
            lora = spec.lora_rank is not None
            ranked.end(lambda: serve(listener, home, number, spec.window, lora, dying, addresses, urls))  # noqa: B023
        children.append(child)
    os.environ[TOKEN_VARIABLE] = KEY
    served_engine.OPEN_S = 60.0  # a joining server on a busy machine may need more than 3 s
    for listener in listeners:
        listener.close()
    job["recipe"]["rollout"]["vllm"]["server"] = str(addresses)
    codes = ranked.answer(job)
    for child in children:
        os.kill(child, signal.SIGTERM)  # a server not opened by a run, or not waited for yet
        os.waitpid(child, 0)
    seeds = [json.loads(path.read_text()) for path in sorted(home.glob("seeds-*.json"))]
    return {"codes": codes, "seeds": seeds}


def serve(
    listener: socket.socket,
    home: Path,
    number: int,
    window: int,
    lora: bool,
    dies_at: int | None,
    addresses: Path,
    urls: list[str],
) -> None:
    """Run a server until its run has ended, or until a request in which it announces all servers and kills itself."""
    torch.set_num_threads(1)
    one = serving.transformers_server(listener, KEY, home / "model", "float32", window, lora=lora)
    generate, drawn, lock = one.answers[serving.GENERATE], list[int](), threading.Lock()

    def count(body: Any) -> tuple[int, Any]:
        seed = body["sampling_params"].get("seed")
        if seed is None:  # the probe
            return generate(body)
        with lock:
            if len(drawn) + 1 == dies_at:
                every = addresses.with_suffix(".new")
                every.write_text("\n".join(urls) + "\n")
                every.replace(addresses)  # the run may be reading it
                os.kill(os.getpid(), signal.SIGKILL)
            found = generate(body)
            drawn.append(seed)
            (home / f"seeds-{number}.json").write_text(json.dumps(drawn))
        return found

    one.answers[serving.GENERATE] = count
    one.left = lambda: os._exit(0)
    one.serve()
