"""Setup of an RL run before its first step.

`prepare_run` does everything that needs no model; `build_context` loads the model, starts the engine and builds the
other parts of a step. Mistakes in the recipe are reported by the first part, before minutes are spent on loading.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from posttrain import registry
from posttrain.batch import Prompt
from posttrain.data import columns
from posttrain.data.prepare import Prepared, prepare_prompts
from posttrain.data.rows import format_causes
from posttrain.errors import count_noun
from posttrain.evaluate import shaped
from posttrain.models import load as models
from posttrain.models.adapters import causal_of
from posttrain.models.experts import experts_a_token
from posttrain.recipe.checks import refuse_with_images
from posttrain.recipe.rl_stage import BY_REFERENCE, RlRecipe
from posttrain.rollout import turns
from posttrain.rollout.continuation import Shape, rehearse_shape
from posttrain.rollout.engine import Engine, check_fits, needed_length
from posttrain.rollout.make_engine import check_engine, make_engine, start_early, start_note
from posttrain.rollout.stored import StoredEngine, Tokens
from posttrain.run.directory import RunDirectory
from posttrain.run.watchdog import Watchdog
from posttrain.tools.tool_set import ToolSet, load_tool_set
from posttrain.train import (
    checkpoint,
    compiled,
    data_parallel,
    distributed,
    machine_checks,
    optim,
    rank_consistency,
    sharding,
    unsolved,
)
from posttrain.train.attention import PADDED_NOTE, enable_packing
from posttrain.train.context import TrainContext
from posttrain.train.controls import Controls
from posttrain.train.critic import create_value_head, load_frozen_head
from posttrain.train.held_out import eval_shape, prepare_held_out, rl_sampling
from posttrain.train.memory_plan import explain_out_of_memory
from posttrain.train.objective import Objective
from posttrain.train.objective_dry_run import dry_run
from posttrain.train.offline import solution_completions, stored_completions
from posttrain.train.pass_checks import packs_images, shares_prompts
from posttrain.train.prompt_sampler import StepSampler
from posttrain.train.prompt_values import PromptValues
from posttrain.train.ranks import Ranks, ranks_of_run
from posttrain.train.reference import ReferencePolicy, load_reference
from posttrain.train.replay_store import ReplayStore
from posttrain.train.scoring import check_grading, check_turns
from posttrain.train.variants import PromptVariants
from posttrain.train.weight_copy import Opponent, ProximalPolicy
from posttrain.train.workflow import check_window, workflow_of
from posttrain.verify.audit import audit_gold
from posttrain.verify.captured_output import OutputLog
from posttrain.verify.score import Scorer

if TYPE_CHECKING:
    from posttrain.rollout.starting import StartingEngine

Note = Callable[[str], None]  # prints one line for the user


@dataclass(frozen=True)
class RunInputs:
    """Everything about a run that is known without a model."""

    prompts: Sequence[Prompt]
    dropped_rows: str  # a line about rows that are no prompts, and why
    steps: int
    objective: Objective
    controls: Controls
    sampler: StepSampler
    offer: ToolSet | None  # tools or environment of the rollouts
    stored: Tokens | None  # completions from the data, if they are trained on
    variants: PromptVariants | None  # prompts to sample from in place of the data's
    shape: Shape | None  # how rollouts continue
    solutions: Tokens  # given solutions by prompt, if the recipe reads them
    held_out: Prepared[Prompt] | None  # held-out prompts for evaluation during training

    @property
    def room(self) -> int:
        """Maximum number of tokens by which prompts may grow."""
        return (self.variants.room if self.variants else 0) + (self.shape.room if self.shape else 0)


def prepare_run(recipe: RlRecipe) -> RunInputs:
    """Check machine and recipe, load the data, and dry-run the objective on made-up numbers.

    Loads a tokenizer, no model.
    """
    machine_checks.check(recipe)
    check_engine(recipe.rollout, lambda: models.config_of(recipe.model, recipe.base_dir), recipe.base_dir)
    tokenizer = models.load_tokenizer(recipe.model, recipe.base_dir)
    offer = load_tool_set(recipe, tokenizer, recipe.base_dir)
    turns.check_start(offer, tokenizer)
    reader = models.load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    data = prepare_prompts(recipe.data, tokenizer, recipe.base_dir, offer.row if offer else None, reader)
    prompts = data.items
    refuse_with_images(recipe, data.rows, replies=reader is not None and offer is not None and offer.shows)
    rank_consistency.check_rows([prompt.uid for prompt in prompts])
    steps = total_steps(recipe, len(prompts))
    objective = Objective.from_recipe(recipe)
    controls = Controls.from_recipe(recipe, steps)
    sampler = StepSampler.from_recipe(recipe, prompts, steps)
    columns.refuse_missing([prompt.row for prompt in prompts], required_columns(recipe), acts=recipe.acts)
    dry_run(objective, recipe, prompts)
    stored = None
    if recipe.rollout.engine == "stored":
        stored = stored_completions(prompts, tokenizer, recipe.data, recipe.rollout.max_new_tokens, reader)
    variants = PromptVariants.from_recipe(recipe, prompts, tokenizer, offer.row if offer else None, reader)
    shape = build_shape(recipe, tokenizer, prompts, reader)
    if shape is not None:
        rehearse_shape(shape, prompts[0], recipe.rollout)
    solutions: Tokens = {}
    if recipe.solutions is not None:
        column, limit = recipe.solutions.column, recipe.rollout.max_new_tokens
        rendered = offer.row if offer else None
        solutions = solution_completions(prompts, column, tokenizer, recipe.data, limit, rendered, reader)
    held_out = prepare_held_out(recipe, tokenizer, offer)
    return RunInputs(
        prompts,
        describe_dropped_rows(data),
        steps,
        objective,
        controls,
        sampler,
        offer,
        stored,
        variants,
        shape,
        solutions,
        held_out,
    )


def build_shape(
    recipe: RlRecipe, tokenizer: Any, prompts: Sequence[Prompt], reader: models.ImageReader | None = None
) -> Shape | None:
    """Build the shape named by `rollout.shape`, or by `rollout.workflow`; None without either.

    reader: image reader of a vision model. Raises UserError for an unknown name or key.
    """
    if recipe.rollout.workflow is not None:
        return workflow_of(recipe, recipe.rollout.workflow, tokenizer, prompts, reader)
    section = recipe.rollout.shape
    if section is None:
        return None
    return shaped.load_shape(section, tokenizer, recipe.base_dir, reader=reader)


def required_columns(recipe: RlRecipe) -> list[columns.RequiredColumn]:
    """Return the data columns that the components of a recipe read by name."""
    required = list(columns.solution_columns(recipe.prompt_variants, recipe.solutions))
    for key, section in recipe.every_component():
        takes = registry.resolve(section.kinds, section.use, recipe.base_dir).params
        required += columns.named_columns(key, section.use, takes, section.params)
    return required


def describe_dropped_rows(data: Prepared[Prompt]) -> str:
    """Return a line about rows that were dropped or truncated, by cause; empty if there are none."""
    causes = format_causes({**data.dropped, **data.cut, **data.noted})
    return f"{len(data.items)} of {count_noun(len(data.rows), 'row')} are prompts; {causes}" if causes else ""


def total_steps(recipe: RlRecipe, prompts: int) -> int:
    """Return the number of steps: run.steps, or run.epochs passes over the prompts, or one pass."""
    if recipe.run.steps:
        return recipe.run.steps
    return max(1, (recipe.run.epochs or 1) * prompts // recipe.rollout.prompts_per_step)


def audit_rewards(recipe: RlRecipe, work: RunInputs, scorer: Scorer, note: Note) -> None:
    """Check that the rewards fit the rollouts and score the data's own answers as expected. Raises RewardError."""
    if work.shape is not None and work.shape.grades:
        check_grading(scorer)
    for line in (work.dropped_rows, check_turns(recipe, scorer, work.objective.needs)):
        if line:
            note(line)
    if distributed.is_main():
        note(audit_gold(scorer, [prompt.row for prompt in work.prompts]).summary)


@contextmanager
def build_context(
    recipe: RlRecipe,
    directory: RunDirectory,
    work: RunInputs,
    scorer: Scorer,
    watchdog: Watchdog,
    note: Note,
    begun: StartingEngine | None = None,
) -> Iterator[TrainContext]:
    """Load the model, start the engine with its weights, and build everything else a step uses.

    Closes the engine at the end. begun: an engine started early by `start_engine_early`.
    """
    loaded = sharding.load(recipe.model, recipe.base_dir, seed=recipe.run.seed)
    data_parallel.broadcast_weights(loaded.model)
    if "router_loss" in work.objective.needs:
        experts_a_token(causal_of(loaded.model))
    critic = build_critic(recipe, work.objective, loaded)
    learner = critic if recipe.critic.path is None else None
    training = ranks_of_run(divided=loaded.is_sharded)
    engine = build_engine(recipe, directory, work, loaded, watchdog, note, begun, training)
    try:
        longest = max(len(prompt.ids) for prompt in work.prompts) + work.room
        with explain_out_of_memory(recipe, loaded.model, longest, checkpoint.State(), directory):
            packed = enable_row_packing(loaded, note)  # first: the reference copies the model with its attention
            context = TrainContext(
                recipe=recipe,
                loaded=loaded,
                engine=engine,
                scorer=scorer,
                order=work.sampler.order,
                sampler=None if work.sampler.name == "uniform" else work.sampler,  # the uniform sampler has no state
                prompts=work.prompts,
                objective=work.objective,
                controls=work.controls,
                packed=packed,
                shares=packed and shares_prompts(loaded),
                optimizer=optim.build(loaded.model, recipe.optim, learner, recipe.critic.lr),
                scaler=optim.loss_scaler(loaded),
                steps=work.steps,
                reference=build_reference(recipe, work, loaded),
                critic=critic,
                variants=work.variants,
                shape=work.shape,
                solutions=work.solutions,
                replay=ReplayStore.from_recipe(recipe, work.prompts, work.steps),
                values=build_prompt_values(work.sampler, loaded),
                sft_optimizer=unsolved.build_sft_optimizer(recipe, loaded),
                opponent=Opponent(loaded.model, recipe.opponent.ema) if recipe.opponent else None,
                proximal=ProximalPolicy(loaded.model, work.objective.surrogate.params.get("decay", 0.9))
                if "prox_logp" in work.objective.needs
                else None,
                watchdog=watchdog,
                ranks=training,
                dump=directory.path / "failed",
                compiled=compiled.compile_layers(loaded.model, recipe.model),
            )
        yield context
    finally:
        engine.close()


def build_critic(recipe: RlRecipe, objective: Objective, loaded: models.LoadedModel) -> nn.Module | None:
    """Return the value head: another run's, or a new one if a component reads values; None otherwise."""
    if recipe.critic.path is not None:
        return load_frozen_head(loaded, recipe.critic.path, recipe.base_dir, twin=recipe.critic.twin)
    reads = objective.needs & {"values", "new_values"}
    return create_value_head(loaded, twin=recipe.critic.twin, seed=recipe.run.seed) if reads else None


def build_prompt_values(sampler: StepSampler, loaded: models.LoadedModel) -> PromptValues | None:
    """Return the value head on prompts for a sampler that reads predicted values; None otherwise."""
    if "values" not in sampler.needs:
        return None
    settings: Any = sampler.sampler
    return PromptValues(loaded, lr=settings.value_lr, steps=settings.value_steps, metric=settings.metric)


def start_engine_early(
    recipe: RlRecipe, directory: RunDirectory, work: RunInputs
) -> AbstractContextManager[StartingEngine | None]:
    """Start the engine in the background while the setup goes on (`make_engine.start_early`)."""
    return start_early(
        recipe.rollout,
        recipe.model,
        recipe.base_dir,
        training=True,
        scratch=distributed.rank_path(directory.path / "engine"),
        max_len=longest_rollout(recipe, work),
    )


def longest_rollout(recipe: RlRecipe, work: RunInputs) -> int:
    """Return the context length that the engine needs, in tokens."""
    longest = needed_length(work.prompts, recipe.rollout) + work.room
    if recipe.eval and work.held_out:
        shape = eval_shape(recipe, work.shape)
        longest = max(longest, needed_length(work.held_out.items, rl_sampling(recipe)) + (shape.room if shape else 0))
    return longest


def build_engine(
    recipe: RlRecipe,
    directory: RunDirectory,
    work: RunInputs,
    loaded: models.LoadedModel,
    watchdog: Watchdog,
    note: Note,
    begun: StartingEngine | None,
    training: Ranks,
) -> Engine:
    """Start the engine. Raises DataError for prompts that do not fit into the model's context window."""
    check_window(work.shape, work.prompts, recipe.rollout.max_new_tokens, loaded.window or sys.maxsize)
    check_fits(work.prompts, recipe.rollout, (loaded.window or sys.maxsize) - work.room)
    if started := start_note(recipe.rollout):
        note(started)
    with watchdog.phase("engine start"):
        scratch = distributed.rank_path(directory.path / "engine")
        inner: Engine
        if work.stored is not None:
            inner = StoredEngine(loaded, work.stored)
        else:
            model = loaded
            if loaded.is_sharded and recipe.rollout.engine == "transformers":  # needs a second, whole copy
                model = models.load(recipe.model, recipe.base_dir, seed=recipe.run.seed, training=True)
            inner = make_engine(
                recipe.rollout,
                model,
                scratch=scratch,
                max_len=longest_rollout(recipe, work),
                begun=begun,
                training=training,
                base_dir=recipe.base_dir,
            )
        offer = replace(work.offer, output_log=OutputLog(directory.logs, "tools", note)) if work.offer else None
        return turns.with_turns(inner, offer, loaded)


def enable_row_packing(loaded: models.LoadedModel, note: Note) -> bool:
    """Switch the model to packed rows if possible (`attention.enable_packing`); note on a GPU if rows are padded."""
    found = enable_packing(loaded.model, loaded.device) and (loaded.images is None or packs_images(loaded))
    if not found and loaded.device.type == "cuda":
        note(PADDED_NOTE)
    return found


def build_reference(recipe: RlRecipe, work: RunInputs, loaded: models.LoadedModel) -> ReferencePolicy | None:
    """Return the frozen reference policy if a component or another run's critic reads it; None otherwise."""
    needed = work.objective.needs & set(BY_REFERENCE) or recipe.critic.path is not None
    images = (work.offer is not None and work.offer.shows) or any(prompt.images for prompt in work.prompts)
    return load_reference(recipe, loaded, images=images) if needed else None
