# The command of a GRPO run on four GPUs.
accelerate launch --config_file zero2.yaml --num_processes 4 trl/scripts/grpo.py \
    --model_name_or_path org/base-0.5b \
    --dataset_name org/maths \
    --reward_funcs accuracy_reward think_format_reward \
    --reward_weights 1.0 0.2 \
    --num_generations 8 --max_completion_length 1024 \
    --per_device_train_batch_size 8 --gradient_accumulation_steps 4 \
    --loss_type dr_grpo --scale_rewards none --epsilon_high 0.28 --beta 0.001 \
    --use_vllm --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 \
    --max_steps 500 --save_steps 100 --seed 7
