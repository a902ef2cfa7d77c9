"""Stops a run when too many calls of a reward fail (raise or time out).

A rate over few calls is unreliable, so the failure rate is taken over the latest steps that together hold
WINDOW_PROMPTS prompts; until that many prompts were scored, the missing prompts count as successes. Prompts are counted
instead of calls because usually a row breaks a reward, and then all its completions fail together. A reward that fails
on 5% of its rows thus never comes near a limit of 10%.

A reward whose calls all fail stops the run sooner: in its first step, or later after DEAD_PROMPTS prompts in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from posttrain.errors import RunError, count_noun

WINDOW_PROMPTS = 400  # prompts; a true rate of half the limit exceeds it in about 1 of 100,000 windows (limit 0.1)
DEAD_PROMPTS = 4  # prompts


class Calls(NamedTuple):
    """Call counts of one batch of completions; every reward is called once per completion.

    errors, timeouts and first (message about the first failure; dropped with the next step) are indexed by reward name.
    """

    step: int
    prompts: int
    calls: int
    errors: dict[str, int]
    timeouts: dict[str, int]
    first: dict[str, str]

    def count_failures(self, name: str) -> int:
        return self.errors.get(name, 0) + self.timeouts.get(name, 0)


def combine_calls(parts: Iterable[Calls]) -> Calls:
    """Combine the call counts of several ranks in one step."""
    calls = list(parts)

    def sum_counts(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
        return {name: sum(c.get(name, 0) for c in counts) for name in dict.fromkeys(n for c in counts for n in c)}

    return Calls(
        step=max(p.step for p in calls),
        prompts=sum(p.prompts for p in calls),
        calls=sum(p.calls for p in calls),
        errors=sum_counts([p.errors for p in calls]),
        timeouts=sum_counts([p.timeouts for p in calls]),
        first={name: text for p in reversed(calls) for name, text in p.first.items()},
    )


class Failures:
    """Window of the latest calls of all rewards. `add` raises RunError when too many calls of a reward have failed.

    targets: location of each reward, by name. enough: prompts over which the rate is taken (at most WINDOW_PROMPTS).
    unit: name of a batch in messages. history: `history` of an earlier `Failures`, possibly read back from JSON.
    """

    def __init__(
        self,
        targets: Mapping[str, str],
        limit: float,
        *,
        enough: int = WINDOW_PROMPTS,
        unit: str = "step",
        history: Iterable[Sequence[object]] = (),
    ) -> None:
        self.targets, self.limit, self.unit = targets, limit, unit
        self.enough = min(enough, WINDOW_PROMPTS)
        self.history = [Calls._make(entry) for entry in history]

    def add(self, now: Calls) -> None:
        """Add the current calls, drop steps outside the window, and check each reward. Raises RunError."""
        earlier = [calls if calls.step == now.step else calls._replace(first={}) for calls in self.history]
        self.history, prompts = [*earlier, now], 0
        for index in reversed(range(len(self.history))):
            prompts += self.history[index].prompts
            if prompts >= self.enough:  # the fewest latest steps with enough prompts
                self.history = self.history[index:]
                break
        if any((*now.errors.values(), *now.timeouts.values())):
            for name in self.targets:
                if now.count_failures(name):
                    self._check(name, now)

    def _check(self, name: str, now: Calls) -> None:
        dead = _failing_tail(self.history, name)
        if self.limit < 1 and (dead == self.history or sum(c.prompts for c in dead) >= DEAD_PROMPTS):
            raise self._error(name, dead, now, "no call succeeded")
        prompts, calls = sum(c.prompts for c in self.history), sum(c.calls for c in self.history)
        failed = sum(c.count_failures(name) for c in self.history)
        if failed * prompts > self.limit * calls * max(prompts, self.enough):
            allowed = f"scoring.max_error_rate {self.limit:g}"
            why = f"more than {allowed}" if prompts >= self.enough else f"more than {allowed} of {self.enough} prompts"
            raise self._error(name, self.history, now, why)

    def _error(self, name: str, over: Sequence[Calls], now: Calls, why: str) -> RunError:
        errors, timeouts = sum(c.errors.get(name, 0) for c in over), sum(c.timeouts.get(name, 0) for c in over)
        calls, prompts = sum(c.calls for c in over), sum(c.prompts for c in over)
        steps = len({c.step for c in over})
        where = f"the last {count_noun(steps, self.unit)}" if steps > 1 else f"this {self.unit}"
        return RunError(
            f"reward {name}: {errors + timeouts} of {count_noun(calls, 'call')} failed in {where}"
            f" ({count_noun(errors, 'error')}, {count_noun(timeouts, 'time-out')}, {count_noun(prompts, 'prompt')}):"
            f" {why}",
            where=self.targets[name],
            allowed="\n  ".join(now.first.get(name, "").splitlines()),
            hint="try the reward with `posttrain reward test RECIPE`"
            if errors
            else "raise `timeout_s` of this reward or make it faster",
        )


def _failing_tail(history: Sequence[Calls], name: str) -> list[Calls]:
    """Return the latest entries in which every call of this reward failed."""
    alive = [index for index, entry in enumerate(history) if entry.count_failures(name) < entry.calls]
    return list(history[alive[-1] + 1 :] if alive else history)
