"""Pair losses of methods that train in rounds on their own samples and regularize towards policies of earlier rounds.

The policy that sampled a round's pairs is `prev` in a PairBatch, the reference `ref`; in the first round they are the
same.

Shapes: log-probs, scores and losses [P]; log-probs of several earlier policies [J,P].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.batch import PairBatch, PairLoss
from posttrain.errors import UserError, count_noun
from posttrain.loss.clip import bounded_exp, clipped_surrogate
from posttrain.loss.pair import log_ratios, per_token, require_logp, smooth_logistic, stats
from posttrain.registry import register


@register("pair_loss", "sppo", paper="2405.00675", needs=("ref_logp", "win_rates"))
def sppo(batch: PairBatch, *, beta: float = 0.001, targets: Literal["soft", "single", "hard"] = "soft") -> PairLoss:
    """Compute ((a_w - eta (win_w - 1/2))^2 + (a_l - eta (win_l - 1/2))^2) / 2.

    a = log-ratio to the last round, eta = 1 / beta. Each side has its own target, so the winner's log-ratio increases
    and the loser's decreases. `soft`: each side's win rate against the other samples of its prompt; `single`: the
    chosen side's (its probability to beat the rejected one) and one minus it; `hard`: 1 and 0. TRL's sppo_hard omits
    the factor 1/2.
    """
    chosen, rejected = log_ratios(batch)
    win, rejected_win = _targets(batch, targets, chosen)
    losses = ((chosen - (win - 0.5) / beta).square() + (rejected - (rejected_win - 0.5) / beta).square()) / 2
    return PairLoss(losses, stats(chosen, rejected, beta))


def _targets(batch: PairBatch, targets: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the win rates of both sides [P]."""
    if targets == "hard":
        return torch.ones_like(like), torch.zeros_like(like)
    win = _column(batch.chosen_win, "chosen_win")
    return win, 1 - win if targets == "single" else _column(batch.rejected_win, "rejected_win")


@register("pair_loss", "dno", paper="2404.03715", needs=("prev_logp",))
def dno(batch: PairBatch, *, eta: float = 0.1) -> PairLoss:
    """Compute -log s(z), z = eta * ((c - c_prev) - (r - r_prev)): DPO against the policy that sampled the pairs.

    The method lies in its pairs: win-rate ranking, a large margin, and a teacher's answer among the samples.
    """
    chosen, rejected = previous_ratios(batch)
    return PairLoss(-logsigmoid(eta * (chosen - rejected)), stats(chosen, rejected, eta))


@register("pair_loss", "dno_soft", paper="2404.03715", needs=("prev_logp", "win_rates"))
def dno_soft(batch: PairBatch, *, eta: float = 0.1) -> PairLoss:
    """Compute `dno` with the target t = s(win_w - win_l) of the win rates: -t log s(z) - (1 - t) log s(-z).

    z is the margin of `dno`; win_w, win_l: win rates of the chosen and the rejected side.
    """
    chosen, rejected = previous_ratios(batch)
    gap = _column(batch.chosen_win, "chosen_win") - _column(batch.rejected_win, "rejected_win")
    z, target = eta * (chosen - rejected), torch.sigmoid(gap)
    return PairLoss(-target * logsigmoid(z) - (1 - target) * logsigmoid(-z), stats(chosen, rejected, eta))


@register("pair_loss", "inpo", paper="2407.00617", needs=("ref_logp", "prev_logp"))
def inpo(
    batch: PairBatch,
    *,
    eta: float = 0.005,
    ratio: float | None = None,
    tau: float | None = None,
    target: float | None = None,
) -> PairLoss:
    """Compute (h - 1 / (2 eta))^2, h = (c - r) - q (c_ref - r_ref) - (1 - q) (c_prev - r_prev), sums over tokens.

    q = `ratio`, or tau / eta, or 1/3: q 1 is IPO against the reference, q 0 ignores the reference. target replaces 1 /
    (2 eta). Stat: h.
    """
    if ratio is None:
        ratio = 1 / 3 if tau is None else tau / eta
    chosen, rejected = (
        logp - ratio * require_logp(ref) - (1 - ratio) * require_logp(prev)
        for logp, ref, prev in (
            (batch.chosen_logp, batch.ref_chosen_logp, batch.prev_chosen_logp),
            (batch.rejected_logp, batch.ref_rejected_logp, batch.prev_rejected_logp),
        )
    )
    return squared_loss(chosen, rejected, 1 / (2 * eta) if target is None else target, eta)


@register(
    "pair_loss",
    "mnpo",
    paper="2509.23102",
    needs=("ref_logp", "history"),
    note=(
        "The paper uses sums of log-probs and free weights; length_normalize, the fixed share of the reference and"
        " history weights that add up to 1 follow the released code."
    ),
)
def mnpo(
    batch: PairBatch,
    *,
    eta: float = 0.0075,
    ratio: float = 1 / 3,
    weights: tuple[float, ...] | None = None,
    distance: Literal["squared", "logistic"] = "squared",
    length_normalize: bool = True,
    target: float | None = None,
) -> PairLoss:
    """Compute the loss of play against several earlier policies: (h - 1 / (2 eta))^2, or `logistic`: -log s(eta h).

    h = (c - r) - ratio (c_ref - r_ref) - (1 - ratio) sum_j w_j (c_j - r_j) over the history, newest first; the weights
    of the available policies are scaled to sum 1 (equal weights if none are given or they add up to 0). Without a
    history its term is 0 and `ratio` does not change. length_normalize divides all log-probs by the length of their
    side. target replaces 1 / (2 eta). Stat: h.
    """
    past = (batch.history_chosen_logp, batch.history_rejected_logp)
    sides = (batch.chosen_logp, batch.rejected_logp)
    refs = (batch.ref_chosen_logp, batch.ref_rejected_logp)
    chosen, rejected = (
        logp - ratio * require_logp(ref) - (1 - ratio) * mean_history_logp(history, weights)
        for logp, ref, history in zip(sides, refs, past, strict=True)
    )
    if length_normalize:
        chosen, rejected = per_token(batch, chosen, rejected, "mnpo")
    if distance == "squared":
        return squared_loss(chosen, rejected, 1 / (2 * eta) if target is None else target, eta)
    h = chosen - rejected
    return PairLoss(-logsigmoid(eta * h), {**stats(chosen, rejected, eta), "h": h.detach()})


def mean_history_logp(history: Tensor | None, weights: tuple[float, ...] | None) -> Tensor | float:
    """Return the weighted mean [P] of log-probs [J,P] of earlier policies; 0 without any.

    Raises UserError if there are fewer weights than policies.
    """
    if history is None or len(history) == 0:
        return 0.0
    given = torch.ones(len(history)) if weights is None else torch.as_tensor(weights)[: len(history)]
    if len(given) < len(history):
        raise UserError(
            f"{count_noun(len(given), 'weight')} for a history of {len(history)}",
            hint="give one weight per policy, or none",
        )
    shares = torch.where(given.sum() == 0, torch.ones_like(given), given).to(history)
    return (shares / shares.sum()) @ history.detach()


@register(
    "pair_loss",
    "online_ipo",
    paper="2503.08942",
    needs=("ref_logp", "win_rates"),
    note="The loss of EGPO; its extragradient step is `extragradient: true` of a pipeline's rounds.",
)
def online_ipo(batch: PairBatch, *, beta: float = 0.1, length_normalize: bool = True) -> PairLoss:
    """Compute (u_a - u_b - (P(a beats y) - P(b beats y)) / beta)^2 for samples a, b and an opponent y.

    All three are samples of the current policy. u = log-ratio to the reference, per token with length_normalize. The
    win rates are the two probabilities.
    """
    a, b = log_ratios(batch)
    if length_normalize:
        a, b = per_token(batch, a, b, "online_ipo")
    gap = _column(batch.chosen_win, "chosen_win") - _column(batch.rejected_win, "rejected_win")
    return PairLoss((a - b - gap / beta).square(), stats(a, b, beta))


@register(
    "pair_loss",
    "xpo",
    paper="2405.21046",
    needs=("ref_logp", "ref_sample"),
    note="The paper gives no number for alpha.",
)
def xpo(batch: PairBatch, *, beta: float = 0.1, alpha: float = 1e-5, base: Literal["dpo", "ipo"] = "dpo") -> PairLoss:
    """Compute DPO (or IPO on sums) plus alpha times the log-prob of the side that the reference sampled.

    One side of each pair is a sample of the policy, the other a sample of the reference: the bonus rewards the policy
    for answers that the reference would not give. An alpha above 1e-3 drives the reference's samples to probability 0.
    """
    chosen, rejected = log_ratios(batch)
    h = chosen - rejected
    losses = smooth_logistic(beta * h, 0.0) if base == "dpo" else (h - 1 / (2 * beta)).square()
    from_reference = _column(batch.ref_sample_is_chosen, "ref_sample_is_chosen") > 0.5
    bonus = torch.where(from_reference, batch.chosen_logp, batch.rejected_logp)
    return PairLoss(losses + alpha * bonus, stats(chosen, rejected, beta))


@register("pair_loss", "copg_pair", paper="2406.19185", needs=("ref_logp", "scores"))
def copg_pair(batch: PairBatch, *, beta: float = 0.1) -> PairLoss:
    """Compute -dR h + beta / 2 h^2 for any scalar reward, off-policy.

    h = difference of the log-ratios, dR = of the scores. It is IPO's square with the target dR / beta. Equal scores
    pull h to 0. The loss `copg` of rl is its form on groups.
    """
    a, b = log_ratios(batch)
    score_gap = _column(batch.chosen_score, "chosen_score") - _column(batch.rejected_score, "rejected_score")
    return PairLoss(contrastive(a - b, score_gap, beta), stats(a, b, beta))


def contrastive(gap: Tensor, score_gap: Tensor, beta: float) -> Tensor:
    """Compute beta / 2 gap^2 - score_gap gap, given the differences of log-ratios and of scores of two samples."""
    return beta / 2 * gap.square() - score_gap * gap


@register(
    "pair_loss",
    "p3o_pair",
    paper="2310.00212",
    needs=("prev_logp", "ref_logp", "scores"),
    note="The two clipped forms are rebuilt from the paper's description.",
)
def p3o_pair(
    batch: PairBatch,
    *,
    kl_coef: float = 0.0,
    clip_eps: float = 0.2,
    variant: Literal["joint", "separate"] = "joint",
) -> PairLoss:
    """Compute pairwise PPO on the difference A of the regularized scores.

    A = half the difference of score - kl_coef * (log-ratio of the sampling policy to the reference). w = exp(log-prob
    minus that of the sampling policy), the exponent limited to +-20. `joint`: -min(q A, clip(q) A) with q = w_a / w_b;
    `separate`: the same for w_a with A plus w_b with -A; clip to 1 +- clip_eps. The loss `p3o` of rl is its form on
    groups.
    """
    old_a, old_b = require_logp(batch.prev_chosen_logp), require_logp(batch.prev_rejected_logp)
    score_gap = _column(batch.chosen_score, "chosen_score") - _column(batch.rejected_score, "rejected_score")
    if kl_coef:
        score_gap = score_gap - kl_coef * (
            (old_a - require_logp(batch.ref_chosen_logp)) - (old_b - require_logp(batch.ref_rejected_logp))
        )
    a, b = batch.chosen_logp - old_a, batch.rejected_logp - old_b
    if variant == "joint":
        losses = clipped_surrogate(bounded_exp(a - b), score_gap / 2, clip_eps, clip_eps)
    else:
        losses = clipped_surrogate(bounded_exp(a), score_gap / 2, clip_eps, clip_eps)
        losses = losses + clipped_surrogate(bounded_exp(b), -score_gap / 2, clip_eps, clip_eps)
    return PairLoss(losses, stats(a, b, 1.0))


@register(
    "pair_loss",
    "seppo",
    paper="2410.05255",
    needs=("ref_logp",),
    note=(
        "Made for diffusion models; log-likelihood instead of denoising error, and the direction of the test, are this"
        " project's interpretation."
    ),
)
def seppo(batch: PairBatch, *, beta: float = 0.1, use_anchor: bool = True) -> PairLoss:
    """Compute -log s(beta (a_w - sign a_v)) for a good answer w and a sample v of an earlier checkpoint.

    a = log-ratio to that checkpoint, the reference. sign = 1 if the policy gives w at least the reference's log-prob,
    so that the checkpoint's sample is probably worse; else -1, and both sides are pushed up. Without use_anchor the
    sign is 1: DPO. Stat: sign.
    """
    chosen, sampled = log_ratios(batch)
    ahead = chosen.detach() >= 0 if use_anchor else torch.ones_like(chosen, dtype=torch.bool)
    sign = torch.where(ahead, 1.0, -1.0).to(chosen)
    losses = -logsigmoid(beta * (chosen - sign * sampled))
    return PairLoss(losses, {**stats(chosen, sign * sampled, beta), "sign": sign})


def squared_loss(chosen: Tensor, rejected: Tensor, target: float, beta: float) -> PairLoss:
    """Return (chosen - rejected - target)^2 [P], with the margin as the stat h."""
    h = chosen - rejected
    return PairLoss((h - target).square(), {**stats(chosen, rejected, beta), "h": h.detach()})


def previous_ratios(batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Return the log-probs of both sides [P] minus those of the policy that sampled the pairs."""
    return batch.chosen_logp - require_logp(batch.prev_chosen_logp), batch.rejected_logp - require_logp(
        batch.prev_rejected_logp
    )


def _column(values: Tensor | None, name: str) -> Tensor:
    """Return a column of the batch, detached. Raises ValueError if it is missing."""
    if values is None:
        raise ValueError(f"this pair loss needs {name} of every pair")
    return values.detach()
