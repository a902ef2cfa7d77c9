"""What both sides of `rl_step.py` are given: models, prompts, lengths, the reward's name, one update's settings."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import folders

HERE = Path(__file__).resolve().parent
GROUP = 8
LR = 1e-6


def specification(args: argparse.Namespace, work: str, folder: Path, times: int = 1) -> dict[str, Any]:
    """What both workers read. Work B has the number of tokens of every rollout of every step.

    times: as many prompts.
    """
    prompts, new, steps = (4, 24, 3) if args.smoke else (64, 512, args.steps)
    prompts *= times
    if args.smoke:
        model = folders.tiny(folder / "model")
        if work == "B":
            shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
            model = folders.random_qwen2(folder / "qwen2", model, **shape)
    else:
        home = getattr(args, "models", None) or folder
        model = folders.smollm2(home / "model")
        model = folders.random_qwen2(home / "qwen2", model) if work == "B" else model
    rows = folder / f"rows-{prompts}.jsonl"
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
            "merge_adapter": getattr(args, "merge_adapter", False),
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
