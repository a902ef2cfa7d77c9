set -xeuo pipefail

MODEL_PATH=${MODEL_PATH:-org/base-8b}
rollout_n=${ROLLOUT_N:-5}
max_response_length=$((1024 * 2))

DATA=(
    data.train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
    data.val_files="$HOME/data/gsm8k/test.parquet"
    data.train_batch_size=1024
    data.max_prompt_length=1024
    data.max_response_length=${max_response_length}
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.002
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
)
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    "${DATA[@]}" "${ACTOR[@]}" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=${rollout_n} \
    trainer.logger='["console","wandb"]' \
    trainer.save_freq=20 \
    trainer.total_epochs=15 "$@"
