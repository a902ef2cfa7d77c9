"""Data-parallel ranks (gloo, on the CPU) compute what one rank computes, and a run may change their number when it
resumes."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.errors import PeerLost
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.train import distributed, saved_rollouts
from posttrain.train.load_balancing import split_rows
from posttrain.train.row_plan import micro_size
from posttrain.verify.failures import Calls

Values = dict[str, Any]
Train = Callable[..., list[int]]

DIGITS = """
def digits(completion, token_count):
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def moody(completion):
    return 1 / (len(completion) % 7)
"""
# Three prompts for two ranks; groups that are refilled; statistics over the batch; two updates a step, which need
# old_logp; a reference; a controller that reads the metrics.
RL: Values = {
    "stage": "rl",
    "algorithm": "dapo",
    "model": {"path": "tiny", "lora": {"rank": 4}},
    "data": {"source": "pairs.jsonl"},
    "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 10, "max_gen_batches": 20},
    "rewards": [{"use": "digits.py:digits"}, {"use": "digits.py:moody", "weight": 0}],
    "scoring": {"workers": 1, "correct_at": 0.15},
    "advantage": {"use": "group", "scale": "batch"},
    "kl": {"coef": 0.05},
    "batch": {"minibatches": 2},
    "controllers": {"kl.coef": {"use": "adaptive_kl", "target": 0.01}},
    "optim": {"lr": 2e-3},
}
# Difficulty that follows the policy; it is in the checkpoint and equal on all ranks.
TASKS: Values = {
    "stage": "rl",
    "algorithm": "scaler",
    "model": {"path": "tiny", "lora": {"rank": 4}},
    "data": {
        "mix": [
            {"source": f"task:{name}", "size": 30, "params": {"levels": [0, 1, 2]}}
            for name in ("countdown", "random_calculation")
        ]
    },
    "sampler": {"use": "scaler", "target": 0.3, "gain": 1.0},
    "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 10},
    "rewards": [{"use": "digits.py:digits"}],
    "scoring": {"workers": 1, "correct_at": 0.15, "max_bad_gold": 1},
    "optim": {"lr": 2e-3},
}
SFT: Values = {
    "stage": "sft",
    "model": {"path": "tiny"},
    "data": {"source": "rows.jsonl"},
    "batch": {"size": 6, "micro_size": 2},
    "optim": {"lr": 3e-3, "weight_decay": 0.1},
}
# 3 pairs a step for two ranks: one rank has two. The last step of an epoch has a single pair.
DPO: Values = {
    "stage": "dpo",
    "model": {"path": "tiny"},
    "data": {"source": "pairs.jsonl", "size": 10},
    "batch": {"size": 3},
    "optim": {"lr": 1e-3},
}

REWARD_MODEL: Values = {
    **DPO,
    "stage": "reward_model",
    "objective": {"heads": 2, "share": 0.7, "holdout": 0.2},
}


@pytest.fixture(scope="module")
def train(answer: Callable[..., Any]) -> Train:
    """Train in separate processes (ranked.py); return their exit statuses."""

    def run(
        recipe: Values | str,
        output: Path,
        *,
        ranks: int,
        resume: bool = False,
        lost_sync: Any = None,
        engine: str | None = None,
        base_dirs: Sequence[Path] = (),
    ) -> list[int]:
        work = {"work": recipe} if isinstance(recipe, str) else {"recipe": recipe}
        job = {**work, "base_dirs": [str(path) for path in base_dirs or [output.parent]], "output": str(output)}
        return list(answer("ranked", **job, resume=resume, ranks=ranks, lost_sync=lost_sync, engine=engine))

    return run


@pytest.fixture(scope="module")
def unbroken(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of an unbroken run, by recipe and number of ranks: tests with equal data share one run."""
    known: dict[tuple[str, int], Path] = {}

    def run(recipe: Values, folder: Path, ranks: int = 1) -> Path:
        key = (json.dumps(recipe, sort_keys=True), ranks)
        if key not in known:
            output = tmp_path_factory.mktemp("unbroken") / "run"
            assert train(recipe, output, ranks=ranks, base_dirs=[folder]) == [0] * ranks
            known[key] = output
        return known[key]

    return run


@pytest.fixture
def folder(sft_recipe: Any, dpo_recipe: Any, tmp_path: Path) -> Path:
    """Holds rows, pairs and a reward."""
    del sft_recipe, dpo_recipe  # they write the rows
    (tmp_path / "digits.py").write_text(DIGITS)
    return tmp_path


def rows_of(output: Path) -> list[Values]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(output)]


def assert_same_metrics(rows: list[Values], others: list[Values], rel: float = 1e-4) -> None:
    """Assert equality up to rounding, because sums have another order. Values that are 0 up to rounding are compared
    absolutely. A bound may be None."""
    assert len(rows) == len(others) > 0
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            expected = other[name] if other[name] is None else pytest.approx(other[name], rel=rel, abs=2e-6)
            assert value == expected, (row["step"], name)


@pytest.mark.parametrize(
    "recipe", [SFT, DPO, REWARD_MODEL, RL, TASKS], ids=["sft", "dpo", "reward_model", "rl", "tasks"]
)
def test_two_ranks_equal_one_and_each_resumes_the_other(
    train: Train, unbroken: Any, recipe: Values, folder: Path
) -> None:
    """Loss, gradient norm and every other metric; one process resumes a run of two, and the other way round."""
    upto = {n: {**recipe, "run": {"steps": n, "save_every": 2}} for n in (2, 3, 4)}
    one, two = unbroken(upto[4], folder), folder / "two"
    expected = rows_of(one)
    assert all(row["grad_norm"] > 0 for row in expected)
    shutil.copytree(unbroken(upto[2], folder, ranks=2), two)
    assert_same_metrics(rows_of(two), expected[:2])
    assert train(upto[3], two, ranks=1, resume=True) == [0]
    assert train(upto[4], two, ranks=2, resume=True) == [0, 0]
    assert_same_metrics(rows_of(two), expected)
    newest = [checkpoints.latest(run / "checkpoints", hashes=True) for run in (one, two)]
    states = [json.loads((path / "state.json").read_text()) for path in newest if path]
    if recipe is RL:  # failing calls are counted once, on whichever rank
        assert (
            states[0]["calls"] == states[1]["calls"]
            and sum(Calls._make(c).errors["moody"] for c in states[0]["calls"]) > 0
        )
    if recipe is TASKS:
        assert states[0]["sampler"] == states[1]["sampler"] and any(states[0]["sampler"]["d"].values())
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, two)]
    assert summaries[0]["num_tokens"] == summaries[1]["num_tokens"]
    assert len((two / "metrics.jsonl").read_text().splitlines()) == 4, "one rank writes"


@pytest.mark.parametrize("recipe", [SFT, DPO, RL], ids=["sft", "dpo", "rl"])
def test_gradients_are_reduced_once_per_update(train: Train, recipe: Values, folder: Path) -> None:
    """Whatever the number of micro-batches of a rank: two or more here, of a row or two each."""
    batch = {"minibatches": 2, "micro_tokens": 40} if recipe is RL else {"size": 4, "micro_size": 1}
    assert train({**recipe, "batch": batch, "run": {"steps": 1}}, folder / "run", ranks=2) == [0, 0]
    (row,) = rows_of(folder / "run")
    assert row["updates"] == (2 if recipe is RL else 1)
    assert int((folder / "sums of gradients").read_text()) == row["updates"]  # see ranked.py


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": {"use": "gdro", "hysteresis": 0.0}, "factors": ["prompt_gdro"]},
        {"sampler": {"use": "xrpo", "rounds": 2}},
        {"sampler": "self_curation"},
        {"sampler": {"use": "pcl", "candidate_factor": 2, "warmup_steps": 1, "metric": "reward"}},
    ],
    ids=["gdro", "xrpo", "self_curation", "pcl"],
)
def test_prompt_sampler_does_not_depend_on_the_number_of_ranks(train: Train, changes: Values, folder: Path) -> None:
    """Groups of several sizes, rounds of one step, predicted values; three prompts for two ranks."""
    recipe = {**RL, "algorithm": "grpo", "rollout": {**RL["rollout"], "max_gen_batches": 1}, **changes}
    recipe = {**recipe, "run": {"steps": 3}}
    assert train(recipe, folder / "one", ranks=1) == [0]
    assert train(recipe, folder / "two", ranks=2) == [0, 0]
    assert_same_metrics(rows_of(folder / "two"), rows_of(folder / "one"))
    newest = [checkpoints.latest(folder / name / "checkpoints") for name in ("one", "two")]
    states = [json.loads((path / "state.json").read_text())["sampler"] for path in newest if path]
    assert len(states) == 2 and states[0].keys() == states[1].keys()


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        (
            {"algorithm": "brpo"},
            {"use": "budgets", "budgets": [3, 9], "num_answers": 2, "closing": "!", "answer_tokens": 4},
        ),
        ({"algorithm": "t_ppo"}, {"use": "windows", "window": 4}),
        ({"algorithm": "s_grpo"}, {"use": "serial_exit", "num_exits": 3, "inducer": "!", "answer_tokens": 5}),
        ({"algorithm": "delethink"}, {"use": "chunks", "keep_head": 1, "keep_tail": 3, "max_chunks": 4}),
        ({"algorithm": "deepsearch"}, {"use": "mcts", "segment_tokens": 3, "width": 2, "max_depth": 3, "paths": 3}),
        (
            {
                "algorithm": "igpo",
                "scoring": {"workers": 1, "correct_at": 0.15, "split": "lines"},
                "advantage": {"use": "answer_gain", "answer": "chosen"},
            },
            None,
        ),
    ],
)
def test_rollout_shapes_do_not_depend_on_the_number_of_ranks(
    train: Train, changes: Values, shape: Values | None, folder: Path
) -> None:
    """Rollouts that call the engine again, or whose turns are scored by the answer's log-prob; three prompts for two
    ranks."""
    rollout = {"prompts_per_step": 3, "group_size": 2, "max_new_tokens": 10, **({"shape": shape} if shape else {})}
    base = {key: RL[key] for key in ("stage", "model", "data", "scoring", "optim")}
    rewards = [{"use": "digits.py:digits", "correct": True}]
    recipe = {**base, **changes, "rewards": rewards, "rollout": rollout, "run": {"steps": 3}}
    assert train(recipe, folder / "one", ranks=1) == [0]
    assert train(recipe, folder / "two", ranks=2) == [0, 0]
    expected = rows_of(folder / "one")
    assert_same_metrics(rows_of(folder / "two"), expected)
    assert any(row["grad_norm"] > 0 for row in expected)


def test_workflow_calls_do_not_depend_on_the_number_of_ranks(train: Train, folder: Path) -> None:
    """Critiques of an answer and the answers that follow, each role with its own adapter, in updates some of which have
    rows of one role only; three prompts for two ranks."""
    workflow = {"use": "critique_refine", "critiques": 2, "max_prompt_tokens": 300, "train": ["critic", "refiner"]}
    rollout = {"prompts_per_step": 3, "group_size": 2, "max_new_tokens": 10, "workflow": workflow}
    base = {key: RL[key] for key in ("stage", "model", "data", "scoring", "optim")}
    rewards = [{"use": "digits.py:digits", "reads": "refiner", "correct": True}]
    recipe = {
        **base,
        "model": {"path": "tiny", "lora": {"rank": 2, "adapters": ["refiner", "critic"]}},
        "batch": {"minibatches": 4},
        "advantage": "agent",
        "rewards": rewards,
        "rollout": rollout,
        "run": {"steps": 3},
    }
    assert train(recipe, folder / "one", ranks=1) == [0]
    assert train(recipe, folder / "two", ranks=2) == [0, 0]
    expected = rows_of(folder / "one")
    assert_same_metrics(rows_of(folder / "two"), expected)
    assert any(row["grad_norm"] > 0 for row in expected) and expected[0]["roles/refiner/calls"] == 2.0
    assert {name for row in expected for name in row if name.startswith("grad_norm/")} == {
        "grad_norm/refiner",
        "grad_norm/critic",
    }


def test_idle_pass_does_not_change_unused_adapters(train: Train, folder: Path) -> None:
    """Updates of a row or two on two ranks that shard the base. The idle pass of a rank without a row may use the other
    role's adapter: a gradient of 0 would apply weight decay to it."""
    (folder / "flows.py").write_text(
        "async def speak(row, call):\n"
        "    said = await call('actor', row['prompt'], max_tokens=6)\n"
        "    await call('critic', 'Judge: ' + said.text, parent=said, max_tokens=6)\n"
    )
    recipe: Values = {
        **{key: RL[key] for key in ("stage", "data", "scoring")},
        "model": {"path": "tiny", "lora": {"rank": 2, "adapters": ["critic", "actor"]}},
        "batch": {"minibatches": 8},
        "rewards": [{"use": "digits.py:digits"}],
        "rollout": {
            "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 10, "workflow": {"use": "./flows.py:speak"}
        },
        "optim": {"lr": 2e-3, "weight_decay": 0.1},
        "run": {"steps": 2},
    }  # fmt: skip
    assert train(recipe, folder / "one", ranks=1) == [0]
    divided = {**recipe, "model": {**recipe["model"], "parallel": {}}}
    assert train(divided, folder / "parts", ranks=2) == [0, 0]
    expected = rows_of(folder / "one")
    assert_same_metrics(rows_of(folder / "parts"), expected)
    assert all(row["updates"] > 2 and min(row["grad_norm/actor"], row["grad_norm/critic"]) > 0 for row in expected)
    for adapter in ("actor", "critic"):
        place = Path("checkpoints", "step-00000002", adapter, "adapter_model.safetensors")
        weights = [load_file(folder / name / place) for name in ("one", "parts")]
        for key, weight in weights[0].items():
            torch.testing.assert_close(weights[1][key], weight, rtol=1e-4, atol=1e-6)


def test_workflow_memory_does_not_depend_on_the_number_of_ranks(train: Train, folder: Path) -> None:
    """Every rank learns from the rollouts of all ranks; remembered rows are trained on in the next step."""
    (folder / "flow.py").write_text(
        "from posttrain.workflows.protocol import Learned\n"
        "class Notes:\n"
        "    late = ('writer',)\n"
        "    async def run(self, row, call):\n"
        "        said = await call('solver', row['prompt'] + str((call.memory or [{'text': ''}])[-1]['text']))\n"
        "        await call('writer', 'Note: ' + said.text, parent=said)\n"
        "    def learn(self, memory, outcomes, step):\n"
        "        fresh = [{'text': m.text, 'row': m.row} for one in outcomes for m in one.by('writer')]\n"
        "        again = [(note['row'], 1.0 - n) for n, note in enumerate(memory or [])]\n"
        "        return Learned(fresh, again, {'notes': len(again)})\n"
    )
    rollout = {"prompts_per_step": 3, "group_size": 2, "max_new_tokens": 6, "workflow": "flow.py:Notes"}
    base = {key: RL[key] for key in ("stage", "model", "data", "scoring", "optim")}
    rewards = [{"use": "digits.py:digits", "correct": True}]
    recipe = {**base, "rewards": rewards, "rollout": rollout, "run": {"steps": 2}}
    assert train(recipe, folder / "one", ranks=1) == [0]
    assert train(recipe, folder / "two", ranks=2) == [0, 0]
    expected = rows_of(folder / "one")
    assert_same_metrics(rows_of(folder / "two"), expected)
    assert [row["notes"] for row in expected] == [0, 6] and all(row["grad_norm"] > 0 for row in expected)


def count_rows_by_rank(folder: Path, ranks: int) -> list[list[list[int]]]:
    """Return by step and rank: rows of the step, rows the rank trained on, rows whose tokens it had."""
    return list(zip(*(json.loads((folder / f"rows of rank {rank}").read_text()) for rank in range(ranks)), strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_the_tokens_of_their_own_rows_only(train: Train, unbroken: Any, folder: Path, ranks: int) -> None:
    """Metrics, samples and saved rollouts equal those of one process; with four ranks one of them samples nothing."""
    recipe = {**RL, "algorithm": "grpo", "rollout": {**RL["rollout"], "max_gen_batches": 1}}
    recipe |= {"batch": {"minibatches": 2, "epochs": 2}, "run": {"steps": 2, "keep_rollouts": 2, "samples_per_step": 6}}
    one, several = unbroken(recipe, folder), folder / "several"
    assert train(recipe, several, ranks=ranks) == [0] * ranks
    assert_same_metrics(rows_of(several), rows_of(one))
    for step in count_rows_by_rank(folder, ranks):
        assert [here for _, _, here in step] == [own for _, own, _ in step], "neither more nor less"
        assert sum(own for _, own, _ in step) == step[0][0] == 12 and all(own > 0 for _, own, _ in step)
    lines = [(run / "samples.jsonl").read_text().splitlines() for run in (one, several)]
    assert lines[0] == lines[1] and len(lines[0]) == 12
    for step in (1, 2):
        whole, divided = (saved_rollouts.read(run, step) for run in (one, several))
        torch.testing.assert_close(divided.logp, whole.logp, rtol=1e-4, atol=1e-5)
        fields = [(item.name, getattr(whole.batch, item.name)) for item in dataclasses.fields(whole.batch)]
        for name, value in fields:
            found = getattr(divided.batch, name)
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
            else:
                assert isinstance(found, type(value)) and (not isinstance(value, dict) or found.keys() == value.keys())


@pytest.mark.parametrize("algorithm", ["replay_success", "skywork_ssb", "rorecomp"])
def test_replay_does_not_depend_on_the_number_of_ranks(train: Train, algorithm: str, folder: Path) -> None:
    """Groups fail often, and the same four prompts come in each step: some rows of two ranks are replayed."""
    (folder / "few.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(4)))
    (folder / "sparse.py").write_text("def sparse(completion):\n    return float(sum(map(ord, completion)) % 8 == 0)\n")
    recipe: Values = {
        "stage": "rl",
        "algorithm": algorithm,
        **({"replay": {"use": "compensation", "size": 4, "p_end": 1.0}} if algorithm == "rorecomp" else {}),
        "model": {"path": "tiny"},
        "data": {"source": "few.jsonl"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6},
        "rewards": [{"use": "sparse.py:sparse", "correct": True}],
        "scoring": {"workers": 1, "correct_at": 0.5},
        "optim": {"lr": 1e-3},
        "run": {"steps": 4, "save_every": 2},
    }
    assert train(recipe, folder / "one", ranks=1) == [0]
    assert train(recipe, folder / "two", ranks=2) == [0, 0]
    assert_same_metrics(rows_of(folder / "two"), rows_of(folder / "one"))
    assert sum(row["replay/rows"] + row.get("replay/apart_rows", 0) for row in rows_of(folder / "two")) > 0
    stored = [
        [(row["prompt"], row["stored"]["step"], row["segments"][0]["ids"]) for row in json.loads(path.read_text())]
        for path in (folder / name / "checkpoints" / "step-00000004" / "replay.json" for name in ("one", "two"))
    ]
    assert stored[0] == stored[1] != []


def test_ranks_with_different_files_raise_before_the_start(train: Train, folder: Path) -> None:
    """A reward was changed on one machine only: a user error, raised before anything starts."""
    other = folder / "other machine"
    other.mkdir()
    for name in ("pairs.jsonl", "digits.py"):
        shutil.copy(folder / name, other)
    recipe = {**RL, "run": {"steps": 1}}
    assert train(recipe, folder / "same", ranks=2, base_dirs=[folder, other]) == [0, 0]
    (other / "digits.py").write_text(DIGITS.replace("max(token_count, 1)", "token_count"))
    assert train(recipe, folder / "run", ranks=2, base_dirs=[folder, other]) == [2, 2]
    assert not (folder / "run").exists()


def full(recipe: Values, **model: Any) -> Values:
    return {**recipe, "model": {"path": "tiny", **model}}


@pytest.mark.parametrize("recipe", [SFT, DPO, RL], ids=lambda recipe: recipe["stage"])
def test_sharded_model_equals_the_unsharded_model(train: Train, unbroken: Any, recipe: Values, folder: Path) -> None:
    """One rank, two replicas, two shards; and shards that stop, resume as one whole, and as shards again.

    Ranks have different numbers of micro-batches (SFT: 6 rows in 2s; DPO: 3 pairs; RL: by tokens), so some passes are
    idle. The saved weights are equal up to rounding.
    """
    base = {**recipe, "batch": {"minibatches": 2, "micro_tokens": 48}} if recipe is RL else recipe
    upto = {n: {"run": {"steps": n, "save_every": 2}} for n in (2, 3, 4)}
    one = unbroken({**full(base), **upto[4]}, folder)
    expected = rows_of(one)
    assert all(row["grad_norm"] > 0 for row in expected)
    assert_same_metrics(rows_of(unbroken({**full(base), **upto[2]}, folder, ranks=2)), expected[:2], 1e-5)
    assert train({**full(base, shard=True), **upto[2]}, folder / "parts", ranks=2) == [0, 0]
    assert_same_metrics(rows_of(folder / "parts"), expected[:2], 1e-5)
    assert train({**full(base), **upto[3]}, folder / "parts", ranks=1, resume=True) == [0]
    assert train({**full(base, shard=True), **upto[4]}, folder / "parts", ranks=2, resume=True) == [0, 0]
    assert_same_metrics(rows_of(folder / "parts"), expected)
    assert_same_weights(folder / "parts" / "final", one / "final")


@pytest.mark.parametrize("shard", [False, True], ids=["copies", "parts"])
def test_kto_baseline_is_shared_by_all_ranks(train: Train, unbroken: Any, folder: Path, shard: bool) -> None:
    """Ranks divide the mismatched answers of a step, 3 for two ranks, and all use the mean over all of them."""
    recipe = {**DPO, "loss": "kto", "optim": {"lr": 2e-2}, "run": {"steps": 3}}
    assert train(full(recipe, shard=shard), folder / "two", ranks=2) == [0, 0]
    expected = rows_of(unbroken(recipe, folder))
    assert expected[-1]["loss/kl"] > 0.01
    assert_same_metrics(
        rows_of(folder / "two")[1:], expected[1:]
    )  # in the first step the sign of the margin is rounding


def test_sharded_model_in_bfloat16(train: Train, folder: Path) -> None:
    """Layers are gathered in bfloat16, the dtype of their products: equal up to the rounding of bfloat16, and saved in
    it."""
    recipe = {**full(SFT, dtype="bfloat16"), "run": {"steps": 2}}
    assert train(recipe, folder / "one", ranks=1) == [0]
    assert train(full(recipe, dtype="bfloat16", shard=True), folder / "parts", ranks=2) == [0, 0]
    pairs = zip(rows_of(folder / "one"), rows_of(folder / "parts"), strict=True)
    assert all(other["loss"] == pytest.approx(row["loss"], rel=1e-2) for row, other in pairs)
    weights = weights_of(folder / "parts" / "final")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of all files of a model."""
    return {name: w for file in folder.glob("*.safetensors") for name, w in load_file(file).items()}


def assert_same_weights(folder: Path, other: Path) -> None:
    """Compare norms over all weights: if a gradient is 0 up to rounding, Adam's first step amplifies the rounding."""
    weights, others = weights_of(folder), weights_of(other)
    assert weights.keys() == others.keys()
    gap, size = (
        torch.cat([w.flatten() for w in of])
        for of in ([weights[name] - others[name] for name in weights], list(others.values()))
    )
    assert float(gap.norm()) < 1e-5 * float(size.norm())


@pytest.mark.parametrize("staleness", [1, 4])
def test_stale_rollouts_are_divided_among_ranks(train: Train, folder: Path, staleness: int) -> None:
    """Sampled during training, with refilled groups; resumed in the middle as one rank."""
    recipe = {**RL, "rollout": {**RL["rollout"], "staleness": staleness}, "corrections": [{"use": "tis"}]}
    recipe |= {"scoring": {"workers": 1, "correct_at": 0.6}, "run": {"steps": 4, "save_every": 2}}
    run = functools.partial(train, recipe, engine="VersionedEngine")
    assert run(folder / "one", ranks=1) == [0]
    assert run(folder / "two", ranks=2) == [0, 0]
    expected = rows_of(folder / "one")
    assert_same_metrics(rows_of(folder / "two"), expected)
    assert [row["rollout/staleness"] for row in expected] == [min(t, staleness) for t in range(4)]
    assert any(row["rollout/gen_batches"] > 1 for row in expected)
    shutil.rmtree(checkpoints.folder_for(folder / "two" / "checkpoints", 4))
    assert run(folder / "two", ranks=1, resume=True) == [0]
    assert_same_metrics(rows_of(folder / "two"), expected)


def test_rollouts_of_several_versions_are_divided_among_ranks(train: Train, folder: Path) -> None:
    """With `partial`, three prompts on two ranks: the ranks' rollouts switch weights at the same tokens."""
    engine = {"engine": "vllm", "vllm": {"server": {"devices": [0]}}, "staleness": 2, "partial": True}
    recipe = {k: RL[k] for k in ("stage", "data", "rewards", "scoring", "optim")} | {
        "model": {"path": "tiny"},
        "rollout": {"prompts_per_step": 3, "group_size": 2, "max_new_tokens": 12, **engine},
        "loss": {"use": "decoupled_ppo"},
        "run": {"steps": 4},
    }
    assert train(recipe, folder / "one", ranks=1, engine="LongRollouts") == [0]
    assert train(recipe, folder / "two", ranks=2, engine="LongRollouts") == [0, 0]
    expected = rows_of(folder / "one")
    assert_same_metrics(rows_of(folder / "two"), expected)
    assert [row["rollout/mixed_versions"] for row in expected] == [0, 1, 1, 1]


def test_ranks_communicate_in_threads_and_exchange_errors(train: Train, folder: Path) -> None:
    """A thread uses a separate group; an error of one rank is raised on all, and so are rows that differ. See
    `ranked.talk`."""
    assert train("talk", folder, ranks=2) == [0, 0]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are looked up in /proc")
def test_rank_failing_alone_ends_waiting_ranks(train: Train, folder: Path) -> None:
    """Also if the failed rank's process is still alive: rank 0 exits long before. See `ranked.fail_without_rank_0`."""
    began = time.monotonic()
    assert train("fail_without_rank_0", folder, ranks=2) == [1, 1]
    assert time.monotonic() - began < 15


def test_group_losses_and_critics_equal_those_of_one_rank(train: Train, folder: Path) -> None:
    """CoPG has one value per group; GAE reads values, and its critic learns. Three ranks, two prompts: one rank has
    nothing to sample, nothing to score and, with whole groups, nothing to train on."""
    plain = {k: v for k, v in RL.items() if k not in ("algorithm", "advantage", "kl", "controllers", "batch")}
    rollout = {"prompts_per_step": 2, "group_size": 5, "max_new_tokens": 8}
    common = {**plain, "rollout": rollout, "run": {"steps": 2}}
    scoring = {"workers": 1, "correct_at": 0.1}
    for name, changes in CASES.items():
        recipe = {**common, "scoring": scoring, **changes}
        assert train(recipe, folder / f"{name}-1", ranks=1) == [0]
        assert train(recipe, folder / f"{name}-3", ranks=3) == [0, 0, 0]
        rows = rows_of(folder / f"{name}-1")
        assert any(row["grad_norm"] > 0 for row in rows), name
        assert_same_metrics(rows_of(folder / f"{name}-3"), rows)


CASES: dict[str, Values] = {
    "copg": {"algorithm": "copg"},
    "gae": {"advantage": {"use": "gae"}, "regularisers": [{"use": "value", "coef": 0.5}]},
    "rewards by token": {"advantage": {"use": "reinforce_pp"}, "kl": {"use": "k1", "coef": 0.1, "where": "reward"}},
}


def test_error_of_one_rank_ends_the_run_and_is_reported_once(folder: Path, forked_python: str) -> None:
    """The reward fails on rank 1 only; rank 0 waits for its rollouts. Started as by a user, with two processes."""
    broken = (
        DIGITS + "\n\ndef half(completion):\n    import os\n    return 1 if os.environ['RANK'] == '0' else 'half'\n"
    )
    (folder / "digits.py").write_text(broken)
    plain = {k: v for k, v in RL.items() if k not in ("algorithm", "advantage", "kl", "controllers", "batch")}
    recipe = {**plain, "rewards": [{"use": "digits.py:half"}], "rollout": {"prompts_per_step": 2, "group_size": 2}}
    recipe["rollout"]["max_new_tokens"] = 4
    (folder / "rl.yaml").write_text(json.dumps({**recipe, "run": {"steps": 1}}))
    command = [forked_python, "-m", "posttrain", "rl", "rl.yaml", "--gpus", "2", "--output", "run"]
    environment = {**os.environ, "FORKED_PYTHON": forked_python}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("returned 'half'") == 1 and "rank 1: " in done.stderr, done.stderr
    assert "--gpus 2 --output run --resume" in done.stderr
    assert "lost the connection" not in done.stderr


FAILING = (
    DIGITS
    + '''

def breaking(completion, token_count, step):
    """In step 3, on the rank that the file says, as long as there is one: an error, or the end of the process."""
    import os, pathlib, signal
    file = pathlib.Path(__file__).with_name("failing")
    rank, how = file.read_text().split() if file.is_file() else ("", "")
    if step == 2 and os.environ.get("RANK") == rank:
        if how == "killed":
            os.kill(os.getppid(), signal.SIGKILL)
        raise RuntimeError("no more")
    return digits(completion, token_count)
'''
)
BREAKING: Values = {
    **{key: RL[key] for key in ("stage", "data", "optim")},
    "model": {"path": "tiny"},
    "rewards": [{"use": "digits.py:breaking"}],
    "scoring": {"workers": 1, "max_error_rate": 0},
    "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6},
    "run": {"steps": 4},
}


@pytest.mark.parametrize(
    ("rank", "how", "changes", "codes", "saved"),
    [
        (1, "error", {}, [1, 1], 2),
        (0, "error", {"model": {"path": "tiny", "shard": True}}, [1, 1], 2),
        (1, "error", {"rollout": {"staleness": 1}, "corrections": [{"use": "tis"}]}, [1, 1], 1),
        (1, "killed", {}, [1, -9], 2),
        (1, "killed", {"model": {"path": "tiny", "shard": True}}, [1, -9], None),  # half of the weights are lost
        (0, "killed", {}, [-9, 1], None),
    ],
)
def test_rank_failing_before_an_update_loses_no_step(
    train: Train, unbroken: Any, folder: Path, rank: int, how: str, changes: Values, codes: list[int], saved: int | None
) -> None:
    """And the run resumes exactly. With rollouts sampled ahead, those of step 3 fail before the update of step 2."""
    (folder / "digits.py").write_text(FAILING)
    recipe = {**BREAKING, **changes, "rollout": {**BREAKING["rollout"], **changes.get("rollout", {})}}
    straight = rows_of(unbroken(recipe, folder, ranks=2))
    (folder / "failing").write_text(f"{rank} {how}")
    assert train(recipe, folder / "broken", ranks=2) == codes
    newest = checkpoints.latest(folder / "broken" / "checkpoints", hashes=True)
    assert (checkpoints.step_of(newest) if newest else None) == saved
    assert not list((folder / "broken").glob("checkpoints/*.partial"))
    (folder / "failing").unlink()
    assert train(recipe, folder / "broken", ranks=2, resume=True) == [0, 0]
    assert rows_of(folder / "broken") == straight


def test_sync_failing_on_one_rank_loses_no_step(train: Train, unbroken: Any, folder: Path) -> None:
    """Rank 1's sync after step 2 fails: both ranks save, and the run resumes exactly."""
    (folder / "digits.py").write_text(FAILING)  # with no file `failing`
    straight = unbroken(BREAKING, folder, ranks=2)
    assert train(BREAKING, folder / "broken", ranks=2, lost_sync=[1, 2]) == [1, 1]
    newest = checkpoints.latest(folder / "broken" / "checkpoints", hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 2
    assert len(rows_of(folder / "broken")) == 2
    assert train(BREAKING, folder / "broken", ranks=2, resume=True) == [0, 0]
    assert rows_of(folder / "broken") == rows_of(straight)


LOSSES = """
import os, pathlib
from posttrain.loss.pair import dpo
from posttrain.loss.clip import clip

passes = 0

def breaking(step):
    if step == 2 and os.environ.get("RANK") == "1" and pathlib.Path(__file__).with_name("failing").is_file():
        raise RuntimeError("no more")

def policy(batch, logp):
    breaking(batch.step)
    return clip(batch, logp)

def pair(batch):
    global passes
    breaking(passes)  # one in each step
    passes += 1
    return dpo(batch, reference_free=True)
"""


@pytest.fixture(params=["rl", "dpo"])
def failing_loss(request: pytest.FixtureRequest, folder: Path) -> Values:
    """Return a recipe whose loss raises on rank 1 in step 3 while a file `failing` exists."""
    (folder / "losses.py").write_text(LOSSES)
    (folder / "failing").touch()
    shape = {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6}
    plain = {**{k: RL[k] for k in ("stage", "data", "optim", "rewards")}, "scoring": {"workers": 1}, "rollout": shape}
    recipe, loss = (plain, "policy") if request.param == "rl" else (DPO, "pair")
    alike = {"batch": {"size": 2}} if loss == "pair" else {}  # a pair for each rank
    return {**full(recipe), **alike, "loss": {"use": f"losses.py:{loss}"}, "run": {"steps": 4}}


def test_rank_failing_in_a_backward_pass_loses_no_step(train: Train, folder: Path, failing_loss: Values) -> None:
    """Rank 0 learns of it where it would wait for the gradient, and saves."""
    assert train(failing_loss, folder / "broken", ranks=2) == [1, 1]
    newest = checkpoints.latest(folder / "broken" / "checkpoints", hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 2
    assert len(rows_of(folder / "broken")) == 2
    (folder / "failing").unlink()
    assert train(failing_loss, folder / "broken", ranks=2, resume=True) == [0, 0]
    assert train(failing_loss, folder / "straight", ranks=2) == [0, 0]
    assert rows_of(folder / "broken") == rows_of(folder / "straight")


def test_rank_failing_in_a_pass_of_a_sharded_model_ends_the_run(
    train: Train, folder: Path, failing_loss: Values
) -> None:
    """Rank 0 waits for it within that pass. So rank 1 reports it through the failure monitor, not in a
    collective that rank 0 would have to join."""
    assert train(full(failing_loss, shard=True), folder / "broken", ranks=2) == [1, 1]
    assert checkpoints.latest(folder / "broken" / "checkpoints") is None


@pytest.mark.parametrize("rollout", [{}, {"engine": "vllm"}], ids=["transformers", "vllm"])
def test_sync_failing_on_one_rank_of_a_sharded_model_loses_no_step(train: Train, folder: Path, rollout: Values) -> None:
    """The engine of rank 1 fails in the middle of the weights of version 2, which the ranks gather for each other: rank
    0 gets all of its weights, learns of the failure, and both save. A stand-in replaces vLLM."""
    plain = {k: RL[k] for k in ("stage", "data", "optim", "rewards")}
    shape = {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6, **rollout}
    recipe = {**full(plain, shard=True), "scoring": {"workers": 1}, "rollout": shape, "run": {"steps": 4}}
    assert train(recipe, folder / "broken", ranks=2, lost_sync=[1, 2]) == [1, 1]
    newest = checkpoints.latest(folder / "broken" / "checkpoints", hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 2
    assert len(rows_of(folder / "broken")) == 2


def test_all_ranks_name_the_first_failed_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails, and rank 0, which shares an engine with it, learns of it before the two others."""
    captured = [distributed.Captured(None, PeerLost("rank 1 failed: no memory", hint="see the error of that rank"))]
    captured += [distributed.Captured(None, ValueError("no memory"))]
    captured += [distributed.Captured(None)] * 2
    failures = []
    for number, one in enumerate(captured):
        monkeypatch.setattr(distributed, "rank", lambda number=number: number)
        failures.append(one.failure)
    assert failures == ["rank 1 failed: no memory", "rank 1 failed: no memory", "", ""]
    monkeypatch.setattr(distributed, "gather", lambda _: [(None, failure) for failure in failures])
    for number, one in enumerate(captured):
        with pytest.raises(ValueError if number == 1 else PeerLost) as raised:
            distributed.gather_or_raise(one)
        assert str(raised.value).splitlines()[0] == ("no memory" if number == 1 else "rank 1 failed: no memory")


def test_missing_rank_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "JOIN_TIMEOUT", datetime.timedelta(seconds=1))
    monkeypatch.setattr(distributed, "PEER_LOST_DELAY_S", 0.0)
    with (
        pytest.raises(PeerLost, match=r"the 2 processes of this run did not meet: (.|\n)*MASTER_ADDR"),
        distributed.join_process_group(),
    ):
        pass


ENDED = """
import gc, os
gc.disable()  # a quarter of the imports' time
from posttrain.train import distributed
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
distributed.dist.init_process_group("gloo", store=distributed.dist.HashStore(), rank=0, world_size=1)
import posttrain.train.rl, posttrain.train.sft, posttrain.train.preference
distributed.dist.destroy_process_group()
gc.collect()
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
assert not [name for name in names if "gloo" in name], names
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are looked up in /proc")
def test_process_group_is_released_at_the_end_of_a_run() -> None:
    """Modules imported while a group exists may keep it in default arguments. Its threads then outlive the interpreter,
    and some finished and saved runs were ended by SIGABRT."""
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_work_is_balanced_by_cost_and_units_stay_whole() -> None:
    """5 goes to rank 0, 4 to rank 1, 3 to rank 1 (4 < 5), 3 to rank 0 (5 < 7), 1 to rank 1 (7 < 8)."""
    assert split_rows([3, 5, 1, 4, 3], 2) == [[1, 4], [0, 2, 3]]
    assert split_rows([1, 1, 1, 1], 2, [7, 7, 8, 8]) == [[0, 1], [2, 3]]
    assert split_rows([2], 2) == [[0], []]
    assert split_rows([3, 1, 2], 1) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("size", "most", "ranks", "rows"),
    [(32, 32, 1, 32), (32, 32, 2, 16), (12, 4, 2, 3), (12, 4, 1, 4), (3, 3, 2, 1), (2, 2, 4, 1), (8, 2, 4, 2)],
)
def test_every_rank_gets_a_part_of_each_step(size: int, most: int, ranks: int, rows: int) -> None:
    assert micro_size(size, most, ranks) == rows


def test_evaluation_on_ranks_equals_one_process(train: Train, folder: Path) -> None:
    """Completions and losses of held-out rows, each rank with a share."""
    evaluated = {"every": 2, "data": {"source": "pairs.jsonl", "size": 5}, "keep_best": True, "metric": "reward"}
    losses = {"every": 2, "data": {"source": "rows.jsonl", "size": 7}, "keep_best": True}
    for recipe in ({**RL, "eval": {**evaluated, "n": 2}}, {**SFT, "eval": losses}):
        name = str(recipe["stage"])
        whole = {**recipe, "run": {"steps": 2}}
        assert train(whole, folder / f"{name} one", ranks=1) == [0]
        assert train(whole, folder / f"{name} two", ranks=2) == [0, 0]
        expected = rows_of(folder / f"{name} one")
        assert sum(any(key.startswith("eval/") for key in row) for row in expected) == 2
        assert_same_metrics(rows_of(folder / f"{name} two"), expected)


HINTED = {
    "hint_on_failure": {"algorithm": "ghpo"},
    "item_response": {"algorithm": "seele"},
    "loss_prompt": {"algorithm": "guide_grpo", "loss": {"strategy": "constant", "value": 0.5}},
    "rl_plus": {"algorithm": "rl_plus"},
    "calibrl": {"algorithm": "calibrl"},
    "relift": {"algorithm": "relift", "solutions": {"sft": {"size": 3, "minibatch": 2, "lr": 1e-3}}},
}


@pytest.mark.parametrize("name", ["loss_prompt", *(pytest.param(n, marks=pytest.mark.slow) for n in HINTED)])
def test_hints_and_given_solutions_on_two_ranks_equal_one(train: Train, folder: Path, name: str) -> None:
    """Rounds, given rows and supervised steps on two ranks equal those on one; resumed in the middle by one rank."""
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    texts = [{**row, "solution": f"so it is {row['chosen']}", "hint": "look at both"} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (folder / "first.py").write_text("def digit(completion):\n    return float(completion[:1].isdigit())\n")
    recipe = {
        **{key: RL[key] for key in ("stage", "model", "data", "optim")},
        "rewards": [{"use": "first.py:digit"}],
        "scoring": {"workers": 1},
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 20, "max_gen_batches": 1},
        "run": {"steps": 4, "save_every": 2},
        **HINTED[name],
    }
    assert train(recipe, folder / "one", ranks=1) == [0]
    assert train(recipe, folder / "two", ranks=2) == [0, 0]
    expected = rows_of(folder / "one")
    assert_same_metrics(rows_of(folder / "two"), expected)
    points = ("variants/hint", "variants/round", "solutions/rows", "calibrl/reached", "sft/updates")
    assert any(key.startswith(points) and value for row in expected for key, value in row.items())
    shutil.rmtree(checkpoints.folder_for(folder / "two" / "checkpoints", 4))
    assert train(recipe, folder / "two", ranks=1, resume=True) == [0]
    assert_same_metrics(rows_of(folder / "two"), expected)
