"""Sections of a merge: models, slices, parameters and tokens, with mergekit's keys. Does not import torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from posttrain.recipe.section import Idle, ModelName, Positive, Section


class Filtered(Section):
    """A value for the tensors whose name contains `filter`; without a filter, for all tensors that no earlier filter
    matched."""

    filter: str | None = Field(None, description="part of a tensor's name, e.g. mlp")
    value: float | list[float] = Field(description="a number, or a list interpolated over the layers")


Setting = float | list[float] | list[Filtered]


def _read_flag(value: Any) -> Any:
    """Return 1.0 and 0.0, which mergekit writes in place of true and false, as a bool."""
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


Flag = Annotated[bool, BeforeValidator(_read_flag)]


LAST_K = Idle("merge_method = checkpoint_average and mode != ema", "with mode last_k", "write `mode: ema`", note=True)


class MergeParameters(Section):
    """mergekit's `parameters`. A value may be a number, a list interpolated over the layers, or values by filter."""

    weight: Annotated[
        Setting | None, Idle("not is_ours and not weight in reads", "in {merge_method}, as in mergekit", note=True)
    ] = Field(None, description="default 1; negative weights subtract")
    density: Annotated[
        Setting | None, Idle("not is_ours and not density in reads", "in {merge_method}, as in mergekit", note=True)
    ] = Field(None, description="fraction of the entries of a difference to keep, 0 to 1; default 1")
    gamma: Setting | None = Field(None, description="breadcrumbs: fraction of the largest entries to drop, 0 to 1")
    epsilon: Setting | None = Field(
        None, description="della: largest deviation of the keep probability from density, 0 to 1; ram: same as `eps`"
    )
    lambda_: Setting | None = Field(None, alias="lambda", description="factor on the sum of the differences")
    t: Setting | None = Field(
        None, description="slerp: 0 is the first model, 1 the second; nearswap: largest change of an entry"
    )
    alpha: Setting | None = Field(None, description="reasoning_vector: factor of the vector; ramplus_tl: largest ratio")
    r: Setting | None = Field(
        None, description="ramplus_tl: growth factor, by the ratio, of changes that only one model makes"
    )
    scale: Setting | None = Field(
        None, description="passthrough: factor on the tensors; update_selective: factor on the kept entries"
    )
    select_topk: Setting | None = Field(None, description="sce: fraction of the varying entries to keep, 0 to 1")
    normalize: Annotated[
        Flag | None, Idle("not is_ours and not normalize in reads", "in {merge_method}, as in mergekit", note=True)
    ] = Field(None, description="divide by the sum of the weights")
    normalize_weights: Flag | None = Field(None, description="multislerp: divide the weights by their sum")
    rescale: Annotated[
        Flag | Literal["chance"] | None,
        Idle("not is_ours and not rescale in reads", "in {merge_method}, as in mergekit", note=True),
    ] = Field(
        None,
        description="true: rescale the kept entries to the L1 norm of the whole; chance (dare, della): divide "
        "by the keep probability",
    )
    nuslerp_flatten: Flag | None = Field(None, description="nuslerp: treat whole tensors as vectors, not their rows")
    nuslerp_row_wise: Flag | None = Field(None, description="nuslerp: along the first axis instead of the last")
    granularity: Literal["tensor", "global"] | None = Field(
        None, description="update_selective: density per tensor, or over the whole model"
    )
    at_least_one: Flag | None = Field(None, description="update_selective: keep one entry of tiny tensors")
    filter_wise: Flag | None = Field(None, description="model_stock: one t per row instead of one per tensor")
    mode: Literal["last_k", "ema"] | None = Field(
        None, description="checkpoint_average: the mean of the last k models, or an exponential moving average"
    )
    k: Annotated[
        Positive | None, Idle("merge_method = checkpoint_average and mode = ema", "with mode ema", note=True)
    ] = Field(None, description="checkpoint_average: the last k models; default: all")
    decay: Annotated[float | None, LAST_K] = Field(
        None, description="checkpoint_average, ema: decay of the average, below 1"
    )
    bias_correction: Annotated[Flag | None, LAST_K] = Field(
        None, description="checkpoint_average, ema: start at 0 and divide the bias out"
    )
    eps: float | None = Field(None, description="slerp, multislerp, model_stock: smallest norm; ram: smallest change")
    dot_threshold: float | None = Field(None, description="slerp: interpolate linearly above this cosine, below 1")
    max_iter: Positive | None = Field(None, description="karcher: maximum number of iterations")
    tol: float | None = Field(None, description="karcher: stop when a step is shorter than this, above 0")
    combination: Literal["cat", "svd", "linear"] | None = Field(
        None, description="lora_combine: how adapters are combined"
    )
    rank: Positive | None = Field(None, description="lora_combine, svd: rank of the result")
    int8_mask: Annotated[Flag | None, Idle("", ": it only affects mergekit's memory use", note=True)] = Field(
        None, description="accepted from mergekit's files; has no effect here"
    )


class MergeModel(Section):
    """One input model of a merge."""

    model: ModelName = Field(description="a directory, a hub id, or `stage:NAME` in a pipeline")
    parameters: MergeParameters = Field(default_factory=MergeParameters)


class SliceSource(MergeModel):
    """A range of layers of one model."""

    layer_range: list[int] = Field(
        min_length=2, max_length=2, description="[first, last + 1]: `[0, 24]` are the layers 0 to 23"
    )

    @model_validator(mode="after")
    def _rises(self) -> Self:
        first, end = self.layer_range
        if not 0 <= first < end:
            raise ValueError(
                f"layer_range [{first}, {end}] holds no layer: write [first, last + 1], the first one is 0"
            )
        return self


class MergeSlice(Section):
    """Layers of the result: copied from one model (passthrough), or merged from the same number of layers of several
    models."""

    sources: list[SliceSource] = Field(min_length=1)
    base_model: ModelName | None = Field(None, description="base model of this slice; default: the base of the merge")
    parameters: MergeParameters = Field(default_factory=MergeParameters)


class TokenFrom(Section):
    """Source of a token's embedding: zeros, or another token of a model."""

    kind: Literal["zero", "model_token"] = Field(description="zero: zeros; model_token: another token's")
    model: ModelName | None = Field(None, description="model_token: one of the models")
    token: str | None = Field(None, description="model_token: its text; or `token_id`")
    token_id: int | None = Field(None, ge=0, description="model_token: its id; or `token`")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        wanted = int(self.kind == "model_token")
        if int(self.model is not None) != wanted or (self.token is not None) + (self.token_id is not None) != wanted:
            raise ValueError(
                "`kind: model_token` takes `model` and one of `token` and `token_id`, `kind: zero` nothing"
            )
        return self


class TokenEmbedding(Section):
    """The embedding of one token of the result."""

    source: str | TokenFrom | None = Field(None, description="one of the models, or a token of one of them")
    force: bool = Field(False, description="also replace the embedding of models that have the token")


class MergeTokenizer(Section):
    """The tokenizer of the result if vocabularies differ; embeddings are merged token by token."""

    source: str = Field("union", description="union (all tokens of all models), base, or one of the models")
    tokens: dict[str, TokenEmbedding] = Field(
        default_factory=dict, description="tokens whose embeddings are given explicitly"
    )
    pad_to_multiple_of: Positive | None = Field(
        None, description="round the rows of the embedding up to a multiple; new rows hold the mean embedding"
    )
