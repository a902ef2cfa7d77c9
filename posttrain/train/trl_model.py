"""What TRL's trainers take for granted of a model, and what they leave changed in its configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.trainer.utils import FusedCausalLMOutput

from posttrain.errors import ModelError
from posttrain.models.adapters import backbone
from posttrain.train.logprobs import Head, token_scores
from posttrain.train.sharding import as_forward
from posttrain.train.tensor_split import vocabulary_shard

ROUTER = ("output_router_logits", "router_aux_loss_coef")
EXPERTS = ("num_experts", "num_experts_per_tok")
IGNORED = -100  # the label of a token that is not scored
UNBALANCED = "the router's load-balancing loss is left out: "  # a note, which says why


@contextlib.contextmanager
def prepare_trl_model(causal: Any) -> Iterator[None]:
    """Around the making of a trainer. Its settings of the router stay with the trainer: in the configuration, which is
    saved with the model, they would have every later user of the model compute that loss."""
    name_backbone(causal)
    text = causal.config.get_text_config()
    kept = {key: getattr(text, key) for key in ROUTER if hasattr(text, key)}
    try:
        yield
    finally:
        for key, value in kept.items():
            setattr(text, key, value)


def name_backbone(causal: Any) -> None:
    """Have `base_model` be what stands below the head, also where the class names a part that it has not (Llama 4)."""
    below = backbone(causal)
    if causal.base_model is not below:
        causal.base_model_prefix = next(name for name, module in causal.named_children() if module is below)


def balances(causal: Any) -> bool:
    """Whether TRL can compute the router's load-balancing loss; True where there is no router."""
    text = causal.config.get_text_config()
    return not has_router(causal) or all(hasattr(text, key) for key in EXPERTS)


def has_router(causal: Any) -> bool:
    """Whether the configuration knows of a router's loss."""
    return hasattr(causal.config.get_text_config(), ROUTER[0])


def left_out(causal: Any, *, weighed: bool) -> str:
    """Why a mixture of experts is trained without the router's loss; empty where it is not, or the model is none.

    weighed: the loss weighs tokens, which is no loss of TRL's.
    """
    if not has_router(causal):
        return ""
    if not balances(causal):
        return "TRL cannot compute it for this architecture"
    return "it is not computed beside an objective with weights of tokens" if weighed else ""


def check_router(causal: Any, coefficient: float | None, *, weighed: bool) -> None:
    """Raises ModelError for a coefficient of the router's loss where there is none to multiply."""
    why = left_out(causal, weighed=weighed) if has_router(causal) else "the model has no router"
    if coefficient and why:
        raise ModelError(f"objective.router_aux_loss does nothing: {why}", hint="remove it")


def fuse_divided_head(causal: Any) -> None:
    """Have `model(..., labels=labels, fused_lm_head=True)` score labels with a head whose tokens ranks divide; nothing
    where they do not. TRL's own forward, which this goes around, brings the whole head to every rank."""
    if vocabulary_shard(causal.get_output_embeddings()) is None:
        return
    forward, text = causal.forward, causal.config.get_text_config()

    def score_labels(labels: Tensor, **given: Any) -> Any:
        out = backbone(causal)(**given | {"use_cache": False})
        kept = labels != IGNORED
        found = token_scores(Head(causal), out.last_hidden_state[:, :-1][kept], labels[kept], top_k=1)
        found["right"] = found["topk_chosen"][:, 0]
        logp, entropy, right = (
            found[name].new_zeros(kept.shape).masked_scatter(kept, found[name]) for name in ("logp", "entropy", "right")
        )
        balance: Any = None
        if given.get(ROUTER[0]):
            experts, chosen = (getattr(text, key) for key in EXPERTS)
            balance = load_balancing_loss_func(out.router_logits, experts, chosen, given.get("attention_mask"))  # type: ignore[call-arg]
        return FusedCausalLMOutput(log_probs=logp, entropy=entropy, is_top1=right, label_mask=kept, aux_loss=balance)

    @wraps(forward)
    def run(*args: Any, fused_lm_head: bool = False, **given: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **given)
        labels = given.pop("labels")[:, 1:]
        return as_forward(causal, lambda: score_labels(labels, **given))

    causal.forward = run
