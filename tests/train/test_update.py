"""The updates of one RL step: their gradients and the number of forward passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.recipe.load import load_dict
from posttrain.run.metrics import read_metrics
from posttrain.train import optim, policy, rl, saved_rollouts
from posttrain.train.context import TrainContext

Run = Callable[..., tuple[list[Tensor], int, list[dict[str, Any]]]]

REWARD = """
def spread(completion):
    return sum(map(ord, completion)) % 97 / 97
"""


@pytest.fixture
def ran(tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run two steps on `tiny`; return the gradient of each update, the number of rows in passes without gradient,
    and the metrics. Keyword arguments change sections of the recipe.
    """
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": str(2 * i)}) for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    base: dict[str, Any] = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 10},
        "rewards": [{"use": "rewards.py:spread"}],
        "scoring": {"workers": 1},
        "optim": {"lr": 1e-3, "eps": 1e-2},  # eps: makes the update as smooth as the gradient
        "run": {"steps": 2, "keep_rollouts": 2},
    }

    def run(name: str, **changes: Any) -> tuple[list[Tensor], int, list[dict[str, Any]]]:
        recipe = load_dict({**base, **changes}, base_dir=tmp_path, where="test").recipe
        gradients: list[Tensor] = []
        counted = 0
        clip, scores = optim.clip_gradients, policy.scores

        def clipped(model: Any, max_norm: float | None) -> Tensor:
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            return clip(model, max_norm)

        def scored(p: Any, model: Any, sequences: Any, *rest: Any) -> Any:
            nonlocal counted
            counted += 0 if torch.is_grad_enabled() else len(sequences)
            return scores(p, model, sequences, *rest)

        with monkeypatch.context() as patch, opened(name) as directory:
            patch.setattr(optim, "clip_gradients", clipped)
            patch.setattr(policy, "scores", scored)
            rl.run(recipe, directory)
            values = [{k: v for k, v in row.items() if "time/" not in k} for row in read_metrics(directory.path)]
        return gradients, counted, values

    return run


@pytest.mark.parametrize(
    ("batch", "left"),
    [
        ({"minibatches": 2}, 0.5),
        ({"minibatches": 4, "micro_tokens": 40}, 0.75),
        ({"epochs": 2}, 0.0),
        ({"minibatches": 2, "epochs": 2}, 0.5),
    ],
)
def test_first_update_needs_no_separate_old_log_prob_pass(
    batch: dict[str, Any], left: float, ran: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows' training pass uses the weights of the start. The values equal those of a pass over all rows."""
    gradients, passes, values = ran("own", batch=batch)
    monkeypatch.setattr(TrainContext, "has_dropout", True)  # then every row has a separate pass
    all_gradients, all_passes, expected = ran("whole", batch=batch)
    updates = batch.get("minibatches", 1) * batch.get("epochs", 1)
    assert passes == left * all_passes and len(gradients) == len(all_gradients) == 2 * updates
    for found, wanted in zip(gradients, all_gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    for row, whole in zip(values, expected, strict=True):
        assert row == pytest.approx(whole, rel=1e-3, abs=1e-5)
    for step in (1, 2):
        own, whole = (saved_rollouts.read(tmp_path / name, step) for name in ("own", "whole"))
        assert own.batch.old_logp is not None and bool((own.batch.old_logp[:, 0] < 0).all())
        torch.testing.assert_close(own.batch.old_logp, whole.batch.old_logp, rtol=1e-4, atol=1e-5)


def test_one_pass_gives_critic_values_and_old_log_probs(ran: Run) -> None:
    """The critic's values need a pass over all rows, which also gives the old log-probs."""
    _, passes, _ = ran("ppo", algorithm="ppo", batch={"minibatches": 2}, kl={"coef": 0.0})
    assert passes == 2 * 16


def test_dropout_requires_an_old_log_prob_pass_over_all_rows(ran: Run) -> None:
    """A training pass with dropout does not give the log-probs of the policy that later passes are compared with."""
    lora = {"path": "tiny", "lora": {"rank": 4, "dropout": 0.2}}
    assert ran("several", model=lora, batch={"minibatches": 2})[1] == 2 * 16
    assert ran("one", model=lora)[1] == 0
