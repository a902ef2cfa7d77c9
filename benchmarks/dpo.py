"""DPO steps of posttrain against TRL's DPOTrainer: same token ids, same pairs a step, same optimiser.

    python benchmarks/dpo.py --out benchmarks/results/dpo_h100.json
    python benchmarks/dpo.py --recompute benchmarks/results/dpo_h100.json
    python benchmarks/dpo.py --smoke                  # on a CPU with the tiny model

SmolLM2-135M-Instruct on pairs with prompts of 40 to 500 tokens and sides of 20 to 1000 (most of them short), 64 pairs a
step, float32 weights and AdamW, bfloat16 products, beta 0.1. Both sides compute the reference's log-probs once before
the first step (its seconds stand below the table) and score completion tokens with TRL's fused head, so neither builds
logits. What differs is posttrain's forward pass: a micro-batch is one line without padding in which each prompt stands
once, for both sides, and micro-batches are balanced by tokens. TRL 1.16 pads (its `padding_free` is disabled in
DPOTrainer); it is tried as it comes and with `train_sampling_strategy: group_by_length`, from the largest micro-batch
that fits downwards as long as that is faster; its fastest by the token counts, all are in `trl_tries`. As it comes it
sees the very pairs of each posttrain step, so the loss curves must agree (`largest gap of the loss`); grouped by length
its steps hold other pairs, and only time by the token can be compared. Tokens are those of the rows without padding,
with the prompt in both sides.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import folders
import sides
import trainers

PAIRS = 64  # an optimiser step
LR = 5e-6
BETA = 0.1
WAYS = ("as_it_comes", "group_by_length")
MICRO = (16, 8, 4, 2)  # TRL's pairs a forward pass, largest first


def main() -> None:
    trainers.run(
        __file__,
        doc=__doc__,
        work="dpo",
        steps=10,
        ways=WAYS,
        micro=MICRO,
        enough=slower,
        setting=("steps", "pairs_a_step"),
        specification=specification,
        workers={"posttrain": run_posttrain, "trl": run_trl},
        remarks=remarks,
    )


def slower(tries: list[dict[str, Any]]) -> bool:
    """Smaller micro-batches are tried until that is slower; what ran out of memory is kept as well."""
    ran = [sides.seconds_a_token(one) for one in tries if "error" not in one]
    return len(ran) > 1 and ran[-1] > ran[-2]


def specification(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    pairs, steps = (8, 4) if args.smoke else (PAIRS, args.steps)
    model = (folders.tiny if args.smoke else folders.smollm2)(folder / "model")
    path = folder / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in made_pairs(pairs * steps, scale=0.1 if args.smoke else 1))
    )
    return {
        "smoke": args.smoke,
        "model": str(model),
        "pairs": str(path),
        "pairs_a_step": pairs,
        "steps": steps,
        "max_length": 2048,
        "largest_micro": pairs // 2 if args.smoke else pairs,
    }


def made_pairs(count: int, scale: float) -> list[dict[str, str]]:
    """Prompts and two answers of uneven length, log-normal as chat data is; the rejected one wanders off.

    Lengths in words, about a token each: prompts around 100, answers around 200, `scale` times that.
    """
    draw = random.Random("dpo/pairs")
    good = ("sum", "of", "two", "numbers", "is", "found", "by", "adding", "tens", "and", "ones", "then", "carrying")
    stray = ("well", "maybe", "who", "knows", "perhaps", "blue", "sky", "or", "not")

    def text(words: tuple[str, ...], middle: float, most: int) -> str:
        length = int(draw.lognormvariate(0, 0.8) * middle * scale)
        return " ".join(draw.choice(words) for _ in range(max(2, min(length, int(most * scale)))))

    return [
        {
            "prompt": f"Question {number}: {text(good, 100, 450)}, how does one add {draw.randrange(1000)}?",
            "chosen": text(good, 200, 1000),
            "rejected": text(good, 130, 800) + " " + text(stray, 70, 200),
        }
        for number in range(count)
    ]


def remarks(record: dict[str, Any]) -> list[str]:
    """How far the loss curves are apart, over all steps, and what the reference took."""
    ours = record["posttrain"]
    lines = []
    for one in record.get("trl_tries", []):
        if "loss" not in one or "loss" not in ours:
            continue
        pairs = list(zip(ours["loss"], one["loss"], strict=False))
        gap, means = max(abs(a - b) for a, b in pairs), [sides.mean([p[i] for p in pairs]) for i in (0, 1)]
        rate = 1 / sides.seconds_a_token(one)
        apart = f"largest gap of the loss {gap:.4f}, " if one["settings"]["way"] == "as_it_comes" else ""
        lines.append(
            f"trl {one['settings']['way']} at {one['settings']['micro']}: {rate:.0f} tokens/s, peak"
            f" {one['peak_gib']:.1f} GiB; {apart}mean loss {means[0]:.4f} and {means[1]:.4f}"
        )
    if "reference_s" in ours and "reference_s" in record.get("trl", {}):
        lines.append(f"reference pass, once: {ours['reference_s']:.2f} s and {record['trl']['reference_s']:.2f} s")
    return lines


# One side, in its own process


def run_posttrain(spec: dict[str, Any], result: dict[str, Any]) -> None:
    from posttrain.recipe.load import load_dict
    from posttrain.run.directory import RunDirectory
    from posttrain.run.metrics import MetricsLog, read_metrics
    from posttrain.train import preference

    times: list[float] = []
    write = MetricsLog.write

    def timed(self: MetricsLog, step: int, values: Any) -> None:
        write(self, step, values)
        synchronise()
        times.append(time.perf_counter())

    MetricsLog.write = timed  # type: ignore[method-assign]
    recipe = {
        "stage": "dpo",
        "model": {"path": spec["model"], "compile": spec["posttrain"]["compile"]},
        "data": {"source": spec["pairs"], "shuffle": False, "max_length": spec["max_length"]},
        "loss": {"use": "dpo", "beta": BETA},
        "batch": {"size": spec["pairs_a_step"], "micro_size": spec["posttrain"]["micro"]},
        "optim": {"lr": LR},
        "run": {"steps": spec["steps"]},
    }
    loaded = load_dict(recipe, base_dir=Path(spec["pairs"]).parent, where="benchmark")
    with (
        RunDirectory.open(Path(spec["run"]), name="dpo", text="", resolved=loaded.resolved) as directory,
        clocked(preference, "reference_logps", result),
    ):
        preference.run(loaded.recipe, directory)
        rows = read_metrics(directory.path)
    counts = [row["num_tokens"] for row in rows]
    result |= {
        "step_s": [rows[0]["time/step"], *(b - a for a, b in itertools.pairwise(times))],
        "phases": {"update": [row["time/step"] for row in rows]},
        "tokens": [b - a for a, b in itertools.pairwise([0, *counts])],
        "loss": [row["loss"] for row in rows],
        "margins": [row["rewards/margins"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
    }


def run_trl(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """DPOTrainer on token ids from our renderer, in our order."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    from posttrain.data.prepare import prepare_pairs
    from posttrain.recipe.sections import Data

    steps: list[float] = []
    logged: list[dict[str, float]] = []
    tokens: list[int] = []
    way, micro, smoke = spec["trl"]["way"], spec["trl"]["micro"], spec["smoke"]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronise()
            now = time.perf_counter()
            steps.append(now - self.last)
            self.last = now

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
            if logs and "loss" in logs:
                logged.append(logs)

    class Timed(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # tokenised by us

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            if way == "group_by_length":
                return super()._get_train_sampler(train_dataset)
            return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            counted[0] += int(inputs["attention_mask"].sum())
            return super()._compute_loss(model, inputs, return_outputs)

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            tokens.append(counted[0])
            super().log(logs, start_time)

    counted = [0]
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    data = Data(source=spec["pairs"], shuffle=False, max_length=spec["max_length"])
    pairs = prepare_pairs(data, tokenizer, Path(spec["pairs"]).parent).items
    columns: dict[str, list[Any]] = {
        name: [list(getattr(pair, name)) for pair in pairs] for name in ("prompt_ids", "chosen_ids", "rejected_ids")
    }
    columns["length"] = [len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs]
    attention = "flash_attention_2" if importlib.util.find_spec("flash_attn") and not smoke else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32, attn_implementation=attention)
    with clocked(DPOTrainer, "_precompute_ref_logps", result):
        trainer = Timed(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict(columns),
            args=DPOConfig(
                output_dir=spec["run"],
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=spec["pairs_a_step"] // micro,
                max_steps=spec["steps"],
                max_length=None,  # pairs were cut when they were prepared
                beta=BETA,
                precompute_ref_log_probs=True,
                train_sampling_strategy="group_by_length" if way == "group_by_length" else "random",
                length_column_name="length",
                remove_unused_columns=False,
                disable_dropout=False,
                learning_rate=LR,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                weight_decay=0.0,
                gradient_checkpointing=False,
                bf16=not smoke,
                use_cpu=smoke,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            callbacks=[Clock()],
        )
    trainer.train()
    result |= {
        "attention": attention,
        "step_s": steps,
        "phases": {"update": steps},
        "tokens": [b - a for a, b in itertools.pairwise([0, *tokens[: len(logged)]])],
        "loss": [row["loss"] for row in logged],
        "margins": [row["rewards/margins"] for row in logged],
        "grad_norm": [row["grad_norm"] for row in logged],
    }


@contextmanager
def clocked(owner: Any, name: str, result: dict[str, Any]) -> Iterator[None]:
    """The seconds of one function of a module or class, as `reference_s`."""
    original = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = original(*args, **kwargs)
        synchronise()
        result["reference_s"] = time.perf_counter() - started
        return found

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, original)


def synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
