"""Run as a program: forks for the runs of ranked.py and killable.py, so that a run costs a second and not ten.

Reads one JSON job a line, with the `program` whose `answer` it is for, and answers each with a line of JSON. The
libraries are imported once, and what every run would do first is done once.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import killable
import ranked
import served
import torch
import tqdm

from posttrain import pipeline
from posttrain.recipe.load import load_dict
from posttrain.run.directory import RunDirectory

RUN: dict[str, Any] = {"model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}, "run": {"steps": 1}}
SFT = {**RUN, "stage": "sft", "batch": {"size": 2}}
RL = {
    **RUN,
    "stage": "rl",
    "rollout": {"prompts_per_step": 1, "group_size": 2, "max_new_tokens": 2},
    "rewards": [{"use": "score.py:score"}],
    "scoring": {"workers": 1},
}


ANSWERS = {"killable": killable.answer, "ranked": ranked.answer, "served": served.answer}


def main() -> None:
    run_once()
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(ANSWERS[job["program"]](job)), flush=True)


def run_once() -> None:
    """A step of SFT and one of RL in a folder that goes: transformers' tables of weights, page templates and schemas
    are then made. No thread is left, no collection of a child goes over what is there by now, and none waits for the
    disk: files of tests need not outlive a power cut."""
    os.fsync = lambda _: None
    tqdm.tqdm.monitor_interval = 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        folder = Path(name)
        rows = [{"prompt": f"{n}+{n}=", "completion": str(n + n)} for n in range(4)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "score.py").write_text("def score(completion):\n    return len(set(completion))\n")
        for recipe in (SFT, RL):
            loaded = load_dict(recipe, base_dir=folder, where="warm").recipe
            with RunDirectory.open(folder / recipe["stage"], name="warm", text="", resolved={}) as directory:
                pipeline.run_stage(loaded, directory)
    gc.collect()
    gc.freeze()  # a collection of a child would copy their pages as well
    gc.enable()


if __name__ == "__main__":
    main()
