"""Published systems over prompt samplers and `data.select`, through the command line on a tiny model: each test checks
the system's effect. Three steps each, more if a prompt must be sampled twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.data.rows import load_rows
from posttrain.recipe.sections import Data
from posttrain.run.metrics import read_metrics

pytestmark = pytest.mark.slow
Values = dict[str, Any]

REWARDS = '''
def short(completion, token_count):
    """Right now and then, also for a model that knows nothing; the completion decides."""
    return float(sum(map(ord, completion)) % 3 == 0)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(12):
            file.write(json.dumps({"prompt": f"[{i}] {i}+{i}=", "difficulty": i / 12}) + "\n")
    return tmp_path


def ran(
    folder: Path, algorithm: str, steps: int = 3, *, name: str = "run", **changes: Any
) -> tuple[list[Values], list[Values]]:
    """Return metrics and all samples of a run of the preset."""
    recipe: Values = {
        "stage": "rl",
        "algorithm": algorithm,
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8, **changes.pop("rollout", {})},
        "rewards": [{"use": "rewards.py:short", "correct": True}],
        "scoring": {"workers": 1, "correct_at": 0.9},
        "optim": {"lr": 1e-2},
        "run": {"steps": steps, "samples_per_step": 99},
        **changes,
    }
    (folder / "r.yaml").write_text(json.dumps(recipe))
    done = CliRunner().invoke(app, ["rl", str(folder / "r.yaml"), "--output", str(folder / name)])
    assert done.exit_code == 0, done.output
    return read_metrics(folder / name), read_samples(folder / name)


def read_samples(run: Path) -> list[Values]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def numbers(samples: list[Values], step: int) -> set[int]:
    """Return the rows of rows.jsonl that a step sampled."""
    return {n for n in range(12) for s in samples if s["step"] == step and f"[{n}]" in s["prompt"]}


def test_groups_outside_the_band_are_replaced(folder: Path) -> None:
    metrics, samples = ran(folder, "balanced_difficulty_filter")
    assert any(row["rollout/gen_batches"] > 1 for row in metrics)
    by_group: dict[tuple[int, int], list[bool]] = {}
    for s in samples:
        by_group.setdefault((s["step"], s["group"]), []).append(s["correct"])
    rates = [sum(group) / len(group) for group in by_group.values()]
    assert rates and all(0.2 <= rate <= 0.8 for rate in rates)


def test_value_head_selects_the_prompts(folder: Path) -> None:
    """After the warm-up it has learned, and the prompts differ from the next ones of the uniform order."""
    sampler = {"use": "pcl", "candidate_factor": 2, "warmup_steps": 1, "value_lr": 0.05}
    metrics, samples = ran(folder, "pcl", 3, sampler=sampler)
    assert all(row["sampler/value_loss"] >= 0 for row in metrics)
    _, uniform = ran(folder, "pcl", name="uniform", sampler={**sampler, "warmup_steps": 9})
    drawn = [[numbers(found, step) for step in (1, 2, 3)] for found in (samples, uniform)]
    assert drawn[0][0] == drawn[1][0] and drawn[0][1:] != drawn[1][1:]


def test_bins_of_difficulty_get_unequal_weights_and_rollouts(folder: Path) -> None:
    sampler = {"use": "gdro", "history_len": 2, "hysteresis": 0.0, "eta": 5.0}
    metrics, samples = ran(folder, "gdro", 6, sampler=sampler, data={"source": "rows.jsonl", "size": 4})
    assert any(row["sampler/largest_group"] > row["sampler/smallest_group"] for row in metrics)
    assert all(row["rollout/rows"] <= 16 + 4 for row in metrics) and metrics[0]["rollout/rows"] == 16
    assert len([key for key in metrics[-1] if key.startswith("sampler/bin_loss/")]) >= 2
    assert samples


def test_curriculum_stage_advances(folder: Path) -> None:
    """Of three stages by the column: nothing above 0.3 in the first step, something in the last."""
    sampler = {"use": "curriculum_stage", "column": "difficulty", "temperature": 0.1}
    _, samples = ran(folder, "curriculum_stage", 3, sampler=sampler)
    hardest = [max(numbers(samples, step)) / 12 for step in (1, 2, 3)]
    assert hardest[0] <= 0.3 < hardest[1] <= 0.6 < hardest[2]


def test_prompts_solved_by_greedy_decoding_are_skipped(folder: Path) -> None:
    metrics, _ = ran(folder, "self_curation")
    assert all(row["sampler/measured"] >= 4 for row in metrics)
    assert any(row["sampler/prompts"] < 4 for row in metrics) and any(
        row["sampler/greedy_solved"] > 0 for row in metrics
    )


def test_prompts_with_high_kl_are_set_aside_and_return(folder: Path) -> None:
    sampler = {"use": "taco", "interval": 3, "threshold": 1e-3, "band": False}
    metrics, samples = ran(folder, "taco", 4, sampler=sampler)
    assert max(row["signal/dropped"] for row in metrics) > 0
    aside = [row["sampler/set_aside"] for row in metrics]
    assert max(aside[:2]) > 0, "buffered, and given no gradient"
    before = numbers(samples, 2) | numbers(samples, 3)
    assert numbers(samples, 4) & before, "handed back after the third step"


def test_rollouts_are_allocated_to_prompts_with_different_rewards(folder: Path) -> None:
    metrics, samples = ran(folder, "xrpo", rollout={"group_size": 6})
    assert any(row["sampler/largest_group"] > row["sampler/smallest_group"] for row in metrics)
    assert all(row["rollout/rows"] == 24 and row["sampler/smallest_group"] >= 3 for row in metrics)
    sizes: dict[tuple[int, int], list[float]] = {}
    for s in samples:
        sizes.setdefault((s["step"], s["group"]), []).append(s["reward"])
    longest = max(sizes.values(), key=len)
    assert 0 < sum(longest[:3]) < 3 or all(len(group) == 6 for group in sizes.values())


def pipeline(name: str, folder: Path) -> Path:
    done = CliRunner().invoke(app, ["run", name, "--output", str(folder / "run")])
    assert done.exit_code == 0, done.output
    return folder / "run"


def stage(run: Path, name: str) -> Path:
    return next(path for path in run.glob(f"seed-0/*{name}") if path.is_dir())


def read_uids(run: Path) -> set[str]:
    return {sample["uid"] for sample in read_samples(run)}


def read_accuracies(run: Path) -> dict[str, float]:
    problems = map(json.loads, (run / "problems.jsonl").read_text().splitlines())
    return {row["uid"]: row["accuracy"] for row in problems}


def test_pools_shrink_to_the_hardest_problems(folder: Path) -> None:
    """DRIVE: each phase trains on the problems of the previous phase with the lowest pass rate by the newest model."""
    run = pipeline("drive_tiny", folder)
    first, second = read_accuracies(stage(run, "rates-1")), read_accuracies(stage(run, "rates-2"))
    pools = read_uids(stage(run, "hard-1")), read_uids(stage(run, "hard-2"))
    assert len(first) == 24 and len(second) == 12
    assert max(first[uid] for uid in second) <= min(rate for uid, rate in first.items() if uid not in second)
    assert pools[0] <= set(second) and pools[1] <= set(second)
    kept = sorted(second.values())[:6]
    assert all(second[uid] <= kept[-1] for uid in pools[1])


def test_easy_rows_train_sft_and_hard_rows_train_rl(folder: Path) -> None:
    """DeReason: the two stages share no row, and each has its scores."""
    run = pipeline("dereason_tiny", folder)
    source = {"source": "data/scored_sums.py:rows", "size": 56}
    rows = {row["uid"]: row["reasoning"] for row in load_rows(Data.model_validate(source), Path("recipes").resolve())}
    trained = read_uids(stage(run, "hard"))
    assert trained and all((rows[uid] or 0) >= 4 for uid in trained)
    assert read_metrics(stage(run, "easy"))[-1]["loss"] < read_metrics(stage(run, "easy"))[0]["loss"]


def test_benchmark_rows_are_excluded_and_the_band_is_kept(folder: Path) -> None:
    """Light-R1: the first eight rows are the benchmark's; RL trains on pass rates from 0.2 to 0.625."""
    run = pipeline("light_r1_tiny", folder)
    source = Data.model_validate({"source": "data/scored_sums.py:rows", "size": 56})
    uids = [row["uid"] for row in load_rows(source, Path("recipes").resolve())]
    found = read_accuracies(stage(run, "rates-2"))
    assert set(found) == set(uids[8:])
    trained = read_uids(stage(run, "rl"))
    assert trained and all(0.2 <= found[uid] <= 0.625 for uid in trained)


def test_tasks_that_succeed_get_fewer_and_shorter_rollouts(folder: Path) -> None:
    """DART: four tasks per step and four in total, so each comes in every step. Often solved tasks have fewer than four
    rollouts, down to two; solved tasks are truncated at 1.5 times their longest success, as stored in the previous
    step's state."""
    rows = [json.dumps({"prompt": f"[{i}] {i}+{i}=", "difficulty": 0}) for i in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    sampler = {"use": "by_task", "above": 0.3, "least": 2, "slack": 1.5, "shortest": 2, "window": 8}
    metrics, samples = ran(
        folder, "dart", 4, sampler=sampler, replay=None, rollout={"max_new_tokens": 24, "stop": ["a", "e"]}
    )
    assert metrics[0]["sampler/smallest_group"] == 4 and min(row["sampler/smallest_group"] for row in metrics[1:]) < 4
    longest: dict[str, int] = {}
    right: dict[str, list[bool]] = {}
    cut = 0
    for step in range(1, 5):
        groups: dict[str, list[Values]] = {}
        for sample in samples:
            if sample["step"] == step:
                groups.setdefault(sample["prompt"], []).append(sample)
        for prompt, own in groups.items():
            most = min(24, max(2, -(-3 * longest[prompt] // 2))) if prompt in longest else 24
            assert all(sample["tokens"] <= most for sample in own)
            cut += sum(sample["tokens"] == most < 24 for sample in own)
            known = right.get(prompt, [])[-8:]
            rate = sum(known) / len(known) if known else 0.0
            assert len(own) == (4 if rate <= 0.3 else max(2, math.ceil(4 * (1 - rate) / 0.7 - 1e-9)))
        for prompt, own in groups.items():
            right.setdefault(prompt, []).extend(sample["correct"] for sample in own)
            done = [sample["tokens"] for sample in own if sample["correct"]]
            longest |= {prompt: max([longest.get(prompt, 0), *done])} if done else {}
    assert cut > 0
