"""What a policy-gradient method computes: from rewards to one number to minimise. A method is a row of choices here.

The order is fixed:

1. keep        groups that stay (dynamic sampling); dropped rows leave the batch and its denominators
2. KL          with `kl.where: reward`: coef * the row's summed KL comes off its reward
3. advantage   from the rewards of the kept rows, over the whole step
4. mask edits  dropped rows; completions that hit the limit, if `loss.mask_truncated` (these stay in the row count)
5. surrogate   per token, from the current policy's log-probs
6. KL          with `kl.where: loss`: + coef * the token's KL
7. aggregation once, divided by the totals of the whole optimiser batch

`assign` is steps 1 to 4, on a whole step's rollouts; `loss` is steps 5 to 7, on any part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain import registry
from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.errors import RecipeError
from posttrain.loss.aggregate import Aggregation, Totals, aggregate, totals
from posttrain.recipe.presets import preset
from posttrain.recipe.section import ComponentSection
from posttrain.recipe.sections import Advantage, Keep, Kl, Loss
from posttrain.train.refill import Accumulator

ORDER = ("keep", "kl_in_reward", "advantage", "mask_edits", "surrogate", "kl_in_loss", "aggregate")


@dataclass(frozen=True)
class Objective:
    """Pure functions with their arguments bound. `needs` names what the batch must carry, e.g. `ref_logp`."""

    keep: Callable[[RolloutBatch], Tensor] | None  # -> bool [N]
    advantage: Callable[[RolloutBatch], Tensor]  # -> [N] or [N,T]
    surrogate: Callable[[RolloutBatch, Tensor], TokenLoss]
    kl: Callable[[RolloutBatch, Tensor], TokenLoss] | None  # None = coefficient 0
    kl_coef: float
    kl_in_reward: bool
    aggregation: Aggregation
    norm_len: float | None
    count_empty_rows: bool
    mask_truncated: bool
    needs: frozenset[str] = frozenset()

    @classmethod
    def from_sections(
        cls,
        keep: Keep | None,
        advantage: Advantage,
        loss: Loss,
        kl: Kl,
        *,
        norm_len: float | None,
        base_dir: Path | None = None,
    ) -> Objective:
        """The objective that these recipe sections describe; functions of the user are looked for in `base_dir`.

        norm_len: the length of aggregation `fixed` where the recipe gives none. Raises UserError for names, keys and
        combinations that make no sense.
        """
        functions, needs = _bind({"keep": keep, "advantage": advantage, "loss": loss, "kl": kl}, base_dir)
        if kl.coef == 0:
            del functions["kl"]
            needs["kl"] = frozenset()
        elif kl.where == "reward":
            needs["kl"] |= {"old_logp"}
        return cls(
            keep=functions.get("keep"),
            advantage=functions["advantage"],
            surrogate=functions["loss"],
            kl=functions.get("kl"),
            kl_coef=kl.coef,
            kl_in_reward=kl.where == "reward",
            aggregation=loss.aggregation,
            norm_len=loss.norm_len or norm_len,
            count_empty_rows=loss.count_empty_rows,
            mask_truncated=loss.mask_truncated,
            needs=frozenset().union(*needs.values()),
        )

    @classmethod
    def from_preset(
        cls, name: str, *, norm_len: float | None = None, **overrides: Mapping[str, Any] | None
    ) -> Objective:
        """The objective of `algorithm: NAME`; `overrides` are keys of its sections, e.g. loss={"clip_high": 0.3}."""
        choices = preset(name).choices
        sections = {s: {**choices.get(s, {}), **(overrides.get(s) or {})} for s in ("keep", "advantage", "loss", "kl")}
        return cls.from_sections(
            Keep.model_validate(sections["keep"]) if sections["keep"] else None,
            Advantage.model_validate(sections["advantage"]),
            Loss.model_validate(sections["loss"]),
            Kl.model_validate(sections["kl"]),
            norm_len=norm_len,
        )

    def assign(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch with keep, advantages and the edited mask: everything that looks at the whole step.

        Nothing is removed, so that rows keep their numbers; dropped rows have advantage 0 and an empty mask.
        """
        kept = torch.ones_like(batch.group_ids, dtype=torch.bool) if self.keep is None else self.keep(batch)
        if batch.keep is not None:
            kept = kept & batch.keep
        rows = self.rewarded(batch.select(kept))
        values = self.advantage(rows).detach()
        advantages = values.new_zeros((len(batch), *values.shape[1:]))
        advantages[kept] = values
        mask = batch.mask & kept[:, None]
        if self.mask_truncated:
            if batch.truncated is None:
                raise ValueError("mask_truncated needs to know which rows were truncated")
            mask = mask & ~batch.truncated[:, None]
        return batch.replace(keep=kept, advantages=advantages, mask=mask)

    def rewarded(self, batch: RolloutBatch) -> RolloutBatch:
        """With KL in the reward: reward - coef * (the old policy's KL to the reference, summed over trained tokens)."""
        if self.kl is None or not self.kl_in_reward:
            return batch
        if batch.old_logp is None or batch.rewards is None:
            raise ValueError("KL in the reward needs rewards, old_logp and ref_logp before advantages are assigned")
        penalty = self.kl(batch, batch.old_logp).values.detach().sum(-1)
        return batch.replace(rewards=batch.rewards - self.kl_coef * penalty.to(batch.rewards))

    def totals(self, batch: RolloutBatch) -> Totals:
        """The denominators of one optimiser batch (after `assign`). Add them up over ranks."""
        return totals(batch.mask if batch.keep is None else batch.mask[batch.keep], self.count_empty_rows)

    def has_signal(self, batch: RolloutBatch) -> Tensor:
        """Rows that have a gradient, bool [N]; the others need no forward pass (`totals` still counts them)."""
        if self.kl is not None and not self.kl_in_reward:
            return batch.mask.any(-1)
        assert batch.advantages is not None
        advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
        return (batch.mask & (advantages != 0)).any(-1)

    def loss(self, batch: RolloutBatch, logp: Tensor, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """What these rows add to the loss, to be called backward on, and their statistics. logp [N,T] has the gradient.

        Statistics are detached sums over trained tokens: divide them by the number of tokens summed.
        """
        token_loss = self.surrogate(batch, logp)
        values, stats = token_loss.values, dict(token_loss.stats)
        if self.kl is not None and not self.kl_in_reward:
            penalty = self.kl(batch, logp)
            values = values + self.kl_coef * penalty.values
            stats |= penalty.stats
        loss = aggregate(values, batch.mask, self.aggregation, totals, self.norm_len)
        return loss, {name: token_sum(value, batch.mask) for name, value in stats.items()}

    def accumulator(self, want: int, max_batches: int) -> Accumulator:
        """Collects generation batches until `want` groups passed `keep`."""
        return Accumulator(self.keep, want, max_batches)


def token_sum(value: Tensor, mask: Tensor) -> Tensor:
    """Sum over trained tokens of a statistic [N,T], or [N] that holds for every token of its row."""
    spread = value if value.dim() == 2 else value[:, None].expand(mask.shape)
    return torch.where(mask, spread, 0.0).sum()


def _bind(
    sections: Mapping[registry.Kind, ComponentSection | None], base_dir: Path | None
) -> tuple[dict[str, Callable[..., Any]], dict[str, frozenset[str]]]:
    """Kind -> the section's function with its arguments bound, and kind -> what it needs."""
    functions: dict[str, Callable[..., Any]] = {}
    needs: dict[str, frozenset[str]] = {}
    for kind, section in sections.items():
        if section is None:
            continue
        component = registry.resolve(kind, section.use, base_dir)
        _check_keys(component, section)
        functions[kind] = partial(component.function, **section.params)
        needs[kind] = frozenset(component.needs)
    return functions, needs


def _check_keys(component: registry.Component, section: ComponentSection) -> None:
    """A function of the user is only known now: the recipe's keys must be its keyword-only arguments."""
    unknown = [key for key in section.params if key not in component.params]
    missing = [key for key, (_, default) in component.params.items() if default is ... and key not in section.params]
    if unknown or missing:
        what = f"has no argument {unknown[0]}" if unknown else f"needs the argument {missing[0]}"
        raise RecipeError(
            f"{component.kind} `{section.use}` {what}", allowed=f"it takes: {', '.join(component.params) or 'none'}"
        )
