"""Sections that most stages have: model and data (defined in their own files), trackers and the run.

Other sections are grouped by subject in `*_sections.py`: engines, rewards, `rl`, preferences, training, merging,
evaluation. Lengths are in tokens, times in seconds, rates in fractions of 1 unless a key says otherwise. Does not
import torch.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from posttrain.recipe.data_sections import Data as Data
from posttrain.recipe.data_sections import ImageLimits as ImageLimits
from posttrain.recipe.data_sections import Rows as Rows
from posttrain.recipe.data_sections import Source as Source
from posttrain.recipe.model_sections import Lora as Lora
from posttrain.recipe.model_sections import Model as Model
from posttrain.recipe.model_sections import Parallel as Parallel
from posttrain.recipe.section import NO_TRAINING, Count, Idle, NamedSection, Positive, Section, Seed, Unused


class Track(NamedSection):
    """An experiment tracker that receives the run's metrics and samples; `NAME` alone is short for `use: NAME`."""

    use: Literal["wandb", "tensorboard", "trackio", "mlflow"] = Field(description="name of the tracker")
    project: str = Field("posttrain", description="project or experiment of the tracker")
    name: str | None = Field(None, description="name of the run in the tracker; default: the name of the run directory")
    offline: bool = Field(False, description="write files in the run directory only, nothing over the network")


NO_ROLLOUTS = Unused("sft|dpo|reward_model", "only rl writes rollouts")


class Run(Section):
    """Length of the run, its output directory, and what is stored there."""

    output: str | None = Field(None, description="run directory; default: runs/RECIPE/TIME-HASH")
    seed: Annotated[Seed, Unused("pipeline", "`seeds` decides, once a seed")] = Field(
        0, description="seed of all random numbers of the run"
    )
    steps: Annotated[Positive | None, NO_TRAINING] = Field(None, description="optimiser steps (RL: rollout batches)")
    epochs: Annotated[Positive | None, NO_TRAINING] = Field(None, description="passes over the data, instead of steps")
    save_every: Annotated[Positive | None, NO_TRAINING] = Field(
        None, description="steps between checkpoints; default: only at the end"
    )
    keep_checkpoints: Annotated[
        Positive,
        NO_TRAINING,
        Idle(
            "not save_every",
            "without `run.save_every`: there is one checkpoint, at the end",
            "write `run.save_every`",
            note=True,
        ),
    ] = Field(2, description="number of complete checkpoints to keep")
    log_every: Annotated[Positive, NO_TRAINING, Unused("rl", "rl writes every step")] = Field(
        1, description="steps between lines of metrics"
    )
    keep_rollouts: Annotated[Count, NO_TRAINING, NO_ROLLOUTS] = Field(
        1,
        description="number of most recent steps whose rollouts are stored as numbers, for `posttrain compare-methods`",
    )
    samples_per_step: Annotated[Count, NO_TRAINING, NO_ROLLOUTS] = Field(
        4, description="rollouts written to samples.jsonl per step"
    )
    max_minutes: Annotated[Annotated[float, Field(gt=0)] | None, NO_TRAINING] = Field(
        None,
        description="stop cleanly after the step at which steps and saves have taken this long; time for the "
        "last saves is reserved from earlier save times",
    )
    max_idle_steps: Annotated[Positive | None, NO_TRAINING] = Field(
        50, description="save and stop after this many consecutive steps without an update; null = never"
    )
    hang_minutes: Annotated[Annotated[float, Field(gt=0)] | None, NO_TRAINING] = Field(
        5.0,
        description="stop and write the stacks of all threads to logs/ when a phase of a step takes longer "
        "than this and than 10 times its median (6 times this before a median exists); null = "
        "never",
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps and self.epochs:
            raise ValueError("give either `steps` or `epochs`: remove one of them, or write null for it")
        return self
