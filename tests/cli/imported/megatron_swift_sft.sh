NPROC_PER_NODE=2 \
CUDA_VISIBLE_DEVICES=0,1 \
megatron sft \
    --model org/base-7b \
    --dataset 'org/general#500' \
    --tensor_model_parallel_size 2 --sequence_parallel true \
    --micro_batch_size 4 \
    --global_batch_size 32 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --finetune true --cross_entropy_loss_fusion true \
    --lr 2e-5 --lr_warmup_fraction 0.05 --min_lr 1e-6 \
    --num_train_epochs 1 \
    --max_length 2048 --packing true \
    --output_dir megatron_output --save_steps 100 --save_total_limit -1 \
    --no_save_optim true --no_save_rng true
