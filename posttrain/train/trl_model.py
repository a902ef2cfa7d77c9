"""Adaptation of models to what TRL's trainers assume, and protection of the configuration from their changes."""

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
NO_ROUTER_LOSS = "the router's load-balancing loss is left out: "  # beginning of a note; the reason follows


@contextlib.contextmanager
def prepare_trl_model(causal: Any) -> Iterator[None]:
    """Context manager around the construction of a trainer that restores the configuration's router settings.

    In the configuration, which is saved with the model, TRL's settings would make every later user of the model compute
    the router loss.
    """
    name_backbone(causal)
    text = causal.config.get_text_config()
    saved = {key: getattr(text, key) for key in ROUTER if hasattr(text, key)}
    try:
        yield
    finally:
        for key, value in saved.items():
            setattr(text, key, value)


def name_backbone(causal: Any) -> None:
    """Make `base_model` the module below the head, also if the class names a part that it does not have (Llama 4)."""
    below = backbone(causal)
    if causal.base_model is not below:
        causal.base_model_prefix = next(name for name, module in causal.named_children() if module is below)


def can_balance_router(causal: Any) -> bool:
    """Return whether TRL can compute the router's load-balancing loss; True without a router."""
    text = causal.config.get_text_config()
    return not has_router(causal) or all(hasattr(text, key) for key in EXPERTS)


def has_router(causal: Any) -> bool:
    """Return whether the configuration has settings of a router loss."""
    return hasattr(causal.config.get_text_config(), ROUTER[0])


def why_no_router_loss(causal: Any, *, weighed: bool) -> str:
    """Return why the router's load-balancing loss is left out; "" if it is computed or the model has no router.

    weighed: the objective weights tokens, which TRL's loss does not support.
    """
    if not has_router(causal):
        return ""
    if not can_balance_router(causal):
        return "TRL cannot compute it for this architecture"
    return "it is not computed beside an objective with weights of tokens" if weighed else ""


def check_router(causal: Any, coefficient: float | None, *, weighed: bool) -> None:
    """Raise ModelError for a coefficient of the router's loss that would multiply nothing."""
    why = why_no_router_loss(causal, weighed=weighed) if has_router(causal) else "the model has no router"
    if coefficient and why:
        raise ModelError(f"objective.router_aux_loss does nothing: {why}", hint="remove it")


def fuse_divided_head(causal: Any) -> None:
    """Make `model(..., labels=labels, fused_lm_head=True)` score labels with a vocabulary-parallel head.

    No-op if the head is not divided. TRL's own forward, which this replaces, would gather the whole head on every rank.
    """
    if vocabulary_shard(causal.get_output_embeddings()) is None:
        return
    forward, text = causal.forward, causal.config.get_text_config()

    def score_labels(labels: Tensor, **kwargs: Any) -> Any:
        out = backbone(causal)(**kwargs | {"use_cache": False})
        mask = labels != IGNORED
        found = token_scores(Head(causal), out.last_hidden_state[:, :-1][mask], labels[mask], top_k=1)
        found["right"] = found["topk_chosen"][:, 0]
        logp, entropy, right = (
            found[name].new_zeros(mask.shape).masked_scatter(mask, found[name]) for name in ("logp", "entropy", "right")
        )
        balance: Any = None
        if kwargs.get(ROUTER[0]):
            experts, chosen = (getattr(text, key) for key in EXPERTS)
            balance = load_balancing_loss_func(out.router_logits, experts, chosen, kwargs.get("attention_mask"))  # type: ignore[call-arg]
        return FusedCausalLMOutput(log_probs=logp, entropy=entropy, is_top1=right, label_mask=mask, aux_loss=balance)

    @wraps(forward)
    def run(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **kwargs)
        labels = kwargs.pop("labels")[:, 1:]
        return as_forward(causal, lambda: score_labels(labels, **kwargs))

    causal.forward = run
