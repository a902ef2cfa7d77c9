"""Names of older recipes and of other toolkits, each with the sentence that says what to write here.

A name that is a key of the section where it stands never comes here; only unknown keys are looked up.
"""

from __future__ import annotations

_BATCH = {
    "rl": "write `batch.micro_tokens` (tokens a forward pass) and `rollout.prompts_per_step` x `rollout.group_size`",
    "eval": "write `engine.batch_size` (sequences generated together)",
    "generate": "write `engine.batch_size` (sequences generated together)",
    "": "write `batch.size` (rows an optimiser step) and `batch.micro_size` (rows a forward pass)",
}
_LENGTH = {
    "rl": "write `data.max_length` for prompts and `rollout.max_new_tokens` for completions",
    "eval": "write `data.max_length` for prompts and `sampling.max_new_tokens` for completions",
    "generate": "write `data.max_length` for prompts and `sampling.max_new_tokens` for completions",
    "": "write `data.max_length`, with `data.overlong` for what happens to longer rows",
}
_SAMPLING = {"rl": "rollout", "eval": "sampling", "generate": "sampling"}
_NEW_TOKENS = {stage: f"write `{section}.max_new_tokens`" for stage, section in _SAMPLING.items()} | {
    "": "sft and dpo do not generate; lengths are bounded by `data.max_length`"
}
_SAMPLES = {
    "rl": "write `rollout.group_size`",
    "eval": "write `eval.samples`",
    "": "completions a prompt are `rollout.group_size` in rl and `eval.samples` in eval",
}
_ENGINE = {
    "rl": "write `rollout.engine: vllm`",
    "eval": "write `engine.engine: vllm`",
    "generate": "write `engine.engine: vllm`",
    "": "this stage does not generate; rl, eval and generate take an engine",
}
_BETA = {
    "dpo": "write `loss.beta`",
    "": "the weight of the KL term is `kl.coef` in rl; the temperature of a preference loss is `loss.beta` in dpo",
}
_DATASET = "write `data.source` (a file, a directory, a hub id or gym:TASK)"
_MODEL = "write `model.path`"
_LORA_NO = "write `model.lora: {rank: 16, alpha: 32}`; without `model.lora` all weights are trained"
_DTYPE = "write `model.dtype` (auto, float32, bfloat16 or float16)"
_FOUR_BIT = "write `model.quantize: nf4` beside `model.lora`"
_EVALUATION = "evaluation is a stage of its own: `posttrain eval`, or an eval stage in a pipeline"
_TRACKING = "remove it; every run writes metrics.jsonl, samples.jsonl and report.html into its directory"
_DISTRIBUTED = (
    "remove it; `--gpus N` on the command line starts a process a GPU, `model.shard` divides the model among them"
)
_CLIP = "write `loss.clip_low` and `loss.clip_high` (offsets: the ratio stays within 1 - low and 1 + high)"
_WARMUP = "write `optim.warmup_steps` (counted in optimiser steps)"

REMOVED: dict[str, str | dict[str, str]] = {
    # models
    "model_name_or_path": _MODEL,
    "model_name": _MODEL,
    "model_id": _MODEL,
    "base_model": _MODEL,
    "pretrained_model_name_or_path": _MODEL,
    "model_revision": "write `model.revision`",
    "torch_dtype": _DTYPE,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "tf32": _DTYPE,
    "attn_implementation": "write `model.attention` (auto, eager, sdpa or flash_attention_2)",
    "flash_attention": "write `model.attention: flash_attention_2`",
    "use_peft": _LORA_NO,
    "adapter": _LORA_NO,
    "finetuning_type": _LORA_NO,
    "lora_r": "write `model.lora.rank`",
    "lora_rank": "write `model.lora.rank`",
    "r": "write `model.lora.rank`",
    "lora_alpha": "write `model.lora.alpha`",
    "lora_dropout": "write `model.lora.dropout`",
    "lora_target_modules": "write `model.lora.targets` (module names, or all-linear)",
    "lora_target": "write `model.lora.targets` (module names, or all-linear)",
    "target_modules": "write `model.lora.targets` (module names, or all-linear)",
    "load_in_4bit": _FOUR_BIT,
    "use_4bit": _FOUR_BIT,
    "quantization_bit": _FOUR_BIT,
    "load_in_8bit": "8-bit weights are not offered; write `model.quantize: nf4` beside `model.lora`",
    # data
    "dataset_name": _DATASET,
    "dataset": _DATASET,
    "datasets": "write `data.source`, or `data.mix` for several sources",
    "dataset_mixture": "write `data.mix`, a list of sources with `weight`",
    "dataset_config": "write `data.config`",
    "dataset_train_split": "write `data.split`",
    "dataset_text_field": "write `data.columns`, as in `columns: {completion: text}`",
    "train_files": _DATASET,
    "system_prompt": "write `data.system`",
    "template": "the chat template is the tokenizer's; another one is `model.chat_template`, a Jinja file",
    "max_prompt_length": "write `data.max_length` (in rl it bounds the prompt), with `data.overlong` for longer rows",
    "max_seq_length": _LENGTH,
    "max_length": _LENGTH,
    "sequence_len": _LENGTH,
    "cutoff_len": _LENGTH,
    "packing": {"sft": "write `batch.packing`", "": "only sft packs rows, with `batch.packing`"},
    "sample_packing": {"sft": "write `batch.packing`", "": "only sft packs rows, with `batch.packing`"},
    "assistant_only_loss": "write `data.train_on: assistant` (sft)",
    "completion_only_loss": "write `data.train_on: completion` (sft)",
    "train_on_inputs": "write `data.train_on: all` (sft) to train on prompts as well",
    "val_set_size": _EVALUATION,
    "test_size": _EVALUATION,
    # generation
    "num_generations": _SAMPLES,
    "num_return_sequences": _SAMPLES,
    "num_samples_per_prompt": _SAMPLES,
    "rollout_n": _SAMPLES,
    "n_samples": _SAMPLES,
    "max_completion_length": _NEW_TOKENS,
    "max_response_length": _NEW_TOKENS,
    "max_tokens": _NEW_TOKENS,
    "stop_strings": "write `stop`, a list of texts, beside `temperature`",
    "use_vllm": _ENGINE,
    "vllm_mode": "remove it; `engine: vllm` runs in the same process, on the same GPU",
    "vllm_gpu_memory_utilization": "write `rollout.vllm.gpu_memory` in rl, `engine.vllm.gpu_memory` in eval",
    "gpu_memory_utilization": "write `rollout.vllm.gpu_memory` in rl, `engine.vllm.gpu_memory` in eval",
    "vllm_max_model_len": "write `rollout.vllm.max_model_len` in rl, `engine.vllm.max_model_len` in eval",
    "vllm_enable_sleep_mode": "write `rollout.vllm.sleep`",
    # rewards and the loss
    "reward_funcs": "write `rewards`, a list: `- use: math.accuracy` or `- use: ./mine.py:score`",
    "reward_functions": "write `rewards`, a list: `- use: math.accuracy` or `- use: ./mine.py:score`",
    "reward_weights": "write `weight` in each entry of `rewards`",
    "reward_model": "rewards are functions: write `rewards`, a list with `- use: ./mine.py:score`",
    "beta": _BETA,
    "kl_coef": "write `kl.coef`",
    "init_kl_coef": "write `kl.coef`",
    "use_kl_loss": "write `kl.coef` (0 = no KL term) and `kl.where: loss`",
    "kl_loss_coef": "write `kl.coef` with `kl.where: loss`",
    "kl_penalty": "write `kl.use` (k1, k2, k3 or abs)",
    "epsilon": _CLIP,
    "epsilon_low": _CLIP,
    "epsilon_high": "write `loss.clip_high` (an offset: the ratio stays below 1 + clip_high)",
    "cliprange": _CLIP,
    "clip_ratio": _CLIP,
    "clip_ratio_low": "write `loss.clip_low`",
    "clip_ratio_high": "write `loss.clip_high`",
    "loss_type": {
        "rl": "write `algorithm` (grpo, dr_grpo, dapo), or `loss.aggregation` for the denominator alone",
        "dpo": "write `algorithm` (dpo, simpo), or `loss.use`",
        "": "only rl and dpo choose a loss",
    },
    "loss_agg_mode": "write `loss.aggregation` (token_mean, seq_mean_token_mean, seq_mean_token_sum or fixed)",
    "scale_rewards": "write `advantage.scale` (group, batch or none)",
    "norm_adv_by_std_in_grpo": "write `advantage.scale` (group, batch or none)",
    "adv_estimator": "write `advantage.use`, or a whole method as `algorithm`",
    "mask_truncated_completions": "write `loss.mask_truncated`",
    "overlong_filter": "write `loss.mask_truncated`",
    "num_iterations": "write `batch.epochs` (passes over the rollouts of a step)",
    "ppo_epochs": "write `batch.epochs` (passes over the rollouts of a step)",
    "steps_per_generation": "write `batch.minibatches` (optimiser updates a pass over the rollouts)",
    "ppo_mini_batch_size": "write `batch.minibatches` (the number of updates a pass, not their size)",
    "dynamic_sampling": "write `keep: dynamic_sampling`, and `rollout.max_gen_batches` for refills",
    "filter_groups": "write `keep: dynamic_sampling`, and `rollout.max_gen_batches` for refills",
    "sync_ref_model": "the reference is the starting policy and stays; there is no key for it",
    "ref_model": "the reference is the starting policy; there is no key for it",
    # batches and the optimiser
    "per_device_train_batch_size": _BATCH,
    "per_device_eval_batch_size": "write `engine.batch_size` (sequences generated together)",
    "gradient_accumulation_steps": _BATCH,
    "micro_batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "generation_batch_size": _BATCH,
    "batch_size": _BATCH,
    "learning_rate": "write `optim.lr`",
    "lr_scheduler_type": "write `optim.schedule` (constant, linear or cosine)",
    "lr_scheduler": "write `optim.schedule` (constant, linear or cosine)",
    "warmup_ratio": _WARMUP,
    "num_warmup_steps": _WARMUP,
    "adam_beta1": "write `optim.betas: [0.9, 0.999]`",
    "adam_beta2": "write `optim.betas: [0.9, 0.999]`",
    "adam_epsilon": "write `optim.eps`",
    "optim_args": "the optimiser is AdamW; its keys stand in `optim`",
    "grad_clip": "write `optim.max_grad_norm`",
    "gradient_clipping": "write `optim.max_grad_norm`",
    # the run
    "output_dir": "write `run.output`, or `--output DIR` on the command line",
    "overwrite_output_dir": "remove it; a used run directory is never overwritten: give a new one, or `--resume`",
    "resume_from_checkpoint": "remove it; resume with `--resume` on the command line",
    "num_train_epochs": "write `run.epochs`",
    "num_epochs": "write `run.epochs`",
    "total_epochs": "write `run.epochs`",
    "max_steps": "write `run.steps`",
    "total_training_steps": "write `run.steps`",
    "save_steps": "write `run.save_every`",
    "save_freq": "write `run.save_every`",
    "save_strategy": "write `run.save_every`; without it only the end is saved",
    "save_total_limit": "write `run.keep_checkpoints`",
    "logging_steps": "write `run.log_every`",
    "evaluation_strategy": _EVALUATION,
    "eval_strategy": _EVALUATION,
    "eval_steps": _EVALUATION,
    "eval_every": _EVALUATION,
    "do_eval": _EVALUATION,
    "do_train": "remove it; the verb says what is done: `posttrain sft`, `dpo`, `rl`, `eval`",
    "report_to": _TRACKING,
    "run_name": "write `run.output`",
    "wandb_project": _TRACKING,
    "logging_dir": _TRACKING,
    "push_to_hub": "remove it; upload the run's `final` directory yourself",
    "hub_model_id": "remove it; upload the run's `final` directory yourself",
    "deepspeed": _DISTRIBUTED,
    "fsdp": _DISTRIBUTED,
    "fsdp_config": _DISTRIBUTED,
    "ddp_timeout": _DISTRIBUTED,
    "n_gpus_per_node": _DISTRIBUTED,
    "num_processes": _DISTRIBUTED,
    "remove_unused_columns": "remove it; rewards get every column that they name",
    "dataset_num_proc": "remove it; rows are prepared in the main process",
    "dataloader_num_workers": "remove it; there is no data loader process",
    # merging
    "density": "`density` belongs to merge methods that drop weights; linear and task_arithmetic take `weight`",
    "slices": "write `models`; merging layer ranges is not offered",
}


def sentence(key: str, stage: str) -> str | None:
    """What to write instead of `key` in a recipe of `stage`, or None for a name that is not known."""
    said = REMOVED.get(key)
    return said.get(stage, said[""]) if isinstance(said, dict) else said
