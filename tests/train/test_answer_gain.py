"""IGPO: the reward of a turn is the policy's increase in log-prob of the right answer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.advantage.turns import answer_gain, information_gain_terms
from posttrain.batch import Rollout, RolloutBatch
from posttrain.train import rl
from posttrain.train.turn_fields import turn_of_each

Values = dict[str, Any]
GAME = '''
class Echo:
    """Three turns; the second reply says the answer."""
    def reset(self, row): self.turn, self.answer = 0, row["answer"] or "?"
    def step(self, text):
        self.turn += 1
        return (self.answer if self.turn == 2 else "again"), self.turn == 3
    def score(self): return 0.0
    def close(self): pass

def digits(completion):
    return sum(c.isdigit() for c in completion)
'''
CLOSING = "\nso:"
TURNS = {"turn_tokens": 12, "max_turns": 3, "stop": ["e", "a", "o", "1", "2", "7"]}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(GAME)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i) if i % 4 else None} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def values_of(**changes: Any) -> Values:
    return {
        "stage": "rl",
        "algorithm": "igpo",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "environment": {"use": "game.py:Echo"},
        "rollout": {"prompts_per_step": 5, "group_size": 3, "max_new_tokens": 300, **TURNS},
        "rewards": [{"use": "game.py:digits", "correct": True}],
        "scoring": {"workers": 1, "correct_at": 1},
        "advantage": {"use": "answer_gain", "closing": CLOSING},
        "optim": {"lr": 1e-3},
        "run": {"steps": 3, "save_every": 2},
        **changes,
    }


class Measured:
    """Records the rollouts and batch of each step, and for each turn the model's log-probs of the answer, one sequence
    at a time."""

    def __init__(self) -> None:
        self.rollouts: list[list[Rollout]] = []
        self.batches: list[RolloutBatch] = []
        self.logps: list[list[list[float]]] = []


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found, update, batch_of = Measured(), rl.update, rl.batch_of

    def batched(ctx: Any, rollouts: list[Rollout], state: Any) -> RolloutBatch:
        found.rollouts.append(list(rollouts))
        return batch_of(ctx, rollouts, state)

    def updated(ctx: Any, batch: RolloutBatch, sequences: Any, *rest: Any) -> Any:
        found.batches.append(batch)
        found.logps.append([by_turn(ctx, rollout) for rollout in found.rollouts[-1]])
        return update(ctx, batch, sequences, *rest)

    monkeypatch.setattr(rl, "batch_of", batched)
    monkeypatch.setattr(rl, "update", updated)
    return found


def by_turn(ctx: Any, rollout: Rollout) -> list[float]:
    gold, turn_ids, logps = rollout.prompt.row["answer"], turn_of_each(rollout), []
    for turn in range(int(turn_ids.max()) + 1):
        if gold is None:
            logps.append(math.nan)
            continue
        said = [i for i, own in zip(rollout.ids, turn_ids, strict=True) if own < turn]
        behind, answer = (ctx.loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (CLOSING, gold))
        ids = torch.tensor([[*rollout.prompt.ids, *said, *behind, *answer]])
        with torch.no_grad():
            logits = ctx.loaded.model(input_ids=ids).logits[0, -len(answer) - 1 : -1].log_softmax(-1)
        logps.append(float(logits.gather(1, torch.tensor(answer)[:, None]).mean()))
    return logps


def test_gain_of_a_turn_is_in_its_advantage(cli: Any, home: Path, measured: Measured) -> None:
    """Before each turn the answer's log-prob is computed on the prompt, the transcript so far, the closing text and the
    answer; the second reply contains the answer, so gains differ; all tokens of a turn have its advantage."""
    (home / "run.yaml").write_text(json.dumps(values_of()))
    cli.run("rl", str(home / "run.yaml"), "--output", str(home / "run"))
    gained = 0
    for rollouts, batch, logps in zip(measured.rollouts, measured.batches, measured.logps, strict=True):
        assert batch.answer_logp is not None and batch.advantages is not None and batch.rewards is not None
        turns = torch.tensor([len(own) for own in logps])
        width = int(turns.max())
        expected = torch.tensor([own + [math.nan] * (width - len(own)) for own in logps], dtype=torch.float64)
        torch.testing.assert_close(batch.answer_logp.double(), expected, atol=1e-4, rtol=0, equal_nan=True)
        found = information_gain_terms(batch.answer_logp.double(), batch.rewards, turns, batch.group_ids)
        for n, rollout in enumerate(rollouts):
            for place, turn in enumerate(turn_of_each(rollout)):
                trained = bool(batch.mask[n, place])
                wanted = float(found.advantages[n, turn]) if trained else 0.0
                assert float(batch.advantages[n, place]) == pytest.approx(wanted)
            if rollout.prompt.row["answer"] is None:
                assert len({float(a) for a in batch.advantages[n][batch.mask[n]]}) == 1, "no turn has gained"
            else:
                gained += turns[n] == 3 == len({float(a) for a in batch.advantages[n][batch.mask[n]]})
    assert gained > 10


def test_run_resumes_exactly(cli: Any, home: Path) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(run={"steps": 4, "save_every": 2})))
    rows = cli.resumed(home / "run", "rl", str(home / "run.yaml"), steps=4)
    assert len(rows) == 4 and any(row["grad_norm"] > 0 for row in rows)


def test_steps_within_a_single_turn_get_gains(cli: Any, home: Path, measured: Measured) -> None:
    """`scoring.split`: the prefix of a step is the completion before it."""
    split = {"workers": 1, "correct_at": 1, "split": "lines"}
    rollout = {"prompts_per_step": 5, "group_size": 3, "max_new_tokens": 40}
    (home / "run.yaml").write_text(json.dumps(values_of(environment=None, scoring=split, rollout=rollout)))
    cli.run("rl", str(home / "run.yaml"), "--output", str(home / "run"))
    for batch, logps in zip(measured.batches, measured.logps, strict=True):
        assert batch.answer_logp is not None
        for own, expected in zip(batch.answer_logp.tolist(), logps, strict=True):
            assert own[: len(expected)] == pytest.approx(expected, abs=1e-4, nan_ok=True)
            assert all(math.isnan(value) for value in own[len(expected) :])
    assert any(len(own) > 1 for logps in measured.logps for own in logps)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": None}, "needs turn_ids: rollouts of several turns"),
        ({"advantage": {"use": "answer_gain", "answer": "gold"}}, "reads the column `gold`, and the data has none"),
        ({"replay": {"use": "ssb"}, "algorithm": "skywork_ssb"}, ""),
    ],
)
def test_unsupported_recipes_are_refused(cli: Any, home: Path, changes: Values, said: str) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(**changes)))
    if said:
        assert said in cli.refused("rl", str(home / "run.yaml"), "--output", str(home / "run"))
    else:  # stored rows have their advantages and are not scored again
        cli.run("rl", str(home / "run.yaml"), "--output", str(home / "run"))


def test_scoring_is_shown_before_a_run(cli: Any, home: Path) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of()))
    shown = " ".join(cli.run("data", "inspect", str(home / "run.yaml")).split())
    assert "column `answer`, after" in shown and "before each turn" in shown
    assert "passes without gradient a step" in cli.run("plan", str(home / "run.yaml"))
    assert "closing" in cli.run("methods", "show", "advantage/answer_gain")


def test_advantages_of_two_turns() -> None:
    """One group of two rows of two turns: the answer goes from 0.2 to 0.5 in one, stays at 0.2 in the other: gains 0.3
    and 0, z-scores 1 and -1; outcomes 0 and 1, z-scores -1 and 1. The first turn has the sum of both: 0 and 0."""
    batch = RolloutBatch(
        group_ids=torch.zeros(2, dtype=torch.long),
        mask=torch.tensor([[True, True, False, True]] * 2),
        rewards=torch.tensor([0.0, 1.0], dtype=torch.float64),
        turn_ids=torch.tensor([[0, 0, 0, 1]] * 2),
        answer_logp=torch.tensor([[0.2, 0.5], [0.2, 0.2]]).log(),
    )
    found = answer_gain(batch, eps=1e-9)
    assert found[0].tolist() == pytest.approx([0.0, 0.0, 0.0, -1.0], abs=1e-6)
    assert found[1].tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0], abs=1e-6)
    half = answer_gain(batch, gamma=0.0, eps=1e-9)
    assert half[0].tolist() == pytest.approx([1.0, 1.0, 0.0, -1.0], abs=1e-6)
