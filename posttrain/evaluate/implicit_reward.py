"""What a model that was trained by DPO says of an answer, token by token: its log-ratio to the reference (2404.12358).

    rewards:
      - use: implicit_reward
        params: {path: runs/dpo, reference: Qwen/Qwen2.5-1.5B-Instruct, beta: 0.1}

The sum is DPO's reward of the answer; a fall of the sums up to each token marks where the model thinks that it went
wrong. In a `search` it scores each trace so far: search by likelihood ratio. Both models run in the trainer's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from posttrain.data.render import Example, prompt_messages, render_example
from posttrain.errors import RewardError
from posttrain.recipe.section import ModelName
from posttrain.recipe.sections import Data, Model
from posttrain.verify.contract import Score, in_trainer

_loaded: dict[tuple[str, ...], Any] = {}  # (path, base_dir, device, dtype) -> model, while a scorer is open


def open_models(
    *, path: str = "", reference: str = "", base_dir: str = ".", device: str = "auto", dtype: str = "auto", **_: Any
) -> None:
    """Load both models, before the policy is loaded. Raises ModelError, RewardError for vocabularies that differ."""
    policy, start = (_load_model(one, base_dir, device, dtype) for one in (path, reference))
    if policy.tokenizer.get_vocab() != start.tokenizer.get_vocab():
        raise RewardError(
            f"implicit_reward: {path} and {reference} read texts as different tokens",
            hint="`reference` is the model that `path` was trained from",
        )


def CHECK(_: str, params: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the recipe's parameters (`verify.load`)."""
    missing = [name for name in ("path", "reference") if not params.get(name)]
    if missing:
        yield f"needs params: {{{', '.join(f'{name}: MODEL' for name in missing)}}}"
    elif params["path"] == params["reference"]:
        yield "`path` and `reference` are one model: every reward would be 0"
    if not params.get("beta", 0.1) > 0:
        yield f"beta {params['beta']} is not above 0"


def close_models() -> None:
    """Let both models go."""
    _loaded.clear()


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
    """beta times the log-ratio of path to reference, summed over the tokens of each completion; None for an empty one.

    Logged parts: `lowest`, the least of the sums up to a token, and `lowest_at`, after which share of the tokens it
    stands (0: no sum is below 0). A fall that is not made up again means that the model has lost its trust there.
    """
    import torch

    from posttrain.loss.offline_rl import token_credit

    models = [_load_model(one, base_dir, device, dtype) for one in (path, reference)]
    found: list[Score] = []
    for text, asked, offered in zip(completions, messages, tools or [None] * len(completions), strict=True):
        example = _render_completion(models[0], asked, text, offered)
        if example is None:
            found.append(None)
            continue
        own, theirs = (_trained_logps(model, example) for model in models)
        credit = token_credit(own, theirs, torch.ones_like(own, dtype=torch.bool), beta=beta)
        sums = torch.cat([torch.zeros(1), credit.prefix_rewards])
        parts = {"lowest": float(sums.min()), "lowest_at": float(sums.argmin()) / len(own)}
        found.append({"reward": float(credit.sequence_rewards), **parts})
    return found


def _render_completion(loaded: Any, messages: Sequence[Any], completion: str, tools: Any) -> Example | None:
    """The completion after its prompt, as DPO reads a side of a pair; None where no token of it is there."""
    if isinstance(messages[0]["content"], list):  # a prompt that is a conversation
        messages = messages[0]["content"]
    section = Data(source="-")
    if not loaded.tokenizer.chat_template:
        row = {"uid": "", "prompt": messages[-1]["content"], "completion": completion}
        example = render_example(row, loaded.tokenizer, section.model_copy(update={"chat": False}))
    else:
        asked = prompt_messages({"uid": "", "messages": messages}, section)
        row = {"uid": "", "messages": [*asked, {"role": "assistant", "content": completion}], "tools": tools}
        example = render_example(row, loaded.tokenizer, section)
    return example if completion and any(example.trained[1:]) else None


def _trained_logps(loaded: Any, example: Example) -> Any:
    """Log-probs [T] of the trained tokens, float32 on the CPU."""
    import torch

    ids = torch.tensor([example.ids], device=loaded.device)
    with torch.no_grad(), loaded.autocast():
        every = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    own = every.gather(-1, ids[0, 1:, None])[:, 0].cpu()
    return own[torch.tensor(example.trained[1:], dtype=torch.bool)]


def _load_model(path: str, base_dir: str, device: Any, dtype: Any) -> Any:
    from posttrain.models import load

    key = (path, base_dir, device, dtype)
    if key not in _loaded:
        loaded = load.load(Model(path=path, device=device, dtype=dtype), Path(base_dir), seed=0)
        loaded.model.eval().requires_grad_(False)
        _loaded[key] = loaded
    return _loaded[key]
