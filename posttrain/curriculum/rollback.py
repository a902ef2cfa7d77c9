"""TACO: sets prompts with a high KL aside for some steps, and trains each epoch on the middle of the rewards
(arXiv 2505.20777)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from posttrain.curriculum.difficulty import select_middle
from posttrain.curriculum.protocol import Group, Plan, Pool, Request, Sampler, State
from posttrain.registry import register
from posttrain.seeds import derive


class Rollback(NamedTuple):
    """Which groups are clean, the uids that are set aside, and the uids that return."""

    clean: list[bool]
    buffer: list[str]
    reintroduced: list[str]


def set_aside(
    kl: Sequence[float], uids: Sequence[str], buffer: Sequence[str], *, threshold: float, interval: int, step: int
) -> Rollback:
    """Set aside, each once, the prompts whose mean token KL is above the threshold (equal is clean).

    In every `interval`-th step except step 0, the whole buffer returns first and is emptied.
    """
    clean = [value <= threshold for value in kl]
    returns = step > 0 and step % interval == 0
    left = [] if returns else list(buffer)
    dirty = [uid for uid, ok in zip(uids, clean, strict=True) if not ok]
    return Rollback(clean, list(dict.fromkeys([*left, *dirty])), list(buffer) if returns else [])


@register(
    "sampler",
    "taco",
    paper="2505.20777",
    needs=("group_kl",),
    note=(
        "Read from summaries of the paper: the rule of the threshold, z, ema and the percentiles are guesses. Needs"
        " `keep: kl_rollback`, which takes the groups out of the step."
    ),
)
@dataclass(frozen=True, kw_only=True)
class Taco(Sampler):
    """Removes prompts with a mean token KL to the reference above the threshold from the step (`keep: kl_rollback`) and
    buffers them; every `interval` steps all buffered prompts are drawn again, before others.

    threshold: null = mean + z * std of a moving average (ema) of the groups' KL; no prompt is set aside before the
    first KL is known. An epoch draws each prompt of the pool once, in an order that differs by epoch. With `band`, the
    next epoch's pool has the prompts whose mean reward lies between the quantiles low and high (ties may leave as a
    block; ranks decide if fewer than min_keep would stay). Replacement prompts that `rollout.max_gen_batches` draws
    come from the uniform order.
    """

    threshold: float | None = None
    z: float = 2.0
    ema: float = 0.1
    interval: int = 100
    band: bool = True
    low: float = 0.25
    high: float = 0.75
    min_keep: int = 1

    def start(self, pool: Pool) -> State:
        first: State = {"kl_mean": None, "kl_var": 0.0, "kl_threshold": self.threshold, "buffer": [], "rewards": {}}
        everything = list(range(len(pool)))
        return {**first, "queue": _shuffle(everything, pool, 0), "from": 0, "pool": everything, "epoch": 0}

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        if request.taken:
            return Plan(request.stream, [request.group_size] * len(request.stream))
        first = (request.step - state["from"]) * request.prompts
        prompts = state["queue"][first : first + request.prompts]
        # Steps beyond the end of the epoch may be planned before the next epoch's pool is known.
        next_epoch = _shuffle(state["pool"], pool, state["epoch"] + 1)
        prompts += [next_epoch[(first + n) % len(next_epoch)] for n in range(len(prompts), request.prompts)]
        return Plan(prompts, [request.group_size] * len(prompts))

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        known = [group for group in groups if group.kl is not None]
        used = state["kl_threshold"]
        found = set_aside(
            [group.kl or 0.0 for group in known],
            [group.uid for group in known],
            state["buffer"],
            threshold=math.inf if used is None else used,
            interval=self.interval,
            step=step + 1,
        )
        rewards = {**state["rewards"], **{g.uid: r for g in groups if (r := g.mean_reward) is not None}}
        new = {**state, **self._update_averages(state, known), "buffer": found.buffer, "rewards": rewards}
        return self._schedule_next(new, found.reintroduced, pool, planned)

    def metrics(self, state: State) -> dict[str, float]:
        known = {} if state["kl_threshold"] is None else {"kl_threshold": state["kl_threshold"]}
        return {"set_aside": len(state["buffer"]), "pool": len(state["pool"]), **known}

    def _update_averages(self, state: State, known: Sequence[Group]) -> State:
        """Return the moving mean and variance of the groups' KL, and the threshold derived from them."""
        mean, variance = state["kl_mean"], state["kl_var"]
        for group in known:
            assert group.kl is not None
            if mean is None:
                mean = group.kl
                continue
            gap = group.kl - mean
            mean += self.ema * gap
            variance = (1 - self.ema) * (variance + self.ema * gap * gap)
        if self.threshold is not None or mean is None:
            return {"kl_mean": mean, "kl_var": variance}
        return {"kl_mean": mean, "kl_var": variance, "kl_threshold": mean + self.z * math.sqrt(variance)}

    def _schedule_next(self, state: State, returned: Sequence[str], pool: Pool, planned: int) -> State:
        """Return the state with returning prompts at the head of the queue, and a new epoch if the queue is used up."""
        numbers = {uid: n for n, uid in enumerate(pool.uids)}
        back = [numbers[uid] for uid in returned if uid in numbers]
        left = state["queue"][(planned - state["from"]) * pool.prompts_per_step :]
        if left:
            return {**state, "queue": [*back, *left], "from": planned} if back else state
        now = state["pool"]
        if self.band:
            seen = [n for n in range(len(pool)) if pool.uids[n] in state["rewards"]]
            stay = select_middle([state["rewards"][pool.uids[n]] for n in seen], self.low, self.high, self.min_keep)
            now = [n for n, ok in zip(seen, stay, strict=True) if ok] or now
        aside = {numbers[uid] for uid in state["buffer"] if uid in numbers}
        epoch = state["epoch"] + 1
        order = _shuffle([n for n in now if n not in aside] or now, pool, epoch)
        return {**state, "queue": [*back, *order], "from": planned, "pool": now, "epoch": epoch, "rewards": {}}


def _shuffle(numbers: Sequence[int], pool: Pool, epoch: int) -> list[int]:
    order = list(numbers)
    random.Random(derive(pool.seed, "taco", epoch)).shuffle(order)
    return order
