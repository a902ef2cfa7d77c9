"""Shared code of TRL's sides: their clock, and the settings that are equal for all of its trainers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from clocks import synchronise


def arguments(spec: dict[str, Any], *, lr: float, rows: int, micro: int) -> dict[str, Any]:
    """Return arguments of a trainer whose steps have `rows` rows, `micro` at a time, and posttrain's update
    settings."""
    return {
        "output_dir": spec["run"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "max_steps": spec["steps"],
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
        "bf16": not spec["smoke"],
        "use_cpu": spec["smoke"],
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def clock(
    result: dict[str, Any],
    steps: list[float],
    logged: list[dict[str, Any]],
    at_end: Callable[[], None] = lambda: None,
) -> Any:
    """Return a callback that records the start of the first step, the seconds of each step, and the trainer's logged
    values.

    at_end: called after each step, when its seconds are recorded.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.last = result["began"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronise()
            now = time.perf_counter()
            steps.append(now - self.last)
            self.last = now
            at_end()

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            if logs and "loss" in logs:
                logged.append(dict(logs))

    return Clock()


def in_order(trainer: Any, rows: Any) -> Any:
    """Replacement of `_get_train_sampler`: rows in their order."""
    from torch.utils.data import SequentialSampler

    return SequentialSampler(trainer.train_dataset if rows is None else rows)
