"""RL objective: composes the components of a policy-gradient method, from rewards to one loss.

The order is fixed:

 1. group_rewards  new rewards from the rewards of a group, applied one after another
 2. keep           rows that stay (dynamic sampling); dropped rows get an empty mask and do not count in denominators
 3. KL             with `kl.where: reward`: coef * the row's summed KL is subtracted from its reward
 4. advantage      from the rewards of the kept rows, over the whole step
 5. factors        multiply the advantages of a row, including its per-channel advantages
 6. advantage_transforms   change the advantages, one after another
 7. credit_assignment   divides a row's advantage among its turns or tokens
 8. mask edits     with `loss.mask_truncated`: masks completions that hit the length limit (they stay in the row count)
 9. select         tokens that are trained on
10. loss           per token, or one value per group, from the current policy's log-probs
11. corrections    multiply the policy-gradient term of a token
12. KL in the loss and regularisers: + coef * the term
13. aggregation    of each term, divided by the totals of the whole optimizer batch

`compute_advantages` is steps 1 to 9, on a whole step's rollouts; `loss` is steps 10 to 13, on any part of the rollouts
(whole groups, for a loss over groups).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain import registry
from posttrain.advantage.tokens import token_rewards
from posttrain.batch import ChannelAdvantages, Credit, GroupLoss, Remembered, RolloutBatch, TokenLoss, row_mean
from posttrain.errors import UserError
from posttrain.loss.aggregate import Aggregation, Totals, aggregate, count_trajectory_tokens, totals
from posttrain.loss.groups import group_key, group_total
from posttrain.recipe.needs import BY_ROW
from posttrain.recipe.rl_stage import BEFORE_THE_LOSS, OBJECTIVE
from posttrain.recipe.section import ComponentSection
from posttrain.recipe.stages import RlRecipe
from posttrain.train.dynamic_sampling import DynamicSamplingBuffer

_LIST_FIELDS = tuple(key for key in OBJECTIVE if key not in ("advantage", "loss", "kl", "controllers"))
_SINGLE_FIELDS = ("advantage", "surrogate", "kl")


@dataclass(frozen=True)
class BoundComponent:
    """Component of the objective with its arguments bound: call it with a batch.

    key: path in the recipe, e.g. `advantage_transforms.0`. coef, aggregation: used by terms added to the loss; ignored
    by other components.
    """

    kind: registry.Kind
    name: str
    key: str
    function: Callable[..., Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    coef: float = 1.0
    aggregation: Aggregation | None = None

    def __call__(self, batch: RolloutBatch, *logp: Tensor) -> Any:
        return self.function(batch, *logp, **self.params)

    def at(self, numbers: Mapping[str, float]) -> BoundComponent:
        """Return this component with the values that controllers set for its keys.

        numbers: values by recipe key, e.g. `advantage_transforms.0.alpha` or `kl.coef`.
        """
        new = {k.removeprefix(f"{self.key}."): v for k, v in numbers.items() if k.rpartition(".")[0] == self.key}
        if not new:
            return self
        new = {k: round(v) if isinstance(self.params.get(k), int) else v for k, v in new.items()}
        params = {k: new.get(k, v) for k, v in self.params.items()}
        return dataclasses.replace(self, params=params, coef=new.get("coef", self.coef))

    def call_and_remember(self, batch: RolloutBatch) -> tuple[Any, RolloutBatch]:
        """Return the component's result, and the batch with the state that the component keeps for the next step."""
        result = self(batch)
        if not isinstance(result, Remembered):
            return result, batch
        return result.result, batch.replace(memory={**batch.memory, self.name: result.memory})


def bind(key: str, section: ComponentSection, base_dir: Path | None) -> BoundComponent:
    """Bind the component of a recipe section. Raises UserError for an unknown name or argument."""
    component = section.load(base_dir)
    return BoundComponent(
        kind=component.kind,  # type: ignore[arg-type]
        name=component.name,
        key=key,
        function=component.function,
        params=section.params,
        needs=frozenset(component.needs),
        coef=getattr(section, "coef", 1.0),
        aggregation=getattr(section, "aggregation", None),
    )


@dataclass(frozen=True)
class Objective:
    """Components of a policy-gradient method, by their position in the fixed order.

    All are pure functions with their arguments bound.
    """

    advantage: BoundComponent
    surrogate: BoundComponent  # per-token loss, or loss over groups
    group_rewards: tuple[BoundComponent, ...] = ()
    keep: tuple[BoundComponent, ...] = ()
    factors: tuple[BoundComponent, ...] = ()
    advantage_transforms: tuple[BoundComponent, ...] = ()
    credit_assignment: tuple[BoundComponent, ...] = ()  # at most one
    select: tuple[BoundComponent, ...] = ()
    corrections: tuple[BoundComponent, ...] = ()
    kl: BoundComponent | None = None  # None = coefficient 0
    kl_in_reward: bool = False
    regularisers: tuple[BoundComponent, ...] = ()
    aggregation: Aggregation = "seq_mean_token_mean"
    norm_len: float | None = None
    count_empty_rows: bool = True
    mask_truncated: bool = False

    @classmethod
    def from_recipe(cls, recipe: RlRecipe) -> Objective:
        """Build the objective of a recipe; user functions are searched next to the recipe file.

        Raises UserError for unknown names and arguments.
        """
        parts: dict[str, tuple[BoundComponent, ...]] = {}
        for key, section in recipe.active_components():
            group = key.partition(".")[0]
            if group != "controllers":
                parts[group] = (*parts.get(group, ()), bind(key, section, recipe.base_dir))
        (advantage,), (surrogate,), kl = parts.pop("advantage"), parts.pop("loss"), parts.pop("kl", (None,))
        return cls(
            advantage=advantage,
            surrogate=surrogate,
            kl=kl[0],
            kl_in_reward=recipe.kl.where == "reward",
            aggregation=recipe.loss.aggregation,
            norm_len=recipe.loss.norm_len or recipe.rollout.max_new_tokens,
            count_empty_rows=recipe.loss.count_empty_rows,
            mask_truncated=recipe.loss.mask_truncated,
            **parts,  # type: ignore[arg-type]
        )

    def at(self, numbers: Mapping[str, float]) -> Objective:
        """Return the objective with other values, by recipe key, as set by a step's controllers."""
        changed: dict[str, Any] = {name: tuple(p.at(numbers) for p in self._parts(name)) for name in _LIST_FIELDS}
        replaced = {name: part.at(numbers) for name in _SINGLE_FIELDS if (part := getattr(self, name)) is not None}
        return dataclasses.replace(self, **changed, **replaced)

    def _parts(self, name: str) -> tuple[BoundComponent, ...]:
        value = getattr(self, name)
        return value if isinstance(value, tuple) else () if value is None else (value,)

    @cached_property
    def every_part(self) -> tuple[BoundComponent, ...]:
        return tuple(part for name in (*_LIST_FIELDS, *_SINGLE_FIELDS) for part in self._parts(name))

    @cached_property
    def needs(self) -> frozenset[str]:
        """All fields and services that the components need, e.g. `ref_logp`."""
        needs = [part.needs for part in self.every_part]
        return frozenset({"old_logp"} if self.kl and self.kl_in_reward else ()).union(*needs)

    @cached_property
    def needs_before_the_loss(self) -> frozenset[str]:
        """Fields that `compute_advantages` needs: they must be computed before it."""
        early = [part.needs for name in BEFORE_THE_LOSS for part in self._parts(name)]
        reward = {"old_logp", "ref_logp"} if self.kl and self.kl_in_reward else set()
        return frozenset(reward).union(*early)

    @cached_property
    def is_by_row(self) -> bool:
        """Whether `compute_advantages` reads no per-token values.

        If True, it accepts a batch whose mask [N,1] marks the rows with a trained token. Always False with user
        functions, whose reads are unknown.
        """
        early = [part for name in BEFORE_THE_LOSS for part in self._parts(name)]
        builtin = all(part.function.__module__.startswith("posttrain.") for part in early)
        return builtin and not self.kl_in_reward and all(part.needs <= BY_ROW for part in early)

    @cached_property
    def whole_groups(self) -> bool:
        """Whether `loss` must get all rows of a group in one call."""
        return self.surrogate.kind == "group_loss"

    # --- steps 1 to 9: on the rollouts of a whole step ---

    def compute_advantages(self, batch: RolloutBatch) -> RolloutBatch:
        """Compute everything that needs the whole step: rewards, keep, advantages and the edited mask (steps 1 to 9).

        No row is removed, so row indices stay valid; dropped rows get advantage 0 and an empty mask. If all rows are
        dropped, no further component is called, and none stores state for the step.
        """
        if self.group_rewards:
            batch = self.apply_group_rewards(batch)
        kept = self.filter_rows(batch)
        if not bool(kept.any()):
            nothing = torch.zeros(len(batch), dtype=torch.float64, device=kept.device)
            return batch.replace(keep=kept, mask=torch.zeros_like(batch.mask), advantages=nothing)
        rows = batch.select(kept)
        rewards = rows.rewards
        if self.kl_in_reward:
            rows = self.subtract_kl(rows)
        for part in (self.advantage, *self.factors, *self.advantage_transforms, *self.credit_assignment):
            result, rows = part.call_and_remember(rows)
            match result:
                case Credit():
                    rows = rows.replace(advantages=result.advantages.detach(), returns=result.returns.detach())
                case ChannelAdvantages():
                    rows = rows.replace(advantages=result.total.detach(), channels=result.channels)
                case factor if part in self.factors:
                    assert rows.advantages is not None
                    channels = {name: multiply_rows(value, factor) for name, value in rows.channels.items()}
                    rows = rows.replace(advantages=multiply_rows(rows.advantages, factor), channels=channels)
                case advantages:
                    rows = rows.replace(advantages=advantages.detach())
        rows = rows.replace(rewards=rewards)
        if self.select or self.mask_truncated:
            rows = self.select_tokens(rows)
        keep = kept.clone()
        if rows.keep is not None:
            keep[kept] = rows.keep
        mask = torch.zeros_like(batch.mask)
        mask[kept] = rows.mask
        if batch.trajectory_ids is not None:
            batch = batch.replace(trajectory_tokens=count_trajectory_tokens(mask, batch.trajectory_ids))
        return batch.replace(
            keep=keep,
            mask=mask,
            memory=rows.memory,
            channels={name: scatter_kept(value, kept) for name, value in rows.channels.items()},
            **{name: scatter_kept(getattr(rows, name), kept) for name in ("advantages", "returns", "selected")},
        )

    def apply_group_rewards(self, batch: RolloutBatch) -> RolloutBatch:
        """Step 1: apply all `group_rewards`.

        The change made by each is stored as a reward component under its name, so that advantages that read components
        (GDPO) and metrics see it; an existing component keeps its name.
        """
        changes: dict[str, Tensor] = {}
        for part in self.group_rewards:
            before = batch.rewards
            rewards, batch = part.call_and_remember(batch)
            batch = batch.replace(rewards=rewards)
            if before is not None:
                name = part.name.rpartition(":")[2]
                changes[name] = changes.get(name, 0.0) + (rewards - before)
        return batch.replace(components={**changes, **batch.components})

    def filter_rows(self, batch: RolloutBatch) -> Tensor:
        """Step 2: return the rows that every filter keeps, bool [N]."""
        kept = torch.ones_like(batch.group_ids, dtype=torch.bool) if batch.keep is None else batch.keep
        for part in self.keep:
            kept = kept & part.call_and_remember(batch)[0]
        return kept

    def subtract_kl(self, batch: RolloutBatch) -> RolloutBatch:
        """Step 3: subtract coef * (the old policy's KL to the reference, summed over trained tokens) from each reward.

        Subtracts the per-token KL from `token_rewards` as well, for advantages that read per-token rewards.
        """
        if self.kl is None or not self.kl_in_reward:
            return batch
        if batch.old_logp is None:
            raise ValueError("KL in the reward needs old_logp and ref_logp before advantages are assigned")
        if batch.rewards is None:
            raise ValueError("KL in the reward needs rewards before advantages are assigned")
        penalty = self.kl(batch, batch.old_logp).values.detach().to(batch.rewards) * self.kl.coef
        return batch.replace(
            rewards=batch.rewards - penalty.sum(-1),
            token_rewards=torch.where(batch.mask, token_rewards(batch) - penalty, 0.0),
        )

    def reward_kl_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Return metrics of a KL that is subtracted from the reward: means over all sampled tokens.

        batch: before step 1. Empty for a KL in the loss, which is reported by the statistics of `loss`.
        """
        if self.kl is None or not self.kl_in_reward:
            return {}
        assert batch.old_logp is not None
        term, tokens = self.kl(batch, batch.old_logp), max(int(batch.mask.sum()), 1)
        return {name: float(token_sum(value, batch.mask)) / tokens for name, value in term.stats.items()}

    def select_tokens(self, batch: RolloutBatch) -> RolloutBatch:
        """Steps 8 and 9: set the mask, the selected tokens, and the rows that stay."""
        if self.mask_truncated:
            if batch.truncated is None:
                raise ValueError("mask_truncated needs the field `truncated` of the batch")
            batch = batch.replace(mask=batch.mask & ~batch.truncated[:, None])
        for part in self.select:
            chosen, batch = part.call_and_remember(batch)
            if chosen.denominator == "kept":
                mask = batch.mask & chosen.mask
                stay = mask.any(-1) | ~batch.mask.any(-1)
                keep = stay if batch.keep is None else batch.keep & stay
                batch = batch.replace(mask=mask, keep=keep)
            elif self.whole_groups:
                raise UserError(
                    f"{part.key} `{part.name}` removes tokens from a per-token loss, "
                    f"but loss `{self.surrogate.name}` has one value per group",
                    hint="remove it, or use a selection that also removes its tokens from the denominators",
                )
            else:
                before = batch.mask if batch.selected is None else batch.selected
                batch = batch.replace(selected=before & chosen.mask)
        return batch

    def sampling_buffer(self, want: int, max_batches: int) -> DynamicSamplingBuffer:
        """Return a buffer that collects generation batches until `want` groups have passed `keep`."""
        keep = (lambda batch: self.filter_rows(self.apply_group_rewards(batch))) if self.keep else None
        return DynamicSamplingBuffer(keep, want, max_batches)

    # --- steps 10 to 13: on the rows of one optimizer batch, or a part of them ---

    @cached_property
    def terms(self) -> tuple[BoundComponent, ...]:
        """Terms added to the policy loss: KL in the loss, and regularisers."""
        return (*((self.kl,) if self.kl is not None and not self.kl_in_reward else ()), *self.regularisers)

    def totals(self, batch: RolloutBatch) -> Totals:
        """Compute the denominators of one optimizer batch (after `compute_advantages`). Sum them over ranks."""
        rows = batch if batch.keep is None else batch.select(batch.keep)
        found = totals(rows.mask, self.count_empty_rows, rows.trajectory_tokens)
        with_own_mean = [self.surrogate] if "own_mean" in self.surrogate.needs else []
        if not self.regularisers and not with_own_mean and not self.whole_groups:
            return found
        with torch.no_grad():
            filled, logp = _fill_policy_outputs(rows), torch.zeros(rows.mask.shape, device=rows.mask.device)
            results = {part.key: part(filled, logp) for part in (*self.regularisers, *with_own_mean)}
            terms = {key: float(r.counted.sum()) for key, r in results.items() if r.counted is not None}
            weights = (
                _group_weights(self.surrogate(filled, logp)) if self.whole_groups and len(rows) else logp.new_zeros(0)
            )
        return dataclasses.replace(found, groups=float(len(weights)), weight=float(weights.sum()), terms=terms)

    def has_signal(self, batch: RolloutBatch) -> Tensor:
        """Return the rows that have a gradient, bool [N].

        Other rows need no forward pass; `totals` still counts them.
        """
        if self.whole_groups:
            return batch.mask.any(-1) if batch.keep is None else batch.keep
        if self.terms or "every_row" in self.surrogate.needs:
            return batch.mask.any(-1)
        if self.aggregation == "local_token_mean":  # its denominators include rows without a gradient
            return torch.ones_like(batch.group_ids, dtype=torch.bool) if batch.keep is None else batch.keep
        assert batch.advantages is not None
        advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
        chosen = batch.mask if batch.selected is None else batch.mask & batch.selected
        return (chosen & (advantages != 0)).any(-1)

    def loss(self, batch: RolloutBatch, logp: Tensor, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the contribution of these rows to the loss, to call backward on, and their statistics.

        logp [N,T] carries the gradient. Statistics are detached sums over trained tokens: divide them by the number of
        tokens.
        """
        if self.whole_groups:
            loss, sums = self.compute_group_loss(batch, logp, totals)
        else:
            token_loss = self.surrogate(batch, logp)
            values, stats = token_loss.values, dict(token_loss.stats)
            for part in self.corrections:
                correction = part(batch, logp.detach())
                values = correction.apply(values)
                stats |= correction.stats
            if batch.selected is not None:
                values = torch.where(batch.selected, values, 0.0)
            loss = self.aggregate_term(self.surrogate, dataclasses.replace(token_loss, values=values), batch, totals)
            sums = {name: token_sum(value, batch.mask) for name, value in stats.items()}
        for part in self.terms:
            term = part(batch, logp)
            loss = loss + self.aggregate_term(part, term, batch, totals, coef=part.coef)
            sums |= {name: token_sum(value, batch.mask) for name, value in term.stats.items()}
        return loss, sums

    def compute_group_loss(self, batch: RolloutBatch, logp: Tensor, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """Step 10 of a loss over groups: the weighted mean over the groups of the optimizer batch, and statistics."""
        kept = torch.ones_like(batch.group_ids, dtype=torch.bool) if batch.keep is None else batch.keep
        rows = batch.select(kept)
        found: GroupLoss = self.surrogate(rows, logp[kept])
        tokens = group_total(rows.mask.sum(-1), *group_key(rows.group_ids))  # of each group, by first appearance
        sums = {name: (value * tokens.to(value.dtype)).sum() for name, value in found.stats.items()}
        if totals.weight == 0:
            return found.values.sum() / max(totals.groups, 1.0), sums
        return (found.values * _group_weights(found)).sum() / totals.weight, sums

    def row_losses(self, batch: RolloutBatch, logp: Tensor) -> Tensor:
        """Compute the policy loss of each row [N] at these log-probs: the mean over its trained tokens.

        Includes steps 10 and 12 with the KL, but not the regularisers. NaN for rows dropped by `keep`; 0 for rows
        without a trained token.
        """
        with torch.no_grad():
            rows = _fill_policy_outputs(batch)
            active = self.has_signal(batch)[:, None] & batch.mask
            logp = torch.where(active, logp, 0.0 if rows.old_logp is None else rows.old_logp)
            values = self.surrogate(rows, logp).values
            if self.kl is not None and not self.kl_in_reward:
                values = values + self.kl.coef * self.kl(rows, logp).values
            losses = row_mean(values.double(), active)
        return losses if batch.keep is None else torch.where(batch.keep, losses, torch.nan)

    def aggregate_term(
        self, part: BoundComponent, term: TokenLoss, batch: RolloutBatch, totals: Totals, *, coef: float = 1.0
    ) -> Tensor:
        """Step 13 for one term, times `coef`: aggregate by the recipe's mode, or as the mean over the term's own
        tokens."""
        if part.key in totals.terms:
            return coef * (torch.where(batch.mask, term.values, 0.0).sum() / max(totals.terms[part.key], 1.0))
        mode = part.aggregation or self.aggregation
        return coef * aggregate(term.values, batch.mask, mode, totals, self.norm_len, batch.trajectory_tokens)


def _group_weights(loss: GroupLoss) -> Tensor:
    return torch.ones_like(loss.values) if loss.weights is None else loss.weights


def _fill_policy_outputs(batch: RolloutBatch) -> RolloutBatch:
    """Fill the fields that a forward pass of the current policy would give with the old policy's values or zeros.

    For computations that do not depend on the current policy.
    """
    router = torch.zeros(len(batch), device=batch.mask.device)
    spread = torch.zeros(batch.mask.shape, device=batch.mask.device)
    outputs = {"new_values": batch.values, "vocab_mean_logp": batch.old_vocab_mean_logp, "divergence": spread}
    return batch.replace(**outputs, router_loss=router, new_entropy=spread)


def token_sum(value: Tensor, mask: Tensor) -> Tensor:
    """Sum a statistic [N,T] over trained tokens; a statistic [N] holds for every token of its row."""
    spread = value if value.dim() == 2 else value[:, None].expand(mask.shape)
    return torch.where(mask, spread, 0.0).sum()


def scatter_kept(values: Tensor | None, kept: Tensor) -> Tensor | None:
    """Scatter the values of kept rows to their indices among all rows; 0 elsewhere. Returns None for None."""
    if values is None:
        return None
    scattered = values.new_zeros((len(kept), *values.shape[1:]))
    scattered[kept] = values
    return scattered


def multiply_rows(advantages: Tensor, factor: Tensor) -> Tensor:
    """Multiply advantages by a detached factor; each is [N] or [N,T]."""
    dims = max(advantages.dim(), factor.dim())
    left, right = (value if value.dim() == dims else value[:, None] for value in (advantages, factor.detach()))
    return left * right
