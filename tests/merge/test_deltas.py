"""Merge rules on differences from a base: hand-computed values. The base is 0 unless stated otherwise."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from posttrain.errors import MergeError
from posttrain.merge import blends, deltas, global_topk, lora, selective, sparsify
from posttrain.merge.rules import task_arithmetic


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ZERO = t(0, 0, 0, 0)


def test_largest_keeps_the_first_of_equal_entries() -> None:
    assert sparsify.keep_largest(t(1, -2, 2, 0.5), 1).tolist() == [0, -2, 0, 0]
    assert sparsify.keep_largest(t(1, -2, 2, 0.5), 0).tolist() == [0, 0, 0, 0]
    assert sparsify.keep_largest(t(1, -2), 5).tolist() == [1, -2]


def test_ties_trims_elects_and_averages() -> None:
    """Halves: [4, -3, 0, 0] and [0, -1, 5, 0], weights 1, 3: sums 4, -6, 15, 0. Entry 1: (-3 - 3)/(1 + 3)."""
    merged = deltas.ties([t(4, -3, 1, 0), t(0.5, -1, 5, 0)], ZERO, [1, 3], density=0.5)
    assert merged.tolist() == [4, -1.5, 5, 0]


def test_ties_differs_from_mergekit_only_among_equal_magnitudes() -> None:
    """mergekit sorts without `stable=True`; here it keeps the last of equal entries, while we keep the first.

    Differences are multiples of float32's step at 1, so that many have the threshold's magnitude. Both sides keep the
    same number of entries of each model, an entry kept by one side only has the threshold's magnitude, and where both
    keep the same entries the results are equal.
    """
    draw = torch.Generator().manual_seed(0)
    base = torch.ones(400)
    models = [base + torch.randint(-9, 10, (400,), generator=draw) * 2.0**-23 for _ in range(2)]
    weights, count, parts, same = torch.tensor([[0.6], [0.4]]), int(0.3 * 400), [], torch.ones(400, dtype=torch.bool)
    for delta in (model - base for model in models):
        order = 399 - delta.abs().flip(0).argsort(descending=True, stable=True)
        theirs = delta * torch.zeros(400).index_fill(0, order[:count], 1)
        ours = sparsify.keep_largest(delta, count)
        only_one = (ours != 0) != (theirs != 0)
        assert int((ours != 0).sum()) == int((theirs != 0).sum()) == count
        assert set(delta[only_one].abs().tolist()) == {float(delta.abs()[order[count - 1]])}
        parts, same = [*parts, theirs], same & ~only_one
    weighted = torch.stack(parts) * weights
    agree = weighted.sign() == (weighted.sum(0) >= 0) * 2 - 1
    divisor = (weights * agree).sum(0)
    expected = base + (weighted * agree).sum(0) / torch.where(divisor == 0, 1, divisor)
    merged = deltas.ties(models, base, [0.6, 0.4], density=0.3)
    assert torch.equal(merged[same], expected[same]) and not torch.equal(merged, expected)


def test_ties_with_a_density_per_model() -> None:
    """The first model keeps 1 of 4 entries, the second all: entry 0 has 4 and 2, entry 1 only the second's -1."""
    merged = deltas.ties([t(4, -3, 0, 0), t(2, -1, 0, 0)], ZERO, [1, 1], density=[0.25, 1.0])
    assert merged.tolist() == [3, -1, 0, 0]
    with pytest.raises(MergeError, match="2 values for 1 model"):
        deltas.ties([ZERO], ZERO, [1], density=[0.5, 0.5])


def test_ties_elects_plus_for_zero_sums_and_negative_weights_flip_the_vote() -> None:
    assert deltas.ties([t(2), t(-2)], t(0), [1, 1], density=1.0).tolist() == [2]
    assert deltas.ties([t(2)], t(1), [-1], density=1.0, normalize=False).tolist() == [0]  # 1 - (2 - 1)


def test_dare_keeps_entries_sampled_below_the_density_and_rescales() -> None:
    """density 0.5 keeps the samples 0.4 and 0: 2 and -4, without rescaling.

    With rescaling by probability they are divided by 0.5. With rescaling by norm they get the norm of the whole
    difference: 2 + 4 times 5/3 is 2 + 3 + 1 + 4.
    """
    draws = [t(0.4, 0.5, 0.9, 0.0)]
    model = t(2, 3, 1, -4)
    by_norm = deltas.dare_linear([model], ZERO, [1], draws, density=0.5)
    torch.testing.assert_close(by_norm, t(10 / 3, 0, 0, -20 / 3))
    assert deltas.dare_linear([model], ZERO, [1], draws, density=0.5, rescale="chance").tolist() == [4, 0, 0, -8]
    assert deltas.dare_linear([model], ZERO, [1], draws, density=0.5, rescale=False).tolist() == [2, 0, 0, -4]
    assert deltas.dare_linear([model], ZERO, [1], draws, density=0.0).tolist() == [0, 0, 0, 0]


def test_dare_at_density_one_is_task_arithmetic() -> None:
    models, draws = [t(2, 3, 1, -4), t(1, -1, 0, 2)], [torch.rand(4).double()] * 2
    merged = deltas.dare_linear(models, t(1, 1, 0, 0), [0.5, 2], draws, density=1.0)
    torch.testing.assert_close(merged, task_arithmetic(models, t(1, 1, 0, 0), [0.5, 2]))


def test_dare_is_unbiased() -> None:
    """The mean over 4000 draws of entries +-1 at density 0.25 (variance 3): within 4 sigma = 4 sqrt(3/4000) = 0.11."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 4, generator=generator).double()
    merged = torch.stack(
        [deltas.dare_linear([t(1, -1, 1, -1)], ZERO, [1], [d], density=0.25, rescale="chance") for d in draws]
    )
    assert (merged.mean(0) - t(1, -1, 1, -1)).abs().max() < 0.11


def test_della_ranks_by_row_and_divides_by_the_keep_probability() -> None:
    """density 0.5, epsilon 0.25 in rows of 3: probabilities 0.25, 0.5, 0.75 by magnitude."""
    delta = torch.stack([t(3, -1, 2), t(0, 5, -6)])
    chances = sparsify.compute_rank_probabilities(delta, 0.5, 0.25)
    assert chances.tolist() == [[0.75, 0.25, 0.5], [0.25, 0.5, 0.75]]
    draws = [torch.full((2, 3), 0.3, dtype=torch.float64)]
    settings = {"density": 0.5, "epsilon": 0.25}
    merged = deltas.della_linear([delta], torch.zeros_like(delta), [1], draws, **settings, rescale="chance")
    assert merged.tolist() == [[4, 0, 4], [0, 10, -8]]
    by_norm = deltas.della_linear([delta], torch.zeros_like(delta), [1], draws, **settings)  # 17 of 16 kept
    torch.testing.assert_close(by_norm, torch.stack([t(3, 0, 2), t(0, 5, -6)]) * 17 / 16)
    assert sparsify.compute_rank_probabilities(t(7), 0.5, 0.25).tolist() == [0.5]


def test_breadcrumbs_drops_the_top_and_the_bottom() -> None:
    """Of 4 entries int(0.25 * 4) = 1 is dropped at the top, 2 are kept. With density 1 nothing can be dropped."""
    assert deltas.breadcrumbs([t(1, -9, 4, 3)], ZERO, [2], density=0.5, gamma=0.25).tolist() == [0, 0, 8, 6]
    assert deltas.breadcrumbs([t(1, -9, 4, 3)], ZERO, [1], density=1.0, gamma=0.25).tolist() == [1, -9, 4, 3]


def test_breadcrumbs_ties_elects() -> None:
    merged = deltas.breadcrumbs_ties([t(1, -2), t(-3, -1)], t(0, 0), [1, 1], density=1.0, gamma=0.0)
    assert merged.tolist() == [-3, -3]


def test_ram_applies_changes_of_a_single_model_in_full() -> None:
    merged = selective.ram([t(1, 0, 2, 0), t(0, 1e-6, 4, 0)], t(0, 0, 0, 7) * 0, [1, 1])
    assert merged.tolist() == [1, 0, 3, 0]


def test_model_stock_between_base_and_mean() -> None:
    """Equal differences: c = 1, t = 1, the model. At right angles: c = 0, the base. At 60 degrees: c = 1/2, t = 2/3."""
    base = t(1, 1)
    assert deltas.model_stock([t(3, 1), t(3, 1)], base, []).tolist() == [3, 1]
    assert deltas.model_stock([t(2, 1), t(1, 2)], base, []).tolist() == [1, 1]
    apart = deltas.model_stock([t(2, 1), t(1.5, 1 + 3**0.5 / 2)], base, [])
    torch.testing.assert_close(apart, base + 2 / 3 * t(0.75, 3**0.5 / 4))
    with pytest.raises(MergeError, match="two models"):
        deltas.model_stock([base], base, [])


def test_model_stock_filter_wise_has_one_t_per_row() -> None:
    """Row 0: equal differences, t = 1. Row 1: right angles, the base."""
    a, b = torch.stack([t(1, 1), t(1, 0)]), torch.stack([t(1, 1), t(0, 1)])
    merged = deltas.model_stock([a, b], torch.zeros(2, 2, dtype=torch.float64), [], filter_wise=True)
    torch.testing.assert_close(merged, torch.stack([t(1, 1), t(0, 0)]))


def test_adding_and_subtracting_a_reasoning_vector_restores_the_target() -> None:
    plus, minus, target = t(3, 1), t(1, 2), t(10, 20)
    there = deltas.reasoning_vector([plus, minus], target, [], alpha=0.5)
    assert there.tolist() == [11, 19.5]
    assert deltas.reasoning_vector([plus, minus], there, [], alpha=-0.5).tolist() == target.tolist()


def test_update_selective_per_tensor_and_over_the_model() -> None:
    """int(0.5 * 3) = 1 entry: 2 * 0.5. Over the model the count says how many."""
    assert deltas.update_selective([t(1, -2, 2)], t(0, 0, 0), [], density=0.5, scale=0.5).tolist() == [0, -1, 0]
    given = {"density": 0.5, "scale": 1.0, "granularity": "global"}
    assert deltas.update_selective([t(1, -2, 2)], t(0, 0, 0), [], 2, **given).tolist() == [0, -2, 2]
    with pytest.raises(MergeError, match="count"):
        deltas.update_selective([t(1)], t(0), [], **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_over_the_model_equal_a_stable_sort(dtype: torch.dtype) -> None:
    """A stable sort of all magnitudes, with many equal ones and every share."""
    generator = torch.Generator().manual_seed(1)
    state = {n: (torch.randn(k, generator=generator, dtype=dtype) * 2).round() / 2 for n, k in (("b", 7), ("a", 12))}
    names = ["b"] * 7 + ["a"] * 12
    order = torch.cat(list(state.values())).abs().argsort(descending=True, stable=True).tolist()
    for share in (0.0, 0.05, 0.3, 0.5, 0.9, 1.0):
        kept = [names[i] for i in order[: int(share * 19)]]
        expected = {name: kept.count(name) for name in state}
        assert global_topk.count_per_tensor(lambda: iter(state.items()), share, at_least_one=False) == expected
    assert sum(global_topk.count_per_tensor(lambda: iter(state.items()), 0.01, at_least_one=True).values()) == 1


def test_slerp_is_symmetric_and_keeps_the_norm() -> None:
    """Between right angles of norm 2 at t = 1/2: norm 2. With t = 0 and 1 the inputs; parallel ones are linear."""
    x, y = t(2, 0), t(0, 2)
    half = blends.slerp([x, y], None, [])
    torch.testing.assert_close(half, t(2**0.5, 2**0.5))
    torch.testing.assert_close(blends.slerp([x, y], None, [], t=0.3), blends.slerp([y, x], None, [], t=0.7))
    torch.testing.assert_close(blends.slerp([x, y], None, [], t=0.0), x)
    assert blends.slerp([x, 3 * x], None, [], t=0.25).tolist() == [3, 0]
    assert blends.slerp([x, 0 * x], None, [], t=0.25).tolist() == [1.5, 0]
    with pytest.raises(MergeError, match="exactly two"):
        blends.slerp([x], None, [])


def test_checkpoint_averages() -> None:
    """ema, decay 1/2 over 1, 2, 4: ((1 + 2)/2 + 4)/2 = 2.75; corrected: (1/8 + 2/4 + 4/2) / (7/8) = 3."""
    models = [t(1), t(2), t(4)]
    assert blends.checkpoint_average(models, None, [], k=2).tolist() == [3]
    assert blends.checkpoint_average(models, None, [], k=9).item() == pytest.approx(7 / 3)
    assert blends.checkpoint_average(models, None, [], mode="ema", decay=0.5).tolist() == [2.75]
    assert blends.checkpoint_average(models, None, [], mode="ema", decay=0.5, bias_correction=True).tolist() == [3]
    for count, corrected in itertools.product((1, 2, 5), (False, True)):
        shares = blends.checkpoint_coefficients(count, mode="ema", k=None, decay=0.9, bias_correction=corrected)
        assert sum(shares) == pytest.approx(1)


def test_greedy_soup_is_at_least_as_good_as_its_best_model() -> None:
    """Order 1, 0, 2. With 0 the score falls: excluded. With 2 it is equal: included."""
    table = {(0, 1): 0.4, (1, 2): 0.6}
    assert blends.greedy_soup([0.5, 0.6, 0.1], table.__getitem__) == [1, 2]


def test_cat_svd_and_linear_combination_of_adapters() -> None:
    """cat and full-rank svd give the sum of w s B A; linear combines A and B separately: equal only for one adapter."""
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(*shape, generator=generator).double() for shape in ((2, 4), (3, 2), (2, 4), (3, 2))]
    adapters = [lora.Factors(made[0], made[1], 2.0), lora.Factors(made[2], made[3], 0.5)]
    total = 3 * 2.0 * made[1] @ made[0] - 0.5 * made[3] @ made[2]
    torch.testing.assert_close(lora.combined_delta(adapters, [3, -1]), total)
    torch.testing.assert_close(lora.combined_delta(adapters, [3, -1], method="svd", rank=3), total)
    assert lora.combine(adapters, [3, -1]).a.shape == (4, 4)
    one = lora.combined_delta(adapters[:1], [-3], method="linear")
    torch.testing.assert_close(one, -6 * made[1] @ made[0])
    assert not torch.allclose(lora.combined_delta(adapters, [3, -1], method="linear"), total)
    with pytest.raises(MergeError, match="equal rank"):
        lora.combine([adapters[0], lora.Factors(made[2][:1], made[3][:, :1], 1.0)], [1, 1], "linear")
