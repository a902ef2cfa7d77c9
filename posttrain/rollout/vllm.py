"""The vLLM engine, colocated: vLLM runs in this process, on the trainer's device, and is handed weights as tensors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from posttrain.recipe.rollout_sections import Sampling, Vllm
from posttrain.rollout import vllm_start, weights
from posttrain.rollout.core import VllmCore
from posttrain.rollout.engine import Completion
from posttrain.rollout.pushed import Done, PushedEngine, Request

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel


class VllmEngine(PushedEngine):
    """An Engine on vLLM 0.22 to 0.32.

    Full training: vLLM starts with random weights and every sync streams all of them from the trainer's tensors. LoRA:
    vLLM loads the dense base once and every sync replaces the adapter, some megabytes; with `merge_adapter` the sums of
    base and adapter are streamed as the weights of full training are. Either way the sync ends in a
    probe: one fixed sequence through both, and EngineError where the gap is more than rounding.
    """

    def __init__(self, section: Vllm, loaded: LoadedModel, *, scratch: Path, max_len: int) -> None:
        vllm_start.require_vllm()
        super().__init__(section, loaded, max_len=max_len)
        self.scratch = scratch
        self.adapter_folder: Path | None = None
        self.pushes = 0
        folder = scratch / "engine-model"
        if self.lora_rank is not None:
            weights.write_base(loaded, folder, self.dtype)
        else:
            weights.write_config(loaded, folder)
        try:
            self.core = VllmCore(
                section,
                folder,
                dtype=self.dtype,
                window=self.window,
                lora_rank=self.lora_rank,
                eos_ids=loaded.eos_ids,
            )
        finally:
            shutil.rmtree(folder)  # read, and under LoRA as large as the model
        try:
            self.sync(loaded.model, 0)
        except BaseException:
            self.close()
            raise

    @property
    def llm(self) -> Any:
        """vLLM itself."""
        return self.core.llm

    def complete(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, done: Done | None = None
    ) -> list[list[Completion]]:
        """See `PushedEngine.complete`."""
        return self.core.complete(requests, sampling, seed=seed, done=done)

    def push(self, model: Any, version: int, whole: Iterator[tuple[str, Tensor]]) -> None:
        """See `PushedEngine.push`. Nothing but an adapter goes over the disk."""
        if self.lora_rank is None:
            self.core.load(whole)
            return
        old, self.pushes = self.adapter_folder, self.pushes + 1
        self.adapter_folder = weights.write_adapter(model, self.scratch / f"engine-adapter-{self.pushes}", self.dtype)
        self.core.load_adapter(self.adapter_folder, version)
        if old is not None:
            shutil.rmtree(old)

    def logps(self) -> list[list[float]]:
        """See `PushedEngine.logps`."""
        return [self.core.logps(self.ids)]

    def sleep(self) -> None:
        """With vllm.sleep: give memory back until `wake`. Else nothing."""
        self.core.sleep()

    def wake(self) -> None:
        """Take the memory back. `sync` and `generate` do it themselves; full training must sync before `generate`."""
        self.core.wake()

    def close(self) -> None:
        """Free the engine's memory. Calling it twice is fine."""
        self.core.close()
        if self.adapter_folder is not None:
            shutil.rmtree(self.adapter_folder, ignore_errors=True)
