"""Failure message of GPU tests that run other processes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from posttrain.rollout.engine_log import read_log, root_cause

LAST = 4000  # characters of each output


def failure_report(logs: Iterable[Path], output: str = "") -> str:
    """Return the root cause found in each output, then the ends of all of them. output: captured from a process."""
    texts = {"the output": output, **{str(log): read_log(log) for log in logs}}
    causes = [f"{name}: {root_cause(text) or 'no error found'}" for name, text in texts.items() if text]
    return "\n".join([*causes, *(text[-LAST:] for text in texts.values())])
