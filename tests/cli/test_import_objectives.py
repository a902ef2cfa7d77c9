"""`posttrain recipe import` of objectives: losses, advantages, clips, KL terms, schedules and adapters, with the
defaults of the tools' own code (TRL, axolotl, LLaMA-Factory and verl of 2026)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.recipe.foreign.convert import convert
from posttrain.recipe.foreign.draft import Draft
from posttrain.recipe.foreign.source import read

AXOLOTL = {"base_model": "org/x", "micro_batch_size": 2, "learning_rate": 1e-5, "datasets": [{"path": "rows.jsonl"}]}
FACTORY = {"model_name_or_path": "org/x", "finetuning_type": "full", "dataset": "rows", "learning_rate": 1e-5}
TRL = {"model_name_or_path": "org/x", "dataset_name": "rows.jsonl"}
GRPO = {**TRL, "num_generations": 4, "reward_funcs": ["think_format_reward"]}
OPENRLHF = "python -m openrlhf.cli.train_ppo_ray --pretrain org/x --prompt_data d.jsonl --reward_pretrain org/rm"
RLHF_DPO = "python -m openrlhf.cli.train_dpo --model.model_name_or_path org/x --data.dataset d.jsonl"
OPEN_R1 = GRPO | {"dataset_prompt_column": "problem", "hub_strategy": "every_save", "overwrite_output_dir": True}
SWIFT = "swift rlhf --model org/x --dataset rows.jsonl"
SWIFT_GRPO = f"{SWIFT} --rlhf_type grpo --reward_funcs format"
VERL = {
    "actor_rollout_ref.model.path": "org/x",
    "data.train_files": "rows.parquet",
    "data.train_batch_size": 64,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
}
MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


def import_recipe(folder: Path, values: Mapping[str, Any] | str, **options: Any) -> Draft:
    """The recipe that a command line, or a file with these keys, means. Dotted keys are those of verl."""
    if isinstance(values, str):
        (folder / "run.sh").write_text(values)
        return convert(read(folder / "run.sh"), **options)
    if any("." in key for key in values):
        given = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        (folder / "run.sh").write_text(f"python -m verl.trainer.main_ppo {given}\n")
        return convert(read(folder / "run.sh"), **options)
    (folder / "theirs.yaml").write_text(json.dumps(values, indent=1))
    return convert(read(folder / "theirs.yaml"), **options)


def left_out(draft: Draft) -> dict[str, str]:
    return {one.key: one.why for one in draft.left}


@pytest.mark.parametrize(
    ("values", "stage", "expected"),
    [
        # SimPO: the margin is a number in TRL, axolotl and LLaMA-Factory, and a multiple of beta here.
        (AXOLOTL | {"rl": "simpo", "rl_beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}, "dpo",
         {"loss.beta": 2.0, "loss.gamma_beta_ratio": 0.5, "loss.sft_weight": None}),
        (AXOLOTL | {"rl": "simpo"}, "dpo",  # axolotl runs TRL's CPO: beta 0.1, margin 0.5, likelihood 1
         {"loss.beta": 0.1, "loss.gamma_beta_ratio": 5.0, "loss.sft_weight": 1.0}),
        (FACTORY | {"stage": "dpo", "pref_loss": "simpo", "pref_beta": 0.5, "simpo_gamma": 0.1, "pref_ftx": 0.2}, "dpo",
         {"loss.beta": 0.5, "loss.gamma_beta_ratio": 0.2, "loss.sft_weight": 0.2, "loss.nll_weight": None}),
        (FACTORY | {"stage": "dpo", "pref_loss": "simpo"}, "dpo",
         {"loss.beta": 0.1, "loss.gamma_beta_ratio": 5.0, "loss.sft_weight": None}),
        (FACTORY | {"stage": "dpo", "pref_ftx": 0.2}, "dpo", {"loss.nll_weight": 0.2, "loss.nll_reduction": None}),
        (f"{SWIFT} --rlhf_type simpo", "dpo",  # beta 2, margin 1, likelihood 1
         {"loss.beta": 2.0, "loss.gamma_beta_ratio": 0.5, "loss.sft_weight": 1.0}),
        (f"{SWIFT} --rlhf_type simpo --simpo_gamma 0.5 --cpo_alpha 0 --beta 1", "dpo",
         {"loss.beta": 1.0, "loss.gamma_beta_ratio": 0.5, "loss.sft_weight": None}),
        (f"{SWIFT} --rlhf_type cpo --cpo_alpha 0.5", "dpo", {"loss.alpha": 0.5}),
        # DPO's further terms.
        (f"{SWIFT} --rlhf_type dpo --rpo_alpha 0.5", "dpo", {"loss.nll_weight": 0.5, "loss.nll_reduction": "token"}),
        (TRL | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.1}, "dpo",
         {"loss.nll_weight": 0.5, "loss.nll_reduction": "token", "loss.use": None}),
        (TRL | {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3, "beta": 0.1}, "dpo",
         {"loss.use": "f_dpo", "loss.divergence": "alpha", "loss.alpha": 0.7}),
        (TRL | {"f_divergence_type": "js_divergence", "beta": 0.1}, "dpo",
         {"loss.use": "f_dpo", "loss.divergence": "js", "loss.alpha": None}),
        (AXOLOTL | {"rl": "dpo", "dpo_label_smoothing": 0.1, "dpo_loss_type": ["robust"]}, "dpo",
         {"loss.label_smoothing": 0.1, "loss.variant": "robust"}),
        (TRL | {"loss_type": "dft"}, "sft", {"objective.use": "dft"}),
        # Clips: the more special key counts, wherever it stands.
        (VERL | {"actor_rollout_ref.actor.clip_ratio": 0.2, "actor_rollout_ref.actor.clip_ratio_low": 0.1}, "rl",
         {"loss.clip_low": 0.1}),
        (VERL | {"actor_rollout_ref.actor.clip_ratio_low": 0.1, "actor_rollout_ref.actor.clip_ratio": 0.2}, "rl",
         {"loss.clip_low": 0.1}),
        # verl reads clip_ratio where clip_ratio_low is null, and that is 0.2.
        (VERL | {"actor_rollout_ref.actor.clip_ratio": 0.3}, "rl", {"loss.clip_low": 0.2, "loss.clip_high": 0.2}),
        (VERL | {"actor_rollout_ref.actor.clip_ratio": 0.3, "actor_rollout_ref.actor.clip_ratio_low": None}, "rl",
         {"loss.clip_low": 0.3, "loss.clip_high": 0.2}),
        (VERL | {"actor_rollout_ref.actor.clip_ratio_low": 0.3}, "rl", {"loss.clip_low": 0.3, "loss.clip_high": 0.2}),
        # OpenRLHF: a mean over tokens, with gspo over rows; a completion has no limit but the row's.
        (f"{OPENRLHF} --advantage_estimator rloo", "rl",
         {"loss.aggregation": "token_mean", "rollout.max_new_tokens": 2048, "rollout.vllm.max_model_len": None}),
        (f"{OPENRLHF} --advantage_estimator rloo --max_len 4096 --generate_max_len 1024", "rl",
         {"rollout.max_new_tokens": 1024, "rollout.vllm.max_model_len": 4096}),
        (f"{OPENRLHF} --algo.advantage.estimator group_norm --actor.policy_loss_type gspo", "rl",
         {"loss.use": "gspo", "loss.aggregation": "seq_mean_token_mean", "loss.clip_low": 0.2}),
        (f"{OPENRLHF} --algo.advantage.estimator group_norm --algo.advantage.no_std_norm", "rl",
         {"advantage.scale": None}),
        (OPENRLHF, "rl", {"algorithm": "ppo", "critic.lr": 9e-6}),
        (f"{OPENRLHF} --actor.lr_scheduler constant --actor.lr_warmup_ratio 0.1 --actor.max_norm 0.5", "rl",
         {"optim.schedule": "constant", "optim.warmup_steps": 0.1, "optim.max_grad_norm": 0.5}),
        (f"{OPENRLHF} --advantage_estimator rloo --critic.adam.lr 1e-5", "rl", {"critic.lr": None}),
        (f"{RLHF_DPO} --ipo --ref.model_name_or_path org/r", "dpo",
         {"loss.use": "ipo", "loss.length_normalize": False, "anchors.reference": "org/r"}),
        (RLHF_DPO, "dpo", {"loss.length_normalize": None}),
        # ms-swift: 16 rows an update unless it is GRPO, rounded up; `rlhf` without a type is DPO; no warm-up.
        (f"{SWIFT} --rlhf_type dpo --per_device_train_batch_size 3", "dpo", {"batch.size": 18}),
        (SWIFT, "dpo", {"batch.size": 16, "loss.use": None, "model.lora.dropout": 0.0, "optim.warmup_steps": None}),
        (f"{SWIFT} --rlhf_type grpo --per_device_train_batch_size 8 --reward_funcs format", "rl",
         {"rollout.prompts_per_step": 1, "batch.minibatches": None, "kl.coef": 0.04}),
        ("megatron sft --model org/x --dataset swift/self-cognition --global_batch_size 8", "sft",
         {"batch.size": 8, "data.source": "swift/self-cognition", "model.lora": None}),
        (f"{SWIFT} --rlhf_type ppo --reward_model org/rm --response_length 64", "rl",
         {"algorithm": "ppo", "kl.coef": 0.05, "batch.epochs": 4, "batch.minibatches": 1, "advantage.lam": 0.95,
          "rollout.group_size": 1, "rollout.prompts_per_step": 16, "rollout.max_new_tokens": 64,
          "loss.aggregation": None}),
        (f"{SWIFT} --rlhf_type grpo --reward_funcs format --advantage_estimator rloo", "rl",
         {"advantage.use": "rloo", "kl.where": "reward", "kl.use": "k1"}),
        (f"{SWIFT_GRPO} --kl_in_reward true", "rl", {"kl.where": "reward", "kl.use": "k1"}),
        (f"{SWIFT_GRPO} --advantage_estimator reinforce_plus_plus", "rl", {"advantage.use": "reinforce_pp_baseline"}),
        (f"{SWIFT_GRPO} --advantage_estimator reinforce_plus_plus --scale_rewards group", "rl",
         {"advantage.use": None, "advantage.scale": "group"}),
        (f"{SWIFT_GRPO} --importance_sampling_level sequence_token", "rl",
         {"loss.use": "gspo", "loss.level": "token", "loss.clip_low": 0.2}),
        (f"{SWIFT} --rlhf_type grpo --reward_funcs format --advantage_estimator rloo --kl_in_reward false", "rl",
         {"advantage.use": "rloo", "kl.where": "loss", "kl.use": None}),
        # transformers evaluates by updates: 2 of them are a step here.
        (GRPO | {"dataset_name": "org/rows", "eval_strategy": "steps", "eval_steps": 10, "steps_per_generation": 2},
         "rl",
         {"batch.minibatches": 2, "eval.every": 5}),
        # LLaMA-Factory trains an adapter unless it is told otherwise, without dropout in preference stages.
        ({key: FACTORY[key] for key in FACTORY if key != "finetuning_type"} | {"stage": "sft", "cutoff_len": 9}, "sft",
         {"model.lora.rank": 8, "model.lora.alpha": 16}),
        (FACTORY | {"stage": "dpo", "finetuning_type": "lora", "lora_dropout": 0.1}, "dpo",
         {"model.lora.dropout": 0.0}),
        (FACTORY | {"stage": "rm", "finetuning_type": "lora", "lora_dropout": 0.1}, "reward_model",
         {"model.lora.dropout": 0.1, "objective.center_coef": 0.0, "objective.holdout": 0.0}),
        (FACTORY | {"stage": "pt"}, "sft", {"batch.packing": True, "data.train_on": "all"}),
        (FACTORY | {"stage": "pt", "packing": False}, "sft", {"batch.packing": False}),
        (FACTORY | {"neat_packing": True, "disable_shuffling": True, "default_system": "s"}, "sft",
         {"batch.packing": True, "data.shuffle": False, "data.system": "s"}),
        (FACTORY | {"stage": "ppo", "reward_model": "org/rm"}, "rl", {"advantage.lam": 0.95}),
        # No reward model of the tools is drawn to 0 or keeps rows back.
        (AXOLOTL | {"reward_model": True}, "reward_model", {"objective.center_coef": 0.0, "objective.holdout": 0.0}),
        (AXOLOTL | {"reward_model": True, "center_rewards_coefficient": 0.1}, "reward_model",
         {"objective.center_coef": 0.1}),
        (AXOLOTL | {"rl": "dpo", "adapter": "lora", "lora_dropout": 0.1}, "dpo",
         {"model.lora.dropout": 0.0, "data.max_length": 512}),
        (AXOLOTL | {"rl": "grpo", "trl": {"beta": 0.1, "use_bias_correction_kl": True}}, "rl", {"kl.use": None}),
        # open-r1 requires TRL 0.18.
        (OPEN_R1, "rl", {"kl.coef": 0.04, "loss.aggregation": "local_token_mean", "rollout.max_new_tokens": 256,
                         "data.max_length": 512, "model.gradient_checkpointing": None}),
        # verl's SFT: every turn of the assistant; the older command has other defaults.
        ("torchrun -m verl.trainer.sft_trainer data.train_files=r.parquet model.path=org/x", "sft",
         {"optim.lr": 1e-3, "optim.schedule": None, "data.train_on": "assistant"}),
        ("torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=r.parquet model.partial_pretrain=org/x", "sft",
         {"optim.lr": 1e-5, "optim.schedule": "cosine", "data.train_on": None}),
        # Losses of TRL and verl with arguments that only they have.
        (GRPO | {"loss_type": "sapo", "sapo_temperature_neg": 2.0}, "rl",
         {"loss.use": "sapo", "loss.tau_neg": 2.0, "loss.tau_pos": None, "loss.aggregation": "seq_mean_token_mean"}),
        (f"{SWIFT} --rlhf_type grpo --reward_funcs format --loss_type sapo --tau_pos 1.5", "rl",
         {"loss.use": "sapo", "loss.tau_pos": 1.5}),
        (GRPO | {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3}, "rl",
         {"loss.use": "gspo", "loss.clip_low": 2e-3, "loss.aggregation": "seq_mean_token_sum"}),
        (GRPO | {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 4.0}, "rl",
         {"loss.use": "vespo", "loss.k_pos": 1.0, "loss.lambda_neg": 4.0, "loss.aggregation": "token_mean"}),
        (VERL | {MODE: "sapo", "actor_rollout_ref.actor.tau_pos": 1.2, "algorithm.adv_estimator": "grpo"}, "rl",
         {"loss.use": "sapo", "loss.tau_pos": 1.2, "loss.aggregation": "seq_mean_token_mean"}),
        (VERL | {MODE: "geo_mean", "actor_rollout_ref.actor.clip_ratio_low": 0.4, "algorithm.adv_estimator": "grpo",
                 "actor_rollout_ref.actor.clip_ratio_high": 0.4}, "rl",
         {"loss.use": "gmpo", "loss.clip_low": 0.4, "loss.clip_high": 0.4, "loss.dual_clip": None,
          "loss.aggregation": "seq_mean_token_mean"}),
        (VERL | {MODE: "dppo_kl", "actor_rollout_ref.actor.clip_ratio_low": 0.05, "algorithm.adv_estimator": "grpo",
                 "actor_rollout_ref.actor.clip_ratio_c": 50.0}, "rl",
         {"loss.use": "dppo", "loss.divergence": "kl", "loss.clip_low": 0.05, "loss.cap": 50.0,
          "loss.dual_clip": None}),
        (VERL | {MODE: "gpg", "algorithm.adv_estimator": "gpg"}, "rl",
         {"loss.use": "reinforce", "advantage.scale": "none", "loss.aggregation": "token_mean"}),
        # verl's clip_ratio of CISPO is an offset from 1, ours a bound of the ratio; a bound of -9 is none.
        (VERL | {MODE: "cispo", "algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.clip_ratio_low": 10,
                 "actor_rollout_ref.actor.clip_ratio_high": 0.28}, "rl",
         {"loss.use": "cispo", "loss.ratio_min": None, "loss.ratio_max": 1.28, "loss.clip_low": None}),
        (VERL | {MODE: "cispo", "algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.clip_ratio": 0.3}, "rl",
         {"loss.ratio_min": 0.8, "loss.ratio_max": 1.2}),
        (VERL | {MODE: "cispo", "algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.clip_ratio": 0.3,
                 "actor_rollout_ref.actor.clip_ratio_low": None}, "rl",
         {"loss.ratio_min": 0.7, "loss.ratio_max": 1.2}),
        (VERL | {MODE: "cispo", "algorithm.adv_estimator": "grpo"}, "rl",
         {"loss.ratio_min": 0.8, "loss.ratio_max": 1.2}),
        (VERL | {MODE: "sapo", "actor_rollout_ref.actor.policy_loss.tau_neg": 1.4, "algorithm.adv_estimator": "grpo"},
         "rl", {"loss.tau_neg": 1.4}),
        # verl averages GSPO by row whatever loss_agg_mode is.
        (VERL | {MODE: "gspo", "algorithm.adv_estimator": "grpo",
                 "actor_rollout_ref.actor.loss_agg_mode": "token-mean"}, "rl",
         {"loss.use": "gspo", "loss.aggregation": "seq_mean_token_mean"}),
        (VERL | {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.loss_scale_factor": 1000,
                 "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm"}, "rl",
         {"loss.aggregation": "fixed", "loss.norm_len": 1000}),
        # "+" is the same value with the gradient of k2; the reward has no gradient.
        (VERL | {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_type": "low_var_kl+"},
         "rl", {"kl.use": "k3_straight_through", "kl.where": "loss"}),
        (VERL | {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_type": "k1+"}, "rl",
         {"kl.use": "k1_straight_through"}),
        (VERL | {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "k3+"}, "rl",
         {"kl.use": "k3", "kl.where": "reward"}),
        (VERL | {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": "[right,short]",
                 "algorithm.gdpo_reward_weights": "[1.0,0.5]"}, "rl",
         {"advantage.use": "gdpo", "advantage.batch_norm": "token", "advantage.weights.right": 1.0,
          "advantage.weights.short": 0.5}),
        (VERL | {"algorithm.adv_estimator": "remax"}, "rl", {"advantage.use": "remax", "algorithm": None}),
        (VERL | {"algorithm.adv_estimator": "opo"}, "rl", {"advantage.use": "opo"}),
        (VERL | {"algorithm.adv_estimator": "grpo_passk", "algorithm.norm_adv_by_std_in_grpo": False}, "rl",
         {"advantage.use": "best_of_group", "advantage.normalize": False, "advantage.scale": None}),
        # verl's warm-up counts steps, ours updates: 64 prompts in batches of 16, twice.
        (VERL | {"actor_rollout_ref.actor.optim.lr_warmup_steps": 10, "actor_rollout_ref.actor.ppo_epochs": 2}, "rl",
         {"optim.warmup_steps": 80, "batch.minibatches": 4, "batch.epochs": 2}),
        (VERL | {"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1}, "rl", {"optim.warmup_steps": 0.1}),
        # No limit is no default limit in TRL; a key without a value is none in axolotl.
        (TRL | {"max_length": None}, "sft", {"data.max_length": None}),
        (TRL, "sft", {"data.max_length": 1024}),
        (AXOLOTL | {"warmup_ratio": None}, "sft", {"optim.warmup_steps": 0.03}),
        # Of a number of steps and a share the number counts, wherever it stands.
        (TRL | {"warmup_ratio": 0.1, "warmup_steps": 20}, "sft", {"optim.warmup_steps": 20}),
        (TRL | {"warmup_steps": 20, "warmup_ratio": 0.1}, "sft", {"optim.warmup_steps": 20}),
        (TRL | {"warmup_ratio": 0.1, "warmup_steps": 0}, "sft", {"optim.warmup_steps": 0.1}),
        (VERL | {"actor_rollout_ref.actor.optim.lr_warmup_steps": 5,
                 "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1}, "rl", {"optim.warmup_steps": 20}),
        ({"optim.lr_warmup_steps_ratio": 0.1, "optim.lr_warmup_steps": 5, "data.train_files": "a.parquet"}, "sft",
         {"optim.warmup_steps": 5}),
        # verl's PPO.
        (VERL | {"algorithm.gamma": 0.99, "algorithm.lam": 0.95}, "rl",
         {"algorithm": "ppo", "advantage.gamma": 0.99, "advantage.lam": 0.95, "run.epochs": 30}),
        (VERL | {"actor_rollout_ref.actor.ppo_mini_batch_size": 64}, "rl",
         {"algorithm": "ppo", "batch.minibatches": 1}),
        (VERL | {"algorithm.adv_estimator": "grpo", "trainer.total_training_steps": 5}, "rl",
         {"algorithm": None, "run.epochs": None, "run.steps": 5}),
        (f"{OPENRLHF} --gamma 0.9 --lambd 0.95 --dual_clip 3", "rl",
         {"algorithm": "ppo", "advantage.gamma": 0.9, "advantage.lam": 0.95, "loss.dual_clip": 3}),
        ("python -m openrlhf.cli.train_dpo --pretrain org/x --dataset d.jsonl --ref_pretrain org/reference", "dpo",
         {"anchors.reference": "org/reference"}),
        (FACTORY | {"stage": "ppo", "reward_model": "org/rm", "gradient_accumulation_steps": 4, "ppo_buffer_size": 2,
                    "per_device_train_batch_size": 2, "max_new_tokens": 64}, "rl",
         {"algorithm": "ppo", "rollout.group_size": 1, "rollout.prompts_per_step": 16, "batch.minibatches": 2,
          "rollout.max_new_tokens": 64, "rollout.temperature": 0.95, "rollout.top_p": 0.7, "rollout.top_k": 50,
          "kl.coef": 0.2, "batch.epochs": 4}),
        # Its steps are steps of ppo, each of 4 updates.
        (FACTORY | {"stage": "ppo", "reward_model": "org/rm", "max_steps": 8, "save_steps": 4, "warmup_steps": 2}, "rl",
         {"run.steps": 8, "run.save_every": 4, "optim.warmup_steps": 8}),
        (FACTORY | {"stage": "sft", "max_steps": 8, "save_steps": 4, "warmup_steps": 2}, "sft",
         {"run.steps": 8, "run.save_every": 4, "optim.warmup_steps": 2}),
        # TRL's RLOO has a loss of its own, no correction of vLLM's samples, and groups of 2.
        ("trl rloo --model_name_or_path org/x --dataset_name rows.jsonl --use_vllm true", "rl",
         {"algorithm": "rloo", "rollout.group_size": 2, "rollout.prompts_per_step": 4, "loss": None,
          "corrections": None, "advantage": None}),
        ("trl rloo --model_name_or_path org/x --dataset_name rows.jsonl --normalize_advantages true", "rl",
         {"advantage.normalize": True}),
        (AXOLOTL | {"rl": "grpo", "vllm": {"tensor_parallel_size": 2}}, "rl", {"rollout.vllm.tensor_parallel": 2}),
        (AXOLOTL | {"rl": "grpo", "trl": {"generation_batch_size": 16, "num_generations": 4}}, "rl",
         {"rollout.prompts_per_step": 4, "batch.minibatches": 8}),
        # TRL weights the KL term by the ratio unless use_bias_correction_kl is false; RLOO's is in the reward.
        (GRPO | {"beta": 0.04}, "rl", {"kl.coef": 0.04, "kl.use": "k3_is"}),
        (GRPO | {"beta": 0.04, "use_bias_correction_kl": False}, "rl", {"kl.coef": 0.04, "kl.use": None}),
        (GRPO, "rl", {"kl": None}),
        ("trl rloo --model_name_or_path org/x --dataset_name rows.jsonl --beta 0.1", "rl",
         {"kl.coef": 0.1, "kl.use": None}),
        # CISPO's bound of the ratio is epsilon_high, else epsilon.
        (GRPO | {"loss_type": "cispo"}, "rl", {"loss.ratio_max": 0.2, "loss.clip_low": None}),
        (GRPO | {"loss_type": "cispo", "epsilon": 3.0}, "rl", {"loss.ratio_max": 3.0, "loss.clip_low": None}),
        (GRPO | {"loss_type": "cispo", "epsilon": 0.2, "epsilon_high": 5.0}, "rl", {"loss.ratio_max": 5.0}),
        # One default of epsilon and beta in the tools, where ours depends on the loss: 3e-4 in gspo, 0.3 in nca_pair.
        (GRPO | {"importance_sampling_level": "sequence"}, "rl", {"loss.use": "gspo", "loss.clip_low": 0.2}),
        (GRPO | {"importance_sampling_level": "sequence", "epsilon": 3e-4}, "rl", {"loss.clip_low": 3e-4}),
        (VERL | {MODE: "gspo", "algorithm.adv_estimator": "grpo"}, "rl", {"loss.use": "gspo", "loss.clip_low": 0.2}),
        (TRL | {"loss_type": "nca_pair"}, "dpo", {"loss.use": "nca_pair", "loss.beta": 0.1}),
        (TRL | {"loss_type": "sppo_hard", "beta": 0.4}, "dpo", {"loss.use": "sppo", "loss.beta": 0.4}),
        (TRL | {"loss_type": "sppo_hard"}, "dpo", {"loss.use": "sppo", "loss.beta": 0.1}),
        (GRPO | {"max_tool_calling_iterations": 1}, "rl", {"rollout.max_turns": 2}),  # a call, and the turn after it
        # TRL sets the adapter's dropout to 0 in dpo and reward models, and in rl on request.
        (TRL | {"use_peft": True, "beta": 0.1}, "dpo", {"model.lora.dropout": 0.0}),
        (TRL | {"use_peft": True, "beta": 0.1, "lora_dropout": 0.1}, "dpo", {"model.lora.dropout": 0.0}),
        (TRL | {"use_peft": True, "disable_dropout": False}, "reward_model", {"model.lora.dropout": 0.05}),
        (TRL | {"use_peft": True}, "reward_model", {"model.lora.dropout": 0.0}),
        (GRPO | {"use_peft": True}, "rl", {"model.lora.dropout": 0.05}),
        (GRPO | {"use_peft": True, "disable_dropout": True}, "rl", {"model.lora.dropout": 0.0}),
        # The order of the rows: SFT's shuffle_dataset adds a second shuffle, KTO takes the rows in order.
        (TRL | {"packing": False, "shuffle_dataset": False}, "sft", {"data.shuffle": None}),
        (TRL | {"packing": False, "train_sampling_strategy": "sequential"}, "sft", {"data.shuffle": False}),
        (GRPO | {"shuffle_dataset": False}, "rl", {"data.shuffle": False}),
        ("trl kto --model_name_or_path org/x --dataset_name rows.jsonl", "dpo", {"data.shuffle": False}),
        (TRL | {"packing": False, "router_aux_loss_coef": 0.02}, "sft", {"objective.router_aux_loss": 0.02}),
        (TRL | {"packing": False, "model_init_kwargs": {"dtype": "bfloat16"}}, "sft", {"model.dtype": "bfloat16"}),
        # Adapters: which modules.
        (AXOLOTL | {"adapter": "lora", "lora_target_modules": ["q_proj"], "lora_target_linear": True}, "sft",
         {"model.lora.targets": "all-linear"}),
        (TRL | {"use_peft": True, "packing": False}, "sft", {"model.lora.targets": ["q_proj", "v_proj"]}),
        (TRL | {"use_peft": True, "packing": False, "lora_target_modules": "all-linear"}, "sft",
         {"model.lora.targets": "all-linear"}),
        (AXOLOTL, "sft", {"optim.warmup_steps": 0.03}),
        (AXOLOTL | {"warmup_steps": 7}, "sft", {"optim.warmup_steps": 7}),
    ],
)  # fmt: skip
def test_imported_objective_equals_the_files(
    values: Any, stage: str, expected: Mapping[str, Any], folder: Path
) -> None:
    draft = import_recipe(folder, values, stage=stage)
    for key, value in expected.items():
        assert draft.at(key) == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize(
    ("values", "stage", "key", "written"),
    [
        (TRL | {"loss_type": "hinge", "beta": 0.3}, "dpo", "loss.use", "hinge"),
        (TRL | {"loss_type": ["sigmoid", "bco_pair"]}, "dpo", "loss.use", "sigmoid+bco_pair"),
        # IPO without a reference, which is not ours.
        ("trl cpo --model_name_or_path m --dataset_name d.jsonl --loss_type ipo", "dpo", "loss.use", "cpo+ipo"),
        (TRL | {"loss_type": ["ipo", "sft"], "beta": 0.3}, "dpo", "loss.use", "ipo+sft"),  # which has no likelihood
        (GRPO | {"importance_sampling_level": "turn"}, "rl", "loss.use", "turn"),
        (FACTORY | {"stage": "dpo", "pref_loss": "kto_pair"}, "dpo", "loss.use", "kto_pair"),
        (
            VERL | {"algorithm.adv_estimator": "tir_optimal_token_baseline"},
            "rl",
            "advantage.use",
            "tir_optimal_token_baseline",
        ),
        (VERL | {"actor_rollout_ref.actor.policy_loss.loss_mode": "kl_cov"}, "rl", "loss.use", "kl_cov"),
    ],
)
def test_unknown_objective_makes_the_recipe_invalid(
    values: Any, stage: str, key: str, written: str, call: Callable[..., Any], folder: Path
) -> None:
    """Otherwise the recipe would be valid but another experiment: plain DPO for hinge, GRPO for ReMax."""
    draft = import_recipe(folder, values, stage=stage)
    assert draft.at(key) == written
    file = "run.sh" if (folder / "run.sh").exists() else "theirs.yaml"
    result = call("recipe", "import", file, "--stage", stage)
    assert result.exit_code == 2 and f"{key}: " in result.stderr and f"`{written}`" in result.stderr
    if "beta" in values:
        assert draft.at("loss.beta") == 0.3  # what belongs to it stays


def test_entropy_bonus_is_added_to_the_presets_terms(folder: Path) -> None:
    older = import_recipe(folder, f"{OPENRLHF} --advantage_estimator group_norm --entropy_loss_coef 0.02")
    assert older.plain()["regularisers"] == [{"use": "entropy_bonus", "coef": 0.02}]
    entropy = {"actor_rollout_ref.actor.entropy_coeff": 0.01}
    draft = import_recipe(folder, VERL | entropy | {"algorithm.adv_estimator": "grpo"})
    assert draft.plain()["regularisers"] == [{"use": "entropy_bonus", "coef": 0.01}]
    trl = import_recipe(folder, GRPO | {"loss_type": "grpo", "entropy_coef": 0.01})  # whose bonus is a mean over tokens
    assert trl.plain()["regularisers"] == [{"use": "entropy_bonus", "coef": 0.01, "aggregation": "token_mean"}]
    value, bonus = import_recipe(folder, VERL | entropy).plain()["regularisers"]  # verl's default is gae: PPO's critic
    assert (value["use"], value["coef"], bonus) == ("value", 0.1, {"use": "entropy_bonus", "coef": 0.01})


@pytest.mark.parametrize(
    ("given", "entry"),
    [
        ({}, {"use": "tis", "level": "sequence", "mode": "mask", "clip_max": 3.0}),
        ({"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_cap": 2.0},
         {"use": "tis", "level": "token", "mode": "truncate", "clip_max": 2.0}),
        ({"vllm_importance_sampling_clip_max": 4.0, "vllm_importance_sampling_clip_min": 0.5},
         {"use": "tis", "level": "sequence", "mode": "mask", "clip_max": 4.0, "clip_min": 0.5}),
        ({"vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_clip_min": 0.5},  # null: no bound
         {"use": "tis", "level": "sequence", "mode": "mask", "clip_max": None, "clip_min": 0.5}),
        ({"vllm_importance_sampling_correction": False}, None),
        ({"use_vllm": False}, None),
    ],
)  # fmt: skip
def test_trls_vllm_correction_is_imported(given: Any, entry: Any, folder: Path) -> None:
    draft = import_recipe(folder, GRPO | {"use_vllm": True} | given)
    assert draft.plain().get("corrections") == (None if entry is None else [entry])


CORRECT = "algorithm.rollout_correction.rollout_"


@pytest.mark.parametrize(
    ("given", "section", "entry"),
    [
        ({"is": "token", "is_threshold": 3.0}, "corrections",
         {"use": "tis", "level": "token", "mode": "truncate", "clip_max": 3.0}),
        ({"is": "sequence"}, "corrections", {"use": "tis", "level": "sequence", "mode": "truncate", "clip_max": 2.0}),
        ({"is": "token", "is_threshold": "0.5_5"}, "corrections",
         {"use": "tis", "level": "token", "mode": "mask", "clip_min": 0.5, "clip_max": 5.0}),
        # verl bounds engine / trainer, `engine_ratio` trainer / engine.
        ({"rs": "seq_mean_k1", "rs_threshold": "0.8_4"}, "select",
         {"use": "engine_ratio", "level": "geometric", "clip_min": 0.25, "clip_max": 1.25}),
        ({"rs": "token_k1", "rs_threshold": 2}, "select",
         {"use": "engine_ratio", "level": "token", "clip_min": 0.5, "clip_max": 2.0}),
    ],
)  # fmt: skip
def test_verls_rollout_correction_is_imported(given: Any, section: str, entry: Any, folder: Path) -> None:
    keys = {f"{CORRECT}{key}": value for key, value in given.items()}
    draft = import_recipe(folder, VERL | {"algorithm.adv_estimator": "grpo"} | keys)
    assert draft.plain()[section] == [entry] and left_out(draft) == {}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({CORRECT + "rs": "seq_max_k2", CORRECT + "rs_threshold": 2.5}, "rejects by the ratio of a token"),
        ({CORRECT + "is": "token", CORRECT + "rs": "token_k1", CORRECT + "rs_threshold": "0.5_2.0"}, "corrected once"),
        ({CORRECT + "rs": "token_k1", "algorithm.rollout_correction.bypass_mode": True}, "with bypass_mode verl"),
    ],
)
def test_rejections_that_are_not_imported_are_named(given: Any, why: str, folder: Path) -> None:
    draft = import_recipe(folder, VERL | {"algorithm.adv_estimator": "grpo"} | given)
    assert why in left_out(draft)[CORRECT + "rs"] and "select" not in draft.plain()


def test_verls_values_that_are_not_read_are_named(folder: Path) -> None:
    given = {"actor_rollout_ref.actor.use_kl_loss": "${use_kl_loss}", "trainer.save_freq": "after_each_epoch",
             "trainer.test_freq": "after_each_epoch",
             "actor_rollout_ref.rollout.top_k": "${top_k}", "algorithm.adv_estimator": "grpo"}  # fmt: skip
    assert given.keys() - left_out(import_recipe(folder, VERL | given)).keys() == {"algorithm.adv_estimator"}
    files = {"data.val_files": "[a.parquet,b.parquet]", "trainer.test_freq": 5}
    draft = import_recipe(folder, VERL | files)
    assert draft.at("eval.data.source") == "a.parquet"
    assert "`eval.data` has one source, a.parquet; b.parquet is not evaluated" in draft.notes


def test_verls_clip_cov_is_a_selection_beside_ppos_clip(folder: Path) -> None:
    given = {MODE: "clip_cov", "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": 0.001,
             "actor_rollout_ref.actor.policy_loss.clip_cov_ub": 60.0, "algorithm.adv_estimator": "grpo"}  # fmt: skip
    draft = import_recipe(folder, VERL | given)
    assert draft.plain()["select"] == [{"use": "clip_cov", "share": 0.001, "high": 60.0}]
    assert (draft.at("loss.use"), draft.at("loss.dual_clip"), left_out(draft)) == ("clip", None, {})


def test_trls_reward_model_among_the_functions(folder: Path) -> None:
    """TRL's `reward_funcs` may name a model of the hub."""
    draft = import_recipe(folder, GRPO | {"reward_funcs": ["org/rm-7b", "think_format_reward"]})
    assert [entry["use"] for entry in draft.plain()["rewards"]] == ["reward_model", "format.structure"]
    assert draft.plain()["rewards"][0]["params"] == {"path": "org/rm-7b"} and left_out(draft) == {}


def test_trls_masks_of_tokens_and_rows_are_imported(folder: Path) -> None:
    given = {"use_vllm": True, "off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.2}
    draft = import_recipe(folder, GRPO | given | {"vllm_importance_sampling_mode": "token_mask"})
    assert sorted(draft.plain()["corrections"], key=lambda entry: entry["use"]) == [
        {"use": "off_policy_seq_mask", "threshold": 0.5},
        {"use": "tis", "level": "token", "mode": "mask", "clip_max": 3.0},
    ]
    assert draft.plain()["select"] == [{"use": "high_entropy_tokens", "rho": 0.2}]
    assert left_out(draft) == {}


def test_ratios_that_trl_combines_otherwise_are_noted(folder: Path) -> None:
    vespo = {"vllm_importance_sampling_correction": True, "use_vllm": True, "loss_type": "vespo"}
    assert any("vespo's ratio of the row" in note for note in import_recipe(folder, GRPO | vespo).notes)
    gspo = {"importance_sampling_level": "sequence", "beta": 0.1}
    assert any("the ratio of its row" in note for note in import_recipe(folder, GRPO | gspo).notes)
    orpo = import_recipe(folder, "trl orpo --model_name_or_path org/x --dataset_name rows.jsonl").notes
    assert any("ORPO also trains on the prompts" in note for note in orpo)
    cpo = "trl cpo --model_name_or_path org/x --dataset_name rows.jsonl --label_smoothing 0.1"
    assert not any("label_smoothing" in note for note in import_recipe(folder, cpo).notes)  # CPO's `sigmoid` reads it


def test_axolotls_correction_equals_trls(folder: Path) -> None:
    given = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_mode": "token_mask"}
    draft = import_recipe(folder, AXOLOTL | {"rl": "grpo", "trl": given})
    assert draft.plain()["corrections"] == [{"use": "tis", "level": "token", "mode": "mask", "clip_max": 3.0}]
    assert left_out(draft) == {}
    assert "corrections" not in import_recipe(folder, AXOLOTL | {"rl": "grpo"}).plain()


@pytest.mark.parametrize("key", ["reward_model.model.path", "reward.reward_model.model_path"])
def test_verl_asks_a_reward_model_where_it_is_switched_on_and_then_nothing_else(key: str, folder: Path) -> None:
    switch = key.removesuffix(".model.path").removesuffix(".model_path") + ".enable"
    given = VERL | {"algorithm.adv_estimator": "grpo", key: "org/rm"}
    for off in (given, given | {switch: False}):
        draft = import_recipe(folder, off)
        assert [entry["use"] for entry in draft.plain()["rewards"]] == ["math.accuracy"]
        assert left_out(draft) == {key: f"{switch} is not true: verl does not ask it"}
    draft = import_recipe(folder, given | {switch: True})
    assert draft.plain()["rewards"] == [{"use": "reward_model", "params": {"path": "org/rm"}}]
    assert left_out(draft) == {}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (AXOLOTL | {"diffusion": {"eps": 1e-3}}, "`diffusion` of axolotl"),
        (AXOLOTL | {"process_reward_model": True}, "`process_reward_model` of axolotl"),
        (FACTORY | {"export_dir": "merged"}, "it trains nothing"),
        (f"{SWIFT} --rlhf_type gkd", "`rlhf_type: gkd` of ms-swift"),
        ("swift sft --model org/x --dataset d.jsonl --task_type seq_cls", "`task_type: seq_cls` of ms-swift"),
        ("megatron sft --model org/x --dataset d.jsonl --task_type embedding", "`task_type: embedding` of Megatron"),
        (VERL | {"distillation.enabled": True}, "whose `kl.reference` is the teacher"),
    ],
)
def test_method_that_is_not_converted_is_refused(values: Any, told: str, folder: Path) -> None:
    """Its other keys would make it SFT, DPO or GRPO."""
    with pytest.raises(RecipeError) as raised:
        import_recipe(folder, values)
    assert told in str(raised.value)


def test_epochs_beside_steps_are_reported(folder: Path) -> None:
    draft = import_recipe(folder, AXOLOTL | {"num_epochs": 2, "max_steps": 10})
    assert (draft.at("run.steps"), draft.at("run.epochs")) == (10, None)
    assert left_out(draft) == {"num_epochs": "`run.steps` decides the length of the run"}


def test_switched_off_methods_are_imported(folder: Path) -> None:
    assert import_recipe(folder, AXOLOTL | {"process_reward_model": False}).stage == "sft"
    assert import_recipe(folder, VERL | {"distillation.enabled": False}).stage == "rl"
    assert import_recipe(folder, f"{SWIFT} --task_type causal_lm").stage == "dpo"


def test_penalty_for_length_does_not_stand_in_for_the_users_reward(folder: Path) -> None:
    command = f"{OPENRLHF} --advantage_estimator rloo --generate_max_len 1024 --reward.overlong_buffer_len 256"
    draft = import_recipe(folder, f"{command} --reward.overlong_penalty_factor 2")
    penalty = {"use": "length.soft_overlong", "params": {"max_length": 1024, "buffer": 256, "factor": 2.0}}
    assert draft.plain()["rewards"] == [{"use": "reward_model", "params": {"path": "org/rm"}}, penalty]
    custom = f"{command} --reward.remote_url mine.py".replace("--reward_pretrain org/rm", "")
    assert [entry["use"] for entry in import_recipe(folder, custom).plain()["rewards"]] == [
        "./run_rewards.py:score",
        "length.soft_overlong",
    ]
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    given = {"custom_reward_function.path": "mine.py", f"{buffer}.enable": True, f"{buffer}.len": 64}
    draft = import_recipe(folder, VERL | {"algorithm.adv_estimator": "grpo", "data.max_response_length": 256} | given)
    assert [entry["use"] for entry in draft.plain()["rewards"]] == ["./run_rewards.py:score", "length.soft_overlong"]
    assert 'compute_score("", completion, answer)' in left_out(draft)["custom_reward_function.path"]


def test_named_rewards_get_their_parameters(folder: Path) -> None:
    command = f"{SWIFT} --rlhf_type grpo --reward_funcs repetition soft_overlong cosine --soft_cache_length 64"
    draft = import_recipe(folder, f"{command} --max_completion_length 256 --repetition_n_grams 5")
    repetition = {"use": "length.ngram_repetition", "params": {"ngram_size": 5, "max_penalty": -1.0, "unit": "word"}}
    overlong = {"use": "length.soft_overlong", "params": {"max_length": 256, "buffer": 64}}
    missing = {"use": "./run_rewards.py:cosine"}  # named in the recipe, which is invalid until it exists
    assert draft.plain()["rewards"] == [repetition, overlong, missing]
    assert left_out(draft) == {"reward_funcs: cosine": "write `use: length.cosine` with its params"}
    draft = import_recipe(folder, OPEN_R1 | {"reward_funcs": ["soft_overlong_punishment"], "soft_punish_cache": 128})
    assert draft.plain()["rewards"] == [{"use": "length.soft_overlong", "params": {"max_length": 16384, "buffer": 128}}]


def test_package_that_a_script_installs_is_not_its_command(folder: Path) -> None:
    draft = import_recipe(folder, f"pip install transformers math_verify trl -U\n{SWIFT} --rlhf_type dpo")
    assert (draft.foreign.table.name, draft.at("model.path")) == ("ms_swift", "org/x")


def test_openrlhfs_keys_of_the_update_are_not_taken_for_placement(folder: Path) -> None:
    told = left_out(
        import_recipe(folder, f"{OPENRLHF} --reward.clip_range -5 5 --actor.muon.lr 0.1 --actor.num_nodes 2")
    )
    assert "limits its value" in told["reward.clip_range"] and "`optim` define" in told["actor.muon.lr"]
    assert "one process per GPU" in told["actor.num_nodes"]


def test_overridden_key_is_named(folder: Path) -> None:
    draft = import_recipe(
        folder, GRPO | {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_level": "sequence"}
    )
    assert (draft.at("loss.use"), draft.at("loss.ratio_max")) == ("cispo", 5.0)
    told = left_out(draft)
    assert "`loss.use` is cispo: loss_type" in told["importance_sampling_level"]
    assert "epsilon_high" not in told  # it is read as cispo's bound
    axolotl = AXOLOTL | {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["q_proj"]}
    assert "all-linear: lora_target_linear" in left_out(import_recipe(folder, axolotl))["lora_target_modules"]


def test_unused_dependent_key_is_left_out(folder: Path) -> None:
    told = left_out(import_recipe(folder, TRL | {"train_batch_size": 64}, stage="sft"))
    assert "`batch.size`" in told["train_batch_size"]
    unused = {"actor_rollout_ref.actor.use_kl_loss": False, "actor_rollout_ref.actor.kl_loss_coef": 0.1}
    assert left_out(import_recipe(folder, VERL | unused)) == {}
    command = f"{OPENRLHF} --advantage_estimator group_norm --dynamic_filtering --dynamic_filtering_reward_range"
    told = left_out(import_recipe(folder, f"{command} 0.2 0.8"))
    assert "all-correct and all-wrong groups" in told["dynamic_filtering_reward_range"]
    assert left_out(import_recipe(folder, f"{command} 0 1")) == {}


@pytest.mark.parametrize(("epsilon", "clip"), [({}, 0.2), ({"epsilon": 3e-4, "epsilon_high": 4e-4}, 3e-4)])
def test_gspo_with_trl_default_epsilon_is_valid(
    epsilon: dict[str, float], clip: float, call: Callable[..., Any], folder: Path
) -> None:
    """TRL's 0.2 never clips a geometric mean of ratios; the run is that run, with a note."""
    values = GRPO | {"model_name_or_path": "tiny", "importance_sampling_level": "sequence", **epsilon}
    assert import_recipe(folder, values, stage="rl").at("loss.clip_low") == clip
    result = call("recipe", "import", "theirs.yaml", "--stage", "rl")
    assert result.exit_code == 0, result.stderr
    assert ("loss.clip_low: does nothing at 0.2" in result.stderr) is not bool(epsilon)


def test_keys_that_change_samples_or_rows_are_reported(folder: Path) -> None:
    told = left_out(import_recipe(folder, VERL | {"actor_rollout_ref.rollout.do_sample": False}))
    assert "completions are sampled" in told["actor_rollout_ref.rollout.do_sample"]
    rows = [{"path": "org/rows", "type": "chat_template", "revision": "v1"}]
    assert "the newest rows" in left_out(import_recipe(folder, AXOLOTL | {"datasets": rows}))["datasets.0.revision"]
    trl = {"trl": {"num_generations": 4, "sync_ref_model": True, "min_p": 0.1, "importance_sampling_level": "token"}}
    told = left_out(import_recipe(folder, AXOLOTL | {"rl": "grpo"} | trl))
    assert set(told) == {"trl.sync_ref_model", "trl.min_p"} and "did you mean" not in "".join(told.values())


def test_reference_other_than_the_starting_policy(folder: Path) -> None:
    given = FACTORY | {"stage": "dpo", "ref_model": "org/reference"}
    assert import_recipe(folder, given).at("anchors.reference") == "org/reference"
    assert import_recipe(folder, GRPO | {"ref_model": "org/reference"}).at("kl.reference") == "org/reference"


def test_axolotl_pairs_are_read(call: Callable[..., Any], folder: Path) -> None:
    """Its conversation is the prompt, and each side is one message."""
    ask, sides = [{"role": "user", "content": "q"}], {side: {"role": "assistant", "content": side} for side in "ab"}
    row = {"talk": ask, "chosen": sides["a"], "rejected": sides["b"]}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    rows = [{"path": "rows.jsonl", "ds_type": "json", "type": "chat_template.default", "field_messages": "talk"}]
    values = AXOLOTL | {"base_model": "tiny", "rl": "dpo", "datasets": rows, "num_epochs": 1}
    (folder / "theirs.yaml").write_text(json.dumps(values, indent=1))
    result = call("recipe", "import", "theirs.yaml", "--output", "made.yaml")
    assert result.exit_code == 0, result.stderr
    assert call("recipe", "validate", "made.yaml").exit_code == 0


SCRIPT = """
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

DPOTrainer(model="org/x", ref_model=None, args=DPOConfig("out", beta=0.2), peft_config=LoraConfig(r=4)).train()
"""


UNSLOTH = """
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained(model_name="org/x", max_seq_length=2048)
model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing="unsloth")
SFTTrainer(model=model, tokenizer=tokenizer, args=SFTConfig("out", max_steps=3)).train()
"""


def test_model_that_a_script_wraps_under_its_own_name(folder: Path) -> None:
    """Without its adapter all weights would be trained."""
    (folder / "sft.py").write_text(UNSLOTH)
    draft = convert(read(folder / "sft.py"))
    lora = {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": "all-linear"}
    assert (draft.at("model.path"), draft.plain()["model"]["lora"]) == ("org/x", lora)
    assert (draft.at("model.quantize"), draft.at("data.max_length")) == ("nf4", 2048)
    (folder / "sft.py").write_text(
        UNSLOTH.replace("unsloth import FastLanguageModel", "peft import LoraConfig, get_peft_model")
        .replace("FastLanguageModel.get_peft_model(model, r=8", "get_peft_model(model, LoraConfig(r=8)")
        .replace("model, tokenizer = FastLanguageModel", "model = AutoModelForCausalLM")
        .replace(', use_gradient_checkpointing="unsloth"', "")
    )
    draft = convert(read(folder / "sft.py"))
    assert draft.plain()["model"]["lora"] == {"rank": 8, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}
    assert draft.at("model.path") == "org/x" and draft.at("model.quantize") is None


def test_none_and_peft_s_own_defaults_in_a_script(folder: Path) -> None:
    (folder / "dpo.py").write_text(SCRIPT)
    draft = convert(read(folder / "dpo.py"))
    assert draft.plain()["model"]["lora"] == {"rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}
    assert not draft.left and not any("ref_model" in note for note in draft.notes)


def test_shares_of_interleaved_sources(folder: Path) -> None:
    shares = FACTORY | {"dataset": "a,b", "mix_strategy": "interleave_over", "interleave_probs": "0.7,0.3"}
    mix = import_recipe(folder, shares).plain()["data"]["mix"]
    assert [(source["source"], source["weight"]) for source in mix] == [("a", 0.7), ("b", 0.3)]
    mix = import_recipe(folder, shares | {"mix_strategy": "concat"}).plain()["data"]["mix"]  # read nowhere there
    assert all("weight" not in source for source in mix)


def test_openrlhfs_kl_after_the_baseline_is_noted(folder: Path) -> None:
    def notes(estimator: str) -> str:
        return " ".join(import_recipe(folder, f"{OPENRLHF} --advantage_estimator {estimator}").notes)

    assert "after the baseline" in notes("rloo")
    assert "after the baseline" not in notes("reinforce")  # whose returns are by token here, too


@pytest.mark.parametrize(
    ("given", "section", "entry"),
    [
        (
            f"{SWIFT_GRPO} --top_entropy_quantile 0.2",
            "select",
            {"use": "high_entropy_tokens", "rho": 0.2},
        ),
        (
            f"{SWIFT_GRPO} --off_policy_sequence_mask_delta 0.3",
            "corrections",
            {"use": "off_policy_seq_mask", "threshold": 0.3},
        ),
        (
            f"{SWIFT_GRPO} --rollout_importance_sampling_mode sequence_truncate",
            "corrections",
            {"use": "tis", "level": "geometric", "mode": "truncate", "clip_max": 2.0},
        ),
        (
            f"{SWIFT_GRPO} --rollout_importance_sampling_mode sequence_mask",
            "corrections",
            {"use": "tis", "level": "token", "clip_max": None, "row_max": 2.0},
        ),
        (
            f"{OPENRLHF} --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop",
            "corrections",
            {"use": "tis", "level": "token", "mode": "mask", "clip_min": 0.5, "clip_max": 5.0},
        ),
        (
            f"{OPENRLHF} --enable_vllm_is_correction --algo.advantage.is_correction_threshold 0.8 1.2",
            "corrections",
            {"use": "tis", "level": "token", "mode": "truncate", "clip_min": 0.8, "clip_max": 1.2},
        ),
        (
            f"{OPENRLHF} --enable_vllm_is_correction --vllm_is_correction_type icepop --vllm_is_truncated_threshold 2",
            "corrections",
            {"use": "tis", "level": "token", "mode": "mask", "clip_min": 0.0, "clip_max": 2.0},
        ),
        (
            f"{OPENRLHF} --enable_vllm_is_correction --algo.advantage.is_correction_type seq-mask-tis",
            "corrections",
            {"use": "tis", "level": "token", "clip_max": None, "row_min": 0.5, "row_max": 5.0},
        ),
    ],
)
def test_swifts_and_openrlhfs_corrections_are_imported(given: str, section: str, entry: Any, folder: Path) -> None:
    draft = import_recipe(folder, given, stage="rl")
    assert draft.plain()[section] == [entry]
    assert not [
        key for key in left_out(draft) if "vllm_is" in key or "is_correction" in key or "importance_sampling" in key
    ]
