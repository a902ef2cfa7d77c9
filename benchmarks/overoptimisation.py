"""Best-of-n selection with imperfect reward models: the true reward as n grows.

    python benchmarks/overoptimisation.py --out benchmarks/results/overoptimisation.json     # a CPU, minutes
    python benchmarks/overoptimisation.py --recompute benchmarks/results/overoptimisation.json

Answers are strings of letters; an answer's true reward is the mean value of its letters. Reward models (`posttrain
reward-model` on the tiny model) are trained on pairs of which about a third are labeled wrong, written with ten
letters. The policy that is selected from writes only some of these and, with varying frequency, one of ten other
letters that no model has seen, all of them bad: tricks. A model's score of a trick is arbitrary, and the more answers
there are, the likelier one of them scores high by mistake. For every n the answer with the highest score is selected;
its true reward is reported in standard deviations over all answers, so that 0 is a random answer.

Two policies: `best` writes the four best letters (its answers are good except for the tricks), `middle` four mediocre
letters with rightly low scores, so that unknown letters look good to all models. Rows: one model (the mean over five);
five models with different seeds, that is, different initial weights and data order (mean, wco, uwo as in arXiv
2310.02743).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sides

SEEN, UNSEEN = "abcdefghij", "klmnopqrst"
MEMBERS = 5
SIZES = (1, 4, 16, 64, 256)
POLICIES = {"best": slice(-4, None), "middle": slice(3, 7)}  # of the seen letters by worth
COEFS = (0.1, 0.5)  # of uwo


def main() -> None:
    args = arguments()
    if args.recompute:
        print(table(json.loads(args.recompute.read_text())))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.perf_counter()
    if args.smoke:
        args.groups, args.pairs, args.steps, args.answers = 1, 40, 2, 256
    settings = {k: getattr(args, k) for k in ("groups", "pairs", "steps", "noise", "harm", "prompts", "answers")}
    record = {"work": "overoptimisation", **sides.environment(None), "setting": settings, "rows": study(settings)}
    record["seconds"] = round(time.perf_counter() - started, 1)
    sides.write(record, args.out)
    print(table(record))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4, help="worlds, each with pairs and models of its own")
    parser.add_argument("--pairs", type=int, default=300, help="training pairs")
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps of 16 pairs")
    parser.add_argument("--noise", type=float, default=0.35, help="share of pairs that are labelled wrong")
    parser.add_argument("--harm", type=float, default=1.0, help="worth of unseen letters, times -1")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--answers", type=int, default=512, help="answers a prompt to pick from")
    parser.add_argument("--smoke", action="store_true", help="one small world: does the script run?")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--recompute", type=Path, metavar="FILE", help="print the table of a committed JSON")
    return parser.parse_args()


def study(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per world and way of scoring: `gold` and `proxy` of the selected answer, by n."""
    rows: list[dict[str, Any]] = []
    for group in range(settings["groups"]):
        print(f"world {group + 1} of {settings['groups']}", file=sys.stderr)
        world = World(group, settings)
        with tempfile.TemporaryDirectory(prefix="overoptimisation-") as folder:
            members = [trained(world, Path(folder), f"member-{n}", n) for n in range(MEMBERS)]
            for policy in POLICIES:
                world.write(policy)
                for way, found in scored_ways(scores(members, world)).items():
                    rows.append({"group": group, "policy": policy, "way": way.partition("/")[0], **world.picks(found)})
    return rows


def scored_ways(several: Any) -> dict[str, Any]:
    """Return scores [prompts,answers] by way of scoring."""
    ways = {f"one model/{n}": several[n] for n in range(MEMBERS)}
    ways |= {"mean of 5": ensemble(several, objective="mean"), "wco of 5": ensemble(several, objective="wco")}
    ways |= {f"uwo of 5, {c:g}": ensemble(several, objective="uwo", uwo_coef=c) for c in COEFS}
    return ways


def ensemble(found: Any, **settings: Any) -> Any:
    from posttrain.loss.reward_model import ensemble as combined

    return combined(found, **settings)


def scores(paths: list[str], world: World) -> Any:
    """Return scores [members,prompts,answers]; members are centered and scaled by held-out answers, as `use:
    reward_model` does."""
    import torch

    from posttrain.evaluate import model_reward

    model_reward.close_models()
    found = []
    for one in model_reward._load_models(paths, ".", "cpu", "auto"):
        rows = [
            ([{"role": "user", "content": str(number)}], None, None, answer)
            for number, answers in enumerate(world.answers)
            for answer in answers
        ]
        means, _ = model_reward._compute_outputs(one, rows, 16384)
        found.append((means - torch.tensor(one.card.center)) / torch.tensor(one.card.scale))
    return torch.cat(found, 1).T.reshape(-1, len(world.answers), len(world.answers[0]))


class World:
    """Letters with values, and which letters each writer uses. Letters absent from training are all bad."""

    def __init__(self, group: int, settings: dict[str, Any]) -> None:
        draw = random.Random(f"overoptimisation/{group}")
        self.settings, self.draw = settings, draw
        self.worth = {letter: draw.gauss(0, 1) for letter in SEEN}
        middle = statistics.mean(self.worth.values())
        self.worth = {letter: worth - middle for letter, worth in self.worth.items()}
        self.worth |= dict.fromkeys(UNSEEN, -settings["harm"])
        self.rows = [self.pair(n) for n in range(settings["pairs"])]

    def write(self, policy: str) -> None:
        """Return the answers of a policy, and their true rewards in standard deviations."""
        letters = sorted(SEEN, key=lambda letter: self.worth[letter])[POLICIES[policy]]
        prompts, answers = self.settings["prompts"], self.settings["answers"]
        self.answers = [[self.tricky(letters) for _ in range(answers)] for _ in range(prompts)]
        every = [self.gold(a) for answers in self.answers for a in answers]
        center, scale = statistics.fmean(every), statistics.pstdev(every)
        self.golds = [[(self.gold(a) - center) / scale for a in answers] for answers in self.answers]

    def tricky(self, letters: list[str]) -> str:
        trick, share = self.draw.choice(UNSEEN), self.draw.random()
        length = self.draw.randrange(6, 13)
        return "".join(trick if self.draw.random() < share else self.draw.choice(letters) for _ in range(length))

    def honest(self) -> str:
        return "".join(self.draw.choice(SEEN) for _ in range(self.draw.randrange(6, 13)))

    def gold(self, answer: str) -> float:
        return sum(self.worth[letter] for letter in answer) / len(answer)

    def pair(self, number: int) -> dict[str, str]:
        sides = sorted((self.honest() for _ in range(2)), key=self.gold)
        if self.draw.random() < self.settings["noise"]:
            sides.reverse()
        return {"prompt": str(number % 10), "rejected": sides[0], "chosen": sides[1]}

    def picks(self, scored: Any) -> dict[str, Any]:
        """Return expected true reward and score of the best of n, over prompts, both in standard deviations over all
        answers."""
        from posttrain.evaluate.best_of import expected_pick

        shown = ((scored - scored.mean()) / scored.std()).tolist()
        found: dict[str, Any] = {"gold": {}, "proxy": {}}
        for n in SIZES:
            gold, proxy = [], []
            for by, true in zip(shown, self.golds, strict=True):
                gold.append(expected_pick(by, true, n))
                proxy.append(expected_pick(by, by, n))
            found["gold"][str(n)], found["proxy"][str(n)] = statistics.mean(gold), statistics.mean(proxy)
        return found


def trained(world: World, folder: Path, name: str, seed: int) -> str:
    """Train a reward model on the world's pairs; seed: of its weights and of the order of the pairs."""
    from posttrain.pipeline import run_stage
    from posttrain.recipe.load import load_dict
    from posttrain.run.directory import RunDirectory

    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in world.rows))
    recipe = {
        "stage": "reward_model",
        "model": {"path": "tiny"},
        "data": {"source": str(path)},
        "objective": {"holdout": 0.1},
        "batch": {"size": 16},
        "optim": {"lr": 1e-3},
        "run": {"steps": world.settings["steps"], "seed": seed},
    }
    loaded = load_dict(recipe, base_dir=folder, where="benchmark")
    with RunDirectory.open(folder / name, name=name, text="", resolved=loaded.resolved) as directory:
        run_stage(loaded.recipe, directory)
    return str(folder / name / "final")


def table(record: dict[str, Any]) -> str:
    """Return one table per policy: true reward of the selected answer by n, mean over worlds with its standard error,
    its own score at the last n, the loss since the best n, and the difference from one model at the last n, world by
    world."""
    groups = sorted({row["group"] for row in record["rows"]})
    ways = list(dict.fromkeys(row["way"] for row in record["rows"]))
    parts = []
    for policy in POLICIES:
        rows = [row for row in record["rows"] if row["policy"] == policy]
        alone = [_of(rows, ways[0], group, "gold")[SIZES[-1]] for group in groups]
        head = [
            f"policy `{policy}`",
            *(f"n = {n}" for n in SIZES),
            "its own score",
            "lost since its best n",
            "less one model",
        ]
        lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for way in ways:
            gold, proxy = ([_of(rows, way, group, kind) for group in groups] for kind in ("gold", "proxy"))
            last = [one[SIZES[-1]] for one in gold]
            cells = [_mean([one[n] for one in gold]) for n in SIZES]
            cells += [_mean([one[SIZES[-1]] for one in proxy]), _mean([max(g.values()) - g[SIZES[-1]] for g in gold])]
            cells.append("" if way == ways[0] else _mean([a - b for a, b in zip(last, alone, strict=True)]))
            lines.append(f"| {way} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _of(rows: list[dict[str, Any]], way: str, group: int, kind: str) -> dict[int, float]:
    """Return by n the mean over a world's rows of one way."""
    own = [row[kind] for row in rows if (row["way"], row["group"]) == (way, group)]
    return {n: statistics.fmean(row[str(n)] for row in own) for n in SIZES}


def _mean(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {error:.2f}"


if __name__ == "__main__":
    main()
