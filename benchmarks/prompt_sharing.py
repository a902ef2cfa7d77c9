"""Forward and backward passes over rollouts of long prompts: padded rows, packed rows, and packed with each prompt
once.

    python benchmarks/prompt_sharing.py --out benchmarks/results/prompt_sharing_cpu.json

A random Llama; on a GPU in bfloat16, by the variable-length kernel. The ways alternate; times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import completion_scores

VOCABULARY = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("prompts", 2),
        ("group", 8),
        ("completion", 64),
        ("hidden", 256),
        ("layers", 4),
        ("runs", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prompt", type=int, nargs="+", default=[16, 64, 512], help="tokens; one measurement each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make(args.hidden, args.layers, device)
    found = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads",
        "torch": torch.__version__,
        "shape": {key: getattr(args, key) for key in ("prompts", "group", "completion", "hidden", "layers")},
        "by_prompt": {tokens: measured(model, rows(args, tokens), args.runs) for tokens in args.prompt},
    }
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def make(hidden: int, layers: int, device: torch.device) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(hidden // 256, 1), max_position_embeddings=8192,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model = model.to(device)
    if not use_packed_attention(model):
        raise SystemExit("rows cannot be packed")
    return model


def rows(args: argparse.Namespace, prompt: int) -> Sequences:
    draw = torch.Generator().manual_seed(prompt)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=draw).tolist()

    starts = [tokens(prompt) for _ in range(args.prompts)]
    ids = [(*start, *tokens(args.completion)) for start in starts for _ in range(args.group)]
    return Sequences(tuple(ids), (prompt,) * len(ids))


def measured(model: Any, batch: Sequences, runs: int) -> dict[str, Any]:
    """Return seconds of each way, and the differences of log-probs and gradients between shared and plain packing."""
    ways: dict[str, dict[str, Any]] = {
        "padded": {"packed": False},
        "packed": {"packed": True},
        "shared": {"packed": True, "share": True},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for _ in range(runs + 1):  # the first one fills caches
        for name, way in ways.items():
            seconds[name].append(timed(model, batch, way))
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            results[name] = logps(model, batch, way).detach(), gradient
    skipped = sum(batch.prompts.shared_token_counts(range(len(batch)))) if batch.prompts.is_worthwhile() else 0
    times = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    (logp, gradient), (own_logp, own_gradient) = results["packed"], results["shared"]
    return {
        "rows_tokens": sum(batch.lengths),
        "shared_tokens": skipped,
        "seconds": {name: round(value, 4) for name, value in times.items()},
        "shared_over_packed": round(times["shared"] / times["packed"], 3),
        "shared_over_padded": round(times["shared"] / times["padded"], 3),
        "logp_gap": float((logp - own_logp).abs().max()),
        "gradient_gap": float((gradient - own_gradient).norm() / gradient.norm()),
    }


def logps(model: Any, batch: Sequences, way: dict[str, Any]) -> torch.Tensor:
    width = max(n - p for n, p in zip(batch.lengths, batch.prompt_lengths, strict=True))
    device = next(model.parameters()).device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        found: torch.Tensor = completion_scores(model, batch, width, **way)["logp"]
    return found


def timed(model: Any, batch: Sequences, way: dict[str, Any]) -> float:
    model.zero_grad(set_to_none=True)
    wait()
    started = time.perf_counter()
    logps(model, batch, way).sum().backward()
    wait()
    return time.perf_counter() - started


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
