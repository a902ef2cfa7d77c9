"""The sections that most stages have: model and data, which have files of their own, trackers and the run. Others have
files by subject: what generates, rewards, `rl`, preferences, training, merging, evaluation. No torch here.

Lengths are in tokens, times in seconds, rates in shares of 1 unless a key says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.recipe.data_sections import Data as Data
from posttrain.recipe.data_sections import ImageLimits as ImageLimits
from posttrain.recipe.data_sections import Rows as Rows
from posttrain.recipe.data_sections import Source as Source
from posttrain.recipe.model_sections import Lora as Lora
from posttrain.recipe.model_sections import Model as Model
from posttrain.recipe.model_sections import Parallel as Parallel
from posttrain.recipe.section import Count, Idle, NamedSection, Positive, Section, Seed


class Track(NamedSection):
    """An experiment tracker that gets the run's metrics and samples; `NAME` alone is short for `use: NAME`."""

    use: Literal["wandb", "tensorboard", "trackio", "mlflow"] = Field(description="which tracker")
    project: str = Field("posttrain", description="its project or experiment")
    name: str | None = Field(None, description="the run's name there; default: that of the run directory")
    offline: bool = Field(False, description="files in the run directory alone, nothing over the network")


class Run(Section):
    """How long, where to, and what is kept."""

    output: str | None = Field(None, description="run directory; default: runs/RECIPE/TIME-HASH")
    seed: Seed = Field(0, description="all random draws of the run follow from it")
    steps: Positive | None = Field(None, description="optimiser steps (RL: rollout batches)")
    epochs: Positive | None = Field(None, description="passes over the data, instead of steps")
    save_every: Positive | None = Field(None, description="steps between checkpoints; default: only at the end")
    keep_checkpoints: Annotated[
        Positive,
        Idle(
            "not save_every",
            "without `run.save_every`: there is one checkpoint, at the end",
            "write `run.save_every`",
            note=True,
        ),
    ] = Field(2, description="complete checkpoints to keep")
    log_every: Positive = Field(1, description="steps between lines of metrics")
    keep_rollouts: Count = Field(
        1, description="steps whose rollouts are kept as numbers, the newest ones, for `posttrain compare-methods`"
    )
    samples_per_step: Count = Field(4, description="rollouts written to samples.jsonl a step")
    max_minutes: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="stop cleanly after the step with which steps and saves have taken this long; time for the last "
        "saves is kept free, as much as earlier ones took",
    )
    max_idle_steps: Positive | None = Field(
        50, description="stop, saved, after so many steps in a row that made no update; null = never"
    )
    hang_minutes: Annotated[float, Field(gt=0)] | None = Field(
        5.0,
        description="stop, with the stacks of all threads in logs/, when a phase of a step takes longer than this and "
        "than 10 times its median (6 times this while it has none); null = never",
    )

    @model_validator(mode="after")
    def _one_length(self) -> Run:
        if self.steps and self.epochs:
            raise ValueError("give either `steps` or `epochs`: remove one of them, or write null for it")
        return self
