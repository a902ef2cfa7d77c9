"""Run as a program: trains in child processes, as many as a job asks for. See test_distributed.py.

Reads one JSON job a line: {"recipe", "base_dir", "output", "resume", "ranks"}. The libraries are imported once, before
any child is forked, so that a run costs a second and not ten. Answers each job with the exit statuses by rank.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from posttrain import pipeline
from posttrain.recipe.load import load_dict
from posttrain.run.directory import RunDirectory
from posttrain.train import distributed, preference, rl, sft

RUNNERS = (sft.run, preference.run, rl.run)  # imported here, so that `run_stage` finds them loaded


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(job["ranks"]):
            child = os.fork()
            if child == 0:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                train(job)
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


def train(job: dict[str, Any]) -> None:
    """In the child; never returns."""
    code = 1
    try:
        recipe = load_dict(job["recipe"], base_dir=Path(job["base_dir"]), where="job").recipe

        def open_it() -> RunDirectory:
            return RunDirectory.open(Path(job["output"]), name="job", text="", resolved={}, resume=job["resume"])

        with distributed.joined(), distributed.open_directory(open_it) as directory:
            pipeline.run_stage(recipe, directory)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
