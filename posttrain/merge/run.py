"""Merge stage: checks the inputs, writes into a temporary folder, verifies, renames. Holds a few tensors at a time."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from posttrain import terminal
from posttrain.errors import Interrupted, MergeError, count_noun
from posttrain.merge import combine_adapters, probe
from posttrain.merge.compatibility import compare, raise_problems, table_rows
from posttrain.merge.plan import Plan, Slice, make_plan
from posttrain.merge.sources import Source
from posttrain.merge.stream import Changes, MergeStats, check_written, write_merged
from posttrain.models.vision import find_part
from posttrain.recipe.merge_sections import Filtered
from posttrain.recipe.merging import ARGUMENTS, UNWEIGHTED
from posttrain.recipe.stages import MergeRecipe
from posttrain.run.atomic_io import explain_write_errors, put_in_place, sync_files, write_json
from posttrain.run.checkpoints import require_space
from posttrain.run.directory import RunDirectory
from posttrain.run.interrupt import GracefulStop
from posttrain.run.progress import Progress

REPORT = "merge_report.json"
LOG_WIDTH = 160  # of the table if the output is not a terminal
# Files besides weights and config that make a model usable; copied from the tokenizer's source.
_COMPANION_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",  # for images
)


def run(recipe: MergeRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Merge into `directory.final` and return the summary, which is also `final/merge_report.json`.

    Nothing is written before the models are known to be compatible. `final` appears only after the result was read
    back, loaded by transformers and gave finite logits (for which the whole merged model is in memory). Raises
    MergeError.
    """
    if recipe.merge_method == "lora_combine":
        return combine_adapters.run(recipe, directory, companion_files)
    started = time.perf_counter()
    scratch, partial = directory.path / "inputs", directory.path / "final.tmp"
    for leftover in (scratch, partial):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        plan = make_plan(recipe, scratch)
        check(plan, directory)
        ids = probe.probe_ids(plan.tokenizer, plan.anchor)
        before = probe.compute_logits(plan.anchor.folder, ids)  # fail before the merge if the model cannot be run
        with explain_write_errors(partial):
            partial.mkdir(parents=True)
            with sync_files() as sync:  # flush to disk while the result is verified
                stats = _write_model(plan, partial, directory, sync)
                changes = check_written(plan, partial, stats)
                gaps = probe.compare_logits(before, probe.compute_logits(partial, ids))
            summary = _build_report(
                plan, recipe.base_model, stats, changes, gaps, time.perf_counter() - started, directory.final
            )
            write_json(partial / REPORT, summary)
        put_in_place(partial, directory.final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)
    _print_summary(summary)
    return summary


def check(plan: Plan, directory: RunDirectory) -> None:
    """Print the compatibility table and the warnings; refuse models that cannot be merged and bad outputs.

    Raises MergeError if models are incompatible, or the output is or contains an input; also checks the free disk
    space.
    """
    checks = compare(plan)
    _print_table(table_rows(checks, plan.sources))
    for warning in [*(c.warning for c in checks if c.warning), *plan.warnings]:
        terminal.note(f"warning: {warning}")
    raise_problems(checks, plan.sources)
    final = directory.final.resolve()
    for source in plan.sources:
        if source.origin is not None and (final == source.origin or final in source.origin.parents):
            raise MergeError(f"the output {final} is or contains the input {source.name}", hint="give another --output")
    require_space(directory.path, plan.nbytes)


def _write_model(plan: Plan, folder: Path, directory: RunDirectory, sync: Callable[[Path], None]) -> MergeStats:
    """Write config and tokenizer files, then the tensors with a progress line."""
    _write_config(plan, folder)
    for file in companion_files(plan.tokenizer.folder, generation_only=_has_new_tokenizer(plan)):
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        else:
            shutil.copy2(file, folder / file.name)
    _write_tokenizer(plan, folder)
    written_bytes = 0
    with GracefulStop() as stop, Progress("merge", len(plan.out), ("written/megabytes",)) as progress:

        def before_each(number: int, name: str) -> None:
            nonlocal written_bytes
            if stop.requested:
                raise Interrupted(
                    f"stopped before tensor {number} of {len(plan.out)}; the inputs are untouched",
                    where=str(directory.path),
                    hint="the same command with --resume starts the merge again",
                    number=stop.number,
                )
            written_bytes += plan.out[name].nbytes
            progress.update(number, {"written/megabytes": written_bytes / 1e6})

        return write_merged(plan, folder, before_each, sync)


def companion_files(folder: Path, *, generation_only: bool = False) -> list[Path]:
    """Return the tokenizer, chat template and generation config files of a model folder, or the last alone."""
    patterns = ("generation_config.json",) if generation_only else _COMPANION_PATTERNS
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _write_tokenizer(plan: Plan, folder: Path) -> None:
    """Save a new tokenizer or the tokenizer with the recipe's chat template, if there is either."""
    if not _has_new_tokenizer(plan) and plan.chat_template is None:
        return
    from transformers import AutoTokenizer

    tokenizer = plan.tokens.tokenizer if plan.tokens else None
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(plan.tokenizer.folder)
    if plan.chat_template is not None:
        tokenizer.chat_template = plan.chat_template
    tokenizer.save_pretrained(folder)


def _has_new_tokenizer(plan: Plan) -> bool:
    return plan.tokens is not None and plan.tokens.tokenizer is not None


def _write_config(plan: Plan, folder: Path) -> None:
    """Write the config of the base or first model, with the output's dtype, layers and vocabulary."""
    config = {key: value for key, value in plan.config.config.items() if key not in ("torch_dtype", "dtype")}
    config = resize_config(config, plan)
    floats = [spec.dtype for spec in plan.out.values() if spec.dtype.is_floating_point]
    if floats:
        config["dtype"] = str(max(set(floats), key=floats.count)).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def resize_config(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return a config for the output's number of layers and tokens; lists with one entry per layer are stacked too."""
    from transformers import AutoConfig

    loaded = AutoConfig.from_pretrained(plan.config.folder)
    text = loaded.get_text_config()
    inner = next(
        (key for key, value in config.items() if isinstance(value, dict) and getattr(loaded, key, 0) is text), ""
    )
    own = dict(config[inner]) if inner else config
    if plan.tokens is not None:
        own[text.attribute_map.get("vocab_size", "vocab_size")] = plan.tokens.rows
    if plan.stacked:
        before, (count,) = text.num_hidden_layers, plan.counts.values()
        own[text.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = count
        for key, value in own.items():
            if isinstance(value, list) and len(value) == before:
                own[key] = [entry for part in plan.slices for entry in _layer_entries(part, key, value)]
    return {**config, inner: own} if inner else own


def _layer_entries(part: Slice, key: str, default: list[Any]) -> list[Any]:
    """Return the entries of a per-layer list for the layers of a slice, from the slice's first model."""
    model, start = part.models[0], part.starts[0]
    own = model.config.get(key, default)
    return list(own[start : start + part.layers]) if isinstance(own, list) else default


def _build_report(
    plan: Plan,
    base_model: str | None,
    stats: MergeStats,
    changes: Changes,
    gaps: dict[str, float | None],
    seconds: float,
    final: Path,
) -> dict[str, Any]:
    """Return the merge report.

    base_model: the name in the recipe. Rules without differences, such as slerp, treat it as one of the models.
    """
    base = plan.base or next((source for source in plan.sources if source.name == base_model), None)
    return {
        "model": str(final),
        "merge_method": plan.method,
        "parameters": settings_as_json({**_default_parameters(plan), **plan.slices[0].arguments.common[-1]}),
        "base_model": None if base is None else _describe_source(base),
        "models": _describe_models(plan, stats),
        **({"layers": sum(part.layers for part in plan.slices)} if plan.stacked else {}),
        "compared_with": plan.anchor.name,
        "tokenizer_source": plan.tokenizer.name,
        "tensors": len(plan.out),
        "changed": len(changes.changed),
        "unchanged": sorted(plan.out.keys() - set(changes.changed)),
        **_count_changes_by_part(plan, changes),
        "rounded_away": changes.rounded_away,
        "bytes": plan.nbytes,
        "probe": gaps,
        "warnings": plan.warnings,
        "seconds": round(seconds, 2),
    }


def _default_parameters(plan: Plan) -> dict[str, Any]:
    return {key: default for key, (_, default) in plan.rule.params.items()}


def settings_as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON values, under the recipe's keys."""
    names = {argument: key.strip("_") for key, argument in ARGUMENTS.items()}
    return {
        names.get(key, key): [entry.model_dump() if isinstance(entry, Filtered) else entry for entry in value]
        if isinstance(value, list)
        else value
        for key, value in settings.items()
    }


def _describe_models(plan: Plan, stats: MergeStats) -> list[dict[str, Any]]:
    """Return the models of the report with their settings.

    With `slices`, each model appears once with the layers taken from it.
    """
    if not plan.stacked:
        own = plan.slices[0].arguments.own
        weight = {} if plan.method in UNWEIGHTED else {"weight": 1.0}
        return [
            {**_describe_source(source), **settings_as_json({**weight, **settings}), "delta_norm": stats.norm(source)}
            for source, settings in zip(plan.models, own, strict=True)
        ]
    models = []
    for source in plan.models:
        taken = [
            {"from": [start, start + part.layers], "to": [part.first, part.first + part.layers]}
            for part in plan.slices
            for model, start in zip(part.models, part.starts, strict=True)
            if model.folder == source.folder
        ]
        models.append({**_describe_source(source), "layers": taken, "delta_norm": stats.norm(source)})
    return models


def _describe_source(source: Source) -> dict[str, str]:
    return {"model": source.name, "folder": str(source.folder)}


def _count_changes_by_part(plan: Plan, changes: Changes) -> dict[str, Any]:
    """Return for a vision model how many tensors of each part (language, projector, vision) changed, of how many."""
    parts = {name: find_part(name) for name in plan.out}
    if "vision" not in parts.values():
        return {}
    totals, changed = Counter(parts.values()), Counter(parts[name] for name in changes.changed)
    return {"changed_by_part": {part: [changed[part], count] for part, count in sorted(totals.items())}}


def _print_summary(summary: dict[str, Any]) -> None:
    """Print the result of a merge: output, changed tensors, and a warning about differences lost to rounding."""
    gap = summary["probe"]["logit_gap"]
    gap_text = "" if gap is None else f", largest logit difference on a test text {gap:.3g}"
    inputs = count_noun(len(summary["models"]), "model")
    if "layers" in summary:
        terminal.note(f"{count_noun(summary['layers'], 'layer')} of {inputs} stacked in {summary['model']}{gap_text}")
    else:
        terminal.note(
            f"merged {inputs} into {summary['model']}: {summary['changed']} of "
            f"{count_noun(summary['tensors'], 'tensor')} differ from {summary['compared_with']}{gap_text}"
        )
    if parts := summary.get("changed_by_part"):
        terminal.note("; ".join(f"{part}: {moved} of {count}" for part, (moved, count) in parts.items()) + " differ")
    if summary["rounded_away"]:
        names = summary["rounded_away"]
        why = "the difference is too small for the output dtype, or the merge method dropped it"
        count = count_noun(len(names), "tensor")
        terminal.note(f"warning: {count} unchanged although the inputs differ ({why}): {', '.join(names)}")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print the compatibility table to stderr."""
    console = terminal.console(stderr=True, markup=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    shown = Table(*(Column(heading, overflow="fold") for heading in rows[0]), box=None, pad_edge=False)
    for row in rows[1:]:
        shown.add_row(*row)
    console.print(shown)
