"""TRL's side of `rl_step.py`: GRPOTrainer with colocated vLLM, phases from its own profiling contexts."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl_side
from clocks import replaced
from rl_work import GROUP, LR, random_ids, request


def run_trl(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """GRPOTrainer with its own profiling contexts as the source of phases."""
    import os

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    os.environ.setdefault("MASTER_PORT", str(free_port()))  # else TRL takes 29500, whoever uses it
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.extras.profiling import ProfilingContext

    current: dict[str, float] = {}
    phases: list[dict[str, float]] = []
    steps: list[float] = []
    tokens: list[int] = []
    logged: list[dict[str, Any]] = []

    def note(self: Any, duration: float) -> None:
        name = self.name.removeprefix("GRPOTrainer.")
        current[name] = current.get(name, 0.0) + duration

    def next_step() -> None:
        phases.append(dict(current))
        current.clear()

    tokenizer: Any = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    rows = [json.loads(line)["prompt"] for line in Path(spec["rows"]).read_text().splitlines()]
    prompts = [[{"role": "user", "content": q}] for q in rows]
    rendered = [
        tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=True, return_dict=False) for p in prompts
    ]
    longest = max(map(len, rendered)) + spec["new"]
    per_step = spec["prompts"]

    def even_share(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        of_step = rendered[len(tokens) * per_step : (len(tokens) + 1) * per_step]
        tokens.append(sum(map(len, completion_ids)) + GROUP * sum(map(len, of_step)))
        return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]

    lora = None
    if spec["lora"]:
        from peft import LoraConfig

        lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    half_base = spec["lora"] and not spec["smoke"]
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16 if half_base else torch.float32)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=even_share,
        args=GRPOConfig(**trl_arguments(spec, longest)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        peft_config=lora,
        callbacks=[trl_side.clock(result, steps, logged, next_step)],
        rollout_func=trl_rollouts(spec, rendered) if spec["lengths"] else None,
    )
    with replaced(ProfilingContext, "_log_metrics", note):
        trainer.train()
    names = {"vLLM.generate": "generate", "transformers.generate": "generate", "sync_weights": "sync"}
    names |= {"_calculate_rewards": "score"}
    found = {
        ours: [step.get(theirs, 0.0) for step in phases]
        for theirs, ours in names.items()
        if any(theirs in s for s in phases)
    }
    waiting = [step.get("_prepare_inputs", 0.0) for step in phases]
    found["update"] = [whole - part for whole, part in zip(steps, waiting, strict=True)]
    result |= {
        "step_s": steps,
        "phases": found,
        "tokens": tokens,
        "reward": [one.get("reward") for one in logged],
        "grad_norm": [one.get("grad_norm") for one in logged],
        "gap": [one.get("sampling/sampling_logp_difference/mean") for one in logged],
    }


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def trl_arguments(spec: dict[str, Any], longest: int) -> dict[str, Any]:
    settings, smoke = spec["trl"], spec["smoke"]
    values: dict[str, Any] = {
        **trl_side.arguments(spec, lr=LR, rows=spec["prompts"] * GROUP, micro=settings["micro"]),
        "num_generations": GROUP,
        "max_completion_length": spec["new"],
        "temperature": 1.0,
        "loss_type": "grpo",
        "beta": 0.0,
        "shuffle_dataset": False,
        "gradient_checkpointing": settings["checkpointing"],
        "vllm_importance_sampling_correction": spec["correction"] == "tis",
    }
    if spec["correction"] == "tis":
        values |= {"vllm_importance_sampling_mode": "token_truncate"}
    if not smoke:
        values |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": settings["share"],
            "vllm_enable_sleep_mode": settings["sleep"],
            "vllm_max_model_length": longest,
        }
    return values


def trl_rollouts(spec: dict[str, Any], rendered: list[list[int]]) -> Callable[..., dict[str, Any]]:
    """TRL's `rollout_func` for work B: the same requests as the other side's, through TRL's own colocated vLLM."""
    steps = iter(enumerate(spec["lengths"]))
    want = spec["correction"] != "none"

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        from trl.extras.profiling import profiling_context

        step, lengths = next(steps)
        of_step = rendered[step * spec["prompts"] : (step + 1) * spec["prompts"]]
        ids = [prompt for prompt in of_step for _ in range(GROUP)]
        assert len(prompts) == len(ids) == len(lengths)
        if spec["smoke"]:
            return {"prompt_ids": ids, "completion_ids": random_ids(lengths), "logprobs": None}
        generation = trainer.vllm_generation
        if generation.enable_sleep_mode:
            generation.llm.wake_up(tags=["kv_cache"])
        with profiling_context(trainer, "vLLM.generate"):
            outputs = generation.llm.generate(
                [{"prompt_token_ids": p} for p in ids],
                [request(length, logprobs=want) for length in lengths],
                use_tqdm=False,
            )
        if generation.enable_sleep_mode:
            generation.llm.sleep(level=2)
            generation._llm_weights_sleeping = True
        found = [output.outputs[0] for output in outputs]
        logprobs = [[o.logprobs.logprobs[i] for i in o.logprobs.start_indices] for o in found] if want else None
        return {"prompt_ids": ids, "completion_ids": [list(o.token_ids) for o in found], "logprobs": logprobs}

    return rollouts
