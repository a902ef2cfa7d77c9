"""The KL of the policy to the reference, on answers that the policy gives while it trains on pairs (HyPO).

A preference loss sees the answers of the data alone, and says nothing of what else the policy drifts to. In each step
the policy answers the step's prompts; the score-function estimate of the KL on these answers is added to the loss.
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

BATCH = 512  # sequences that are sampled together


@dataclass(frozen=True)
class Answers:
    """The policy's answers to the prompts of one micro-batch, with the reference's log-probs of them."""

    sequences: Sequences
    batch: RolloutBatch


class OnlinePolicy:
    """What answers the prompts of pairs: the policy as it is, and the policy as it was loaded, which is the reference.

    Make it before training begins.
    """

    def __init__(self, loaded: LoadedModel, section: OnlineKl, pairs: Sequence[Pair]) -> None:
        self.loaded, self.section = loaded, section
        self.prompts = [_prompt_of(pair) for pair in pairs]
        self.sampling = Sampling(max_new_tokens=section.max_new_tokens)
        self.engine = TransformersEngine(loaded, batch_size=BATCH)
        self.reference: ReferencePolicy = reference_policy(loaded)
        check_fits(self.prompts, self.sampling, self.engine.window)

    def answers(self, parts: Sequence[Sequence[int]], mine: Sequence[int], seed: int) -> dict[int, Answers]:
        """By micro-batch, for those of `mine`. parts: pairs by number, in all micro-batches of the step; what is
        sampled does not depend on how they are cut."""
        pairs = sorted({pair for part in parts for pair in part})
        place = {pair: n for n, pair in enumerate(pairs)}
        wanted = sorted({place[pair] for part in mine for pair in parts[part]})
        n = self.section.samples
        rollouts = self.engine.generate(
            [self.prompts[pair] for pair in pairs], n, self.sampling, seed=seed, logprobs=False, share=wanted
        )
        first = {number: i * n for i, number in enumerate(wanted)}
        found: dict[int, Answers] = {}
        for part in mine:
            rows = [r for pair in parts[part] for r in rollouts[first[place[pair]] : first[place[pair]] + n]]
            sequences, batch = sequences_of(rows), rollout_batch(rows).to(self.loaded.device)
            with torch.no_grad(), self.reference() as model, self.loaded.autocast():
                ref = completion_logprobs(model, sequences, batch.mask.shape[1], reader=self.loaded.images)[0]
            # by place: where a pass over the data ends, a step may have a pair twice
            groups = torch.arange(len(parts[part]), device=ref.device).repeat_interleave(n)
            found[part] = Answers(sequences, batch.replace(ref_logp=ref, group_ids=groups))
        return found

    def term(self, model: nn.Module, answers: Answers) -> tuple[Tensor, Tensor]:
        """coef times the KL, with the gradient of its estimate, and the KL: sums over the prompts [] of means over the
        answers to a prompt."""
        width = answers.batch.mask.shape[1]
        logp, _ = completion_logprobs(model, answers.sequences, width, reader=self.loaded.images)
        found = online_kl(answers.batch, logp, baseline=self.section.baseline)
        estimate, kl = (x.sum() / self.section.samples for x in (found.values, found.stats["online_kl/kl"]))
        return self.section.coef * (estimate - estimate.detach() + kl), kl


def _prompt_of(pair: Pair) -> Prompt:
    ids = pair.prompt_ids
    return Prompt(pair.uid, {}, "", ids, PromptImages(pair.images, ids, len(ids)) if pair.images else None)


def pairs_of(batch: dict[str, Tensor]) -> list[int]:
    """The numbers of a collated micro-batch's pairs."""
    return [int(n) for n in torch.atleast_1d(batch["pair"]).tolist()]
