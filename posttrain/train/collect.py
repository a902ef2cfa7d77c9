"""The rollouts of one RL step: prompts -> rollouts -> scores -> groups kept, refilled until there are enough.

Each rank samples and scores its share of the prompts, then all ranks exchange their scored rollouts. A rank that fails
sends its error in place of its rollouts. So no rank waits for it, and all can save what they have
(`emergency_checkpoint`).
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from posttrain.batch import Prompt, Rollout, RolloutBatch
from posttrain.curriculum.protocol import Group, Plan
from posttrain.errors import RunError, count_noun
from posttrain.recipe.reward_checks import reward_name
from posttrain.rollout.continuation import generate_shaped
from posttrain.seeds import derive
from posttrain.train import checkpoint
from posttrain.train.collate import answer_extractors, rollout_batch
from posttrain.train.context import TrainContext
from posttrain.train.dynamic_sampling import DynamicSamplingBuffer
from posttrain.train.given import solution_rows
from posttrain.train.opponent import Opponent
from posttrain.train.policy import prompt_states
from posttrain.train.prompt_sampler import MOST_REQUESTS, groups_of
from posttrain.train.rl_metrics import sample_records
from posttrain.train.scoring import score_while_sampling, throughput
from posttrain.train.variants import APART, sample_in_rounds
from posttrain.verify.failures import Calls, Failures, combine_calls

WATCHED = 4  # prompts a generation whose engine log-probs are kept for the mismatch metrics, if no component reads all


class PromptStream:
    """The places of the endless stream of prompts, each handed out once, to any thread."""

    def __init__(self, position: int) -> None:
        self._position, self._lock = position, threading.Lock()

    def claim(self, count: int) -> int:
        """The first of the next `count` places."""
        with self._lock:
            start, self._position = self._position, self._position + count
        return start


@dataclass
class StepRollouts:
    """The scored rollouts of one step."""

    step: int  # that trains on them, from 0
    rollouts: list[Rollout]
    metrics: dict[str, Any]  # of their rewards and generation rounds
    calls: list[Calls]  # of their rewards, one entry a generation round
    position: int  # prompts taken from the stream until then, theirs included
    groups: list[Group] = field(default_factory=list)  # what was sampled, with what `keep` dropped and measurements
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, if they were collected beside the training


def collect(
    ctx: TrainContext, state: checkpoint.State, stream: PromptStream, on_generated: Callable[[], object] = lambda: None
) -> StepRollouts:
    """Sample and score the rollouts of step `state.step`. With `keep` and max_gen_batches > 1, dropped groups are
    replaced by new prompts.

    on_generated: called once the engine is certain not to be needed again, which may be before the scores are there.
    Raises RunError if too many calls of a reward have failed, in these and in those of `state.calls`.
    """
    settings = ctx.recipe.rollout
    metrics: dict[str, Any] = {}
    buffer = ctx.objective.sampling_buffer(settings.prompts_per_step, settings.max_gen_batches)
    failures = ctx.scorer.failures(history=state.calls)
    rollouts: list[Rollout] = []
    calls: list[Calls] = []
    groups: list[Group] = []
    replaced = 0  # sampled tokens of groups that `keep` has dropped for others
    for refused in itertools.count():
        start = ctx.ranks.broadcast(stream.claim(ctx.sampler.places(settings)))
        fresh, sampled, made = sample_groups(ctx, state, start, groups, buffer, metrics, failures, on_generated)
        groups, calls = groups + sampled, calls + made
        if not fresh:
            check_patience(ctx, refused)
            continue
        kept = ctx.ranks.gather_or_raise(ctx.ranks.capture(select_groups, ctx, state, buffer, fresh))[0]
        rollouts += [r for r in fresh if r.group in kept]
        replaced += sum(len(r.sampled) for r in fresh if r.group not in kept)
        if buffer.full:
            break
    metrics = throughput(ctx.ranks.total(metrics), ctx.ranks.count)
    metrics["rollout/gen_batches"] = buffer.batches
    if replaced:
        metrics["rollout/replaced_tokens"] = replaced
    return StepRollouts(state.step, rollouts, metrics, calls, start + ctx.sampler.places(settings), groups)


def sample_groups(
    ctx: TrainContext,
    state: checkpoint.State,
    start: int,
    before: Sequence[Group],
    buffer: DynamicSamplingBuffer,
    metrics: dict[str, Any],
    failures: Failures,
    on_generated: Callable[[], object],
) -> tuple[list[Rollout], list[Group], list[Calls]]:
    """The scored rollouts of all ranks for one request to the prompt sampler, its groups, and the calls that scored
    them. A sampler that asks for another round sees the rewards of the one before. start: the request's place in the
    uniform order. before: the step's groups so far. No rollouts where the sampler names no prompts."""
    settings, first_group = ctx.recipe.rollout, buffer.batches * ctx.recipe.rollout.prompts_per_step
    taken = list(dict.fromkeys(group.prompt for group in before if not group.measured))
    values = predicted_values(ctx, start)
    rollouts: list[Rollout] = []
    measured: list[Group] = []
    seen: list[Group] = []
    calls: list[Calls] = []
    for number in itertools.count():
        plan = ctx.sampler.propose(
            state.sampler, state.step, settings, start, round_=number, taken=taken, seen=seen, values=values
        )
        round_ = (start, number) if number or plan.measure else ()
        mine = ctx.ranks.capture(sample_share, ctx, state, plan, buffer, metrics, on_generated, round_)
        with ctx.watchdog.phase("gather"):  # which waits for the slowest rank
            found = ctx.ranks.gather_or_raise(mine)
        fresh = sorted(itertools.chain(*(share.rollouts for share in found)), key=lambda r: r.group)
        calls += ctx.ranks.run(count_calls, failures, [one for share in found for one in share.calls])
        seen = groups_of(plan, fresh, ctx.sampler.pool, first_group, seen)
        if plan.measure:
            measured += seen
        else:
            rollouts += fresh
        if not plan.again:
            break
    return sorted(rollouts, key=lambda r: r.group), [*measured, *([] if plan.measure else seen)], calls


def predicted_values(ctx: TrainContext, start: int) -> list[float]:
    """What the value head predicts for the prompts of a request, for samplers that read it."""
    if ctx.values is None:
        return []
    with ctx.watchdog.phase("values"), ctx.compiled():
        candidates = ctx.sampler.candidates(start, ctx.recipe.rollout)
        return ctx.values.predict(candidates, prompt_states(ctx, [ctx.prompts[n].ids for n in candidates]))


def check_patience(ctx: TrainContext, refused: int) -> None:
    """Raises RunError where the sampler has named no prompts too often in a row."""
    if refused + 1 >= MOST_REQUESTS:
        raise RunError(
            f"sampler `{ctx.sampler.name}` names no prompts in {count_noun(MOST_REQUESTS, 'request')} in a row",
            hint="use harder prompts: where it leaves out what the model solves, nothing may be left",
        )


@dataclass(frozen=True)
class Share:
    """The scored rollouts of one rank, and the calls that scored them."""

    rollouts: list[Rollout]
    calls: list[Calls]


def sample_share(
    ctx: TrainContext,
    state: checkpoint.State,
    plan: Plan,
    buffer: DynamicSamplingBuffer,
    metrics: dict[str, Any],
    on_generated: Callable[[], object],
    round_: Sequence[int] = (),
) -> Share:
    """This rank's scored rollouts of its share of the plan's prompts. Adds counts to `metrics`; talks to no other rank.

    round_: what tells the seeds of a further round from those of the first.
    """
    prompts, calls = [ctx.prompts[i] for i in plan.prompts], list[Calls]()
    batches = buffer.batches  # how often the step has drawn prompts before
    first_group = batches * ctx.recipe.rollout.prompts_per_step
    seed = derive(ctx.recipe.run.seed, "rollout", state.step, batches, *round_)
    share, last = ctx.ranks.my_share(len(prompts)), not (buffer.refills or plan.again)
    sample = partial(sample_prompts, ctx, state.step, metrics, calls, plan, first_group=first_group)
    if ctx.variants is None or plan.measure:
        fresh = sample(prompts, seed=seed, share=share, on_generated=on_generated if last else None)
    else:
        memory = state.memory.get(ctx.variants.name)
        fresh = sample_in_rounds(
            ctx.variants, prompts, share, sample, step=state.step, seed=seed, memory=memory, first_group=first_group
        )
        if last:
            on_generated()
    if ctx.recipe.solutions is not None and ctx.recipe.solutions.in_group and not plan.measure:
        given, scored = solution_rows(ctx, state.step, fresh, metrics)
        fresh, calls = [*fresh, *given], [*calls, *scored]
    if plan.bins:
        for rollout in fresh:
            rollout.bin = plan.bins[rollout.group % APART - first_group]
    if ctx.opponent is not None:
        calls += play(ctx, state, plan.prompts, fresh, ctx.opponent, first_group=first_group)
    return Share(fresh, calls)


def sample_prompts(
    ctx: TrainContext,
    step: int,
    metrics: dict[str, Any],
    calls: list[Calls],
    plan: Plan,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    share: Sequence[int],
    first_group: int,
    finish: Callable[[Rollout, int], None] | None = None,
    on_generated: Callable[[], object] | None = None,
) -> list[Rollout]:
    """Rollouts of prompts[share], scored: of each as many as the plan says, which takes one call of the engine for each
    size of a group. Adds counts to `metrics` and the calls of the rewards to `calls`.

    finish: changes a rollout, given its prompt's place in `prompts`, before it is scored.
    """

    def finish_rollouts(rollouts: list[Rollout]) -> list[Rollout]:
        for rollout in rollouts:
            if finish is not None and rollout.variant is None:  # the engine may have told of it before it returns it
                finish(rollout, rollout.group - first_group)
        return rollouts

    settings = ctx.recipe.rollout.model_copy(update={"temperature": 0.0} if plan.measure else {})
    fresh: list[Rollout] = []
    with ctx.watchdog.phase("rollout"), score_while_sampling(ctx, step) as scored:
        on_complete = scored.on_complete
        for size in sorted({count for count in plan.rollouts if count}):
            how: dict[str, Any] = {
                "seed": seed if size == settings.group_size else derive(seed, "size", size),
                "first_group": first_group,
                "logprobs": "rollout_logp" in ctx.objective.needs
                or ctx.replay is not None
                or (ctx.shape is not None and ctx.shape.reads_logps)
                or WATCHED,
                "share": [place for place in share if plan.rollouts[place] == size],
            }
            if ctx.shape is not None and not plan.measure:
                how |= {"apart": APART, "grade": scored.grade, "metrics": metrics}
                fresh += generate_shaped(ctx.engine, ctx.shape, prompts, size, settings, **how)
                continue
            done = None if on_complete is None else lambda rollouts: on_complete(finish_rollouts(rollouts))
            fresh += ctx.engine.generate(prompts, size, settings, done=done, **how)
        fresh = sorted(finish_rollouts(fresh), key=lambda r: r.group)
        if on_generated is not None:
            on_generated()
    with ctx.watchdog.phase("score"):
        if to_score := [rollout for rollout in fresh if rollout.scored]:  # a rank without a share has none
            calls.append(scored.finish(to_score, metrics))
    return fresh


def count_calls(failures: Failures, calls: Sequence[Calls]) -> list[Calls]:
    """The calls of all ranks as one entry, counted in `failures`. Raises RunError if too many have failed."""
    if not calls:
        return []
    failures.add(combine_calls(calls))
    return [combine_calls(calls)]


def select_groups(
    ctx: TrainContext, state: checkpoint.State, buffer: DynamicSamplingBuffer, fresh: Sequence[Rollout]
) -> set[int]:
    """The numbers of those freshly drawn groups that stay in the step."""
    if not buffer.refills:
        return buffer.take(r.group for r in fresh)
    try:
        return buffer.add(batch_of(ctx, fresh, state))
    except RunError as error:
        raise with_samples(ctx, error, fresh, state.step) from None


def with_samples(ctx: TrainContext, error: RunError, rollouts: Sequence[Rollout], step: int) -> RunError:
    """The error of a step that ends before it writes samples, with a hint to a file of samples written here."""
    if not ctx.recipe.run.samples_per_step:
        return error
    path = ctx.dump / f"step-{step + 1}.jsonl"
    if ctx.ranks.is_main:
        ctx.dump.mkdir(parents=True, exist_ok=True)
        records = sample_records(rollouts, ctx.recipe.run.samples_per_step)
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    with_hint = [replace(problem, hint=f"read samples in {path}; {problem.hint}") for problem in error.problems]
    return RunError.of(with_hint)


def play(
    ctx: TrainContext,
    state: checkpoint.State,
    drawn: Sequence[int],
    fresh: list[Rollout],
    opponent: Opponent,
    first_group: int,
) -> list[Calls]:
    """Have the opponent answer the prompts of the fresh rollouts, and leave the rewards of its answers with them.
    Returns the calls that scored them."""
    settings = ctx.recipe.rollout
    version = ctx.engine.version
    with ctx.watchdog.phase("opponent"), score_while_sampling(ctx, state.step) as scored:
        with opponent.in_place(ctx.loaded.model) as model:
            ctx.engine.sync(model, version)
            answers = ctx.engine.generate(
                [ctx.prompts[i] for i in drawn],
                ctx.recipe.opponent.samples if ctx.recipe.opponent else 1,
                settings,
                seed=derive(ctx.recipe.run.seed, "opponent", state.step, first_group),
                first_group=first_group,
                logprobs=False,
                share=ctx.ranks.my_share(len(drawn)),
            )
        ctx.engine.sync(ctx.loaded.model, version)
        calls = [scored.finish(answers, {})] if answers else []
    against: dict[int, list[float | None]] = {}
    for answer in answers:
        against.setdefault(answer.group, []).append(answer.reward)
    for rollout in fresh:
        rollout.against = tuple(against[rollout.group])
    return calls


def batch_of(ctx: TrainContext, rollouts: Sequence[Rollout], state: checkpoint.State) -> RolloutBatch:
    """The batch of scored rollouts, with the reward weights, the step, and the memory of components."""
    answers = answer_extractors(ctx.recipe.rewards) if "answer_ids" in ctx.objective.needs else None
    batch = rollout_batch(rollouts, answers, ctx.objective.needs, ctx.recipe.advantage.params.get("similarity"))
    weights = {reward_name(reward): reward.weight for reward in ctx.recipe.rewards}
    batch = batch.replace(sampler_state=state.sampler or {})
    return batch.replace(reward_weights=weights, step=state.step, total_steps=ctx.steps, memory=state.memory)
