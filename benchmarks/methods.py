"""Comparison of eight methods on one small task with equal budgets and three seeds.

    python benchmarks/methods.py      # 24 runs, two at a time, then docs/methods_study.md; a second call resumes
    python benchmarks/methods.py --seeds 0 --methods grpo,dapo --output runs/try --docs runs/try-docs

The task is the quickstart's (adding two 3-digit numbers; the demonstrations often forget a carry). Every method starts
from the same SFT model of its seed and sees the same prompts; the pipeline that runs is `OUTPUT/methods.yaml`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from posttrain.evaluate.estimators import bootstrap_ci, pass_contributions
from posttrain.evaluate.summary import format_interval
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.training_sections import Optim
from posttrain.report.curves import Point, compute_ticks, format_number, running_mean
from posttrain.run.metrics import read_metrics

METHODS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "lite_ppo", "dler", "gdpo")
START = "sft"
TASK = shipped_folder("recipes") / "quickstart_data.py"
TOKENS = 46  # maximum tokens of a completion; a right one has about 35
LIMIT = Optim().max_grad_norm or float("inf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c564b")


# --- runs ---


def pipeline(methods: Sequence[str], seeds: Sequence[int], lr: float, steps: int, parallel: int) -> dict[str, Any]:
    """Return a pipeline of SFT per seed, then each method and its evaluation. Methods differ only in `algorithm`.

    The budget is equal: the same number of steps of 32 prompts x 8 completions, generated once (no refills) and used
    for two updates. Recipe values override those of a preset, so values set here hold for all methods.
    """
    shared = {
        "rewards": [
            {"use": "math.accuracy", "params": {"extract": ["answer_tag"]}},
            {"use": "format.structure", "weight": 0.1},
        ],
        "scoring": {"workers": 1},
        "optim": {"betas": [0.9, 0.95]},
        "sampling": {"max_new_tokens": TOKENS},
        "eval": {"samples": 8, "k": [1, 8]},
    }
    start = {
        "name": START,
        "stage": "sft",
        "model": {"path": "tiny"},
        "data": {"source": f"{TASK}:demonstrations", "size": 19200},
        "batch": {"size": 32},
        "optim": {"lr": 4e-3, "weight_decay": 0.01, "schedule": "cosine", "warmup_steps": 20},
        "run": {"epochs": 1},
    }
    stages = [start, evaluation(START)]
    for name in methods:
        stages += [training(name, lr, steps), evaluation(name)]
    return {"stage": "pipeline", "seeds": list(seeds), "parallel": parallel, "defaults": shared, "stages": stages}


def training(name: str, lr: float, steps: int) -> dict[str, Any]:
    return {
        "name": name,
        "stage": "rl",
        "algorithm": name,
        "model": {"path": f"stage:{START}"},
        "data": {"source": f"{TASK}:problems", "size": 4000},
        "rollout": {"prompts_per_step": 32, "group_size": 8, "max_new_tokens": TOKENS, "max_gen_batches": 1},
        "batch": {"minibatches": 2},
        "optim": {"lr": lr, "warmup_steps": 5},
        "run": {"steps": steps},
    }


def evaluation(name: str) -> dict[str, Any]:
    data = {"source": f"{TASK}:held_out", "size": 300}
    return {"name": f"acc-{name}", "stage": "eval", "model": {"path": f"stage:{name}"}, "data": data}


def train(recipe: dict[str, Any], output: Path) -> None:
    """Run or resume the pipeline: finished stages are skipped. Raises CalledProcessError."""
    file = output.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(recipe, indent=2) + "\n")  # JSON is YAML
    again = ["--resume"] if output.exists() else []
    subprocess.run([sys.executable, "-m", "posttrain", "run", str(file), "--output", str(output), *again], check=True)


# --- results ---

Figures = dict[str, Any]


def figures(recipe: dict[str, Any], output: Path) -> Figures:
    """Return all numbers of the page: means with intervals of each model, by seed and pooled; curves by method."""
    seeds = recipe["seeds"]
    trained = [stage for stage in recipe["stages"] if stage["stage"] == "rl"]
    names = [START, *(stage["name"] for stage in trained)]
    runs = {name: [output / f"seed-{seed}" / name for seed in seeds] for name in names[1:]}
    environment = json.loads((output / "env.json").read_text())
    return {
        "settings": {"lr": trained[0]["optim"]["lr"], "steps": trained[0]["run"]["steps"], "seeds": seeds},
        "environment": {"cpus": environment["cpus"], "torch": environment["packages"]["torch"]},
        "seconds": {name: [seconds(run) for run in of] for name, of in runs.items()},
        "cut_gradients": {name: fmean(cut(run) for run in of) for name, of in runs.items()},
        "models": {name: measured([output / f"seed-{seed}" / f"acc-{name}" for seed in seeds]) for name in names},
        "curves": {name: curves(of) for name, of in runs.items()},
    }


def measured(evaluations: Sequence[Path]) -> dict[str, Any]:
    """Return for each measure its interval by seed, and the interval of the problems' means over seeds (`pooled`)."""
    tables = [[json.loads(line) for line in (path / "problems.jsonl").open()] for path in evaluations]
    if any([row["uid"] for row in table] != [row["uid"] for row in tables[0]] for table in tables):
        raise ValueError(f"not the same problems: {', '.join(map(str, evaluations))}")
    found = {}
    for measure in ("accuracy", "pass@8", "tokens"):
        by_seed = [values(table, measure) for table in tables]
        pooled = [fmean(problem) for problem in zip(*by_seed, strict=True)]
        found[measure] = {
            "pooled": asdict(bootstrap_ci(pooled)),
            "seeds": [asdict(bootstrap_ci(seed)) for seed in by_seed],
        }
    return found


def values(table: Sequence[Mapping[str, Any]], measure: str) -> list[float]:
    """Return one value per problem."""
    if measure != "pass@8":
        return [row[measure] for row in table]
    found = pass_contributions([row["scored"] for row in table], [row["right"] for row in table], 8)
    if found is None:
        raise ValueError("a completion could not be judged: pass@8 needs all 8 of each problem")
    return found


def curves(runs: Sequence[Path]) -> dict[str, list[float]]:
    """Return the mean over seeds at each step."""
    rows = [read_metrics(run) for run in runs]
    return {
        key: [fmean(row[key] for row in step) for step in zip(*rows, strict=True)] for key in ("correct", "entropy")
    }


def seconds(run: Path) -> float:
    return json.loads((run / "summary.json").read_text())["train_seconds"]


def cut(run: Path) -> float:
    """Return the share of steps with a clipped gradient, averaged over their updates."""
    return fmean(row["grad_norm"] > LIMIT for row in read_metrics(run))


# --- output ---


def table(found: Figures) -> str:
    """Return the pooled accuracy with its interval, then accuracies by seed with their intervals."""
    head = ["model", "accuracy", "pass@8", "mean tokens", *(f"accuracy, seed {s}" for s in found["settings"]["seeds"])]
    rows = []
    for name, of in found["models"].items():
        pooled = [format_interval(of["accuracy"]["pooled"]), format_interval(of["pass@8"]["pooled"])]
        tokens = f"{of['tokens']['pooled']['mean']:.1f}"
        shown = "the start, after SFT" if name == START else f"`{name}`"
        rows.append([shown, *pooled, tokens, *(format_interval(seed) for seed in of["accuracy"]["seeds"])])
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def seen(found: Figures) -> str:
    """Return sentences that hold for these numbers: spread by method and by seed, and methods separated on every
    seed."""
    by_method = {
        name: [seed["mean"] for seed in of["accuracy"]["seeds"]]
        for name, of in found["models"].items()
        if name != START
    }
    means = {name: fmean(seeds) for name, seeds in by_method.items()}
    best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    spread = max(max(seeds) - min(seeds) for seeds in by_method.values())
    passed = [of["pass@8"]["pooled"]["mean"] for name, of in found["models"].items() if name != START]
    apart = [
        f"`{a}` above `{b}`"
        for a, b in itertools.permutations(by_method, 2)
        if len(by_method[a]) > 1 and min(by_method[a]) > max(by_method[b])
    ]
    return (
        f"The highest mean (`{best}`, {means[best]:.3f}) and the lowest (`{worst}`, {means[worst]:.3f}) differ by "
        f"{means[best] - means[worst]:.3f}; two seeds of one method differ by up to {spread:.3f}. Pairs of methods in "
        "which every seed of one method is above every seed of the other: "
        f"{', '.join(apart) or 'none'} (of {len(by_method) * (len(by_method) - 1) // 2} pairs). pass@8 is "
        f"{min(passed):.3f} or more after training by any method."
    )


def chart(title: str, lines: Mapping[str, Sequence[Point]]) -> str:
    """Return an SVG with a running mean of three points for each name, and its legend."""
    width, height, left, right, top, bottom = 560, 260, 46, 110, 12, 24
    smooth = {name: running_mean(points, 3) for name, points in lines.items()}
    xs = [x for points in smooth.values() for x, _ in points]
    ys = [y for points in smooth.values() for _, y in points]
    ticks = compute_ticks(min(ys), max(ys), 4)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - min(xs)) / ((max(xs) - min(xs)) or 1)
        up = (y - ticks[0]) / (ticks[-1] - ticks[0])
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    drawn = []
    for tick in ticks:
        y = at(min(xs), tick)[1]
        drawn.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{format_number(tick)}</text>')
    for n, (name, points) in enumerate(smooth.items()):
        colour = COLOURS[n % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        drawn.append(f'<polyline stroke="{colour}" points="{path}"/>')
        drawn.append(f'<text x="{width - right + 12}" y="{top + 14 + 18 * n}" style="fill:{colour}">{name}</text>')
    drawn.append(f'<text x="{left}" y="{height - 6}">step {min(xs):g}</text>')
    drawn.append(f'<text x="{width - right}" y="{height - 6}" text-anchor="end">{max(xs):g}</text>')
    style = "text{font:12px sans-serif;fill:#444}line{stroke:#ddd}polyline{fill:none;stroke-width:1.8}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="white"/>{"".join(drawn)}</svg>\n'
    )


PAGE = """# Eight methods on one small task

```
python benchmarks/methods.py
```

This command writes the page. The task is the quickstart's: adding two 3-digit numbers, after SFT on demonstrations that
often forget a carry. For each seed, all methods start from the same SFT model and get the same prompts in the same
order: {steps} steps of 32 prompts x 8 completions, two updates a step, AdamW with learning rate {lr:g}, rewards
accuracy + 0.1 * format. Accuracy is on 300 held-out problems, 8 samples each at temperature 1.

{table}

In brackets: 95% bootstrap intervals over problems. The intervals of the first columns use each problem's mean over
{seeds}: they cover the variance from problems and sampling, not from training, which the columns by seed show.

{seen}

![share of right answers in training batches]({folder}/correct.svg)

![entropy of the policy, nats per token]({folder}/entropy.svg)

Means over the seeds; each point is the mean of three steps. Above: share of right answers in training batches; below:
entropy in nats per token. All figures: [figures.json]({folder}/figures.json). Measured with torch {torch} on {cpus}
CPU cores; the longest training took {longest} seconds.

## Limits of the study

- The model has 0.1 million parameters, and every solution of a problem takes about 35 tokens: the results do not apply
  to long reasoning, to length, or to large models. The methods use their presets, with the following exceptions.
- The budget is the same for all methods, so `dapo` and `dler` filter groups without a signal but do not generate new
  groups in their place.
- The rewards are the same for all methods: `dler` has no truncation reward (hardly any completion reaches the limit),
  and `gdpo`, which is for rewards that differ in scale, has little effect: the format is nearly always right.
- All methods make two updates per step; `gspo`'s preset has four. Methods for many updates or stale samples (`gspo`,
  `cispo`) are not tested in the setting that they are made for.
- All methods have one learning rate, which was chosen for the quickstart and not tuned for any method. Methods scale
  their loss differently (`dr_grpo` divides by a constant length, others by a standard deviation). Adam's step does not
  depend on a constant factor, but it does depend on clipping the gradient's norm at {limit:g}, which happened in
  {rarest} to {commonest} of the steps, depending on the method.
- Three seeds are few: a difference that they show may be chance, and a difference that they do not show may exist.
"""


def write(found: Figures, docs: Path) -> Path:
    """Write methods_study.md, its figures and curves to `docs`."""
    folder = docs / "methods_study"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    for key in ("correct", "entropy"):
        lines = {name: list(enumerate(curve[key], start=1)) for name, curve in found["curves"].items()}
        (folder / f"{key}.svg").write_text(chart(key, lines))
    settings = found["settings"]
    count = len(settings["seeds"])
    page = PAGE.format(
        steps=settings["steps"],
        lr=settings["lr"],
        table=table(found),
        seeds="one seed" if count == 1 else f"the {count} seeds",
        seen=textwrap.fill(seen(found), 120, break_on_hyphens=False),
        folder=folder.name,
        limit=LIMIT,
        rarest=f"{min(found['cut_gradients'].values()):.0%}",
        commonest=f"{max(found['cut_gradients'].values()):.0%}",
        longest=round(max(itertools.chain(*found["seconds"].values()))),
        **found["environment"],
    )
    (docs / "methods_study.md").write_text(page)
    return docs / "methods_study.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS), help="presets, with commas between")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--parallel", type=int, default=2, help="seeds side by side")
    parser.add_argument("--output", type=Path, default=Path("runs/methods"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    recipe = pipeline(given.methods.split(","), seeds, given.lr, given.steps, given.parallel)
    train(recipe, given.output)
    found = figures(recipe, given.output)
    print(f"{table(found)}\n\n{seen(found)}\n\nwrote {write(found, given.docs)}")


if __name__ == "__main__":
    main()
