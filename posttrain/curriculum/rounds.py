"""Samplers with several rounds per step: XRPO's incremental grants, and filtering by greedy decoding (SELF)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.curriculum.allocation import grant_rollouts, reward_std
from posttrain.curriculum.protocol import Group, Plan, Pool, Request, Sampler, State
from posttrain.curriculum.selection import find_greedy_failures
from posttrain.errors import UserError
from posttrain.registry import register


@register(
    "sampler",
    "xrpo",
    paper="2510.06672",
    needs=("groups", "rounds", "unequal"),
    note=(
        "Read from descriptions of the paper: the greedy loop, the count of rollouts in the bonus, alpha, explore,"
        " n_min and the number of rounds are guesses. Its solved examples for prompts that all rollouts fail are not"
        " in it."
    ),
)
@dataclass(frozen=True, kw_only=True)
class Xrpo(Sampler):
    """Gives every prompt n_min rollouts, then spends the remainder of prompts_per_step * group_size in further rounds
    where a rollout narrows the confidence interval of the mean reward most.

    Priority: h(n) - h(n+1) + explore * sqrt(ln(1 + rollouts of the step) / n) with h(n) = t_{1-alpha/2, n-1} * s /
    sqrt(n), n the prompt's rollouts so far, t the quantile of Student's distribution, s the standard deviation (ddof
    1) of the prompt's rewards. n_min: null = half of `rollout.group_size`.
    n_max: null = 4 n_min. rounds: including the first; each later round grants an equal part of the remaining budget.
    per_round: rollouts per grant.
    """

    alpha: float = 0.05
    explore: float = 0.1
    n_min: int | None = None
    n_max: int | None = None
    rounds: int = 2
    per_round: int = 1

    def __post_init__(self) -> None:
        if (self.n_min is not None and self.n_min < 2) or self.rounds < 2:
            raise UserError(
                f"n_min {self.n_min}, rounds {self.rounds}",
                allowed="n_min of 2 or more, since one rollout has no interval; 2 rounds or more",
            )
        if self.n_max is not None and self.n_max < (self.n_min or 2):
            raise UserError(f"n_max {self.n_max} is less than n_min {self.n_min or 2}")

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        if not request.seen:
            least = self._least(request.group_size)
            count = [least] * len(request.stream)
            return Plan(request.stream, count, again=least < request.group_size)
        prompts, counts = [g.prompt for g in request.seen], [len(g.rewards) for g in request.seen]
        left = request.group_size * len(prompts) - sum(counts)
        rounds_left = max(self.rounds - request.round, 1)
        given = grant_rollouts(
            counts,
            [reward_std(group.rewards) for group in request.seen],
            budget=-(-left // rounds_left),
            alpha=self.alpha,
            explore=self.explore,
            most=self._most(request.group_size),
            at_once=self.per_round,
        )
        return Plan(prompts, given, again=rounds_left > 1 and sum(given) < left and sum(given) > 0)

    def most(self, prompts: int, group_size: int) -> tuple[int, int]:
        return prompts * group_size, min(self._most(group_size), prompts * group_size)

    def _least(self, group_size: int) -> int:
        return min(self.n_min or max(group_size // 2, 2), group_size)

    def _most(self, group_size: int) -> int:
        return max(self.n_max or 4 * self._least(group_size), self._least(group_size))


@register("sampler", "self_curation", paper="2510.02230", needs=("rounds", "fewer"))
@dataclass(frozen=True, kw_only=True)
class SelfCuration(Sampler):
    """Trains on the prompts that greedy decoding fails (SELF): one greedy rollout each, then group_size rollouts for
    the prompts whose greedy value is not `solved_value`.

    A step has at most prompts_per_step prompts, and fewer if some are solved; if all are solved, the next prompts of
    the uniform order are tried. metric: the value of a greedy rollout. at_least: values above solved_value count as
    solved too. divisor: prompts are repeated from the front, as separate groups, until their number is a multiple of
    it.
    """

    solved_value: float = 1.0
    metric: Literal["correct", "reward"] = "correct"
    at_least: bool = False
    divisor: int = 1

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        if not request.seen:
            return Plan(request.stream, [1] * len(request.stream), again=True, measure=True)
        values = [group.correct[0] if self.metric == "correct" else group.rewards[0] for group in request.seen]
        _, padded = find_greedy_failures(
            values, solved_value=self.solved_value, divisor=self.divisor, at_least=self.at_least
        )
        prompts = [request.seen[n].prompt for n in padded][: request.prompts]
        return Plan(prompts, [request.group_size] * len(prompts))

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        tried = [group for group in groups if group.measured]
        values = [group.correct[0] if self.metric == "correct" else group.rewards[0] for group in tried]
        kept, _ = find_greedy_failures(values, solved_value=self.solved_value, at_least=self.at_least)
        return {"tried": len(tried), "solved": len(tried) - len(kept)}

    def metrics(self, state: State) -> dict[str, float]:
        return {"greedy_solved": state["solved"] / state["tried"]} if state.get("tried") else {}
