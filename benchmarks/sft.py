"""SFT steps of posttrain and TRL's SFTTrainer: same token ids, same trained tokens, same optimizer.

    python benchmarks/sft.py --out benchmarks/results/sft_h100.json
    python benchmarks/sft.py --recompute benchmarks/results/sft_h100.json
    python benchmarks/sft.py --smoke                  # on a CPU with the tiny model

SmolLM2-135M-Instruct on rows of 60 to 1900 tokens (most of them short), 64 rows a step, loss on completions, float32
weights and AdamW, bfloat16 products. posttrain packs the rows of a micro-batch; TRL is tried with `packing` (best fit,
which it runs padding-free), with `padding_free` alone, and with padding, each with the largest micro-batch that fits;
its fastest per token counts, the others are in `trl_tries`. Padded and padding-free TRL see the same rows in each step
as posttrain, so their loss curves must agree (`largest gap of the loss`). Packed, TRL puts the same rows in lines of
2048 tokens in another order: then only time per token and the level of the loss can be compared.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import trainers
import trl_side
from clocks import by_step

LR = 1e-5
WAYS = {"packing": False, "padding_free": True, "padded": True}
MICRO = (16, 8, 4)  # TRL's rows per forward pass, largest first


def main() -> None:
    workers = {"posttrain": run_posttrain, "trl": run_trl}
    trainers.run(__file__, __doc__, made_rows, workers, steps=12, ways=WAYS, micro=MICRO, enough=fits)


def fits(tries: list[dict[str, Any]]) -> bool:
    """Return whether a try fits: the largest micro-batch that fits is enough; tries that ran out of memory are kept as
    well."""
    return not tries[-1].get("out_of_memory")


def made_rows(count: int, smoke: bool) -> list[dict[str, str]]:
    """Return questions with answers of uneven length, log-normal around a tenth of the longest, as in chat data.

    Lengths are in words, about one token each; the tiny model of a smoke test has characters as tokens, six per word.
    """
    draw = random.Random("sft/rows")
    words = ("sum", "of", "two", "numbers", "is", "found", "by", "adding", "tens", "and", "ones", "then", "carrying")
    longest = 200 if smoke else 1900
    rows = []
    for number in range(count):
        length = min(int(draw.lognormvariate(0, 1) * longest / 10) + 8, longest // (6 if smoke else 1) - 40)
        answer = " ".join(draw.choice(words) for _ in range(max(length, 4)))
        rows.append({"prompt": f"Question {number}: how does one add {draw.randrange(1000)}?", "completion": answer})
    return rows


# One side, in a separate process


def run_posttrain(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """Run stage sft with packing."""
    recipe = trainers.recipe("sft", spec, LR)
    recipe["batch"]["packing"] = True
    trainers.run_recipe(recipe, spec, result, trainers.METRICS)


def run_trl(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """SFTTrainer on token ids from our renderer, in our order."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from posttrain.data.prepare import prepare_examples
    from posttrain.recipe.sections import Data

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return trl_side.in_order(self, train_dataset)

    steps: list[float] = []
    logged: list[dict[str, Any]] = []
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    data = Data(source=spec["rows"], shuffle=False, max_length=spec["max_length"])
    examples = prepare_examples(data, tokenizer, Path(spec["rows"]).parent).items
    way, rows, micro = spec["trl"]["way"], spec["rows_a_step"], spec["trl"]["micro"]
    if way == "packing":  # lines of max_length tokens: as many as hold the rows of a step on average
        per_step = sum(len(e.ids) for e in examples) / spec["steps"]
        rows = max(1, round(per_step / spec["max_length"]))
        micro = next(n for n in range(min(micro, rows), 0, -1) if rows % n == 0)
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict(
            {
                "input_ids": [list(e.ids) for e in examples],
                "completion_mask": [[int(on) for on in e.trained] for e in examples],
            }
        ),
        args=SFTConfig(
            **trl_side.arguments(spec, lr=LR, rows=rows, micro=micro),
            max_length=spec["max_length"] if way == "packing" else None,  # rows were truncated when they were prepared
            packing=way == "packing",
            padding_free=way == "padding_free",
            completion_only_loss=True,
        ),
        callbacks=[trl_side.clock(result, steps, logged)],
    )
    trainer.train()
    result |= {
        "step_s": steps,
        "phases": {"update": steps},
        "tokens": by_step([int(row["num_tokens"]) for row in logged]),
        **trainers.curves(logged, trainers.METRICS),
    }


if __name__ == "__main__":
    main()
