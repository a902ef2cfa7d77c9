"""Checks of a model before the first RL step, on the shortest prompts: log-probs, packing, reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from posttrain.errors import NonFiniteError
from posttrain.models.precision import compute_dtype
from posttrain.models.rounding_bounds import logp_tolerance
from posttrain.train.collate import Sequences
from posttrain.train.context import TrainContext
from posttrain.train.logprobs import Extras
from posttrain.train.pass_checks import verify_head
from posttrain.train.policy import scores


def check_start(ctx: TrainContext) -> None:
    """Check a model before step 1.

    Log-probs must equal the model's own, packed rows must equal padded rows, and the reference must be the starting
    policy.
    """
    shortest = sorted((q for q in ctx.prompts if len(q.ids) > 1), key=lambda q: len(q.ids))[:3]
    if not shortest:
        return
    images = tuple(q.images.shown if q.images else () for q in shortest)
    probe = Sequences(tuple(q.ids for q in shortest), (1,) * len(shortest), images if any(images) else None)
    width = max(probe.lengths) - 1
    ctx.loaded.model.eval()
    verify_head(ctx.loaded, probe)
    with torch.no_grad():
        logp = scores(ctx, ctx.loaded.model, probe, width, Extras())["logp"]
        if ctx.packed:
            check_packing(ctx, probe, logp)
    if ctx.reference is not None and ctx.recipe.kl.reference is None:
        with torch.no_grad(), ctx.reference() as model:
            reference_logp = scores(ctx, model, probe, width, Extras())["logp"]
        if (gap := float((logp - reference_logp).abs().max())) > 1e-3:
            raise NonFiniteError(f"the reference is not the starting policy: log-probs differ by {gap:.3g} nats")


def check_packing(ctx: TrainContext, probe: Sequences, together: Tensor) -> None:
    """Check that packed rows have the log-probs of each row alone, and of padded rows.

    together: log-probs [N,width] of the rows packed in one line. The second comparison is between two attention
    kernels, whose rounding alone can cause 0.1 nats in a small model with a 4-bit base; a wrong mask causes several
    nats. Raises NonFiniteError.
    """
    rows = [probe.select([i]) for i in range(len(probe))]
    tokens = sum(probe.lengths) - len(rows)

    def alone(packed: bool) -> Tensor:
        how, width = replace(ctx, packed=packed), together.shape[1]
        return torch.cat([scores(how, ctx.loaded.model, row, width, Extras())["logp"] for row in rows])

    with ctx.loaded.autocast():
        tolerance = logp_tolerance(compute_dtype(ctx.loaded.device, ctx.loaded.model.dtype))
    in_line, padded = alone(packed=True), alone(packed=False)
    for what, one in (("rows packed together and alone", together), ("packed and padded rows", padded)):
        gap = float((one - in_line).abs().sum()) / tokens
        if not gap <= tolerance:
            differ = f"log-probs of {what} differ by {gap:.3g} nats"
            raise NonFiniteError(differ, allowed=f"at most {tolerance} on average")
