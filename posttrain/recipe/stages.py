"""The recipe of each stage: which sections it takes. A key that a stage does not use is an error."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from posttrain.recipe import sections as s
from posttrain.recipe.section import Section, registered


class Stage(Section):
    """What every recipe has. Scripts and data are looked for in `base_dir` first, the folder of the recipe file."""

    verb: ClassVar[str]
    presets: ClassVar[bool] = False
    unused: ClassVar[dict[str, str]] = {}  # keys of a shared section that this stage has no use for, and why
    extends: str | None = Field(None, description="a recipe whose values this one overrides")
    run: s.Run = Field(default_factory=s.Run)
    _base_dir: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def base_dir(self) -> Path:
        return self._base_dir


_NO_ROLLOUTS = {"run.samples_per_step": "only rl writes rollouts as it goes"}
_NO_TRAINING = dict.fromkeys(
    (
        "run.steps",
        "run.epochs",
        "run.max_minutes",
        "run.save_every",
        "run.keep_checkpoints",
        "run.log_every",
        "run.samples_per_step",
    ),
    "this stage does not train",
)
_READ_ONLY = {
    **_NO_TRAINING,
    "model.gradient_checkpointing": "this stage does not train",
    "model.lora": "an adapter is evaluated by naming its directory in model.path",
    "data.train_on": "this stage does not train",
    "data.shuffle": "every row is used once, in order",
}


class SftRecipe(Stage):
    """Supervised fine-tuning."""

    verb: ClassVar = "sft"
    unused: ClassVar = _NO_ROLLOUTS
    stage: Literal["sft"] = "sft"
    model: s.Model
    data: s.Data
    batch: s.TrainBatch = Field(default_factory=s.TrainBatch)
    optim: s.SftOptim = Field(default_factory=s.SftOptim)


class DpoRecipe(Stage):
    """Preference optimisation on pairs."""

    verb: ClassVar = "dpo"
    presets: ClassVar = True
    unused: ClassVar = {
        **_NO_ROLLOUTS,
        "data.train_on": "pairs are compared on their completions",
        "batch.packing": "only sft packs rows",
    }
    stage: Literal["dpo"] = "dpo"
    algorithm: str | None = Field(None, description="a preset: dpo, simpo")
    model: s.Model
    data: s.Data
    loss: s.PairLossSection = Field(default_factory=lambda: s.PairLossSection.model_validate({}))
    batch: s.TrainBatch = Field(default_factory=s.TrainBatch)
    optim: s.DpoOptim = Field(default_factory=s.DpoOptim)


class RlRecipe(Stage):
    """Reinforcement learning with verifier rewards."""

    verb: ClassVar = "rl"
    presets: ClassVar = True
    unused: ClassVar = {"data.train_on": "rl trains on the completions that it samples"}
    stage: Literal["rl"] = "rl"
    algorithm: str | None = Field(None, description="a preset; see `posttrain methods list`")
    model: s.Model
    data: s.Data
    rollout: s.Rollout = Field(default_factory=s.Rollout)
    rewards: list[s.Reward] = Field(min_length=1)
    scoring: s.Scoring = Field(default_factory=s.Scoring)
    keep: s.Keep | None = None
    advantage: s.Advantage = Field(default_factory=lambda: s.Advantage.model_validate({}))
    loss: s.Loss = Field(default_factory=lambda: s.Loss.model_validate({}))
    kl: s.Kl = Field(default_factory=lambda: s.Kl.model_validate({}))
    batch: s.RlBatch = Field(default_factory=s.RlBatch)
    optim: s.Optim = Field(default_factory=s.Optim)

    @model_validator(mode="after")
    def _minibatches_have_rows(self) -> RlRecipe:
        rows = self.rollout.prompts_per_step * self.rollout.group_size
        if self.batch.minibatches > rows:
            raise ValueError(f"batch.minibatches {self.batch.minibatches} exceeds the {rows} rollouts of a step")
        return self


class MergeRecipe(Stage):
    """Model merging; mergekit's keys."""

    verb: ClassVar = "merge"
    unused: ClassVar = _NO_TRAINING
    stage: Literal["merge"] = "merge"
    merge_method: Annotated[str, AfterValidator(partial(registered, "merge"))] = Field(
        description="see `posttrain methods list`"
    )
    models: list[s.MergeModel] = Field(min_length=1)
    base_model: str | None = None
    parameters: s.MergeParameters = Field(default_factory=s.MergeParameters)
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="default: the first model's")
    tokenizer_source: str | None = Field(None, description="base, or one of the models; default: base or the first")


class EvalRecipe(Stage):
    """Accuracy of a model on rows graded by reward scripts."""

    verb: ClassVar = "eval"
    unused: ClassVar = _READ_ONLY
    stage: Literal["eval"] = "eval"
    model: s.Model
    data: s.Data
    sampling: s.Sampling = Field(default_factory=s.Sampling)
    engine: s.EngineSection = Field(default_factory=s.EngineSection)
    rewards: list[s.Reward] = Field(min_length=1)
    scoring: s.Scoring = Field(default_factory=s.Scoring)
    eval: s.EvalSettings = Field(default_factory=s.EvalSettings)


class GenerateRecipe(Stage):
    """Completions of prompts, as JSON lines."""

    verb: ClassVar = "generate"
    unused: ClassVar = _READ_ONLY
    stage: Literal["generate"] = "generate"
    model: s.Model
    data: s.Data
    sampling: s.Sampling = Field(default_factory=s.Sampling)
    engine: s.EngineSection = Field(default_factory=s.EngineSection)
    samples: s.Positive = Field(1, description="completions a prompt")


class PipelineRecipe(Stage):
    """Stages in order, each with the sections of its own verb; `stage:NAME` names the model of an earlier one.

    After loading, `defaults` is merged into the entries of `stages` and empty.
    """

    verb: ClassVar = "run"
    unused: ClassVar = {**_NO_TRAINING, "run.seed": "`seeds` decides, once a seed"}
    stage: Literal["pipeline"] = "pipeline"
    defaults: dict[str, Any] = Field(
        default_factory=dict, description="sections merged under every stage that takes them"
    )
    stages: list[dict[str, Any]] = Field(min_length=1, description="name, stage, and that stage's sections")
    seeds: list[int] = Field(default_factory=lambda: [0], description="the whole pipeline once a seed")
    parallel: s.Positive = Field(1, description="seeds run side by side, each with its share of the cores")
    table: list[str] = Field(default_factory=list, description="eval stages compared in the closing table, in order")


STAGES: dict[str, type[Stage]] = {
    c.verb: c for c in (SftRecipe, DpoRecipe, RlRecipe, MergeRecipe, EvalRecipe, GenerateRecipe, PipelineRecipe)
}
