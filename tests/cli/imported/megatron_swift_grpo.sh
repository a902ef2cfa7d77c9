NPROC_PER_NODE=8 \
megatron rlhf \
    --rlhf_type grpo \
    --model org/base-7b \
    --dataset org/problems \
    --reward_funcs accuracy format \
    --micro_batch_size 2 --global_batch_size 64 --steps_per_generation 2 --num_generations 16 \
    --max_completion_length 1024 --use_vllm true --vllm_mode colocate \
    --lr 1e-6 --beta 0.001 --train_iters 200 --recompute_granularity selective
