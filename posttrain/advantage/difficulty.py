"""Filters and factors by how hard a prompt is, some of them from what the prompt sampler knows."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch
from posttrain.curriculum import difficulty, selection
from posttrain.registry import register


@register(
    "keep",
    "balanced_difficulty_filter",
    paper="2504.03380",
    needs=("correct", "groups"),
    note="Read from summaries of the paper: the band that won its comparison is not known; 0.2 to 0.8 is a guess.",
)
def balanced_difficulty_filter(batch: RolloutBatch, *, t_low: float = 0.2, t_high: float = 0.8) -> Tensor:
    """Keep groups whose pass rate is between t_low and t_high, both included -> rows that stay, bool [N].

    The pass rate is the share of right rows among those that were judged; a group without any is dropped. Balanced:
    t_low = 1 - t_high; t_low 0 or t_high 1 filters one side alone. With `rollout.max_gen_batches` above 1 other prompts
    take the place of those that are dropped.
    """
    assert batch.correct is not None
    rates = pass_rates(batch.correct, batch.group_ids)
    return torch.tensor(
        [rate == rate and difficulty.in_band(rate, t_low, t_high) for rate in rates.tolist()],
        device=batch.group_ids.device,
    )


def pass_rates(correct: Tensor, group_ids: Tensor) -> Tensor:
    """Of each row [N]: the share of right rows in its group among those that were judged; NaN where none was."""
    key = torch.unique(group_ids, return_inverse=True)[1]
    known = ~correct.isnan()
    right = torch.zeros(int(key.max()) + 1, dtype=torch.float64, device=key.device)
    judged = right.clone()
    right.index_add_(0, key, torch.where(known, correct, 0.0).double())
    judged.index_add_(0, key, known.double())
    return (right / judged)[key]


@register("keep", "kl_rollback", paper="2505.20777", needs=("old_logp", "ref_logp", "kl_threshold"))
def kl_rollback(batch: RolloutBatch) -> Tensor:
    """Drop groups whose mean token KL to the reference is above the threshold of the sampler `taco`, which sets their
    prompts aside -> rows that stay, bool [N].

    The KL is the mean over a group's trained tokens of the k3 estimate; equal to the threshold stays.
    """
    threshold = batch.sampler_state.get("kl_threshold")
    everything = torch.ones_like(batch.group_ids, dtype=torch.bool)
    if threshold is None:
        return everything
    assert batch.old_logp is not None and batch.ref_logp is not None
    gap = torch.where(batch.mask, batch.ref_logp - batch.old_logp, 0.0).double()
    key = torch.unique(batch.group_ids, return_inverse=True)[1]
    sums = torch.zeros(int(key.max()) + 1, dtype=torch.float64, device=key.device)
    tokens = sums.clone()
    sums.index_add_(0, key, (gap.exp() - 1 - gap).sum(-1))
    tokens.index_add_(0, key, batch.mask.sum(-1).double())
    return (sums / tokens.clamp(min=1) <= threshold)[key]


@register("factor", "prompt_gdro", paper="2601.19280", needs=("bins", "bin_scores"))
def prompt_gdro(
    batch: RolloutBatch,
    *,
    eta: float = 0.65,
    gamma: float = 0.01,
    max_weight: float = 15.0,
    mode: Literal["code", "paper"] = "code",
    zscore: bool = False,
    z_cap: float | None = 3.0,
    z_std_floor: float = 1e-3,
    score_clip: float = 5.0,
) -> Tensor:
    """Weigh rows of difficulty bins whose loss stays high more -> [N]; the bins and the averages S of their losses are
    those of the sampler `gdro` before the step.

    `code`: q = (1-gamma) softmax(eta S) + gamma/K over the K bins of the batch; a row weighs q of its bin over the mean
    of q over rows, at most max_weight. zscore: S is standardised over all bins seen, within +-z_cap. `paper`: rows
    weigh exp(eta clip(S, +-score_clip)), at most max_weight. score_clip was not confirmed.
    """
    assert batch.bins is not None
    found = selection.weights_of_bins(
        batch.bins.tolist(),
        batch.sampler_state.get("scores", {}),
        eta=eta,
        gamma=gamma,
        max_weight=max_weight,
        mode=mode,
        zscore=zscore,
        z_cap=z_cap,
        z_std_floor=z_std_floor,
        score_clip=score_clip,
    )
    return torch.tensor(found.rows, dtype=torch.float64, device=batch.group_ids.device)
