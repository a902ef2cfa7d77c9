python3 -m openrlhf.cli.train_ppo_ray \
   --actor.num_gpus_per_node 8 \
   --vllm.num_engines 4 --vllm.gpu_memory_utilization 0.6 --vllm.enable_sleep \
   --actor.model_name_or_path org/base-8b --reward.model_name_or_path org/reward-8b \
   --algo.advantage.estimator rloo --algo.kl.init_coef 1e-3 --algo.kl.estimator k3 --algo.kl.use_loss \
   --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 \
   --actor.eps_clip_low_high 0.2 0.27 \
   --train.batch_size 256 --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 \
   --rollout.max_new_tokens 1024 --data.prompt_dataset org/prompts --data.input_key messages \
   --data.apply_chat_template --actor.adam.lr 5e-7 --train.num_episodes 2
