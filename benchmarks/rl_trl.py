"""TRL's side of `rl_step.py`: GRPOTrainer with colocated vLLM, phases from its own profiling contexts."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl_side
from clocks import replaced, synchronise
from rl_work import GROUP, LR, random_ids, request
from sides import is_out_of_memory
from vision import IMAGE, VIDEO


def run_trl(spec: dict[str, Any], result: dict[str, Any], at_end: Callable[[], None] = lambda: None) -> None:
    """Run GRPOTrainer with its own profiling contexts as the source of phases.

    First the ways of `spec["trl"]["ways"]`, [micro-batch, checkpointing], are tried on an update of a few rows; the
    fastest per token runs the steps. at_end: called after each step, when `result` has its figures. With `start_only`
    the run ends before its first step.
    """
    import os

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    os.environ.setdefault("MASTER_PORT", str(free_port()))  # otherwise TRL uses 29500 even if it is taken
    import torch
    from trl import GRPOConfig, GRPOTrainer
    from trl.extras.profiling import ProfilingContext

    given = inputs(spec)
    rendered = given.rendered
    clock = StepClock(result, at_end)
    tokens: list[int] = []

    def even_share(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        if clock.trial:
            return [0.0] * len(completion_ids)  # no advantage, no gradient
        of_step = rendered[len(tokens) * spec["prompts"] : (len(tokens) + 1) * spec["prompts"]]
        tokens.append(sum(map(len, completion_ids)) + GROUP * sum(map(len, of_step)))
        return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]

    lora = None
    if spec["lora"]:
        from peft import LoraConfig

        lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    half_base = spec["lora"] and not spec["smoke"]
    model = given.model_class.from_pretrained(spec["model"], dtype=torch.bfloat16 if half_base else torch.float32)
    result["tokens"] = tokens
    trainer = GRPOTrainer(
        model=model,
        processing_class=given.processing_class,
        reward_funcs=even_share,
        args=GRPOConfig(**trl_arguments(spec, max(map(len, rendered)) + spec["new"])),
        train_dataset=given.dataset,
        peft_config=lora,
        callbacks=[clock.callback(start_only=spec.get("start_only", False))],
        rollout_func=trl_rollouts(spec, given) if spec["lengths"] else None,
    )
    with replaced(ProfilingContext, "_log_metrics", lambda *noted: clock.note(*noted)), contextlib.suppress(Started):
        clock.trial = True
        best = fastest(trainer, spec, rendered, clock, result.setdefault("trials", []))
        clock.trial = False
        set_way(trainer, spec, *best, rows=spec["prompts"] * GROUP)
        result |= {"measured_since": time.perf_counter(), "micro": best[0], "checkpointing": best[1]}
        trainer.train()


@dataclass(frozen=True)
class Inputs:
    """The model's class, its processor or tokenizer, and the prompts. rendered: the tokens of each prompt as the model
    reads them. requests: the vLLM request of each prompt; vLLM expands one token per image itself."""

    model_class: Any
    processing_class: Any
    dataset: Any
    rendered: list[list[int]]
    requests: Sequence[Any]
    image_ids: Sequence[int] = ()  # positions of image features


def inputs(spec: dict[str, Any]) -> Inputs:
    """Return the inputs of the model and rows of a work."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature
    from PIL import Image
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    from posttrain.models import vision

    rows = [json.loads(line) for line in Path(spec["rows"]).read_text().splitlines()]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    how: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    if not spec["picture"]:
        tokenizer: Any = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
        rendered = [tokenizer.apply_chat_template(prompt, **how) for prompt in prompts]
        requests = [{"prompt_token_ids": ids} for ids in rendered]
        return Inputs(AutoModelForCausalLM, tokenizer, Dataset.from_dict({"prompt": prompts}), rendered, requests)
    processor = vision.processor_class(AutoConfig.from_pretrained(spec["model"])).from_pretrained(spec["model"])
    processor.tokenizer.padding_side = "left"
    rendered, requests = [], []
    for row in rows:
        content = [{"type": "image"}, {"type": "text", "text": row["prompt"]}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], **{**how, "tokenize": False})
        picture = Image.open(row["images"][0]).convert("RGB")
        rendered.append(processor(text=[text], images=[picture])["input_ids"][0])
        requests.append(
            {"prompt_token_ids": processor.tokenizer(text)["input_ids"], "multi_modal_data": {"image": picture}}
        )
    turn = {"role": Value("string"), "content": Value("string")}
    features = Features({"prompt": List(turn), "images": List(ImageFeature())})
    columns = {"prompt": prompts, "images": [row["images"] for row in rows]}
    dataset = Dataset.from_dict(columns, features=features)
    image_ids = [int(processor.tokenizer.convert_tokens_to_ids(token)) for token in (IMAGE, VIDEO)]
    return Inputs(AutoModelForImageTextToText, processor, dataset, rendered, requests, image_ids)


class Started(Exception):
    """Raised when the first step would start."""


class StepClock:
    """Seconds of steps and of their parts, from TRL's callbacks and profiling contexts; written to `result`."""

    def __init__(self, result: dict[str, Any], at_end: Callable[[], None]) -> None:
        self.result, self.at_end = result, at_end
        self.trial = False
        self.update_s = 0.0  # of the last step
        self.parts: dict[str, float] = {}

    def note(self, context: Any, duration: float) -> None:
        """Replacement of `ProfilingContext._log_metrics`."""
        name = context.name.removeprefix("GRPOTrainer.")
        self.parts[name] = self.parts.get(name, 0.0) + duration

    def callback(self, *, start_only: bool) -> Any:
        """Return the callback for TRL's trainer."""
        from transformers import TrainerCallback

        mine = self

        class Clock(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.last = time.perf_counter()
                mine.parts.clear()
                mine.result.setdefault("began", self.last)
                if start_only:
                    raise Started

            def on_step_end(self, *_: Any, **__: Any) -> None:
                synchronise()
                now = time.perf_counter()
                mine.ended(now - self.last)
                self.last = now

            def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
                if logs and "loss" in logs and not mine.trial:
                    for name, key in LOGGED.items():
                        mine.result.setdefault(name, []).append(logs.get(key))

        return Clock()

    def ended(self, seconds: float) -> None:
        """Record the end of a step."""
        parts, self.parts = self.parts, {}
        self.update_s = seconds - parts.get("_prepare_inputs", 0.0)
        if self.trial:
            return
        phases = self.result.setdefault("phases", {})
        found = {name: 0.0 for theirs, name in NAMES.items() if theirs in parts or name in phases}
        for theirs, name in NAMES.items():
            if name in found:
                found[name] += parts.get(theirs, 0.0)
        done = len(self.result.setdefault("step_s", []))
        for name, part in {**found, "update": self.update_s}.items():
            phases.setdefault(name, [0.0] * done).append(part)
        self.result["step_s"].append(seconds)
        self.at_end()


NAMES = {"vLLM.generate": "generate", "transformers.generate": "generate", "sync_weights": "sync"}
NAMES |= {"_calculate_rewards": "score"}
LOGGED = {"reward": "reward", "grad_norm": "grad_norm", "gap": "sampling/sampling_logp_difference/mean"}


def fastest(
    trainer: Any, spec: dict[str, Any], rendered: list[list[int]], clock: StepClock, trials: list[dict[str, Any]]
) -> tuple[int, bool]:
    """Return the (micro-batch, checkpointing) with the fastest update per token of those that fit; fills `trials`.

    Each is tried on one micro-batch of the longest rows with random tokens; the first is tried twice, because the first
    pass of a process is slow. After one that does not fit, larger ones with the same checkpointing are skipped. Raises
    RuntimeError if none fits.
    """
    import torch

    ways = [tuple(way) for way in spec["trl"]["ways"]]
    if len(ways) == 1:
        return ways[0]  # type: ignore[return-value]
    kept = trainer.rollout_func
    trainer.rollout_func = made_up(spec, rendered)
    trainer._last_loaded_step = 0  # the engine has the weights
    tried: dict[Any, dict[str, Any]] = {}
    for micro, checkpointing in [ways[0], *ways]:
        if any("out_of_memory" in one and w[0] <= micro and w[1] == checkpointing for w, one in tried.items()):
            continue
        one = tried[micro, checkpointing] = {"micro": micro, "checkpointing": checkpointing}
        count = max(micro, GROUP)
        set_way(trainer, spec, micro, checkpointing, rows=count, steps=1)
        try:
            trainer.train()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            one["out_of_memory"] = True
        else:
            tokens = sum(len(rendered[row // GROUP]) + spec["new"] for row in range(count))
            one["update_s_per_1m"] = 1e6 * clock.update_s / tokens
        forget(trainer)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    trials += tried.values()
    trainer.rollout_func, trainer._last_loaded_step = kept, -1
    fit = [one for one in trials if "update_s_per_1m" in one]
    if not fit:
        raise RuntimeError(f"CUDA out of memory in every trial: {trials}")
    best = min(fit, key=lambda one: one["update_s_per_1m"])
    return best["micro"], best["checkpointing"]


def set_way(
    trainer: Any, spec: dict[str, Any], micro: int, checkpointing: bool, *, rows: int, steps: int | None = None
) -> None:
    """Make the next `train` run steps of this number of rows, `micro` at a time."""
    args = trainer.args
    args.per_device_train_batch_size = trainer._train_batch_size = micro
    args.gradient_accumulation_steps = args.steps_per_generation = rows // micro
    args.generation_batch_size = rows
    args.max_steps = steps or spec["steps"]
    args.gradient_checkpointing = checkpointing
    if not checkpointing:
        trainer.model.gradient_checkpointing_disable()


def forget(trainer: Any) -> None:
    """Remove the state that a trial leaves in the trainer."""
    trainer.model.zero_grad(set_to_none=True)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer._step, trainer._buffered_inputs = 0, None
    gc.collect()


def made_up(spec: dict[str, Any], rendered: list[list[int]]) -> Callable[..., dict[str, Any]]:
    """Replacement of generation: completions of random tokens of maximum length."""

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        del trainer
        ids = random_ids([spec["new"]] * len(prompts))
        logprobs = None if spec["correction"] == "none" else [[-1.0] * len(row) for row in ids]
        return {
            "prompt_ids": [rendered[row // GROUP] for row in range(len(prompts))],
            "completion_ids": ids,
            "logprobs": logprobs,
        }

    return rollouts


def free_port() -> int:
    """Return a port that is currently unused."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def trl_arguments(spec: dict[str, Any], longest: int) -> dict[str, Any]:
    settings = spec["trl"]
    values: dict[str, Any] = {
        **trl_side.arguments(spec, lr=LR, rows=spec["prompts"] * GROUP, micro=settings["ways"][0][0]),
        "num_generations": GROUP,
        "max_completion_length": spec["new"],
        "temperature": 1.0,
        "loss_type": "grpo",
        "beta": 0.0,
        "shuffle_dataset": False,
        "gradient_checkpointing": any(checkpointing for _, checkpointing in settings["ways"]),
        "vllm_importance_sampling_correction": spec["correction"] == "tis",
    }
    if spec["correction"] == "tis":
        values |= {"vllm_importance_sampling_mode": "token_truncate"}
    if spec["vllm"] and not spec["smoke"]:  # TRL cannot send weights to vLLM on a CPU
        values |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": settings["share"],
            "vllm_enable_sleep_mode": settings["sleep"],
            "vllm_max_model_length": longest,
        }
    return values


def trl_rollouts(spec: dict[str, Any], given: Inputs) -> Callable[..., dict[str, Any]]:
    """Return TRL's `rollout_func` for works with lengths: the same requests as posttrain's side, through TRL's own
    vLLM."""
    steps = iter(enumerate(spec["lengths"]))
    want = spec["correction"] != "none"

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        from trl.extras.profiling import profiling_context

        step, lengths = next(steps)
        numbers = range(step * spec["prompts"], (step + 1) * spec["prompts"])
        each = [number for number in numbers for _ in range(GROUP)]
        ids = [given.rendered[number] for number in each]
        assert len(prompts) == len(ids) == len(lengths)
        if not trainer.use_vllm:
            return {"prompt_ids": ids, "completion_ids": random_ids(lengths), "logprobs": None}
        generation = trainer.vllm_generation
        if generation.enable_sleep_mode:
            generation.llm.wake_up(tags=["kv_cache"])
        with profiling_context(trainer, "vLLM.generate"):
            outputs = generation.llm.generate(
                [dict(given.requests[number]) for number in each],
                [request(length, logprobs=want, forbidden=given.image_ids) for length in lengths],
                use_tqdm=False,
            )
        if generation.enable_sleep_mode:
            generation.llm.sleep(level=2)
            generation._llm_weights_sleeping = True
        found = [output.outputs[0] for output in outputs]
        logprobs = [[o.logprobs.logprobs[i] for i in o.logprobs.start_indices] for o in found] if want else None
        return {"prompt_ids": ids, "completion_ids": [list(o.token_ids) for o in found], "logprobs": logprobs}

    return rollouts
