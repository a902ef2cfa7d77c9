python3 -m recipe.dapo.main_dapo \
    data.train_files=maths.parquet data.prompt_key=problem data.train_batch_size=512 \
    actor_rollout_ref.model.path=org/base-32b \
    actor_rollout_ref.actor.ppo_mini_batch_size=512 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.rollout.n=16 \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.max_response_length=8192 \
    reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=2048 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    data.val_files=aime.parquet trainer.test_freq=10 trainer.total_training_steps=300 trainer.default_local_dir=ckpts/dapo
