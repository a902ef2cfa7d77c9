"""Two training processes on servers that die and join during training: the run equals an undisturbed one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.run.metrics import read_metrics

STEPS, PROMPTS, GROUP = 4, 6, 3
RL: dict[str, Any] = {
    "stage": "rl",
    "model": {"path": "tiny"},
    "data": {"source": "pairs.jsonl"},
    "rollout": {
        "engine": "vllm",
        "vllm": {"max_model_len": 200},
        "staleness": 1,
        "prompts_per_step": PROMPTS,
        "group_size": GROUP,
        "max_new_tokens": 8,
    },
    "rewards": [{"use": "digits.py:digits"}],
    "scoring": {"workers": 1},
    "corrections": [{"use": "tis"}],
    "optim": {"lr": 2e-3},
    "run": {"steps": STEPS, "samples_per_step": PROMPTS * GROUP},
}
CHANGES = {"rollout/servers", "rollout/servers_lost", "rollout/servers_joined", "rollout/repeated_requests"}


def test_dying_and_joining_servers_change_nothing(answer: Callable[..., Any], tmp_path: Path) -> None:
    """One of two servers kills itself in a request of a step, and another is added then. Every prompt has its group,
    every completion occurs once, tokens have their versions: metrics and samples equal those of one process and one
    server."""
    expected, drawn = run(answer, tmp_path / "alone" / "run", ranks=1, servers=1, spare=0, dies_at=None)
    rows, seeds = run(answer, tmp_path / "changing" / "run", ranks=2, servers=2, spare=1, dies_at=5)
    assert_same(rows, expected)
    first = [row["rollout/servers"] for row in rows]
    assert first[-2:] == [2, 2] and sum(row["rollout/servers_lost"] for row in rows) == 1
    assert sum(row["rollout/servers_joined"] for row in rows) == 1
    assert sum(row["rollout/repeated_requests"] for row in rows) >= 1
    whole, mine = ({seed for of_server in found for seed in of_server} for found in (drawn, seeds))
    assert len(seeds) == 3 and len(whole) == STEPS * PROMPTS and mine == whole, "other requests than without a change"
    samples, others = (
        [json.loads(line) for line in (tmp_path / name / "run" / "samples.jsonl").read_text().splitlines()]
        for name in ("changing", "alone")
    )
    assert samples == others and Counter((row["step"], row["group"]) for row in samples) == {
        (step, group): GROUP for step in range(1, STEPS + 1) for group in range(PROMPTS)
    }
    assert [row["version"] for row in samples[:: PROMPTS * GROUP]] == [0, 0, 1, 2]


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sharded_model_with_a_server(answer: Callable[..., Any], tmp_path: Path, lora: bool) -> None:
    """Two processes hold a part of every weight. A server that joins late gets full weights too, or the adapter."""
    model = {"path": "tiny", **({"lora": {"rank": 4}} if lora else {})}
    expected, _ = run(answer, tmp_path / "alone" / "run", model=model, ranks=1, servers=1, spare=0, dies_at=None)
    divided = {**model, "shard": True}
    rows, _ = run(answer, tmp_path / "divided" / "run", model=divided, ranks=2, servers=2, spare=1, dies_at=5)
    assert_same(rows, expected)
    assert rows[-1]["rollout/servers"] == 2 and all(row["grad_norm"] > 0 for row in rows)


def assert_same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Assert equality up to rounding, except for metrics about servers."""
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() - CHANGES:
            assert row[key] == pytest.approx(other[key], rel=1e-4, abs=2e-6), (row["step"], key)


@pytest.fixture(autouse=True)
def rows(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text(
        "def digits(completion, token_count):\n    return sum(c.isdigit() for c in completion) / max(token_count, 1)\n"
    )
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(20)))


def run(
    answer: Callable[..., Any], output: Path, model: dict[str, Any] | None = None, **job: Any
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the metrics, and the seeds requested from each server."""
    output.parent.mkdir()
    recipe = json.loads(json.dumps({**RL, "model": model or RL["model"]}))
    found = answer("served", recipe=recipe, base_dirs=[str(output.parent.parent)], output=str(output), resume=False,
                   lost_sync=None, engine=None, **job)  # fmt: skip
    assert set(found["codes"]) == {0}, found
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(output)]
    return rows, found["seeds"]
