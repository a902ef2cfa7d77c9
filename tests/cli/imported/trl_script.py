"""A GRPO run on sums, in the way of TRL's examples."""

import argparse
import re

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=5e-6)
options = parser.parse_args()

MODEL = "org/base-0.5b"
NUMBER = re.compile(r"-?\d+")
HALF = 0.5


def last_number(text: str) -> str:
    found = NUMBER.findall(text)
    return found[-1] if found else ""


def sums(split="train"):
    rows = load_dataset("org/sums", "easy")["train"]
    return rows.map(lambda row: {"prompt": row["question"]}).select(range(500))


def right(completions, answer, **kwargs) -> list[float]:
    # half a point for a number at all
    texts = [one[0]["content"] if isinstance(one, list) else one for one in completions]
    numbers = [last_number(text) for text in texts]
    return [float(number == gold) + HALF * bool(number) for number, gold in zip(numbers, answer, strict=True)]


def short_in_tokens(completions, **kwargs):
    return [-len(tokenizer(one)["input_ids"]) / 100 for one in completions]


model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16, attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
settings = GRPOConfig(
    output_dir="out/sums",
    learning_rate=options.lr,
    warmup_ratio=0.1,
    per_device_train_batch_size=4 * 2,
    gradient_accumulation_steps=len("four"),
    num_generations=8,
    max_completion_length=200,
    reward_weights=[1.0, 0.1, 0.5],
    max_steps=100,
    learing_rate=1e-6,
)
settings.seed = 7
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[right, short_in_tokens, think_format_reward],
    args=settings,
    train_dataset=sums(),
    peft_config=LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[print],
)
trainer.train()
raise SystemExit("scripts are read, never run")
# ruff: noqa: ARG001
