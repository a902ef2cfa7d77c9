"""Rules that choose entry by entry, on numbers that can be done by hand; and defaults, which are mergekit's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain import registry
from posttrain.merge import deltas
from posttrain.merge.rules import passthrough, task_arithmetic
from posttrain.merge.selective import arcee_fusion, nearswap, ramplus_tl, sce


def t(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ZERO = t(0, 0, 0, 0)


def test_nearswap_moves_no_entry_by_more_than_t() -> None:
    merged = nearswap([t(1e-5, 0.5, -2, 0)], ZERO, [1], t=0.1)
    torch.testing.assert_close(merged, t(1e-5, 0.1, -0.1, 0))


def test_sce_weighs_by_squares_and_erases_the_minority() -> None:
    """Mean squares 1.5 and 7.5: shares 1/6 and 5/6. Sums 4, -4, 0 (+), 4: entry 1 has the second alone, 2 the first."""
    models = [t(2, 0, 1, 1), t(2, -4, -1, 3)]
    torch.testing.assert_close(sce(models, ZERO, []), t(2, -4, 1, 16 / 6))
    torch.testing.assert_close(sce(models, ZERO + 10, []), sce([m - 10 for m in models], ZERO, []) + 10)


def test_sce_selects_among_the_entries_that_vary() -> None:
    """Variances 0, 4, 1, 1: three vary, int(0.5 * 3) = 1 is kept."""
    assert sce([t(2, 0, 1, 1), t(2, -4, -1, 3)], ZERO, [], select_topk=0.5).tolist() == [0, -4, 0, 0]
    assert sce([t(2, 0, 1, 1)], ZERO, [], select_topk=0.5).tolist() == [0, 0, 0, 0]  # one model does not vary


def test_sce_counts_all_alike_where_changes_are_tiny() -> None:
    merged = sce([t(1e-4, 0), t(3e-4, 0)], t(0, 0), [])
    torch.testing.assert_close(merged, t(2e-4, 0))


def test_arcee_fusion_takes_what_matters() -> None:
    """Importances 0.144, 0, 0, 0.0001: quartiles 0, 0, 0.0001, so that only the first reaches median + 1.5 IQR."""
    merged = arcee_fusion([t([math.log(3), 0], [0, 0.1])], torch.zeros(2, 2, dtype=torch.float64), [])
    torch.testing.assert_close(merged, t([math.log(3), 0], [0, 0]))


@pytest.mark.parametrize(("r", "alpha", "growth"), [(0.1, 0.2, 1.02), (0.5, 1.0, 1.5), (0.5, 9.0, 1.5), (0, 1, 1)])
def test_ramplus_raises_what_a_model_changes_alone(r: float, alpha: float, growth: float) -> None:
    """Each model changes one entry alone and one with the other: a ratio of 1, held below alpha."""
    merged = ramplus_tl([t(1, 0, 2, 0), t(0, 0, 4, 3)], ZERO, [], r=r, alpha=alpha)
    torch.testing.assert_close(merged, t(growth, 0, 3, 3 * growth))


def test_passthrough_scales() -> None:
    assert passthrough([t(1, -2)], None, []).tolist() == [1, -2]
    assert passthrough([t(1, -2)], None, [], scale=0.5).tolist() == [0.5, -1]


SUMMED = ("dare_linear", "della_linear", "breadcrumbs")
ELECTED = ("ties", "dare_ties", "della", "breadcrumbs_ties")


@pytest.mark.parametrize("name", [*SUMMED, *ELECTED])
def test_without_a_density_all_of_a_difference_is_kept(name: str) -> None:
    """As in mergekit: the rest of the rule is what is left, a sum or an election."""
    rule = registry.get("merge", name)
    models, base, weights = [t(2, 3, 1, -4), t(1, -1, 0, 2)], t(1, 1, 0, 0), [0.5, 2]
    draws = [[torch.full((4,), 0.99, dtype=torch.float64)] * 2] if "draws" in rule.needs else []
    merged = rule.function(models, base, weights, *draws)
    normalize = name in ("ties", "della")
    expected = (
        task_arithmetic(models, base, weights)
        if name in SUMMED
        else base + deltas.elect_signs([m - base for m in models], weights, normalize)
    )
    torch.testing.assert_close(merged, expected)


# method -> its defaults in mergekit (generalized_task_arithmetic.py, registry.py and the methods' own files)
DEFAULTS: dict[str, dict[str, Any]] = {
    "linear": {"normalize": True},
    "task_arithmetic": {"lam": 1.0, "normalize": False},
    "ties": {"density": 1.0, "lam": 1.0, "normalize": True, "rescale": False},
    "dare_linear": {"density": 1.0, "lam": 1.0, "normalize": False, "rescale": True},
    "dare_ties": {"density": 1.0, "lam": 1.0, "normalize": False, "rescale": True},
    "della": {"density": 1.0, "epsilon": 0.15, "lam": 1.0, "normalize": True, "rescale": True},
    "della_linear": {"density": 1.0, "epsilon": 0.15, "lam": 1.0, "normalize": False, "rescale": True},
    "breadcrumbs": {"density": 1.0, "gamma": 0.01, "lam": 1.0, "normalize": False, "rescale": False},
    "breadcrumbs_ties": {"density": 1.0, "gamma": 0.01, "lam": 1.0, "normalize": False, "rescale": False},
    "model_stock": {"filter_wise": False},
    "ram": {"eps": 1e-5},
    "ramplus_tl": {"r": 0.1, "alpha": 0.2, "eps": 1e-5},
    "sce": {"select_topk": 1.0},
    "nearswap": {"t": ...},
    "nuslerp": {"nuslerp_row_wise": False, "nuslerp_flatten": True},
    "multislerp": {"normalize_weights": True, "eps": 1e-8},
    "karcher": {"max_iter": 10, "tol": 1e-5},
    "passthrough": {"scale": 1.0},
    "arcee_fusion": {},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_mergekits(name: str) -> None:
    params = {key: default for key, (_, default) in registry.get("merge", name).params.items()}
    assert {key: params[key] for key in DEFAULTS[name]} == DEFAULTS[name]
    assert params.keys() - DEFAULTS[name].keys() <= {"eps"}  # model_stock's smallest norm, which mergekit fixes


@pytest.mark.parametrize(("name", "density", "kept"), [("ties", 0.5, 9), ("breadcrumbs", 0.5, 9)])
def test_rescale_gives_what_is_kept_the_norm_of_the_whole(name: str, density: float, kept: float) -> None:
    """[4, -5, 1, 2] keeps 4 and -5 of 12; with a top of 0 breadcrumbs keeps the same."""
    rule = registry.get("merge", name)
    own = {"gamma": 0.0} if name == "breadcrumbs" else {}
    merged = rule.function([t(4, -5, 1, 2)], ZERO, [1], density=density, rescale=True, **own)
    torch.testing.assert_close(merged, t(4, -5, 0, 0) * 12 / kept)


@pytest.mark.parametrize("name", ["della", "della_linear"])
@pytest.mark.parametrize(("density", "expected"), [(1.0, [3, -1, 2]), (0.0, [0, 0, 0])])
def test_della_keeps_all_or_nothing_at_the_ends(name: str, density: float, expected: list[float]) -> None:
    """epsilon moves no chance there: draws that would drop the one and keep some of the other."""
    draws = [t(0.9, 0.01, 0.9)]
    merged = registry.get("merge", name).function([t(3, -1, 2)], t(0, 0, 0), [1], draws, density=density, epsilon=0.3)
    assert merged.tolist() == expected
