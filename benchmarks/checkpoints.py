"""Seconds to load, save and resume a model, by the number of ranks that shard it (gloo on a CPU).

    python benchmarks/checkpoints.py --out benchmarks/results/checkpoints_2cores.json   # 1 GB of random weights
    python benchmarks/checkpoints.py --smoke

One rank holds the whole model and writes it as an unsharded run does; several ranks write their shards. Measured for
each number of ranks: loading a model folder, a checkpoint (time that training waits, and time until it is sealed),
loading the checkpoint into another model with every hash verified, and saving the final model with its check. Each
figure is the median over rounds of the slowest rank's time. Files are written to TMPDIR and are still in the page cache
when read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sides

from posttrain.run import ranks

SIZES = {"large": (1024, 19), "smoke": (32, 2)}  # hidden size and layers: 1.0 GB in float32
COLUMNS = ("load", "wait", "sealed", "resume", "final")


def main() -> None:
    args = arguments()
    if args.worker:
        work(json.loads(args.worker.read_text()))
        return
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as scratch:
        home = Path(scratch)
        weights = write_model(home / "model", *SIZES["smoke" if args.smoke else "large"])
        record: dict[str, Any] = {**sides.environment(None), "cores": os.cpu_count(), "weights_bytes": weights}
        record["ranks"] = {}
        for count in args.ranks:
            job = home / f"job-{count}.json"
            job.write_text(json.dumps({"home": str(home), "ranks": count, "rounds": args.rounds}))
            if code := ranks.launch([sys.executable, __file__, "--worker", str(job)], count):
                raise SystemExit(code)
            record["ranks"][str(count)] = json.loads((home / f"{count}.json").read_text())
            print(table(record), flush=True)
            sides.write(record, args.out)  # after each: results are kept if the next one is killed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default: 3)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: does the script run?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(folder: Path, hidden: int, layers: int) -> int:
    """Write a random float32 Llama with the tokenizer of `tiny`; return the bytes of its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from posttrain.models import tiny

    tokenizer = tiny.build_tokenizer()
    config = LlamaConfig(
        vocab_size=max(len(tokenizer), 16 * hidden),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 16,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.nbytes for p in model.parameters())


def work(job: dict[str, Any]) -> None:
    """Run the measurement on each rank; rank 0 writes the results."""
    ranks.end_with_launcher()
    from posttrain.train import distributed

    with distributed.join_process_group():
        found = measure(Path(job["home"]), job["ranks"], job["rounds"])
        if distributed.is_main():
            (Path(job["home"]) / f"{job['ranks']}.json").write_text(json.dumps(found))


def measure(home: Path, count: int, rounds: int) -> dict[str, Any]:
    """Return medians over the rounds, all seconds, and the bytes of a checkpoint."""
    import shutil

    from posttrain.recipe.sections import Model, Parallel
    from posttrain.train import distributed

    section = Model(path=str(home / "model"), device="cpu", parallel=Parallel() if count > 1 else None)
    root = home / f"run-{count}"
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        one_round(times, section, home, root, number + 1)
    found = checkpoint_bytes(root)
    distributed.barrier()
    if distributed.is_main():
        shutil.rmtree(root)
    return {"seconds": {name: statistics.median(each) for name, each in times.items()}, "all": times, "bytes": found}


def one_round(times: dict[str, list[float]], section: Any, home: Path, root: Path, step: int) -> None:
    import torch

    from posttrain.train import checkpoint, distributed, divided_checkpoint, model_folder, sharding

    loaded = timed(times, "load", sharding.load, section, home, seed=0)
    optimizer = torch.optim.AdamW(loaded.model.parameters())
    for parameter in loaded.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    began = time.perf_counter()
    timed(times, "wait", checkpoint.save, root, checkpoint.State(step=step), loaded, optimizer, 1, wait=False)
    divided_checkpoint.wait_for_save()
    times.setdefault("sealed", []).append(max(distributed.gather(time.perf_counter() - began)))
    timed(times, "resume", checkpoint.restore, root, loaded, optimizer)
    timed(times, "final", model_folder.save_model, loaded, home / f"final-{distributed.world()}")


def timed(times: dict[str, list[float]], name: str, call: Callable[..., Any], *args: Any, **keys: Any) -> Any:
    """Return the result of `call`; append the seconds of the slowest rank to `times`."""
    from posttrain.train import distributed

    distributed.barrier()
    began = time.perf_counter()
    made = call(*args, **keys)
    times.setdefault(name, []).append(max(distributed.gather(time.perf_counter() - began)))
    return made


def checkpoint_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def table(record: dict[str, Any]) -> str:
    lines = ["ranks    load    wait  sealed  resume   final (s)"]
    for count, found in record["ranks"].items():
        lines.append(f"{count:>5}" + "".join(f"{found['seconds'][name]:8.1f}" for name in COLUMNS))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
