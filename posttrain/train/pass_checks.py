"""Checks that a model's own passes agree with those of `logprobs`.

Checked are the output head, packed rows that share the pass of their prompt, packed rows with images, and before the
first RL step, on the shortest prompts, packing and the reference.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor, nn

from posttrain.errors import NonFiniteError
from posttrain.models.adapters import causal_of
from posttrain.models.images import probe_image
from posttrain.models.load import LoadedModel
from posttrain.models.precision import HALF, compute_dtype
from posttrain.models.rounding_bounds import logp_tolerance, relative_gap
from posttrain.rollout.hf import eval_mode
from posttrain.train.attention import short_windows
from posttrain.train.collate import Sequences, completion_positions, pad_right
from posttrain.train.context import TrainContext
from posttrain.train.logprobs import Extras, completion_logprobs, completion_scores
from posttrain.train.policy import scores

PROBE = 16  # tokens of a row in checks that run the model
PROBE_ROWS = ((3, 4, 5), (6, 7), (8, 9, 10))  # token ids of the completions of one prompt for `shares_prompts`
MAX_HEAD_GAP = 0.05  # nats of one log-prob: both sides compute the same products with the same rounding


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
    for what, log_probs in (("rows packed together and alone", together), ("packed and padded rows", padded)):
        gap = float((log_probs - in_line).abs().sum()) / tokens
        if not gap <= tolerance:
            differ = f"log-probs of {what} differ by {gap:.3g} nats"
            raise NonFiniteError(differ, allowed=f"at most {tolerance} on average")


def shares_prompts(loaded: LoadedModel) -> bool:
    """Return whether rows that share their prompt's pass in a line get the hidden states that they get alone.

    Determined by a trial pass, with sliding windows shorter than the prompt. Packed attention must be switched on
    already.
    """
    prompt, model = range(11, 18), loaded.model
    rows = [Sequences(((*prompt, *row),), (len(prompt),)) for row in PROBE_ROWS]
    line = Sequences(tuple(row.ids[0] for row in rows), (len(prompt),) * len(rows))
    states = Extras(hidden=True)
    with eval_mode(model), torch.no_grad(), loaded.autocast(), short_windows(causal_of(model)):
        found = completion_scores(model, line, 3, packed=True, share=True, extras=states)["hidden"]
        separate = [completion_scores(model, row, 3, packed=True, extras=states)["hidden"] for row in rows]
    half = loaded.half is not None or causal_of(model).dtype in HALF
    return relative_gap(found, torch.cat(separate)) < (0.1 if half else 1e-3)


def packs_images(loaded: LoadedModel) -> bool:
    """Return whether rows with an image get the same hidden states in a packed line as padded, by a trial pass.

    Packed attention must be switched on already. In some families image tokens attend to each other in both directions,
    which the row borders of a packed line do not express.
    """
    assert loaded.images is not None
    image, tokenizer = probe_image(), loaded.tokenizer
    prompt = tokenizer(f"a{loaded.images.read(image).text}bc", add_special_tokens=False)["input_ids"]
    rows = Sequences(((*prompt, 11, 12), (*prompt, 13, 14)), (len(prompt),) * 2, ((image,), (image,)))
    states = functools.partial(
        completion_scores, loaded.model, rows, 2, extras=Extras(hidden=True), reader=loaded.images
    )
    with eval_mode(loaded.model), torch.no_grad(), loaded.autocast():
        line, padded = (states(packed=packed)["hidden"] for packed in (True, False))
    half = loaded.half is not None or causal_of(loaded.model).dtype in HALF
    return relative_gap(line, padded) < (0.1 if half else 1e-3)


def verify_head(loaded: LoadedModel, sequences: Sequences) -> None:
    """Raise NonFiniteError if the model's logits differ from what its output head gives for the last hidden states.

    Checked on the first tokens of the longest row.
    """
    longest = max(sequences.ids, key=len)[:PROBE]
    if len(longest) < 2:
        return
    with eval_mode(loaded.model), loaded.autocast():
        gap = check_head(loaded.model, Sequences((longest,), (1,)))
    if not gap <= MAX_HEAD_GAP:
        raise NonFiniteError(
            f"log-probs of {loaded.source} differ by {gap:.3f} nats from its own logits",
            hint="this architecture scales its logits in a way that posttrain does not know; please report it",
        )


def check_head(model: nn.Module, sequences: Sequences) -> float:
    """Return the largest gap in nats between `completion_logprobs` and the log-softmax of the model's own logits."""
    width = max(n - p for n, p in zip(sequences.lengths, sequences.prompt_lengths, strict=True))
    with torch.no_grad():
        ours, _ = completion_logprobs(model, sequences, width)
        device = ours.device
        ids, mask = pad_right(sequences, device)
        theirs = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().log_softmax(-1)
        rows, positions, columns, targets = completion_positions(sequences, device)
        return float((ours[rows, columns] - theirs[rows, positions, targets]).abs().max())
