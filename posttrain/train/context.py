"""What a step of RL works with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from posttrain.batch import Prompt
from posttrain.data.sampler import PromptSampler
from posttrain.models import load as models
from posttrain.recipe.rl_stage import WITH_ALL_TOKENS
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.continuation import Shape
from posttrain.rollout.engine import Engine
from posttrain.rollout.stored import Tokens
from posttrain.run.watchdog import Watchdog
from posttrain.train.compiled import Switch
from posttrain.train.controls import Controls, check_limits
from posttrain.train.objective import Objective
from posttrain.train.opponent import Opponent
from posttrain.train.prompt_sampler import StepSampler
from posttrain.train.prompt_values import PromptValues
from posttrain.train.ranks import Ranks
from posttrain.train.reference import ReferencePolicy
from posttrain.train.replay_store import ReplayStore
from posttrain.train.variants import PromptVariants
from posttrain.train.weight_copy import ProximalPolicy
from posttrain.verify.score import Scorer


@dataclass(frozen=True)
class TrainContext:
    """What a step works with."""

    recipe: RlRecipe
    loaded: models.LoadedModel
    engine: Engine
    scorer: Scorer
    order: PromptSampler  # of prompts, each once an epoch
    sampler: StepSampler | None  # who chooses prompts instead, and how many rollouts each gets
    prompts: Sequence[Prompt]
    objective: Objective
    controls: Controls
    optimizer: Optimizer
    scaler: GradScaler  # of the loss, where products are float16; elsewhere it does nothing
    steps: int
    reference: ReferencePolicy | None
    critic: nn.Module | None  # a value head, where a component reads values
    values: PromptValues | None  # a value head on prompts, for a sampler that reads it
    opponent: Opponent | None  # a slow copy of the policy, where one is played against
    packed: bool  # rows without padding; where the architecture or the device cannot, padded
    watchdog: Watchdog
    ranks: Ranks  # that train together
    dump: Path  # where a batch that broke the run is written
    proximal: ProximalPolicy | None = None  # the average of the policy's weights, where a loss clips around it
    variants: PromptVariants | None = None  # what is sampled from in place of the data's prompts
    shape: Shape | None = None  # how rollouts go on
    replay: ReplayStore | None = None  # stored rollouts of earlier steps
    solutions: Tokens = field(default_factory=dict)  # uid -> tokens of the prompt's given solution, where it has one
    sft_optimizer: Optimizer | None = None  # of supervised steps on the solutions of unsolved prompts
    compiled: Switch = nullcontext  # opened around the passes of training
    shares: bool = False  # packed rows of one prompt share its pass, where prompts are long

    @cached_property
    def updates_per_step(self) -> int:
        """Optimiser updates on one step's rollouts."""
        return self.recipe.batch.epochs * self.recipe.batch.minibatches

    @cached_property
    def has_dropout(self) -> bool:
        """Whether passes of the trained model draw random numbers."""
        return any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.loaded.model.modules())

    @cached_property
    def needs_old_logp(self) -> bool:
        """Whether a step reads log-probs of the policy at its start that are not those of the training pass.

        With one update a step they are. With several, the policy moves after the first. With dropout, the training pass
        differs from the policy that a component compares with the engine.
        """
        return self.updates_per_step > 1 or (self.has_dropout and "rollout_logp" in self.objective.needs)

    @cached_property
    def keeps_tokens_apart(self) -> bool:
        """Whether each rank gets the tokens of its own rows only (`own_rows`).

        All ranks get all of them where something reads tokens, texts or log-probs of the whole step or keeps them in
        the state of the run: components before the loss (`Objective.is_by_row`), shapes, workflows, prompt variants,
        replay, rollouts that wait for a later step; or where it measures rows beside those that are trained on."""
        whole = (self.shape, self.variants, self.replay, self.recipe.rollout.staleness)
        beside = self.objective.needs & WITH_ALL_TOKENS
        return self.ranks.count > 1 and self.objective.is_by_row and not any(whole) and not beside

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, with all that a variant or shape may add to it."""
        return (
            max(len(prompt.ids) for prompt in self.prompts)
            + (self.variants.room if self.variants else 0)
            + (self.shape.room if self.shape else 0)
        )

    def at(self, numbers: Mapping[str, float]) -> TrainContext:
        """The same with the numbers that controllers give for one step."""
        if not numbers:
            return self
        rollout = {k.partition(".")[2]: v for k, v in numbers.items() if k.startswith("rollout.")}
        whole = {k: v if k == "temperature" else round(v) for k, v in rollout.items()}
        check_limits(numbers, self.recipe)
        changed = self.recipe.rollout.model_copy(update=whole)
        recipe = self.recipe.model_copy(update={"rollout": changed})
        return dataclasses.replace(self, recipe=recipe, objective=self.objective.at(numbers))
