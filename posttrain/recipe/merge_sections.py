"""The sections of merging: models, slices, parameters and tokens as mergekit writes them. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.recipe.section import Idle, ModelName, Positive, Section


class Filtered(Section):
    """A value for the tensors whose name holds `filter`; without one, for all that no filter before it took."""

    filter: str | None = Field(None, description="part of a tensor's name, e.g. mlp")
    value: float | list[float] = Field(description="a number, or a list that runs over the layers")


Setting = float | list[float] | list[Filtered]


LAST_K = Idle("merge_method = checkpoint_average and mode != ema", "with mode last_k", "write `mode: ema`", note=True)


class MergeParameters(Section):
    """mergekit's `parameters`. A value may be a number, a list that runs over the layers, or values by filter."""

    weight: Annotated[
        Setting | None, Idle("not is_ours and not weight in reads", "in {merge_method}, as in mergekit", note=True)
    ] = Field(None, description="default 1; negative weights subtract")
    density: Annotated[
        Setting | None, Idle("not is_ours and not density in reads", "in {merge_method}, as in mergekit", note=True)
    ] = Field(None, description="share of the entries of a difference that is kept, 0 to 1; default 1")
    gamma: Setting | None = Field(None, description="breadcrumbs: share of the largest entries that is dropped, 0 to 1")
    epsilon: Setting | None = Field(
        None, description="della: how far the chance to stay lies from density, 0 to 1; ram: as `eps`"
    )
    lambda_: Setting | None = Field(None, alias="lambda", description="factor on the sum of the differences")
    t: Setting | None = Field(
        None, description="slerp: 0 is the first model, 1 the second; nearswap: the longest way of an entry"
    )
    alpha: Setting | None = Field(None, description="reasoning_vector: its factor; ramplus_tl: largest ratio")
    r: Setting | None = Field(None, description="ramplus_tl: growth of changes that a model alone makes, by the ratio")
    scale: Setting | None = Field(
        None, description="passthrough: factor on the tensors; update_selective: on what is kept"
    )
    select_topk: Setting | None = Field(None, description="sce: share of the entries that vary which is kept, 0 to 1")
    normalize: Annotated[
        bool | None, Idle("not is_ours and not normalize in reads", "in {merge_method}, as in mergekit", note=True)
    ] = Field(None, description="divide by the sum of the weights")
    normalize_weights: bool | None = Field(None, description="multislerp: divide the weights by their sum")
    rescale: Annotated[
        bool | Literal["chance"] | None,
        Idle("not is_ours and not rescale in reads", "in {merge_method}, as in mergekit", note=True),
    ] = Field(
        None, description="true: give what is kept the L1 norm of the whole; chance (dare, della): divide by its chance"
    )
    nuslerp_flatten: bool | None = Field(None, description="nuslerp: whole tensors, not their rows")
    nuslerp_row_wise: bool | None = Field(None, description="nuslerp: along the first axis instead of the last")
    granularity: Literal["tensor", "global"] | None = Field(None, description="update_selective: share of what")
    at_least_one: bool | None = Field(None, description="update_selective: keep one entry of tiny tensors")
    filter_wise: bool | None = Field(None, description="model_stock: one t a row instead of one a tensor")
    mode: Literal["last_k", "ema"] | None = Field(None, description="checkpoint_average")
    k: Annotated[
        Positive | None, Idle("merge_method = checkpoint_average and mode = ema", "with mode ema", note=True)
    ] = Field(None, description="checkpoint_average: the last k models; default: all")
    decay: Annotated[float | None, LAST_K] = Field(
        None, description="checkpoint_average, ema: share of the average that stays, below 1"
    )
    bias_correction: Annotated[bool | None, LAST_K] = Field(
        None, description="checkpoint_average, ema: start at 0 and divide it out"
    )
    eps: float | None = Field(None, description="slerp, multislerp, model_stock: smallest norm; ram: smallest change")
    dot_threshold: float | None = Field(None, description="slerp: linear above this cosine, below 1")
    max_iter: Positive | None = Field(None, description="karcher: steps at most")
    tol: float | None = Field(None, description="karcher: length of a step that ends it, above 0")
    combination: Literal["cat", "svd", "linear"] | None = Field(None, description="lora_combine: how")
    rank: Positive | None = Field(None, description="lora_combine, svd: rank of the result")
    int8_mask: Annotated[
        bool | None, Idle("", ": it is a matter of mergekit's memory, not of the result", note=True)
    ] = Field(None, description="in mergekit's files; changes nothing here")


class MergeModel(Section):
    """One input of a merge."""

    model: ModelName = Field(description="a directory, a hub id, or `stage:NAME` in a pipeline")
    parameters: MergeParameters = Field(default_factory=MergeParameters)


class SliceSource(MergeModel):
    """Some layers of one model."""

    layer_range: list[int] = Field(
        min_length=2, max_length=2, description="[first, last + 1]: `[0, 24]` are the layers 0 to 23"
    )

    @model_validator(mode="after")
    def _rises(self) -> SliceSource:
        first, end = self.layer_range
        if not 0 <= first < end:
            raise ValueError(
                f"layer_range [{first}, {end}] holds no layer: write [first, last + 1], the first one is 0"
            )
        return self


class MergeSlice(Section):
    """Layers of the result: those of one model (passthrough), or merged from the same number of layers of several."""

    sources: list[SliceSource] = Field(min_length=1)
    base_model: ModelName | None = Field(None, description="of this slice; default: that of the merge")
    parameters: MergeParameters = Field(default_factory=MergeParameters)


class TokenFrom(Section):
    """Where the embedding of a token is taken from: nothing (zero), or another token of a model."""

    kind: Literal["zero", "model_token"] = Field(description="zero: zeros; model_token: another token's")
    model: ModelName | None = Field(None, description="model_token: one of the models")
    token: str | None = Field(None, description="model_token: its text; or `token_id`")
    token_id: int | None = Field(None, ge=0, description="model_token: its id; or `token`")

    @model_validator(mode="after")
    def _whole(self) -> TokenFrom:
        wanted = int(self.kind == "model_token")
        if int(self.model is not None) != wanted or (self.token is not None) + (self.token_id is not None) != wanted:
            raise ValueError(
                "`kind: model_token` takes `model` and one of `token` and `token_id`, `kind: zero` nothing"
            )
        return self


class TokenEmbedding(Section):
    """The embedding of one token of the result."""

    source: str | TokenFrom | None = Field(None, description="one of the models, or a token of one")
    force: bool = Field(False, description="also for the models that have the token")


class MergeTokenizer(Section):
    """The tokenizer of the result, for models whose vocabularies differ: embeddings are merged token by token."""

    source: str = Field("union", description="union (all tokens of all models), base, or one of the models")
    tokens: dict[str, TokenEmbedding] = Field(default_factory=dict, description="tokens with embeddings of their own")
    pad_to_multiple_of: Positive | None = Field(None, description="rows of the embedding, filled with its mean")
