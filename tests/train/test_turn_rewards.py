"""Turn rewards: their values, their position in the batch, and learning from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.advantage.steps import REWARD, gigpo, split_into_steps
from posttrain.advantage.tokens import token_rewards
from posttrain.batch import Prompt, Rollout, RolloutBatch, Segment, ToolCall, Turn
from posttrain.batch.records import sample_fields
from posttrain.errors import RewardError, RunError
from posttrain.recipe.load import load_dict
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.run.metrics import read_metrics
from posttrain.tools.environments import _reply_to_calls
from posttrain.train import rl
from posttrain.train.collate import rollout_batch
from posttrain.train.scoring import ends_of_parts
from posttrain.train.turn_fields import turn_of_each
from posttrain.verify.score import Sample, Scorer

Opened = Callable[..., AbstractContextManager[Any]]

SCRIPT = """
from posttrain.verify.contract import per_turn

@per_turn
def digits(completion, parts):
    return [float(sum(c.isdigit() for c in part)) for part in parts]

@per_turn
def picky(completion, parts):
    return None if "none" in completion else [None] * len(parts)

@per_turn
def long(completion, parts): return [1.0] * (len(parts) + 1)

@per_turn
def blind(completion): return [1.0]

def right(completion): return float("7" in completion)
"""
ECHO = """
class Echo:
    def reset(self, row): self.turn = 0
    def step(self, text):
        self.turn += 1
        return "again", self.turn == 3, float(any(c.isdigit() for c in text))
    def actions(self): return ["a", "7"]
    def score(self): return 0.0
    def close(self): pass
"""


@pytest.fixture
def scored(tmp_path: Path) -> Callable[..., Any]:
    """Return the scores of samples by rewards of SCRIPT."""
    (tmp_path / "s.py").write_text(SCRIPT)

    def score(samples: list[Sample], *rewards: dict[str, Any], **scoring: Any) -> Any:
        sections = [Reward.model_validate({**r, "use": f"s.py:{r['use']}"}) for r in rewards]
        with Scorer(sections, Scoring(workers=1, **scoring), tmp_path) as scorer:
            return scorer.score(samples)

    return score


def test_weights_clips_and_conditions_apply_per_turn(scored: Any) -> None:
    """Digits 1, 0, 3 in three turns, at most 2 per turn: 1, 0, 2, times 0.5 gives 1.5 in total; nothing without a 7."""
    samples = [
        Sample(text, {}, parts=parts)
        for text, parts in [("7\nx\n456", ("7", "x", "456")), ("1\n2", ("1", "2")), ("7 none", ("7 none",))]
    ]
    digits = {"use": "digits", "weight": 0.5, "clip": [0, 2], "condition": {"on": "right", "min": 1}}
    found = scored(
        samples, {"use": "right", "weight": 1, "correct": True}, digits, {"use": "picky", "on_none": "ignore_component"}
    )
    assert found.components["digits"] == [4.0, 2.0, 1.0]  # as the script returned them
    assert found.turn_scores["digits"] == [(1.0, 0.0, 3.0), (1.0, 1.0), (1.0,)]
    assert found.rewards == [1 + 1.5, 0.0, 1 + 0.5]
    assert found.turn_rewards == [(0.5, 0.0, 1.0), (0.0, 0.0), (0.5,)]
    assert found.turn_scores["picky"] == [(0.0, 0.0, 0.0), (0.0, 0.0), ()]


def test_steps_of_a_single_turn(scored: Any) -> None:
    text = "1 and 2\n\nno\n3\n"
    for split, scores in (("lines", (2.0, 0.0, 1.0)), ("paragraphs", (2.0, 1.0)), (None, (3.0,))):
        found = scored([Sample(text, {})], {"use": "digits"}, split=split)
        assert (found.turn_scores["digits"], found.rewards) == ([scores], [3.0])


@pytest.mark.parametrize(("use", "told"), [("long", "row 0: returned .* for 1 part"), ("blind", "takes no `parts`")])
def test_invalid_turn_reward_is_reported(use: str, told: str, scored: Any) -> None:
    with pytest.raises(RewardError, match=told):
        scored([Sample("x", {})], {"use": use})


class Characters:
    """A tokenizer whose tokens are characters."""

    def __len__(self) -> int:
        return 128

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(map(chr, ids))

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]


def rollout(*turns: tuple[str, str | None], reward: float, given: tuple[float, ...], group: int = 0) -> Rollout:
    """Return a rollout of turns and replies, with one character per token."""
    segments: list[Segment] = []
    for text, reply in turns:
        segments.append(Segment("model", tuple(map(ord, text))))
        segments += [Segment("tool", tuple(map(ord, reply)))] if reply is not None else []
    made = Rollout(
        prompt=Prompt("p", {}, "", (1,)),
        group=group,
        segments=tuple(segments),
        text="\n".join(text for text, _ in turns),
        finish="stop",
        version=0,
        reward=reward,
        turns=tuple(Turn(text, reply=reply, reward=0.25) for text, reply in turns),
        turn_scores={"mine": given},
        turn_rewards=given,
    )
    made.part_ends = ends_of_parts(made, None, Characters())
    return made


def test_turn_rewards_are_placed_at_the_ends_of_their_turns() -> None:
    r = rollout(("ab", "xy"), ("cde", None), reward=2.0, given=(0.5, -1.0))
    assert r.part_ends == (1, 6)
    batch = rollout_batch([r], needs={"token_rewards", "turn_ids"})
    assert batch.turn_rewards is not None and batch.token_rewards is not None
    assert batch.turn_rewards.tolist() == batch.turn_scores["mine"].tolist() == [[0, 0.5, 0, 0, 0, 0, -1.0]]
    assert batch.token_rewards.tolist() == [[0, 0.75, 0, 0, 0, 0, -0.75]]  # with 0.25 per turn from the environment
    whole = token_rewards(batch.replace(token_rewards=None))
    assert whole.tolist() == [[0, 0.5, 0, 0, 0, 0, 1.5]]  # the row's 2 minus the first turn's reward


def test_steps_end_at_the_end_of_their_text() -> None:
    text = "ab\ncd\n\nef"
    one = Rollout(Prompt("p", {}, "", (1,)), 0, (Segment("model", tuple(map(ord, text))),), text, "stop", 0)
    one.part_ends = ends_of_parts(one, "lines", Characters())
    assert one.part_ends == (2, 6, 8)
    assert turn_of_each(one).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_turns_with_equal_states_are_compared() -> None:
    """Two rollouts give the same reply to the same observation: their returns are compared there, -0.5 and 0.5 *
    gamma 1.
    """
    rows = [
        rollout(("ab", "x"), ("c", None), reward=1.0, given=(0.0, 0.0)),
        rollout(("q", "x"), ("d", None), reward=0.0, given=(0.0, 0.0)),
        rollout(("q", "other"), ("d", None), reward=0.5, given=(0.0, 0.0)),
    ]
    batch = rollout_batch(rows, needs={"turn_ids", "turn_states"})
    near = rollout_batch(
        rows, needs={"turn_states"}, similarity=0.2
    ).turn_states  # x and other have no letter in common
    assert near is not None and torch.equal(near, batch.turn_states)
    alike = rollout_batch(rows, needs={"turn_states"}, similarity=0.0).turn_states
    assert alike is not None and len(alike.unique()) == 1
    steps = split_into_steps(batch)
    assert steps.batch.components[REWARD].tolist() == [0, 1, 0, 0, 0, 0.5]
    assert steps.batch.step_ids is not None and steps.batch.step_ids.tolist() == [0, 1] * 3
    assert steps.batch.dones is not None and steps.batch.dones.tolist() == [False, True] * 3
    found = gigpo(batch, gamma=1.0)
    assert found.shape == batch.mask.shape and not found[~batch.mask].any()
    # episode 0.5, -0.5, 0; first turns share the prompt (same values); two second turns were shown x.
    assert found[0].tolist() == pytest.approx([1.0, 1.0, 0, 1.0] + [0.0] * (batch.mask.shape[1] - 4))
    assert float(found[1][batch.mask[1]][-1]) == pytest.approx(-1.0)
    assert float(found[2][batch.mask[2]][-1]) == pytest.approx(0.0)  # seen once


def test_batch_without_trained_tokens_has_no_steps() -> None:
    empty = RolloutBatch(
        torch.zeros(2, dtype=torch.long),
        torch.zeros(2, 3, dtype=torch.bool),
        rewards=torch.ones(2).double(),
        turn_ids=torch.zeros(2, 3, dtype=torch.long),
        turn_states=torch.zeros(2, 3, dtype=torch.long),
    )
    assert gigpo(empty).tolist() == [[0.0] * 3] * 2


def test_calls_record_their_turn() -> None:
    r = rollout(("a", "b"), ("c", None), reward=0.0, given=())
    r.turns = (r.turns[0], Turn("c", (ToolCall("t", {}, "no", "error"),)))
    given = sample_fields(r)
    assert [call["turn"] for call in given["tool_calls"]] == [1]
    assert given["parts"] == ("a", "c") and given["turn_rewards"] == (0.25, None)


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Any]:
    """Factory of recipes on the tiny model with turn rewards."""
    (tmp_path / "s.py").write_text(SCRIPT)
    (tmp_path / "echo.py").write_text(ECHO)
    (tmp_path / "rows.jsonl").write_text("\n".join(f'{{"prompt": "say {i}"}}' for i in range(16)))

    def make(**changes: Any) -> Any:
        values = {
            "stage": "rl",
            "model": {"path": "tiny"},
            "data": {"source": "rows.jsonl"},
            "rollout": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 24},
            "rewards": [{"use": "s.py:digits", "weight": 0.2}, {"use": "s.py:right", "weight": 0, "correct": True}],
            "scoring": {"workers": 1},
            "optim": {"lr": 3e-3},
            "run": {"steps": 2},
            **changes,
        }
        return load_dict(values, base_dir=tmp_path, where="test").recipe

    return make


@pytest.mark.parametrize("advantage", ["gigpo", "step_gae", "mc_critic"])
def test_policy_learns_from_turn_rewards(advantage: str, toy: Any, opened: Opened) -> None:
    """An environment rewards each of three turns for a digit, and the rollout for nothing."""
    recipe = toy(
        environment={"use": "echo.py:Echo", **({"simulations": 8} if advantage == "mc_critic" else {})},
        rollout={
            **{"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 90, "turn_tokens": 12, "max_turns": 3},
            "stop": ["e", "a", "o", "1", "2", "7"],
        },
        rewards=[{"use": "environment.steps"}, {"use": "environment.score", "weight": 0, "correct": True}],
        advantage={"use": advantage, "gamma": 0.0},
        run={"steps": 14},
    )
    with opened("run") as directory:
        rl.run(recipe, directory)
    earned = [row["reward"] for row in read_metrics(directory.path)]
    assert sum(earned[-3:]) / 3 > sum(earned[:3]) / 3 + 0.5


def test_single_action_learns_from_simulated_plays(toy: Any, opened: Opened, tmp_path: Path) -> None:
    """MC-GRPO: rewards carry no signal.

    A digit is one legal action, which the plays reward, and every other character the second one; the policy learns
    to begin with a digit.
    """
    (tmp_path / "choice.py").write_text(
        "class Choice:\n"
        "    def reset(self, row): self.over = False\n"
        "    def actions(self): return [] if self.over else ['digit', 'letter']\n"
        "    def action(self, text): return 'digit' if text[:1].isdigit() else 'letter'\n"
        "    def step(self, text):\n"
        "        assert not self.over\n"
        "        self.over = True\n"
        "        return '', True, float(text == 'digit' or self.action(text) == 'digit')\n"
        "    def score(self): return 0.0\n"
        "    def close(self): pass\n"
    )
    recipe = toy(
        environment={"use": "choice.py:Choice", "simulations": 2},
        rollout={"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 12, "max_turns": 1, "stop": ["e", "a", "1"]},
        rewards=[{"use": "environment.score"}, {"use": "environment.steps", "weight": 0, "correct": True}],
        advantage="mc_actions",
        run={"steps": 12},
    )
    with opened("run") as directory:
        rl.run(recipe, directory)
    rows = read_metrics(directory.path)
    earned = [row["rewards/steps/mean"] for row in rows]
    assert all(row["reward"] == 0 for row in rows) and sum(earned[-3:]) > sum(earned[:3]) + 0.5


@pytest.mark.parametrize("advantage", ["reinforce_pp", "per_turn", "information_gain"])
def test_steps_of_a_single_turn_are_credited(advantage: str, toy: Any, opened: Opened) -> None:
    with opened("run") as directory:
        rl.run(toy(advantage=advantage, scoring={"workers": 1, "split": "lines"}), directory)
    rows = read_metrics(directory.path)
    assert len(rows) == 2 and all(row["rewards/digits/mean"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"scoring": {"split": "lines"}, "rewards": [{"use": "s.py:right"}]}, "scoring.split: does nothing"),
        (
            {"tools": [{"use": "calculator"}], "advantage": "per_turn", "rewards": [{"use": "s.py:right"}]},
            "`per_turn` reads rewards by turn, but no reward is marked @per_turn",
        ),
        (
            {"scoring": {"split": "lines"}, "advantage": {"use": "meta_reasoning", "tag": "digits"}},
            "no reward component `meta_reward`",
        ),
    ],
)
def test_turn_advantage_without_turn_rewards_is_refused(changes: Any, told: str, toy: Any, opened: Opened) -> None:
    with pytest.raises((RewardError, ValueError), match=told), opened("run") as directory:
        rl.run(toy(**changes), directory)


TIMED = """
import time
from posttrain.options import Column

class Slow:
    def reset(self, row): self.turn = 0
    def step(self, text):
        self.turn += 1
        time.sleep(0.02)
        return "again", self.turn == 2
    def score(self): return 0.0
    def close(self): pass

def told(batch, *, column: Column = "tool_seconds"):
    with open(__file__ + ".log", "a") as log:
        log.write(f"{batch.columns[column].nan_to_num().max():.3f}\\n")
    return batch.mask.sum(-1) * 0.0 + 1
"""


def test_time_of_tools_and_environments_is_measured(toy: Any, opened: Opened, tmp_path: Path) -> None:
    """In the loop: two steps of 0.02 s give at least 0.04 s per row; the earlier rehearsal has none."""
    (tmp_path / "timed.py").write_text(TIMED)
    recipe = toy(
        environment={"use": "timed.py:Slow"},
        rollout={"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 60, "turn_tokens": 8, "max_turns": 2,
                 "stop": ["e", "a", "o", "1", "2", "7", " "]},
        rewards=[{"use": "environment.score", "correct": True}],
        factors=[{"use": "timed.py:told"}, {"use": "duration", "cap": 5.0}],
        run={"steps": 1},
    )  # fmt: skip
    with opened("run") as directory, contextlib.suppress(RunError):  # no reward: nothing is learnt
        rl.run(recipe, directory)
    rehearsed, measured = (tmp_path / "timed.py.log").read_text().split()
    assert rehearsed == "0.000" and 0.02 <= float(measured) < 5


def test_turn_time_is_that_of_its_slowest_call() -> None:
    calls = [ToolCall("a", {}, "x", seconds=0.5), ToolCall("b", {}, "y", "error", seconds=2.0)]
    reply = _reply_to_calls(calls)
    assert reply.seconds == 2.0
    r = rollout(("a", "b"), ("c", None), reward=0.0, given=())
    assert r.tool_seconds is None, "nothing was called"
    r.turns = (Turn("a", tuple(calls), "b", seconds=2.0), Turn("c", seconds=0.25))
    assert r.tool_seconds == 2.25
    assert rollout_batch([r], ("last_number",)).columns["tool_seconds"].tolist() == [2.25]
    assert r.turns[0] == Turn("a", tuple(calls), "b", seconds=9.0), "a clock makes no other rollout"
