"""vLLM's executor of several workers, for an engine beside training processes. vLLM imports it by its name, in our
process and in its engine core's.

vLLM starts each worker in a process of its own. What `worker` does in the engine core's process where that holds the
model itself, this does in an engine core that only schedules.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from posttrain.rollout import engine_process


class SeveralWorkers(MultiprocExecutor):  # type: ignore[misc]
    """One worker a GPU, on the GPUs that the environment names for the engine."""

    def _init_executor(self) -> None:
        if devices := os.environ.get(engine_process.DEVICES):
            os.environ["CUDA_VISIBLE_DEVICES"] = devices  # for the workers: ours was one GPU
        super()._init_executor()

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """See vLLM. What is done for the engine's processes is done for this one too."""
        if method == "posttrain_detach":
            engine_process.leave_signals()
        found = super().collective_rpc(method, *args, **kwargs)
        if method == "posttrain_clean_up":
            engine_process.clean_up()
        return found
