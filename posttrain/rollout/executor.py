"""vLLM's multi-worker executor for an engine that shares the GPUs of training processes. vLLM imports it by name, in
the trainer's process and in the engine core's.

vLLM starts each worker in a process of its own. If the engine core holds the model itself, `worker` prepares the core's
process; this module does the same for an engine core that only schedules.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from posttrain.rollout import engine_process


class SeveralWorkers(MultiprocExecutor):  # type: ignore[misc]
    """Starts one worker per GPU, on the GPUs that the environment names for the engine."""

    def _init_executor(self) -> None:
        if devices := os.environ.get(engine_process.DEVICES):
            os.environ["CUDA_VISIBLE_DEVICES"] = devices  # for the workers; this process sees one GPU
        super()._init_executor()

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method on all workers (vLLM's `collective_rpc`), and do our own process methods in this
        process too."""
        if method == "posttrain_detach":
            engine_process.leave_signals()
        found = super().collective_rpc(method, *args, **kwargs)
        if method == "posttrain_clean_up":
            engine_process.clean_up()
        return found
