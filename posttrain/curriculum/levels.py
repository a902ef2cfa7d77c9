"""Samplers that adapt difficulty to the policy, for problems with a level: `task:NAME` and `gym:TASK` with `levels`."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.curriculum.dials import (
    Mode,
    check_retirement,
    environment_weight,
    mean_accuracy,
    next_difficulty,
    next_stage,
    propose_levels,
)
from posttrain.curriculum.protocol import Group, Plan, Pool, Request, Sampler, State
from posttrain.curriculum.selection import draw_weighted
from posttrain.errors import UserError
from posttrain.options import Column
from posttrain.registry import register


@register(
    "sampler",
    "next_level",
    paper="2505.16368",
    note=(
        "SATURN measures pass@3 on held-out problems every 250 steps and its threshold is not known; here the problems"
        " that are drawn are the measurement. SearchGym's numbers (threshold 0.7, a fifth from earlier levels) are"
        " guesses too."
    ),
)
@dataclass(frozen=True, kw_only=True)
class NextLevel(Sampler):
    """Trains one level at a time; the next level starts when pass@k over the newest `window` problems of the current
    level reaches `threshold` (SATURN, SearchGym).

    k: pass@k is estimated from the rollouts of a problem (k = all of them, if there are fewer). earlier: share of a
    step's problems that are drawn from completed levels. column: data column with the level.
    """

    threshold: float = 0.75
    k: int = 1
    window: int = 32
    earlier: float = 0.0
    column: Column = "level"

    def start(self, pool: Pool) -> State:
        if not 0 < self.threshold <= 1 or self.k < 1 or self.window < 1 or not 0 <= self.earlier < 1:
            raise UserError(
                f"threshold {self.threshold}, k {self.k}, window {self.window}, earlier {self.earlier}",
                allowed="a threshold in (0, 1], whole numbers of 1 or more, a share below 1",
            )
        group_by_level(pool, self.column)
        return {"stage": 0, "seen": []}

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        by_level = group_by_level(pool, self.column)
        order, stage, draw = sorted(by_level), int(state["stage"]), random.Random(request.seed)
        past = [n for level in order[:stage] for n in by_level[level]]
        count = round(self.earlier * request.prompts) if past else 0
        prompts = [
            *draw_new(by_level[order[stage]], request.prompts - count, request.taken, draw),
            *draw_new(past, count, request.taken, draw),
        ]
        return Plan(prompts, [request.group_size] * len(prompts))

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        order = sorted(group_by_level(pool, self.column))
        stage, seen = int(state["stage"]), list(state["seen"])
        rows = [group for group in groups if pool.rows[group.prompt][self.column] == order[stage]]
        seen = [*seen, *(rate for group in rows if (rate := estimate_pass_at_k(group, self.k)) is not None)]
        if len(seen) < self.window:
            return {"stage": stage, "seen": seen}
        rate = sum(seen[-self.window :]) / self.window
        after = next_stage(stage, rate, len(order), threshold=self.threshold)
        return {"stage": after, "seen": [] if after != stage else seen[-self.window :]}

    def metrics(self, state: State) -> dict[str, float]:
        seen = state["seen"]
        return {"stage": float(state["stage"]), **({"stage_pass": sum(seen) / len(seen)} if seen else {})}


@register(
    "sampler",
    "scaler",
    paper="2601.04809",
    note="Environments are the recipe's generators; their synthesis from programming problems is not offered.",
)
@dataclass(frozen=True, kw_only=True)
class Scaler(Sampler):
    """Adapts each environment's difficulty to its accuracy, and replaces environments that no longer teach (SCALER).

    A step draws the levels below and above the environment's difficulty d so that their mean is d. After the step d
    changes by gain * (accuracy - target), at most by cap; `mode` tanh is steeper near the target, the base modes use
    the plain mean of both levels. active: number of active environments; one is replaced by a random inactive one when
    its newest zero_limit accuracies are 0, its newest max_limit difficulties are the highest, or its difficulty did not
    increase over history_len steps. pick `weight`: no active set; environments are drawn by learning progress (over
    slope_scale) and time since last use (over age_scale steps), with factors alpha and beta. environment, level: data
    columns; levels of an environment are numbered from 0. A row's accuracy is its share of correct answers, or its mean
    reward if none was judged.
    """

    target: float = 0.5
    gain: float = 2.0
    cap: float = 1.0
    mode: Mode = "linear"
    active: int = 64
    pick: Literal["active", "weight"] = "active"
    history_len: int = 10
    zero_limit: int = 5
    max_limit: int = 5
    alpha: float = 1.0
    beta: float = 0.5
    slope_scale: float = 0.05
    age_scale: float = 10000
    environment: str = "task"
    level: Column = "level"

    def start(self, pool: Pool) -> State:
        if self.active < 1 or self.history_len < 2 or self.cap <= 0:
            raise UserError(f"active {self.active}, history_len {self.history_len}, cap {self.cap}")
        names = sorted(self._levels(pool))
        order = random.Random(f"scaler/{len(names)}")
        return {
            "active": sorted(order.sample(names, min(self.active, len(names)))),
            "d": dict.fromkeys(names, 0.0),
            "history": {name: [] for name in names},
            "last": {},
            "retired": 0,
        }

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        levels, draw = self._levels(pool), random.Random(request.seed)
        chosen = self._choose_environments(state, request, draw)
        prompts: list[int] = []
        for position, name in enumerate(chosen):
            count = request.prompts // len(chosen) + (position < request.prompts % len(chosen))
            for number, level_count in propose_levels(state["d"][name], count).items():
                problems = levels[name][sorted(levels[name])[number]]
                prompts += draw_new(problems, level_count, [*request.taken, *prompts], draw)
        draw.shuffle(prompts)
        return Plan(prompts, [request.group_size] * len(prompts))

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        levels = self._levels(pool)
        d, last = dict(state["d"]), dict(state["last"])
        history = {name: [list(entry) for entry in entries] for name, entries in state["history"].items()}
        for name, results in self._results(groups, pool, levels).items():
            near = {number: accuracy for number, accuracy in results.items() if abs(d[name] - number) < 1} or results
            apart = len(near) > 2 or any(abs(d[name] - number) >= 1 for number in near)  # rollouts of older steps
            before = d[name]
            d[name] = next_difficulty(
                before,
                near,
                target=self.target,
                k=self.gain,
                cap=self.cap,
                d_max=float(len(levels[name]) - 1),
                mode="base" if apart else self.mode,
            )
            history[name] = [*history[name], [before, mean_accuracy(near)]][-self.history_len :]
            last[name] = step
        after = {**state, "d": d, "history": history, "last": last}
        return after if self.pick == "weight" else self._swap_environments(after, levels, step)

    def metrics(self, state: State) -> dict[str, float]:
        values = [state["d"][name] for name in state["active"]]
        newest = [entries[-1][1] for entries in state["history"].values() if entries]
        return {
            "difficulty": sum(values) / len(values),
            "retired": float(state["retired"]),
            **({"accuracy": sum(newest) / len(newest)} if newest else {}),
        }

    def _levels(self, pool: Pool) -> dict[str, dict[int, list[int]]]:
        """Return environment -> level -> prompts."""
        levels: dict[str, dict[int, list[int]]] = {}
        for number, row in enumerate(pool.rows):
            name, level = row.get(self.environment), row.get(self.level)
            if name is None or not isinstance(level, int):
                raise UserError(
                    f"a row has no `{self.environment}` or no `{self.level}`",
                    hint="take rows of task:NAME, or of gym:TASK with params: {levels: [...]}",
                )
            levels.setdefault(str(name), {}).setdefault(level, []).append(number)
        return levels

    def _choose_environments(self, state: State, request: Request, draw: random.Random) -> list[str]:
        """Choose the environments of a step, at most one per prompt."""
        if self.pick == "active":
            names = list(state["active"])
            start = request.step * request.prompts % len(names)
            return [*names[start:], *names[:start]][: request.prompts]
        names = sorted(state["d"])
        weights = [
            environment_weight(
                [entry[0] for entry in state["history"][name]],
                request.step - state["last"][name] if name in state["last"] else None,
                alpha=self.alpha,
                beta=self.beta,
                slope_scale=self.slope_scale,
                age_scale=self.age_scale,
                history_len=self.history_len,
            )
            for name in names
        ]
        weights = weights if any(weights) else [1.0] * len(names)
        count = min(self.active, request.prompts, len(names))
        return [names[n] for n in draw_weighted(weights, count, draw.random)]

    def _results(
        self, groups: Sequence[Group], pool: Pool, levels: Mapping[str, Mapping[int, list[int]]]
    ) -> dict[str, dict[int, tuple[float, float]]]:
        """Return environment -> index of the level -> (accuracy, problems)."""
        sums: dict[str, dict[int, list[float]]] = {}
        for group in groups:
            row = pool.rows[group.prompt]
            reached = group.pass_rate if group.pass_rate is not None else group.mean_reward
            if reached is not None:
                name = str(row[self.environment])
                number = sorted(levels[name]).index(row[self.level])
                sums.setdefault(name, {}).setdefault(number, []).append(reached)
        return {
            name: {number: (sum(values) / len(values), float(len(values))) for number, values in by_level.items()}
            for name, by_level in sums.items()
        }

    def _swap_environments(self, state: State, levels: Mapping[str, Mapping[int, Any]], step: int) -> State:
        """Return the state with a random inactive environment in place of each active one that retires."""
        active, history, retired = list(state["active"]), dict(state["history"]), state["retired"]
        for slot, name in enumerate(active):
            others = sorted(set(levels) - set(active))
            entries = history[name]
            stopped = (
                entries
                and check_retirement(
                    [entry[0] for entry in entries],
                    [entry[1] for entry in entries],
                    history_len=self.history_len,
                    d_max=float(len(levels[name]) - 1),
                    zero_limit=self.zero_limit,
                    max_limit=self.max_limit,
                )["retire"]
            )
            if stopped and others and state["last"].get(name) == step:
                active[slot] = random.Random(f"scaler/{step}/{slot}").choice(others)
                history[name] = []
                retired += 1
        return {**state, "active": active, "history": history, "retired": retired}


def group_by_level(pool: Pool, column: str) -> dict[int, list[int]]:
    """Return level -> prompts of that level. Raises UserError for a row without a level."""
    rows_by_level: dict[int, list[int]] = {}
    for number, row in enumerate(pool.rows):
        if not isinstance(row.get(column), int):
            raise UserError(
                f"a row has no level in `{column}`",
                hint="take rows of task:NAME, or of gym:TASK with params: {levels: [...]}",
            )
        rows_by_level.setdefault(row[column], []).append(number)
    return rows_by_level


def draw_new(among: Sequence[int], count: int, taken: Sequence[int], draw: random.Random) -> list[int]:
    """Draw `count` of these prompts at random; prompts in `taken` are drawn only once all others are used up."""
    drawn: list[int] = []
    while among and len(drawn) < count:
        free = [n for n in among if n not in taken and n not in drawn] or list(among)
        drawn += draw.sample(free, min(count - len(drawn), len(free)))
    return drawn


def estimate_pass_at_k(group: Group, k: int) -> float | None:
    """Compute the unbiased pass@k of a group's judged rollouts (k at most their number); None if none was judged."""
    known = [value for value in group.correct if value is not None]
    if not known:
        return None
    k, wrong = min(k, len(known)), sum(not value for value in known)
    return 1 - math.comb(wrong, k) / math.comb(len(known), k)
