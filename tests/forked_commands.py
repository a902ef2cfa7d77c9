"""Run as a program: `posttrain` in child processes, which find the libraries imported. See `commands` of conftest.py.

Reads one JSON job a line: {"words", "folder", "environment", "stdout", "stderr"}: what is typed, where, variables to
set, and the files that the child prints to. Answers each job with its exit status.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch

import posttrain.export.run
import posttrain.pipeline
import posttrain.train.rl  # noqa: F401  so that the children find it loaded
from posttrain.__main__ import main


def serve() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # no collection of a child goes over the libraries, which would copy their pages as well
    gc.enable()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(words: list[str], folder: str, environment: dict[str, str], **streams: Any) -> None:
    """In the child, which ends as the command does."""
    for stream, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(streams[stream], os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["posttrain", *words]
    main()


if __name__ == "__main__":
    serve()
