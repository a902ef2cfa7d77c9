"""GRPO in one file: load, sample, reward, advantage, loss, update. About a minute on two CPU cores:

    python examples/grpo_minimal.py

The task is the quickstart's: add two three-digit numbers. Its demonstrations forget two carries out of three, so a
model that imitates them is right half of the time. A reward that checks the answer corrects that. Nothing is
downloaded.

`posttrain rl` adds to these steps: recipes, checkpoints, resuming, several GPUs, vLLM, rewards in worker processes,
filters, KL terms, metrics and samples. `posttrain/train/rl.py` is its loop.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

import posttrain as pt
from posttrain.advantage.group import group
from posttrain.batch import Prompt, Rollout, RolloutBatch
from posttrain.data.prepare import prepare_prompts
from posttrain.loss.aggregate import aggregate, totals
from posttrain.loss.clip import clip
from posttrain.models.load import LoadedModel, load
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Data, Model
from posttrain.rollout.hf import TransformersEngine
from posttrain.train.collate import Sequences, rollout_batch, sequences_of
from posttrain.train.logprobs import completion_logprobs
from posttrain.verify.math import grade

RECIPES = shipped_folder("recipes")  # the folder of quickstart_data.py
SAMPLING = Sampling(max_new_tokens=46)  # temperature 1
GROUP_SIZE = 8  # completions of each prompt
MINIBATCHES = 2  # optimiser updates a step
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def warm_up(folder: Path, steps: int) -> Path:
    """Train the tiny model on the demonstrations by a whole SFT stage; returns the folder of the result."""
    demonstrations = f"{RECIPES / 'quickstart_data.py'}:demonstrations"
    run = pt.sft(
        {
            "model": {"path": "tiny"},
            "data": {"source": demonstrations, "size": 32 * steps},
            "batch": {"size": 32},
            "optim": {"lr": 4e-3, "betas": [0.9, 0.95], "schedule": "cosine", "warmup_steps": min(20, steps)},
            "run": {"steps": steps},
        },
        folder,
    )
    assert run.model is not None
    return run.model


def load_prompts(loaded: LoadedModel, function: str, size: int) -> list[Prompt]:
    """Rows of quickstart_data.py, rendered with the model's chat template and tokenised."""
    section = Data(source=f"quickstart_data.py:{function}", size=size)
    return prepare_prompts(section, loaded.tokenizer, RECIPES).items


def score(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with their reward: 1 if the text in <answer> equals the row's answer, else 0."""
    rewards = [grade(r.text, r.prompt.row["answer"], extract=["answer_tag"])["reward"] for r in rollouts]
    return [replace(rollout, reward=reward) for rollout, reward in zip(rollouts, rewards, strict=True)]


def accuracy(engine: TransformersEngine, prompts: Sequence[Prompt]) -> float:
    """Share of right answers, one sample at temperature 1 for each prompt."""
    return mean(r.reward or 0.0 for r in score(engine.generate(prompts, 1, SAMPLING, seed=1, logprobs=False)))


def logprobs(loaded: LoadedModel, sequences: Sequences, width: int) -> Tensor:
    """Log-probs [N,T] of the completion tokens under the current weights, at the temperature of the sampling."""
    return completion_logprobs(loaded.model, sequences, width, SAMPLING.temperature)[0]


def update(loaded: LoadedModel, optimizer: torch.optim.Optimizer, batch: RolloutBatch, sequences: Sequences) -> float:
    """One optimiser update on N rows; returns the loss."""
    logp = logprobs(loaded, sequences, batch.mask.shape[1])
    values = clip(batch, logp, clip_low=CLIP_LOW, clip_high=CLIP_HIGH).values  # [N,T]
    loss = aggregate(values, batch.mask, "token_mean", totals(batch.mask))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def step(
    loaded: LoadedModel,
    engine: TransformersEngine,
    optimizer: torch.optim.Optimizer,
    prompts: Sequence[Prompt],
    number: int,
) -> dict[str, float]:
    """One step of GRPO on these prompts; returns its metrics."""
    # 1. Sample a group of completions for each prompt: tokens, and the log-probs at which they were sampled.
    rollouts = engine.generate(prompts, GROUP_SIZE, SAMPLING, seed=number)
    # 2. Reward: each completion by itself.
    rollouts = score(rollouts)
    # 3. Tensors: rewards [N], mask [N,T] of trained tokens, group_ids [N]; N = prompts * GROUP_SIZE.
    batch, sequences = rollout_batch(rollouts), sequences_of(rollouts)
    # 4. Advantage [N]: the reward minus the mean of its group. A group whose rewards are equal has advantage 0.
    batch = batch.replace(advantages=group(batch, scale="none"))
    # 5. The old policy's log-probs: the second update divides by them. The engine's would do, but for rounding.
    with torch.no_grad():
        batch = batch.replace(old_logp=logprobs(loaded, sequences, batch.mask.shape[1]))
    # 6. Updates on parts of the rows, in a random order.
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(number))
    losses = [
        update(loaded, optimizer, batch.select(rows), sequences.select(rows.tolist()))
        for rows in order.chunk(MINIBATCHES)
    ]
    assert batch.rewards is not None and batch.advantages is not None
    return {
        "reward": float(batch.rewards.mean()),
        "with signal": float((batch.advantages != 0).float().mean()),
        "loss": mean(losses),
    }


def train(loaded: LoadedModel, steps: int, prompts_per_step: int = 32, lr: float = 3e-4, tested: int = 500) -> float:
    """Run GRPO and print each step; returns what the accuracy on held-out problems has gained."""
    engine = TransformersEngine(loaded, batch_size=256)  # samples with the model that is trained: nothing to copy
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    problems = load_prompts(loaded, "problems", steps * prompts_per_step)
    held_out = load_prompts(loaded, "held_out", tested)
    before = accuracy(engine, held_out)
    print(f"accuracy before: {before:.3f}")
    for number in range(steps):
        prompts = problems[number * prompts_per_step : (number + 1) * prompts_per_step]
        for parameters in optimizer.param_groups:
            parameters["lr"] = lr * min(1.0, (number + 1) / 5)  # five steps of warm-up
        metrics = step(loaded, engine, optimizer, prompts, number)
        print(f"step {number + 1:3}  " + "  ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
    after = accuracy(engine, held_out)
    print(f"accuracy after: {after:.3f} (before: {before:.3f}), on {tested} problems that are in no training set")
    return after - before


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on the tiny model, in one file.")
    parser.add_argument("--model", type=Path, help="folder of a warmed-up model; default: train one first")
    parser.add_argument("--sft-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tested", type=int, default=500, help="held-out problems")
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or warm_up(Path(folder) / "sft", options.sft_steps)
        loaded = load(Model(path=str(path.resolve())), RECIPES, training=True)
        train(loaded, options.steps, tested=options.tested)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
