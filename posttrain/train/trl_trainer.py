"""Construction of a TRL trainer around posttrain's model and optimizer, with the HF trainer's own decisions disabled.

The model is adapted to what TRL assumes, and its configuration protected from TRL's changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import wraps
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from transformers import PrinterCallback, TrainingArguments
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.trainer.utils import FusedCausalLMOutput

from posttrain.errors import ModelError
from posttrain.models.adapters import backbone, causal_of
from posttrain.models.load import LoadedModel
from posttrain.seeds import derive
from posttrain.train import data_parallel, distributed
from posttrain.train.collate import IGNORED
from posttrain.train.hf_trainer import Job
from posttrain.train.logprobs import Head, token_scores
from posttrain.train.sharding import as_forward
from posttrain.train.tensor_split import vocabulary_shard

ROUTER = ("output_router_logits", "router_aux_loss_coef")
EXPERTS = ("num_experts", "num_experts_per_tok")
NO_ROUTER_LOSS = "the router's load-balancing loss is left out: "  # beginning of a note; the reason follows


def build_trainer(kind: Any, config: type[TrainingArguments], job: Job, options: dict[str, Any], **parts: Any) -> Any:
    """Build a TRL trainer of class `kind` around the job's model and optimizer.

    options: settings of this kind of trainer. parts: data set and collator.
    """
    check_head(job.loaded)
    dtypes = {name: p.dtype for name, p in job.loaded.model.named_parameters() if p.requires_grad}
    data_parallel.broadcast_weights(job.loaded.model)
    causal = causal_of(job.loaded.model)
    with distributed.hide_process_group(), prepare_trl_model(causal):
        args = config(**arguments(job), **options)
        args._n_gpu = min(args.n_gpu, 1)  # one device per process; otherwise DataParallel would use all visible GPUs
        trainer = kind(
            model=job.loaded.model,
            args=args,
            processing_class=job.loaded.tokenizer,
            optimizers=(job.optimizer, None),
            **parts,
        )
    # Loaded moments stay where the optimizer keeps them: accelerate would move all of them to the GPU and back.
    trainer.optimizer = AcceleratedOptimizer(job.optimizer, device_placement=False)
    trainer.optimizer._is_accelerate_prepared = True
    fuse_divided_head(causal)
    trainer.job = job
    trainer.model_accepts_loss_kwargs = True  # RunLoop's losses are divided by the denominator of the whole step
    trainer.remove_callback(PrinterCallback)  # stdout is for data
    for name, parameter in job.loaded.model.named_parameters():
        # TRL casts the adapter of a 4-bit model to bfloat16, in which small updates are lost.
        if parameter.dtype != dtypes.get(name, parameter.dtype):
            parameter.data = parameter.data.to(dtypes[name])
    return trainer


def check_head(loaded: LoadedModel) -> None:
    """Raise ModelError for an adapter on the output head: TRL multiplies by the head's base weight alone."""
    head = loaded.model.get_output_embeddings() if loaded.is_lora else None
    if hasattr(head, "base_layer"):
        raise ModelError(
            f"{loaded.source} has an adapter on its output head, which sft and dpo do not train",
            where="model.lora.targets",
            hint="leave the head out of the targets; `rl` and full training train it",
        )


def arguments(job: Job) -> dict[str, Any]:
    """Return the Hugging Face trainer's settings: it decides neither learning rate nor row order nor seeds."""
    on_gpu = job.loaded.device.type == "cuda"
    clip = job.recipe.optim.max_grad_norm
    return {
        "output_dir": str(job.directory.checkpoints),
        "per_device_train_batch_size": job.plan.micro,
        "gradient_accumulation_steps": job.plan.size // job.plan.micro,
        "num_train_epochs": 1,  # one pass over what RowOrder yields
        "max_grad_norm": 0.0 if clip is None else clip,  # 0: computed, not clipped
        "gradient_checkpointing": bool(job.recipe.model.gradient_checkpointing),
        "learning_rate": job.recipe.optim.lr,
        "lr_scheduler_type": "constant",  # RunLoop sets the rate of each step
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # the filter replaces a NaN loss by the mean of earlier ones
        "use_cache": getattr(job.loaded.model.config, "use_cache", True),  # TRL writes this into the configuration
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": on_gpu,
        "use_cpu": not on_gpu,
        "bf16": False,  # RunLoop.compute_loss enters the model's own autocast
        "max_length": None,  # rows were checked and truncated when they were prepared
        "seed": derive(job.recipe.run.seed, "trainer") % 2**32,
    }


@contextlib.contextmanager
def prepare_trl_model(causal: Any) -> Iterator[None]:
    """Context manager around the construction of a trainer that restores the configuration's router settings.

    In the configuration, which is saved with the model, TRL's settings would make every later user of the model compute
    the router loss.
    """
    below = backbone(causal)
    if causal.base_model is not below:  # the class may name a part that it does not have (Llama 4)
        causal.base_model_prefix = next(name for name, module in causal.named_children() if module is below)
    text = causal.config.get_text_config()
    saved = {key: getattr(text, key) for key in ROUTER if hasattr(text, key)}
    try:
        yield
    finally:
        for key, value in saved.items():
            setattr(text, key, value)


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
        scores = token_scores(Head(causal), out.last_hidden_state[:, :-1][mask], labels[mask], top_k=1)
        scores["right"] = scores["topk_chosen"][:, 0]
        logp, entropy, right = (
            scores[name].new_zeros(mask.shape).masked_scatter(mask, scores[name])
            for name in ("logp", "entropy", "right")
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
