"""Loss aggregation: hand-computed values and gradients, empty rows, and equality of split and whole batches."""

from __future__ import annotations

import typing

import pytest
import torch

from posttrain.loss.aggregate import Aggregation, Totals, aggregate, totals

MODES = typing.get_args(Aggregation)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)


def make_values(garbage: float = 99.0) -> torch.Tensor:
    matrix = torch.tensor([[1.0, 2.0, 3.0], [10.0, garbage, garbage]], dtype=torch.float64)
    return matrix.requires_grad_()


@pytest.mark.parametrize(
    ("mode", "number", "long_row", "short_row"),
    [
        ("token_mean", 4.0, 1 / 4, 1 / 4),
        ("seq_mean_token_mean", 6.0, 1 / 6, 1 / 2),
        ("seq_mean_token_sum", 8.0, 1 / 2, 1 / 2),
        ("fixed", 2.0, 1 / 8, 1 / 8),
    ],
)
def test_value_and_gradient(mode: Aggregation, number: float, long_row: float, short_row: float) -> None:
    """Rows (1, 2, 3) and (10): 16 / 4 tokens; (2 + 10) / 2 rows; (6 + 10) / 2 rows; 16 / (2 rows * norm_len 4)."""
    matrix = make_values()
    loss = aggregate(matrix, MASK, mode, totals(MASK), norm_len=4)
    loss.backward()
    assert loss.item() == pytest.approx(number)
    expected = torch.tensor([[long_row] * 3, [short_row, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(matrix.grad, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_masked_cells_change_neither_value_nor_gradient(mode: Aggregation, garbage: float) -> None:
    clean, dirty = make_values(0.0), make_values(garbage)
    for matrix in (clean, dirty):
        aggregate(matrix, MASK, mode, totals(MASK), norm_len=4).backward()
    torch.testing.assert_close(dirty.grad, clean.grad, rtol=0, atol=0)
    assert aggregate(dirty, MASK, mode, totals(MASK), norm_len=4).isfinite()


@pytest.mark.parametrize(("mode", "kept", "left_out"), [("seq_mean_token_mean", 4.0, 6.0), ("token_mean", 4.0, 4.0)])
def test_empty_rows_count_in_row_means_only_if_asked(mode: Aggregation, kept: float, left_out: float) -> None:
    """Rows (1, 2, 3), (10), (): row means 2 + 10 over 3 rows or over 2; the token mean ignores empty rows."""
    matrix = torch.cat([make_values(), torch.full((1, 3), 7.0, dtype=torch.float64)])
    mask = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.bool)])
    assert totals(mask) == Totals(tokens=4.0, rows=3.0, trajectories=2.0)
    assert totals(mask, count_empty_rows=False) == Totals(tokens=4.0, rows=2.0, trajectories=2.0)
    assert aggregate(matrix, mask, mode, totals(mask)).item() == pytest.approx(kept)
    assert aggregate(matrix, mask, mode, totals(mask, count_empty_rows=False)).item() == pytest.approx(left_out)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count_empty_rows", [True, False])
def test_empty_batch_gives_zero_loss_and_zero_gradient(mode: Aggregation, count_empty_rows: bool) -> None:
    matrix, mask = make_values(float("nan")), torch.zeros_like(MASK)
    loss = aggregate(matrix, mask, mode, totals(mask, count_empty_rows), norm_len=4)
    loss.backward()
    assert loss.item() == 0.0
    assert matrix.grad is not None and bool((matrix.grad == 0).all())


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "local_token_mean"])
@pytest.mark.parametrize("count_empty_rows", [True, False])
@pytest.mark.parametrize("cut", [1, 2, 5])
def test_sum_over_micro_batches_equals_whole_batch(mode: Aggregation, count_empty_rows: bool, cut: int) -> None:
    """Micro-batches of uneven lengths, with an empty row: their summed losses and gradients equal those of one
    batch."""
    lengths = [5, 1, 0, 3, 7, 2]
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    matrix = torch.randn(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, split = matrix.clone().requires_grad_(), matrix.clone().requires_grad_()
    total = totals(mask, count_empty_rows)
    loss = aggregate(whole, mask, mode, total, norm_len=11)
    loss.backward()
    parts = [aggregate(split[r], mask[r], mode, total, norm_len=11) for r in (slice(0, cut), slice(cut, 6))]
    sum(parts).backward()
    torch.testing.assert_close(sum(parts), loss)
    torch.testing.assert_close(split.grad, whole.grad)
    counted = [totals(mask[r], count_empty_rows) for r in (slice(0, cut), slice(cut, 6))]
    assert counted[0] + counted[1] == total


def test_modes_agree_on_rows_of_equal_length() -> None:
    """With length L everywhere: token_mean = seq_mean_token_mean = seq_mean_token_sum / L = fixed with norm_len L."""
    matrix, mask = make_values(), torch.ones_like(MASK)
    numbers = {mode: aggregate(matrix, mask, mode, totals(mask), norm_len=3).item() for mode in MODES}
    assert numbers["seq_mean_token_mean"] == pytest.approx(numbers["token_mean"])
    assert numbers["fixed"] == pytest.approx(numbers["token_mean"])
    assert numbers["seq_mean_token_sum"] / 3 == pytest.approx(numbers["token_mean"])


def test_unknown_mode_and_missing_norm_len_raise() -> None:
    with pytest.raises(ValueError, match="unknown aggregation: mean"):
        aggregate(make_values(), MASK, "mean", totals(MASK))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs norm_len"):
        aggregate(make_values(), MASK, "fixed", totals(MASK))


def test_local_token_mean_depends_on_the_micro_batch_split() -> None:
    """Rows (1, 2, 3) and (10): in one micro-batch 16 / 4 = 4; in two, each weighted 1/2, 2 / 2 + 10 / 2 = 6."""
    total = totals(MASK)
    assert aggregate(make_values(), MASK, "local_token_mean", total).item() == pytest.approx(4.0)
    one_by_one = [
        aggregate(make_values()[r : r + 1], MASK[r : r + 1], "local_token_mean", total).item() for r in (0, 1)
    ]
    assert sum(one_by_one) == pytest.approx(6.0)
