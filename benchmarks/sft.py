"""SFT steps of posttrain against TRL's SFTTrainer: same token ids, same trained tokens, same optimiser.

    python benchmarks/sft.py --out benchmarks/results/sft_h100.json
    python benchmarks/sft.py --recompute benchmarks/results/sft_h100.json
    python benchmarks/sft.py --smoke                  # on a CPU with the tiny model

SmolLM2-135M-Instruct on rows of 60 to 1900 tokens (most of them short), 64 rows a step, loss on completions, float32
weights and AdamW, bfloat16 products. posttrain packs the rows of a micro-batch; TRL is tried with `packing` (best fit,
which it runs padding-free), with `padding_free` alone, and with padding, each with the largest micro-batch that fits;
its fastest by the token counts, the others are in `trl_tries`. Padded and padding-free TRL see the very rows of each
posttrain step, so their loss curves must agree (`largest gap of the loss`). Packed, TRL puts the same rows in lines of
2048 tokens in another order: there, only time by the token and the level of the loss can be compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import folders
import sides
import trainers

ROWS = 64  # an optimiser step
LR = 1e-5
WAYS = ("packing", "padding_free", "padded")
MICRO = (16, 8, 4)  # TRL's rows a forward pass, largest first


def main() -> None:
    trainers.run(
        __file__,
        doc=__doc__,
        work="sft",
        steps=12,
        ways=WAYS,
        micro=MICRO,
        enough=fits,
        setting=("steps", "rows_a_step"),
        specification=specification,
        workers={"posttrain": run_posttrain, "trl": run_trl},
        remarks=loss_gap,
    )


def fits(tries: list[dict[str, Any]]) -> bool:
    """The largest micro-batch that fits is enough; what ran out of memory is kept as well."""
    return not tries[-1].get("out_of_memory")


def specification(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rows, steps, longest = (8, 4, 200) if args.smoke else (ROWS, args.steps, 1900)
    model = (folders.tiny if args.smoke else folders.smollm2)(folder / "model")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made_rows(rows * steps, longest, characters=args.smoke)))
    return {
        "smoke": args.smoke,
        "model": str(model),
        "rows": str(path),
        "rows_a_step": rows,
        "steps": steps,
        "max_length": 2048,
        "largest_micro": rows,
    }


def made_rows(count: int, longest: int, *, characters: bool) -> list[dict[str, str]]:
    """Questions with answers of uneven length: log-normal around a tenth of the longest, as chat data is."""
    draw = random.Random("sft/rows")
    words = ("sum", "of", "two", "numbers", "is", "found", "by", "adding", "tens", "and", "ones", "then", "carrying")
    rows = []
    for number in range(count):
        length = min(int(draw.lognormvariate(0, 1) * longest / 10) + 8, longest // (6 if characters else 1) - 40)
        answer = " ".join(draw.choice(words) for _ in range(max(length, 4)))
        rows.append({"prompt": f"Question {number}: how does one add {draw.randrange(1000)}?", "completion": answer})
    return rows


def loss_gap(record: dict[str, Any]) -> list[str]:
    """How far the loss curves are apart, over all steps."""
    lines = []
    for one in record.get("trl_tries", []):
        if "loss" not in one or "loss" not in record["posttrain"]:
            continue
        pairs = list(zip(record["posttrain"]["loss"], one["loss"], strict=False))
        gap, means = max(abs(a - b) for a, b in pairs), [sides.mean([p[i] for p in pairs]) for i in (0, 1)]
        rate = 1 / sides.seconds_a_token(one)
        lines.append(
            f"trl {one['settings']['way']} at {one['settings']['micro']}: {rate:.0f} tokens/s; largest gap of the"
            f" loss {gap:.4f}, means {means[0]:.4f} and {means[1]:.4f}"
        )
    return lines


# One side, in its own process


def run_posttrain(spec: dict[str, Any], result: dict[str, Any]) -> None:
    from posttrain.recipe.load import load_dict
    from posttrain.run.directory import RunDirectory
    from posttrain.run.metrics import MetricsLog, read_metrics
    from posttrain.train import sft

    times: list[float] = []
    write = MetricsLog.write

    def timed(self: MetricsLog, step: int, values: Any) -> None:
        write(self, step, values)
        synchronise()
        times.append(time.perf_counter())

    MetricsLog.write = timed  # type: ignore[method-assign]
    recipe = {
        "stage": "sft",
        "model": {"path": spec["model"], "compile": spec["posttrain"]["compile"]},
        "data": {"source": spec["rows"], "shuffle": False, "max_length": spec["max_length"]},
        "batch": {"size": spec["rows_a_step"], "micro_size": spec["posttrain"]["micro"], "packing": True},
        "optim": {"lr": LR},
        "run": {"steps": spec["steps"]},
    }
    loaded = load_dict(recipe, base_dir=Path(spec["rows"]).parent, where="benchmark")
    with RunDirectory.open(Path(spec["run"]), name="sft", text="", resolved=loaded.resolved) as directory:
        sft.run(loaded.recipe, directory)
        rows = read_metrics(directory.path)
    counts = [row["num_tokens"] for row in rows]
    result |= {
        "step_s": [rows[0]["time/step"], *(b - a for a, b in itertools.pairwise(times))],
        "phases": {"update": [row["time/step"] for row in rows]},
        "tokens": [b - a for a, b in itertools.pairwise([0, *counts])],
        "loss": [row["loss"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
    }


def run_trl(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """SFTTrainer on token ids from our renderer, in our order."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from posttrain.data.prepare import prepare_examples
    from posttrain.recipe.sections import Data

    steps: list[float] = []
    losses: list[float] = []
    norms: list[float] = []
    tokens: list[int] = []

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
                losses.append(logs["loss"])
                norms.append(logs["grad_norm"])
                tokens.append(int(logs["num_tokens"]))

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    data = Data(source=spec["rows"], shuffle=False, max_length=spec["max_length"])
    examples = prepare_examples(data, tokenizer, Path(spec["rows"]).parent).items
    way, smoke = spec["trl"]["way"], spec["smoke"]
    size, micro = spec["rows_a_step"], spec["trl"]["micro"]
    lines = micro
    if way == "packing":  # lines of max_length tokens: as many as hold the rows of a step on average
        per_step = sum(len(e.ids) for e in examples) / spec["steps"]
        size = max(1, round(per_step / spec["max_length"]))
        lines = next(n for n in range(min(micro, size), 0, -1) if size % n == 0)
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    trainer = InOrder(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict(
            {
                "input_ids": [list(e.ids) for e in examples],
                "completion_mask": [[int(on) for on in e.trained] for e in examples],
            }
        ),
        args=SFTConfig(
            output_dir=spec["run"],
            per_device_train_batch_size=lines,
            gradient_accumulation_steps=size // lines,
            max_steps=spec["steps"],
            max_length=spec["max_length"] if way == "packing" else None,  # rows were cut when they were prepared
            packing=way == "packing",
            padding_free=way == "padding_free",
            completion_only_loss=True,
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
        "step_s": steps,
        "phases": {"update": steps},
        "tokens": [b - a for a, b in itertools.pairwise([0, *tokens])],
        "loss": losses,
        "grad_norm": norms,
    }


def synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
