"""Group distributionally robust optimization over difficulty bins (arXiv 2601.19280): assigns prompts to bins, rollouts
to bins, and tracks the bin losses by which the factor `prompt_gdro` weights rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.curriculum.allocation import (
    allocate_by_variance,
    arm_probabilities,
    arms_between,
    budget_for,
    choose_arms,
    shadow_price,
    update_arm_scores,
)
from posttrain.curriculum.difficulty import add_counts, any_correct, assign_bin, estimate_pass_rate, windowed_mean
from posttrain.curriculum.protocol import Group, Plan, Pool, Request, Sampler, State
from posttrain.curriculum.selection import update_bin_losses
from posttrain.errors import UserError
from posttrain.registry import register


@register(
    "sampler",
    "gdro",
    paper="2601.19280",
    needs=("groups", "row_loss", "unequal"),
    note=(
        "The official code moves a prompt down by another edge, under which no downward move can reach its margin;"
        " the same edge holds for both ways here. Bins are those of the step's own prompts, where its trainer takes"
        " those of the step before. The mean number of rollouts is `rollout.group_size` (4 in the paper)."
    ),
)
@dataclass(frozen=True, kw_only=True)
class Gdro(Sampler):
    """Bins prompts by pass@k and allocates rollouts to bins under the budget prompts_per_step * group_size.

    Bins: a prompt's share of steps (its last `history_len`; 0 = all) with a correct answer, cut at `edges`; bin 0 is
    the hardest and holds unseen prompts. A prompt changes its bin when it passes the edge by `hysteresis`.
    exclude_extremes: shares of 0 and 1 are in bin -1.

    allocation `gdro`: each bin has scores for the arms n_min..n_max (null = 3 * group_size); the most likely choice
    that spends the budget is taken, and the score of a bin's arm changes by the mean loss of its rows (`mode`: sign of
    the code or of the paper), with a shadow price on rollouts (dual_lr). `variance`: rollouts minimize sum p (1-p) / n
    over prompts, p = a prompt's own pass rate (0.5 for unseen prompts), n = its rollouts. `uniform`: group_size each.

    `factors: [prompt_gdro]` weights rows by the moving average (ema_beta) of the loss of each bin.
    """

    edges: tuple[float, ...] = (0.4, 0.75)
    history_len: int = 50
    hysteresis: float = 0.03
    exclude_extremes: bool = False
    allocation: Literal["gdro", "variance", "uniform"] = "gdro"
    mode: Literal["code", "paper"] = "code"
    n_min: int = 2
    n_max: int | None = None
    eta: float = 0.65
    gamma: float = 0.01
    dual_lr: float = 0.05
    ema_beta: float = 0.12
    loss_norm_by_class: bool = False

    def __post_init__(self) -> None:
        if list(self.edges) != sorted(set(self.edges)) or not all(0 < edge < 1 for edge in self.edges):
            raise UserError(f"edges {list(self.edges)}", allowed="numbers between 0 and 1, rising")

    def start(self, pool: Pool) -> State:
        return {"history": {}, "bins": {}, "tallies": {}, "arms": {}, "mu": 0.0, "scores": {}}

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        uids = [pool.uids[n] for n in request.stream]
        bins = [self._bin(state, uid) for uid in uids]
        return Plan(request.stream, self._rollouts(state, uids, bins, request.group_size, pool), bins)

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        history, bins = dict(state["history"]), dict(state["bins"])
        for group in groups:
            if group.bin is not None and group.bin >= 0:
                bins[group.uid] = group.bin
        for group in groups:
            pushed = [*history.get(group.uid, []), any_correct(group.correct)]
            history[group.uid] = pushed[-self.history_len :] if self.history_len else pushed
        rows = [(g.bin, g.loss) for g in groups if g.bin is not None and g.loss is not None for _ in g.rewards]
        row_bins, row_losses = [number for number, _ in rows], [loss for _, loss in rows]
        scores = update_bin_losses(
            state["scores"],
            row_bins,
            row_losses,
            beta=self.ema_beta,
            by_share=self.loss_norm_by_class,
        )
        return {
            **state,
            "history": history,
            "bins": bins,
            "tallies": add_counts(state["tallies"], groups),
            "scores": scores,
            **self._after(state, groups, row_bins, row_losses, pool.group_size),
        }

    def metrics(self, state: State) -> dict[str, float]:
        scores = {f"bin_loss/{name}": value for name, value in state["scores"].items()}
        return {**scores, **({"shadow_price": state["mu"]} if self.allocation == "gdro" else {})}

    def most(self, prompts: int, group_size: int) -> tuple[int, int]:
        if self.allocation == "uniform":
            return prompts * group_size, group_size
        return prompts * group_size, self._largest(group_size)

    def _bin(self, state: State, uid: str) -> int:
        return assign_bin(
            windowed_mean(state["history"].get(uid, []), self.history_len),
            self.edges,
            previous=state["bins"].get(uid),
            hysteresis=self.hysteresis,
            exclude_extremes=self.exclude_extremes,
        )

    def _largest(self, group_size: int) -> int:
        return max(3 * group_size if self.n_max is None else self.n_max, group_size)

    def _smallest(self, group_size: int) -> int:
        return min(self.n_min, group_size)

    def _rollouts(
        self, state: State, uids: Sequence[str], bins: Sequence[int], group_size: int, pool: Pool
    ) -> Sequence[int]:
        """Return the number of rollouts of each prompt."""
        counts = {str(b): bins.count(b) for b in sorted(set(bins))}
        budget = budget_for(group_size, counts)
        least, most = self._smallest(pool.group_size), self._largest(pool.group_size)
        if self.allocation == "variance":
            rates = [estimate_pass_rate(state["tallies"], uid, 0.5) for uid in uids]
            return allocate_by_variance(rates, budget=budget, least=least, most=most)
        if self.allocation == "uniform" or not state["arms"]:  # no results yet: the mean for all
            return [group_size] * len(uids)
        arms = arms_between(least, most)
        scores = {name: state["arms"].get(name, [0.0] * len(arms)) for name in counts}
        likely = {name: arm_probabilities(scores[name], eta=self.eta, gamma=self.gamma) for name in counts}
        chosen = choose_arms(arms, likely, counts, budget)
        return [chosen[str(b)] for b in bins]

    def _after(
        self, state: State, groups: Sequence[Group], row_bins: Sequence[int], row_losses: Sequence[float], mean: int
    ) -> dict[str, Any]:
        """Return the arm scores and the shadow price after a step."""
        trained = [group for group in groups if not group.measured and group.bin is not None and group.rewards]
        if self.allocation != "gdro" or not trained:
            return {}
        losses: dict[str, float] = {
            str(b): _mean([loss for n, loss in zip(row_bins, row_losses, strict=True) if n == b])
            for b in sorted(set(row_bins))
        }
        chosen: Mapping[str, int] = {str(group.bin): len(group.rewards) for group in trained}
        arms = arms_between(self._smallest(mean), self._largest(mean))
        scores = {**{name: [0.0] * len(arms) for name in chosen}, **state["arms"]}
        counts = {name: sum(str(group.bin) == name for group in trained) for name in chosen}
        return {
            "arms": update_arm_scores(arms, scores, chosen, losses, mu=state["mu"], mean=mean, mode=self.mode),
            "mu": shadow_price(state["mu"], counts, chosen, mean=mean, dual_lr=self.dual_lr),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
