"""The generate stage: completions of prompts, ungraded, in completions.jsonl; the prompts' rows in problems.jsonl."""

from __future__ import annotations

import json
from typing import Any

from posttrain.data.render import asked
from posttrain.evaluate.sampling import COMPLETIONS, PROBLEMS, prepare, sample
from posttrain.recipe.stages import GenerateRecipe
from posttrain.run.directory import RunDirectory
from posttrain.run.durable import write_text
from posttrain.run.jsonl import to_lines


def run(recipe: GenerateRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Sample, write completions.jsonl (one object a completion) and return counts."""
    prepared = prepare(recipe)
    records = sample(recipe, directory, prepared.items, recipe.samples, lambda rollouts: [{} for _ in rollouts])
    rows = [
        {"uid": p.uid, "prompt": asked(p.row, p.text, recipe.data), "row": json.loads(json.dumps(p.row, default=str))}
        for p in prepared.items
    ]
    write_text(directory.path / PROBLEMS, to_lines(rows))
    return {
        "model": recipe.model.path,
        "prompts": len(prepared.items),
        "samples": recipe.samples,
        "mean_tokens": sum(r["tokens"] for r in records) / len(records),
        "truncated": sum(r["finish"] == "length" for r in records) / len(records),
        "dropped": {cause: len(uids) for cause, uids in prepared.dropped.items()},
        "sampling": recipe.sampling.model_dump(),
        "seed": recipe.run.seed,
        "completions": str(directory.path / COMPLETIONS),
    }
