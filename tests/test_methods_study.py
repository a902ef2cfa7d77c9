"""benchmarks/methods.py: methods are compared fairly, and the page matches its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.recipe.load import load_dict
from posttrain.registry import load_module

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "docs" / "methods_study"


@pytest.fixture
def methods() -> Any:
    return load_module(ROOT / "benchmarks" / "methods.py")


def figures(**accuracy: list[float]) -> dict[str, Any]:
    def measure(values: list[float]) -> dict[str, Any]:
        seeds = [{"mean": v, "low": v - 0.1, "high": v + 0.1} for v in values]
        mean = sum(values) / len(values)
        return {"pooled": {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}, "seeds": seeds}

    models = {
        name: {"accuracy": measure(a), "pass@8": measure([0.9] * len(a)), "tokens": measure([30.0] * len(a))}
        for name, a in accuracy.items()
    }
    curves = {name: {"correct": [0.1, 0.5, 0.9], "entropy": [0.3, 0.2, 0.1]} for name in accuracy if name != "sft"}
    return {"settings": {"lr": 1e-3, "steps": 3, "seeds": [0, 1]}, "models": models, "curves": curves}


def test_methods_differ_only_in_their_algorithm(methods: Any) -> None:
    recipe = methods.pipeline(methods.METHODS, [0, 1, 2], 3e-4, 30, 2)
    stages = load_dict(recipe, base_dir=ROOT, where="test").resolved["stages"]
    trained = [stage for stage in stages if stage["stage"] == "rl"]
    assert [stage["algorithm"] for stage in trained] == list(methods.METHODS)
    for key in ("model", "data", "rollout", "rewards", "scoring", "batch", "optim", "run"):
        assert all(stage[key] == trained[0][key] for stage in trained), key
    assert trained[0]["rollout"]["max_gen_batches"] == 1
    chosen = [{key: stage[key] for key in ("keep", "advantage", "loss", "kl")} for stage in trained]
    assert all(a != b for n, a in enumerate(chosen) for b in chosen[:n])  # and all methods differ


def test_intervals_by_seed_and_pooled_over_seeds(methods: Any, tmp_path: Path) -> None:
    """Seed 0 solves the first problem, seed 1 the second: 0.5 each; every problem's mean is 0.5, an interval of width
    0."""
    for seed, right in enumerate([(8, 0), (0, 8)]):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        rows = [
            {"uid": f"p{i}", "scored": 8, "right": c, "accuracy": c / 8, "tokens": 30 + i} for i, c in enumerate(right)
        ]
        (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = methods.measured([tmp_path / "0", tmp_path / "1"])
    assert [seed["mean"] for seed in found["accuracy"]["seeds"]] == [0.5, 0.5]
    assert [(seed["low"], seed["high"]) for seed in found["accuracy"]["seeds"]] == [(0.0, 1.0)] * 2
    assert (found["accuracy"]["pooled"]["low"], found["accuracy"]["pooled"]["high"]) == (0.5, 0.5)
    assert found["pass@8"]["pooled"]["mean"] == 0.5 and found["tokens"]["pooled"]["mean"] == 30.5
    (tmp_path / "1" / "problems.jsonl").write_text((tmp_path / "1" / "problems.jsonl").read_text().replace("p1", "p2"))
    with pytest.raises(ValueError, match="not the same problems"):
        methods.measured([tmp_path / "0", tmp_path / "1"])


def test_claims_hold_on_every_seed(methods: Any) -> None:
    """a is above b in all pairs of seeds; c overlaps with both."""
    said = methods.seen(figures(sft=[0.1, 0.2], a=[0.8, 0.9], b=[0.5, 0.6], c=[0.55, 0.85]))
    assert "(`a`, 0.850)" in said and "(`b`, 0.550) differ by 0.300" in said
    assert "differ by up to 0.300" in said
    assert "every seed of the other: `a` above `b` (of 3 pairs)" in said
    assert "other: none (of 1 pairs)" in methods.seen(figures(sft=[0.1, 0.2], a=[0.5, 0.7], b=[0.6, 0.8]))


def test_page_is_up_to_date_with_the_figures(methods: Any, tmp_path: Path) -> None:
    """docs/methods_study.md and its curves equal the output for figures.json."""
    found = json.loads((STUDY / "figures.json").read_text())
    methods.write(found, tmp_path)
    assert (tmp_path / "methods_study.md").read_text() == (ROOT / "docs" / "methods_study.md").read_text()
    for name in ("correct.svg", "entropy.svg", "figures.json"):
        assert (tmp_path / "methods_study" / name).read_text() == (STUDY / name).read_text()
    assert set(found["models"]) == {"sft", *methods.METHODS} and found["settings"]["seeds"] == [0, 1, 2]
