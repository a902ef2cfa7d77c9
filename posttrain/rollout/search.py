"""Step-wise decoding: several traces of a prompt grow a step at a time, a judge scores each step, the best go on.

The search of Process Reward Agents (arXiv 2604.09482) with a frozen policy. The judge is whatever scores a trace so
far, e.g. a reward model. Retrieval, the agent's second reading, is not here: nothing in posttrain retrieves.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from posttrain.batch import Prompt, Rollout
from posttrain.recipe.eval_sections import Search
from posttrain.recipe.rollout_sections import Sampling
from posttrain.rollout.engine import Completion, Engine, as_rollouts
from posttrain.seeds import derive

Judge = Callable[[Sequence[Rollout]], Sequence[float]]


class Beam(NamedTuple):
    """Flat indices i * branch + j of the candidates that stay, best first, and their cumulative rewards."""

    kept: list[int]
    cumulative: list[float]


def beam_step(
    cumulative: Sequence[float],
    step_rewards: Sequence[Sequence[float]],
    *,
    beam: int,
    finished: Sequence[bool] | None = None,
) -> Beam:
    """The best `beam` of all next steps. cumulative [B] of the traces; step_rewards [B][b] of their next steps.

    A finished trace i competes unchanged, as one candidate of index i * b. Ties keep the lower index; where there are
    fewer candidates, all stay.
    """
    branch = max((len(row) for row in step_rewards), default=0)
    candidates: list[tuple[float, int]] = []
    for i, (total, rewards) in enumerate(zip(cumulative, step_rewards, strict=True)):
        if finished is not None and finished[i]:
            candidates.append((total, i * branch))
        else:
            candidates += [(total + reward, i * branch + j) for j, reward in enumerate(rewards)]
    best = sorted(candidates, key=lambda one: (-one[0], one[1]))[:beam]
    return Beam([index for _, index in best], [total for total, _ in best])


class StepLabels(NamedTuple):
    """What a teacher says of N steps: `reasoning`, it is right given the evidence; `search`, the evidence mattered."""

    reasoning: list[int]
    shift: list[float]
    threshold: float | None
    search: list[int]


def step_labels(
    logp1: Sequence[float], logp0: Sequence[float], logp1_doc: Sequence[float], logp0_doc: Sequence[float]
) -> StepLabels:
    """Labels for training a process reward agent, from log-probs of `1` and `0` without and with a document [N].

    Margins m = logp1 - logp0. reasoning: the margin with the document is above 0. search: its shift is, in size, above
    the median shift.
    """
    bare = [a - b for a, b in zip(logp1, logp0, strict=True)]
    informed = [a - b for a, b in zip(logp1_doc, logp0_doc, strict=True)]
    shift = [a - b for a, b in zip(bare, informed, strict=True)]
    threshold = statistics.median(map(abs, shift)) if shift else None
    return StepLabels(
        [int(margin > 0) for margin in informed],
        shift,
        threshold,
        [int(threshold is not None and abs(s) > threshold) for s in shift],
    )


@dataclass
class Trace:
    """A completion that grows. `reward` is the sum of its steps' rewards."""

    prompt: int
    ids: tuple[int, ...] = ()
    reward: float = 0.0
    steps: int = 0
    finish: str = ""  # "" while it grows

    def score(self, *, mean: bool) -> float:
        return self.reward / max(self.steps, 1) if mean else self.reward


class SearchEngine:
    """An Engine around another: one completion a prompt, the best trace that the search finds. It is never synced."""

    def __init__(
        self, engine: Engine, settings: Search, judge: Judge, tokenizer: Any, eos_ids: Sequence[int], sampling: Sampling
    ) -> None:
        self.engine, self.settings, self.judge = engine, settings, judge
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self.window = engine.window
        room = min(settings.step_tokens, sampling.max_new_tokens)
        self.step_sampling = sampling.model_copy(update={"stop": list(settings.ends), "max_new_tokens": room})

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        *,
        seed: int,
        first_group: int = 0,
        logprobs: bool | int = True,
        share: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """`Engine.generate` for n = 1. A trace ends with EOS, at `max_new_tokens`, or after `max_steps`."""
        if n != 1 or share is not None or logprobs:
            raise ValueError("a search gives one completion a prompt, without log-probs, in one process")
        beams = [[Trace(number)] for number in range(len(prompts))]
        for step in range(self.settings.max_steps):
            growing = [trace for beam in beams for trace in beam if not trace.finish]
            if not growing:
                break
            grown = self._grow(prompts, growing, sampling, derive(seed, "step", step))
            beams = [self._kept(beam, grown) for beam in beams]
        best = [max(beam, key=lambda t: t.score(mean=self.settings.mean)) for beam in beams]
        ends = [Completion(t.ids, None, "stop" if t.finish == "stop" else "length") for t in best]
        found = as_rollouts(prompts, 1, ends, self.tokenizer, first_group=first_group, version=0)
        for rollout, trace in zip(found, best, strict=True):
            rollout.scores = {"search/reward": trace.score(mean=self.settings.mean), "search/steps": float(trace.steps)}
        return found

    def _grow(
        self, prompts: Sequence[Prompt], growing: Sequence[Trace], sampling: Sampling, seed: int
    ) -> dict[int, list[Trace]]:
        """id of a trace -> what it may become, each with the reward of its new step added."""
        branch = self.settings.branch
        asked = [_continued(prompts[t.prompt], t) for t in growing]
        limits = [min(self.step_sampling.max_new_tokens, sampling.max_new_tokens - len(t.ids)) for t in growing]
        sampled = self.engine.generate(asked, branch, self.step_sampling, seed=seed, logprobs=False, limits=limits)
        made = [self._after(growing[number // branch], r, sampling) for number, r in enumerate(sampled)]
        ends = [Completion(t.ids, None, "stop" if t.finish == "stop" else "length") for t in made]
        owners = [prompts[t.prompt] for t in made]
        rewards = self.judge(as_rollouts(owners, 1, ends, self.tokenizer, first_group=0, version=0))
        for trace, reward in zip(made, rewards, strict=True):
            trace.reward += reward
        return {id(t): made[n * branch : (n + 1) * branch] for n, t in enumerate(growing)}

    def _after(self, trace: Trace, sampled: Rollout, sampling: Sampling) -> Trace:
        ids = (*trace.ids, *sampled.ids)[: sampling.max_new_tokens]
        ended = "stop" if ids[-1] in self.eos_ids else "length" if len(ids) >= sampling.max_new_tokens else ""
        return dataclasses.replace(trace, ids=ids, steps=trace.steps + 1, finish=ended)

    def _kept(self, beam: list[Trace], grown: dict[int, list[Trace]]) -> list[Trace]:
        """The next beam: `beam_step` over this one's traces and what they may become."""
        branch, mean = self.settings.branch, self.settings.mean
        following = [grown.get(id(trace), [trace]) for trace in beam]
        finished = [id(trace) not in grown for trace in beam]
        totals = [trace.score(mean=mean) for trace in beam]
        gains = [
            [t.score(mean=mean) - total for t in [*new, *[new[0]] * (branch - len(new))]]
            for total, new in zip(totals, following, strict=True)
        ]
        chosen = beam_step(totals, gains, beam=self.settings.beam, finished=finished)
        return [following[index // branch][index % branch] for index in chosen.kept]

    def close(self) -> None:
        self.engine.close()


def _continued(prompt: Prompt, trace: Trace) -> Prompt:
    """A prompt with the trace so far behind it; its row, which the judge reads, stays."""
    return dataclasses.replace(prompt, ids=(*prompt.ids, *trace.ids))
