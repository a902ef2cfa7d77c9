"""Online KL of HyPO: KL of the policy to the reference on the policy's own answers during training on pairs.

A preference loss sees only the answers in the data, and does not restrict the policy elsewhere. In each step the policy
answers the step's prompts; the score-function estimate of the KL on these answers is added to the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posttrain.batch import Prompt, PromptImages, RolloutBatch
from posttrain.data.render import Pair
from posttrain.loss.distribution import online_kl
from posttrain.models.load import LoadedModel
from posttrain.recipe.preference_sections import OnlineKl
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.engine import check_fits
from posttrain.rollout.hf import TransformersEngine
from posttrain.train.collate import Sequences, rollout_batch, sequences_of
from posttrain.train.logprobs import completion_logprobs
from posttrain.train.reference import ReferencePolicy, reference_policy

BATCH = 512  # sequences sampled in one batch


@dataclass(frozen=True)
class Answers:
    """Policy's answers to the prompts of one micro-batch, with the reference's log-probs."""

    sequences: Sequences
    batch: RolloutBatch


class OnlinePolicy:
    """Samples answers to the prompts of pairs with the current policy; the reference is the policy as loaded.

    Create before training begins.
    """

    def __init__(self, loaded: LoadedModel, section: OnlineKl, pairs: Sequence[Pair]) -> None:
        self.loaded, self.section = loaded, section
        shown = (PromptImages(p.images, p.prompt_ids, len(p.prompt_ids)) if p.images else None for p in pairs)
        self.prompts = [Prompt(p.uid, {}, "", p.prompt_ids, images) for p, images in zip(pairs, shown, strict=True)]
        self.sampling = Sampling(max_new_tokens=section.max_new_tokens)
        self.engine = TransformersEngine(loaded, batch_size=BATCH)
        self.reference: ReferencePolicy = reference_policy(loaded)
        check_fits(self.prompts, self.sampling, self.engine.window)

    def sample_answers(self, parts: Sequence[Sequence[int]], mine: Sequence[int], seed: int) -> dict[int, Answers]:
        """Sample the answers of each micro-batch in `mine`.

        parts: pair numbers of all micro-batches of the step; the samples do not depend on how the step is split.
        """
        pairs = sorted({pair for part in parts for pair in part})
        index = {pair: n for n, pair in enumerate(pairs)}
        wanted = sorted({index[pair] for part in mine for pair in parts[part]})
        n = self.section.samples
        rollouts = self.engine.generate(
            [self.prompts[pair] for pair in pairs], n, self.sampling, seed=seed, logprobs=False, share=wanted
        )
        first_rollout = {number: i * n for i, number in enumerate(wanted)}
        answers: dict[int, Answers] = {}
        for part in mine:
            starts = [first_rollout[index[pair]] for pair in parts[part]]
            rows = [rollout for start in starts for rollout in rollouts[start : start + n]]
            sequences, batch = sequences_of(rows), rollout_batch(rows).to(self.loaded.device)
            with torch.no_grad(), self.reference() as model, self.loaded.autocast():
                ref = completion_logprobs(model, sequences, batch.mask.shape[1], reader=self.loaded.images)[0]
            # groups by position: at the end of an epoch a step may contain a pair twice
            groups = torch.arange(len(parts[part]), device=ref.device).repeat_interleave(n)
            answers[part] = Answers(sequences, batch.replace(ref_logp=ref, group_ids=groups))
        return answers

    def loss_term(self, model: nn.Module, answers: Answers) -> tuple[Tensor, Tensor]:
        """Return coef * KL, with the gradient of its estimate, and the KL.

        Both are sums over the prompts [] of means over the answers to a prompt.
        """
        width = answers.batch.mask.shape[1]
        logp, _ = completion_logprobs(model, answers.sequences, width, reader=self.loaded.images)
        found = online_kl(answers.batch, logp, baseline=self.section.baseline)
        estimate, kl = (x.sum() / self.section.samples for x in (found.values, found.stats["online_kl/kl"]))
        return self.section.coef * (estimate - estimate.detach() + kl), kl


def pairs_of(batch: dict[str, Tensor]) -> list[int]:
    """Return the pair numbers of a collated micro-batch."""
    return [int(n) for n in torch.atleast_1d(batch["pair"]).tolist()]
