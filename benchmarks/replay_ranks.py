"""Five updates on one saved rollout batch by 1, 2 and 4 GPUs: losses and gradient norms must be equal.

    python benchmarks/replay_ranks.py --lora --out benchmarks/results/replay_lora.json
    python benchmarks/replay_ranks.py --out benchmarks/results/replay_full.json
    python benchmarks/replay_ranks.py --shard --ranks 1 2 --out benchmarks/results/replay_shard.json
    python benchmarks/replay_ranks.py --smoke             # tiny, on a CPU

The model is that of work B (`rl_step.py`), the batch rollouts of seeded tokens and lengths with the reward of the
benchmark, the objective GRPO with a mean over tokens and a KL term. With --shard, two and more ranks shard the weights.
If there are more ranks than GPUs, ranks share GPUs and communicate over gloo, because NCCL needs a GPU per rank. Exit
code 1 if a value differs by more than --tolerance from the first run's (gradient norms, losses), or if all losses
are 0.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import folders
import sides
from clocks import replaced
from even import even_share
from rl_work import GROUP, seeded_lengths

from posttrain.run import ranks

if TYPE_CHECKING:  # torch is imported once a process has its GPU
    from posttrain.batch import Rollout, RolloutBatch
    from posttrain.train.collate import Sequences
    from posttrain.train.context import TrainContext

UPDATES = 5


def main() -> None:
    args = arguments()
    if args.worker:
        replay(json.loads(args.worker.read_text()))
        return
    counts = args.ranks or ([1, 2] if args.smoke else [1, 2, 4])
    lib = None if args.smoke else sides.nvml()
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        spec = specification(args, Path(scratch))
        record: dict[str, Any] = {
            "lora": args.lora,
            "shard": args.shard,
            **sides.environment(lib),
            "tolerance": args.tolerance,
        }
        gpus = sides.visible_gpus(lib)
        record |= {"gpus": len(gpus), "ranks": {}}
        for count in counts:
            record["ranks"][str(count)] = found = measured(spec, count, gpus, Path(scratch))
            record["largest_gap"] = largest_gap(record["ranks"])
            print(f"{count} ranks  " + "  ".join(f"{name} {numbers(of)}" for name, of in found.items()), flush=True)
            sides.write(record, args.out)  # after each: results are kept if the next one is killed
    print(f"largest gap {record['largest_gap']:.2e} of the value, {args.tolerance:.0e} allowed")
    flat = not any(record["ranks"][str(counts[0])]["loss"])
    sys.exit(flat or not record["largest_gap"] <= args.tolerance)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", help="numbers of processes (default: 1 2 4)")
    parser.add_argument("--lora", action="store_true", help="train a rank-16 adapter on all linear layers")
    parser.add_argument("--shard", action="store_true", help="model.shard where there are several ranks")
    parser.add_argument("--micro-tokens", type=int, default=8192, help="batch.micro_tokens")
    parser.add_argument("--prompts", type=int, default=16, help="of 8 rollouts each")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="model.dtype")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--models", type=Path, help="keep the models here, for the next run on this machine")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU: does the script run?")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def specification(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what every worker reads; the rollouts are in a separate file."""
    home = args.models or folder
    model = folders.tiny(folder / "model") if args.smoke else folders.smollm2(home / "model")
    if not args.smoke:
        model = folders.random_qwen2(home / "qwen2", model)
    prompts, new = (5, 24) if args.smoke else (args.prompts, 512)
    rollouts = folder / "rollouts.json"
    rollouts.write_text(json.dumps(made_up(prompts, new)))
    recipe = {
        "stage": "rl",
        "algorithm": "grpo",
        "model": {"path": str(model), "dtype": args.dtype, **({"lora": {}} if args.lora else {})},
        "data": {"source": "none"},
        "rewards": [{"use": "even.py:even_share"}],
        "rollout": {"prompts_per_step": prompts, "group_size": GROUP, "max_new_tokens": new},
        "loss": {"aggregation": "token_mean"},  # of advantages with mean 0 by row, which leaves a loss to compare
        "kl": {"coef": 0.01},
        "batch": {"epochs": UPDATES, "micro_tokens": args.micro_tokens},
        "optim": {"lr": args.lr},
        "run": {"steps": 1},
    }
    return {"recipe": recipe, "shard": args.shard, "rollouts": str(rollouts), "folder": str(folder)}


def made_up(prompts: int, new: int) -> list[dict[str, Any]]:
    """Return prompts and completions of seeded token ids that every tokenizer here has."""
    draw = random.Random("replay/rollouts")
    (lengths,) = seeded_lengths(1, prompts * GROUP, new, 1 / 16, 1 / 3)
    rows = []
    for group in range(prompts):
        prompt = [draw.randrange(20, 100) for _ in range(draw.randrange(8, 40))]
        for length in lengths[group * GROUP : (group + 1) * GROUP]:
            rows.append({"group": group, "prompt": prompt, "ids": [draw.randrange(20, 100) for _ in range(length)]})
    return rows


def measured(spec: dict[str, Any], count: int, gpus: list[str], folder: Path) -> dict[str, list[float]]:
    """Return losses and gradient norms with `count` processes on those GPUs."""
    out = folder / f"ranks-{count}.json"
    path = folder / f"spec-{count}.json"
    sharing = 0 < len(gpus) < count
    path.write_text(json.dumps({**spec, "out": str(out), "sharing": sharing}))
    if sharing:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank % len(gpus)] for rank in range(count))
    code = ranks.launch([sys.executable, __file__, "--worker", str(path)], count)
    if code:
        sys.exit(code)
    return json.loads(out.read_text())


def largest_gap(found: dict[str, dict[str, list[float]]]) -> float:
    """Return the largest relative difference from the first run."""
    first, *others = found.values()
    gaps = [
        abs(a - b) / max(abs(a), 1e-12)
        for other in others
        for name in first
        for a, b in zip(first[name], other[name], strict=True)
    ]
    return max(gaps, default=0.0)


def numbers(values: list[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values)


# In each process


def replay(spec: dict[str, Any]) -> None:
    """Run five updates on the saved rollouts; rank 0 writes their losses and gradient norms."""
    ranks.claim_gpu()
    ranks.end_with_launcher()
    import torch.distributed as dist

    from posttrain.train import distributed

    over_gloo = functools.partial(dist.init_process_group, "gloo")
    join = (lambda _, **more: over_gloo(**more)) if spec["sharing"] else dist.init_process_group
    with replaced(dist, "init_process_group", join), distributed.join_process_group():
        found = updates(spec)
        if distributed.is_main():
            Path(spec["out"]).write_text(json.dumps(found))


def updates(spec: dict[str, Any]) -> dict[str, list[float]]:
    import torch

    from posttrain.train.own_rows import assign_rows
    from posttrain.train.policy import compute_logprobs
    from posttrain.train.update import UpdateStats, update_once

    p, batch, sequences = pieces(spec)
    p.loaded.model.train()
    batch = p.objective.compute_advantages(batch)
    rows = list(range(len(batch)))
    lengths = (batch.mask.sum(1) + 1).tolist()
    rows_of = assign_rows(p, batch, lengths, [rows])
    own, sequences = rows_of.select_batch(batch), rows_of.select_sequences(sequences)
    own = compute_logprobs(p, own, sequences, range(len(own)), p.objective.needs | {"old_logp"})
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for _ in range(UPDATES):
        stats = UpdateStats(torch.zeros(own.mask.shape, device=own.mask.device))
        update_once(p, own, sequences, rows, 0, stats, rows_of)
        found["loss"].append(stats.sums["loss"])
        found["grad_norm"] += stats.norms
    return found


def pieces(spec: dict[str, Any]) -> tuple[TrainContext, RolloutBatch, Sequences]:
    """Return the inputs of an update, the scored batch, and its tokens."""
    from posttrain.recipe.load import load_dict
    from posttrain.recipe.stages import RlRecipe
    from posttrain.run.watchdog import Watchdog
    from posttrain.train import data_parallel, optim, sharding
    from posttrain.train.attention import use_packed_attention
    from posttrain.train.collate import rollout_batch, sequences_of
    from posttrain.train.context import TrainContext
    from posttrain.train.controls import Controls
    from posttrain.train.objective import Objective
    from posttrain.train.ranks import ranks_of_run
    from posttrain.train.reference import load_reference

    values = spec["recipe"]
    values["model"]["shard"] = spec["shard"] and ranks.world() > 1
    recipe = load_dict(values, base_dir=Path(__file__).parent, where="benchmark").require(RlRecipe)
    loaded = sharding.load(recipe.model, recipe.base_dir, seed=recipe.run.seed)
    data_parallel.broadcast_weights(loaded.model)
    rollouts = scored(json.loads(Path(spec["rollouts"]).read_text()))
    nobody = cast(Any, None)  # nothing is sampled
    p = TrainContext(
        recipe=recipe,
        loaded=loaded,
        engine=nobody,
        scorer=nobody,
        order=nobody,
        sampler=nobody,
        values=None,
        prompts=[],
        objective=Objective.from_recipe(recipe),
        controls=Controls.from_recipe(recipe),
        optimizer=optim.build(loaded.model, recipe.optim),
        scaler=optim.loss_scaler(loaded),
        steps=1,
        reference=load_reference(recipe, loaded),
        critic=None,
        opponent=None,
        packed=loaded.device.type == "cuda" and use_packed_attention(loaded.model),
        ranks=ranks_of_run(divided=loaded.is_sharded),
        watchdog=Watchdog(Path(spec["folder"]), None),
        dump=Path(spec["folder"]),
    )
    return p, rollout_batch(rollouts).to(loaded.device), sequences_of(rollouts)


def scored(rows: list[dict[str, Any]]) -> list[Rollout]:
    from posttrain.batch import Prompt, Rollout, Segment

    prompts: dict[int, Prompt] = {}
    rollouts = []
    for row in rows:
        prompt = prompts.setdefault(row["group"], Prompt(str(row["group"]), {}, "", tuple(row["prompt"])))
        reward = even_share("", row["ids"])
        segment = Segment("model", tuple(row["ids"]), None)
        one = Rollout(prompt, row["group"], (segment,), "", "length", 0, {"even_share": reward}, reward, reward == 1.0)
        rollouts.append(one)
    return rollouts


if __name__ == "__main__":
    main()
