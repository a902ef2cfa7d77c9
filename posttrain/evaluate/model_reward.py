"""Reward models as a reward of a recipe: a single model, or an ensemble that the policy cannot exploit as easily.

    rewards:
      - {use: reward_model, params: {path: runs/rm/final}}
      - {use: reward_model, params: {path: [runs/rm-0/final, runs/rm-1/final], aggregate: uwo}}

Runs in the trainer's process, on its GPU if there is one, with all rows of a step in one call: worker processes may be
killed, have no GPU and would each load the model. torch is imported when the first model is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from posttrain.data.render import Example, prompt_messages, render_example
from posttrain.errors import RewardError
from posttrain.images import escape_placeholders
from posttrain.recipe.preference_sections import HEAD_A_LABEL
from posttrain.recipe.section import ModelName
from posttrain.recipe.sections import Data, Model
from posttrain.verify.contract import Score, in_trainer

Aggregate = Literal["auto", "mean", "wco", "uwo", "brme", "maxmin"]


@dataclass(frozen=True)
class LoadedRewardModel:
    """A loaded reward model and the card that describes its outputs."""

    model: Any  # posttrain.models.load.LoadedModel
    card: Any  # posttrain.models.scorer.Card
    window: int


def open_models(
    *, path: str | list[str] = "", base_dir: str = ".", device: str = "auto", dtype: str = "auto", **_: Any
) -> None:
    """Load the models, so that a wrong path is reported before the policy is loaded."""
    _load_models(path, base_dir, device, dtype)


def CHECK(_: str, params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of the recipe's parameters (`verify.load`)."""
    path = params.get("path")
    paths = path if isinstance(path, list) else [path]
    if not paths or not all(paths):
        yield "needs params: {path: FOLDER}, a folder that `posttrain reward-model` made"
    if "tiny" in paths:
        yield "tiny is no reward model: `posttrain reward-model` makes one"


def close_models() -> None:
    """Release all models."""
    _load.cache_clear()


@in_trainer(open_models, close_models)
def score(
    completions: Sequence[str],
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    images: Sequence[Any] | None = None,
    *,
    path: ModelName | list[ModelName] = "",
    aggregate: Aggregate = "auto",
    uwo_coef: float = 0.5,
    ddof: int = 0,
    nominal_weight: float = 0.6,
    min_scope: Literal["sample", "batch"] = "sample",
    weights: dict[str, float] | None = None,
    calibrate: bool | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    batch_tokens: int = 16384,
    base_dir: str = ".",
) -> list[Score]:
    """Return the score of reward models for each completion, after the row's own prompt or messages, with its images.

    path: a folder of `posttrain reward-model` or any sequence classifier, or several. Members are all heads of all
    models; aggregate combines them: mean; wco, the lowest; uwo, mean - uwo_coef * variance (0.5 for best-of-n, 0.1 in
    RL; arXiv 2310.02743); brme, for Gaussian heads (arXiv 2409.15360; nominal_weight, min_scope); maxmin, the member
    that is lowest on average over the rows of the call (arXiv 2402.08925). auto: brme for Gaussian heads, maxmin for a
    mixture, uwo for several members. A model with one head per label gives the sum of its labels by `weights` (default
    1 each), with the labels as parts. calibrate: first subtract each head's mean on held-out answers and divide by its
    standard deviation there; the default for several members. Several members also give the part `spread`, their
    standard deviation.
    """
    import torch

    models = _load_models(path, base_dir, device, dtype)
    absent = [None] * len(completions)
    rows = list(zip(messages, tools or absent, images or absent, completions, strict=True))
    several = len(models) > 1 or (len(models[0].card.heads) > 1 and models[0].card.use not in HEAD_A_LABEL)
    centered = several if calibrate is None else calibrate
    scores = [_score_members(model, rows, batch_tokens, centered, weights) for model in models]
    table = torch.cat([members.means for members in scores], 1).T[:, None]  # [members, 1, rows]
    known = [members.stds for members in scores if members.stds is not None]
    stds = torch.cat(known, 1).T[:, None] if len(known) == len(models) else None
    method = _select_aggregate(aggregate, models, len(table), stds is not None)
    settings = {"uwo_coef": uwo_coef, "ddof": ddof, "nominal_weight": nominal_weight, "min_scope": min_scope}
    combined = _combine_members(method, table, stds, settings)
    parts = {name: values for members in scores for name, values in members.parts.items()}
    if len(table) > 1:
        parts["spread"] = table[:, 0].std(0, correction=0)
    if not parts:
        return combined.tolist()
    return [{"reward": combined[n].item(), **{k: v[n].item() for k, v in parts.items()}} for n in range(len(combined))]


class MemberScores(NamedTuple):
    """Scores of the heads of one model."""

    means: Any  # [rows, members]
    stds: Any  # [rows, members], or None for heads that do not predict a standard deviation
    parts: dict[str, Any]  # name of a label -> [rows]


def _score_members(
    member: LoadedRewardModel,
    rows: Sequence[Row],
    batch_tokens: int,
    centered: bool,
    weights: dict[str, float] | None,
) -> MemberScores:
    """Score rows with one model as members of the ensemble: one per head, or one for all labels of the model."""
    import torch

    means, log_stds = _compute_outputs(member, rows, batch_tokens)
    means = means.sigmoid() if member.card.use == "soft_label" else means
    scale = torch.ones(1)
    if centered and member.card.center:
        center, scale = torch.tensor(member.card.center), torch.tensor(member.card.scale)
        means = (means - center) / scale
    stds = None if log_stds is None else log_stds.clamp(-5, 5).exp() / scale
    if member.card.use not in HEAD_A_LABEL:
        return MemberScores(means, stds, {})
    parts = {name: means[:, n] for n, name in enumerate(member.card.heads)}
    return MemberScores((means * _label_weights(weights, member.card.heads)).sum(1, keepdim=True), stds, parts)


def _select_aggregate(
    aggregate: Aggregate, reward_models: Sequence[LoadedRewardModel], members: int, gaussian: bool
) -> str:
    """Return the aggregate to use, resolving `auto`. Raises RewardError for brme without Gaussian heads."""
    if aggregate == "brme" and not gaussian:
        raise RewardError(
            "aggregate brme needs Gaussian heads", hint="train a reward model with objective: {use: gaussian}"
        )
    if aggregate != "auto":
        return aggregate
    if gaussian:
        return "brme"
    return "maxmin" if any(m.card.use == "mixture" for m in reward_models) else "uwo" if members > 1 else "mean"


def _combine_members(method: str, table: Any, stds: Any, settings: dict[str, Any]) -> Any:
    """Combine members [K,1,rows] to rewards [rows]."""
    import torch

    from posttrain.loss import reward_model as formulas

    if method == "brme":
        weight, scope = settings["nominal_weight"], settings["min_scope"]
        return formulas.brme(table, stds, nominal_weight=weight, min_scope=scope).rewards[0]
    if method == "maxmin":  # the KL is the same for all members, so it does not change which one is lowest
        return formulas.maxmin(table, torch.zeros_like(table[0]), beta=0.0).rewards[0]
    objective: Any = method
    return formulas.ensemble(table, objective=objective, uwo_coef=settings["uwo_coef"], ddof=settings["ddof"])[0]


def _label_weights(weights: dict[str, float] | None, heads: Sequence[str]) -> Any:
    """Return the weight of each head by its label; 1 each without weights. Raises RewardError for an unknown label."""
    import torch

    unknown = set(weights or ()) - set(heads)
    if unknown:
        raise RewardError(
            f"weights names {sorted(unknown)[0]}, which is not a label", allowed=f"labels: {', '.join(heads)}"
        )
    return torch.tensor([1.0 if weights is None else weights.get(name, 0.0) for name in heads])


Row = tuple[Any, Any, Any, str]  # messages, tools, images, completion


def _compute_outputs(reward_model: LoadedRewardModel, rows: Sequence[Row], batch_tokens: int) -> Any:
    """Compute (scores [rows, heads], log standard deviations [rows, heads] or None)."""
    from posttrain.models import scorer

    inputs = [read_row(reward_model, *row) for row in rows]
    ids, images = [row.ids for row in inputs], [row.images for row in inputs]
    scores = scorer.score_rows(reward_model.model, ids, images, batch_tokens=batch_tokens)
    return tuple(scores.chunk(2, dim=1)) if reward_model.card.gaussian else (scores, None)


def read_row(
    reward_model: LoadedRewardModel, messages: Sequence[Any], tools: Any, images: Sequence[str] | None, completion: str
) -> Example:
    """Render a completion after its prompt as the reward model's input, cut from the left to its window.

    Raises RewardError for a row with images that exceeds the window, and for images if the model reads none.
    """
    section = Data(
        source="-", **{k: v for k, v in reward_model.card.data.items() if k != "prompt_template"}, train_on="all"
    )
    tokenizer, reader = reward_model.model.tokenizer, reward_model.model.images
    if images and reader is None:
        raise RewardError(
            f"the rows have images, and the reward model {reward_model.model.source} reads none",
            hint="train one on rows with images: `posttrain reward-model`",
        )
    found = render_completion(messages, completion, tools, section, tokenizer, reader, images)
    if found.images and len(found.ids) > reward_model.window:
        raise RewardError(
            f"a row with images has {len(found.ids)} tokens, and the reward model {reward_model.model.source} reads"
            f" {reward_model.window}",
            hint="a smaller `data.image.max_pixels`, or shorter completions",
        )
    return replace(found, ids=found.ids[-reward_model.window :], trained=found.trained[-reward_model.window :])


def render_completion(
    messages: Sequence[Any],
    completion: str,
    tools: Any,
    section: Data,
    tokenizer: Any,
    reader: Any = None,
    images: Sequence[str] | None = None,
) -> Example:
    """Render a completion after its prompt: with the chat template if the section and the tokenizer have one."""
    shown = {"images": list(images)} if images else {}
    if isinstance(messages[0]["content"], list):  # a prompt that is a conversation
        messages = messages[0]["content"]
    if shown:  # only user messages contain the row's images
        completion = escape_placeholders(completion)
        messages = [
            m if m["role"] == "user" else {**m, "content": escape_placeholders(str(m["content"]))} for m in messages
        ]
    if not section.chat or not tokenizer.chat_template:
        row = {"uid": "", "prompt": messages[-1]["content"], "completion": completion, **shown}
        return render_example(row, tokenizer, section.model_copy(update={"chat": False}), reader)
    asked = prompt_messages({"uid": "", "messages": messages}, section)
    row = {"uid": "", "messages": [*asked, {"role": "assistant", "content": completion}], "tools": tools, **shown}
    return render_example(row, tokenizer, section, reader)


def _load_models(path: str | list[str], base_dir: str, device: str, dtype: str) -> list[LoadedRewardModel]:
    """Return the models at the paths, each loaded on first use."""
    return [_load(member_path, base_dir, device, dtype) for member_path in ([path] if isinstance(path, str) else path)]


@functools.cache
def _load(path: str, base_dir: str, device: Any, dtype: Any) -> LoadedRewardModel:
    """Load a reward model with its card and window; cached while a scorer is open."""
    from posttrain.models import scorer

    section = Model(path=path, device=device, dtype=dtype)
    loaded = scorer.load(section, Path(base_dir))
    folder = loaded.origin.base.path if loaded.origin else None
    return LoadedRewardModel(loaded, scorer.read_card(folder, loaded.model.config.num_labels), loaded.window or 1 << 30)
