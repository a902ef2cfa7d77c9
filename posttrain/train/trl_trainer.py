"""Construction of a TRL trainer around posttrain's model and optimiser, with the HF trainer's own decisions
disabled.
"""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import PrinterCallback, TrainingArguments

from posttrain.errors import ModelError
from posttrain.models.adapters import causal_of
from posttrain.models.load import LoadedModel
from posttrain.seeds import derive
from posttrain.train import data_parallel, distributed, trl_model
from posttrain.train.hf_trainer import Job


def build_trainer(kind: Any, config: type[TrainingArguments], job: Job, options: dict[str, Any], **parts: Any) -> Any:
    """Build a TRL trainer of class `kind` around the job's model and optimiser.

    options: settings of this kind of trainer. parts: data set and collator.
    """
    check_head(job.loaded)
    dtypes = {name: p.dtype for name, p in job.loaded.model.named_parameters() if p.requires_grad}
    data_parallel.broadcast_weights(job.loaded.model)
    causal = causal_of(job.loaded.model)
    with distributed.hide_process_group(), trl_model.prepare_trl_model(causal):
        args = config(**arguments(job), **options)
        args._n_gpu = min(args.n_gpu, 1)  # one device per process; otherwise DataParallel would use all visible GPUs
        trainer = kind(
            model=job.loaded.model,
            args=args,
            processing_class=job.loaded.tokenizer,
            optimizers=(job.optimizer, None),
            **parts,
        )
    # Loaded moments stay where the optimiser keeps them: accelerate would move all of them to the GPU and back.
    trainer.optimizer = AcceleratedOptimizer(job.optimizer, device_placement=False)
    trainer.optimizer._is_accelerate_prepared = True
    trl_model.fuse_divided_head(causal)
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
