"""What a policy-gradient method computes: from rewards to one number to minimise. A method is a row of parts here.

The order is fixed:

 1. group_rewards  new rewards from those of a group, one after the other
 2. keep           rows that stay (dynamic sampling); dropped ones leave the batch and its denominators
 3. KL             with `kl.where: reward`: coef * the row's summed KL comes off its reward
 4. advantage      from the rewards of the kept rows, over the whole step
 5. factors        multiply the advantages of a row, those of its channels too
 6. advantage_transforms   change the advantages, one after the other
 7. credit_assignment   divides a row's advantage among its turns or tokens
 8. mask edits     completions that hit the limit, if `loss.mask_truncated` (these stay in the row count)
 9. select         tokens that are trained on
10. loss           per token, or one value a group, from the current policy's log-probs
11. corrections    multiply the policy-gradient term of a token
12. KL in the loss and regularisers: + coef * the term
13. aggregation    of each term, divided by the totals of the whole optimiser batch

`compute_advantages` is steps 1 to 9, on a whole step's rollouts; `loss` is steps 10 to 13, on any part of them (whole
groups, for a loss over groups).
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
from posttrain.recipe.argument_checks import load_component
from posttrain.recipe.needs import BY_ROW
from posttrain.recipe.rl_stage import BEFORE_THE_LOSS, OBJECTIVE
from posttrain.recipe.section import ComponentSection
from posttrain.recipe.stages import RlRecipe
from posttrain.train.dynamic_sampling import DynamicSamplingBuffer
from posttrain.train.preset_recipe import preset_recipe

_MANY = tuple(key for key in OBJECTIVE if key not in ("advantage", "loss", "kl", "controllers"))
_ONE = ("advantage", "surrogate", "kl")


@dataclass(frozen=True)
class BoundComponent:
    """One component: call it with a batch. `key` is where it stands in the recipe, e.g. `advantage_transforms.0`.

    coef and aggregation are those of terms that are added to the loss; other parts leave them alone.
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
        """The same with the numbers that controllers give to its keys (`advantage_transforms.0.alpha`, `kl.coef`)."""
        mine = {k.removeprefix(f"{self.key}."): v for k, v in numbers.items() if k.rpartition(".")[0] == self.key}
        if not mine:
            return self
        params = {k: _like(v, mine[k]) if k in mine else v for k, v in self.params.items()}
        return dataclasses.replace(self, params=params, coef=mine.get("coef", self.coef))

    def call_and_remember(self, batch: RolloutBatch) -> tuple[Any, RolloutBatch]:
        """The result, and the batch with what the part wants to know again in the next step."""
        result = self(batch)
        if not isinstance(result, Remembered):
            return result, batch
        return result.result, batch.replace(memory={**batch.memory, self.name: result.memory})


def _like(before: Any, number: float) -> float:
    return round(number) if isinstance(before, int) else number


def bind(key: str, section: ComponentSection, base_dir: Path | None) -> BoundComponent:
    """The part of a recipe section. Raises UserError for a name or argument that does not exist."""
    component = load_component(section, base_dir)
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
    """Parts by their place in the order; all are pure functions with their arguments bound."""

    advantage: BoundComponent
    surrogate: BoundComponent  # a loss per token or over groups
    group_rewards: tuple[BoundComponent, ...] = ()
    keep: tuple[BoundComponent, ...] = ()
    factors: tuple[BoundComponent, ...] = ()
    advantage_transforms: tuple[BoundComponent, ...] = ()
    credit_assignment: tuple[BoundComponent, ...] = ()  # one at most
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
        """The objective of a recipe; functions of the user are looked for beside it.

        Raises UserError for names and arguments that do not exist.
        """
        parts: dict[str, tuple[BoundComponent, ...]] = {}
        for key, section in recipe.active_components():
            place = key.partition(".")[0]
            if place != "controllers":
                parts[place] = (*parts.get(place, ()), bind(key, section, recipe.base_dir))
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

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Objective:
        """The objective of `algorithm: NAME`; `overrides` are keys of its sections, e.g. loss={"clip_high": 0.3}; the
        entries of a list are named by their number, advantage_transforms={"0": {"alpha": 0.5}}."""
        return cls.from_recipe(preset_recipe(name, **overrides))

    def at(self, numbers: Mapping[str, float]) -> Objective:
        """The same with other numbers, by recipe key; those of a step's controllers."""
        changed: dict[str, Any] = {name: tuple(p.at(numbers) for p in self._parts(name)) for name in _MANY}
        one = {name: part.at(numbers) for name in _ONE if (part := getattr(self, name)) is not None}
        return dataclasses.replace(self, **changed, **one)

    def _parts(self, name: str) -> tuple[BoundComponent, ...]:
        value = getattr(self, name)
        return value if isinstance(value, tuple) else () if value is None else (value,)

    @cached_property
    def every_part(self) -> tuple[BoundComponent, ...]:
        return tuple(part for name in (*_MANY, *_ONE) for part in self._parts(name))

    @cached_property
    def needs(self) -> frozenset[str]:
        """All that the batch must carry or the run must give, e.g. `ref_logp`."""
        named = [part.needs for part in self.every_part]
        return frozenset({"old_logp"} if self.kl and self.kl_in_reward else ()).union(*named)

    @cached_property
    def needs_before_the_loss(self) -> frozenset[str]:
        """What `compute_advantages` needs of them: it must be measured before."""
        early = [part.needs for name in BEFORE_THE_LOSS for part in self._parts(name)]
        reward = {"old_logp", "ref_logp"} if self.kl and self.kl_in_reward else set()
        return frozenset(reward).union(*early)

    @cached_property
    def is_by_row(self) -> bool:
        """Whether `compute_advantages` reads nothing by token: then it takes a batch whose mask [N,1] says which rows
        have a trained token. Of a function of the user that is not known."""
        early = [part for name in BEFORE_THE_LOSS for part in self._parts(name)]
        own = all(part.function.__module__.startswith("posttrain.") for part in early)
        return own and not self.kl_in_reward and all(part.needs <= BY_ROW for part in early)

    @cached_property
    def whole_groups(self) -> bool:
        """`loss` must get all rows of a group together."""
        return self.surrogate.kind == "group_loss"

    # --- steps 1 to 9: on the rollouts of a whole step ---

    def compute_advantages(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch with rewards, keep, advantages and the edited mask: everything that looks at the whole step.

        Nothing is removed, so that rows keep their numbers; dropped rows have advantage 0 and an empty mask. Where all
        are dropped, no part is asked what to make of no rows, and none remembers the step.
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
        stay = kept.clone()
        if rows.keep is not None:
            stay[kept] = rows.keep
        mask = torch.zeros_like(batch.mask)
        mask[kept] = rows.mask
        if batch.trajectory_ids is not None:
            batch = batch.replace(trajectory_tokens=count_trajectory_tokens(mask, batch.trajectory_ids))
        return batch.replace(
            keep=stay,
            mask=mask,
            memory=rows.memory,
            channels={name: scatter_kept(value, kept) for name, value in rows.channels.items()},
            **{name: scatter_kept(getattr(rows, name), kept) for name in ("advantages", "returns", "selected")},
        )

    def apply_group_rewards(self, batch: RolloutBatch) -> RolloutBatch:
        """Step 1: the rewards after all `group_rewards`. What each of them changed is a component of its name: an
        advantage that reads components (GDPO) sees it, and metrics show it; a component that is there keeps its name.
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
        """Step 2: rows that every filter keeps, bool [N]."""
        kept = torch.ones_like(batch.group_ids, dtype=torch.bool) if batch.keep is None else batch.keep
        for part in self.keep:
            kept = kept & part.call_and_remember(batch)[0]
        return kept

    def subtract_kl(self, batch: RolloutBatch) -> RolloutBatch:
        """Step 3: reward - coef * (the old policy's KL to the reference, summed over trained tokens); by token as well,
        for advantages that read rewards by token."""
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

    def paid_kl_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """What metrics say of a KL that comes off the reward: means over all sampled tokens. batch: before step 1. A KL
        in the loss is among the statistics of `loss`."""
        if self.kl is None or not self.kl_in_reward:
            return {}
        assert batch.old_logp is not None
        term, tokens = self.kl(batch, batch.old_logp), max(int(batch.mask.sum()), 1)
        return {name: float(token_sum(value, batch.mask)) / tokens for name, value in term.stats.items()}

    def select_tokens(self, batch: RolloutBatch) -> RolloutBatch:
        """Steps 8 and 9: the mask, the selected tokens, and the rows that stay."""
        if self.mask_truncated:
            if batch.truncated is None:
                raise ValueError("mask_truncated needs to know which rows were truncated")
            batch = batch.replace(mask=batch.mask & ~batch.truncated[:, None])
        for part in self.select:
            chosen, batch = part.call_and_remember(batch)
            if chosen.denominator == "kept":
                left = batch.mask & chosen.mask
                stay = left.any(-1) | ~batch.mask.any(-1)
                keep = stay if batch.keep is None else batch.keep & stay
                batch = batch.replace(mask=left, keep=keep)
            elif self.whole_groups:
                what = f"{part.key} `{part.name}` takes tokens out of a loss by token"
                raise UserError(
                    f"{what}, and loss `{self.surrogate.name}` has one value a group",
                    hint="remove it, or take a selection whose tokens leave the denominators too",
                )
            else:
                before = batch.mask if batch.selected is None else batch.selected
                batch = batch.replace(selected=before & chosen.mask)
        return batch

    def sampling_buffer(self, want: int, max_batches: int) -> DynamicSamplingBuffer:
        """Collects generation batches until `want` groups passed `keep`."""
        keep = (lambda batch: self.filter_rows(self.apply_group_rewards(batch))) if self.keep else None
        return DynamicSamplingBuffer(keep, want, max_batches)

    # --- steps 10 to 13: on the rows of one optimiser batch, or a part of them ---

    @cached_property
    def terms(self) -> tuple[BoundComponent, ...]:
        """What is added to the policy loss."""
        return (*((self.kl,) if self.kl is not None and not self.kl_in_reward else ()), *self.regularisers)

    def totals(self, batch: RolloutBatch) -> Totals:
        """The denominators of one optimiser batch (after `compute_advantages`). Add them up over ranks."""
        rows = batch if batch.keep is None else batch.select(batch.keep)
        found = totals(rows.mask, self.count_empty_rows, rows.trajectory_tokens)
        own = [self.surrogate] if "own_mean" in self.surrogate.needs else []
        if not self.regularisers and not own and not self.whole_groups:
            return found
        with torch.no_grad():
            asked, logp = _with_stand_ins(rows), torch.zeros(rows.mask.shape, device=rows.mask.device)
            results = {part.key: part(asked, logp) for part in (*self.regularisers, *own)}
            terms = {key: float(r.counted.sum()) for key, r in results.items() if r.counted is not None}
            weights = _weights(self.surrogate(asked, logp)) if self.whole_groups and len(rows) else logp.new_zeros(0)
        return dataclasses.replace(found, groups=float(len(weights)), weight=float(weights.sum()), terms=terms)

    def has_signal(self, batch: RolloutBatch) -> Tensor:
        """Rows that have a gradient, bool [N]; the others need no forward pass (`totals` still counts them)."""
        if self.whole_groups:
            return batch.mask.any(-1) if batch.keep is None else batch.keep
        if self.terms or "every_row" in self.surrogate.needs:
            return batch.mask.any(-1)
        if self.aggregation == "local_token_mean":  # rows without a gradient are in its denominators
            return torch.ones_like(batch.group_ids, dtype=torch.bool) if batch.keep is None else batch.keep
        assert batch.advantages is not None
        advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
        chosen = batch.mask if batch.selected is None else batch.mask & batch.selected
        return (chosen & (advantages != 0)).any(-1)

    def loss(self, batch: RolloutBatch, logp: Tensor, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """What these rows add to the loss, to be called backward on, and their statistics. logp [N,T] has the gradient.

        Statistics are detached sums over trained tokens: divide them by the number of tokens summed.
        """
        if self.whole_groups:
            loss, sums = self.group_term(batch, logp, totals)
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

    def group_term(self, batch: RolloutBatch, logp: Tensor, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """Step 10 of a loss over groups: the weighted mean over the groups of the optimiser batch."""
        kept = torch.ones_like(batch.group_ids, dtype=torch.bool) if batch.keep is None else batch.keep
        rows = batch.select(kept)
        found: GroupLoss = self.surrogate(rows, logp[kept])
        tokens = group_tokens(rows)
        sums = {name: (value * tokens.to(value.dtype)).sum() for name, value in found.stats.items()}
        if totals.weight == 0:
            return found.values.sum() / max(totals.groups, 1.0), sums
        return (found.values * _weights(found)).sum() / totals.weight, sums

    def row_losses(self, batch: RolloutBatch, logp: Tensor) -> Tensor:
        """The policy loss of each row [N] at these log-probs: the mean over its trained tokens of steps 10 and 12, KL
        included, regularisers not. NaN for rows that `keep` dropped; 0 for those without a trained token."""
        with torch.no_grad():
            rows = _with_stand_ins(batch)
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
        """Step 13 for one term, times `coef`: by the recipe's aggregation, or the mean over its own tokens."""
        if part.key in totals.terms:
            return coef * (torch.where(batch.mask, term.values, 0.0).sum() / max(totals.terms[part.key], 1.0))
        mode = part.aggregation or self.aggregation
        return coef * aggregate(term.values, batch.mask, mode, totals, self.norm_len, batch.trajectory_tokens)


def _weights(loss: GroupLoss) -> Tensor:
    return torch.ones_like(loss.values) if loss.weights is None else loss.weights


def _with_stand_ins(batch: RolloutBatch) -> RolloutBatch:
    """For questions that do not depend on the current policy: the old one's numbers in place of its own."""
    router = torch.zeros(len(batch), device=batch.mask.device)
    spread = torch.zeros(batch.mask.shape, device=batch.mask.device)
    found = {"new_values": batch.values, "vocab_mean_logp": batch.old_vocab_mean_logp, "divergence": spread}
    return batch.replace(**found, router_loss=router, new_entropy=spread)


def token_sum(value: Tensor, mask: Tensor) -> Tensor:
    """Sum over trained tokens of a statistic [N,T], or [N] that holds for every token of its row."""
    spread = value if value.dim() == 2 else value[:, None].expand(mask.shape)
    return torch.where(mask, spread, 0.0).sum()


def group_tokens(batch: RolloutBatch) -> Tensor:
    """Trained tokens [K] of each group, in order of first appearance."""
    return group_total(batch.mask.sum(-1), *group_key(batch.group_ids))


def scatter_kept(values: Tensor | None, kept: Tensor) -> Tensor | None:
    """Values of the kept rows at their places among all rows; 0 elsewhere."""
    if values is None:
        return None
    everywhere = values.new_zeros((len(kept), *values.shape[1:]))
    everywhere[kept] = values
    return everywhere


def multiply_rows(advantages: Tensor, factor: Tensor) -> Tensor:
    """Advantages * factor, constant for the gradient; each is [N] or [N,T]."""
    dims = max(advantages.dim(), factor.dim())
    one, other = (value if value.dim() == dims else value[:, None] for value in (advantages, factor.detach()))
    return one * other
