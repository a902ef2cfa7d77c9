"""A stand-in for vLLM behind the real server: a transformers model that is pushed weights, and draws what the
transformers engine draws. Also a program: `python serving.py FD` serves one session on a listening socket."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posttrain.recipe.rollout_sections import Sampling
from posttrain.rollout.core import read_base
from posttrain.rollout.decode import decode
from posttrain.rollout.engine import Completion
from posttrain.rollout.pushed import Request
from posttrain.rollout.sampling import uniforms
from posttrain.rollout.server import EngineServer, main
from posttrain.rollout.weights import with_factors

ONE_AT_A_TIME = threading.Lock()  # transformers cannot load in two threads


class TransformersCore:
    """A Core without vLLM. `told`: what it was asked, in order; slow_s: seconds before each request's samples.

    cut: the next call waits for a pause once it has sampled so many tokens of each completion."""

    def __init__(self, settings: dict[str, Any], folder: Path, slow_s: float = 0.0) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.settings, self.slow_s, self.told = settings, slow_s, list[str]()
        self.cut, self.paused = 0, threading.Event()
        with ONE_AT_A_TIME:
            config = AutoConfig.from_pretrained(folder)
            if settings["lora_rank"] is None:
                self.base = AutoModelForCausalLM.from_config(config)  # weights that nobody pushed
            else:
                self.base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, settings["dtype"]))
        self.held = read_base(folder) if settings["holds_base"] else {}
        self.model: Any = self.base.eval()
        self.pad = config.pad_token_id

    def complete(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, done: Any = None
    ) -> list[list[Completion]]:
        self.told.append("complete")
        self.paused.clear()
        cut, self.cut = self.cut, 0
        found = []
        for place, r in enumerate(requests):
            time.sleep(self.slow_s)
            u = uniforms((r.number + 1) * r.n, r.max_new_tokens, seed)[r.number * r.n :]
            ends = self.settings["eos_ids"] if r.ends else ()
            here = sampling.model_copy(update={"max_new_tokens": min(cut or r.max_new_tokens, r.max_new_tokens)})
            samples = decode(self.model, [r.ids], [0] * r.n, u, here, eos_ids=ends, pad_id=self.pad)
            if here.max_new_tokens < r.max_new_tokens:
                samples = [replace(c, finish="paused") if c.finish == "length" else c for c in samples]
            found.append([c if r.logprobs else Completion(c.ids, None, c.finish) for c in samples])
            if done is not None:
                done(place, found[-1])
        assert not cut or self.paused.wait(20), "no sync came"
        return found

    def pause(self) -> None:
        self.paused.set()

    def load(self, named: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.told.append("load")
        self.base.load_state_dict({name: tensor.clone() for name, tensor in named}, strict=False)
        self.base.tie_weights()

    def load_factors(self, factors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.told.append("factors")
        self.load(with_factors(self.held.items(), dict(factors), torch.device("cpu")))

    def load_adapter(self, folder: Path, version: int) -> None:
        from peft import PeftModel

        self.told.append(f"adapter {version}")
        with ONE_AT_A_TIME:
            if self.model is not self.base:
                self.base = self.model.unload()
            self.model = PeftModel.from_pretrained(self.base, folder).eval()

    @torch.no_grad()
    def logps(self, ids: Sequence[int]) -> list[float]:
        row = torch.tensor([list(ids)])
        logits = self.model(input_ids=row).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, row[0, 1:, None]).squeeze(-1).tolist()

    def close(self) -> None:
        self.told.append("close")


class Served:
    """A server in a thread of this process. `core` is there once a run has started it."""

    def __init__(self, make_core: Any = TransformersCore) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.core: Any = None

        def make(settings: dict[str, Any], folder: Path) -> Any:
            self.core = make_core(settings, folder)
            return self.core

        self.server = EngineServer(self.listener, make)
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()


@contextlib.contextmanager
def served(make_core: Any = TransformersCore) -> Iterator[Served]:
    """A server that has ended when the block ends: it ends with the session of its run."""
    one = Served(make_core)
    yield one
    if one.server.session == "":
        one.server.end()
    one.thread.join(10)
    assert not one.thread.is_alive(), "the server outlives its session"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), TransformersCore)
