"""Everything that an RL step uses: model, engine, rewards, objective, optimizer."""

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
from posttrain.models import load as models
from posttrain.recipe.rl_stage import WITH_ALL_TOKENS
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.continuation import Shape
from posttrain.rollout.engine import Engine
from posttrain.rollout.stored import Tokens
from posttrain.run.watchdog import Watchdog
from posttrain.seeds import PromptSampler
from posttrain.train.attention import attention_dropout
from posttrain.train.compiled import Switch
from posttrain.train.controls import Controls, check_limits
from posttrain.train.objective import Objective
from posttrain.train.prompt_sampler import StepSampler
from posttrain.train.prompt_values import PromptValues
from posttrain.train.ranks import Ranks
from posttrain.train.reference import ReferencePolicy, RenewedReference
from posttrain.train.replay_store import ReplayStore
from posttrain.train.variants import PromptVariants
from posttrain.train.weight_copy import Opponent, ProximalPolicy, WeightCopy
from posttrain.verify.score import Scorer


@dataclass(frozen=True)
class TrainContext:
    """Everything that an RL step uses."""

    recipe: RlRecipe
    loaded: models.LoadedModel
    engine: Engine
    scorer: Scorer
    order: PromptSampler  # order of prompts, each once per epoch
    sampler: StepSampler | None  # replaces `order`: chooses prompts and the number of rollouts of each
    prompts: Sequence[Prompt]
    objective: Objective
    controls: Controls
    optimizer: Optimizer
    scaler: GradScaler  # loss scaler for float16 matmuls; disabled otherwise
    steps: int
    reference: ReferencePolicy | None
    critic: nn.Module | None  # value head, if a component reads values
    values: PromptValues | None  # value head on prompts, for a sampler that reads it
    opponent: Opponent | None  # slow copy of the policy, for self-play
    packed: bool  # run rows without padding; padded if the architecture or device does not support it
    watchdog: Watchdog
    ranks: Ranks  # ranks that train together
    dump: Path  # file for a batch that made the run fail
    proximal: ProximalPolicy | None = None  # average of the policy's weights, for losses that clip around it
    variants: PromptVariants | None = None  # prompts to sample from in place of the data's prompts
    shape: Shape | None = None  # how rollouts continue
    replay: ReplayStore | None = None  # stored rollouts of earlier steps
    solutions: Tokens = field(default_factory=dict)  # uid -> tokens of the prompt's given solution, if any
    sft_optimizer: Optimizer | None = None  # for supervised steps on solutions of unsolved prompts
    compiled: Switch = nullcontext  # context manager around training passes
    shares: bool = False  # packed rows share the forward pass of a long common prompt

    @cached_property
    def updates_per_step(self) -> int:
        """Optimizer updates per step of rollouts."""
        return self.recipe.batch.epochs * self.recipe.batch.minibatches

    @cached_property
    def has_dropout(self) -> bool:
        """Whether training passes of the model use dropout."""
        model = self.loaded.model
        return attention_dropout(model) > 0 or any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())

    @cached_property
    def needs_old_logp(self) -> bool:
        """Whether a step reads log-probs of its starting policy that differ from those of the training pass.

        With one update per step they are equal. With several, the policy changes after the first. With dropout, the
        training pass differs from the policy that a component compares with the engine.
        """
        return self.updates_per_step > 1 or ("rollout_logp" in self.objective.needs and self.has_dropout)

    @cached_property
    def keeps_tokens_apart(self) -> bool:
        """Whether each rank gets the tokens of its own rows only (`own_rows`).

        Every rank gets all tokens if something reads tokens, texts or log-probs of the whole step, or stores them in
        the run's state: components before the loss (`Objective.is_by_row`), shapes, workflows, prompt variants, replay,
        rollouts that wait for a later step; or if a component needs passes on rows other than the trained ones.
        """
        reads_all_tokens = (self.shape, self.variants, self.replay, self.recipe.rollout.staleness)
        extra_passes = self.objective.needs & WITH_ALL_TOKENS
        return self.ranks.count > 1 and self.objective.is_by_row and not any(reads_all_tokens) and not extra_passes

    @property
    def parts_with_state(self) -> list[WeightCopy | PromptValues | ReplayStore]:
        """Parts that a checkpoint holds besides the model, its optimizer and the counters: weight copies and stores."""
        renewed = self.reference if isinstance(self.reference, RenewedReference) else None
        parts = (self.opponent, self.proximal, renewed, self.values, self.replay)
        return [part for part in parts if part is not None]

    @property
    def longest(self) -> int:
        """Length in tokens of the longest prompt, including what a variant or shape may add."""
        return (
            max(len(prompt.ids) for prompt in self.prompts)
            + (self.variants.room if self.variants else 0)
            + (self.shape.room if self.shape else 0)
        )

    def at(self, numbers: Mapping[str, float]) -> TrainContext:
        """Return the context with the values that controllers set for one step."""
        if not numbers:
            return self
        rollout = {k.partition(".")[2]: v for k, v in numbers.items() if k.startswith("rollout.")}
        rounded = {k: v if k == "temperature" else round(v) for k, v in rollout.items()}
        check_limits(numbers, self.recipe)
        recipe = self.recipe.model_copy(update={"rollout": self.recipe.rollout.model_copy(update=rounded)})
        return dataclasses.replace(self, recipe=recipe, objective=self.objective.at(numbers))
