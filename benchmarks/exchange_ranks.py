"""Exchange of a step's rollouts between ranks: pickled, with token ids and log-probs as packed arrays, and packed
arrays sent only to the rank that trains on the row.

    python benchmarks/exchange_ranks.py --rollouts 8192 --tokens 8192 --out benchmarks/results/exchange_cpu.json
    python benchmarks/exchange_ranks.py --smoke

Each of 2 or 4 processes (gloo, on a CPU) has its share of the rollouts: seeded ids of a vocabulary of 150,000, with a
log-prob and four bytes of text each. Every process ends with all rollouts; with `owner`, with row-level values of all
rows and the tokens of every fourth row (with two processes: every second). `bytes` is what a rank receives, `seconds`
the slowest rank's, `cpu_s` the time in which its process computed, `peak_gib` the largest growth of a rank's memory.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sides

from posttrain.run import ranks

if TYPE_CHECKING:  # torch is imported in each process
    from posttrain.batch import Rollout

WAYS = ("pickled", "packed", "owner")


def main() -> None:
    args = arguments()
    if args.worker:
        exchange(json.loads(args.worker.read_text()))
        return
    record: dict[str, Any] = {**sides.environment(None), "rollouts": args.rollouts, "tokens": args.tokens, "ranks": {}}
    with tempfile.TemporaryDirectory(prefix="exchange-") as folder:
        for count in args.ranks:
            for way in WAYS:
                out, spec = Path(folder) / "out.json", Path(folder) / "spec.json"
                share = args.rollouts // count
                spec.write_text(json.dumps({"way": way, "share": share, "tokens": args.tokens, "out": str(out)}))
                if code := ranks.launch([sys.executable, __file__, "--worker", str(spec)], count):
                    sys.exit(code)
                record["ranks"].setdefault(str(count), {})[way] = found = json.loads(out.read_text())
                print(f"{count} ranks  {way:8}  {found}", flush=True)
                sides.write(record, args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192, help="of each")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="few and short: does the script run?")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.rollouts, args.tokens, args.ranks = 8, 100, [2]
    return args


# In each process


def exchange(spec: dict[str, Any]) -> None:
    """Run one exchange; rank 0 writes its cost."""
    ranks.end_with_launcher()
    from posttrain.train import distributed, rollout_exchange

    with distributed.join_process_group():
        mine = distributed.Captured(made_up(spec["share"], spec["tokens"], distributed.rank()))
        distributed.barrier()
        received = count_bytes(distributed)
        before, began, busy = peak_gib(), time.perf_counter(), time.process_time()
        if spec["way"] == "pickled":
            found = distributed.gather_or_raise(mine)
        else:
            found = rollout_exchange.gather_rollouts(mine, by_row=spec["way"] == "owner")
        if spec["way"] == "owner":
            rollouts = [rollout for own in found for rollout in own]
            rollout_exchange.send_tokens(rollouts, [n % distributed.world() for n in range(len(rollouts))])
        took = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - busy}
        took["peak_gib"] = peak_gib() - before
        if spec["way"] == "pickled":
            received.append((distributed.world() - 1) * len(pickle.dumps(mine.value)))
        assert [len(rollouts) for rollouts in found] == [spec["share"]] * distributed.world()
        slowest = {name: max(every[name] for every in distributed.gather(took)) for name in took}
        if distributed.is_main():
            Path(spec["out"]).write_text(
                json.dumps({"bytes": sum(received), **{name: round(value, 2) for name, value in slowest.items()}})
            )


def count_bytes(distributed: Any) -> list[int]:
    """From now on, count the bytes received from other ranks, by the function that receives them."""
    found: list[int] = []
    gather_bytes, exchange_bytes = distributed.gather_bytes, distributed.exchange_bytes

    def gathered(*args: Any) -> Any:
        parts = gather_bytes(*args)
        found.append(sum(map(len, parts)) - len(parts[distributed.rank()]))
        return parts

    def exchanged(*args: Any) -> Any:
        parts = exchange_bytes(*args)
        found.append(sum(len(part) for own in parts for part in own))
        return parts

    distributed.gather_bytes, distributed.exchange_bytes = gathered, exchanged
    return found


def made_up(count: int, tokens: int, rank: int) -> list[Rollout]:
    """Return scored rollouts of one rank, eight per prompt, as an engine returns them."""
    import numpy as np

    from posttrain.batch import Prompt, Rollout, Segment

    draw = np.random.default_rng(rank)
    rollouts = []
    for number in range(count):
        if number % 8 == 0:
            prompt = Prompt(f"{rank}-{number}", {}, "", tuple(draw.integers(0, 150_000, 100).tolist()))
        ids, logps = draw.integers(0, 150_000, tokens), -draw.random(tokens, np.float32)
        segment = Segment("model", tuple(ids.tolist()), tuple(logps.tolist()))
        text = "word" * tokens
        rollouts.append(Rollout(prompt, number // 8, (segment,), text, "length", 0, {"score": 1.0}, 1.0, True))
    return rollouts


def peak_gib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


if __name__ == "__main__":
    main()
