"""Inputs of both sides of `rl_step.py`: models, prompts, lengths, the reward's name, settings of an update."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import folders
import vision

HERE = Path(__file__).resolve().parent
GROUP = 8
LR = 1e-6
# a smoke test's model; vLLM on a CPU needs heads of at least 32 dimensions
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


@dataclass(frozen=True)
class Work:
    """Size of a benchmark's step. left_out: number of first steps that are excluded, of `steps`."""

    prompts: int
    new: int  # maximum tokens of a completion
    steps: int
    left_out: int
    share: float  # default of posttrain's vllm.gpu_memory
    lora: bool = False  # whatever --lora says
    # For works with seeded lengths: the shortest and the most frequent length, as fractions of `new`. Such a work
    # has 1.39B random weights. None: SmolLM2, which ends by EOS.
    lengths: tuple[float, float] | None = None
    picture: int | None = (
        None  # width and height of each prompt's image; the model is then a vision model (`vision.py`)
    )


WORKS = {
    "A": Work(64, 512, steps=5, left_out=2, share=0.15),
    "B": Work(64, 512, steps=5, left_out=2, share=0.3, lengths=(1 / 16, 1 / 3)),  # as in a young run
    "L": Work(32, 3500, steps=3, left_out=1, share=0.2, lora=True, lengths=(0.8, 1.0)),  # as in a long-trained one
    "V": Work(32, 512, steps=4, left_out=1, share=0.3, lengths=(1 / 16, 1 / 3), picture=448),
}


def specification(args: argparse.Namespace, work: str, folder: Path, times: int = 1) -> dict[str, Any]:
    """Return what both workers read. Works B and L have the number of tokens of every rollout of every step.

    times: multiple of the number of prompts.
    """
    size = WORKS[work]
    if args.smoke:
        size = dataclasses.replace(size, prompts=4, new=24, steps=3, picture=64 if size.picture else None)
    prompts, new = size.prompts * times, size.new
    steps = size.steps if args.smoke else args.steps or size.steps
    model = model_folder(size, folder if args.smoke else getattr(args, "models", None) or folder, smoke=args.smoke)
    rows = folder / f"rows-{prompts}.jsonl"
    asked = vision.rows(folder, prompts * steps, size.picture) if size.picture else questions(prompts * steps)
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
    lengths = seeded_lengths(steps, prompts * GROUP, new, *size.lengths) if size.lengths else None
    return {
        "work": work,
        "lora": args.lora or size.lora,
        "smoke": args.smoke,
        "model": str(model),
        "parameters": folders.parameters(model),
        "rows": str(rows),
        "prompts": prompts,
        "new": new,
        "steps": steps,
        "left_out": size.left_out,
        "lengths": lengths,
        "picture": size.picture,
        "vllm": not args.smoke or (vision.vllm_sees() if size.picture else find_spec("vllm") is not None),
        "alone": getattr(args, "alone", 0),
        "correction": args.correction,
        "posttrain": {
            "micro_tokens": args.micro_tokens,
            "share": args.share or size.share,
            "engines": getattr(args, "engines", 1),
            "sleep": args.sleep,
            "checkpointing": args.checkpointing,
            "compile": getattr(args, "compile", False),
            "merge_adapter": getattr(args, "merge_adapter", False),
            "dtype": getattr(args, "dtype", "bfloat16"),
        },
    }


def model_folder(size: Work, home: Path, *, smoke: bool) -> Path:
    """Return the model folder of a work, built if it does not exist."""
    if size.picture:
        return vision.qwen2_5_vl(home / "seeing", smoke=smoke)
    base = folders.tiny(home / "model") if smoke else folders.smollm2(home / "model")
    if size.lengths is None:
        return base
    return folders.random_qwen2(home / "qwen2", base, **(SMALL if smoke else {}))


def setting(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the specification that is stored in the record."""
    return {name: spec[name] for name in ("parameters", "prompts", "new", "steps", "left_out", "correction")} | {
        "group": GROUP
    }


def questions(count: int) -> list[dict[str, str]]:
    draw = random.Random("rl_step/questions")
    numbers = ([draw.randrange(10, 1000) for _ in range(3)] for _ in range(count))
    return [{"prompt": f"{a} + {b} - {c} = ? Explain each step."} for a, b, c in numbers]


def seeded_lengths(steps: int, rows: int, longest: int, shortest: float, frequent: float) -> list[list[int]]:
    """Return completion lengths by step and row. shortest, frequent: as fractions of the longest."""
    draw = random.Random("rl_step/lengths")
    low, mode = int(shortest * longest), int(frequent * longest)
    return [[int(draw.triangular(low, longest, mode)) for _ in range(rows)] for _ in range(steps)]


def request(length: int, *, logprobs: bool, forbidden: Sequence[int] = ()) -> Any:
    """Return vLLM's sampling parameters of a rollout of exactly `length` tokens in TRL's side; posttrain's side
    requests the same.

    forbidden: tokens that are not sampled.
    """
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        temperature=1.0,
        max_tokens=length,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if logprobs else None,
        flat_logprobs=True,
        logit_bias=dict.fromkeys(forbidden, -100.0) or None,
    )


def random_ids(lengths: Sequence[int]) -> list[list[int]]:
    """Stand-ins for generated tokens in the smoke test: ids that every tokenizer here has."""
    draw = random.Random(0)
    return [[draw.randrange(20, 100) for _ in range(length)] for length in lengths]
