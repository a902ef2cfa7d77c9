"""Rollouts that go on across a weight sync.

A sync that finds requests under way pauses them: what they sampled is kept, with its log-probs and the version that
sampled it, the weights are replaced, and the rest is asked for as the continuation of prompt and kept tokens. The new
weights read all of that anew, so each token's log-prob is that of the version that sampled it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.rollout.engine import Completion
from posttrain.seeds import derive

if TYPE_CHECKING:
    from posttrain.rollout.pushed import Done, Request

POLL_S = 0.05  # between two pauses: one may arrive before what it is to pause

Ask = Callable[["Sequence[Request]", int, "Done | None"], list[list[Completion]]]  # requests, seed, done


class Gate:
    """Rounds of generation and syncs take turns. A sync does not wait for the end of a round: it asks for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generating = False
        self._syncing = False

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Around a round, which begins when no sync is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._syncing)
            self._generating = True
        try:
            yield
        finally:
            with self._changed:
                self._generating = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def syncing(self, pause: Callable[[], object]) -> Iterator[None]:
        """Inside, nothing is generated. pause: has the round that is under way end with what it has."""
        with self._changed:
            self._syncing = True
        try:
            while self._busy():
                pause()
            yield
        finally:
            with self._changed:
                self._syncing = False
                self._changed.notify_all()

    def _busy(self) -> bool:
        with self._changed:
            return not self._changed.wait_for(lambda: not self._generating, POLL_S)


@dataclass(frozen=True)
class Asked:
    """A request of one round: for all samples of the request at `place`, or for what one of them lacks."""

    place: int
    samples: tuple[int, ...]
    request: Request


class Kept:
    """What the samples of each request have so far."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.samples: list[list[Completion | None]] = [[None] * r.n for r in requests]

    def add(self, asked: Asked, found: Sequence[Completion], version: int) -> list[Completion] | None:
        """Add what a round gave. The samples of that request, once all are finished."""
        mine = self.samples[asked.place]
        for sample, new in zip(asked.samples, found, strict=True):
            mine[sample] = joined(mine[sample], new, version)
        whole = [c for c in mine if c is not None and c.finish != "paused"]
        return whole if len(whole) == len(mine) else None

    def rest(self) -> list[Asked]:
        """What the paused samples lack. A sample draws by its place among all samples of the call."""
        found = []
        for place, request in enumerate(self.requests):
            for sample, c in enumerate(self.samples[place]):
                if c is not None and c.finish == "paused":
                    number = request.number * request.n + sample
                    left = dataclasses.replace(
                        request,
                        number=number,
                        ids=request.ids + c.ids,
                        n=1,
                        max_new_tokens=request.max_new_tokens - len(c.ids),
                    )
                    found.append(Asked(place, (sample,), left))
        return found


def joined(before: Completion | None, new: Completion, version: int) -> Completion:
    """`before`, continued by `new`, which `version` sampled. Tokens and log-probs stay as they were sampled."""
    versions = (version,) * len(new.ids)
    if before is None:
        return dataclasses.replace(new, versions=versions)
    logps = None if before.logps is None or new.logps is None else before.logps + new.logps
    return Completion(before.ids + new.ids, logps, new.finish, (before.versions or ()) + versions)


def complete(
    ask: Ask, gate: Gate, version: Callable[[], int], requests: Sequence[Request], *, seed: int, done: Done | None
) -> list[list[Completion]]:
    """The finished samples of each request, in one round and one more for each pause. `done` is told whole requests."""
    kept = Kept(requests)
    asked = [Asked(place, tuple(range(r.n)), r) for place, r in enumerate(requests)]
    rounds = 0
    while asked:
        _one_round(ask, gate, version, kept, asked, seed, done)
        rounds += 1
        seed = derive(seed, "continued", rounds)
        asked = [
            dataclasses.replace(a, request=dataclasses.replace(a.request, seed=seed + a.request.number))
            for a in kept.rest()
        ]
    return [[c for c in samples if c is not None] for samples in kept.samples]


def _one_round(
    ask: Ask, gate: Gate, version: Callable[[], int], kept: Kept, asked: list[Asked], seed: int, done: Done | None
) -> None:
    told: set[int] = set()
    with gate.generating():
        sampling_version = version()

        def heard(at: int, samples: list[Completion]) -> None:
            told.add(at)
            whole = kept.add(asked[at], samples, sampling_version)
            if whole is not None and done is not None:
                done(asked[at].place, whole)

        found = ask([a.request for a in asked], seed, None if done is None else heard)
    for at, samples in enumerate(found):
        if at not in told:
            kept.add(asked[at], samples, sampling_version)
