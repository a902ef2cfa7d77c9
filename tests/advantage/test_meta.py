"""Credit by turn and by step kind."""

from __future__ import annotations

import torch

from posttrain.advantage.meta import meta_terms, per_turn, turn_terms
from posttrain.batch import RolloutBatch

F64 = torch.float64


def steps(tags: list[float], rewards: list[float], success: list[float], owner: list[int]) -> RolloutBatch:
    return RolloutBatch(
        group_ids=torch.zeros(len(tags), dtype=torch.long),
        mask=torch.ones(len(tags), 1).bool(),
        rewards=torch.tensor(success, dtype=F64),
        trajectory_ids=torch.tensor(owner),
        components={"meta_tag": torch.tensor(tags, dtype=F64), "meta_reward": torch.tensor(rewards, dtype=F64)},
    )


def test_turns_are_compared_with_the_same_turn_of_other_rollouts() -> None:
    """Turn 0: 1, 0, 0.5 minus their mean 0.5. Turn 1 was reached by two rollouts, fewer than min_group 3, so 0."""
    batch = RolloutBatch(
        group_ids=torch.zeros(3, dtype=torch.long),
        mask=torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 0, 1, 1]]).bool(),
        rewards=torch.tensor([1.0, 0.0, 0.5], dtype=F64),
        turn_ids=torch.tensor([[0, 0, 7, 1], [0, 9, 9, 9], [0, 9, 1, 1]]),
        token_rewards=torch.tensor([[0, 1, 99, 0.25], [0, 99, 99, 99], [0.5, 99, 0, 0.75]], dtype=F64),
    )
    expected = torch.tensor([[0.5, 0.5, 0, 0], [-0.5, 0, 0, 0], [0, 0, 0, 0]], dtype=F64)
    assert torch.equal(per_turn(batch, min_group=3), expected)
    wide = per_turn(batch, min_group=2)
    assert torch.equal(wide[:, 3], torch.tensor([-0.25, 0.0, 0.25], dtype=F64))
    unscored = batch.replace(rewards=torch.tensor([1.0, torch.nan, 0.5], dtype=F64))
    assert torch.equal(per_turn(unscored, min_group=2)[:, 0], torch.tensor([0.25, 0.0, -0.25], dtype=F64))


def test_turn_advantages_sum_to_0_and_norm_std_divides_by_the_std() -> None:
    """Scores 0 and 1: centered -0.5 and 0.5, unbiased std sqrt(0.5)."""
    scores = torch.tensor([[0.0], [1.0], [5.0]], dtype=F64)
    found = turn_terms(
        scores,
        torch.ones(3, 1),
        torch.zeros(3, 2, dtype=torch.long),
        torch.zeros(3, dtype=torch.long),
        torch.tensor([False, False, True]),
        min_group=2,
        norm_std=True,
        eps=0.0,
    )
    assert torch.allclose(found.turns[:, 0], torch.tensor([-(0.5**0.5), 0.5**0.5, 0.0], dtype=F64))
    assert found.advantages.shape == (3, 2)


def test_batch_without_turns_gets_zero() -> None:
    none = torch.full((2, 3), -1)
    found = turn_terms(torch.zeros(2, 0), torch.zeros(2, 0), none, torch.zeros(2, dtype=torch.long))
    assert found.advantages.tolist() == [[0.0] * 3] * 2


def test_steps_are_compared_within_their_kind() -> None:
    """Success 1 and 0: E = 0.5, -0.5. Explore steps 1, 0, 0: minus 1/3; the single planning step keeps its 1; no step
    gets 0."""
    batch = steps([0, 1, 1, 1, -1], [1, 1, 0, 0, 9], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1])
    m = torch.tensor([1.0, 2 / 3, -1 / 3, -1 / 3, 0.0], dtype=F64)
    e = torch.tensor([0.5, 0.5, -0.5, -0.5, -0.5], dtype=F64)
    assert torch.allclose(meta_terms(batch, weight=0.5), e + 0.5 * m)


def test_single_episode_keeps_its_raw_success() -> None:
    batch = steps([3, 3], [0, 0], [1, 1], [0, 0])
    assert meta_terms(batch).tolist() == [1.0, 1.0]
    assert meta_terms(batch, norm_std=True).tolist() == [1.0, 1.0]
