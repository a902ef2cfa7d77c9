# The names before the dotted ones.
deepspeed --module openrlhf.cli.train_dpo \
   --pretrain org/base-8b-sft \
   --dataset org/mixture,org/helpful --dataset_probs 0.7,0.3 \
   --input_template "Q: {}\nA: " --chosen_key better --rejected_key worse \
   --train_batch_size 128 --micro_train_batch_size 2 --max_epochs 1 --max_len 4096 \
   --learning_rate 5e-7 --beta 0.1 --lora_rank 16 --lora_alpha 32 --bf16 --flash_attn
