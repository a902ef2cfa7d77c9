"""The rollouts of one RL step: prompts -> rollouts -> scores -> groups kept, refilled until there are enough.

Each rank samples and scores its share of the prompts, then all ranks exchange their scored rollouts. A rank that fails
sends its error in place of its rollouts. So no rank waits for it, and all can save what they have (`salvage`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.batch import Rollout, RolloutBatch
from posttrain.errors import RunError
from posttrain.recipe.reward_checks import reward_name
from posttrain.seeds import derive
from posttrain.train import checkpoint, distributed
from posttrain.train.collate import answer_extractors, rollout_batch
from posttrain.train.opponent import Opponent
from posttrain.train.pieces import Pieces
from posttrain.train.refill import Accumulator
from posttrain.train.rl_metrics import sample_records
from posttrain.train.scoring import scoring, throughput
from posttrain.verify.failures import Calls, together

WATCHED = 4  # prompts a generation whose engine log-probs are kept for the mismatch metrics, if no component reads all


def collect(p: Pieces, state: checkpoint.State) -> tuple[list[Rollout], dict[str, Any]]:
    """Scored rollouts of one step. With `keep` and max_gen_batches > 1, dropped groups are replaced by new prompts."""
    settings = p.recipe.rollout
    gathered: dict[str, Any] = {}
    accumulator = p.objective.accumulator(settings.prompts_per_step, settings.max_gen_batches)
    rollouts: list[Rollout] = []
    while True:
        drawn = p.sampler.take(state.position, settings.prompts_per_step)
        state.position += len(drawn)
        mine = distributed.tried(share_of, p, state, drawn, accumulator.batches, gathered)
        with p.watchdog.phase("gather"):  # which waits for the slowest rank
            found = distributed.all_of(mine)
        fresh = sorted(itertools.chain(*(share.rollouts for share in found)), key=lambda r: r.group)
        state.calls = distributed.together(counted_in, p, state, [calls for share in found for calls in share.calls])
        kept = distributed.all_of(distributed.tried(groups_kept, p, state, accumulator, fresh))[0]
        rollouts += [r for r in fresh if r.group in kept]
        if accumulator.full:
            gathered = throughput(distributed.total(gathered), distributed.world())
            gathered["rollout/gen_batches"] = accumulator.batches
            return rollouts, gathered


@dataclass(frozen=True)
class Share:
    """The scored rollouts of one rank, and the calls that scored them."""

    rollouts: list[Rollout]
    calls: list[Calls]


def counted_in(p: Pieces, state: checkpoint.State, calls: Sequence[Calls]) -> list[Calls]:
    """`State.calls` with these, of all ranks. Raises RunError if too many calls of a reward have failed."""
    failures = p.scorer.failures(history=state.calls)
    if calls:
        failures.add(together(calls))
    return failures.history


def share_of(p: Pieces, state: checkpoint.State, drawn: Sequence[int], batches: int, gathered: dict[str, Any]) -> Share:
    """This rank's share of the rollouts of prompts `drawn`, scored. Adds counts to `gathered`; talks to no other rank.

    batches: how often the step has drawn prompts before.
    """
    settings = p.recipe.rollout
    first_group = batches * settings.prompts_per_step
    with p.watchdog.phase("rollout"), scoring(p, state.step) as scored:
        fresh = p.engine.generate(
            [p.prompts[i] for i in drawn],
            settings.group_size,
            settings,
            seed=derive(p.recipe.run.seed, "rollout", state.step, batches),
            first_group=first_group,
            logprobs="rollout_logp" in p.objective.needs or WATCHED,
            share=distributed.share(len(drawn)),
            done=scored.on_complete,
        )
    with p.watchdog.phase("score"):
        calls = [scored.finish(fresh, gathered)] if fresh else []  # a rank without a share has none
    if p.opponent is not None:
        calls += play(p, state, drawn, fresh, p.opponent, first_group=first_group)
    return Share(fresh, calls)


def groups_kept(p: Pieces, state: checkpoint.State, accumulator: Accumulator, fresh: Sequence[Rollout]) -> set[int]:
    """The numbers of those freshly drawn groups that stay in the step."""
    if not accumulator.refills:
        return accumulator.take(r.group for r in fresh)
    try:
        return accumulator.add(batch_of(p, fresh, state))
    except RunError as error:
        raise with_samples(p, error, fresh, state.step) from None


def with_samples(p: Pieces, error: RunError, rollouts: Sequence[Rollout], step: int) -> RunError:
    """The error of a step that ends before it writes samples, with a hint to a file of samples written here."""
    if not p.recipe.run.samples_per_step:
        return error
    path = p.dump / f"step-{step + 1}.jsonl"
    if distributed.is_main():
        p.dump.mkdir(parents=True, exist_ok=True)
        records = sample_records(rollouts, p.recipe.run.samples_per_step)
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    told = [replace(problem, hint=f"read samples in {path}; {problem.hint}") for problem in error.problems]
    return RunError.of(told)


def play(
    p: Pieces, state: checkpoint.State, drawn: Sequence[int], fresh: list[Rollout], opponent: Opponent, first_group: int
) -> list[Calls]:
    """Have the opponent answer the prompts of the fresh rollouts, and leave the rewards of its answers with them.
    Returns the calls that scored them."""
    settings = p.recipe.rollout
    with p.watchdog.phase("opponent"), scoring(p, state.step) as scored:
        with opponent.in_place(p.loaded.model) as model:
            p.engine.sync(model, state.step)
            answers = p.engine.generate(
                [p.prompts[i] for i in drawn],
                p.recipe.opponent.samples if p.recipe.opponent else 1,
                settings,
                seed=derive(p.recipe.run.seed, "opponent", state.step, first_group),
                first_group=first_group,
                logprobs=False,
                share=distributed.share(len(drawn)),
            )
        p.engine.sync(p.loaded.model, state.step)
        calls = [scored.finish(answers, {})] if answers else []
    theirs: dict[int, list[float | None]] = {}
    for answer in answers:
        theirs.setdefault(answer.group, []).append(answer.reward)
    for rollout in fresh:
        rollout.against = tuple(theirs[rollout.group])
    return calls


def batch_of(p: Pieces, rollouts: Sequence[Rollout], state: checkpoint.State) -> RolloutBatch:
    """The batch of scored rollouts, with the reward weights, the step, and the memory of components."""
    answers = answer_extractors(p.recipe.rewards) if "answer_ids" in p.objective.needs else None
    batch = rollout_batch(rollouts, answers, p.objective.needs, p.recipe.advantage.params.get("similarity"))
    weights = {reward_name(reward): reward.weight for reward in p.recipe.rewards}
    return batch.replace(reward_weights=weights, step=state.step, total_steps=p.steps, memory=state.memory)
