"""Pair losses: one hand-computed case per loss, and shared invariants. s is the sigmoid; s(ln 3) = 3/4."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from posttrain import registry
from posttrain.batch import PairBatch
from posttrain.errors import UserError
from posttrain.loss import pair, pair_labels, pair_rounds

LN3 = math.log(3)
NAMES = sorted(registry.load_index()["pair_loss"])


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(chosen: float = -4.0, rejected: float = -6.0, **changes: Any) -> PairBatch:
    """Return one pair of lengths 4 and 2, with reference log-probs -5 and -5 and last-round log-probs -4.5 and -5.5."""
    made = PairBatch(
        chosen_logp=column(chosen).requires_grad_(),
        rejected_logp=column(rejected).requires_grad_(),
        chosen_length=column(4),
        rejected_length=column(2),
        ref_chosen_logp=column(-5.0),
        ref_rejected_logp=column(-5.0),
        prev_chosen_logp=column(-4.5),
        prev_rejected_logp=column(-5.5),
        chosen_win=column(0.8),
        rejected_win=column(0.3),
        chosen_score=column(1.0),
        rejected_score=column(0.0),
        ref_sample_is_chosen=column(0.0),
        label=column(1.0),
    )
    return dataclasses.replace(made, **changes)


def loss_and_gradients(loss: Any, made: PairBatch, **settings: Any) -> tuple[float, float, float]:
    """Return the loss of one pair and its gradients by both sides."""
    result = loss(made, **settings)
    result.losses.sum().backward()
    slopes = [0.0 if x.grad is None else x.grad.item() for x in (made.chosen_logp, made.rejected_logp)]
    return result.losses.item(), slopes[0], slopes[1]


def test_ipo() -> None:
    """Log-ratios 1 and -1, beta 0.5. Sums: (2 - 1)^2, slope 2. By token: 1/4 + 1/2 - 1, slopes -1/2 over 4 and 2."""
    assert loss_and_gradients(pair.ipo, batch(), beta=0.5, length_normalize=False) == pytest.approx((1, 2, -2))
    assert loss_and_gradients(pair.ipo, batch(), beta=0.5) == pytest.approx((1 / 16, -1 / 8, 1 / 4))


@pytest.mark.parametrize(
    ("divergence", "alpha", "score", "slope"),
    [
        ("reverse_kl", 0.5, lambda u: u, lambda _: 1),
        ("forward_kl", 0.5, lambda u: -math.exp(-u), lambda u: math.exp(-u)),
        ("js", 0.5, lambda u: math.log(2) - math.log1p(math.exp(-u)), lambda u: 1 / (1 + math.exp(u))),
        ("alpha", 0.5, lambda u: (1 - math.exp(-u / 2)) * 2, lambda u: math.exp(-u / 2)),
        ("alpha", 0.0, lambda u: u, lambda _: 1),
    ],
)
def test_f_dpo(divergence: str, alpha: float, score: Any, slope: Any) -> None:
    z = 0.5 * (score(1) - score(-1))
    outer = -0.5 / (1 + math.exp(z))
    expected = (math.log1p(math.exp(-z)), outer * slope(1), -outer * slope(-1))
    assert loss_and_gradients(pair.f_dpo, batch(), divergence=divergence, alpha=alpha, beta=0.5) == pytest.approx(
        expected
    )


def test_f_dpo_with_forward_kl_equals_alpha_1_and_stays_finite() -> None:
    settings = {"divergence": "alpha", "alpha": 1.0}
    alpha, forward = (
        loss_and_gradients(pair.f_dpo, batch(), **settings),
        loss_and_gradients(pair.f_dpo, batch(), divergence="forward_kl"),
    )
    assert alpha == pytest.approx(forward)
    far = batch(-5000.0, ref_chosen_logp=column(0.0))
    loss, slope, _ = loss_and_gradients(pair.f_dpo, far, divergence="forward_kl")
    assert math.isfinite(loss) and slope == 0


def test_js_reward_is_bounded_from_above() -> None:
    """However likely the chosen side, its reward is at most log 2, so a positive loss remains."""
    assert loss_and_gradients(pair.f_dpo, batch(1000.0), beta=0.1)[0] > 0.5


@pytest.mark.parametrize(
    ("reduction", "term", "slope"), [("sum", 4.0, -1), ("sequence", 1.0, -1 / 4), ("token", 1.0, -1 / 4)]
)
def test_likelihood_term_by_sum_and_mean(reduction: Any, term: float, slope: float) -> None:
    plain = loss_and_gradients(pair.dpo, batch(), beta=0.3)
    more = loss_and_gradients(pair.dpo, batch(), beta=0.3, nll_weight=0.5, nll_reduction=reduction)
    assert more == pytest.approx((plain[0] + 0.5 * term, plain[1] + 0.5 * slope, plain[2]))


def test_token_mean_is_over_all_chosen_tokens_of_the_step() -> None:
    """-(-4 - 6) / (4 + 1) = 2, in one micro-batch or in two that know the step's mean length 5/2."""
    two = PairBatch(column(-4, -6), column(0, 0), column(4, 1), column(1, 1))
    assert pair.mean(pair.nll(two, "token")).item() == pytest.approx(2)
    parts = [
        PairBatch(column(c), column(0), column(n), column(1), mean_chosen_length=2.5) for c, n in ((-4, 4), (-6, 1))
    ]
    assert sum(pair.nll(part, "token").item() for part in parts) / 2 == pytest.approx(2)


def test_rpo_regularizer_by_sum_and_mean() -> None:
    """sum: eta times beta on the summed log-prob; mean: eta on the mean of a token; the rejected side sees only DPO."""
    plain = loss_and_gradients(pair.dpo, batch(), beta=0.1)
    assert loss_and_gradients(pair.rpo_reg, batch(), beta=0.1, eta=0.2) == pytest.approx(
        (plain[0] + 0.08, plain[1] - 0.02, plain[2])
    )
    by_token = loss_and_gradients(pair.rpo_reg, batch(), beta=0.1, eta=0.2, reduction="mean")
    assert by_token == pytest.approx((plain[0] + 0.2, plain[1] - 0.05, plain[2]))
    assert loss_and_gradients(pair.rpo_reg, batch(), beta=0.1, eta=1e-7) == plain


def test_cpo_without_likelihood_is_dpo_without_reference() -> None:
    assert loss_and_gradients(pair.cpo, batch(), alpha=0.0) == loss_and_gradients(
        pair.dpo, batch(), reference_free=True
    )
    assert loss_and_gradients(pair.cpo, batch(), alpha=1.0)[0] == pytest.approx(
        loss_and_gradients(pair.cpo, batch(), alpha=0.0)[0] + 1
    )


def test_orpo() -> None:
    """Means -ln 2 and -ln 4: odds 1 and 1/3, o = ln 3; loss ln 2 - beta ln 3/4; slopes with 1 - e^m = 1/2 and 3/4."""
    made = batch(-4 * math.log(2), -2 * math.log(4))
    expected = (math.log(2) - 0.2 * math.log(3 / 4), (-1 - 0.2 / 4 * 2) / 4, 0.2 / 4 / (3 / 4) / 2)
    assert loss_and_gradients(pair.orpo, made, beta=0.2) == pytest.approx(expected)
    assert math.isfinite(loss_and_gradients(pair.orpo, batch(0.0, 0.0))[0])
    swapped = pair.orpo(batch(-2 * math.log(2), -4 * math.log(4), chosen_length=column(2), rejected_length=column(4)))
    assert swapped.stats["log_odds_ratio"].item() == pytest.approx(LN3)


def test_nca_pair_has_a_finite_target() -> None:
    """s(x) = 2/3 at x = ln 2: no gradient on the chosen side."""
    loss, slope, other = loss_and_gradients(pair.nca_pair, batch(-5 + math.log(2), -5.0), beta=1.0)
    assert loss == pytest.approx(-math.log(2 / 3) - math.log(1 / 3) / 2 + math.log(2) / 2)
    assert (slope, other) == pytest.approx((0, 1 / 4))


def test_kto() -> None:
    """beta 1, h = 1, z0 = 1 - ln 3 clamped from the mismatched rows: d = ln 3 for a good row, -ln 3 for a bad one."""
    mismatched = {"rejected_logp": column(2 - LN3), "ref_rejected_logp": column(1.0)}
    made = batch(**mismatched, kl_baseline=column(1 - LN3)[0])
    assert loss_and_gradients(pair_labels.kto, made, beta=1.0, desirable_weight=2.0) == pytest.approx(
        (1 / 2, -2 * 3 / 16, 0)
    )
    bad = batch(**mismatched, kl_baseline=column(1 - LN3)[0], label=column(0.0))
    assert loss_and_gradients(pair_labels.kto, bad, beta=1.0) == pytest.approx((3 / 4, 3 / 16, 0))
    clamped = pair_labels.kto(batch(**mismatched), beta=1.0).stats["kl"]
    assert clamped.item() == 0  # 1 - ln 3 is negative
    assert pair_labels.kl_baseline(column(), column()).item() == 0


def test_sppo() -> None:
    """beta 0.1: targets 3 and -2, log-ratios 1 and -1: ((1 - 3)^2 + (-1 + 2)^2) / 2."""
    assert loss_and_gradients(pair_rounds.sppo, batch(), beta=0.1) == pytest.approx((2.5, -2, 1))
    assert loss_and_gradients(pair_rounds.sppo, batch(), beta=0.1, targets="single") == pytest.approx((4, -2, 2))
    assert loss_and_gradients(pair_rounds.sppo, batch(), beta=0.1, targets="hard") == pytest.approx((16, -4, 4))


def test_inpo() -> None:
    """c - r = 2, the reference's gap 0, the last round's 1: h = 2 - (1 - q); target 1 / (2 eta) = 1."""
    assert loss_and_gradients(pair_rounds.inpo, batch(), eta=0.5, ratio=0.25) == pytest.approx((1 / 16, 1 / 2, -1 / 2))
    assert loss_and_gradients(pair_rounds.inpo, batch(), eta=0.5)[0] == pytest.approx((2 - 2 / 3 - 1) ** 2)
    assert loss_and_gradients(pair_rounds.inpo, batch(), eta=0.5, tau=0.25)[0] == pytest.approx(0.25)
    assert loss_and_gradients(pair_rounds.inpo, batch(), target=2.0, ratio=1.0)[0] == pytest.approx(0)
    same = loss_and_gradients(pair.ipo, batch(), beta=0.5, length_normalize=False)
    assert loss_and_gradients(pair_rounds.inpo, batch(), eta=0.5, ratio=1.0) == pytest.approx(same)


def test_mnpo_with_one_opponent_is_inpo() -> None:
    history = {"history_chosen_logp": column(-4.5)[None], "history_rejected_logp": column(-5.5)[None]}
    one = loss_and_gradients(pair_rounds.mnpo, batch(**history), eta=0.5, ratio=0.25, length_normalize=False)
    assert one == pytest.approx(loss_and_gradients(pair_rounds.inpo, batch(), eta=0.5, ratio=0.25))


def test_mnpo_weights_opponents() -> None:
    """History gaps 1 and 3 with weights 3 : 1 give 3/2; without a history its term is 0 and the ratio stays."""
    history = {"history_chosen_logp": column(1, 3)[:, None], "history_rejected_logp": column(0, 0)[:, None]}
    settings = {"eta": 0.5, "ratio": 0.5, "length_normalize": False}
    weighted = pair_rounds.mnpo(batch(**history), weights=(3.0, 1.0, 9.0), **settings)
    assert weighted.stats["h"].item() == pytest.approx(2 - 0.5 * 1.5)
    alike = pair_rounds.mnpo(batch(**history), weights=(0.0, 0.0), **settings)
    assert alike.stats["h"].item() == pytest.approx(2 - 0.5 * 2)
    assert pair_rounds.mnpo(batch(), **settings).stats["h"].item() == pytest.approx(2)
    logistic = pair_rounds.mnpo(batch(), **{**settings, "eta": LN3 / 2}, distance="logistic")
    assert logistic.losses.item() == pytest.approx(-math.log(3 / 4))
    with pytest.raises(UserError, match="1 weight for a history of 2"):
        pair_rounds.mnpo(batch(**history), weights=(1.0,), **settings)


def test_dno() -> None:
    """The gap grew by 1 since the last round: z = eta. Equal win rates make 0 the best z."""
    assert loss_and_gradients(pair_rounds.dno, batch(), eta=LN3) == pytest.approx((-math.log(3 / 4), -LN3 / 4, LN3 / 4))
    even = batch(-4.5, -5.5, rejected_win=column(0.8))
    assert loss_and_gradients(pair_rounds.dno_soft, even) == pytest.approx((math.log(2), 0, 0))
    target = 1 / (1 + math.exp(-0.5))
    slope = LN3 * (3 / 4 - target)
    assert loss_and_gradients(pair_rounds.dno_soft, batch(), eta=LN3)[1:] == pytest.approx((slope, -slope))


def test_online_ipo() -> None:
    """Target (0.8 - 0.3) / 0.5 = 1 of the difference by token, 1/4 + 1/2."""
    assert loss_and_gradients(pair_rounds.online_ipo, batch(), beta=0.5) == pytest.approx((1 / 16, -1 / 8, 1 / 4))
    assert loss_and_gradients(pair_rounds.online_ipo, batch(), beta=0.5, length_normalize=False) == pytest.approx(
        (1, 2, -2)
    )


@pytest.mark.parametrize("base", ["dpo", "ipo"])
@pytest.mark.parametrize("side", [0, 1])
def test_xpo_adds_its_term_to_the_side_sampled_by_the_reference(base: Any, side: int) -> None:
    made = batch(ref_sample_is_chosen=column(1.0 - side))
    plain = loss_and_gradients(pair_rounds.xpo, batch(), alpha=0.0, base=base)
    more = list(plain)
    more[0] += 0.1 * (-4, -6)[side]
    more[1 + side] += 0.1
    assert loss_and_gradients(pair_rounds.xpo, made, alpha=0.1, base=base) == pytest.approx(tuple(more))


def test_copg_pair() -> None:
    """h = 2, dR = 1, beta 0.5: -2 + 1 = -1, slope 0.5 * 2 - 1; equal scores still pull h to 0."""
    assert loss_and_gradients(pair_rounds.copg_pair, batch(), beta=0.5) == pytest.approx((-1, 0, 0))
    assert loss_and_gradients(pair_rounds.copg_pair, batch(rejected_score=column(1.0)), beta=0.5) == pytest.approx(
        (1, 1, -1)
    )


@pytest.mark.parametrize("variant", ["joint", "separate"])
def test_p3o_pair_at_ratio_1_is_the_pairwise_gradient(variant: Any) -> None:
    """A = 1/2: gradients -A and A; a shift of both scores changes nothing, equal scores give none."""
    on_policy = {"prev_chosen_logp": column(-4.0), "prev_rejected_logp": column(-6.0)}
    plain = loss_and_gradients(pair_rounds.p3o_pair, batch(**on_policy), variant=variant)
    assert plain[1:] == pytest.approx((-1 / 2, 1 / 2))
    shifted = batch(**on_policy, chosen_score=column(8.0), rejected_score=column(7.0))
    assert loss_and_gradients(pair_rounds.p3o_pair, shifted, variant=variant) == pytest.approx(plain)
    even = batch(**on_policy, rejected_score=column(1.0))
    assert loss_and_gradients(pair_rounds.p3o_pair, even, variant=variant)[1:] == pytest.approx((0, 0))


def test_p3o_pair_is_clipped_and_penalised() -> None:
    """Joint ratio e^(1/2 + 1/2) > 1.2 with A > 0: no gradient. The KL term: (0.5 + 0.5) kl_coef off the difference."""
    assert loss_and_gradients(pair_rounds.p3o_pair, batch()) == pytest.approx((-1.2 / 2, 0, 0))
    assert loss_and_gradients(pair_rounds.p3o_pair, batch(), kl_coef=0.4)[0] == pytest.approx(-1.2 * 0.6 / 2)


def test_seppo_raises_both_sides_if_the_policy_is_below_the_reference() -> None:
    ahead = loss_and_gradients(pair_rounds.seppo, batch(), beta=LN3 / 2)
    assert ahead == pytest.approx((-math.log(3 / 4), -LN3 / 8, LN3 / 8))
    behind = batch(-6.0, -6.0)  # log-ratios -1 and -1, sign -1: z = beta * (-2)
    assert loss_and_gradients(pair_rounds.seppo, behind, beta=LN3 / 2) == pytest.approx(
        (-math.log(1 / 4), -LN3 * 3 / 8, -LN3 * 3 / 8)
    )
    plain = loss_and_gradients(pair_rounds.seppo, batch(-6.0, -6.0), use_anchor=False)
    assert plain == pytest.approx(loss_and_gradients(pair.dpo, batch(-6.0, -6.0)))


def all_columns(chosen: torch.Tensor, rejected: torch.Tensor) -> PairBatch:
    """Return pairs with every column, by index in the batch."""
    place = torch.arange(len(chosen), dtype=chosen.dtype)
    history = torch.stack([-place - 3, -place - 2])
    return PairBatch(
        chosen, rejected, place + 3, place + 2, -place - 3, -place - 3, -place - 4, -place - 3, history, history * 1.1,
        0.5 + place / 10, 0.5 - place / 10, place, -place, place % 2, place % 2,
        mean_chosen_length=3.0, kl_baseline=chosen.new_tensor(0.1),
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_sum_over_single_pairs_equals_whole_batch(name: str) -> None:
    """Given the statistics of the whole step, micro-batches change nothing; an empty batch gives 0 with a graph."""
    loss = registry.get("pair_loss", name).function
    chosen, rejected = column(-4, -5, -6), column(-6, -5.5, -3)
    whole = loss(all_columns(chosen, rejected)).losses
    last = all_columns(chosen, rejected)
    values = {f.name: getattr(last, f.name) for f in dataclasses.fields(last)}
    cut = {n: v[..., 2:] if isinstance(v, torch.Tensor) and v.dim() else v for n, v in values.items()}
    torch.testing.assert_close(loss(PairBatch(**cut)).losses, whole[2:])
    none = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    number = pair.mean(loss(all_columns(none, none)).losses)
    number.backward()
    assert number.item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_other_policies_carry_no_gradient_and_stats_are_detached(name: str) -> None:
    loss = registry.get("pair_loss", name).function
    made = all_columns(column(-4, -5), column(-6, -5.5))
    anchors = {n: getattr(made, n).clone().requires_grad_() for n in vars(made) if n.endswith("logp")}
    result = loss(dataclasses.replace(made, **anchors))
    result.losses.sum().backward()
    assert anchors["chosen_logp"].grad is not None
    assert [n for n, x in anchors.items() if n[:4] in ("ref_", "prev", "hist") and x.grad is not None] == []
    shown = {"kl", "accuracy", "chosen_rewards"} if name == "kto" else {"margins", "accuracy", "chosen_rewards"}
    assert shown <= result.stats.keys()
    assert all(x.shape == (2,) and not x.requires_grad for x in result.stats.values())
