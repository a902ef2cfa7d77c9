"""Collection of one RL step's rollouts: prompts -> rollouts -> rewards -> filter, refilled until there are enough.

Each rank samples and scores its share of the prompts, then all ranks exchange their scored rollouts: per-row data only,
or everything (`TrainContext.keeps_tokens_apart`). A rank that fails sends its error instead of its rollouts, so no rank
waits for it, and all can save what is finished (`emergency_checkpoint`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.batch import Prompt, Rollout, RolloutBatch
from posttrain.curriculum.protocol import Group, Plan
from posttrain.errors import EngineError, RunError, count_noun
from posttrain.rollout.continuation import generate_shaped
from posttrain.rollout.engine import GenerationBatch
from posttrain.seeds import derive
from posttrain.train import windows
from posttrain.train.checkpoint import State
from posttrain.train.collate import answer_extractors, rollout_batch, row_batch
from posttrain.train.context import TrainContext
from posttrain.train.dynamic_sampling import DynamicSamplingBuffer
from posttrain.train.offline import solution_rows
from posttrain.train.policy import prompt_states
from posttrain.train.prompt_sampler import MOST_REQUESTS
from posttrain.train.rl_metrics import sample_record, sampled_rows
from posttrain.train.roles import GROUP_STRIDE
from posttrain.train.scoring import reward_cost_metrics, score_while_sampling
from posttrain.train.variants import sample_in_rounds
from posttrain.train.weight_copy import Opponent
from posttrain.verify.failures import Calls, Failures, combine_calls

MISMATCH_PROMPTS = 1  # prompts per generation with engine log-probs for mismatch metrics, if no component reads all


@dataclass
class StepRollouts:
    """Scored rollouts of one step."""

    step: int  # step that trains on them, from 0
    rollouts: list[Rollout]
    metrics: dict[str, Any]  # metrics of rewards and generation rounds
    calls: list[Calls]  # reward calls, one entry per generation round
    position: int  # prompts taken from the stream so far, including these
    groups: list[Group] = field(default_factory=list)  # for the sampler; includes dropped and measured groups
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, if collected in parallel to training


def sync_engine(ctx: TrainContext, version: int) -> None:
    """Sync the trainer's weights to the engine unless it has them. Raises on all ranks if the sync fails on any."""
    if ctx.engine.version != version:
        with ctx.watchdog.phase("sync"):
            ctx.ranks.run(ctx.engine.sync, ctx.loaded.model, version)


class SynchronousRollouts:
    """`RolloutSource` of steps that sample their own rollouts with the newest weights, and leave none over."""

    def next(self, ctx: TrainContext, state: State) -> StepRollouts:
        """See `RolloutSource.next`."""
        sync_engine(ctx, state.step)
        found = collect(ctx, state)
        if not ctx.engine.generates_during_updates:
            ctx.engine.sleep()
        ctx.ranks.run(advance_state, ctx, state, found, 0)
        return found

    def finish(self, ctx: TrainContext, state: State) -> None: ...

    def can_save(self, done: int) -> bool:
        """See `RolloutSource.can_save`."""
        del done
        return True

    def save(self, folder: Path, done: int) -> None: ...

    def load(self, folder: Path, ctx: TrainContext, state: State) -> None: ...

    def close(self) -> None: ...


def collect(
    ctx: TrainContext,
    state: State,
    claim: Callable[[int], int] | None = None,
    on_generated: Callable[[], object] | None = None,
) -> StepRollouts:
    """Collect the rollouts of step `state.step`: prompts -> rollouts -> rewards -> filter.

    With `keep` and max_gen_batches > 1, further batches of new prompts are sampled until enough groups have passed.

    claim: reserves a number of positions in the endless prompt stream and returns the first; None: the positions from
    `state.position` on. on_generated: called once the engine is certainly not needed any more, which may be before
    scoring has finished. Raises RunError if too many reward calls have failed, in this step and in `state.calls`.
    """
    failures = ctx.scorer.failures(history=state.calls)
    found, counts = StepRollouts(state.step, [], {}, [], state.position), dict[str, Any]()
    unfinished: list[Rollout] = []  # rollouts begun by earlier steps
    if state.unfinished:
        unfinished, found.calls = windows.gather_unfinished(ctx, state, failures, counts)
        ctx = windows.leave_room(ctx, state)
    settings, buffer = ctx.recipe.rollout, None
    if ctx.objective.keep and settings.max_gen_batches > 1:
        buffer = ctx.objective.sampling_buffer(settings.prompts_per_step, settings.max_gen_batches)
    done = on_generated if buffer is None else None
    replaced = 0  # sampled tokens of groups dropped by `keep` and replaced
    for request in itertools.count() if settings.prompts_per_step else ():
        batch = 0 if buffer is None else buffer.batches
        sample = partial(sample_plan, ctx, state, failures, counts, batch, done)
        # prompts, rollouts and rewards
        count = settings.prompts_per_step if ctx.sampler is None else ctx.sampler.places(settings)
        start = found.position if claim is None else ctx.ranks.broadcast(claim(count))
        found.position = start + count
        if ctx.sampler is None:
            fresh, calls = sample(Plan(ctx.order.take(start, count), [settings.group_size] * count))
        else:
            values = predicted_values(ctx, start)
            first_group, earlier = batch * settings.prompts_per_step, found.groups
            of_step = (state.sampler, state.step, settings)
            fresh, groups, calls = ctx.sampler.sample_rounds(sample, *of_step, start, earlier, first_group, values)
            found.groups = found.groups + groups
        found.calls += calls
        if not fresh:
            check_empty_requests(ctx, request)
            continue
        # filter
        if buffer is None:
            found.rollouts = fresh
            break
        selected = ctx.ranks.gather_results(select_groups, ctx, state, buffer, fresh)[0]
        found.rollouts += [r for r in fresh if r.group in selected]
        replaced += sum(r.sampled_length for r in fresh if r.group not in selected)
        if buffer.full:
            break
    found.rollouts = [*found.rollouts, *unfinished]
    counts |= getattr(ctx.engine, "take_counts", dict)()  # counts of the engine's servers, if any
    found.metrics = reward_cost_metrics(ctx.ranks.total(counts, of_rows=False), ctx.ranks.count)
    found.metrics["rollout/gen_batches"] = 1 if buffer is None else buffer.batches
    if replaced:
        found.metrics["rollout/replaced_tokens"] = found.metrics.get("rollout/replaced_tokens", 0) + replaced
    return found


def sample_plan(
    ctx: TrainContext,
    state: State,
    failures: Failures,
    counts: dict[str, Any],
    batch: int,
    on_generated: Callable[[], object] | None,
    plan: Plan,
    round_: Sequence[int] = (),
) -> tuple[list[Rollout], list[Calls]]:
    """Sample and score a plan on all ranks; return all rollouts, and the reward calls combined into one entry.

    The calls are added to `failures`, counts of this rank to `counts`. batch: number of generation batches the step has
    drawn before. round_: distinguishes the seeds of further rounds from the first round's. Raises RunError if too many
    calls have failed.
    """
    done = None if plan.again else on_generated
    waiting = ctx.watchdog.phase("gather")  # waits for the slowest rank
    share = partial(sample_share, ctx, state, plan, counts, batch, done, round_)
    if ctx.opponent is not None:
        share = partial(play_opponent, ctx, state, plan.prompts, ctx.ranks.run(share), ctx.opponent)
    found = ctx.ranks.gather_rollouts(waiting, ctx.keeps_tokens_apart, share)
    fresh = sorted(itertools.chain(*(share.rollouts for share in found)), key=lambda r: r.group)
    calls = [call for share in found for call in share.calls]
    if len(calls) > 1:
        calls = [combine_calls(calls)]
    for call in calls:
        ctx.ranks.run(failures.add, call)
    return fresh, calls


def predicted_values(ctx: TrainContext, start: int) -> list[float]:
    """Predict the values of a request's prompts with the value head, for samplers that read them; empty otherwise."""
    if ctx.values is None or ctx.sampler is None:
        return []
    with ctx.watchdog.phase("values"), ctx.compiled():
        candidates = ctx.sampler.candidates(start, ctx.recipe.rollout)
        return ctx.values.predict(candidates, prompt_states(ctx, [ctx.prompts[n].ids for n in candidates]))


def check_empty_requests(ctx: TrainContext, request: int) -> None:
    """Raise RunError if the sampler has named no prompts in too many consecutive requests."""
    workflow = ctx.recipe.rollout.workflow
    if workflow is not None and request + 1 >= MOST_REQUESTS:
        raise RunError(
            f"workflow `{workflow.use}` has called no trained role in {count_noun(MOST_REQUESTS, 'request')} in a row",
            allowed=f"rollout.workflow.train: {workflow.train}",
            hint="roles are the names that the workflow gives to `call`",
        )
    if ctx.sampler is not None and request + 1 >= MOST_REQUESTS:
        raise RunError(
            f"sampler `{ctx.sampler.name}` names no prompts in {count_noun(MOST_REQUESTS, 'request')} in a row",
            hint="use harder prompts: a sampler that leaves out solved prompts may have none left",
        )


@dataclass(frozen=True)
class Share:
    """Scored rollouts of one rank, and the calls that scored them. first_group: first group number of the plan."""

    rollouts: list[Rollout]
    calls: list[Calls]
    first_group: int


def sample_share(
    ctx: TrainContext,
    state: State,
    plan: Plan,
    counts: dict[str, Any],
    batch: int = 0,
    on_generated: Callable[[], object] | None = None,
    round_: Sequence[int] = (),
) -> Share:
    """Sample and score this rank's share of the plan's prompts, without communication; see `sample_plan`."""
    prompts, calls = [ctx.prompts[i] for i in plan.prompts], list[Calls]()
    first_group = batch * ctx.recipe.rollout.prompts_per_step
    seed = derive(ctx.recipe.run.seed, "rollout", state.step, batch, *round_)
    share = range(ctx.ranks.number, len(prompts), ctx.ranks.count)
    sample = partial(sample_prompts, ctx, state, counts, calls, first_group=first_group)
    greedy: list[Rollout] = []  # answers that are scored and not trained on
    if "greedy_rewards" in ctx.objective.needs and not plan.measure:
        once = replace(plan, rollouts=[min(count, 1) for count in plan.rollouts], measure=True)
        greedy = sample(once, prompts, seed=derive(seed, "greedy"), share=share)
    sample = partial(sample, plan)
    if ctx.variants is None or plan.measure:
        fresh = sample(prompts, seed=seed, share=share, on_generated=on_generated)
    else:
        memory = state.memory.get(ctx.variants.name)
        fresh = sample_in_rounds(
            ctx.variants,
            prompts,
            share,
            sample,
            counts,
            step=state.step,
            seed=seed,
            memory=memory,
            first_group=first_group,
        )
        if on_generated is not None:
            on_generated()
    if ctx.recipe.solutions is not None and ctx.recipe.solutions.in_group and not plan.measure:
        solutions, scored = solution_rows(ctx, state.step, fresh, counts)
        fresh, calls = [*fresh, *solutions], [*calls, *scored]
    baselines = {answer.group: answer.reward for answer in greedy}
    for rollout in fresh:
        rollout.greedy_reward = baselines.get(rollout.group)
    if plan.bins:
        for rollout in fresh:
            rollout.bin = plan.bins[rollout.group % GROUP_STRIDE - first_group]
    return Share(fresh, calls, first_group)


def sample_prompts(
    ctx: TrainContext,
    state: State,
    counts: dict[str, Any],
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
    """Sample and score rollouts of prompts[share], with the plan's number of rollouts for each prompt.

    Calls the engine once per group size. Adds counts to `counts` and reward calls to `calls`.

    finish: modifies a rollout before it is scored, given the index of its prompt in `prompts`.
    """

    def finish_rollouts(rollouts: list[Rollout]) -> list[Rollout]:
        for rollout in rollouts:
            if finish is not None and rollout.variant is None:  # the engine may have delivered it before it returns
                finish(rollout, rollout.group - first_group)
        return rollouts

    def finish_then(on_complete: Callable[[list[Rollout]], None], rollouts: list[Rollout]) -> None:
        on_complete(finish_rollouts(rollouts))

    settings = ctx.recipe.rollout.model_copy(update={"temperature": 0.0}) if plan.measure else ctx.recipe.rollout
    fresh: list[Rollout] = []
    with ctx.watchdog.phase("rollout"), score_while_sampling(ctx, state.step) as scored:
        done = scored.on_complete
        if done is not None and finish is not None:
            done = partial(finish_then, done)
        reads_logps = ctx.replay is not None or (ctx.shape is not None and ctx.shape.reads_logps)
        for size in sorted({count for count in plan.rollouts if count}):
            batch = GenerationBatch(
                prompts,
                size,
                settings,
                seed=seed if size == settings.group_size else derive(seed, "size", size),
                share=[index for index in share if plan.rollouts[index] == size],
                first_group=first_group,
                logprobs=reads_logps or "rollout_logp" in ctx.objective.needs or MISMATCH_PROMPTS,
                done=done,
                limits=plan.limits or None,
            )
            if ctx.shape is not None and not plan.measure:
                memory = state.memory.get(ctx.shape.name)
                options: dict[str, Any] = {
                    "group_stride": GROUP_STRIDE,
                    "grade": scored.grade,
                    "metrics": counts,
                    "memory": memory,
                }
                fresh += generate_shaped(ctx.engine, ctx.shape, replace(batch, done=None), **options)
            else:
                fresh += ctx.engine.generate_batch(batch)
        fresh = sorted(fresh if finish is None else finish_rollouts(fresh), key=lambda r: r.group)
        if on_generated is not None:
            on_generated()
    with ctx.watchdog.phase("score"):
        if to_score := [rollout for rollout in fresh if rollout.scored]:  # a rank without a share has nothing to score
            calls.append(scored.finish(to_score, counts))
    return fresh


def advance_state(ctx: TrainContext, state: State, batch: StepRollouts, staleness: int) -> None:
    """Advance `state` past the prompts and reward calls of a step's rollouts.

    Raises EngineError if any rollout is older than `staleness` updates, RunError if too many reward calls have failed
    in this and earlier steps.
    """
    mixed = [v for r in batch.rollouts if any(s.versions for s in r.segments) for v in r.versions[r.older :]]
    versions = [*mixed, *(r.version for r in batch.rollouts if not r.older)]
    oldest, newest = min(versions, default=state.step), max(versions, default=state.step)
    if oldest < state.step - staleness or newest > state.step:
        raise EngineError(
            f"step {state.step + 1} was given rollouts of versions {oldest} to {newest}",
            allowed=f"versions {max(state.step - staleness, 0)} to {state.step}, by rollout.staleness {staleness}",
        )
    failures = ctx.scorer.failures(history=state.calls)
    for calls in batch.calls:
        failures.add(calls)
    state.calls = failures.history
    state.position = max(state.position, batch.position)


def select_groups(ctx: TrainContext, state: State, buffer: DynamicSamplingBuffer, fresh: Sequence[Rollout]) -> set[int]:
    """Return the numbers of the new groups that stay in the step."""
    try:
        return buffer.add(batch_of(ctx, fresh, state))
    except RunError as error:
        raise add_samples_hint(ctx, error, fresh, state.step) from None


def add_samples_hint(ctx: TrainContext, error: RunError, rollouts: Sequence[Rollout], step: int) -> RunError:
    """Write samples of a step that fails before its samples are logged; return the error with a hint to that file."""
    if not ctx.recipe.run.samples_per_step:
        return error
    path = ctx.dump / f"step-{step + 1}.jsonl"
    if ctx.ranks.is_main:
        ctx.dump.mkdir(parents=True, exist_ok=True)
        present = [rollout for rollout in rollouts if rollout.is_local]
        chosen = sampled_rows(len(present), ctx.recipe.run.samples_per_step)
        records = [sample_record(present[n]) for n in chosen]
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    with_hint = [replace(problem, hint=f"read samples in {path}; {problem.hint}") for problem in error.problems]
    return RunError.of(with_hint)


def play_opponent(ctx: TrainContext, state: State, drawn: Sequence[int], share: Share, opponent: Opponent) -> Share:
    """Have the opponent answer the prompts of a share, and store the rewards of its answers in the rollouts' `against`.

    Returns the share with the calls that scored the answers. All ranks sync the opponent's weights to their engines
    together.
    """
    settings, version = ctx.recipe.rollout, ctx.engine.version
    with ctx.watchdog.phase("opponent"), score_while_sampling(ctx, state.step) as scored:
        with opponent.in_place(ctx.loaded.model) as model:
            ctx.ranks.run(ctx.engine.sync, model, version)
            generate = partial(
                ctx.engine.generate,
                [ctx.prompts[i] for i in drawn],
                ctx.recipe.opponent.samples if ctx.recipe.opponent else 1,
                settings,
                seed=derive(ctx.recipe.run.seed, "opponent", state.step, share.first_group),
                first_group=share.first_group,
                logprobs=False,
                share=range(ctx.ranks.number, len(drawn), ctx.ranks.count),
            )
            answers = ctx.ranks.run(generate)
        ctx.ranks.run(ctx.engine.sync, ctx.loaded.model, version)
        calls = [scored.finish(answers, {})] if answers else []
    against: dict[int, list[float | None]] = {}
    for answer in answers:
        against.setdefault(answer.group, []).append(answer.reward)
    for rollout in share.rollouts:
        rollout.against = tuple(against[rollout.group])
    return replace(share, calls=[*share.calls, *calls])


def batch_of(ctx: TrainContext, rollouts: Sequence[Rollout], state: State, *, own: bool = False) -> RolloutBatch:
    """Build the batch of scored rollouts with everything the objective reads: reward weights, step, component memory.

    Only per-row fields (`collate.row_batch`) if tokens stay on their ranks. own: the rollouts are this rank's, tokens
    included.
    """
    if ctx.keeps_tokens_apart and not own:
        batch = row_batch(rollouts)
    else:
        answers = answer_extractors(ctx.recipe.rewards) if "answer_ids" in ctx.objective.needs else None
        similarity = ctx.objective.advantage.params.get("similarity")
        batch = rollout_batch(rollouts, answers, ctx.objective.needs, similarity)
    return batch.replace(
        sampler_state=state.sampler or {},
        reward_weights=ctx.scorer.weights,
        step=state.step,
        total_steps=ctx.steps,
        memory=state.memory,
    )
