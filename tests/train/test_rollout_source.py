"""Rollouts of older weights: the version that samples them, checkpoint contents, and the effect of errors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt, Rollout, Segment, ToolCall, Turn
from posttrain.errors import EngineError, Interrupted, RecipeError, RunError
from posttrain.loss.correction import tis
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import Stage
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.run.watchdog import Watchdog
from posttrain.seeds import derive
from posttrain.train import assemble, rl, rollout_source
from posttrain.train.checkpoint import State
from posttrain.train.collate import rollout_batch
from posttrain.train.collect import StepRollouts, advance_state
from posttrain.train.ranks import Ranks
from posttrain.train.rl_metrics import age_metrics, drift_metrics
from posttrain.train.rollout_source import AsyncRollouts
from posttrain.verify.failures import Calls, Failures

from .conftest import merge_sections
from .versioned_engine import LongRollouts, VersionedEngine

Opened = Callable[..., AbstractContextManager[Any]]
Make = Callable[..., Stage]
Values = dict[str, Any]


# --- the schedule, without a model ---


class Engine:
    """Holds a weight version. asleep: whether it was put to sleep after its last sync."""

    def __init__(self, *, apart: bool) -> None:
        self.generates_during_updates, self.version, self.said, self.closed = apart, 0, list[str](), threading.Event()

    def sync(self, model: None, version: int) -> None:
        assert model is None
        self.version = version
        self.said.append(f"sync {version}")

    def sleep(self) -> None:
        self.said.append("sleep")

    def close(self) -> None:
        self.closed.set()


@dataclasses.dataclass(frozen=True)
class Context:
    """The part of a run's context that a source uses."""

    engine: Engine
    recipe: Any
    watchdog: Watchdog
    steps: int = 7
    opponent: Any = None
    loaded: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(model=None))
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    prompts: tuple[Prompt, ...] = (Prompt("p", {}, "", (1,)),)
    scorer: Any = dataclasses.field(
        default_factory=lambda: SimpleNamespace(failures=lambda history: Failures({"r": "r"}, 0.1, history=history))
    )


class Collected:
    """Replaces `collect`: `drawn` has (step, version before, version after) of each generation, in order.

    hold: steps whose generation, or `slow`: whose scoring, waits for `go`.
    """

    def __init__(self) -> None:
        self.drawn: list[tuple[int, int, int]] = []
        self.hold, self.slow, self.failing = set[int](), set[int](), set[int]()
        self.go, self.begun = threading.Event(), threading.Event()
        self.refills = False

    def __call__(
        self, ctx: Context, state: State, claim: Callable[[int], int], on_generated: Callable[[], object] = lambda: None
    ) -> StepRollouts:
        start, before = claim(2), ctx.engine.version
        self.begun.set()
        if state.step in self.hold:
            while not (self.go.wait(0.01) or ctx.engine.closed.is_set()):
                pass
        self.drawn.append((state.step, before, ctx.engine.version))
        if not self.refills:
            on_generated()
        if state.step in self.slow:
            assert self.go.wait(20)
        if state.step in self.failing:
            raise RunError(f"rollouts of step {state.step}")
        rollout = Rollout(ctx.prompts[0], 0, (Segment("model", (1,), (-1.0,)),), "", "stop", before)
        failed = Calls(state.step, 1, 1, {}, {}, {})
        return StepRollouts(state.step, [rollout], {"seen": state.memory}, [failed], start + 2)


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Collected:
    found = Collected()
    monkeypatch.setattr(rollout_source, "collect", found)
    return found


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., Context]:
    def make(staleness: int, *, apart: bool = True, partial: bool = False) -> Context:
        recipe = SimpleNamespace(rollout=SimpleNamespace(staleness=staleness, partial=partial))
        return Context(Engine(apart=apart), recipe, Watchdog(tmp_path, None))

    return make


def train_until(ctx: Context, source: AsyncRollouts, state: State, upto: int) -> list[int]:
    """Take the rollouts of all steps up to this one; return the versions that sampled them."""
    found = []
    while state.step < upto:
        found.append(source.next(ctx, state).rollouts[0].version)
        state.step += 1
    return found


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
def test_rollouts_of_step_t_are_sampled_by_version_t_minus_k(
    context: Any, collected: Collected, staleness: int, apart: bool
) -> None:
    """Complete, in order, and none for a step that never comes; an engine that cannot run beside the trainer then
    sleeps."""
    ctx, state = context(staleness, apart=apart), State()
    source = AsyncRollouts(ctx)
    versions = [max(0, t - staleness) for t in range(7)]
    assert train_until(ctx, source, state, 7) == versions
    assert collected.drawn == [(t, v, v) for t, v in enumerate(versions)]
    assert state.position == 14 and [Calls._make(c).step for c in state.calls] == list(range(7))
    synced = [f"sync {v}" for v in range(1, 7)]
    assert ctx.engine.said == (synced if apart else ["sleep", *(x for s in synced for x in (s, "sleep"))])


def test_rollouts_are_sampled_during_the_update(context: Any, collected: Collected) -> None:
    """Rollouts of step 2 wait until the trainer is in the update of step 1, and the sync of step 2 waits for them."""
    collected.hold = {2}
    ctx, state = context(1), State()
    source = AsyncRollouts(ctx)
    assert train_until(ctx, source, state, 2) == [0, 0]
    assert collected.drawn == [(0, 0, 0), (1, 0, 0)]
    threading.Timer(0.05, collected.go.set).start()
    assert train_until(ctx, source, state, 3) == [1] and collected.drawn[2] == (2, 1, 1)


@pytest.mark.parametrize("refills", [False, True])
def test_sync_waits_for_generation_but_not_for_scores(context: Any, collected: Collected, refills: bool) -> None:
    """Scoring of step 3 lasts until step 3 needs the scores; if scores decide whether more is sampled, the sync waits
    for them."""
    collected.slow, collected.refills = {3}, refills
    ctx, state = context(3), State()
    source = AsyncRollouts(ctx)
    assert train_until(ctx, source, state, 1) == [0]
    if refills:
        threading.Timer(0.05, collected.go.set).start()
        assert train_until(ctx, source, state, 2) == [0] and collected.go.is_set()
    train_until(ctx, source, state, 3)
    assert collected.go.is_set() == refills
    collected.go.set()
    assert train_until(ctx, source, state, 7) == [0, 1, 2, 3]
    assert [step for step, *_ in collected.drawn] == list(range(7))


def test_sync_with_partial_does_not_wait(context: Any, collected: Collected) -> None:
    """Long rollouts of step 2 are in progress until it needs them: weights of steps 1 and 2 arrive meanwhile."""
    collected.hold = {2}
    ctx, state = context(2, partial=True), State()
    source = AsyncRollouts(ctx)
    assert train_until(ctx, source, state, 2) == [0, 0]
    threading.Timer(0.05, collected.go.set).start()
    assert train_until(ctx, source, state, 3) == [0]
    assert (2, 0, 2) in collected.drawn
    assert train_until(ctx, source, state, 7) == [1, 2, 3, 4]


@pytest.mark.parametrize("staleness", [1, 4])
@pytest.mark.parametrize("done", range(1, 7))
def test_checkpoint_contains_rollouts_of_older_weights(
    context: Any, collected: Collected, tmp_path: Path, staleness: int, done: int
) -> None:
    ctx, state = context(staleness), State()
    source = AsyncRollouts(ctx)
    straight = train_until(ctx, source, state, done)
    source.finish(ctx, state)
    source.save(tmp_path, done)
    held = json.loads((tmp_path / rollout_source.QUEUED_FILE).read_text())
    assert [batch["step"] for batch in held] == list(range(done, min(done + staleness, 7)))
    saved = dataclasses.replace(state)
    straight += train_until(ctx, source, state, 7)

    collected.drawn.clear()
    ctx = context(staleness)
    source = AsyncRollouts(ctx)
    source.load(tmp_path, ctx, saved)  # type: ignore[arg-type]
    assert train_until(ctx, source, saved, 7) == straight[done:]
    assert saved == state and straight == [max(0, t - staleness) for t in range(7)]
    assert collected.drawn == [(t, t - staleness, t - staleness) for t in range(done + staleness, 7)]


def test_final_checkpoint_contains_no_rollouts_and_can_be_extended(
    context: Any, collected: Collected, tmp_path: Path
) -> None:
    ctx, state = context(4), State()
    source = AsyncRollouts(ctx)
    train_until(ctx, source, state, 7)
    source.finish(ctx, state)
    source.save(tmp_path, 7)
    assert not (tmp_path / rollout_source.QUEUED_FILE).exists()
    ctx = dataclasses.replace(context(4), steps=9)
    source = AsyncRollouts(ctx)
    source.load(tmp_path, ctx, state)
    collected.drawn.clear()
    assert train_until(ctx, source, state, 9) == [7, 7] and state.position == 18


def test_finish_with_partial_syncs_the_newest_weights(context: Any, collected: Collected) -> None:
    collected.hold = {3}
    ctx, state = context(2, partial=True), State()
    source = AsyncRollouts(ctx)
    train_until(ctx, source, state, 2)
    threading.Timer(0.05, collected.go.set).start()
    source.finish(ctx, state)
    assert (3, 1, 2) in collected.drawn and ctx.engine.version == 2


@pytest.mark.parametrize(
    ("failing", "exact", "kept"),
    [
        (4, True, [2, 3]),  # started by version 2: the checkpoint's weights sample them again
        (3, False, [2]),
        (2, False, []),
    ],
)
def test_rollouts_to_save_after_an_error(
    context: Any, collected: Collected, tmp_path: Path, failing: int, exact: bool, kept: list[int]
) -> None:
    """Two steps are finished, and the third fails before its update, or its own rollouts do."""
    collected.failing = {failing}
    ctx, state = context(2), State()
    source = AsyncRollouts(ctx)
    train_until(ctx, source, state, 2)
    with pytest.raises(RunError, match="rollouts of step 2") if failing == 2 else contextlib.nullcontext():
        source.next(ctx, dataclasses.replace(state))
    assert source.can_save(2) == exact
    source.save(tmp_path, 2)
    found = rollout_source.read_queued(tmp_path, ctx.prompts)
    assert [batch.step for batch in found][: len(kept)] == kept and len(found) <= len(kept) + (failing > 4)


def test_rollouts_in_progress_are_awaited_with_a_timeout_after_an_error(
    context: Any, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected.hold = {3}
    ctx, state = context(2), State()
    source = AsyncRollouts(ctx)
    train_until(ctx, source, state, 2)
    monkeypatch.setattr(rollout_source, "DRAIN_TIMEOUT_S", 0.05)
    assert not source.can_save(2)
    monkeypatch.undo()
    threading.Timer(0.05, collected.go.set).start()
    assert source.can_save(2)


@pytest.mark.usefixtures("collected")
def test_reward_failures_are_counted_in_the_order_of_steps(
    context: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each step's failures are within the limit, those of steps 0 to 2 together are not; the rollouts that exceeded it
    are not saved, because a run could not resume from them."""
    inner = Collected.__call__

    def failing(self: Collected, *args: Any) -> StepRollouts:
        found = inner(self, *args)
        return dataclasses.replace(found, calls=[Calls(found.step, 40, 40, {"r": 16}, {}, {"r": "why"})])

    monkeypatch.setattr(Collected, "__call__", failing)
    ctx, state = context(2), State()
    source = AsyncRollouts(ctx)
    train_until(ctx, source, state, 2)
    with pytest.raises(RunError, match="48 of 120 calls failed in the last 3 steps"):
        source.next(ctx, state)
    assert not source.can_save(2)
    source.save(tmp_path, 2)
    assert not (tmp_path / rollout_source.QUEUED_FILE).exists()


def test_cancelled_rollouts_leave_no_thread(context: Any, collected: Collected) -> None:
    """Ctrl-C arrives while a step waits for its rollouts: the engine is closed, which ends its requests."""
    collected.hold = {1, 2}
    ctx, state = context(2), State()
    with contextlib.closing(AsyncRollouts(ctx)) as source:
        assert train_until(ctx, source, state, 1) == [0]
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            source.next(ctx, state)
    assert ctx.engine.closed.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts of a step"]


@pytest.mark.parametrize(("version", "wrong"), [(2, False), (5, False), (1, True), (6, True)])
def test_impossible_versions_raise(version: int, wrong: bool) -> None:
    """Step 5 with staleness 3 allows versions 2 to 5, for each token."""
    segments = (Segment("model", (1, 2), None, (3, version)),)
    rollout = Rollout(Prompt("p", {}, "", (1,)), 0, segments, "", "stop", 3)
    scorer: Any = SimpleNamespace(failures=lambda history: Failures({}, 0.1, history=history))
    ctx: Any = SimpleNamespace(scorer=scorer)
    with pytest.raises(EngineError, match=r"step 6 .* versions") if wrong else contextlib.nullcontext():
        advance_state(ctx, State(step=5), StepRollouts(5, [rollout], {}, [], 0), 3)


def test_rollouts_are_read_back_unchanged(tmp_path: Path) -> None:
    prompts = [Prompt("a", {"x": 1}, "A", (1, 2)), Prompt("b", {}, "B", (3,))]
    segments = (Segment("model", (5, 6), (-0.1, -1 / 3), (6, 7)), Segment("tool", (7,), None))
    turns = (
        Turn("asks", (ToolCall("sql", {"query": "q"}, "7"), ToolCall("?", {}, "no", "malformed")), "7", 0.5),
        Turn("ends"),
    )
    more: Values = {"turns": turns, "ended": "answer", "world_score": 1.0, "against": (0.5, None)}
    more |= {"part_ends": (1, 2), "turn_rewards": (0.5, -1 / 3), "turn_scores": {"r": (0.25, 0.0)}}
    rollouts = [
        Rollout(prompts[1], 3, segments, "text\n\u00e9", "length", 7, {"r": 0.1, "s": None}, 0.1, None, **more),
        Rollout(prompts[0], 4, (Segment("model", (), ()),), "", "stop", 8, {"r": None}, None, True),
    ]
    batches = [
        StepRollouts(9, rollouts, {"rewards/r/errors": 2}, [Calls(7, 2, 2, {"r": 2}, {}, {})], 12),
        StepRollouts(10, [], {}, [], 14),
    ]
    rollout_source.write_queued(tmp_path, batches)
    back = rollout_source.read_queued(tmp_path, prompts)
    assert back == batches and back[0].rollouts[0].prompt is prompts[1]


# --- importance ratios ---


def test_each_token_is_weighted_by_its_version() -> None:
    """Four versions sampled the two rollouts of step 5; a tool's reply between two turns is not counted."""
    prompt = Prompt("p", {}, "", (1,))
    long = (Segment("model", (1, 2, 3), (-1.0, -2.0, -3.0), (2, 3, 3)), Segment("tool", (4,), None))
    last = Segment("model", (5, 6), (-1.0, -1.0), (4, 5))
    rollouts = [
        Rollout(prompt, 0, (*long, last), "", "stop", 2),
        Rollout(prompt, 0, (Segment("model", (7, 8), (-0.5, -0.5)),), "", "stop", 4),
    ]
    batch = rollout_batch(rollouts)
    assert batch.versions is not None and batch.rollout_logp is not None
    assert batch.versions[0, [0, 1, 2, 4, 5]].tolist() == [2, 3, 3, 4, 5] and batch.versions[1, :2].tolist() == [4, 4]
    # the trainer at step 5 has -1 everywhere: ratios e^0, e^1, e^2 | e^0, e^0 and e^-0.5 twice, cut at 2
    logp = batch.rollout_logp.nan_to_num(nan=0.0) * 0 - 1.0
    weights = tis(batch, logp, clip_max=2.0).weights
    assert weights[0].tolist() == [1.0, 2.0, 2.0, 0.0, 1.0, 1.0]
    assert weights[1, :2].tolist() == pytest.approx([0.60653066, 0.60653066])
    # ages 3, 2, 2, 1, 0 and 1, 1: oldest 3 and 1, mean 10 / 7
    assert age_metrics(batch, 5) == {
        "rollout/staleness": 2.0,
        "rollout/token_age": 10 / 7,
        "rollout/mixed_versions": 0.5,
    }
    # d is 0 | 1, 2 | 0 | 0, and -1/2 twice; if the second rollout has no log-probs of the trainer, it has no drift
    drift = drift_metrics(batch, logp, 5)
    assert [drift[f"rollout/age/{age}"] for age in range(4)] == pytest.approx([1 / 7, 3 / 7, 2 / 7, 1 / 7])
    k3 = [0.0, (0.0 + 2 * (math.exp(-0.5) - 0.5)) / 3, (math.e - 2 + math.exp(2) - 3) / 2, 0.0]
    assert [drift[f"mismatch/kl_age/{age}"] for age in range(4)] == pytest.approx(k3)
    logp[1] = 0.0
    assert drift_metrics(batch, logp, 5)["mismatch/kl_age/1"] == 0.0


# --- whole runs on `tiny` ---

REWARDS = """
def digits(completion, token_count):
    return sum(c.isdigit() for c in completion) / max(token_count, 1)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Make:
    """Return a function that builds an RL recipe on `tiny` with corrections for stale rollouts; keyword arguments
    change keys of its sections."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(24):
            file.write(json.dumps({"prompt": f"{i}+{i}=" + "?" * (i % 3)}) + "\n")
    base: Values = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 3, "group_size": 2, "max_new_tokens": 12},
        "rewards": [{"use": "rewards.py:digits"}],
        "corrections": [{"use": "tis"}],
        "scoring": {"workers": 1, "correct_at": 0.6},
        "optim": {"lr": 5e-3},
        "run": {"steps": 6, "save_every": 1, "keep_checkpoints": 9},
    }
    return lambda **changes: load_dict(merge_sections(base, changes), base_dir=tmp_path, where="test").recipe


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Return a function that sets the engine of runs, given as a function of the tokenizer."""

    def set_engine(make: Callable[[Any], Any]) -> None:
        monkeypatch.setattr(assemble, "make_engine", lambda _, loaded, **__: make(loaded.tokenizer))

    return set_engine


@pytest.fixture
def run(opened: Opened) -> Callable[..., list[Values]]:
    """Return a function that runs a recipe and returns its metrics without times."""

    def run_in(name: str, recipe: Stage, *, resume: bool = False) -> list[Values]:
        with opened(name, resume=resume) as directory:
            rl.run(recipe, directory)  # type: ignore[arg-type]
        return timeless(directory.path)

    return run_in


def timeless(path: Path) -> list[Values]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(path)]


def versions_at_start(path: Path) -> list[set[int]]:
    """Return the versions that started the rollouts of each step."""
    rows = [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]
    return [{row["version"] for row in rows if row["step"] == step} for step in range(1, 7)]


@pytest.mark.parametrize(("staleness", "refilled"), [(0, False), (1, True), (4, False), (4, True)])
def test_run_killed_after_any_step_resumes_exactly(
    recipe: Make, run: Any, use: Any, tmp_path: Path, staleness: int, refilled: bool
) -> None:
    """Also with groups replaced by those of new prompts; an engine that cannot run beside the trainer samples the
    same."""
    changes: Values = {"rollout": {"staleness": staleness}}
    if refilled:
        changes = {"algorithm": "dapo", "rollout": {"staleness": staleness, "max_gen_batches": 40, "group_size": 3}}
    made = recipe(**changes)
    use(lambda tokenizer: VersionedEngine(tokenizer, slowest=0.001))
    straight = run("straight", made)
    assert versions_at_start(tmp_path / "straight") == [{max(0, t - staleness)} for t in range(6)]
    ages = [row.get("rollout/staleness") for row in straight]
    assert ages == ([None] * 6 if not staleness else [min(t, staleness) for t in range(6)])
    if refilled:
        assert any(row["rollout/gen_batches"] > 1 for row in straight)
    for done in {0: (3,), 1: (2,), 4: (3,) if refilled else (1, 4)}[staleness]:
        shutil.copytree(tmp_path / "straight", tmp_path / f"killed {done}")
        for step in range(done + 1, 7):
            shutil.rmtree(checkpoints.folder_for(tmp_path / f"killed {done}" / "checkpoints", step))
        assert run(f"killed {done}", made, resume=True) == straight, done

    def together(tokenizer: Any) -> VersionedEngine:
        engine = VersionedEngine(tokenizer)
        engine.generates_during_updates = False
        return engine

    use(together)
    assert run("together", made) == straight


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_evaluations_do_not_change_rollouts(recipe: Make, run: Any, use: Any, staleness: int) -> None:
    """They wait for rollouts in progress, and sync the weights that the next step would sync anyway."""
    use(lambda tokenizer: VersionedEngine(tokenizer, slowest=0.001))
    rollout = {"staleness": staleness}
    plain = run("plain", recipe(rollout=rollout))
    evaluation = {"every": 2, "data": {"source": "rows.jsonl", "size": 4}}
    rows = run("evaluated", recipe(rollout=rollout, eval=evaluation))
    assert [row["step"] for row in rows if "eval/reward" in row] == [0, 2, 4, 6]
    steps = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows if row["step"]]
    assert steps == plain


@pytest.mark.parametrize("staleness", [1, 4])
def test_rollouts_sampled_by_several_versions(
    recipe: Make, run: Any, use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """With `partial` a rollout of 11 tokens spans up to 3 updates; a checkpoint, which waits for it, ends it sooner. A
    killed run resumes from there."""
    rollout = {"staleness": staleness, "partial": True, "engine": "vllm", "vllm": {"server": {"devices": [1]}}}
    made: Any = recipe(rollout=rollout, run={"save_every": 3})
    engines: list[LongRollouts] = []

    def use_long(resumed: int = 0) -> None:
        def make(tokenizer: Any) -> LongRollouts:
            engines.append(LongRollouts(tokenizer, made.rollout, steps=6, seed=made.run.seed, resumed=resumed))
            return engines[-1]

        use(make)

    finish = AsyncRollouts.finish

    def finishing(self: AsyncRollouts, *args: Any) -> None:
        engines[-1].finishing = True
        finish(self, *args)
        engines[-1].finishing = engines[-1].hurried = False

    monkeypatch.setattr(AsyncRollouts, "finish", finishing)
    monkeypatch.setattr(assemble, "check_engine", lambda *_: None)
    use_long()
    straight = run("straight", made)
    assert straight[0]["rollout/token_age"] == 0
    assert [row["rollout/mixed_versions"] for row in straight[1:]] == [1.0] * 5
    # token i of a rollout that version v began is of version min(v + i // 3, step): 11 tokens or more, 12 at most.
    # Those of step 2 (from 0), begun by version 1 or 0:
    expected = {1: (3, 3 * 1), 4: (6, 3 * 2 + 3 * 1)}[staleness]
    lengths = straight[2]["completions/mean_length"] * 6
    assert straight[2]["rollout/token_age"] == pytest.approx(6 * expected[1] / lengths)
    assert all(row["rollout/staleness"] == min(t, staleness) for t, row in enumerate(straight))
    shutil.rmtree(checkpoints.folder_for(tmp_path / "straight" / "checkpoints", 6))
    use_long(resumed=3)
    assert run("straight", made, resume=True) == straight


class SecondTurnLater(VersionedEngine):
    """Makes a rollout's second turn wait for newer weights than its first turn had, if there are any before the trainer
    needs the rollout."""

    def __init__(self, tokenizer: Any, steps: int) -> None:
        super().__init__(tokenizer)
        seeds = {derive(0, "rollout", step, 0): step for step in range(steps)}
        self.steps = {
            key: (step, turn)
            for seed, step in seeds.items()
            for turn, key in enumerate((seed, derive(seed, "turn", 1)))
        }
        self.first: dict[tuple[int, int], int] = {}

    async def complete(self, request: Any, sampling: Any) -> Any:
        step, turn = self.steps[request.seed - request.number]
        rollout = (step, request.number)
        while turn and self.version == self.first[rollout] < step and not self.closed:
            await asyncio.sleep(0.001)
        found = await super().complete(request, sampling)
        self.first.setdefault(rollout, found[0].versions[0])
        return found


def test_turns_sampled_by_different_versions(
    recipe: Make, run: Any, use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts of two turns in an environment, up to three steps concurrently; each token has the log-prob of its
    version, and text of the environment has none."""
    (tmp_path / "env.py").write_text(
        "class Echo:\n"
        "    def reset(self, row): self.turn = 0\n"
        "    def step(self, text):\n"
        "        self.turn += 1\n"
        "        return 'again', self.turn == 2, 0.0\n"
        "    def score(self): return 0.0\n"
        "    def close(self): pass\n"
    )
    rollout = {"staleness": 2, "partial": True, "engine": "vllm", "max_turns": 2, "turn_tokens": 20}
    made: Any = recipe(
        rollout={**rollout, "max_new_tokens": 100}, environment={"use": "env.py:Echo"}, run={"save_every": None}
    )
    taken, take = list[list[Rollout]](), rollout_source.advance_state
    monkeypatch.setattr(assemble, "check_engine", lambda *_: None)
    monkeypatch.setattr(rollout_source, "advance_state", lambda *args: (taken.append(args[2].rollouts), take(*args))[1])
    use(lambda tokenizer: SecondTurnLater(tokenizer, 6))
    rows = run("turns", made)
    for step, rollouts in enumerate(taken):
        for r in rollouts:
            one, reply, two = r.segments
            assert (one.kind, reply.kind, two.kind) == ("model", "tool", "model")
            assert step - 2 <= r.version == r.versions[0] <= step
            assert r.version == step or r.version < min(two.versions or ()) <= max(two.versions or ()) <= step
        batch = rollout_batch(rollouts)
        assert batch.rollout_logp is not None and batch.versions is not None
        logps, versions = batch.rollout_logp[batch.mask], batch.versions[batch.mask]
        assert torch.equal(logps, -1 - versions / 8) and int(batch.mask.sum()) == sum(
            len(r.sampled_ids) for r in rollouts
        )
    assert rows[0]["rollout/mixed_versions"] == 0 and sum(row["rollout/mixed_versions"] for row in rows) > 3


def test_ctrl_c_saves_sampled_rollouts(recipe: Make, run: Any, use: Any, opened: Opened) -> None:
    """It arrives in step 2, while rollouts of steps 3 to 6 are finished or in progress."""
    made = recipe(rollout={"staleness": 4}, run={"save_every": None})
    use(lambda tokenizer: VersionedEngine(tokenizer, slowest=0.002))
    straight = run("straight", made)
    with opened("broken") as directory, stopping_after(2), pytest.raises(Interrupted, match="step 2 of 6"):
        rl.run(made, directory)  # type: ignore[arg-type]
    newest = checkpoints.latest(directory.checkpoints, hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 2
    saved = json.loads((newest / rollout_source.QUEUED_FILE).read_text())
    assert [(batch["step"], batch["position"]) for batch in saved] == [(2, 9), (3, 12), (4, 15), (5, 18)]
    assert run("broken", made, resume=True) == straight


@contextlib.contextmanager
def stopping_after(steps: int) -> Iterator[None]:
    """Ctrl-C arrives while that step runs."""
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


def test_dying_engine_ends_the_run_which_resumes(recipe: Make, run: Any, use: Any, opened: Opened) -> None:
    """While it samples for step 5, whose rollouts a checkpoint of steps 3 or 4 would have to contain: the checkpoint of
    step 2 is the newest."""

    class Dying(VersionedEngine):
        async def complete(self, request: Any, sampling: Any) -> Any:
            if len(self.drawn) >= 13:
                raise EngineError("the engine is gone")
            return await super().complete(request, sampling)

    made = recipe(rollout={"staleness": 2}, run={"save_every": 2})
    use(VersionedEngine)
    straight = run("straight", made)
    use(Dying)
    with opened("broken") as directory, pytest.raises(EngineError, match="the engine is gone"):
        rl.run(made, directory)  # type: ignore[arg-type]
    newest = checkpoints.latest(directory.checkpoints)
    assert newest is not None and checkpoints.step_of(newest) == 2
    use(VersionedEngine)
    assert run("broken", made, resume=True) == straight


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"corrections": []}, r"rollout.staleness: .*an update old(.|\n)*corrections: \[\{use: tis\}\]"),
        ({"corrections": [], "rollout": {"staleness": 4}}, r"rollout.staleness: .*4 updates old"),
        ({"corrections": [], "loss": {"use": "decoupled_ppo"}}, None),
        ({"corrections": [{"use": "off_policy_seq_mask"}]}, None),
        ({"corrections": [], "loss": {"use": "disco"}}, None),
        ({"corrections": [], "rollout": {"staleness": 0}}, None),
        ({"rollout": {"engine": "vllm", "top_p": 0.9}}, r"rollout.top_p: vLLM then reports no log-probs"),
        ({"rollout": {"top_p": 0.9}}, None),
        ({"rollout": {"staleness": 8}}, None),
        ({"rollout": {"staleness": 9}}, "staleness"),
        ({"rollout": {"partial": True}}, r"rollout.partial(.|\n)*engine: vllm"),
        ({"rollout": {"partial": True, "engine": "vllm", "staleness": 0}}, r"rollout.partial(.|\n)*staleness"),
        ({"rollout": {"partial": True, "engine": "vllm", "vllm": {"sleep": True}}}, "the engine sleeps then"),
        ({"rollout": {"partial": True, "engine": "vllm"}}, None),
        ({"rollout": {"engine": "vllm", "vllm": {"server": {"devices": [1]}}, "partial": True, "stop": ["x"]}},
         "rollout.stop: a stop string split by a weight sync"),
        ({"rollout": {"engine": "vllm", "vllm": {"server": {"devices": [1]}}, "partial": True, "staleness": 4}}, None),
    ],
)  # fmt: skip
def test_requirements_of_stale_rollouts(recipe: Make, changes: Values, told: str | None) -> None:
    changes = {**changes, "rollout": {"staleness": 1, **changes.get("rollout", {})}}
    if told is None:
        assert recipe(**changes).rollout.staleness == changes["rollout"]["staleness"]  # type: ignore[union-attr]
        return
    with pytest.raises(RecipeError, match=told):
        recipe(**changes)


def test_ctrl_c_while_waiting_for_rollouts_keeps_them_running() -> None:
    """`close` ends them: Python 3.11 reports a thread as ended if a signal interrupts its `join`."""
    go, began = threading.Event(), threading.Event()

    def work(_: Callable[[], object]) -> Any:
        began.set()
        go.wait()
        raise EngineError("the engine is closed")

    task = rollout_source.RolloutTask(0, work)
    assert not task.is_running
    task.start()
    began.wait()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        task.wait()
    assert task.is_running
    go.set()
    with pytest.raises(EngineError, match="closed"):
        task.result()
    assert not task.is_running and not task.is_complete
