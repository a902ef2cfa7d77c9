"""Losses on preference pairs. All take a PairBatch of P pairs and return losses [P]; the training loss is their mean.

Most have one form: a margin (score of the chosen side - score of the rejected side - difference of reference scores), a
distance of that margin from its target, and regularisers. c and r are log-probs summed over a side's tokens; lengths
count the same tokens, and a length of 0 counts as 1; log-ratios are to a reference, which carries no gradient. Stats
[P] of all: chosen_rewards and rejected_rewards (the scores, scaled as in the loss), margins (their difference) and
accuracy (1 if chosen is above rejected).

Shapes: log-probs, lengths, scores, margins and losses [P].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.batch import PairBatch, PairLoss
from posttrain.errors import UserError
from posttrain.loss.clip import limit_value
from posttrain.registry import register

NEAR_ZERO = 1e-12  # below this, alpha is treated as its limit 0
LOWEST_EXPONENT = -80.0  # lower limit of u in exp(-u): e^80 is still finite in float32


@register("pair_loss", "dpo", paper="2305.18290", needs=("ref_logp",))
def dpo(
    batch: PairBatch,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    variant: Literal["sigmoid", "robust"] = "sigmoid",
    reference_free: bool = False,
    nll_weight: float = 0.0,
    nll_reduction: Literal["sum", "sequence", "token"] = "sequence",
) -> PairLoss:
    """Compute the logistic loss on z = beta * ((chosen - ref_chosen) - (rejected - ref_rejected)), summed log-probs.

    With label smoothing e, `sigmoid` is -(1-e) log s(z) - e log s(-z) (conservative DPO); `robust` is (-(1-e) log s(z)
    + e log s(-z)) / (1 - 2e), unbiased if labels are flipped with probability e (arXiv 2403.00409). reference_free
    treats both references as 0 and needs none. nll_weight adds that multiple of the chosen side's negative
    log-likelihood, which keeps its likelihood from falling: the `sum`, the mean over its tokens (`sequence`), or the
    mean over all chosen tokens of the optimizer batch (`token`). Raises UserError for variant `robust` with a
    label_smoothing of 0.5 or more.
    """
    if variant == "robust" and label_smoothing >= 0.5:
        raise UserError(
            f"label_smoothing {label_smoothing} with variant robust",
            allowed="below 0.5: more than half of the labels must be right",
        )
    chosen, rejected = (batch.chosen_logp, batch.rejected_logp) if reference_free else log_ratios(batch)
    z = beta * (chosen - rejected)
    losses = robust(z, label_smoothing) if variant == "robust" else smooth_logistic(z, label_smoothing)
    if nll_weight:
        losses = losses + nll_weight * nll(batch, nll_reduction)
    return PairLoss(losses, stats(chosen, rejected, beta))


@register(
    "pair_loss",
    "rpo_reg",
    paper="2405.16436",
    needs=("ref_logp",),
    note="TRL's recipe for this paper, DPO with 0.005 times a token mean, is neither of the two forms.",
)
def rpo_reg(
    batch: PairBatch, *, beta: float = 0.01, eta: float = 0.005, reduction: Literal["sum", "mean"] = "sum"
) -> PairLoss:
    """Compute DPO plus the chosen side's negative log-likelihood as an adversarial regulariser.

    `sum`, the main text: eta * beta * (-c). `mean`, the authors' later advice for reasoning (eta 0.2, beta 0.5): eta *
    (-c / length). eta below 1e-6 disables the term.
    """
    eta = 0.0 if eta < 1e-6 else eta
    if reduction == "sum":
        return dpo(batch, beta=beta, nll_weight=eta * beta, nll_reduction="sum")
    return dpo(batch, beta=beta, nll_weight=eta, nll_reduction="sequence")


@register("pair_loss", "ipo", paper="2310.12036", needs=("ref_logp",))
def ipo(batch: PairBatch, *, beta: float = 0.1, length_normalize: bool = True) -> PairLoss:
    """Compute (u_chosen - u_rejected - 1 / (2 beta))^2: a bounded target for the margin.

    u = log-ratio to the reference. length_normalize divides each log-ratio by its side's length, as the authors
    confirmed to TRL; the paper's equation has plain sums.
    """
    chosen, rejected = log_ratios(batch)
    if length_normalize:
        chosen, rejected = per_token(batch, chosen, rejected, "ipo")
    return PairLoss((chosen - rejected - 1 / (2 * beta)).square(), stats(chosen, rejected, beta))


@register("pair_loss", "f_dpo", paper="2309.16240", needs=("ref_logp",))
def f_dpo(
    batch: PairBatch,
    *,
    divergence: Literal["js", "forward_kl", "alpha", "reverse_kl"] = "js",
    alpha: float = 0.5,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Compute DPO under another divergence: the log-ratio u of a side becomes f'(e^u), without constants.

    reverse_kl: u (DPO). forward_kl: -exp(-u). js: log 2 + log s(u), so raising only the chosen side cannot bring the
    loss to 0. alpha: (1 - exp(-alpha u)) / alpha, 0 is reverse KL and 1 forward KL (1 - TRL's f_alpha_divergence_coef).
    Exponents are limited to 80; the gradient is 0 beyond that.
    """
    chosen, rejected = (divergence_score(u, divergence, alpha) for u in log_ratios(batch))
    return PairLoss(smooth_logistic(beta * (chosen - rejected), label_smoothing), stats(chosen, rejected, beta))


@register("pair_loss", "simpo", paper="2405.14734")
def simpo(
    batch: PairBatch,
    *,
    beta: float = 2.0,
    gamma_beta_ratio: float = 0.5,
    label_smoothing: float = 0.0,
    sft_weight: float = 0.0,
    variant: Literal["sigmoid", "hinge"] = "sigmoid",
) -> PairLoss:
    """Compute the logistic loss on z = beta * (mean chosen log-prob - mean rejected log-prob - gamma_beta_ratio).

    Needs no reference. `hinge` is max(0, 1 - z). sft_weight adds that multiple of the chosen side's mean negative
    log-prob. Raises UserError for variant `hinge` with label_smoothing.
    """
    if variant == "hinge" and label_smoothing:
        raise UserError("label_smoothing has no meaning with variant hinge", hint="remove it, or use variant sigmoid")
    chosen, rejected = per_token(batch, batch.chosen_logp, batch.rejected_logp, "simpo")
    z = beta * (chosen - rejected - gamma_beta_ratio)
    losses = torch.relu(1 - z) if variant == "hinge" else smooth_logistic(z, label_smoothing)
    return PairLoss(losses - sft_weight * chosen, stats(chosen, rejected, beta))


@register(
    "pair_loss",
    "cpo",
    paper="2401.08417",
    note="The likelihood term is TRL's mean over all chosen tokens; the paper's is the expected summed log-prob.",
)
def cpo(batch: PairBatch, *, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0) -> PairLoss:
    """Compute DPO without a reference plus alpha times the mean NLL of the optimizer batch's chosen tokens."""
    return dpo(
        batch,
        beta=beta,
        label_smoothing=label_smoothing,
        reference_free=True,
        nll_weight=alpha,
        nll_reduction="token",
    )


@register("pair_loss", "orpo", paper="2403.07691", note="The likelihood term is the mean over a side's own tokens.")
def orpo(batch: PairBatch, *, beta: float = 0.1, eps: float = 1e-7) -> PairLoss:
    """Compute -m_chosen - beta * log s(o): likelihood and preference in one stage, without a reference.

    beta is the paper's lambda; m = mean log-prob of a side, at most -eps; o = the difference of the log-odds m - log(1
    - e^m). Stat: log_odds_ratio (o).
    """
    means = per_token(batch, batch.chosen_logp, batch.rejected_logp, "orpo")
    chosen, rejected = (limit_value(m, -torch.inf, -eps) for m in means)
    log_odds = [m - torch.log(-torch.expm1(m)) for m in (chosen, rejected)]
    ratio = log_odds[0] - log_odds[1]
    reported = {**stats(chosen, rejected, beta), "log_odds_ratio": ratio.detach()}
    return PairLoss(-chosen - beta * logsigmoid(ratio), reported)


@register("pair_loss", "nca_pair", paper="2402.05369", needs=("ref_logp",))
def nca_pair(batch: PairBatch, *, beta: float = 0.3) -> PairLoss:
    """Compute -log s(x) - (log s(-x) + log s(-y)) / 2, x and y = beta * log-ratio of the chosen and the rejected side.

    An absolute term keeps the chosen likelihood from falling: its gradient vanishes at s(x) = 2/3.
    """
    chosen, rejected = log_ratios(batch)
    x, y = beta * chosen, beta * rejected
    return PairLoss(-logsigmoid(x) - (logsigmoid(-x) + logsigmoid(-y)) / 2, stats(chosen, rejected, beta))


def smooth_logistic(z: Tensor, label_smoothing: float) -> Tensor:
    """Compute -(1-e) log s(z) - e log s(-z)."""
    return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def robust(z: Tensor, label_smoothing: float) -> Tensor:
    """Compute (-(1-e) log s(z) + e log s(-z)) / (1 - 2e)."""
    unscaled = -(1 - label_smoothing) * logsigmoid(z) + label_smoothing * logsigmoid(-z)
    return unscaled / (1 - 2 * label_smoothing)


def divergence_score(u: Tensor, divergence: str, alpha: float) -> Tensor:
    """Compute f'(e^u) of a log-ratio u, without constants; see `f_dpo`."""
    if divergence == "js":
        return torch.log(u.new_tensor(2.0)) + logsigmoid(u)
    if divergence == "forward_kl":
        return -torch.exp(-u.clamp(min=LOWEST_EXPONENT))
    if divergence == "alpha" and abs(alpha) >= NEAR_ZERO:
        return -torch.expm1(-(alpha * u).clamp(min=LOWEST_EXPONENT)) / alpha
    return u


def nll(batch: PairBatch, reduction: Literal["sum", "sequence", "token"]) -> Tensor:
    """Return the negative log-likelihood [P] of the chosen sides, reduced as requested.

    `sum`: over the side's tokens; `sequence`: their mean; `token`: scaled so that the mean over pairs is the mean over
    all chosen tokens of the optimizer batch. Raises ValueError for a batch without the lengths that the reduction
    needs.
    """
    if reduction == "sum":
        return -batch.chosen_logp
    if batch.chosen_length is None:
        raise ValueError(f"a likelihood term by {reduction} needs the lengths of the chosen sides")
    if reduction == "sequence":
        return -batch.chosen_logp / batch.chosen_length.clamp(min=1)
    mean_length = batch.mean_chosen_length
    if mean_length is None:
        mean_length = batch.chosen_length.sum().clamp(min=1) / max(len(batch.chosen_logp), 1)
    return -batch.chosen_logp / mean_length


def log_ratios(batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Return the log-probs of both sides [P] minus those of the reference."""
    return batch.chosen_logp - require_logp(batch.ref_chosen_logp), batch.rejected_logp - require_logp(
        batch.ref_rejected_logp
    )


def require_logp(logp: Tensor | None) -> Tensor:
    """Return the log-probs [P] of another policy, detached. Raises ValueError if they are missing."""
    if logp is None:
        raise ValueError("this pair loss needs the log-probs of a reference or an earlier policy")
    return logp.detach()


def per_token(batch: PairBatch, chosen: Tensor, rejected: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """Return both sides [P] divided by their lengths; 0 counts as 1. Raises ValueError for a batch without lengths."""
    if batch.chosen_length is None or batch.rejected_length is None:
        raise ValueError(f"{loss} needs the lengths of both sides")
    return chosen / batch.chosen_length.clamp(min=1), rejected / batch.rejected_length.clamp(min=1)


def mean(values: Tensor, pairs: float | None = None) -> Tensor:
    """Return the sum over these pairs [P] divided by the pairs of the whole optimizer batch (default: P).

    Without pairs the result is 0, still attached to the graph.
    """
    return values.sum() / max(len(values) if pairs is None else pairs, 1)


def stats(chosen: Tensor, rejected: Tensor, beta: float) -> dict[str, Tensor]:
    """Return the stats that every pair loss reports of its scores [P], detached."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "chosen_rewards": beta * chosen,
        "rejected_rewards": beta * rejected,
        "margins": beta * (chosen - rejected),
        "accuracy": (chosen > rejected).to(chosen.dtype),
    }
