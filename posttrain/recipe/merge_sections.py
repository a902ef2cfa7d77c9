"""The sections of merging: models and parameters as mergekit writes them. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.recipe.section import ModelName, Positive, Section


class Filtered(Section):
    """A value for the tensors whose name holds `filter`; without one, for all that no filter before it took."""

    filter: str | None = Field(None, description="part of a tensor's name, e.g. mlp")
    value: float | list[float] = Field(description="a number, or a list that runs over the layers")


Setting = float | list[float] | list[Filtered]


class MergeParameters(Section):
    """mergekit's `parameters`. A value may be a number, a list that runs over the layers, or values by filter."""

    weight: Setting | None = Field(None, description="default 1; negative weights subtract")
    density: Setting | None = Field(None, description="share of the entries of a difference that is kept, 0 to 1")
    gamma: Setting | None = Field(None, description="breadcrumbs: share of the largest entries that is dropped, 0 to 1")
    epsilon: Setting | None = Field(None, description="della: how far the chance to stay lies from density, 0 to 1")
    lambda_: Setting | None = Field(None, alias="lambda", description="factor on the sum of the differences")
    t: Setting | None = Field(None, description="slerp: 0 is the first model, 1 the second")
    alpha: Setting | None = Field(None, description="reasoning_vector: its factor")
    scale: Setting | None = Field(None, description="update_selective: factor on what is kept")
    normalize: bool | None = Field(None, description="divide by the sum of the weights")
    rescale: bool | None = Field(None, description="dare, della: divide what is kept by its chance")
    granularity: Literal["tensor", "global"] | None = Field(None, description="update_selective: share of what")
    at_least_one: bool | None = Field(None, description="update_selective: keep one entry of tiny tensors")
    filter_wise: bool | None = Field(None, description="model_stock: one t a row instead of one a tensor")
    mode: Literal["last_k", "ema"] | None = Field(None, description="checkpoint_average")
    k: Positive | None = Field(None, description="checkpoint_average: the last k models; default: all")
    decay: float | None = Field(None, description="checkpoint_average, ema: share of the average that stays, below 1")
    bias_correction: bool | None = Field(None, description="checkpoint_average, ema: start at 0 and divide it out")
    eps: float | None = Field(None, description="slerp, model_stock: smallest norm; ram: smallest change")
    dot_threshold: float | None = Field(None, description="slerp: linear above this cosine, below 1")
    combination: Literal["cat", "svd", "linear"] | None = Field(None, description="lora_combine: how")
    rank: Positive | None = Field(None, description="lora_combine, svd: rank of the result")
    int8_mask: bool | None = Field(None, description="in mergekit's files; changes nothing here")


class MergeModel(Section):
    """One input of a merge."""

    model: ModelName = Field(description="a directory, a hub id, or `stage:NAME` in a pipeline")
    parameters: MergeParameters = Field(default_factory=MergeParameters)
