"""The RL loop on `tiny`: learning, the documented behavior of its parts, and errors."""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from signal import SIGINT, default_int_handler
from signal import signal as handle
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.batch import Prompt, Rollout, RolloutBatch, Segment
from posttrain.errors import DataError, EngineError, Interrupted, NonFiniteError, RewardError, RunError, UserError
from posttrain.recipe.load import load_dict
from posttrain.recipe.rollout_sections import Rollout as Sampling
from posttrain.recipe.stages import Stage
from posttrain.rollout import vllm_engine, vllm_start
from posttrain.rollout.engine import GenerationBatch
from posttrain.rollout.hf import TransformersEngine
from posttrain.rollout.starting import StartingEngine
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.run.watchdog import Watchdog
from posttrain.train import assemble, attention, memory_probe, optim, policy, rl, sharding
from posttrain.train.attention import Packed
from posttrain.train.collate import rollout_batch, sequences_of
from posttrain.train.evaluation import completion_metrics
from posttrain.train.rl_metrics import (
    Mismatch,
    rollout_metrics,
    sample_record,
    sampled_metrics,
    sampled_rows,
    signal_metrics,
    signal_note,
    thought_metrics,
)
from posttrain.train.update import minibatches

sys.path.append(str(Path(__file__).parents[1]))
from engine_clients import TransformersClient

Opened = Callable[..., AbstractContextManager[Any]]
Make = Callable[..., Stage]

REWARDS = '''
def digits(completion, token_count):
    """Share of tokens that are digits: a random model finds some and can learn to find more."""
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def exact(completion, answer):
    return float(completion.strip() == answer)

def never(completion, answer):
    return 0.0

def flat(completion):
    return 0.5
'''


@pytest.fixture
def recipe(tmp_path: Path) -> Make:
    """Return a function that builds an RL recipe on `tiny`; keyword arguments change keys of its sections."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(24):
            file.write(json.dumps({"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": str(2 * i)}) + "\n")
    base: dict[str, Any] = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 8, "group_size": 6, "max_new_tokens": 12},
        "rewards": [{"use": "rewards.py:digits"}],
        "scoring": {"workers": 1},
        "optim": {"lr": 5e-3},
        "run": {"steps": 3},
    }

    def make(**changes: Any) -> Stage:
        values = {
            **base,
            **{k: {**base[k], **v} if isinstance(base.get(k), dict) else v for k, v in changes.items()},
        }
        return load_dict(values, base_dir=tmp_path, where="test").recipe

    return make


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(path)]


def test_float16_loss_scale_is_adapted_and_resumed(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale at which gradients overflow skips updates without ending the run; a resumed run continues with the
    scale."""
    too_large = functools.partial(torch.amp.GradScaler, init_scale=2.0**24, backoff_factor=2.0**-10)
    monkeypatch.setattr("posttrain.train.optim.GradScaler", too_large)
    half = functools.partial(recipe, model={"dtype": "float16"})
    with opened() as directory:
        rl.run(half(run={"steps": 4}), directory)
        whole = timeless(directory.path)
    assert [row.get("updates_skipped", 0) for row in whole] == [1, 0, 0, 0]
    assert [row["updates"] for row in whole] == [0, 1, 1, 1]
    assert whole[-1]["reward"] > whole[0]["reward"]
    with opened("interrupted") as directory:
        rl.run(half(run={"steps": 2}), directory)
    with opened("interrupted", resume=True) as directory:
        rl.run(half(run={"steps": 4}), directory)
        assert timeless(directory.path) == whole


def test_the_reward_rises_and_the_model_is_saved(recipe: Make, opened: Opened) -> None:
    with opened() as directory:
        summary = rl.run(recipe(run={"steps": 20}), directory)
        rows = read_metrics(directory.path)
    first, last = (sum(r["reward"] for r in part) / 3 for part in (rows[:3], rows[-3:]))
    assert first < 0.25 and last > first + 0.3, (first, last)
    assert summary["steps"] == 20 and rows[-1]["num_tokens"] == summary["num_tokens"]
    assert (directory.final / "model.safetensors").is_file()
    assert all(r["grad_norm"] > 0 for r in rows)
    assert rows[0]["ratio"] == pytest.approx(1.0, abs=1e-4)  # one update a step: on policy
    assert all(r["mismatch/max"] < 1e-4 for r in rows), "the engine and the trainer are one model"


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
def test_every_preset_trains(recipe: Make, opened: Opened, algorithm: str) -> None:
    with opened() as directory:
        rl.run(
            recipe(
                algorithm=algorithm,
                # correct_at: half the tokens are digits, so that groups hold right and wrong answers
                scoring={"workers": 1, "correct_at": 0.15},
                batch={"minibatches": 2, "epochs": 2, "micro_tokens": 128},
            ),
            directory,
        )
        rows = read_metrics(directory.path)
    assert len(rows) == 3 and all(r["grad_norm"] > 0 and r["updates"] == 4 for r in rows)
    assert any(abs(r["ratio"] - 1) > 1e-4 for r in rows), "later updates are off policy"


def test_micro_batches_do_not_change_the_run(recipe: Make, opened: Opened) -> None:
    results = []
    for name, micro in (("whole", 100000), ("cut", 40)):
        with opened(name) as directory:
            rl.run(recipe(batch={"micro_tokens": micro}, run={"steps": 2}), directory)
            results.append(timeless(directory.path))
    for whole, cut in zip(*results, strict=True):
        assert whole.keys() == cut.keys()
        for key in whole:
            assert cut[key] == pytest.approx(whole[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_kl_to_the_reference_starts_at_zero_and_grows(recipe: Make, opened: Opened, lora: Any) -> None:
    with opened() as directory:
        rl.run(recipe(model={"path": "tiny", "lora": lora}, kl={"coef": 0.01}, optim={"lr": 2e-2}), directory)
        kl = [r["kl"] for r in read_metrics(directory.path)]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-4


def test_kl_in_the_reward_keeps_the_policy_closer(recipe: Make, opened: Opened) -> None:
    rewards = []
    for name, coef in (("free", 0.0), ("held", 50.0)):
        with opened(name) as directory:
            kl = {"use": "k1", "coef": coef, "where": "reward"}
            rl.run(recipe(kl=kl, run={"steps": 10}), directory)
            rewards.append(read_metrics(directory.path)[-1]["reward"])
    assert rewards[1] < rewards[0] - 0.1, rewards


def test_dropped_groups_are_refilled(recipe: Make, opened: Opened) -> None:
    with opened() as directory:
        rl.run(
            recipe(
                algorithm="dapo",
                rollout={"prompts_per_step": 6, "group_size": 2, "max_new_tokens": 12, "max_gen_batches": 30},
                scoring={"workers": 1, "correct_at": 0.15},
            ),
            directory,
        )
        rows = read_metrics(directory.path)
    assert all(r["rollout/rows"] == 12 and r["signal/share"] == 1.0 for r in rows)
    assert any(r["rollout/gen_batches"] > 1 for r in rows)


def test_step_without_a_kept_group_writes_samples(recipe: Make, opened: Opened) -> None:
    """No answer can be right: the step does not reach its metrics and samples."""
    rollout = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4, "max_gen_batches": 2}
    never = recipe(algorithm="dapo", rollout=rollout, scoring={"workers": 1, "correct_at": 2.0})
    with opened() as directory:
        with pytest.raises(RunError, match="4 had no right answer") as told:
            rl.run(never, directory)
        path = directory.path / "failed" / "step-1.jsonl"
        assert f"read samples in {path}" in str(told.value)
        assert [json.loads(line)["correct"] for line in path.read_text().splitlines()] == [0.0] * 4


@pytest.mark.parametrize(
    ("place", "error"),
    [((assemble, "make_engine"), KeyboardInterrupt), ((rl, "check_start"), Interrupted)],
    ids=["starting", "checking"],
)
def test_ctrl_c_before_the_first_step_is_immediate(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], error: type[BaseException]
) -> None:
    """Immediately while the engine starts, which can take minutes."""
    inner = getattr(*place)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), SIGINT)
        return inner(*args, **kwargs)

    monkeypatch.setattr(*place, interrupted)
    before = handle(SIGINT, default_int_handler)  # pytest-xdist ignores SIGINT
    with opened() as directory:
        try:
            with pytest.raises(error):
                rl.run(recipe(), directory)
        finally:
            handle(SIGINT, before)
        assert not directory.checkpoints.exists() or not list(directory.checkpoints.iterdir())


def test_first_step_waits_for_the_starting_engine(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks of the start do not wait for it, the metrics are the same, and it is closed at the end."""
    with opened("plain") as directory:
        rl.run(recipe(run={"steps": 2}), directory)
        expected = timeless(directory.path)
    inner, check, order = assemble.make_engine, rl.check_start, list[str]()
    checked = threading.Event()

    def starting(*args: Any, **kwargs: Any) -> Any:
        def start() -> Any:
            assert checked.wait(60)
            order.append("started")
            return []

        def finish(clients: Any) -> Any:
            assert clients == []
            engine = inner(*args, **kwargs)
            close = engine.close
            monkeypatch.setattr(engine, "close", lambda: (order.append("closed"), close()))
            return engine

        return StartingEngine(start, finish)

    def checking(p: Any) -> None:
        check(p)
        order.append("checked")
        checked.set()

    monkeypatch.setattr(assemble, "make_engine", starting)
    monkeypatch.setattr(rl, "check_start", checking)
    with opened("starting") as directory:
        rl.run(recipe(run={"steps": 2}), directory)
        assert timeless(directory.path) == expected
    assert order == ["checked", "started", "closed"]


def test_vllm_starts_before_the_model_is_loaded(recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The early-started engine is the one that samples: it is started once."""
    order = list[str]()

    class Client(TransformersClient):
        @classmethod
        def start(cls, spec: Any, folder: Path, log: Path) -> Any:
            client = super().start(spec, folder, log)
            order.append("engine")
            return client

    def noting(owner: Any, name: str, what: str) -> None:
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: (order.append(what), inner(*args, **more))[1])

    monkeypatch.setattr(vllm_engine, "ColocatedClient", Client)
    monkeypatch.setattr(vllm_start, "require_vllm", lambda: None)
    monkeypatch.setattr(vllm_start, "check_heads", lambda _: None)
    noting(vllm_engine, "begin_colocated", "begun")
    noting(sharding, "load", "model")
    with opened("run") as directory:
        rl.run(recipe(rollout={"engine": "vllm"}, run={"steps": 1}), directory)
    assert order == ["begun", "model", "engine"]
    assert not list((directory.path / "engine").iterdir())


def test_ctrl_c_does_not_wait_for_a_starting_engine(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start is cancelled: a hanging process of the engine is killed."""
    processes = list[Any]()

    def starting(*_: Any, **__: Any) -> Any:
        def start() -> Any:
            process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), name="EngineCore")
            process.start()
            processes.append(process)
            process.join()
            raise EngineError("its process was killed")

        return StartingEngine(start, lambda _: None)

    monkeypatch.setattr(assemble, "make_engine", starting)
    monkeypatch.setattr(rl, "check_start", lambda _: os.kill(os.getpid(), SIGINT))
    before, began = handle(SIGINT, default_int_handler), time.monotonic()
    with opened() as directory:
        try:
            with pytest.raises(Interrupted, match="stopped before step 1"):
                rl.run(recipe(), directory)
        finally:
            handle(SIGINT, before)
    assert time.monotonic() - began < 60 and not any(process.is_alive() for process in processes)


def test_failed_engine_start_ends_the_run_with_its_error(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        def start() -> Any:
            raise EngineError("vLLM did not start: no kernel")

        return StartingEngine(start, lambda _: None)

    monkeypatch.setattr(assemble, "make_engine", failing)
    with opened() as directory, pytest.raises(EngineError, match="did not start: no kernel"):
        rl.run(recipe(), directory)


def test_memory_trial_accounts_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 bytes 30 are free, and 20 of the used ones belong to the trainer: 50 belong to other processes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20)
    memory_probe.check_free_memory(50)
    with pytest.raises(torch.OutOfMemoryError, match="51 bytes for the trainer and 50 of others"):
        memory_probe.check_free_memory(51)


@pytest.mark.parametrize("case", ["full", "dropout", "adamw_8bit"])
def test_stopped_run_resumes_exactly(recipe: Make, opened: Opened, case: str) -> None:
    settings = {"run": {"steps": 4, "save_every": 2}, "kl": {"coef": 0.01}, "batch": {"minibatches": 2}}
    if case == "dropout":
        settings |= {"model": {"path": "tiny", "lora": {"rank": 4, "dropout": 0.3}}}
    if case == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
        settings |= {"optim": {"use": case}, "model": {"path": "tiny", "offload_reference": True}}
    with opened("straight") as directory:
        rl.run(recipe(**settings), directory)
        expected = timeless(directory.path)
    assert expected[0]["mismatch/max"] < 1e-4, "measured as it sampled, without dropout"
    with opened("interrupted") as directory, StopAfter(2), pytest.raises(Interrupted, match="step 2 of 4"):
        rl.run(recipe(**settings), directory)
    assert checkpoints.latest(directory.checkpoints) is not None
    for _ in range(2):  # the second resume has nothing to do, and the summary is unchanged
        with opened("interrupted", resume=True) as directory:
            summary = rl.run(recipe(**settings), directory)
            assert timeless(directory.path) == expected
            assert summary["reward_last"] == expected[-1]["reward"]
            assert summary["reward_first"] == expected[0]["reward"]
    fewer = {**settings, "run": {"steps": 3, "save_every": 2}}
    with opened("interrupted", resume=True) as directory:
        with pytest.raises(UserError, match="4 steps are done already, and 3 are asked for"):
            rl.run(recipe(**fewer), directory)
        assert timeless(directory.path) == expected


def test_time_limit_ends_the_run_with_a_final_model(recipe: Make, opened: Opened) -> None:
    with opened() as directory:
        summary = rl.run(recipe(run={"steps": 500, "max_minutes": 1e-9}), directory)
    assert summary["steps"] == 1 and directory.final.is_dir()


class StopAfter:
    """Sends Ctrl-C while the n-th step runs."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __enter__(self) -> None:
        self.original = rl.step

        def step(*args: Any) -> Any:
            result = self.original(*args)
            self.left -= 1
            if self.left == 0:
                import os

                os.kill(os.getpid(), SIGINT)
            return result

        rl.step = step

    def __exit__(self, *_: Any) -> None:
        rl.step = self.original


def test_nan_stops_the_run_and_saves_the_batch(recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    original = policy.completion_scores

    def poisoned(model: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(model, *args, **kwargs)
        return {**found, "logp": found["logp"] * float("nan")}

    with opened() as directory:
        with monkeypatch.context() as patch, pytest.raises(NonFiniteError, match=r"step 1: gradient of .* not finite"):
            patch.setattr(rl, "check_start", lambda _: None)
            patch.setattr(policy, "completion_scores", poisoned)
            rl.run(recipe(), directory)
        assert torch.load(directory.path / "failed" / "step-1.pt", weights_only=False)["batch"].advantages is not None
        assert not (directory.path / "final").exists()


def test_correction_weights_are_1_with_dropout(recipe: Make, opened: Opened) -> None:
    """The transformers engine samples with the trainer's own model, without mismatch."""
    lora = {"path": "tiny", "lora": {"rank": 4, "dropout": 0.5}}
    with opened() as directory:
        rl.run(recipe(model=lora, corrections=[{"use": "tis"}], run={"steps": 2}), directory)
    rows = read_metrics(directory.path)
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/max"] < 1e-4 and row["correction/weights"] == pytest.approx(1, abs=1e-5)


def test_nan_gradient_of_the_critic_stops_the_run(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss is finite, and so is the policy's gradient: one step later its values would be NaN, and saved."""
    clip = optim.clip_gradients

    def poisoned(module: Any, most: float) -> Any:
        if isinstance(module, torch.nn.Linear):
            module.weight.grad.mul_(float("nan"))
        return clip(module, most)

    monkeypatch.setattr(optim, "clip_gradients", poisoned)
    settings = {"advantage": {"use": "gae"}, "regularisers": [{"use": "value", "coef": 0.5}], "run": {"steps": 1}}
    with opened() as directory, pytest.raises(NonFiniteError, match=r"gradient of critic\.weight is not finite"):
        rl.run(recipe(**settings), directory)


def test_overflowing_gradient_norm_is_named(recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient is finite, and so is the loss; their norm is not."""
    clip = optim.clip_gradients

    def large(module: Any, most: float) -> Any:
        for parameter in module.parameters():
            parameter.grad.fill_(1e30)
        return clip(module, most)

    monkeypatch.setattr(optim, "clip_gradients", large)
    named = r"norm of all gradients, of which the gradient of \S+ is largest \(1e\+30\), is not finite"
    with opened() as directory, pytest.raises(NonFiniteError, match=named):
        rl.run(recipe(run={"steps": 1}), directory)


def test_reward_that_rejects_gold_answers_stops_the_start(recipe: Make, opened: Opened) -> None:
    with opened() as directory, pytest.raises(RewardError, match="never"):
        rl.run(recipe(rewards=[{"use": "rewards.py:never"}]), directory)


def test_prompt_longer_than_the_window_raises_before_the_first_step(recipe: Make, opened: Opened) -> None:
    with opened() as directory, pytest.raises(DataError, match="window"):
        rl.run(recipe(rollout={"max_new_tokens": 100000}), directory)


def rollouts(rewards: list[float | None], group_size: int = 2) -> list[Rollout]:
    prompt = Prompt("row", {}, "p", (1, 2))
    return [
        Rollout(prompt, i // group_size, (Segment("model", (5,) * (i + 1), None),), "x", "stop", 0, {"r": r}, r, r == 1)
        for i, r in enumerate(rewards)
    ]


def test_collate_keeps_tokens_and_marks_missing_log_probs() -> None:
    items = rollouts([1.0, None])
    items[0].segments = (Segment("model", (7, 8), (-0.5, -0.25)), Segment("tool", (9,), None))
    batch, sequences = rollout_batch(items), sequences_of(items)
    assert tuple(map(tuple, sequences.ids)) == ((1, 2, 7, 8, 9), (1, 2, 5, 5)) and sequences.prompt_lengths == (2, 2)
    assert batch.mask.tolist() == [[True, True, False], [True, True, False]]
    assert batch.rewards is not None and batch.rewards.isnan().tolist() == [False, True]
    assert batch.rollout_logp is not None
    torch.testing.assert_close(batch.rollout_logp[0, :2], torch.tensor([-0.5, -0.25]))
    assert batch.rollout_logp[0, 2].isnan() and batch.rollout_logp[1].isnan().all()


def test_signal_reports_why_a_group_has_none() -> None:
    """Groups of two: right/wrong (signal), both right, both wrong, one unscored, components that cancel."""
    rewards = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, float("nan"), 1, 1])
    parts = torch.tensor([0.0] * 8 + [0.3, 0.7])
    batch = RolloutBatch(
        group_ids=torch.arange(10) // 2,
        mask=torch.ones(10, 1, dtype=torch.bool),
        rewards=rewards,
        correct=rewards,
        components={"part": parts},
    )
    shares = signal_metrics(batch)
    for name in ("share", "too_easy", "too_hard", "unscored", "cancelled"):
        assert shares[f"signal/{name}"] == pytest.approx(0.2), name
    assert shares["frac_reward_zero_std"] == pytest.approx(0.8)
    unpaid = signal_metrics(batch.replace(reward_weights={"part": 0.0}))  # an annotation only: all answers are right
    assert unpaid["signal/cancelled"] == 0 and unpaid["signal/too_easy"] == pytest.approx(0.4)
    assert signal_note(shares) is None
    hard = dict.fromkeys(shares, 0.0) | {"signal/too_hard": 1.0}
    assert "no answer was right, and rewards" in (signal_note(hard) or "")
    partial = signal_note(hard | {"reward": 0.25}) or ""
    assert "no answer reached scoring.correct_at (mean reward 0.25), and rewards within a group are equal" in partial
    mixed = signal_note(hard | {"signal/too_easy": 0.5, "signal/too_hard": 0.25, "signal/unscored": 0.25}) or ""
    assert "every answer was right in 50% of the groups, and none in 25%: use more samples a prompt" in mixed
    stopped = signal_note(hard | {"completions/ended_in_thought": 0.75}) or ""
    assert "75% of the completions end inside their thought: see rollout.stop" in stopped


def test_samples_have_the_advantage_of_their_row(recipe: Make, opened: Opened) -> None:
    """GRPO without a scale: the reward minus the mean reward of the group, all of whose rows are recorded."""
    made = recipe(advantage={"use": "group", "scale": "none"}, run={"steps": 1, "samples_per_step": 1000})
    with opened("run") as directory:
        rl.run(made, directory)
        rows = [json.loads(line) for line in (directory.path / "samples.jsonl").read_text().splitlines()]
    groups = {row["group"] for row in rows}
    means = {group: mean(row["reward"] for row in rows if row["group"] == group) for group in groups}
    assert len(groups) > 1 and any(row["advantage"] for row in rows)
    for row in rows:
        assert row["kept"] and row["advantage"] == pytest.approx(row["reward"] - means[row["group"]], abs=1e-6)


def test_token_advantages_are_recorded_as_means_over_trained_tokens() -> None:
    batch = rollout_batch(rollouts([1.0, 0.0]))
    tokens = torch.arange(float(batch.mask.numel())).reshape(batch.mask.shape)
    batch = batch.replace(advantages=tokens, keep=torch.tensor([True, False]))
    records = [sample_record(rollout, batch, row) for row, rollout in enumerate(rollouts([1.0, 0.0]))]
    assert [one["kept"] for one in records] == [True, False]
    assert records[0]["advantage"] == float(tokens[0][batch.mask[0]].mean())
    batch = batch.replace(mask=torch.zeros_like(batch.mask))
    assert sample_record(rollouts([1.0])[0], batch, 0)["advantage"] is None


def test_completions_that_stop_inside_their_thought_are_counted() -> None:
    items = rollouts([1.0, 0.0, 1.0, None])
    assert thought_metrics(items) == {}
    items[0] = replace(items[0], text="<think>so</think>x")
    items[1] = replace(items[1], text="<think>so")
    items[2] = replace(items[2], text="<think>so", finish="length")
    assert thought_metrics(items) == {"completions/ended_in_thought": 0.25}
    items[3] = replace(items[3], text="so", prompt=replace(items[3].prompt, text="p<think>\n"))
    assert thought_metrics(items) == {"completions/ended_in_thought": 0.5}


def test_truncated_completions_count_as_wrong() -> None:
    """As in an evaluation. Of four, all right by the reward, two were truncated and one was not scored."""
    items = [
        replace(one, correct=right) for one, right in zip(rollouts([1.0] * 4), (True, True, True, None), strict=True)
    ]
    items = [replace(one, finish="length") if n < 2 else one for n, one in enumerate(items)]
    found = rollout_metrics(items, rollout_batch(items))
    records = [{"problem": 0, "correct": r.correct, "finish": r.finish, "reward": 1.0, "tokens": 1} for r in items]
    assert found["correct"] == pytest.approx(1 / 3) == completion_metrics(records, 4, 0)["accuracy"]
    assert found["completions/clipped_ratio"] == 0.5


def test_rollout_metrics_exclude_unscored_rows() -> None:
    """Rewards 1 and 0 in group 0; 1 and unscored in group 1: mean 2/3, group stds sqrt(1/2) and 0."""
    items = rollouts([1.0, 0.0, 1.0, None])
    values = rollout_metrics(items, rollout_batch(items))
    assert values["reward"] == pytest.approx(2 / 3)
    assert values["reward_std"] == pytest.approx(0.5**0.5 / 2)
    assert values["completions/mean_length"] == 2.5 and values["completions/clipped_ratio"] == 0.0


def test_equal_rewards_have_no_spread() -> None:
    """The mean of three 0.1 is not 0.1, so their rounded standard deviation is not 0."""
    items = rollouts([0.1] * 3, group_size=3)
    values = rollout_metrics(items, rollout_batch(items))
    assert values["reward_std"] == 0.0
    assert values["signal/too_hard"] == 1.0 and values["signal/cancelled"] == 0.0


@pytest.mark.parametrize(
    ("changes", "entropy"),
    [
        ({}, 0.75),  # the engine's log-probs of the first row: 0.5 and 1; those of other rows are unknown
        ({"entropy": torch.tensor([[1.0, 2.0], [3.0, 9.0]])}, 2.0),  # computed, over three tokens
        ({"rollout_logp": None}, None),
        ({"rollout_logp": torch.full((2, 2), math.nan)}, None),
    ],
)
def test_entropy_of_sampled_tokens_includes_rows_without_a_signal(
    changes: dict[str, Any], entropy: float | None
) -> None:
    """Three tokens are sampled; each of two updates trains on two of them."""
    mask, known = torch.tensor([[True, True], [True, False]]), torch.tensor([[-0.5, -1.0], [math.nan, -8.0]])
    batch = RolloutBatch(mask=mask, group_ids=torch.tensor([0, 0]), rollout_logp=known).replace(**changes)
    found = sampled_metrics(batch, Sampling(), trained_tokens=4.0, epochs=2)
    assert found["trained_ratio"] == pytest.approx(2 / 3)
    assert found.get("entropy/sampled") == entropy
    if "entropy" not in changes:
        assert "entropy/sampled" not in sampled_metrics(batch, Sampling(top_k=5), 4.0, 2)


def test_entropy_of_sampled_tokens_is_reported_without_any_signal(recipe: Make, opened: Opened) -> None:
    """`entropy` is then over no token; over all sampled tokens it is close to the entropy of 512 equal words."""
    with opened() as directory, pytest.raises(RunError, match="nothing was trained"):
        rl.run(recipe(rewards=[{"use": "rewards.py:flat"}], run={"steps": 1}), directory)
    (row,) = read_metrics(directory.path)
    assert row["trained_ratio"] == 0 and "entropy" not in row
    assert 3 < row["entropy/sampled"] < 8


def test_metrics_copy_no_hidden_states_to_the_host() -> None:
    """A tensor without storage cannot be copied."""
    items = rollouts([1.0, 0.0, 1.0, None])
    batch = rollout_batch(items).replace(reward_weights={"a": 0.0})
    hidden = torch.empty(*batch.mask.shape, 8, device="meta")
    assert rollout_metrics(items, batch.replace(hidden=hidden)) == rollout_metrics(items, batch)
    with pytest.raises(NotImplementedError):
        batch.replace(hidden=hidden).to("cpu")


def test_samples_come_from_several_groups() -> None:
    items = rollouts([1.0, 0.0] * 4)
    assert [sample_record(items[n])["group"] for n in sampled_rows(len(items), 4)] == [0, 1, 2, 3]
    assert sampled_rows(0, 4) == []


def test_mismatch_metrics() -> None:
    """Gaps 0.5 and -0.25, one token not reported, one masked: mean 0.375, max 0.5, KL mean of exp(d) - 1 - d."""
    mismatch = Mismatch()
    nan = float("nan")
    batch = RolloutBatch(
        group_ids=torch.tensor([0]),
        mask=torch.tensor([[True, True, True, False]]),
        rollout_logp=torch.tensor([[-1.5, -1.75, nan, 0.0]]),
    )
    mismatch.add(torch.tensor([[-1.0, -2.0, -3.0, 9.0]]), batch)
    values = mismatch.metrics()
    assert values["mismatch/mean"] == pytest.approx(0.375) and values["mismatch/max"] == pytest.approx(0.5)
    k3 = (math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 2
    assert values["mismatch/kl"] == pytest.approx(k3)
    assert Mismatch().metrics() == {}


def test_minibatches_keep_groups_whole_and_contain_every_row() -> None:
    groups = torch.tensor([4, 4, 9, 9, 9, 2, 2, 7])
    parts = minibatches(groups, 2, seed=3)
    assert sorted(r for rows in parts for r in rows) == list(range(8))
    assert not {int(groups[r]) for r in parts[0]} & {int(groups[r]) for r in parts[1]}
    assert parts == minibatches(groups, 2, seed=3)
    assert any(parts != minibatches(groups, 2, seed=s) for s in range(5))
    rows = minibatches(torch.zeros(5, dtype=torch.long), 3, seed=0)  # one group: its rows are split
    assert sorted(r for part in rows for r in part) == list(range(5)) and len(rows) == 3


def test_hang_is_reported_by_phase(recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync at the start of step 2 hangs: the watchdog names it. Here it returns and does not end the process."""
    woken = threading.Event()

    def sync(self: TransformersEngine, model: Any, version: int) -> None:
        del model
        if version == 1:
            woken.wait(20)
        self.version = version

    monkeypatch.setattr(TransformersEngine, "sync", sync)
    monkeypatch.setattr(rl, "Watchdog", functools.partial(Watchdog, poll_s=0.05, stop=woken.set))
    with opened() as directory:
        rl.run(recipe(run={"steps": 2, "hang_minutes": 1.0 / 60}), directory)
        told = (directory.logs / "hang-rank0.txt").read_text()
    assert woken.is_set() and told.startswith("rank 0, step 2: the phase `sync`") and "in sync" in told


@pytest.mark.parametrize(
    ("corrections", "expected"), [([], 1), ([{"use": "tis"}], True)], ids=["watched", "read by a correction"]
)
def test_engine_logprobs_are_requested_only_if_used(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch, corrections: list[Any], expected: Any
) -> None:
    asked: list[Any] = []
    generate_batch = TransformersEngine.generate_batch

    def spy(self: TransformersEngine, batch: GenerationBatch) -> list[Rollout]:
        asked.append(batch.logprobs)
        return generate_batch(self, batch)

    monkeypatch.setattr(TransformersEngine, "generate_batch", spy)
    with opened() as directory:
        rl.run(recipe(run={"steps": 1}, corrections=corrections), directory)
        assert "mismatch/mean" in read_metrics(directory.path)[0]
    assert asked == [expected]


def test_engine_sleeps_during_the_update(recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rollout.vllm.sleep` needs this: the engine's memory is free from the last rollout to the next sync."""
    order: list[str] = []
    for name in ("generate_batch", "sleep", "sync"):
        inner = getattr(TransformersEngine, name)
        monkeypatch.setattr(
            TransformersEngine, name, lambda *a, _inner=inner, _name=name: (order.append(_name), _inner(*a))[1]
        )
    inner_update = rl.update
    monkeypatch.setattr(rl, "update", lambda *a, **k: (order.append("update"), inner_update(*a, **k))[1])
    with opened() as directory:
        rl.run(recipe(run={"steps": 2}), directory)
    drawn = ["generate_batch", "sleep", "update"]
    assert order == [*drawn, "sync", *drawn], "the last weights are for nobody"


def test_memory_trial_runs_the_longest_rows_before_the_first_step(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; called by hand here, in place of `check_start`: it leaves no gradient and changes no state."""
    rows: list[int] = []

    def tried(p: Any) -> None:
        inner = memory_probe.scores
        monkeypatch.setattr(memory_probe, "scores", lambda p, m, s, *a: (rows.extend(s.lengths), inner(p, m, s, *a))[1])
        memory_probe.probe_max_memory(p)
        assert all(w.grad is None for w in p.loaded.model.parameters())
        assert memory_probe.moments_bytes(p) == 8 * sum(w.numel() for w in p.loaded.model.parameters())

    with opened("plain") as directory:
        rl.run(recipe(run={"steps": 2}), directory)
        expected = timeless(directory.path)
    monkeypatch.setattr(rl, "check_start", tried)
    with opened("tried") as directory:
        rl.run(recipe(run={"steps": 2}, batch={"micro_tokens": 100}), directory)
        assert [r["reward"] for r in timeless(directory.path)] == [r["reward"] for r in expected]
    longest = 12 + max(len(f"{i}+{i}=" + "?" * (i % 3)) for i in range(24))
    assert len(set(rows)) == 1 and rows[0] >= longest and len(rows) == 100 // rows[0]


def test_rows_leaking_into_each_other_stop_the_run_before_the_first_step(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are packed on a GPU; enabled by hand here."""
    inner, check = attention._attend_by_row, rl.check_start

    def one_row(query: Tensor, key: Tensor, value: Tensor, packed: Packed, *more: Any) -> Tensor:
        return inner(query, key, value, Packed.of([sum(packed.lengths)], query.device), *more)

    def packed_start(p: Any) -> None:
        assert attention.use_packed_attention(p.loaded.model)
        check(replace(p, packed=True))
        monkeypatch.setattr(attention, "_attend_by_row", one_row)
        check(replace(p, packed=True))

    monkeypatch.setattr(rl, "check_start", packed_start)
    with opened() as directory, pytest.raises(NonFiniteError, match="rows packed together and alone differ by"):
        rl.run(recipe(), directory)


@pytest.mark.parametrize(
    "place", [(rl, "update"), (rl, "check_start"), (assemble, "build_reference")], ids=lambda at: at[1]
)
def test_out_of_memory_error_has_predicted_peaks(
    recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(*place, fail)
    with opened() as directory, pytest.raises(RunError, match="step 1: the GPU has no memory left") as told:
        rl.run(recipe(), directory)
    hint = str(told.value).partition("hint:")[2]
    changes = re.findall(r"([a-z_.]+)=\w+ \(\d+\.\d GiB\)", hint)
    assert changes == ["batch.micro_tokens", "model.gradient_checkpointing", "rollout.max_new_tokens"]
