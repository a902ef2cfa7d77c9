"""One RL step of posttrain against TRL's GRPOTrainer with colocated vLLM: same model, prompts, lengths and update.

    python benchmarks/rl_step.py --work A --out benchmarks/results/rl_A_h100.json
    python benchmarks/rl_step.py --work B --lora --out benchmarks/results/rl_B_lora_h100.json
    python benchmarks/rl_step.py --recompute benchmarks/results/rl_A_h100.json
    python benchmarks/rl_step.py --smoke                  # both works on a CPU, transformers generate, tiny models

Work A: SmolLM2-135M-Instruct, 64 prompts x 8, up to 512 new tokens, ended by EOS. Work B: a 1.39B Qwen2 with random
weights, 64 x 8, lengths from one seeded list with EOS ignored (TRL by its `rollout_func`). Both: reward = share of even
token ids, GRPO loss (mean over each row), no KL, one update a step, float32 trained weights and AdamW, bfloat16
products, float32 adapters on a bfloat16 base with --lora.

Each side runs alone in a subprocess, five steps; the first two are left out. TRL runs with sleep off and on, each with
the largest micro-batch that fits, and its fastest counts; the others are in `trl_tries`. By default neither side
corrects for the gap between engine and trainer; --correction tis switches truncated importance sampling on in both
(TRL's default), which also makes TRL report its gap (`gap`: mean |trainer - engine| log-prob by step).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import folders
import sides

HERE = Path(__file__).resolve().parent
GROUP = 8
LR = 1e-6
TRL_MICRO = {"off": (64, 32, 16, 8), "on": (128, 64, 32, 16, 8)}  # rows a forward pass, largest first, by sleep


def main() -> None:
    args = arguments()
    if args.worker:
        spec = json.loads(Path(args.spec).read_text())
        with sides.reporting(spec) as result:
            {"posttrain": run_posttrain, "trl": run_trl}[args.worker](spec, result)
        sys.stdout.flush()
        return
    if args.recompute:
        print(sides.table(json.loads(args.recompute.read_text()), floors))
        return
    for work in ("A", "B") if args.smoke else (args.work,):
        compare(args, work)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=["A", "B"], default="A")
    parser.add_argument("--lora", action="store_true", help="train a rank-16 adapter on all linear layers")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--correction", choices=["none", "tis"], default="none")
    parser.add_argument("--micro-tokens", type=int, default=16384, help="posttrain's batch.micro_tokens")
    parser.add_argument("--share", type=float, default=None, help="posttrain's vllm.gpu_memory (A: 0.15, B: 0.3)")
    parser.add_argument("--sleep", action="store_true", help="posttrain's vllm.sleep")
    parser.add_argument("--checkpointing", action="store_true", help="posttrain: recompute activations")
    parser.add_argument("--compile", action="store_true", help="posttrain: model.compile")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="posttrain: of products")
    parser.add_argument("--trl-share", type=float, default=0.3, help="TRL's vllm_gpu_memory_utilization")
    parser.add_argument("--trl-sleep", choices=["off", "on", "both"], default="both")
    parser.add_argument("--trl-micro", type=int, nargs="*", help="micro-batches to try, largest first")
    parser.add_argument("--trl-checkpointing", action="store_true", help="TRL: recompute activations (its default)")
    parser.add_argument("--sides", choices=["both", "posttrain", "trl"], default="both")
    parser.add_argument("--models", type=Path, help="keep the models here, for the next run on this machine")
    parser.add_argument("--gpu", type=int, default=0, help="the GPU that NVML is asked about")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--smoke", action="store_true", help="both works on a CPU with tiny models: does the script run?"
    )
    parser.add_argument("--recompute", type=Path, metavar="FILE", help="print the ratios of a committed JSON")
    parser.add_argument("--worker", choices=["posttrain", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(args: argparse.Namespace, work: str) -> None:
    """Both sides on one work, one after the other."""
    lib = None if args.smoke else sides.nvml()
    with tempfile.TemporaryDirectory(prefix="rl_step-") as scratch:
        folder = Path(scratch)
        spec = specification(args, work, folder)
        record = {"work": work, "lora": args.lora, **sides.environment(lib, args.gpu), "setting": setting(spec)}
        if args.sides != "trl":
            record["posttrain"] = sides.run_side(__file__, "posttrain", spec, folder, lib, args.gpu)
            sides.finish(record, args.out, floors)  # so that it stays if the other side is cut off
        if args.sides != "posttrain":
            tries = trl_tries(args, spec, folder, lib)
            record |= {"trl": sides.best_of(tries), "trl_tries": tries}
            sides.finish(record, args.out, floors)


def trl_tries(args: argparse.Namespace, spec: dict[str, Any], folder: Path, lib: Any) -> list[dict[str, Any]]:
    """For each way of sleeping, the largest micro-batch that fits; attempts that ran out of memory are kept as well."""
    tries: list[dict[str, Any]] = []
    for sleep in ("off",) if args.smoke else ("off", "on") if args.trl_sleep == "both" else (args.trl_sleep,):
        for micro in args.trl_micro or ((8,) if args.smoke else TRL_MICRO[sleep]):
            settings = {
                "micro": micro,
                "sleep": sleep == "on",
                "share": args.trl_share,
                "checkpointing": args.trl_checkpointing,
            }
            tries.append(sides.run_side(__file__, "trl", {**spec, "trl": settings}, folder, lib, args.gpu))
            if not tries[-1].get("out_of_memory"):
                break
    return tries


def specification(args: argparse.Namespace, work: str, folder: Path) -> dict[str, Any]:
    """What both workers read. Work B has the number of tokens of every rollout of every step."""
    prompts, new, steps = (4, 24, 3) if args.smoke else (64, 512, args.steps)
    if args.smoke:
        model = folders.tiny(folder / "model")
        if work == "B":
            shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
            model = folders.random_qwen2(folder / "qwen2", model, **shape)
    else:
        home = getattr(args, "models", None) or folder
        model = folders.smollm2(home / "model")
        model = folders.random_qwen2(home / "qwen2", model) if work == "B" else model
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in questions(prompts * steps)))
    lengths = seeded_lengths(steps, prompts * GROUP, new) if work == "B" else None
    share = args.share or (0.15 if work == "A" else 0.3)
    return {
        "work": work,
        "lora": args.lora,
        "smoke": args.smoke,
        "model": str(model),
        "parameters": folders.parameters(model),
        "rows": str(rows),
        "prompts": prompts,
        "new": new,
        "steps": steps,
        "lengths": lengths,
        "correction": args.correction,
        "posttrain": {
            "micro_tokens": args.micro_tokens,
            "share": share,
            "sleep": args.sleep,
            "checkpointing": args.checkpointing,
            "compile": getattr(args, "compile", False),
            "dtype": getattr(args, "dtype", "bfloat16"),
        },
    }


def setting(spec: dict[str, Any]) -> dict[str, Any]:
    """What of the specification is kept in the record."""
    return {name: spec[name] for name in ("parameters", "prompts", "new", "steps", "correction")} | {"group": GROUP}


def questions(count: int) -> list[str]:
    draw = random.Random("rl_step/questions")
    return [
        f"{draw.randrange(10, 1000)} + {draw.randrange(10, 1000)} - {draw.randrange(10, 1000)} = ? Explain each step."
        for _ in range(count)
    ]


def seeded_lengths(steps: int, rows: int, longest: int) -> list[list[int]]:
    """Completion lengths by step and row: most near a third of the longest, as in a young RL run."""
    draw = random.Random("rl_step/lengths")
    return [[int(draw.triangular(longest // 16, longest, longest // 3)) for _ in range(rows)] for _ in range(steps)]


def floors(record: dict[str, Any]) -> list[str]:
    """Generation alone at vLLM's own rate, and the update at 45% of the card's bf16 rate."""
    side = record.get("posttrain", {})
    if "generate_alone_s" not in side or "step_s" not in side:
        return []
    tokens = sides.mean(side["tokens"][sides.LEFT_OUT :])
    update = sides.floor_update_s(record["card"], record["setting"]["parameters"], tokens, lora=record["lora"])
    if update is None:
        return []
    generate = min(side["generate_alone_s"])
    return [f"floor: {generate:.2f} s generation alone + {update:.2f} s update = {generate + update:.2f} s a step"]


# One side, in its own process


def run_posttrain(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """The product's own loop from a recipe; the step's clock is the time from one line of metrics to the next."""
    from posttrain.recipe.load import load_dict
    from posttrain.run.directory import RunDirectory
    from posttrain.run.metrics import MetricsLog, read_metrics
    from posttrain.train import distributed, rl

    times: list[float] = []
    write = MetricsLog.write

    def timed(self: MetricsLog, step: int, values: Any) -> None:
        write(self, step, values)
        synchronise()
        times.append(time.perf_counter())

    MetricsLog.write = timed  # type: ignore[method-assign]
    make = rl.make_engine
    rl.make_engine = lambda *args, **kwargs: prepared(make(*args, **kwargs), spec, result)  # type: ignore[assignment]
    loaded = load_dict(posttrain_recipe(spec), base_dir=HERE, where="benchmark")

    def open_it() -> RunDirectory:
        return RunDirectory.open(Path(spec["run"]), name="rl_step", text="", resolved=loaded.resolved)

    with distributed.open_directory(open_it) as directory:
        rl.run(loaded.recipe, directory)
        rows = read_metrics(directory.path)
    counts = [row["num_tokens"] for row in rows]
    phases = sorted({key for row in rows for key in row if key.startswith("time/")} - {"time/step"})
    result |= {
        "step_s": [rows[0]["time/step"], *(b - a for a, b in itertools.pairwise(times))],
        "phases": {PHASES.get(key, key[5:]): [row.get(key, 0.0) for row in rows] for key in phases},
        "tokens": [b - a for a, b in itertools.pairwise([0, *counts])],
        "reward": [row["reward"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
        "gap": [row.get("mismatch/mean") for row in rows],
    }


PHASES = {"time/rollout": "generate"}


def posttrain_recipe(spec: dict[str, Any]) -> dict[str, Any]:
    settings = spec["posttrain"]
    rollout: dict[str, Any] = {
        "engine": "transformers" if spec["smoke"] else "vllm",
        "prompts_per_step": spec["prompts"],
        "group_size": GROUP,
        "max_new_tokens": spec["new"],
        "staleness": settings.get("staleness", 0),
    }
    if not spec["smoke"]:
        rollout["vllm"] = {"gpu_memory": settings["share"], "sleep": settings["sleep"]}
        rollout["vllm"] |= {"server": settings["server"]} if "server" in settings else {}
    return {
        "stage": "rl",
        "algorithm": "grpo",
        "model": {
            "path": spec["model"],
            "gradient_checkpointing": settings["checkpointing"],
            "compile": settings["compile"],
            "dtype": "auto" if spec["smoke"] else settings["dtype"],
            **({"lora": {}} if spec["lora"] else {}),
        },
        "data": {"source": spec["rows"], "shuffle": False},
        "rollout": rollout,
        "rewards": [{"use": "even.py:even_share"}],
        "corrections": [] if spec["correction"] == "none" else [{"use": spec["correction"]}],
        "batch": {"micro_tokens": settings["micro_tokens"]},
        "optim": {"lr": LR},
        "run": {"steps": spec["steps"]},
    }


def prepared(engine: Any, spec: dict[str, Any], result: dict[str, Any]) -> Any:
    """The engine with the lengths of work B, and with a measurement of generation alone before it closes."""
    if not spec["smoke"] and spec.get("alone", True):
        measure_alone(engine, result)
    if spec["lengths"]:
        give_lengths(engine, spec)
    return engine


def measure_alone(engine: Any, result: dict[str, Any]) -> None:
    """When the engine closes, its last requests are made twice more."""
    close, complete, last = engine.close, engine.complete, list[Any]()

    def remembering(requests: Any, sampling: Any, **more: Any) -> Any:
        last[:] = requests, sampling
        return complete(requests, sampling, **more)

    def measure_and_close() -> None:
        if last:
            result["generate_alone_s"] = [generation_alone(complete, *last) for _ in range(2)]
            last.clear()  # closing twice is fine
        close()

    engine.complete, engine.close = remembering, measure_and_close


def generation_alone(complete: Callable[..., Any], requests: Sequence[Any], sampling: Any) -> float:
    """Seconds of the last step's requests without log-probs, weights in place and caches empty."""
    plain = [dataclasses.replace(one, logprobs=False) for one in requests]
    started = time.perf_counter()
    complete(plain, sampling, seed=0)
    return time.perf_counter() - started


def give_lengths(engine: Any, spec: dict[str, Any]) -> None:
    """From now on every rollout has its own number of tokens: one request a rollout, EOS ignored.

    The calls of `generate` are those of the steps, in order, with their prompts numbered as `Engine.generate` says.
    """
    steps = iter(spec["lengths"])
    if spec["smoke"] and not hasattr(engine, "complete"):  # the transformers engine: stand-ins for its tokens
        engine.generate = random_rollouts(engine, steps)
        return
    complete = engine.complete

    def by_row(requests: Any, sampling: Any, *, seed: int, done: Any = None) -> Any:
        of_step = next(steps)
        rows = [(place, i) for place, r in enumerate(requests) for i in range(r.n)]
        asked = [
            dataclasses.replace(
                requests[p],
                n=1,
                seed=requests[p].seed + i,
                ends=False,
                max_new_tokens=of_step[requests[p].number * GROUP + i],
            )
            for p, i in rows
        ]
        found: list[list[Any]] = [[] for _ in requests]
        for (place, _), (sample,) in zip(rows, complete(asked, sampling, seed=seed), strict=True):
            found[place].append(sample)
        for place, samples in enumerate(found):
            if done is not None:
                done(place, samples)
        return found

    engine.complete = by_row


def random_rollouts(engine: Any, steps: Any) -> Callable[..., Any]:
    """`Engine.generate` that gives random ids of the lengths of each step."""
    from posttrain.rollout.engine import Completion, as_rollouts

    def generate(prompts: Any, n: int, sampling: Any, *, first_group: int = 0, share: Any = None, **_: Any) -> Any:
        del sampling
        of_step = next(steps)
        numbers = range(len(prompts)) if share is None else share
        lengths = [of_step[p * n + i] for p in numbers for i in range(n)]
        found = [Completion(tuple(ids), (-1.0,) * len(ids), "length") for ids in random_ids(lengths)]
        return as_rollouts(
            prompts, n, found, engine.loaded.tokenizer, first_group=first_group, version=engine.version, share=share
        )

    return generate


def request(length: int, *, logprobs: bool) -> Any:
    """vLLM's sampling parameters of a rollout of exactly `length` tokens in TRL's side; ours asks for the same."""
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        temperature=1.0,
        max_tokens=length,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if logprobs else None,
        flat_logprobs=True,
    )


def random_ids(lengths: Sequence[int]) -> list[list[int]]:
    """Stand-ins for generated tokens in the smoke test: ids that every tokenizer here has."""
    draw = random.Random(0)
    return [[draw.randrange(20, 100) for _ in range(length)] for length in lengths]


def run_trl(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """GRPOTrainer with its own profiling contexts as the source of phases."""
    import os

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.extras.profiling import ProfilingContext

    current: dict[str, float] = {}
    steps: list[float] = []
    phases: list[dict[str, float]] = []
    tokens: list[int] = []
    logs: list[dict[str, float]] = []

    def note(self: Any, duration: float) -> None:
        name = self.name.removeprefix("GRPOTrainer.")
        current[name] = current.get(name, 0.0) + duration

    ProfilingContext._log_metrics = note

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronise()
            now = time.perf_counter()
            steps.append(now - self.last)
            self.last = now
            phases.append(dict(current))
            current.clear()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
            if logs and "loss" in logs:
                result.setdefault("logs", []).append({k: v for k, v in logs.items() if isinstance(v, int | float)})

    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    rows = [json.loads(line)["prompt"] for line in Path(spec["rows"]).read_text().splitlines()]
    prompts = [[{"role": "user", "content": q}] for q in rows]
    rendered = [
        tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=True, return_dict=False) for p in prompts
    ]
    longest = max(map(len, rendered)) + spec["new"]
    per_step = spec["prompts"]

    def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
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
        callbacks=[Clock()],
        rollout_func=trl_rollouts(spec, rendered) if spec["lengths"] else None,
    )
    trainer.train()
    logs = result.pop("logs", [])
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
        "reward": [one.get("reward") for one in logs],
        "grad_norm": [one.get("grad_norm") for one in logs],
        "gap": [one.get("sampling/sampling_logp_difference/mean") for one in logs],
    }


def trl_arguments(spec: dict[str, Any], longest: int) -> dict[str, Any]:
    settings, smoke = spec["trl"], spec["smoke"]
    rows = spec["prompts"] * GROUP
    values: dict[str, Any] = {
        "output_dir": spec["run"],
        "per_device_train_batch_size": settings["micro"],
        "gradient_accumulation_steps": rows // settings["micro"],
        "num_generations": GROUP,
        "max_completion_length": spec["new"],
        "temperature": 1.0,
        "loss_type": "grpo",
        "beta": 0.0,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "max_steps": spec["steps"],
        "shuffle_dataset": False,
        "gradient_checkpointing": settings["checkpointing"],
        "bf16": not smoke,
        "use_cpu": smoke,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
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


def synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
