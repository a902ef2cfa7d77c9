"""Prompt sampler of a run: gets the prompts of a step from the recipe's `sampler` and reports the outcomes to it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.batch import Prompt, Rollout, RolloutBatch
from posttrain.curriculum.protocol import Group, Plan, Pool, Request, Sampler, State
from posttrain.errors import RecipeError, RunError
from posttrain.recipe.rollout_sections import Rollout as Rollouts
from posttrain.recipe.stages import RlRecipe
from posttrain.seeds import PromptSampler, derive
from posttrain.train.rl_metrics import known_mean
from posttrain.train.roles import GROUP_STRIDE
from posttrain.verify.failures import Calls

MOST_REQUESTS = 16  # limit on consecutive requests to which a sampler returns no prompts
METHODS = ("start", "places", "propose", "update", "metrics", "most")


@dataclass(frozen=True)
class StepSampler:
    """A sampler with the prompts it selects from.

    order: the uniform order of the data. needs: what the sampler declares to need. name: as in the recipe.
    """

    sampler: Sampler
    order: PromptSampler
    pool: Pool
    name: str = "uniform"
    needs: frozenset[str] = frozenset()
    steps: int = 1
    staleness: int = 0

    @classmethod
    def from_recipe(cls, recipe: RlRecipe, prompts: Sequence[Prompt], steps: int) -> StepSampler:
        """Build the sampler of a recipe; a user's class is looked up beside the recipe.

        Raises UserError for an unknown name or argument, for a class that is not a sampler, and for what its `start`
        refuses.
        """
        component = recipe.sampler.load(recipe.base_dir)
        missing = sorted(getattr(component.function, "__abstractmethods__", ()))  # these prevent instantiation
        sampler: Any = None if missing else component.function(**recipe.sampler.params)
        missing = missing or [name for name in METHODS if not callable(getattr(sampler, name, None))]
        if missing:
            raise RecipeError(
                f"sampler `{recipe.sampler.use}` has no method `{missing[0]}`",
                where="sampler",
                hint="derive the class from posttrain.curriculum.protocol.Sampler, and give it `propose`",
            )
        found = cls(
            sampler=sampler,
            order=PromptSampler(
                len(prompts), recipe.rollout.prompts_per_step, recipe.run.seed, shuffle=recipe.data.shuffle
            ),
            pool=Pool(
                [p.uid for p in prompts],
                [p.row for p in prompts],
                recipe.rollout.prompts_per_step,
                recipe.rollout.group_size,
                recipe.run.seed,
                steps,
            ),
            name=recipe.sampler.use,
            needs=frozenset(component.needs),
            steps=steps,
            staleness=recipe.rollout.staleness,
        )
        found.start()
        return found

    def start(self) -> State:
        """Return the sampler's state before the first step."""
        return self._plain(self.sampler.start(self.pool))

    def notes(self) -> list[str]:
        """Return the sampler's notes about the prompts, shown when the run begins."""
        notes = getattr(self.sampler, "notes", None)  # optional in a user's class
        return [f"sampler `{self.name}`: {note}" for note in notes(self.pool)] if notes else []

    def places(self, settings: Rollouts) -> int:
        """Return how many positions of the uniform order a request takes."""
        return self.sampler.places(settings.prompts_per_step)

    def candidates(self, start: int, settings: Rollouts) -> list[int]:
        """Return the prompts of the uniform order that a request gets, from position `start` on."""
        return self.order.take(start, self.places(settings))

    def propose(
        self,
        state: State | None,
        step: int,
        settings: Rollouts,
        start: int,
        *,
        round_: int = 0,
        taken: Sequence[int] = (),
        seen: Sequence[Group] = (),
        values: Sequence[float] = (),
    ) -> Plan:
        """Return the plan of step `step` (from 0), given the state at its beginning.

        start: the request's position in the uniform order. Raises RunError for an invalid plan.
        """
        request = Request(
            step=step,
            total_steps=self.steps,
            prompts=settings.prompts_per_step,
            group_size=settings.group_size,
            stream=self.candidates(start, settings),
            seed=derive(self.pool.seed, "sampler", step, start),
            max_new_tokens=settings.max_new_tokens,
            round=round_,
            taken=taken,
            seen=seen,
            values=values,
        )
        plan = self.sampler.propose(self.start() if state is None else state, request, self.pool)
        if problem := self._problem(plan, request):
            raise RunError(f"sampler `{self.name}`: {problem}", where=f"step {step + 1}")
        return plan

    def _problem(self, plan: Plan, request: Request) -> str:
        """Return what is wrong with a plan, or ""."""
        numbers, counts = list(plan.prompts), list(plan.rollouts)
        trained = [group.prompt for group in request.seen if not group.measured]
        if len(numbers) != len(counts) or any(len(x) not in (0, len(numbers)) for x in (plan.bins, plan.limits)):
            found = f"{len(numbers)} prompts, {len(counts)} rollout counts"
            return f"{found}, {len(plan.bins)} bins, {len(plan.limits)} limits"
        if any(type(n) is not int or not 1 <= n <= request.max_new_tokens for n in plan.limits):
            return f"limits {list(plan.limits)}, but integers from 1 to {request.max_new_tokens} are allowed"
        if len(numbers) > request.prompts:
            return f"{len(numbers)} prompts, but a step takes {request.prompts} (rollout.prompts_per_step)"
        if any(not 0 <= n < len(self.pool) for n in numbers):
            wrong = next(n for n in numbers if not 0 <= n < len(self.pool))
            return f"prompt {wrong}, but prompts are numbered from 0 to {len(self.pool) - 1}"
        if any(type(n) is not int or n < 0 for n in counts):
            return f"rollouts {counts}, but integers from 0 are allowed"
        if trained and numbers != trained:
            return "a further round names other prompts than the previous one, whose rollouts are trained on"
        if numbers and not trained and 0 in counts:
            return "a prompt without rollouts"
        return ""

    def sample_rounds(
        self,
        sample: Callable[[Plan, Sequence[int]], tuple[list[Rollout], list[Calls]]],
        state: State | None,
        step: int,
        settings: Rollouts,
        start: int,
        before: Sequence[Group],
        first_group: int,
        values: Sequence[float],
    ) -> tuple[list[Rollout], list[Group], list[Calls]]:
        """Sample and score rollouts for one request, round by round; return them with their groups and reward calls.

        A sampler that asks for another round sees the rewards of the previous one. No rollouts if the sampler names no
        prompts.

        sample: (plan, key that gives a further round other seeds than the first) -> its scored rollouts and their
        calls. start: the request's position in the uniform order. before: the step's groups so far. first_group: number
        of the first group. values: see `Request`.
        """
        taken = list(dict.fromkeys(group.prompt for group in before if not group.measured))
        rollouts: list[Rollout] = []
        measured: list[Group] = []
        seen: list[Group] = []
        calls: list[Calls] = []
        for number in itertools.count():
            plan = self.propose(state, step, settings, start, round_=number, taken=taken, seen=seen, values=values)
            fresh, made = sample(plan, (start, number) if number or plan.measure else ())
            calls += made
            seen = groups_of(plan, fresh, self.pool, first_group, seen)
            if plan.measure:
                measured += seen
            else:
                rollouts += fresh
            if not plan.again:
                break
        groups = [*measured, *([] if plan.measure else seen)]
        return sorted(rollouts, key=lambda r: r.group), groups, calls

    def update(self, state: State | None, groups: Sequence[Group], step: int) -> State:
        """Return the state after step `step` with these groups."""
        before = self.start() if state is None else state
        planned = step + 1 + self.staleness
        return self._plain(self.sampler.update(before, groups, self.pool, step=step, planned=planned))

    def _plain(self, state: State) -> State:
        """Return the state as it reads back from a checkpoint, so that a resumed run has the same one."""
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise RunError(f"the state of sampler `{self.name}` cannot be written as JSON: {error}") from error

    def metrics(self, state: State, groups: Sequence[Group]) -> dict[str, float]:
        """Return metrics of a step's groups and of the state after it. Uniform sampling of equal groups has none."""
        sizes = [len(group.rewards) for group in groups if not group.measured]
        values = {f"sampler/{name}": value for name, value in self.sampler.metrics(state).items()}
        if self.name == "uniform" or not sizes:
            return values
        measured = sum(len(group.rewards) for group in groups if group.measured)
        return {
            "sampler/prompts": len({group.prompt for group in groups if not group.measured}),
            "sampler/smallest_group": min(sizes),
            "sampler/largest_group": max(sizes),
            "sampler/measured": measured,
            **values,
        }


def describe_first_step(recipe: RlRecipe, prompts: Sequence[Prompt], steps: int) -> dict[str, Any]:
    """Describe what the recipe's sampler does first: {sampler, rows (uids), rollouts, note}."""
    source = StepSampler.from_recipe(recipe, prompts, steps)
    plan = source.propose(None, 0, recipe.rollout, 0)
    note = "one greedy rollout each, to measure them" if plan.measure else ""
    note = note or ("a first round; its rewards decide which prompts get more rollouts" if plan.again else "")
    return {
        "sampler": source.name,
        "rows": [source.pool.uids[n] for n in plan.prompts],
        "rollouts": list(plan.rollouts),
        "note": note,
    }


def groups_of(
    plan: Plan, fresh: Sequence[Rollout], pool: Pool, first_group: int, before: Sequence[Group] = ()
) -> list[Group]:
    """Return the groups of a plan with the rewards of its scored rollouts, without hinted ones and given solutions.

    Rollouts of an earlier round of the same prompts come first in their groups.
    """
    earlier = {group.group: group for group in before if not group.measured}
    rows: dict[int, list[Rollout]] = {}
    for rollout in fresh:
        hinted = rollout.variant is not None and rollout.variant.hinted
        if not hinted and all(segment.kind != "given" for segment in rollout.segments):
            rows.setdefault(rollout.group % GROUP_STRIDE, []).append(rollout)
    groups = []
    for place, prompt in enumerate(plan.prompts):
        number = first_group + place
        own, old = rows.get(number, []), earlier.get(number)
        groups.append(
            Group(
                prompt=prompt,
                uid=pool.uids[prompt],
                rewards=(*(old.rewards if old else ()), *(r.reward for r in own)),
                correct=(
                    *(old.correct if old else ()),
                    *(None if r.correct is None else float(r.correct) for r in own),
                ),
                bin=plan.bins[place] if plan.bins else old.bin if old else None,
                measured=plan.measure,
                group=number,
                lengths=(*(old.lengths if old else ()), *(r.length for r in own)),
            )
        )
    return groups


def with_outcomes(
    groups: Sequence[Group], scored: RolloutBatch, keep: Tensor | None, losses: Tensor | None
) -> list[Group]:
    """Return the groups with the outcomes of the step.

    scored: the step's batch before advantages were assigned. keep [N]: rows that the filter kept, None = all. losses
    [N]: policy loss of each row, NaN = none.
    """
    ids = scored.group_ids.cpu() % GROUP_STRIDE
    kept = torch.ones_like(ids, dtype=torch.bool) if keep is None else keep.cpu()
    kl = _token_kl(scored)
    updated = []
    for group in groups:
        rows = ids == group.group
        if group.measured or not bool(rows.any()):
            updated.append(dataclasses.replace(group, kept=False))
            continue
        updated.append(
            dataclasses.replace(
                group,
                kept=bool((rows & kept).any()),
                loss=None if losses is None else known_mean(losses[rows]),
                kl=None if kl is None else float(kl[0][rows].sum() / kl[1][rows].sum().clamp(min=1)),
            )
        )
    return updated


def _token_kl(batch: RolloutBatch) -> tuple[Tensor, Tensor] | None:
    """Return (sum over its trained tokens of the k3 estimate of KL(policy || reference), tokens) of each row.

    None if the reference's log-probs were not computed.
    """
    if batch.ref_logp is None or batch.old_logp is None:
        return None
    gap = torch.where(batch.mask, batch.ref_logp - batch.old_logp, 0.0).double()
    return (gap.exp() - 1 - gap).sum(-1).cpu(), batch.mask.sum(-1).cpu()
