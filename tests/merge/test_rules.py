"""Merge rules: hand-computed values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.errors import MergeError
from posttrain.merge.rules import linear, merge_state, merge_tensor, task_arithmetic


def t(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def test_linear_is_the_weighted_mean() -> None:
    """(1*[2, -4] + 3*[6, 0]) / 4 = [5, -1]; without normalizing [20, -4]."""
    models = [t(2, -4), t(6, 0)]
    assert linear(models, None, [1, 3]).tolist() == [5, -1]
    assert linear(models, None, [1, 3], normalize=False).tolist() == [20, -4]


def test_linear_is_scale_free_and_symmetric() -> None:
    a, b = t(0.3, -1.7), t(2.2, 0.4)
    torch.testing.assert_close(linear([a, b], None, [1, 3]), linear([a, b], None, [10, 30]))
    torch.testing.assert_close(linear([a, b], None, [1, 3]), linear([b, a], None, [3, 1]))


def test_single_model_is_unchanged_for_any_weight() -> None:
    a = t(0.1, -0.0, 1e-30, dtype=torch.float32)
    merged = linear([a], None, [0.37])
    assert torch.equal(merged, a) and torch.equal(merged.signbit(), a.signbit())


def test_linear_sums_in_float32() -> None:
    """256 + 1 is not representable in bfloat16 (8 bits): the mean of 256 and 258 with weights 1, 1 is 257, exactly."""
    models = [t(256, dtype=torch.bfloat16), t(258, dtype=torch.bfloat16)]
    merged = linear(models, None, [1, 1])
    assert merged.dtype == torch.float32 and merged.item() == 257


def test_task_arithmetic_values() -> None:
    """base 1, models 3 and 0, weights 1 and .5, lam 2: 1 + 2*(1*2 + .5*(-1)) = 4. Normalized: 1 + 2*1.5/1.5 = 3."""
    base, models = t(1.0), [t(3.0), t(0.0)]
    assert task_arithmetic(models, base, [1, 0.5], lam=2.0).item() == 4
    assert task_arithmetic(models, base, [1, 0.5], lam=2.0, normalize=True).item() == 3


def test_task_arithmetic_subtracts_a_skill() -> None:
    assert task_arithmetic([t(3.0)], t(1.0), [-1]).item() == -1


@pytest.mark.parametrize(("lam", "weights"), [(0.0, [1.0]), (1.0, [0.0])])
def test_zero_difference_gives_the_base_bit_for_bit(lam: float, weights: list[float]) -> None:
    base = t(-0.0, 0.1, 3e-39, dtype=torch.float32)
    merged = task_arithmetic([t(5, 6, 7, dtype=torch.float32)], base, weights, lam=lam)
    assert merged.view(torch.int32).tolist() == base.view(torch.int32).tolist()


def test_single_model_with_weight_one_is_unchanged() -> None:
    base, model = t(0.3, -2.5), t(1.1, 4.0)
    torch.testing.assert_close(task_arithmetic([model], base, [1]), model)


def test_inputs_are_not_modified() -> None:
    base, model = t(1.0), t(3.0)
    task_arithmetic([model], base, [1])
    linear([model, base], None, [1, 1])
    assert (base.item(), model.item()) == (1, 3)


@pytest.mark.parametrize("rule", [linear, task_arithmetic])
def test_cancelling_weights_cannot_be_normalized(rule) -> None:
    with pytest.raises(MergeError, match=r"1, -1 sum to 0"):
        rule([t(1.0), t(2.0)], t(0.0), [1, -1], normalize=True)


def test_task_arithmetic_without_a_base_raises() -> None:
    with pytest.raises(MergeError, match="base"):
        task_arithmetic([t(1.0)], None, [1])


def test_integer_buffers_come_from_the_first_model() -> None:
    models = [torch.tensor([1, 2]), torch.tensor([5, 5])]
    assert merge_tensor(linear, models, None, [1, 1], {}).tolist() == [1, 2]
    assert merge_tensor(task_arithmetic, models, torch.tensor([9, 9]), [1, 1], {}).tolist() == [9, 9]


def test_merge_state_merges_name_by_name() -> None:
    a, b = {"w": t(1.0), "b": t(2.0)}, {"b": t(4.0), "w": t(3.0)}
    merged = merge_state(linear, [a, b])
    assert {name: value.item() for name, value in merged.items()} == {"w": 2.0, "b": 3.0}
    added = merge_state(task_arithmetic, [a, b], {"w": t(0.0), "b": t(0.0)}, lam=0.5)
    assert {name: value.item() for name, value in added.items()} == {"w": 2.0, "b": 3.0}


@pytest.mark.parametrize(
    ("models", "weights", "message"),
    [
        ([], None, "no models"),
        ([{"w": t(1.0)}], [1.0, 2.0], "1 model but 2 weights"),
        ([{"w": t(1.0)}, {"v": t(1.0)}], None, "v, w"),
        ([{"w": t(1.0)}, {"w": t(1.0, 2.0)}], None, "shape: w"),
    ],
)
def test_merge_state_raises_for_invalid_inputs(
    models: list[dict[str, Tensor]], weights: list[float] | None, message: str
) -> None:
    with pytest.raises(MergeError, match=message):
        merge_state(linear, models, weights=weights)
