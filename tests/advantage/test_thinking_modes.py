"""Formats, difficulty tags, tool calls and budgets: hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from posttrain.advantage.thinking_modes import (
    cosine,
    curiosity,
    difficulty_budget,
    difficulty_tag,
    difficulty_terms,
    diversity_scale,
    format_diversity,
    optimal_tool_calls,
    tool_ledger,
    tool_terms,
    uncertainty,
)
from posttrain.batch import RolloutBatch

Groups = Callable[..., RolloutBatch]


def test_rare_formats_are_scaled_up_at_the_start(groups: Groups) -> None:
    """One of four: 4 / 1; three of four: 4 / 3. The surplus is halved at half of the schedule and 0 at the end."""
    made = [groups([[1, 1, 0, 1]], mode=[[0, 3, 3, 3]], step=step, total_steps=10) for step in (0, 5, 10, 99)]
    assert diversity_scale(made[0]).tolist() == pytest.approx([4, 4 / 3, 4 / 3, 4 / 3])
    assert diversity_scale(made[1]).tolist() == pytest.approx([2.5, 7 / 6, 7 / 6, 7 / 6])
    assert diversity_scale(made[2]).tolist() == diversity_scale(made[3]).tolist() == [1.0] * 4
    assert format_diversity(made[0]).tolist() == pytest.approx([4, 4 / 3, 0, 4 / 3])
    assert diversity_scale(made[3], decay="none")[0] == 4.0


def test_unrecognized_formats_share_a_bucket_and_get_zero(groups: Groups) -> None:
    batch = groups([[1, 1, 1, 1], [1, 1, 1, 1]], mode=[[-1, None, -2, 0], [0, 0, 0, 0]])
    assert diversity_scale(batch).tolist() == pytest.approx([4 / 3, 4 / 3, 4 / 3, 4, 1, 1, 1, 1])
    assert format_diversity(batch)[:4].tolist() == [0.0, 0.0, 0.0, 4.0]


def test_scales_at_the_start_sum_to_rows_times_formats(groups: Groups) -> None:
    batch = groups([[1] * 6], mode=[[0, 1, 1, 2, 2, 2]])
    assert float(diversity_scale(batch).sum()) == pytest.approx(6 * 3)


def test_cosine_schedule() -> None:
    assert [cosine(t, 4) for t in (-1, 0, 2, 4, 9)] == pytest.approx([1, 1, 0.5, 0, 0])


def test_difficulty_tag(groups: Groups) -> None:
    """5 of 8 right is exactly 0.625: hard. A row half as long as the longest has h = 1/2."""
    correct = [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]]
    tags = [[1, 0, -1, None, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0, 0]]
    batch = groups(correct, [[5, 5, 5, 5, 10, 5, 5, 5]] * 2, tag=tags)
    terms = difficulty_terms(batch)
    assert terms["difficulty"].tolist() == [1.0, 0.0]
    assert terms["tag_reward"][:5].tolist() == [1, 0, -1, -1, 1]
    assert terms["length_reward"][:5].tolist() == pytest.approx([0.5, 0, 0, 0, 1])
    assert terms["length_reward"][8:13].tolist() == pytest.approx([0.5, 0.5, 0, 0.5, 0])
    assert difficulty_tag(batch)[:3].tolist() == pytest.approx([1.75, 1.0, 0.5])


def test_difficulty_tag_with_empty_completions(groups: Groups) -> None:
    assert difficulty_terms(groups([[0, 0]], [[0, 0]], tag=[[1, 1]]))["length_reward"].tolist() == [0.0, 0.0]


def test_tool_reward_peaks_at_the_optimal_number_of_calls(groups: Groups) -> None:
    """n = 2: m = 1 has f = 4/3, sin(pi / 3); m = 4 has f = 8/3, the same; m = 0 has 0. The wrong row earns nothing."""
    batch = groups([[1, 1, 0, 0]], tool_calls=[[2, 4, 1, 0]])
    terms = tool_terms(batch)
    assert terms["optimal_calls"].tolist() == [2.0]
    third = math.sin(math.pi / 3)
    assert terms["tool_reward"].tolist() == pytest.approx([1, third, third, 0])
    assert optimal_tool_calls(batch, alpha=2.0).tolist() == pytest.approx([2, 2 * third, 0, 0])


def test_curiosity_bonus_is_for_rarely_made_calls(groups: Groups) -> None:
    """One of four rows calls, with target rate 0.3: 0.5 (0.3 - 0.25); three calls cost 2 x 0.05. At a call rate of one
    half there is no bonus; a row with an unknown number of calls neither gets a bonus nor counts."""
    batch = groups([[1, 0, 0, 0], [0, 0, 0, 0]], tool_calls=[[0, 3, 0, 0], [1, 0, 1, None]])
    expected = [1, 0.5 * 0.05 - 0.1, 0, 0, 0, 0, 0, 0]
    assert curiosity(batch).tolist() == pytest.approx(expected)
    assert curiosity(batch, rate=1.0, bonus=3.0)[4].item() == pytest.approx(3 * (1 - 2 / 3))


def test_tool_reward_without_a_right_row_uses_zero_as_optimum(groups: Groups) -> None:
    """Nothing right: n counts as 0. m = 1, smooth 1: cos(pi / 3) = 1/2; no call: 1."""
    terms = tool_terms(groups([[0, 0], [1, 0]], tool_calls=[[1, 0], [0, 1]]))
    assert terms["optimal_calls"].tolist() == [-1.0, 0.0]
    assert terms["tool_reward"].tolist() == pytest.approx([0.5, 1, 1, 0.5])
    ppo = tool_terms(groups([[1, 1]], tool_calls=[[2, 3]]), variant="ppo", smooth=4.0)
    assert ppo["optimal_calls"].tolist() == [-1.0]
    assert ppo["tool_reward"].tolist() == pytest.approx([math.cos(math.pi / 4), math.cos(0.3 * math.pi)])


def test_ledger_reports_optimal_calls_for_each_variant(groups: Groups) -> None:
    """The ppo variant does not use the optimal number of calls, but reports it; -1 only for groups without a right
    row."""
    batch = groups([[1, 1, 0], [0, 0, 0]], tool_calls=[[3, 2, 0], [1, 0, 5]])
    for variant in ("grpo", "ppo"):
        assert tool_ledger(batch, variant=variant)["optimal_calls"].tolist() == [2.0, -1.0]  # type: ignore[arg-type]


def test_negative_rewards_are_not_scaled_down_by_few_calls(groups: Groups) -> None:
    assert optimal_tool_calls(groups([[0, 1]], rewards=[[-1, 1]], tool_calls=[[4, 1]])).tolist() == [-1.0, 1.0]


def build_budget_batch(lengths: list[int], difficulty: list[float]) -> RolloutBatch:
    rows = len(lengths)
    return RolloutBatch(
        group_ids=torch.zeros(rows, dtype=torch.long),
        mask=torch.tensor([[True, False]] * rows),
        rewards=torch.ones(rows, dtype=torch.float64),
        lengths=torch.tensor(lengths),
        columns={"difficulty": torch.tensor(difficulty, dtype=torch.float64)},
        topk_logp=torch.tensor([[[math.log(0.6), math.log(0.4)], [float("nan")] * 2]] * rows, dtype=torch.float64),
    )


def test_difficulty_budget() -> None:
    """u = 1 - 0.2 = 0.8. Hard: budget 100 + 10 * 0.8 = 108, ten tokens over at 0.01 each: 0.9. Medium: no length term.
    Easy: 50."""
    batch = build_budget_batch([118, 900, 60, 20, 500], [5, 4, 1, 1, 1])
    assert uncertainty(batch).tolist() == pytest.approx([0.8] * 5)
    rewards = difficulty_budget(batch, hard_budget=100, easy_budget=50, uncertainty_scale=10, beta=0.01)
    assert rewards.tolist() == pytest.approx([0.9, 1, 0.9, 1, 0])


def test_difficulty_by_pass_rate(groups: Groups) -> None:
    """Three of four right: difficulty 2.5, easy, budget 1; a row of 2 tokens is one over."""
    batch = groups([[1, 1, 1, 0]], [[1, 2, 3, 1]])
    rewards = difficulty_budget(batch, difficulty="pass_rate", easy_budget=1, beta=0.25)
    assert rewards.tolist() == pytest.approx([1, 0.75, 0.5, 0])
