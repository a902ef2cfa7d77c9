"""Replay in the training loop: stored rollouts are trained on with the log-probs of their sampling policy, and runs
resume exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.errors import RunError
from posttrain.replay.protocol import Replay, Stock
from posttrain.train import replay, saved_rollouts
from posttrain.train.collate import join_batches
from posttrain.train.replay_store import ReplayStore

from .test_prompt_variants import Seen, Values, seen  # noqa: F401  fixture

REWARDS = '''
def sparse(completion):
    """Right about every eighth time, whatever the model knows."""
    return float(sum(map(ord, completion)) % 8 == 0)
'''
OWN = '''
from dataclasses import dataclass
from posttrain.replay.protocol import Replay, Stock

@dataclass(frozen=True, kw_only=True)
class Newest(Replay):
    """The newest rollout of a prompt takes the place of the last one of its group, whatever it earned."""
    age: int = 1

    def replace(self, fresh, stored, request):
        last = {row.uid: place for place, row in enumerate(fresh)}
        return {last[row.uid]: place for place, row in enumerate(stored) if row.uid in last}

    def store(self, fresh, stored, request):
        return Stock([], [place for place, row in enumerate(fresh)])

@dataclass(frozen=True, kw_only=True)
class Mixed(Newest):
    """Puts rollouts where they do not belong."""

    def replace(self, fresh, stored, request):
        return {place: 0 for place, row in enumerate(fresh) if stored and row.uid != stored[0].uid}

class Nothing:
    pass
'''


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(4)))
    return tmp_path


def values_of(**changes: Any) -> Values:
    return {
        "stage": "rl",
        "algorithm": "replay_success",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6},
        "rewards": [{"use": "rewards.py:sparse", "correct": True}],
        "scoring": {"workers": 1, "correct_at": 0.5},
        "optim": {"lr": 1e-2},
        "run": {"steps": 6, "save_every": 3, "samples_per_step": 99, "keep_rollouts": 9, "keep_checkpoints": 9},
        **changes,
    }


def train_run(cli: Any, home: Path, name: str = "run", **changes: Any) -> list[Values]:
    (home / f"{name}.yaml").write_text(json.dumps(values_of(**changes)))
    cli.run("rl", str(home / f"{name}.yaml"), "--output", str(home / name))
    return list(cli.rows_of(home / name))


@pytest.mark.parametrize("batch", [{}, {"minibatches": 2, "epochs": 2}], ids=["one update", "four updates"])
def test_replayed_successes_keep_their_stored_log_probs(
    cli: Any,
    home: Path,
    seen: Seen,  # noqa: F811
    batch: Values,
) -> None:
    """Each replayed row is the first of a group whose other rows failed, has the tokens and log-probs of the step that
    sampled it, and an advantage above 0; log-probs of fresh rows are computed."""
    metrics = train_run(cli, home, batch=batch)
    count = 0
    for step, (rollouts, given) in enumerate(zip(seen.rollouts, seen.batches, strict=True)):
        replayed = [n for n, rollout in enumerate(rollouts) if rollout.stored]
        assert metrics[step]["replay/rows"] == len(replayed)
        for n in replayed:
            stored, tokens = rollouts[n].stored, list(rollouts[n].ids)
            assert stored is not None and stored.step < step and given.old_logp is not None
            then = saved_rollouts.read(home / "run", stored.step + 1)
            origin = next(
                m for m, one in enumerate(seen.rollouts[stored.step])
                if one.prompt.uid == rollouts[n].prompt.uid and list(one.ids) == tokens and one.stored is None
            )  # fmt: skip
            width = len(tokens)
            assert then.batch.old_logp is not None and then.batch.rollout_logp is not None
            assert torch.equal(given.old_logp[n, :width], then.batch.old_logp[origin, :width])
            assert given.rollout_logp is not None and given.advantages is not None
            assert torch.equal(given.rollout_logp[n, :width], then.batch.rollout_logp[origin, :width])
            assert given.versions is not None and set(given.versions[n, :width].tolist()) == {stored.step}
            assert given.advantages[n] > 0 and bool(given.mask[n, :width].all())
            group = [m for m, one in enumerate(rollouts) if one.group == rollouts[n].group]
            assert group[0] == n and all(rollouts[m].reward == 0 for m in group[1:])
            now = saved_rollouts.read(home / "run", step + 1)
            if not batch:  # `logp` is then the policy before its only update, which did not sample the stored row
                assert not torch.allclose(now.logp[n, :width], given.old_logp[n, :width], atol=1e-4)
                fresh = next(m for m in group if m != n)
                width = len(rollouts[fresh].ids)
                torch.testing.assert_close(now.logp[fresh, :width], given.old_logp[fresh, :width], atol=1e-4, rtol=0)
        count += len(replayed)
    assert count >= 3
    assert any(row["replay/age"] >= 1 and row["replay/reward"] == 1 for row in metrics if row["replay/rows"])
    samples = [json.loads(line) for line in (home / "run" / "samples.jsonl").read_text().splitlines()]
    assert sum("sampled_in_step" in sample for sample in samples) == count


def test_replay_of_successes_with_row_selection(cli: Any, home: Path, seen: Seen) -> None:  # noqa: F811
    """DART: of four rows the three with the largest entropy are trained on; a replayed success can be one of them, with
    its advantage above 0."""
    metrics = train_run(cli, home, algorithm="dart")
    replayed = [
        (given, n)
        for given in seen.batches if given.replayed is not None
        for n in given.replayed.nonzero()[:, 0].tolist()
    ]  # fmt: skip
    assert len(replayed) == sum(row["replay/rows"] for row in metrics) > 0
    assert any(bool(given.mask[n].any()) for given, n in replayed)
    assert all(given.advantages is not None and given.advantages[n] > 0 for given, n in replayed)
    for given in seen.batches:
        groups = given.group_ids.tolist()
        rows = given.mask.any(-1)
        assert all(sum(bool(rows[n]) for n, g in enumerate(groups) if g == group) == 3 for group in set(groups))


@pytest.mark.parametrize("algorithm", ["skywork_ssb", "remix"])
def test_added_rows_keep_their_advantages_and_log_probs(
    cli: Any,
    home: Path,
    seen: Seen,  # noqa: F811
    algorithm: str,
) -> None:
    """An added row has a group of its own and its stored values. Its ratio is to its sampling policy: by `old_logp`
    with a clip, by `rollout_logp` with ReMix, where `old_logp` is the current policy."""
    metrics = train_run(cli, home, algorithm=algorithm)
    samples = [json.loads(line) for line in (home / "run" / "samples.jsonl").read_text().splitlines()]
    sampled = [[one for one in rollouts if one.stored is None] for rollouts in seen.rollouts if len(rollouts) == 16]
    count = 0
    for step, given in enumerate(seen.batches):
        assert metrics[step]["rollout/rows"] == 16 and len(given) == 16 + metrics[step]["replay/rows"]
        rows = [sample for sample in samples if sample["step"] == step + 1]
        now = saved_rollouts.read(home / "run", step + 1)
        for n in range(16, len(given)):
            origin, ids = rows[n]["sampled_in_step"], [i for segment in rows[n]["segments"] for i in segment["ids"]]
            place = next(
                m for m, one in enumerate(sampled[origin])
                if one.prompt.uid == rows[n]["uid"] and list(one.ids) == ids
            )  # fmt: skip
            then, width = saved_rollouts.read(home / "run", origin + 1), len(ids)
            given_advantages, own = given.advantages, seen.batches[origin].advantages
            assert given_advantages is not None and own is not None and given_advantages[n] == own[place]
            assert given.rollout_logp is not None and then.batch.rollout_logp is not None
            assert torch.equal(given.rollout_logp[n, :width], then.batch.rollout_logp[place, :width])
            assert given.group_ids.tolist().count(int(given.group_ids[n])) == 1
            assert given.keep is not None and bool(given.keep[n]) and bool(given.mask[n, :width].all())
            assert now.batch.old_logp is not None and then.batch.old_logp is not None
            same = torch.equal(now.batch.old_logp[n, :width], then.batch.old_logp[place, :width])
            assert same == (algorithm == "skywork_ssb") or given_advantages[n] == 0
        count += len(given) - 16
    assert count >= 5 and all(row["replay/age"] >= 1 for row in metrics if row["replay/rows"])


def test_left_out_rows_get_a_separate_update(
    cli: Any,
    home: Path,
    seen: Seen,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RoRecomp: a compensation batch has the oldest rows that no step has trained on, with the advantages of their
    groups and the log-probs of their sampling policies; the update changes the weights and removes the rows."""
    apart: list[tuple[RolloutBatch, Values]] = []
    once = replay.update_once

    def recorded(ctx: Any, batch: RolloutBatch, sequences: Any, *rest: Any) -> bool:
        before = {name: weight.clone() for name, weight in ctx.loaded.model.named_parameters()}
        made = once(ctx, batch, sequences, *rest)
        moved = sum(not torch.equal(before[name], weight) for name, weight in ctx.loaded.model.named_parameters())
        apart.append((batch, {"ids": [list(ids) for ids in sequences.ids], "moved": moved, "step": rest[1]}))
        return made

    monkeypatch.setattr(replay, "update_once", recorded)
    own = {"use": "compensation", "size": 6, "p_end": 1.0}
    metrics = train_run(cli, home, algorithm="rorecomp", replay=own)
    left: list[tuple[int, float, list[int], torch.Tensor]] = []  # step, advantage, tokens, log-probs
    for step, (rollouts, given) in enumerate(zip(seen.rollouts, seen.batches, strict=True)):
        batches = [(batch, what) for batch, what in apart if what["step"] == step]
        assert metrics[step]["replay/apart_rows"] == (6 if len(left) >= 6 else 0)
        assert metrics[step]["updates"] == (1 if bool((given.advantages != 0).any()) else 0) + len(batches)
        for batch, what in batches:
            taken, left = left[:6], left[6:]
            assert what["ids"] == [ids for _, _, ids, _ in taken] and what["moved"] > 0
            assert batch.advantages is not None and batch.old_logp is not None
            assert batch.advantages.tolist() == pytest.approx([advantage for _, advantage, _, _ in taken])
            for n, (_, _, _, logps) in enumerate(taken):
                torch.testing.assert_close(batch.old_logp[n, : len(logps)], logps, atol=1e-4, rtol=0)
            assert metrics[step]["replay/apart_age"] == pytest.approx(sum(step - s for s, _, _, _ in taken) / 6)
        assert given.advantages is not None and given.rollout_logp is not None
        for n, rollout in enumerate(rollouts):
            if not bool(given.mask[n].any()) and given.advantages[n] != 0:
                ids, width = [*rollout.prompt.ids, *rollout.ids], len(rollout.ids)
                left.append((step, float(given.advantages[n]), ids, given.rollout_logp[n, :width]))
        assert metrics[step]["replay/stored"] == len(left)
    assert len(apart) >= 2


def test_metrics_describe_sampled_rollouts(cli: Any, home: Path, seen: Seen) -> None:  # noqa: F811
    """A step's reward is the mean over its 16 sampled rollouts, including replaced ones, which earned 0. Their tokens
    count as sampled, those of replayed rows do not."""
    metrics = train_run(cli, home)
    assert any(row["replay/rows"] for row in metrics)
    for row, rollouts in zip(metrics, seen.rollouts, strict=True):
        earned = sum(one.reward or 0.0 for one in rollouts if one.stored is None)
        assert row["reward"] == pytest.approx(earned / 16)
        assert row["rollout/rows"] == 16
        groups = {one.group for one in rollouts}
        mixed = [g for g in groups if len({one.reward for one in rollouts if one.group == g}) > 1]
        assert row["signal/share"] == len(mixed) / 4
    plain = train_run(cli, home, "plain", replay=None, run={**values_of()["run"], "steps": 1})
    assert plain[0]["num_tokens"] == metrics[0]["num_tokens"]


STALE: Values = {
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6, "staleness": 1},
    "corrections": ["tis"],
}


APART = {"algorithm": "rorecomp", "replay": {"use": "compensation", "size": 5, "p_end": 1.0}}


@pytest.mark.parametrize("changes", [{}, STALE, {"algorithm": "skywork_ssb"}, {"algorithm": "remix"}, APART])
def test_run_resumes_exactly(cli: Any, home: Path, changes: Values) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(**changes)))
    rows = cli.resumed(home / "run", "rl", str(home / "run.yaml"), steps=6)
    assert any(row["replay/rows"] or row.get("replay/apart_rows") for row in rows[3:])
    stored = json.loads((home / "run" / "checkpoints" / "step-00000006" / "replay.json").read_text())
    if "algorithm" not in changes:
        assert {row["stored"]["step"] for row in stored} & {0, 1, 2} and all(row["reward"] == 1 for row in stored)
    assert len(stored) == rows[-1]["replay/stored"] > 0


def test_user_defined_replay_class(cli: Any, home: Path, seen: Seen) -> None:  # noqa: F811
    train_run(cli, home, replay={"use": "./own.py:Newest", "age": 2, "limit": 6})
    for step, rollouts in enumerate(seen.rollouts):
        assert all(one.stored is None or one.stored.step == step - 1 for one in rollouts)
    assert sum(one.stored is not None for one in seen.rollouts[-1]) >= 2
    stored = json.loads((home / "run" / "checkpoints" / "step-00000006" / "replay.json").read_text())
    assert len(stored) == 6, "the limit of all prompts"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replay": "sucess"}, "did you mean `success`"),
        ({"replay": {"use": "success", "capacity": 0}}, "replay.capacity: must be at least 1, not 0"),
        ({"replay": {"use": "success", "capasity": 3}}, "capacity"),
        ({"replay": "ssb", "algorithm": "ppo"}, "stored rows carry only their advantages"),
        ({"replay": "recent", "select": ["rorecomp"]}, "the tokens that `rorecomp` has selected"),
        ({"loss": "reinforce"}, "`reinforce` has no ratio"),
        ({"replay": "compensation"}, "rows that a `select` left out, and there is none"),
        ({"replay": "compensation", "select": ["rorecomp"], "algorithm": "ppo"}, "carry only their advantages"),
        ({"algorithm": "disco", "replay": "success"}, "does not weight rollouts by the policy that sampled"),
        ({"keep": "dynamic_sampling", "rollout": {"group_size": 4, "max_gen_batches": 3}}, "failed groups are"),
        ({"rollout": {"group_size": 1}}, "each rollout is alone"),
        ({"rollout": {"group_size": 4, "engine": "vllm", "top_p": 0.9}}, "reports no log-probs"),
        ({"prompt_variants": {"use": "hint_on_failure"}}, "`prompt_variants` change it"),
        ({"rollout": {"group_size": 4, "shape": {"use": "serial_exit"}}}, "they belong together"),
        ({"opponent": {}, "group_rewards": ["versus_opponent"]}, "an opponent of an earlier step"),
        ({"replay": {"use": "./own.py:Mixed"}}, "among those of"),
        ({"replay": {"use": "./own.py:Nothing"}}, "has no method `replace`"),
        ({"replay": {"use": "./own.py:Newest", "agee": 3}}, "has no argument agee"),
    ],
)
def test_incompatible_settings_are_refused(cli: Any, home: Path, changes: Values, said: str) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(**changes)))
    assert said in cli.refused("rl", str(home / "run.yaml"), "--output", str(home / "run"))


def test_missing_rows_raise_one_sentence() -> None:
    class Wrong(Replay):
        def store(self, *_: Any) -> Stock:
            return Stock((), (3,))

    with pytest.raises(RunError, match="fresh row 3, but there are 0"):
        ReplayStore(Wrong(), "wrong", 9, []).store([], [], 0)


def test_replay_settings_are_shown_before_a_run(cli: Any, home: Path) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(replay={"limit": 50})))
    assert "success: at most 50 rollouts of earlier steps" in cli.run("data", "inspect", str(home / "run.yaml"))
    plan = cli.run("plan", str(home / "run.yaml"))
    assert "stored rollouts at most" in plan and "300" in plan
    assert "capacity" in cli.run("methods", "show", "replay/success")


def test_batches_are_concatenated_with_padding() -> None:
    """Two rows of three tokens and one of two: fields present in only one batch are filled."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    first = RolloutBatch(
        group_ids=torch.tensor([0, 1]),
        mask=mask,
        rewards=torch.tensor([1.0, 0.0]),
        rollout_logp=torch.full((2, 3), -1.0),
        components={"a": torch.tensor([1.0, 0.0])},
        selected=mask,
    )
    more = RolloutBatch(
        group_ids=torch.tensor([7]),
        mask=torch.tensor([[True, True]]),
        rewards=torch.tensor([0.5]),
        rollout_logp=torch.full((1, 2), -2.0),
        components={"b": torch.tensor([2.0])},
        replayed=torch.tensor([True]),
    )
    both = join_batches(first, more)
    assert both.mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert both.group_ids.tolist() == [0, 1, 7] and both.rewards is not None and both.rewards.tolist() == [1, 0, 0.5]
    assert both.rollout_logp is not None and both.rollout_logp[2, :2].tolist() == [-2, -2]
    assert bool(both.rollout_logp[2, 2].isnan()) and both.keep is None
    assert both.components["a"].isnan().tolist() == [False, False, True] and both.components["b"][2] == 2
    assert both.replayed is not None and both.replayed.tolist() == [False, False, True]
    assert both.selected is not None and torch.equal(both.selected, both.mask)


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}], ids=["full", "lora"])
def test_reference_is_reset_when_replay_ends(cli: Any, home: Path, seen: Seen, lora: Values) -> None:  # noqa: F811
    """ReMix with `until` and `kl.reset_at` 4: up to step 3 the reference is the starting policy, in step 4 the current
    policy, later the policy of step 4; a resumed run has the same log-probs."""
    kl = {"use": "k3", "coef": 0.05, "reset_at": 4}
    changes = {"algorithm": "remix", "model": {"path": "tiny", **lora}, "controllers": {}, "kl": kl}
    replay_ = {"use": "recent", "until": 4}
    (home / "run.yaml").write_text(json.dumps(values_of(**changes, replay=replay_)))
    cli.resumed(home / "run", "rl", str(home / "run.yaml"), steps=6)
    gaps = []
    for step in range(6):
        then = saved_rollouts.read(home / "run", step + 1).batch
        assert then.ref_logp is not None and then.old_logp is not None
        gaps.append(float((then.ref_logp - then.old_logp)[then.mask].abs().max()))
    assert gaps[3] < 1e-4 < min(gaps[1], gaps[2], gaps[4], gaps[5])
    assert not any(one.stored for rollouts in seen.rollouts[3:] for one in rollouts)
    names = {step: (home / "run" / "checkpoints" / f"step-{step:08d}" / "reference.safetensors") for step in (3, 6)}
    assert not names[3].exists() and names[6].exists()
