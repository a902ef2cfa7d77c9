"""Rows to train on from trees that `posttrain generate` has grown (`tree:` in its recipe).

    source: ../data/trees.py:paths    right paths, for sft: {prompt, completion}
    source: ../data/trees.py:values   every node, for a verifier: {prompt, completion, value}
    source: ../data/trees.py:steps    sibling steps, for dpo: {prompt, chosen, rejected}

each with `params: {run: RUN}`, a run directory of such a generate (in a pipeline `stage:NAME/completions.jsonl`). Used
by recipes/meds3_tiny.yaml. MedS3 (2501.12051) trains a policy on right paths and a verifier on the values of nodes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import DataError


def paths(size: int | None = None, seed: int = 0, *, run: Path, per_prompt: int = 3) -> Iterator[dict[str, str]]:
    """The first `size` rows (None: all): at most per_prompt right paths of each prompt that ended, equal ones once."""
    del seed
    return itertools.islice(_paths(run, per_prompt), size)


def _paths(run: Path, per_prompt: int) -> Iterator[dict[str, str]]:
    for prompt, tree in _trees(run):
        texts = {node["number"]: node["text"] for node in tree["nodes"]}
        right = [p for p in tree["paths"] if p.get("correct") and p["finish"] == "stop" and p["nodes"]]
        found = dict.fromkeys(texts[path["nodes"][-1]] for path in right)
        for text in [text for text in found if text.strip()][:per_prompt]:
            yield {"prompt": prompt, "completion": text}


def values(size: int | None = None, seed: int = 0, *, run: Path) -> Iterator[dict[str, Any]]:
    """The first `size` rows (None: all): the text up to and with each node that the search has valued, its value."""
    del seed
    return itertools.islice(
        (
            {"prompt": prompt, "completion": node["text"], "value": node["value"]}
            for prompt, tree in _trees(run)
            for node in tree["nodes"]
            if node["visits"] and node["text"].strip()
        ),
        size,
    )


def steps(size: int | None = None, seed: int = 0, *, run: Path, margin: float = 0.5) -> Iterator[dict[str, str]]:
    """The first `size` rows (None: all): of each node's children the best over the worst, if it is worth `margin` more.
    Both sides begin with the text up to that node."""
    del seed
    return itertools.islice(_steps(run, margin), size)


def _steps(run: Path, margin: float) -> Iterator[dict[str, str]]:
    for prompt, tree in _trees(run):
        below: dict[int, list[dict[str, Any]]] = {}
        for node in tree["nodes"]:
            if node["visits"] and node["text"].strip():
                below.setdefault(node["parent"], []).append(node)
        for children in below.values():
            best, worst = (pick(children, key=lambda node: node["value"]) for pick in (max, min))
            if best["value"] - worst["value"] >= margin and best["text"] != worst["text"]:
                yield {"prompt": prompt, "chosen": best["text"], "rejected": worst["text"]}


def _trees(run: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the prompt as the data has it, the tree) of each record that has one."""
    folder = run.parent if run.is_file() else run
    asked = {row["uid"]: row["prompt"] for row in _lines(folder / "problems.jsonl")}
    for record in _lines(folder / "completions.jsonl"):
        if "tree" not in record:
            raise DataError("a completion without a tree", where=str(folder), hint="write `tree:` in its recipe")
        if record["tree"]["nodes"]:
            yield asked[record["uid"]], record["tree"]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"no finished generate: {path.name} is missing", where=str(path.parent))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
