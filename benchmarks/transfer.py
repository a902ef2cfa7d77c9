"""Weights to an engine's process on this machine: shared memory against HTTP. No GPU, no vLLM.

    python benchmarks/transfer.py --gib 2

The server is the real one in a process of its own; what it serves copies each tensor once, as an engine does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from posttrain.rollout import wire
from posttrain.rollout.client import Client
from posttrain.rollout.remote import ServerEngine
from posttrain.rollout.server import EngineServer, MakeCore


class Taking:
    """A core that only takes weights."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        del settings, folder
        self.held: dict[str, torch.Tensor] = {}

    def load(self, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    def close(self) -> None: ...


def serve(listener: socket.socket) -> None:
    torch.set_num_threads(1)
    EngineServer(listener, cast(MakeCore, Taking)).serve()


def pushing(client: Client, *, shared: bool) -> ServerEngine:
    """The trainer's half, without a model."""
    engine = ServerEngine.__new__(ServerEngine)
    engine.clients, engine.shared = [client], [shared]
    return engine


def seconds(engine: ServerEngine, tensors: list[tuple[str, torch.Tensor]]) -> float:
    began = time.perf_counter()
    parts = list(wire.buckets(tensors, torch.bfloat16, wire.BUCKET_BYTES))
    for number, bucket in enumerate(parts):
        engine._push_bucket(number, bucket, last=number + 1 == len(parts))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    count = max(1, int(args.gib * 2**30 / (32 << 20)))
    tensors = [(f"w{i}", torch.randn(2048, 8192, dtype=torch.bfloat16)) for i in range(count)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(listener,))
        process.start()
    client = Client(url, 60)
    client.open()
    client.ask("POST", "/start", [json.dumps({"folder": "none"}).encode()])
    found: dict[str, list[float]] = {"shared memory": [], "HTTP": []}
    for _ in range(args.repeats + 1):  # in turns, the first left out
        for way, times in found.items():
            times.append(seconds(pushing(client, shared=way == "shared memory"), tensors))
    client.close()
    process.join(10)
    rates = {way: count / 32 / min(times[1:]) for way, times in found.items()}  # others use the machine too
    ratio = rates["shared memory"] / rates["HTTP"]
    print(json.dumps({"gib": count / 32, "gib_per_s": rates, "ratio": ratio, "seconds": found}))


if __name__ == "__main__":
    main()
