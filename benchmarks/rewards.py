"""Scoring maths completions: posttrain's worker processes, a plain loop over math-verify, and TRL's accuracy_reward.

    python benchmarks/rewards.py [--n 10000] [--workers 2] [--out FILE]

Two sets of the same size: `integers`, where most golds are whole numbers as in school maths (posttrain compares those
without the library), and `expressions`, where none is, so that every side calls the library for every row. The three
sides score the same texts on the same machine, one after the other, each warmed up with a few rows; the loop and TRL
use one core. Last, one row that never ends is put among the others: it should cost its own limit and nothing else.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.recipe.sections import Reward, Scoring
from posttrain.verify.score import Sample, Scorer

WARM = 20
LIMIT = 2.0  # seconds, of the row that never ends
ENDLESS = """
import time
def slow(completion, answer):
    if completion == "endless":
        time.sleep(3600)
    return 1.0
"""
THOUGHT = "Let us see. We add the parts, then compare both sides of the equation, and simplify what is left. "


def rows(n: int, kind: str, seed: int = 0) -> list[tuple[str, str]]:
    """(completion, gold): half of them right, a tenth of the right ones in another form, a tenth without an answer."""
    draw = random.Random(f"{kind} {seed}")
    made = []
    for _ in range(n):
        gold, other = (_integer if kind == "integers" and draw.random() < 0.8 else _expression)(draw)
        luck = draw.random()
        said = gold if luck < 0.45 else other if luck < 0.5 else _expression(draw)[0]
        box = "" if luck > 0.9 else rf"So the answer is \boxed{{{said}}}."
        made.append((f"<think>\n{THOUGHT * draw.randint(1, 20)}\n</think>\n{box}", gold))
    return made


def _integer(draw: random.Random) -> tuple[str, str]:
    value = draw.randint(-999, 9999)
    return str(value), rf"\frac{{{2 * value}}}{{2}}"


def _expression(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(1, 40), draw.randint(2, 9)
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
    """What a user writes: gold and completion parsed by the library, and compared."""
    from math_verify import parse, verify

    return [float(verify(parse(f"${gold}$"), parse(text.rpartition("</think>")[2]))) for text, gold in made]


def trl(made: list[tuple[str, str]]) -> list[float | None]:
    """TRL's accuracy_reward on all rows."""
    from trl.rewards import accuracy_reward

    said = [[{"role": "assistant", "content": text.rpartition("</think>")[2]}] for text, _ in made]
    return list(accuracy_reward(said, [f"${gold}$" for _, gold in made]))


def pool(scorer: Scorer) -> Callable[[list[tuple[str, str]]], list[float | None]]:
    """posttrain's math.accuracy in worker processes."""
    return lambda made: scorer.score([Sample(text, {"answer": gold}) for text, gold in made]).rewards


def timed(score: Callable[..., Any], made: list[tuple[str, str]]) -> tuple[float, Any]:
    score(made[:WARM])
    started = time.perf_counter()
    found = score(made)
    return time.perf_counter() - started, found


def measure(kind: str, n: int, workers: int) -> dict[str, Any]:
    """Seconds of each side, ratios, and how often the sides agree."""
    made = rows(n, kind)
    with Scorer([Reward(use="math.accuracy")], Scoring(workers=workers), None) as scorer:
        pool(scorer)(made[: 50 * workers])  # all workers are up
        ours, scores = timed(pool(scorer), made)
    loop, plain = timed(plain_loop, made)
    theirs, _ = timed(trl, made)
    return {
        "kind": kind,
        "rows": n,
        "workers": workers,
        "seconds": {"posttrain": ours, "loop": loop, "trl": theirs},
        "times_the_loop": loop / ours,
        "times_trl": theirs / ours,
        "share_of_ideal": loop / ours / workers,
        "agreement_with_the_loop": sum(a == b for a, b in zip(scores, plain, strict=True)) / n,
    }


def one_endless_row(workers: int, folder: Path) -> dict[str, float]:
    """Seconds that 1,000 quick rows take alone, and with a row among them that never ends."""
    script = folder / "slow.py"
    script.write_text(ENDLESS)
    quick = [Sample("x", {"answer": ""}) for _ in range(1000)]
    reward = Reward(use=f"{script}:slow", timeout_s=LIMIT)
    with Scorer([reward], Scoring(workers=workers, max_error_rate=1.0), None) as scorer:
        alone, _ = timed(scorer.score, quick)  # type: ignore[arg-type]
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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    for kind in ("integers", "expressions"):
        found[kind] = measure(kind, options.n, options.workers)
        s = found[kind]["seconds"]
        print(
            f"{kind:12} posttrain {s['posttrain']:.1f} s, loop {s['loop']:.1f} s, TRL {s['trl']:.1f} s:"
            f" {found[kind]['times_the_loop']:.2f} times the loop, {found[kind]['share_of_ideal']:.2f} of"
            f" {options.workers} loops; same scores as the loop on {found[kind]['agreement_with_the_loop']:.1%}"
        )
    with tempfile.TemporaryDirectory() as folder:
        found["endless_row"] = one_endless_row(options.workers, Path(folder))
    print("a row that never ends costs {with_it:.2f} s at a limit of {its_limit:g} s".format(**found["endless_row"]))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
