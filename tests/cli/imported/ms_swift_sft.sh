nproc_per_node=2
CUDA_VISIBLE_DEVICES=0,1 \
NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model org/base-7b \
    --tuner_type lora \
    --dataset 'org/general#500' \
              'org/code:python#200' \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \
    --learning_rate 1e-4 \
    --lora_rank 8 --lora_alpha 32 --target_modules all-linear \
    --max_length 2048 --system 'You are a helpful assistant.' \
    --save_steps 50 --save_total_limit 2 --output_dir output
