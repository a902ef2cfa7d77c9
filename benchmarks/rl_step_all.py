"""All works of `rl_step.py` with their best known settings within a time limit: on one GPU, or in parallel on several.

    python benchmarks/rl_step_all.py --minutes 9 --models /tmp/models --out $OUT
    python benchmarks/rl_step_all.py --minutes 9 --models /tmp/models --out $OUT --works A L  # two GPUs: one each
    python benchmarks/rl_step_all.py --smoke --out /tmp/results  # tiny, on a CPU

Each work writes OUT/rl_NAME.json after each side, readable with `rl_step.py --recompute`, and its output to
OUT/rl_NAME.log. Every visible GPU takes the next work when it has finished one, with an equal part of the host's cores.
The remaining time is a work's `--minutes`; a work with less than two minutes is skipped. Both sides of a work run on
the same GPU, one after the other.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import rl_work
import sides

HERE = Path(__file__).resolve().parent
# name -> (work, flags of rl_step.py). vllm.gpu_memory: as much as the work's KV cache needs on a card of 140 GiB.
WORKS = {
    "A": (
        "A",
        "--dtype float16 --compile --micro-tokens 20480 --engines 2 --share 0.05 --warm --steps 4 --trl-ways 64",
    ),
    "B_lora": (
        "B",
        "--lora --merge-adapter --compile --micro-tokens 12288 --engines 2 --share 0.08 --steps 4 --trl-ways 16 32",
    ),
    "L": ("L", "--merge-adapter --sleep --compile --micro-tokens 14336 --share 0.3 --alone 1 --trl-ways 4"),
    "B_full": ("B", "--sleep --compile --micro-tokens 7168 --share 0.15 --steps 4 --trl-ways 8 16"),
}
LEAST = 120  # minimum seconds to start a work


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    gpus = sides.visible_gpus(None if args.smoke else sides.nvml()) or [""]
    with tempfile.TemporaryDirectory(prefix="rl_step_all-") as scratch:
        models = args.models or Path(scratch)
        if not args.smoke:
            for work in {WORKS[name][0] for name in args.works}:  # once, before several works need them
                rl_work.model_folder(rl_work.WORKS[work], models, smoke=False)
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in args.works:
            waiting.put(name)
        cores = sorted(os.sched_getaffinity(0))
        lanes = [
            threading.Thread(target=run_lane, args=(args, waiting, gpu, cores[n :: len(gpus)], models, end))
            for n, gpu in enumerate(gpus)
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="*", choices=list(WORKS), default=list(WORKS), help="in this order")
    parser.add_argument("--minutes", type=float, default=60, help="of everything")
    parser.add_argument("--flags", default="", help="more flags of rl_step.py, for all works")
    parser.add_argument("--models", type=Path, help="keep the models here, for the next run on this machine")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSONs")
    parser.add_argument("--smoke", action="store_true", help="on a CPU with tiny models: does the script run?")
    return parser.parse_args()


def run_lane(
    args: argparse.Namespace,
    waiting: queue.SimpleQueue[str],
    gpu: str,
    cores: list[int],
    models: Path,
    end: float,
) -> None:
    """Run works on one GPU ("": the default device) one after another, until none remain or the time is up."""
    os.sched_setaffinity(0, cores)  # of this thread and its child processes
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}
    while True:
        try:
            name = waiting.get_nowait()
        except queue.Empty:
            return
        left = end - time.monotonic()
        if left < LEAST:
            print(f"{name}: left out, {left:.0f} s are left", flush=True)
            continue
        work, flags = WORKS[name]
        settings = ["--smoke"] if args.smoke else [*flags.split(), "--trl-sleep", "off", "--models", str(models)]
        command = [sys.executable, str(HERE / "rl_step.py"), "--work", work, *settings, *args.flags.split()]
        command += ["--minutes", f"{left / 60:.2f}", "--out", str(args.out / f"rl_{name}.json")]
        log = args.out / f"rl_{name}.log"
        with log.open("w") as output:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        print(last_table(log.read_text()), flush=True)


def last_table(log: str) -> str:
    """Return the last table printed by a work, or its error."""
    tables = log.split("\nwork ")
    return "work " + tables[-1].rstrip() if len(tables) > 1 else log[-3000:]


if __name__ == "__main__":
    main()
