"""DPO steps of posttrain and TRL's DPOTrainer: same token ids, same pairs per step, same optimizer.

    python benchmarks/dpo.py --out benchmarks/results/dpo_h100.json
    python benchmarks/dpo.py --recompute benchmarks/results/dpo_h100.json
    python benchmarks/dpo.py --smoke                  # on a CPU with the tiny model

SmolLM2-135M-Instruct on pairs with prompts of 40 to 500 tokens and sides of 20 to 1000 (most of them short), 64 pairs a
step, float32 weights and AdamW, bfloat16 products, beta 0.1. Both sides compute the reference's log-probs once before
the first step (its seconds are printed below the table) and score completion tokens with TRL's fused head, so neither
builds logits. posttrain's forward pass differs: a micro-batch is one line without padding that contains each prompt
once, shared by both sides, and micro-batches are balanced by tokens. TRL 1.16 pads (its `padding_free` is disabled in
DPOTrainer); it is tried with default settings and with `train_sampling_strategy: group_by_length`, with decreasing
micro-batches from the largest that fits as long as they are faster; its fastest setting per token counts, all are in
`trl_tries`. With default settings it sees the same pairs in each step as posttrain, so the loss curves must agree
(`largest gap of the loss`); grouped by length its steps have other pairs, and only time per token can be compared.
Tokens are counted without padding, with the prompt in both sides.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import sides
import trainers
import trl_side
from clocks import by_step, clocked

LR = 5e-6
BETA = 0.1
WAYS = {"as_it_comes": True, "group_by_length": False}
MICRO = (16, 8, 4, 2)  # TRL's pairs per forward pass, largest first
METRICS = {**trainers.METRICS, "margins": "rewards/margins"}


def main() -> None:
    workers = {"posttrain": run_posttrain, "trl": run_trl}
    trainers.run(__file__, __doc__, made_pairs, workers, steps=10, ways=WAYS, micro=MICRO, enough=slower)


def slower(tries: list[dict[str, Any]]) -> bool:
    """Return whether smaller micro-batches have become slower; tries that ran out of memory are kept as well."""
    ran = [sides.seconds_a_token(one) for one in tries if "error" not in one]
    return len(ran) > 1 and ran[-1] > ran[-2]


def made_pairs(count: int, smoke: bool) -> list[dict[str, str]]:
    """Return prompts and two answers of uneven, log-normal length, as in chat data; the rejected answer drifts.

    Lengths are in words, about one token each: prompts around 100, answers around 200; a tenth of that for a smoke
    test.
    """
    draw = random.Random("dpo/pairs")
    scale = 0.1 if smoke else 1
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


# One side, in a separate process


def run_posttrain(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """Run stage dpo."""
    from posttrain.train import preference

    recipe = {**trainers.recipe("dpo", spec, LR), "loss": {"use": "dpo", "beta": BETA}}
    with clocked(preference, "reference_logps", result, "reference_s"):
        trainers.run_recipe(recipe, spec, result, METRICS)


def run_trl(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """DPOTrainer on token ids from our renderer, in our order."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from posttrain.data.prepare import prepare_pairs
    from posttrain.recipe.sections import Data

    steps: list[float] = []
    logged: list[dict[str, Any]] = []
    tokens: list[int] = []
    counted = [0]
    by_length = spec["trl"]["way"] == "group_by_length"

    class Counting(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # tokenised by us

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return super()._get_train_sampler(train_dataset) if by_length else trl_side.in_order(self, train_dataset)

        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            counted[0] += int(inputs["attention_mask"].sum())
            return super()._compute_loss(model, inputs, return_outputs)

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            tokens.append(counted[0])
            super().log(logs, start_time)

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    data = Data(source=spec["rows"], shuffle=False, max_length=spec["max_length"])
    pairs = prepare_pairs(data, tokenizer, Path(spec["rows"]).parent).items
    columns: dict[str, list[Any]] = {
        name: [list(getattr(pair, name)) for pair in pairs] for name in ("prompt_ids", "chosen_ids", "rejected_ids")
    }
    columns["length"] = [len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids)) for p in pairs]
    flash = importlib.util.find_spec("flash_attn") and not spec["smoke"]
    result["attention"] = "flash_attention_2" if flash else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        spec["model"], dtype=torch.float32, attn_implementation=result["attention"]
    )
    with clocked(DPOTrainer, "_precompute_ref_logps", result, "reference_s"):
        trainer = Counting(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict(columns),
            args=DPOConfig(
                **trl_side.arguments(spec, lr=LR, rows=spec["rows_a_step"], micro=spec["trl"]["micro"]),
                max_length=None,  # pairs were truncated when they were prepared
                beta=BETA,
                precompute_ref_log_probs=True,
                train_sampling_strategy="group_by_length" if by_length else "random",
                length_column_name="length",
                remove_unused_columns=False,
                disable_dropout=False,
            ),
            callbacks=[trl_side.clock(result, steps, logged)],
        )
    trainer.train()
    result |= {
        "step_s": steps,
        "phases": {"update": steps},
        "tokens": by_step(tokens[: len(logged)]),
        **trainers.curves(logged, METRICS),
    }


if __name__ == "__main__":
    main()
