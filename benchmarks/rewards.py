"""Scoring maths completions: posttrain's worker processes, a plain loop over math-verify, and TRL's accuracy_reward.

    python benchmarks/rewards.py [--n 10000] [--workers 2] [--kinds pairs grouped distinct] [--out FILE]

`pairs`: the cost of one comparison over the judged pairs of tests/verify/answers.json, without caching.
`grouped`: eight completions per problem, as in RL, so that answers repeat and posttrain, which caches comparisons,
compares less often than the others. `distinct` (a fifth of the rows): no pair of gold answer and answer repeats, so
that caching does not help. Gold answers are integers in 6 of 10 problems.

The three sides score the same texts in blocks, in rotating order, so that a drift of the machine's speed affects all
alike. The loop and TRL use one core; `of N loops` is the pool's speed divided by N times the loop's. On a busy machine
N workers wait more than one loop; compare the CPU time of all our processes with the loop's instead. Finally, a row
that never terminates is added to others: it should cost its time limit and no more.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sides import write

from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.score import Sample, Scorer

KINDS = ("pairs", "grouped", "distinct")
PAIRS = Path(__file__).parents[1] / "tests" / "verify" / "answers.json"
WARM = 20
BLOCKS = 10
GROUP = 8
LIMIT = 2.0  # time limit in seconds of the endless row
ENDLESS = """
import time
def slow(completion, answer):
    if completion == "endless":
        time.sleep(3600)
    return 1.0
"""
THOUGHT = "Let us see. We add the parts, then compare both sides of the equation, and simplify what is left. "


def rows(n: int, kind: str, seed: int = 0) -> list[tuple[str, str]]:
    """Return (completion, gold): half of them right, a tenth of the right ones in another form, a tenth without an
    answer."""
    draw = random.Random(f"{kind} {seed}")
    made: list[tuple[str, str]] = []
    seen: set[tuple[str, str]] = set()
    while len(made) < n:
        gold, other = (_integer if draw.random() < 0.6 else _expression)(draw)
        for _ in range(GROUP if kind == "grouped" else 1):
            luck = draw.random()
            said = gold if luck < 0.45 else other if luck < 0.5 else _expression(draw)[0]
            if kind == "distinct" and (gold, said) in seen:
                continue
            seen.add((gold, said))
            box = "" if luck > 0.9 else rf"So the answer is \boxed{{{said}}}."
            made.append((f"<think>\n{THOUGHT * draw.randint(1, 20)}\n</think>\n{box}", gold))
    return made[:n]


def _integer(draw: random.Random) -> tuple[str, str]:
    value = draw.randint(-999_999, 999_999)
    return str(value), rf"\frac{{{2 * value}}}{{2}}"


def _expression(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(1, 999), draw.randint(2, 99)
    return draw.choice(
        [
            (rf"\frac{{{2 * a + 1}}}{{{2 * b}}}", rf"\frac{{{4 * a + 2}}}{{{4 * b}}}"),
            (rf"{a}\sqrt{{{b * b + 1}}}", rf"\sqrt{{{b * b + 1}}} \cdot {a}"),
            (rf"{a}x + {b}", rf"{b} + {a}x"),
            (rf"({a}, {b})", rf"\left({a}, {b}\right)"),
            (rf"\frac{{{a}\pi}}{{{b + 20}}}", rf"{a}\pi/{b + 20}"),
        ]
    )


def plain_loop(made: list[tuple[str, str]]) -> list[float]:
    """Score as a user's own loop: parse gold and completion with the library, and compare."""
    from math_verify import parse, verify

    return [float(verify(parse(f"${gold}$"), parse(text.rpartition("</think>")[2]))) for text, gold in made]


def trl(made: list[tuple[str, str]]) -> list[float | None]:
    """Score with TRL's accuracy_reward."""
    from trl.rewards import accuracy_reward

    said = [[{"role": "assistant", "content": text.rpartition("</think>")[2]}] for text, _ in made]
    return list(accuracy_reward(said, [f"${gold}$" for _, gold in made]))


def pool(scorer: Scorer) -> Callable[[list[tuple[str, str]]], list[float | None]]:
    """Score with posttrain's math.accuracy in worker processes."""
    return lambda made: scorer.score([Sample(text, {"answer": gold}) for text, gold in made]).rewards


def processor_seconds(scorer: Scorer) -> float:
    """Return the CPU seconds of this process and its workers so far."""
    ticks = 0
    for worker in scorer.pool.workers:
        fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def timed(score: Callable[..., Any], made: list[Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    found = score(made)
    return time.perf_counter() - started, found


def measure(kind: str, n: int, workers: int) -> dict[str, Any]:
    """Return seconds of each side, ratios, and how often the sides agree."""
    made = rows(n, kind)
    size = -(-n // BLOCKS)
    spent = {"posttrain": 0.0, "loop": 0.0, "trl": 0.0}
    cpu = dict.fromkeys(spent, 0.0)
    same, by_block = 0, []
    with Scorer([Reward(use="math.accuracy")], Scoring(workers=workers), None) as scorer:
        sides: dict[str, Callable[..., Any]] = {"posttrain": pool(scorer), "loop": plain_loop, "trl": trl}
        for name, score in sides.items():
            score(rows(WARM * (workers if name == "posttrain" else 1), kind, seed=1))
        for block, start in enumerate(range(0, n, size)):
            part, scores, took = made[start : start + size], {}, {}
            for name in [*sides][block % 3 :] + [*sides][: block % 3]:
                before = processor_seconds(scorer)
                took[name], scores[name] = timed(sides[name], part)
                spent[name] += took[name]
                cpu[name] += processor_seconds(scorer) - before
            by_block.append(took["loop"] / took["posttrain"] / workers)
            same += sum(a == b for a, b in zip(scores["posttrain"], scores["loop"], strict=True))
    return {
        "kind": kind,
        "rows": n,
        "pairs_that_differ": len({(text.rpartition("</think>")[2], gold) for text, gold in made}),
        "workers": workers,
        "seconds": spent,
        "processor_seconds": cpu,
        "loop_over_ours_in_processor_time": cpu["loop"] / cpu["posttrain"],
        "times_the_loop": spent["loop"] / spent["posttrain"],
        "times_trl": spent["trl"] / spent["posttrain"],
        "share_of_ideal": spent["loop"] / spent["posttrain"] / workers,
        "share_of_ideal_by_block": by_block,
        "agreement_with_the_loop": same / n,
    }


def time_pairs() -> dict[str, float]:
    """Return milliseconds of one `equal` over the judged pairs, each for the first time and without cached results."""
    from posttrain.verify import math

    kinds = json.loads(PAIRS.read_text(encoding="utf-8"))
    math.prepare()
    times = []
    for gold, answer, _ in (pair for pairs in kinds.values() for pair in pairs):
        math.forget()
        started = time.perf_counter()
        math.equal(gold, answer)
        times.append(1000 * (time.perf_counter() - started))
    times.sort()
    shares = {"median": 0.5, "p99": 0.99, "p999": 0.999}
    found = {name: times[min(len(times) - 1, int(share * len(times)))] for name, share in shares.items()}
    return {"pairs": len(times), **found, "max": times[-1]}


def one_endless_row(workers: int, folder: Path) -> dict[str, float]:
    """Return the seconds of 1,000 quick rows alone, and with a row that never terminates."""
    script = folder / "slow.py"
    script.write_text(ENDLESS)
    quick = [Sample("x", {"answer": ""}) for _ in range(1000)]
    reward = Reward(use=f"{script}:slow", timeout_s=LIMIT)
    with Scorer([reward], Scoring(workers=workers, max_error_rate=1.0), None) as scorer:
        scorer.score(quick[:WARM])
        alone, _ = timed(scorer.score, quick)
        started = time.perf_counter()
        scores = scorer.score([*quick[:500], Sample("endless", {"answer": ""}), *quick[500:]])
        seconds = time.perf_counter() - started
    assert scores.rewards.count(1.0) == 1000 and scores.timeouts == {"slow": 1}
    return {"alone": alone, "with_it": seconds, "its_limit": LIMIT, "beyond_its_limit": seconds - LIMIT}


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    if "pairs" in options.kinds:  # first, in a process that has compared nothing yet
        found["pairs"] = time_pairs()
        print(
            "one comparison of {pairs} pairs: median {median:.2f} ms, 99% {p99:.1f} ms, 99.9% {p999:.1f} ms, longest"
            " {max:.1f} ms".format(**found["pairs"]),
            flush=True,
        )
    for kind in (kind for kind in options.kinds if kind != "pairs"):
        found[kind] = measure(kind, options.n if kind == "grouped" else options.n // 5, options.workers)
        s = found[kind]["seconds"]
        print(
            f"{kind:9} {found[kind]['rows']:6} rows: posttrain {s['posttrain']:.1f} s, loop {s['loop']:.1f} s, TRL"
            f" {s['trl']:.1f} s: {found[kind]['times_the_loop']:.2f} times the loop,"
            f" {found[kind]['share_of_ideal']:.2f} of {options.workers} loops (median of blocks"
            f" {statistics.median(found[kind]['share_of_ideal_by_block']):.2f}, in processor time"
            f" {found[kind]['loop_over_ours_in_processor_time']:.2f}); same scores as the loop on"
            f" {found[kind]['agreement_with_the_loop']:.1%}",
            flush=True,
        )
    if options.kinds != ["pairs"]:
        with tempfile.TemporaryDirectory() as folder:
            found["endless_row"] = one_endless_row(options.workers, Path(folder))
        print(
            "a row that never ends costs {with_it:.2f} s at a limit of {its_limit:g} s".format(**found["endless_row"])
        )
    found["load_after"] = os.getloadavg()[0]
    print(f"load of the machine {found['load_before']:.1f} before, {found['load_after']:.1f} after (1 minute)")
    write(found, options.out)


if __name__ == "__main__":
    main()
