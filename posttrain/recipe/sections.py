"""The sections of recipes: keys, types, defaults and help. Here are those of most stages: model, data, run. Others have
files by subject: what generates, rewards, `rl`, preferences, training, merging, evaluation. No torch here.

Lengths are in tokens, times in seconds, rates in shares of 1 unless a key says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.recipe.section import (
    Count,
    DataName,
    ModelName,
    NamedSection,
    Positive,
    Section,
    Seed,
    Share,
    TemplateName,
    Width,
)
from posttrain.recipe.select_sections import Selection

Texts = Annotated[list[str], Field(min_length=1)]


class Lora(Section):
    """A low-rank adapter; the base stays frozen and serves as the reference policy."""

    rank: Width = Field(16, description="width of the two factors")
    alpha: Positive = Field(32, description="scale: the adapter's output is multiplied by alpha / rank")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of an adapter's inputs that are 0 while training"
    )
    targets: str | Texts = Field("all-linear", description="module names, or all-linear")
    continue_: bool = Field(
        False,
        alias="continue",
        description="train the adapter that `model.path` names itself, with its shape; false: it is merged into its "
        "base and a fresh one is trained (with `quantize` it is always trained on)",
    )


class Model(Section):
    """Which weights, and how they are trained."""

    path: ModelName = Field(description="a directory, a hub id, a .gguf file, `tiny`, or `stage:NAME` in a pipeline")
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of products and of frozen weights; auto: bfloat16 on a GPU, float32 on a CPU;"
        " float16 (rl): trainer and vLLM agree better",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    lora: Lora | None = Field(None, description="train a LoRA adapter instead of all weights")
    quantize: Literal["nf4"] | None = Field(None, description="4-bit weights (bitsandbytes); training them needs lora")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto", description="how attention is computed; auto: what transformers takes"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    shard: bool = Field(
        False,
        description="full training with --gpus N: each GPU keeps a part of weights, gradients and moments (FSDP2)",
    )
    half_weights: bool = Field(
        False,
        description="full training in bfloat16: weights, residuals and norms too, and float32 weights are the "
        "optimiser's own (docs/memory.md)",
    )
    compile: bool = Field(False, description="torch.compile the layers for training: a minute once, then faster steps")
    offload_reference: bool = Field(
        False, description="full training: the frozen reference waits in host memory while it is not read"
    )
    chat_template: TemplateName | None = Field(None, description="a Jinja file that replaces the tokenizer's template")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")


class Rows(Section):
    """Where rows come from."""

    source: DataName | None = Field(
        None,
        description="a .jsonl/.json/.csv/.parquet file, a datasets directory, a hub id, gym:TASK, task:NAME, "
        "file.py:function, or accepted:EVAL_RUN (its right completions)",
    )
    split: str = Field("train", description="of a hub id or a datasets directory")
    config: str | None = Field(None, description="hub configuration name")
    size: Positive | None = Field(None, description="rows to take (gym, tasks and functions: rows to make)")
    skip: Count = Field(0, description="rows to leave out first, e.g. those trained on elsewhere")
    seed: Seed = Field(0, description="seed of generated rows (gym, tasks and functions)")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of the gym task, task or function")
    columns: dict[str, str] = Field(default_factory=dict, description="our column name: the file's column name")


class Source(Rows):
    """Where rows come from, one of several places maybe."""

    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="share in a mixture")


class Data(Source):
    """Rows, how they become tokens, and which tokens are trained on."""

    mix: Annotated[list[Source], Field(min_length=1)] | None = Field(
        None, description="several sources with weights, instead of source"
    )
    select: Selection | None = Field(None, description="which rows are used, by what is known before the run")
    system: str | None = Field(None, description="system message put before every prompt that has none")
    prompt_template: str | None = Field(None, description="a user message with {column} fields, instead of `prompt`")
    completion_template: str | None = Field(
        None, description="the answer that is trained on, with {column} fields, instead of `completion`"
    )
    chat: bool = Field(True, description="render with the chat template; false: prompt and completion as plain text")
    train_on: Literal["completion", "assistant", "all"] = Field(
        "completion", description="completion: the last assistant turn; assistant: every assistant turn"
    )
    thought_dropout: Share = Field(
        0.0, description="share of rows whose first thought (<think>...</think>) is emptied, once and for all"
    )
    max_length: Positive | None = Field(None, description="longest sequence (RL: longest prompt)")
    overlong: Literal["drop", "truncate_prompt", "error", "keep"] = Field(
        "drop", description="what happens to rows over max_length"
    )
    shuffle: bool = Field(True, description="another order of the rows in every epoch; false: theirs")

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if (self.source is None) == (self.mix is None):
            raise ValueError("give either `source` or `mix`")
        return self


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
    keep_checkpoints: Positive = Field(2, description="complete checkpoints to keep")
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
