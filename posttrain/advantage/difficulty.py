"""Row factors from the difficulty estimates of the prompt sampler."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch
from posttrain.curriculum import selection
from posttrain.registry import register


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
    """Give more weight to rows of difficulty bins whose loss stays high -> [N].

    The bins and their average losses S are those of the sampler `gdro` before the step.

    `code`: q = (1-gamma) softmax(eta S) + gamma/K over the K bins of the batch; the weight of a row is q of its bin
    over the mean of q over rows, at most max_weight. zscore: S is standardized over all bins seen, within +-z_cap.
    `paper`: the weight is exp(eta clip(S, +-score_clip)), at most max_weight. score_clip was not confirmed.
    """
    assert batch.bins is not None
    found = selection.compute_bin_weights(
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
