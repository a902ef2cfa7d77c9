"""Credit by turn and step: hand-computed values, and batched functions against their per-list versions."""

from __future__ import annotations

import pytest
import torch

from posttrain.advantage.group import agent, combine_ids, normalize_by_group, normalize_by_trajectory
from posttrain.advantage.steps import gigpo_terms, number_states, number_turns
from posttrain.advantage.turns import (
    action_advantages,
    critic_terms,
    decoupled_turns,
    information_gain,
    information_gain_terms,
    mc_actions,
    mc_critic,
    number_edges,
    salt,
)
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


TURNS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
MASK = torch.tensor(
    [[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]]
).bool()  # the third token of row 0, the second of row 1: a tool's


def turns(**fields: object) -> RolloutBatch:
    return RolloutBatch(group_ids=ids(0, 0), mask=MASK, turn_ids=TURNS, rewards=column(1, 0), **fields)  # type: ignore[arg-type]


def test_rows_are_numbered_by_sorted_ids() -> None:
    """Sorted as pairs: (-3, 5) < (2, -7) < (2, 5) < (8, 0)."""
    assert combine_ids(ids(2, 8, -3, 2, 2), ids(5, 0, 5, -7, 5)).tolist() == [2, 3, 0, 1, 2]
    assert combine_ids(ids(), ids()).tolist() == []


def test_only_trained_turns_are_numbered() -> None:
    """Row 0 has turns 0 and 1, row 1 turns 0, 1 and 2; without its last token, row 1 ends with turn 1."""
    number, row, turn = number_turns(TURNS, MASK)
    assert (number.tolist(), row.tolist(), turn.tolist()) == ([0, 0, 1, 1, 2, 3, 4], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2])
    shorter = MASK.clone()
    shorter[1, 3] = False
    assert number_turns(TURNS, shorter)[2].tolist() == [0, 1, 0, 1]
    assert number_turns(TURNS[:, :0], MASK[:, :0])[1].tolist() == []


def test_earlier_turns_also_get_credit_for_their_call() -> None:
    """Outcomes 1 and 0 become +-1/sqrt 2, and the calls' 0 and 1 become -+1/sqrt 2. Four of the seven tokens are in
    earlier turns: with weight 1/2 they count 7/8 each, and those of last turns 7/3."""
    half = 0.5**0.5
    plain = decoupled_turns(turns(components={"region": column(0, 1)}), tool="region", weight=None, eps=0.0)
    rows = [[0.7, 0.7, 0, 1, 1], [-0.7, 0, -0.7, -1, 0]]
    torch.testing.assert_close(plain, half * torch.tensor(rows, dtype=torch.float64))
    weighed = decoupled_turns(turns(components={"region": column(0, 1)}), tool="region", eps=0.0)
    shares = torch.tensor([[7 / 8, 7 / 8, 0, 7 / 3, 7 / 3], [7 / 8, 0, 7 / 8, 7 / 3, 0]], dtype=torch.float64)
    torch.testing.assert_close(weighed, plain * shares)


def test_steps_shared_by_rollouts_get_the_same_id() -> None:
    """Both rollouts share the first step; the second step differs."""
    paths = [[["s", "a", "t"], ["t", "b", "u"]], [["s", "a", "t"], ["t", "c", "u"], ["u", "b", "v"]]]
    assert number_edges(paths) == [[0, 1], [0, 2, 3]]


def test_steps_are_equal_up_to_white_space_but_not_across_histories() -> None:
    paths = [[["x", "a", "s"], ["s", "b", "t"]], [["y", "a", "s"], [" s\n", "b", "t "]]]
    assert number_edges(paths) == [[0, 1], [2, 1]]
    assert number_edges(paths, history=2) == [[0, 1], [2, 3]]


def test_salt_by_token_equals_salt_by_step() -> None:
    """A turn counts once, however many tokens it has."""
    edges = torch.tensor([[0, 0, 1, 1, 1], [0, 2, 2, 3, 3]])
    found = salt(turns(edge_ids=edges, advantages=column(1, -0.5)))
    assert found.tolist() == [[0.25, 0.25, 0, 1, 1], [0.25, 0, -0.5, -0.5, 0]]
    with pytest.raises(UserError, match="already differs by token"):
        salt(turns(edge_ids=edges, advantages=column(1, -0.5)[:, None].expand(2, 5)))


def test_gains_are_differences_and_the_last_turn_gets_the_outcome() -> None:
    """Log-probs -3, -1, -2: gains 2, -1. gamma 1/2: 2 - 1/2 + 5/4, -1 + 5/2, 5."""
    found = information_gain_terms(
        column(-3, -1, -2)[None], column(5), ids(3), kind="logprob", normalise="none", gamma=0.5
    )
    assert found.rewards.tolist() == [[2, -1, 5]]
    assert found.advantages.tolist() == [[2.75, 1.5, 5]]


def test_gains_and_outcomes_are_normalized_separately() -> None:
    """Gains 1 and 3: -1 and 1 (population std 1); outcomes 0 and 4: -1 and 1; joint: mean 2, std sqrt(2.5)."""
    logp = torch.tensor([[0, 1], [0, 3]], dtype=torch.float64)
    both = {"answer_mean_logp": logp, "outcome": column(0, 4), "turns": ids(2, 2), "kind": "logprob", "eps": 1e-12}
    separate = information_gain_terms(**both).advantages  # type: ignore[arg-type]
    assert separate.flatten().tolist() == pytest.approx([-2, -1, 2, 1])
    joint = information_gain_terms(**both, normalise="joint").advantages  # type: ignore[arg-type]
    assert joint[:, 1].tolist() == pytest.approx([-2 / 2.5**0.5, 2 / 2.5**0.5])


def test_equal_outcomes_get_zero() -> None:
    logp = torch.tensor([[0, 1], [0, 3]], dtype=torch.float64)
    found = information_gain_terms(logp, column(1, 1), ids(2, 2), kind="logprob").advantages
    assert not found[:, 1].any()
    assert found[0, 0] < 0 < found[1, 0]


def test_information_gain_by_token_equals_information_gain_by_turn() -> None:
    gains = torch.zeros(2, 5, dtype=torch.float64)
    gains[0, 1], gains[1, 0], gains[1, 2] = 0.5, -0.25, 0.125
    found = information_gain(turns(token_rewards=gains))
    logp = torch.tensor([[0, 0.5, torch.nan], [0, -0.25, -0.125]], dtype=torch.float64)
    wanted = information_gain_terms(logp, column(1, 0), ids(2, 3), kind="logprob").advantages
    spread = torch.where(MASK, wanted.gather(1, TURNS), 0.0)
    torch.testing.assert_close(found, spread)


def test_batched_turn_critic_equals_the_critic_of_each_turn() -> None:
    generator = torch.Generator().manual_seed(2)
    values, simulated = (torch.rand(2, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    found = mc_critic(turns(values=values, mc_values=simulated), lam=0.5).advantages
    one, other = ([0, 3], [0, 2, 3])  # first trained tokens of the turns
    for row, places in ((0, one), (1, other)):
        ended = torch.zeros(len(places))
        ended[-1] = 1
        rewards = torch.zeros(len(places), dtype=torch.float64)
        rewards[-1] = [1.0, 0.0][row]
        end = column(0)
        terms = critic_terms(
            rewards, torch.cat([values[row, places], end]), torch.cat([simulated[row, places], end]), ended, lam=0.5
        )
        torch.testing.assert_close(found[row, places], terms.advantages)


def test_action_advantages_with_different_or_equal_actions() -> None:
    """q 3 and 1: mean 2, std sqrt(2). All `up`: 3 against up and down: (3 - 2) / sqrt(2)."""
    legal = {"up": 3.0, "down": 1.0}
    assert action_advantages(legal, ["up", "down"], eps=0.0) == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert action_advantages(legal, ["up", "up"]) == pytest.approx([0.5**0.5] * 2)
    assert action_advantages({"up": 3.0}, ["up", "up"]) == [0.0, 0.0]
    assert action_advantages({"up": 3.0, "down": 3.0}, ["up"]) == [0.0]
    assert action_advantages(legal, ["up", "fly"], eps=0.0, illegal=-9.0) == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_equal_actions_are_compared_with_all_legal_actions() -> None:
    """Two groups: actions worth 1, 3 and an illegal one at -1 (mean 1, std 2), and one action taken twice, worth 4
    among 4, 2 and 0 (mean 2, std 2). The second state has one action more."""
    nan = float("nan")
    batch = RolloutBatch(
        group_ids=torch.tensor([5, 5, 5, 7, 7]),
        mask=torch.ones(5, 1, dtype=torch.bool),
        legal_returns=torch.tensor([[1.0, 3.0, nan]] * 3 + [[4.0, 2.0, 0.0]] * 2, dtype=torch.float64),
        action_ids=torch.tensor([0, 1, -1, 0, 0]),
    )
    assert mc_actions(batch, eps=0.0).tolist() == pytest.approx([0.0, 1.0, -1.0, 1.0, 1.0])


def steps(order: list[int]) -> RolloutBatch:
    """Return two trajectories of two steps that begin in the same state and end in different states."""
    rows = RolloutBatch(
        group_ids=ids(0, 0, 0, 0),
        mask=torch.ones(4, 1, dtype=torch.bool),
        rewards=column(1, 1, 0, 0),
        components={"step": column(0, 1, 0, 0)},
        trajectory_ids=ids(0, 0, 1, 1),
        step_ids=ids(0, 1, 0, 1),
        state_ids=ids(0, 1, 0, 2),
    )
    return rows.select(order)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_gigpo_compares_actions_from_the_same_state(order: list[int]) -> None:
    """gamma 1/2: returns 1/2, 1, 0, 0. Episode +-1/2; the first steps +-1/4, the last steps have no other step to
    compare with."""
    found = gigpo_terms(steps(order), gamma=0.5)
    assert found.step_returns.tolist() == column(0.5, 1, 0, 0)[order].tolist()
    assert found.episode_advantages.tolist() == column(0.5, 0.5, -0.5, -0.5)[order].tolist()
    assert found.step_advantages.tolist() == column(0.25, 0, -0.25, 0)[order].tolist()
    assert found.advantages.tolist() == column(0.75, 0.5, -0.75, -0.5)[order].tolist()


def test_similar_states_of_one_prompt_are_clustered() -> None:
    """`room 1` and `room 2` share 5 of 6 letters: a ratio of 10 / 12. Clusters do not cross prompts."""
    states = ["room 1", "room 2", "hall", "room 1"]
    assert number_states(states, [0, 0, 0, 1]) == [0, 1, 2, 3]
    assert number_states(states, [0, 0, 0, 1], similarity=0.8) == [0, 0, 1, 2]
    assert number_states(states, [0, 0, 0, 0]) == [0, 1, 2, 0]


def test_one_agent_with_one_call_each_equals_grpo() -> None:
    rewards, groups = column(1, 0, 3, 1), ids(0, 0, 1, 1)
    mask = torch.ones(4, 1, dtype=torch.bool)
    rows = RolloutBatch(groups, mask, rewards, agent_ids=ids(5, 5, 5, 5), trajectory_ids=ids(0, 1, 2, 3))
    plain = normalize_by_group(rewards, groups, eps=1e-6)
    assert agent(rows).tolist() == plain.tolist()
    assert agent(rows, agent_wise=False).tolist() == plain.tolist()


def test_trajectory_counts_once_with_its_mean() -> None:
    """Means 1 and 3 (of 2, 4, and one unscored): -1 and 1, whatever the numbers of rows."""
    found = normalize_by_trajectory(
        column(1, 1, 1, 2, 4, torch.nan), ids(0, 0, 0, 0, 0, 0), ids(0, 0, 0, 1, 1, 1), scale="none"
    )
    assert found.tolist() == [-1, -1, -1, 1, 1, 0]
