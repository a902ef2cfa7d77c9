"""Rewards run while other rollouts are still generated, with the scores of a run that waits."""

from __future__ import annotations

import json
import string
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.batch import Prompt, Rollout, Segment
from posttrain.errors import RewardError
from posttrain.recipe.load import load_dict
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.rollout.hf import TransformersEngine
from posttrain.run.metrics import read_metrics
from posttrain.train import rl, scoring
from posttrain.train.collate import rollout_batch
from posttrain.train.rl_metrics import rollout_metrics
from posttrain.train.scoring import EarlyScoring, reward_cost_metrics
from posttrain.verify.pool import Worker
from posttrain.verify.score import Sample, Scorer

Opened = Callable[..., AbstractContextManager[Any]]

REWARDS = """
import pathlib, time
from posttrain.verify.contract import batched

def digits(completion, token_count, correct):
    return None if token_count == 3 else sum(c.isdigit() for c in completion) / max(token_count, 1) + bool(correct)

def short(completion, token_count):
    return float(token_count < 6)

def one_hangs(completion, prompt, token_count):
    if "7+7=" in prompt and token_count % 2:
        time.sleep(60)
    return float(len(completion))

@batched()
def many(completions):
    return [float(len(c)) for c in completions]

def text(completion):
    return "no number" if completion == "bad" else 1.0

def talks(completion, prompt):
    print("about", prompt)
    return float(len(completion))

def seen(completion, folder):
    pathlib.Path(folder, "called").touch()
    return float(len(completion))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "rewards.py").write_text(REWARDS)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(12):
            row = {"prompt": f"{i}+{i}=" + "?" * (i % 3), "folder": str(tmp_path)}
            file.write(json.dumps(row) + "\n")

    def make(rewards: list[dict[str, Any]], **rollout: Any) -> Any:
        values = {
            "stage": "rl",
            "model": {"path": "tiny"},
            "data": {"source": "rows.jsonl"},
            "rollout": {"prompts_per_step": 6, "group_size": 4, "max_new_tokens": 8, "batch_size": 8, **rollout},
            "rewards": rewards,
            "scoring": {"workers": 2, "max_error_rate": 0.5},
            "optim": {"lr": 5e-3},
            "run": {"steps": 2},
        }
        return load_dict(values, base_dir=tmp_path, where="test").recipe

    return make


def metrics_of(opened: Opened, name: str, recipe: Any) -> list[dict[str, Any]]:
    with opened(name) as directory:
        rl.run(recipe, directory)
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(directory.path)]


def test_early_scores_equal_scores_of_all_rows_together(
    recipe: Any, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reward reads another's result, which is None for some rows."""
    made = recipe([{"use": "rewards.py:digits", "weight": 0.5}, {"use": "rewards.py:short", "correct": True}])
    added: list[int] = []
    add = EarlyScoring.add
    monkeypatch.setattr(
        EarlyScoring, "add", lambda self, group, samples: (added.append(group), add(self, group, samples))[1]
    )
    early = metrics_of(opened, "early", made)
    assert len(added) >= 2 * 4 and len(set(added)) <= 6  # of six prompts in three batches, all but the last two
    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "by_row", False)
        assert metrics_of(opened, "late", made) == early


def test_rewards_run_while_the_engine_generates(
    recipe: Any, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine continues only after a reward was called with its finished rollouts."""
    from posttrain.rollout import hf

    decode, waited = hf.decode, list[bool]()

    def decoding(*args: Any, **more: Any) -> Any:
        if waited or not first:
            for _ in range(500):
                if (tmp_path / "called").exists():
                    break
                threading.Event().wait(0.02)
            waited.append((tmp_path / "called").exists())
        first.clear()
        return decode(*args, **more)

    first = [True]
    monkeypatch.setattr(hf, "decode", decoding)
    monkeypatch.setattr(hf, "cache_gap", lambda *_: 0.0)  # which decodes too
    metrics_of(opened, "run", recipe([{"use": "rewards.py:seen"}]))
    assert waited and all(waited)


ENVIRONMENT = """
import pathlib, time

class Waits:
    first = None  # the row whose rollouts end at once

    def reset(self, row):
        self.row = row

    def step(self, text):
        if Waits.first is None:
            Waits.first = self.row["prompt"]
        if self.row["prompt"] != Waits.first:
            heard = self.wait("called", 20)
            pathlib.Path(self.row["folder"], "heard" if heard else "not heard").touch()
        return "", True, 1.0

    def wait(self, name, seconds):
        give_up = time.monotonic() + seconds
        while not pathlib.Path(self.row["folder"], name).exists():
            if time.monotonic() > give_up:
                return False
            time.sleep(0.01)
        return True

    def score(self):
        return 1.0

    def close(self):
        pass
"""


def test_multi_turn_rollouts_are_scored_while_others_continue(recipe: Any, opened: Opened, tmp_path: Path) -> None:
    """The environments of all other prompts continue only after a reward was called for the first finished rollout."""
    (tmp_path / "waits.py").write_text(ENVIRONMENT)
    section = recipe([{"use": "rewards.py:seen"}], stop=[*string.ascii_letters, *string.punctuation])
    values = section.model_dump(mode="json", exclude_unset=True)
    values |= {"environment": {"use": "waits.py:Waits", "timeout_s": 60}, "tool_workers": 24, "run": {"steps": 1}}
    acting = load_dict(values, base_dir=tmp_path, where="test").recipe
    (row,) = metrics_of(opened, "run", acting)
    assert (tmp_path / "heard").exists() and not (tmp_path / "not heard").exists()
    assert row["rewards/seen/errors"] == 0


def test_hanging_reward_loses_only_its_rows(recipe: Any, opened: Opened, capfd: pytest.CaptureFixture[str]) -> None:
    """Of 24 calls per step a few hang; they are counted, their rows are unscored, and the run continues."""
    rows = metrics_of(opened, "run", recipe([{"use": "rewards.py:one_hangs", "timeout_s": 0.5}], max_new_tokens=9))
    counts = [row["rewards/one_hangs/timeouts"] for row in rows]
    assert len(rows) == 2 and 0 < sum(counts) <= 4
    first = next(step for step, count in enumerate(counts) if count)
    told = f"reward one_hangs: {counts[first]} of 24 calls failed in step {first + 1} and left rows unscored"
    said = capfd.readouterr().err
    assert told in said and said.count("reward one_hangs:") == 1
    assert said.count("the first time-out, on ") == 1
    assert all(row["signal/share"] >= 5 / 6 for row in rows)


def test_output_of_rewards_goes_to_a_log_of_the_run(
    recipe: Any, opened: Opened, capfd: pytest.CaptureFixture[str]
) -> None:
    with opened("run") as directory:
        rl.run(recipe([{"use": "rewards.py:talks"}]), directory)
    log = directory.logs / "rewards.log"
    assert len(log.read_text().splitlines()) == 2 * 24
    said = "".join(capfd.readouterr())
    assert said.count("about") == 1 and f"see {log}" in said


def test_reward_time_is_reported(recipe: Any, opened: Opened) -> None:
    with opened("run") as directory:
        rl.run(recipe([{"use": "rewards.py:digits"}, {"use": "rewards.py:short", "correct": True}]), directory)
    for row in read_metrics(directory.path):
        assert row["time/rewards"] > 0
        assert row["time/rewards/rows_per_s"] == pytest.approx(24 / row["time/rewards"])
        for name in ("digits", "short"):
            assert row[f"time/rewards/{name}/seconds"] == pytest.approx(24 * row[f"time/rewards/{name}/call"])
            assert 0 < row[f"time/rewards/{name}/call"] < 1
        assert "time/rewards/rows" not in row


def test_throughput_of_two_ranks() -> None:
    """Each rank was busy for 2 of the total of 4 seconds, and scored half of the 40 rows."""
    found = reward_cost_metrics({"reward": 1, "time/rewards": 4.0, "time/rewards/a": 8.0, "time/rewards/rows": 40}, 2)
    assert found == {
        **{"reward": 1, "time/rewards": 2.0, "time/rewards/rows_per_s": 20.0},
        **{"time/rewards/a/seconds": 8.0, "time/rewards/a/call": 0.2},
    }
    assert reward_cost_metrics({"reward": 1}, 2) == {"reward": 1}


def test_slow_reward_delays_submission_and_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 groups arrive together; no worker ever has more than a twentieth of a second of them, and no group remains."""
    (tmp_path / "rewards.py").write_text("import time\ndef slow(completion): return time.sleep(0.01) or 1.0\n")
    sent: list[int] = []
    send_chunk = Worker.send_chunk
    monkeypatch.setattr(Worker, "send_chunk", lambda self, chunk: (sent.append(len(chunk)), send_chunk(self, chunk))[1])
    with Scorer([Reward(use="rewards.py:slow")], Scoring(workers=2), tmp_path) as scorer:
        with EarlyScoring(scorer, 0) as early:
            for group in range(40):
                early.add(group, [Sample("x" * 100_000, {})] * 4)
        assert len(early.results()) == 40  # leaving the block waits for all rewards: a step cannot run ahead of them
        assert sum(sent) == 160 and max(sent) <= 5
        assert all(worker.idle for worker in scorer.pool.workers)


def test_invalid_reward_result_ends_the_generation(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    with Scorer([Reward(use="rewards.py:text")], Scoring(workers=1), tmp_path) as scorer:
        with EarlyScoring(scorer, 0) as early:
            early.add(0, [Sample("good", {}), Sample("bad", {"uid": "r7"})])
            early.add(1, [Sample("good", {})])
        with pytest.raises(RewardError, match="row r7"):
            early.results()


def test_batched_rewards_wait_for_all_rows(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    scorers = [Scorer([Reward(use=f"rewards.py:{name}")], Scoring(), tmp_path) for name in ("short", "many")]
    assert [scorer.by_row for scorer in scorers] == [True, False]


@pytest.mark.parametrize("batch_size", [5, 64])
def test_engine_reports_each_prompt_when_complete(batch_size: int) -> None:
    """Batches of five rows split the groups of three: each prompt is reported once, with the objects that are
    returned."""
    from posttrain.batch import Prompt
    from posttrain.models import load as models
    from posttrain.recipe.sampling_sections import Sampling
    from posttrain.recipe.sections import Model

    loaded = models.load(Model(path="tiny"), Path.cwd())
    prompts = [Prompt(str(i), {}, "", tuple(range(10, 12 + i % 2))) for i in range(4)]
    told: list[Any] = []
    engine = TransformersEngine(loaded, batch_size=batch_size)
    found = engine.generate(prompts, 3, Sampling(max_new_tokens=4), seed=0, first_group=2, done=told.append)
    assert [r.group for r in found] == [2 + i for i in range(4) for _ in range(3)]
    assert len(told) == (3 if batch_size == 5 else 0)
    assert all(any(r is f for f in found) for group in told for r in group)
    assert all(len(group) == 3 and len({r.group for r in group}) == 1 for group in told)


def test_tool_output_is_excluded_from_length_and_repetition_rewards() -> None:
    """Otherwise a length reward would punish calls with long answers, and a repetition reward the repetitions of a
    database."""
    turns = (Segment("model", (5, 6)), Segment("tool", (7, 7, 7)), Segment("model", (8,)))
    rollout = Rollout(Prompt("u", {}, "p", (1,)), 0, turns, "ab", "stop", 0)
    pieces: Any = SimpleNamespace(scorer=SimpleNamespace(busy_seconds=0.0, rewards=[]))
    (sample,) = scoring.Scoring(pieces, 0, None)._samples([rollout])
    assert (sample.token_count, sample.token_ids) == (3, (5, 6, 8))
    rollout.reward, rollout.correct = 1.0, True
    assert rollout_metrics([rollout], rollout_batch([rollout]))["completions/mean_length"] == 3
