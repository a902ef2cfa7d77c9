"""A stand-in for vLLM behind `VllmEngine`: an `EngineClient` that samples from a transformers model in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from posttrain.errors import EngineError
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.engine import Completion
from posttrain.rollout.hf import decode, uniforms
from posttrain.rollout.requests import Request
from posttrain.rollout.vllm_start import READY_FILE, EngineSpec


class TransformersClient:
    """One engine. `told`: the calls it got, in order; `asked`: its requests.

    cut: requests wait for a pause once their samples have this many tokens, unless it is 0.
    """

    name, workers, lost = "a stand-in", 1, None

    def __init__(self, spec: EngineSpec, folder: Path, log: Path | None = None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        del log
        self.spec, self.told, self.asked, self.cut = spec, list[str](), list[Request](), 0
        config = AutoConfig.from_pretrained(folder)
        if spec.lora_rank is None:
            self.base = AutoModelForCausalLM.from_config(config)  # weights that were never sent
        else:
            self.base = AutoModelForCausalLM.from_pretrained(folder, dtype=spec.dtype)
        self.model: Any = self.base.eval()
        self.pad = config.pad_token_id
        self.state: dict[str, torch.Tensor] | None = None  # of the update in progress
        self.under_way = 0
        self.paused = asyncio.Event()
        self.ended = False
        self.adapters: list[str] = []  # of the newest version, in order

    @classmethod
    def start(cls, spec: EngineSpec, folder: Path, log: Path) -> list[TransformersClient]:
        """Start as ColocatedClient.start does."""
        while not (folder / READY_FILE).exists():
            time.sleep(0.01)
        return [cls(spec, folder, log) for _ in range(spec.section.engines)]

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        self._alive()
        assert not self.paused.is_set(), "asked while it is paused"
        self.asked.append(request)
        self.under_way += 1
        try:
            limit = min(self.cut or request.max_new_tokens, request.max_new_tokens)
            u = uniforms(request.n, request.max_new_tokens, request.seed)
            here = sampling.model_copy(update={"max_new_tokens": limit})
            ends = self.spec.eos_ids if request.ends else ()
            self._use(request.adapter)
            samples = decode(self.model, [request.ids], [0] * request.n, u, here, eos_ids=ends, pad_id=self.pad)
            if limit < request.max_new_tokens and any(c.finish == "length" for c in samples):
                await self.paused.wait()
                samples = [replace(c, finish="paused") if c.finish == "length" else c for c in samples]
            return [c if request.logprobs else replace(c, logps=None) for c in samples]
        finally:
            self.under_way -= 1

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        self._alive()
        self._use(adapter)
        with torch.no_grad():
            row = torch.tensor([list(ids)])
            logits = self.model(input_ids=row).logits[0, :-1].float()
            return logits.log_softmax(-1).gather(-1, row[0, 1:, None]).squeeze(-1).tolist()

    async def pause(self) -> None:
        self._alive()
        self.told.append("pause")
        self.paused.set()
        while self.under_way:
            await asyncio.sleep(0)

    async def resume(self) -> None:
        self.told.append("resume")
        self.paused.clear()

    async def transfer(self, call: str, info: Mapping[str, Any] | None = None) -> None:
        if call == "init_weight_transfer_engine":
            assert not info
        elif call == "start_weight_update":
            self._alive()
            assert self.paused.is_set() and not self.under_way and self.state is None
            self.told.append("update")
            self.state = {}
        elif call == "update_weights":
            assert self.state is not None and info is not None
            self.state |= {name: tensor.clone() for name, tensor in load_file(info["file"]).items()}
        else:
            assert call == "finish_weight_update" and self.state is not None
            self.base.load_state_dict(self.state, strict=False)
            self.base.tie_weights()
            self.state = None

    async def load_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        from peft import PeftModel

        self._alive()
        self.told.append(f"adapter {version}")
        if self.model is not self.base:
            self.base = self.model.unload()
        (first, folder), *others = folders.items()
        self.model = PeftModel.from_pretrained(self.base, folder, adapter_name=first).eval()
        for name, folder in others:
            self.model.load_adapter(folder, name)
        self.adapters = list(folders)

    def _use(self, adapter: str | None) -> None:
        if self.adapters:
            self.model.set_adapter(adapter or self.adapters[0])

    async def sleep(self, *, keep_weights: bool) -> None:
        self.told.append(f"sleep {'with' if keep_weights else 'without'} weights")

    async def wake(self) -> None:
        self.told.append("wake")

    def close(self) -> None:
        self.told.append("close")
        self.ended = True

    def _alive(self) -> None:
        if self.ended:
            raise EngineError("the stand-in has ended")
