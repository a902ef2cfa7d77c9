"""Given solutions in the batch: off-policy rows are trained on with their weight, or are used as a baseline only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from posttrain.loss.hybrid import rl_plus
from posttrain.train import policy, unsolved
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import Extras

from .test_prompt_variants import Seen, Values, home, ran, seen, values_of

__all__ = ["home", "ran", "seen"]  # fixtures


def wide(**changes: Any) -> Values:
    values = values_of(**changes)
    return {**values, "rollout": {**values["rollout"], "max_new_tokens": 40}}


def test_solution_is_a_row_of_its_group_with_the_mixture_ratio(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """RL-PLUS: one given row per group, scored, included in the group's mean, trained on with the ratio to the
    mixture."""
    metrics = ran(wide(algorithm="rl_plus", batch={"minibatches": 2}))
    assert all(row["solutions/rows"] == 5 and row["rollout/rows"] == 20 for row in metrics)
    for rollouts, batch in zip(seen.rollouts, seen.batches, strict=True):
        given = [n for n, r in enumerate(rollouts) if r.is_given]
        assert len(given) == 5 and len(rollouts) == 25  # 4 sampled and 1 given in each of 5 groups
        assert batch.external is not None and batch.rewards is not None and batch.advantages is not None
        assert torch.equal(batch.external.any(-1).nonzero()[:, 0], torch.tensor(given))
        for n in given:
            rollout = rollouts[n]
            assert rollout.text == rollout.prompt.row["solution"] and rollout.reward is not None
            assert int(batch.mask[n].sum()) == len(rollout.ids) and torch.equal(batch.external[n], batch.mask[n])
            mates = [m for m, r in enumerate(rollouts) if r.group == rollout.group]
            mean = batch.rewards[mates].mean()
            assert float(batch.advantages[n]) == pytest.approx(float(batch.rewards[n] - mean))
        one = batch.select([given[0]])
        assert one.old_logp is None
        logp = torch.full(one.mask.shape, math.log(0.25), requires_grad=True)
        focused = rl_plus(one, logp, gamma=0.5).values[one.mask]
        ratio = 2 * 0.25 / (1.5 * 0.25 + 0.5)
        expected = -float(batch.advantages[given[0]]) * (1 - 0.25) ** 0.5 * ratio
        assert focused.tolist() == pytest.approx([expected] * len(focused))


def test_reported_reward_excludes_given_rows(ran: Callable[..., list[Values]], seen: Seen) -> None:
    metrics = ran(wide(algorithm="rl_plus", run={"steps": 1}))
    own = [r.reward for r in seen.rollouts[0] if not r.is_given]
    assert metrics[0]["reward"] == pytest.approx(sum(filter(None, own)) / len(own))
    assert metrics[0]["solutions/reward"] != metrics[0]["reward"]


def test_calibrl_uses_expert_log_probs_without_given_rows(
    ran: Callable[..., list[Values]], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`expert_logp` is the old policy's log-prob of the expert answer's token at the same position; no row of the batch
    is given."""
    contexts: list[Any] = []
    compute_on_other_sequences = policy.compute_on_other_sequences

    def recording(ctx: Any, batch: Any, rollouts: Any) -> Any:
        found = compute_on_other_sequences(ctx, batch, rollouts)
        contexts.append((ctx, found.expert_logp, whole(ctx, rollouts[0]), rollouts[0]))
        return found

    def whole(ctx: Any, rollout: Any) -> torch.Tensor:
        solution = ctx.solutions[rollout.prompt.uid]
        row = Sequences((torch.tensor(rollout.prompt.ids + solution).numpy(),), (len(rollout.prompt.ids),))
        with torch.no_grad():
            return policy.scores(ctx, ctx.loaded.model, row, len(solution), Extras())["logp"][0]

    monkeypatch.setattr("posttrain.train.rl.compute_on_other_sequences", recording)
    metrics = ran(wide(algorithm="calibrl"))
    assert all(0 <= row["calibrl/reached"] <= 1 for row in metrics)
    assert not any(r.is_given for rollouts in seen.rollouts for r in rollouts)
    for _, found, expected, _ in contexts:
        length = min(len(expected), found.shape[1])
        assert torch.allclose(found[0, :length], expected[:length], atol=1e-5)
        assert bool(found[0, length:].isnan().all())


def test_the_experts_log_probs_are_those_of_the_rows_adapter_and_prompt(
    ran: Callable[..., list[Values]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two roles answer one row of the data, under prompts and adapters of their own: all were computed under the first
    adapter, after the prompt of the last role."""
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    compute_on_other_sequences = policy.compute_on_other_sequences

    def recording(ctx: Any, batch: Any, rollouts: Any) -> Any:
        solver, prompt = rollouts[0], rollouts[0].prompt
        critic = replace(solver, prompt=replace(prompt, ids=prompt.ids[1:], adapter="two"))
        ctx.loaded.model.add_adapter("two", ctx.loaded.model.peft_config["default"])
        with torch.no_grad():
            for name, weight in ctx.loaded.model.named_parameters():
                if ".lora_B.two." in name:
                    weight.add_(0.1)
        first = policy.compute_on_other_sequences(ctx, batch.select([0, 0]), [solver, critic]).expert_logp
        solution = ctx.solutions[prompt.uid]
        with torch.no_grad():
            for rollout, row in zip((solver, critic), first, strict=True):
                ids = torch.tensor(rollout.prompt.ids + solution).numpy()
                alone = Sequences((ids,), (len(rollout.prompt.ids),), adapters=(rollout.prompt.adapter or "default",))
                whole = policy.scores(ctx, ctx.loaded.model, alone, len(solution), Extras())["logp"][0]
                other = replace(alone, adapters=("default" if rollout is critic else "two",))
                wrong = policy.scores(ctx, ctx.loaded.model, other, len(solution), Extras())["logp"][0]
                found.append((row, whole, wrong))
        return compute_on_other_sequences(ctx, batch, rollouts)

    monkeypatch.setattr("posttrain.train.rl.compute_on_other_sequences", recording)
    values = wide(algorithm="calibrl", run={"steps": 1})
    ran({**values, "model": {**values["model"], "lora": {"rank": 2}}})
    assert len(found) == 2
    for row, expected, wrong in found:
        length = min(len(expected), len(row))
        assert torch.allclose(row[:length], expected[:length], atol=1e-5)
        assert not torch.allclose(row[:length], wrong[:length], atol=1e-3)


def test_rows_without_a_solution_get_no_given_row(ran: Callable[..., list[Values]], seen: Seen, home: Path) -> None:
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    for row in rows[::2]:
        row["solution"] = None
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran(wide(algorithm="rl_plus"))
    with_one = {row["prompt"] for row in rows if row["solution"]}
    assert any(r.is_given for rollouts in seen.rollouts for r in rollouts)
    for rollouts in seen.rollouts:
        groups = {r.group: r.prompt.row["prompt"] for r in rollouts}
        assert {r.group for r in rollouts if r.is_given} == {g for g, asked in groups.items() if asked in with_one}


def test_run_with_solutions_resumes_exactly(cli: Any, home: Path) -> None:
    values = wide(algorithm="rl_plus", run={"steps": 4, "save_every": 2})
    (home / "run.yaml").write_text(json.dumps(values))
    rows = cli.resumed(home / "run", "rl", str(home / "run.yaml"), steps=4)
    assert [row["solutions/rows"] for row in rows[:2]] + [row["solutions/correct"] for row in rows[2:]] == [
        5,
        5,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"solutions": {"column": "solution"}}, "no component reads given solutions"),
        ({"regularisers": [{"use": "calibrl"}]}, "needs expert_logp: given solutions"),
        ({"loss": {"use": "rl_plus"}, "solutions": {}}, "needs external: rollouts mixed with given solutions"),
        ({"solutions": {"column": "answered", "in_group": True}}, "reads the column `answered`, and the data has none"),
        ({"algorithm": "rl_plus", "rollout": {"max_new_tokens": 4}}, "longer than rollout.max_new_tokens 4"),
        ({"algorithm": "rl_plus", "tools": [{"use": "calculator"}]}, "a solution is one turn"),
    ],
)
def test_incompatible_settings_are_refused(cli: Any, home: Path, changes: Values, said: str) -> None:
    (home / "run.yaml").write_text(json.dumps({**values_of(), **changes}))
    assert said in cli.refused("rl", str(home / "run.yaml"), "--output", str(home / "run"))


def test_entropy_bonus_has_the_gradient_of_the_entropy() -> None:
    from posttrain.train.logprobs import Head, token_scores

    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(5, 7, bias=False)
            self.config = transformers.PretrainedConfig()

        def get_output_embeddings(self) -> torch.nn.Linear:
            return self.head

    hidden, targets = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 1, 2, 3])
    model = Model()
    found = token_scores(Head(model), hidden, targets, 0.7, entropy=True)
    assert torch.allclose(found["new_entropy"], found["entropy"]) and not found["entropy"].requires_grad
    (gradient,) = torch.autograd.grad(found["new_entropy"].sum(), hidden)
    logp = (model.head(hidden) / 0.7).log_softmax(-1)
    (expected,) = torch.autograd.grad(-(logp.exp() * logp).sum(), hidden)
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_supervised_steps_use_solutions_of_failed_prompts(
    ran: Callable[..., list[Values]], seen: Seen, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """ReLIFT: unsolved prompts are collected newest first, and their solutions are trained on once there are enough."""
    trained: list[list[int]] = []
    once = unsolved.update_once

    def recording(ctx: Any, batch: Any, sequences: Any, rows: Any, *rest: Any) -> bool:
        trained.extend(sequences.ids[n].tolist() for n in rows)
        return once(ctx, batch, sequences, rows, *rest)

    monkeypatch.setattr(unsolved, "update_once", recording)
    sft = {"size": 7, "minibatch": 4, "lr": 1e-3, "fail_value": 0.0}
    values = wide(reward="rarely", algorithm="relift", solutions={"column": "solution", "sft": sft})
    values["rewards"] = values["rewards"][:1]
    metrics = ran({**values, "run": {"steps": 4, "save_every": 4}})
    waiting: list[str] = []
    expected: list[str] = []
    for step, rollouts in enumerate(seen.rollouts):
        groups: dict[str, list[float | None]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.prompt.uid, []).append(rollout.reward)
        waiting = [uid for uid, rewards in groups.items() if set(rewards) == {0.0}] + waiting
        due = len(waiting) >= 7
        assert metrics[step]["sft/rows"] == (7 if due else 0) and metrics[step].get("sft/updates", 0) == 2 * due
        expected, waiting = (expected + waiting[:7], waiting[7:]) if due else (expected, waiting)
        assert metrics[step]["sft/buffer"] == len(waiting)
    assert expected and len(trained) == len(expected)
    prompts = {r.prompt.uid: r.prompt for rollouts in seen.rollouts for r in rollouts}
    assert all(any(row[: len(prompts[uid].ids)] == list(prompts[uid].ids) for row in trained) for uid in expected)
    memory = json.loads((home / "run" / "checkpoints" / "step-00000004" / "state.json").read_text())["memory"]
    assert [uid for uid, _ in memory["solutions.sft"]] == waiting


def test_buffer_and_its_optimizer_resume_exactly(cli: Any, home: Path) -> None:
    sft = {"size": 3, "lr": 1e-3}
    values = wide(reward="rarely", algorithm="relift", solutions={"sft": sft}, run={"steps": 4, "save_every": 2})
    values["rewards"] = values["rewards"][:1]
    (home / "run.yaml").write_text(json.dumps(values))
    rows = cli.resumed(home / "run", "rl", str(home / "run.yaml"), steps=4)
    assert any(row["sft/rows"] for row in rows[:2]) and any(row["sft/rows"] for row in rows[2:])
