"""T-PPO: a rollout gets a window of tokens per step; unfinished rollouts continue in the next step under its policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.advantage.truncated import advantage_of_window, extended_gae
from posttrain.batch import RolloutBatch
from posttrain.errors import RecipeError
from posttrain.recipe.load import load_dict

from .test_prompt_variants import Seen, Values, seen  # noqa: F401  fixture
from .test_rollout_shapes import home  # noqa: F401  fixture

SHAPE = {"use": "windows", "window": 4}
ROLLOUT = {"prompts_per_step": 5, "group_size": 2, "max_new_tokens": 11, "stop": ["e", "a"]}


def values_of(**changes: Any) -> Values:
    return {
        "stage": "rl",
        "algorithm": "t_ppo",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {**ROLLOUT, "shape": SHAPE, **changes.pop("rollout", {})},
        "rewards": [{"use": "rewards.py:digits", "correct": True}],
        "scoring": {"workers": 1, "correct_at": 0.2},
        "optim": {"lr": 1e-3},
        "run": {"steps": 6, "save_every": 3, "samples_per_step": 40},
        **changes,
    }


def test_truncated_rollout_continues_under_the_next_policy(
    cli: Any,
    home: Path,  # noqa: F811
    seen: Seen,  # noqa: F811
) -> None:
    """Each unfinished rollout is in the next step with the same tokens and log-probs, at most four more tokens, and
    the version of each token's step. It has no reward before it ends; older tokens have no policy loss, and the
    critic learns only from finished rollouts. A step has as many rollouts as there is room for.
    """
    (home / "run.yaml").write_text(json.dumps(values_of()))
    cli.run("rl", str(home / "run.yaml"), "--output", str(home / "run"))
    metrics = cli.rows_of(home / "run")
    assert any(row["grad_norm"] > 0 for row in metrics)
    longest, before = 0, []
    for step, (rollouts, batch) in enumerate(zip(seen.rollouts, seen.batches, strict=True)):
        continued = [one for one in rollouts if one.older]
        assert [one.prompt.uid for one in continued] == [one.prompt.uid for one in before]
        assert metrics[step].get("rollout/continued", 0) == len(before)
        assert len(rollouts) - len(before) == 2 * ((10 - len(before)) // 2)
        for one, begun in zip(continued, before, strict=True):
            assert one.older == len(begun.ids) and one.ids[: one.older] == begun.ids
            assert one.logps[: one.older] == begun.logps and one.versions[: one.older] == begun.versions
        assert batch.advantages is not None and batch.returns is not None and batch.values is not None
        for n, one in enumerate(rollouts):
            new, length = len(one.ids) - one.older, len(one.ids)
            assert 1 <= new <= 4 and set(one.versions[one.older :]) == {step}
            assert one.unfinished == (one.finish == "length" and length < 11)
            assert (one.reward is None) == one.unfinished
            assert not bool(batch.advantages[n, : one.older].any()) and bool(batch.mask[n, :length].all())
            returns = batch.returns[n, :length]
            assert (
                bool(returns.isnan().all())
                if one.unfinished
                else returns.tolist() == pytest.approx([one.reward] * length)
            )
            assert batch.versions is not None and tuple(batch.versions[n, :length].tolist()) == one.versions
            longest = max(longest, len(set(one.versions)))
        before = [one for one in rollouts if one.unfinished]
        assert metrics[step].get("rollout/unfinished", 0) == len(before)
    assert longest == 3, "a rollout of 11 tokens takes three windows of 4"
    total = sum(len(one.ids) - one.older + len(one.prompt.ids) * (not one.older) for r in seen.rollouts for one in r)
    assert metrics[-1]["num_tokens"] == total


@pytest.mark.parametrize("rollout", [{}, {"prompts_per_step": 1, "group_size": 1}], ids=["many", "one"])
def test_run_with_windows_resumes_exactly(cli: Any, home: Path, rollout: Values) -> None:  # noqa: F811
    """The unfinished rollouts are in the checkpoint. With one rollout per step, a step may sample no prompt at all."""
    (home / "run.yaml").write_text(json.dumps(values_of(rollout=rollout, batch={"minibatches": 1})))
    rows = cli.resumed(home / "run", "rl", str(home / "run.yaml"), steps=6)
    assert any(row.get("rollout/continued") for row in rows[3:])
    state = json.loads((home / "run" / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert len(state["unfinished"]) == rows[2].get("rollout/unfinished", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": "gae"}, "`gae` compares their rewards"),
        ({"rollout": {"staleness": 1}, "corrections": ["tis"]}, "continue with the newest weights"),
        ({"sampler": {"use": "gdro"}}, "these end in different steps"),
        ({"keep": "mixed"}, "these end in different steps"),
        ({"loss": {"mask_truncated": True}}, "drops what has not ended"),
        (
            {"algorithm": "grpo", "advantage": "extended_gae", "rollout": {"shape": {"use": "serial_exit"}}},
            "rollouts that continue in the next step",
        ),
    ],
)
def test_keys_incompatible_with_windows_are_refused(home: Path, changes: Values, message: str) -> None:  # noqa: F811
    with pytest.raises(RecipeError, match=message):
        load_dict(values_of(**changes), base_dir=home, where="test")


def test_windows_in_plan_methods_and_validation(cli: Any, home: Path) -> None:  # noqa: F811
    (home / "run.yaml").write_text(json.dumps(values_of()))
    assert "10" in cli.run("plan", str(home / "run.yaml"))
    assert "window" in cli.run("methods", "show", "shape/windows")
    (home / "wrong.yaml").write_text(json.dumps(values_of(rollout={"shape": {"use": "windows", "window": 0}})))
    assert "rollout.shape.window: must be at least 1, not 0" in cli.refused(
        "rl", str(home / "wrong.yaml"), "--output", str(home / "wrong")
    )


def test_advantage_matches_the_formula_on_new_tokens() -> None:
    """A finished row of three tokens, an unfinished one, and a finished one that could not be scored."""
    nan = float("nan")
    mask = torch.tensor([[True] * 3, [True, True, False], [True] * 3])
    batch = RolloutBatch(
        group_ids=torch.arange(3),
        mask=mask,
        rewards=torch.tensor([1.0, nan, nan], dtype=torch.float64),
        values=torch.tensor([[0.1, 0.4, 0.5], [0.2, 0.6, nan], [0.3, 0.3, 0.3]], dtype=torch.float64),
        finished=torch.tensor([True, False, True]),
        new_tokens=torch.tensor([[False, True, True], [True, True, True], [True] * 3]),
    )
    found = advantage_of_window(batch, gamma=0.9, lam=0.5, whiten=False)
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0] * 3], dtype=torch.float64)
    values, new = batch.values, batch.new_tokens
    assert values is not None and new is not None and batch.finished is not None
    wanted = extended_gae(rewards, values[:2], mask[:2], batch.finished[:2], new[:2], gamma=0.9, lam=0.5)
    torch.testing.assert_close(found.advantages[:2], torch.where(new[:2] & mask[:2], wanted.advantages, 0.0))
    assert found.advantages[0, 0] == 0 != wanted.advantages[0, 0] and not bool(found.advantages[2].any())
    assert found.returns[0].tolist() == pytest.approx([0.81, 0.9, 1.0])
    assert bool(found.returns[1:].isnan().all())
