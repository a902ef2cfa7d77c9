"""The merge stage: check the inputs, write into a temporary folder, verify, rename. Holds a few tensors at a time."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from posttrain.errors import Interrupted, MergeError, counted
from posttrain.merge import combine_adapters, probe
from posttrain.merge.compatibility import compare, refuse, table
from posttrain.merge.plan import Plan, make_plan
from posttrain.merge.stream import Changes, Tally, check_written, write_merged
from posttrain.recipe.merge_sections import Filtered
from posttrain.recipe.merging import ARGUMENTS
from posttrain.recipe.stages import MergeRecipe
from posttrain.run.checkpoints import require_space
from posttrain.run.directory import RunDirectory
from posttrain.run.durable import explain_write_errors, put_in_place, syncing, write_json
from posttrain.run.interrupt import GracefulStop
from posttrain.run.progress import Progress

REPORT = "merge_report.json"
LOG_WIDTH = 160  # of the table where there is no terminal to fit it into
# Everything beside weights and config that makes a model usable; taken from the tokenizer's source.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)


def run(recipe: MergeRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Merge into `directory.final` and return the summary, which is also `final/merge_report.json`.

    Nothing is written before the models are known to fit together. `final` appears only after the result was read back,
    loaded by transformers and gave finite logits (for which the merged model is in memory once). Raises MergeError.
    """
    if recipe.merge_method == "lora_combine":
        return combine_adapters.run(recipe, directory, companions)
    started = time.perf_counter()
    scratch, partial = directory.path / "inputs", directory.path / "final.tmp"
    for leftover in (scratch, partial):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        plan = make_plan(recipe, scratch)
        check(plan, directory)
        ids = probe.ids(plan.tokenizer, plan.anchor)
        before = probe.logits(plan.anchor.folder, ids)  # what cannot be tried is refused before the work
        with explain_write_errors(partial):
            partial.mkdir(parents=True)
            with syncing() as sync:  # the disk works while the result is verified
                tally = _write(plan, partial, directory, sync)
                changes = check_written(plan, partial, tally)
                gaps = probe.gap(before, probe.logits(partial, ids))
            summary = _summary(plan, tally, changes, gaps, time.perf_counter() - started, directory.final)
            write_json(partial / REPORT, summary)
        put_in_place(partial, directory.final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)
    _tell(summary)
    return summary


def check(plan: Plan, directory: RunDirectory) -> None:
    """Print the compatibility table and the warnings; refuse what cannot be merged, overwritten or stored."""
    checks = compare(plan.sources)
    _print_table(table(checks, plan.sources))
    for warning in [*(c.warning for c in checks if c.warning), *plan.warnings]:
        print(f"warning: {warning}", file=sys.stderr)
    refuse(checks, plan.sources)
    final = directory.final.resolve()
    for source in plan.sources:
        if source.origin is not None and (final == source.origin or final in source.origin.parents):
            raise MergeError(f"the output {final} is, or holds, the input {source.name}", hint="give another --output")
    require_space(directory.path, plan.nbytes)


def _write(plan: Plan, folder: Path, directory: RunDirectory, sync: Callable[[Path], None]) -> Tally:
    """Config and tokenizer files, then the tensors with a progress line."""
    _write_config(plan, folder)
    for file in companions(plan.tokenizer.folder):
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        else:
            shutil.copy2(file, folder / file.name)
    written = 0
    with GracefulStop() as stop, Progress("merge", len(plan.out), ("written/megabytes",)) as progress:

        def before_each(number: int, name: str) -> None:
            nonlocal written
            if stop.requested:
                raise Interrupted(
                    f"stopped before tensor {number} of {len(plan.out)}; the inputs are untouched",
                    where=str(directory.path),
                    hint="the same command with --resume starts the merge anew",
                    number=stop.number,
                )
            written += plan.out[name].nbytes
            progress.update(number, {"written/megabytes": written / 1e6})

        return write_merged(plan, folder, before_each, sync)


def companions(folder: Path) -> list[Path]:
    """Tokenizer, chat template and generation config of a model folder."""
    return sorted({path for pattern in _COMPANIONS for path in folder.glob(pattern)})


def _write_config(plan: Plan, folder: Path) -> None:
    """The anchor's config with the dtype that is written."""
    config = {key: value for key, value in plan.anchor.config.items() if key not in ("torch_dtype", "dtype")}
    floats = [spec.dtype for spec in plan.out.values() if spec.dtype.is_floating_point]
    if floats:
        config["dtype"] = str(max(set(floats), key=floats.count)).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _summary(
    plan: Plan, tally: Tally, changes: Changes, gaps: dict[str, float | None], seconds: float, final: Path
) -> dict[str, Any]:
    return {
        "model": str(final),
        "merge_method": plan.method,
        "parameters": plain({**_defaults(plan), **plan.arguments.common}),
        "base_model": None if plan.base is None else _described(plan.base.name, plan.base.folder),
        "models": [
            {**_described(source.name, source.folder), **plain({"weight": 1.0, **own}), "delta_norm": norm}
            for source, own, norm in zip(plan.models, plan.arguments.own, tally.norms, strict=True)
        ],
        "compared_with": plan.anchor.name,
        "tokenizer_source": plan.tokenizer.name,
        "tensors": len(plan.out),
        "changed": len(changes.changed),
        "unchanged": sorted(plan.out.keys() - set(changes.changed)),
        "rounded_away": changes.rounded_away,
        "bytes": plan.nbytes,
        "probe": gaps,
        "warnings": plan.warnings,
        "seconds": round(seconds, 2),
    }


def _defaults(plan: Plan) -> dict[str, Any]:
    return {key: default for key, (_, default) in plan.rule.params.items()}


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON, under the recipe's keys."""
    names = {argument: key.strip("_") for key, argument in ARGUMENTS.items()}
    return {
        names.get(key, key): [entry.model_dump() if isinstance(entry, Filtered) else entry for entry in value]
        if isinstance(value, list)
        else value
        for key, value in settings.items()
    }


def _described(name: str, folder: Path) -> dict[str, str]:
    return {"model": name, "folder": str(folder)}


def _tell(summary: dict[str, Any]) -> None:
    gap = summary["probe"]["logit_gap"]
    told = "" if gap is None else f", largest logit gap on the probe {gap:.3g}"
    print(
        f"merged {counted(len(summary['models']), 'model')} into {summary['model']}: {summary['changed']} of "
        f"{counted(summary['tensors'], 'tensor')} differ from {summary['compared_with']}{told}",
        file=sys.stderr,
    )
    if summary["rounded_away"]:
        why = "too small for the output dtype, or nothing of them is kept"
        print(f"warning: differences do not show ({why}) in {summary['rounded_away']}", file=sys.stderr)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    console = Console(stderr=True, markup=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    shown = Table(*(Column(heading, overflow="fold") for heading in rows[0]), box=None, pad_edge=False)
    for row in rows[1:]:
        shown.add_row(*row)
    console.print(shown)
