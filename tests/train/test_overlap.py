"""Rollouts drawn one step ahead: what is drawn follows from step and weights, and a run resumes with what was on its
way. The engine elsewhere is the real server around a transformers model (tests/serving.py)."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from posttrain.batch import Prompt, Rollout, Segment, ToolCall, Turn
from posttrain.errors import EngineError, Interrupted, RecipeError, RunError
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import Stage
from posttrain.rollout import client
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.train import overlap, rl
from posttrain.verify.failures import Calls

Opened = Callable[..., AbstractContextManager[Any]]
Make = Callable[..., Stage]

REWARDS = """
import time

def digits(completion, token_count):
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def hangs(completion, token_count, step):
    if step == 1 and completion:
        time.sleep(60)
    return digits(completion, token_count)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.05, 0.1))


@pytest.fixture
def recipe(tmp_path: Path) -> Make:
    """An RL recipe on `tiny` whose corrections weigh old rollouts; keyword arguments change keys of its sections."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(24):
            file.write(json.dumps({"prompt": f"{i}+{i}=" + "?" * (i % 3)}) + "\n")
    base: dict[str, Any] = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8, "staleness": 1},
        "rewards": [{"use": "rewards.py:digits"}],
        "corrections": [{"use": "tis"}],
        "scoring": {"workers": 1},
        "optim": {"lr": 5e-3},
        "run": {"steps": 4, "save_every": 2},
    }

    def make(**changes: Any) -> Stage:
        whole = {**base, **{k: {**base[k], **v} if isinstance(base.get(k), dict) else v for k, v in changes.items()}}
        return load_dict(whole, base_dir=tmp_path, where="test").recipe

    return make


def at(url: str, **rollout: Any) -> dict[str, Any]:
    return {"rollout": {"engine": "vllm", "vllm": {"server": {"urls": [url]}}, **rollout}}


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(path)]


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal but for rounding: a server computes its log-probs in other batches."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=2e-5), key


@pytest.fixture
def run(opened: Opened) -> Callable[..., Path]:
    """Runs a recipe and returns its directory."""

    def run_in(name: str, recipe: Stage, *, resume: bool = False) -> Path:
        with opened(name, resume=resume) as directory:
            rl.run(recipe, directory)
        return directory.path

    return run_in


@pytest.mark.parametrize("staleness", [0, 1])
def test_where_an_engine_runs_changes_nothing(
    serving: ModuleType, recipe: Make, run: Callable[..., Path], staleness: int
) -> None:
    """In the trainer's process before the update, or elsewhere beside it: equal numbers; 0 is the synchronous loop."""
    here = timeless(run("here", recipe(rollout={"staleness": staleness})))
    with serving.served() as one:
        same(timeless(run("elsewhere", recipe(**at(one.url, staleness=staleness)))), here)
    if staleness:
        assert [row["rollout/staleness"] for row in here] == [0, 1, 1, 1]
        assert here[1]["mismatch/mean"] > 1e-3, "the policy moved since"
    else:
        assert "rollout/staleness" not in here[0] and all(row["mismatch/max"] < 1e-4 for row in here)


def test_it_draws_while_the_update_runs(
    serving: ModuleType, recipe: Make, run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update but the last waits until the next step's rollouts are drawn: in one line, it would wait for ever."""
    drawn = threading.Semaphore(0)
    update, waited = rl.update, list[bool]()

    def updating(p: Any, batch: Any, sequences: Any, step: int) -> Any:
        if step + 1 < p.steps:
            waited.append(drawn.acquire(timeout=20))
        return update(p, batch, sequences, step)

    class Telling(serving.TransformersCore):  # type: ignore[misc, name-defined]
        calls = 0

        def complete(self, *args: Any, **more: Any) -> Any:
            found = super().complete(*args, **more)
            Telling.calls += 1
            if Telling.calls > 1:
                drawn.release()
            return found

    monkeypatch.setattr(rl, "update", updating)
    with serving.served(Telling) as one:
        path = run("side by side", recipe(**at(one.url)))
    assert waited == [True] * 3
    assert all(row["time/ahead_rollout"] > 0 for row in read_metrics(path))


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_resumed_with_what_was_on_its_way(
    serving: ModuleType, recipe: Make, opened: Opened, run: Callable[..., Path], place: str
) -> None:
    """Stopped after step 2, whose checkpoint holds the rollouts of step 3, drawn with version 1."""
    expected = timeless(run("straight", recipe()))
    servers = [serving.Served() for _ in range(2)] if place == "elsewhere" else [None, None]
    made = [recipe(**at(one.url)) if one else recipe() for one in servers]
    with opened("broken") as directory, stopping_after(2), pytest.raises(Interrupted, match="step 2 of 4"):
        rl.run(made[0], directory)
    newest = checkpoints.latest(directory.checkpoints, hashes=True)
    assert newest is not None
    saved = json.loads((newest / overlap.FILE).read_text())
    assert {r["version"] for r in saved["rollouts"]} == {1} and saved["position"] == 12
    path = run("broken", made[1], resume=True)
    (same if place == "elsewhere" else lambda a, b: _equal(a, b))(timeless(path), expected)
    last = checkpoints.latest(path / "checkpoints")
    assert last is not None and not (last / overlap.FILE).exists(), "nothing is drawn for a step that never comes"


def _equal(found: Any, expected: Any) -> None:
    assert found == expected


def stopping_after(steps: int) -> AbstractContextManager[None]:
    """Ctrl-C arrives while that step runs."""
    import contextlib

    @contextlib.contextmanager
    def stopping() -> Iterator[None]:
        original, left = rl.step, steps

        def step(*args: Any) -> Any:
            nonlocal left
            found = original(*args)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return found

        rl.step = step
        try:
            yield
        finally:
            rl.step = original

    return stopping()


def test_rollouts_go_on_across_a_sync(
    serving: ModuleType, recipe: Make, opened: Opened, run: Callable[..., Path]
) -> None:
    """Every draw but the first is caught by a sync after 3 tokens, also by that of a checkpoint. A run that was stopped
    goes on as one that was not."""

    def make(settings: Any, folder: Path) -> Any:
        core = serving.TransformersCore(settings, folder)
        complete, seen = core.complete, {"draws": 1 if resuming else 0}

        def completing(requests: Any, *args: Any, **more: Any) -> Any:
            if requests[0].max_new_tokens == 8:  # not what is left of a paused one
                core.cut = 3 if seen["draws"] else 0
                seen["draws"] += 1
            return complete(requests, *args, **more)

        core.complete = completing
        return core

    resuming, changes = False, {"corrections": [], "loss": {"use": "decoupled_ppo"}}
    with serving.served(make) as one:
        straight = timeless(run("straight", recipe(**changes, **at(one.url, partial=True))))
    mixed = [row["rollout/mixed_versions"] for row in straight]
    assert mixed[0] == 0 and all(share > 0.5 for share in mixed[1:]), mixed
    assert all(0 < row["rollout/token_age"] < row["rollout/staleness"] == 1 for row in straight[1:])
    with (
        serving.served(make) as one,
        opened("broken") as directory,
        stopping_after(2),
        pytest.raises(Interrupted),
    ):
        rl.run(recipe(**changes, **at(one.url, partial=True)), directory)
    resuming = True
    with serving.served(make) as one:
        same(timeless(run("broken", recipe(**changes, **at(one.url, partial=True)), resume=True)), straight)


def test_refilled_groups_come_ahead_too(serving: ModuleType, recipe: Make, run: Callable[..., Path]) -> None:
    changes = {
        "algorithm": "dapo",
        "scoring": {"workers": 1, "correct_at": 0.15},
    }
    more = {"group_size": 2, "max_new_tokens": 12, "max_gen_batches": 40}
    with serving.served() as one:
        rows = read_metrics(run("refilled", recipe(**changes, **at(one.url, **more))))
    assert all(row["rollout/rows"] == 8 and row["signal/share"] == 1 for row in rows)
    assert any(row["rollout/gen_batches"] > 1 for row in rows)


def test_an_engine_that_dies_ends_the_run_and_leaves_it_whole(
    serving: ModuleType, recipe: Make, opened: Opened, run: Callable[..., Path]
) -> None:
    """It goes while it draws for step 4, after the checkpoint of step 2: the run says which engine, and resumes."""

    class Dying(serving.TransformersCore):  # type: ignore[misc, name-defined]
        calls = 0

        def complete(self, *args: Any, **more: Any) -> Any:
            Dying.calls += 1
            if Dying.calls == 4:
                one.server.end()
            return super().complete(*args, **more)

    expected = timeless(run("straight", recipe()))
    one = serving.Served(Dying)
    with opened("broken") as directory, pytest.raises(EngineError, match=rf"{one.url}(.|\n)*no more(.|\n)*--resume"):
        rl.run(recipe(**at(one.url)), directory)
    assert len(read_metrics(directory.path)) == 3
    with serving.served() as other:
        same(timeless(run("broken", recipe(**at(other.url)), resume=True)), expected)


def test_a_reward_that_fails_ahead_ends_the_run(serving: ModuleType, recipe: Make, opened: Opened) -> None:
    """One that hangs on every row of step 2, which is scored beside the update of step 1. A checkpoint waits for it,
    and is written without it: there is no older one."""
    rewards = [{"use": "rewards.py:hangs", "timeout_s": 0.05}]
    with (
        serving.served() as one,
        opened() as directory,
        pytest.raises(RunError, match=r"8 of 8 calls failed in this step(.|\n)*timeout_s"),
    ):
        settings = {"rewards": rewards, "run": {"save_every": 1}}
        rl.run(recipe(**settings, **at(one.url, prompts_per_step=4, group_size=2)), directory)
    assert len(read_metrics(directory.path)) == 1
    newest = checkpoints.latest(directory.checkpoints)
    assert newest is not None and checkpoints.step_of(newest) == 1


def test_an_error_of_the_trainer_gives_up_what_is_drawn(
    serving: ModuleType, recipe: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would draw for a minute: the run must not wait for it, nor leave a thread or a server behind."""
    monkeypatch.setattr(rl, "update", lambda *_: (_ for _ in ()).throw(RunError("no update")))
    slow = {"first": True}

    def make(settings: Any, folder: Path) -> Any:
        core = serving.TransformersCore(settings, folder)
        complete = core.complete

        def completing(*args: Any, **more: Any) -> Any:
            core.slow_s, slow["first"] = (0.0 if slow["first"] else 0.5), False
            return complete(*args, **more)

        core.complete = completing
        return core

    with serving.served(make) as one, opened() as directory, pytest.raises(RunError, match="no update"):
        rl.run(recipe(**at(one.url)), directory)
    assert not [t for t in threading.enumerate() if t.name == "rollouts ahead"]


def test_rollouts_read_back_as_they_were() -> None:
    prompts = [Prompt("a", {"x": 1}, "A", (1, 2)), Prompt("b", {}, "B", (3,))]
    segments = (Segment("model", (5, 6), (-0.1, -1 / 3), (6, 7)), Segment("tool", (7,), None))
    turns = (
        Turn("asks", (ToolCall("sql", {"query": "q"}, "7"), ToolCall("?", {}, "no", "malformed")), "7", 0.5),
        Turn("ends"),
    )
    told = {"turns": turns, "ended": "answer", "world_score": 1.0}
    told |= {"part_ends": (1, 2), "turn_rewards": (0.5, -1 / 3), "turn_scores": {"r": (0.25, 0.0)}}
    rollouts = [
        Rollout(prompts[1], 3, segments, "text\n\u00e9", "length", 7, {"r": 0.1, "s": None}, 0.1, None, **told),
        Rollout(prompts[0], 4, (Segment("model", (), ()),), "", "stop", 8, {"r": None}, None, True),
    ]
    drawn = overlap.Drawn(rollouts, {"rewards/r/errors": 2}, 12, [Calls(7, 2, 2, {"r": 2}, {}, {})])
    back = overlap.from_json(json.loads(json.dumps(overlap.as_json(drawn))), prompts)
    back.calls[:] = map(Calls._make, back.calls)
    assert back == drawn and back.rollouts[0].prompt is prompts[1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"corrections": []}, r"rollout.staleness: .*update old(.|\n)*corrections: \[\{use: tis\}\]"),
        ({"corrections": [], "loss": {"use": "decoupled_ppo"}}, None),
        ({"corrections": [{"use": "off_policy_seq_mask"}]}, None),
        ({"corrections": [], "loss": {"use": "disco"}}, None),
        ({"corrections": [], "rollout": {"staleness": 0}}, None),
        ({"rollout": {"engine": "vllm", "top_p": 0.9}}, r"rollout.top_p: vLLM then reports no log-probs"),
        ({"rollout": {"top_p": 0.9}}, None),
        ({"rollout": {"staleness": 2}}, "staleness"),
        ({"rollout": {"partial": True}}, r"rollout.partial(.|\n)*vllm.server"),
        (at("http://a:1", partial=True, stop=["x"]), "rollout.stop: a stop string that a sync divides"),
        (at("http://a:1", partial=True), None),
    ],
)
def test_what_old_rollouts_need(recipe: Make, changes: dict[str, Any], told: str | None) -> None:
    if told is None:
        assert recipe(**changes).rollout.staleness == changes.get("rollout", {}).get("staleness", 1)  # type: ignore[attr-defined]
        return
    with pytest.raises(RecipeError, match=told):
        recipe(**changes)
