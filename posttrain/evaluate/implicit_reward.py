"""Implicit reward of a DPO-trained model: its log-ratio to the reference model, token by token (2404.12358).

    rewards:
      - use: implicit_reward
        params: {path: runs/dpo, reference: Qwen/Qwen2.5-1.5B-Instruct, beta: 0.1}

The sum over tokens is DPO's reward of the answer; a drop of the prefix sums marks the token at which the answer went
wrong according to the model. In a `search` it scores each partial trace: search by likelihood ratio. Both models run in
the trainer's process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from posttrain.data.render import Example
from posttrain.errors import RewardError
from posttrain.evaluate.model_reward import render_completion
from posttrain.recipe.section import ModelName
from posttrain.recipe.sections import Data, Model
from posttrain.verify.contract import Score, in_trainer


def open_models(
    *, path: str = "", reference: str = "", base_dir: str = ".", device: str = "auto", dtype: str = "auto", **_: Any
) -> None:
    """Load both models, before the policy is loaded. Raises ModelError, and RewardError for different vocabularies."""
    policy, start = (_load_model(model_path, base_dir, device, dtype) for model_path in (path, reference))
    if policy.tokenizer.get_vocab() != start.tokenizer.get_vocab():
        raise RewardError(
            f"implicit_reward: {path} and {reference} have different vocabularies",
            hint="`reference` is the model that `path` was trained from",
        )


def CHECK(_: str, params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors of the recipe's parameters (`verify.load`)."""
    missing = [name for name in ("path", "reference") if not params.get(name)]
    if missing:
        yield f"needs params: {{{', '.join(f'{name}: MODEL' for name in missing)}}}"
    elif params["path"] == params["reference"]:
        yield "`path` and `reference` are the same model: every reward would be 0"
    if not params.get("beta", 0.1) > 0:
        yield f"beta {params['beta']} is not above 0"


def close_models() -> None:
    """Release both models."""
    _load_model.cache_clear()


@in_trainer(open_models, close_models)
def score(
    completions: Sequence[str],
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    *,
    path: ModelName = "",
    reference: ModelName = "",
    beta: float = 0.1,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    base_dir: str = ".",
) -> list[Score]:
    """Return beta times the log-ratio of path to reference, summed over the tokens of each completion.

    None for an empty completion.

    Logged parts: `lowest`, the lowest prefix sum, and `lowest_at`, its position as a share of the tokens (0: no prefix
    sum is below 0). A drop that is not recovered means that the model considers the answer wrong from there on.
    """
    import torch

    from posttrain.loss.offline_rl import token_credit

    models = [_load_model(model_path, base_dir, device, dtype) for model_path in (path, reference)]
    scores: list[Score] = []
    for text, asked, offered in zip(completions, messages, tools or [None] * len(completions), strict=True):
        example = _render_completion(models[0], asked, text, offered)
        if example is None:
            scores.append(None)
            continue
        logp, ref_logp = (_trained_logps(model, example) for model in models)
        credit = token_credit(logp, ref_logp, torch.ones_like(logp, dtype=torch.bool), beta=beta)
        sums = torch.cat([torch.zeros(1), credit.prefix_rewards])
        parts = {"lowest": float(sums.min()), "lowest_at": float(sums.argmin()) / len(logp)}
        scores.append({"reward": float(credit.sequence_rewards), **parts})
    return scores


def _render_completion(loaded: Any, messages: Sequence[Any], completion: str, tools: Any) -> Example | None:
    """Render the completion after its prompt, as DPO renders one side of a pair; None if it has no tokens."""
    example = render_completion(messages, completion, tools, Data(source="-"), loaded.tokenizer)
    return example if completion and any(example.trained[1:]) else None


def _trained_logps(loaded: Any, example: Example) -> Any:
    """Compute log-probs [T] of the trained tokens, float32 on the CPU."""
    import torch

    ids = torch.tensor([example.ids], device=loaded.device)
    with torch.no_grad(), loaded.autocast():
        logps = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    token_logps = logps.gather(-1, ids[0, 1:, None])[:, 0].cpu()
    return token_logps[torch.tensor(example.trained[1:], dtype=torch.bool)]


@functools.cache
def _load_model(path: str, base_dir: str, device: Any, dtype: Any) -> Any:
    """Load a model in evaluation mode; cached while a scorer is open."""
    from posttrain.models import load

    loaded = load.load(Model(path=path, device=device, dtype=dtype), Path(base_dir), seed=0)
    loaded.model.eval().requires_grad_(False)
    return loaded
