"""Program that forks for the runs of ranked.py and killable.py, so that a run costs a second instead of ten.

Reads one JSON job per line, with the `program` whose `answer` it is for, and writes one line of JSON for each.
Libraries are imported once, and the first-use work of a run is done once.
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
from short_runs import skip_parts_tested_elsewhere

from posttrain import pipeline
from posttrain.recipe.load import load_dict
from posttrain.run.directory import RunDirectory
from posttrain.train import launch_fingerprint

RUN: dict[str, Any] = {"model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}, "run": {"steps": 1}}
SFT = {**RUN, "stage": "sft", "batch": {"size": 2}}
RL = {
    **RUN,
    "stage": "rl",
    "model": {"path": "tiny", "lora": {"rank": 4}},
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
    """Run a step of SFT and one of RL with an adapter in a temporary folder, which builds the weight tables of
    transformers and peft, page templates and schemas. Afterwards no thread remains, existing objects are frozen for
    garbage collection in children, and fsync is disabled: files of tests need not outlive a power cut."""
    os.fsync = lambda _: None
    skip_parts_tested_elsewhere(setattr)
    tqdm.tqdm.monitor_interval = 0
    torch.set_num_threads(1)
    launch_fingerprint.own_source()  # of eight hundred files; all ranks have the same
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
    gc.freeze()  # a garbage collection in a child would copy their pages
    gc.enable()


if __name__ == "__main__":
    main()
