"""Trees of completions: steps valued by continuations, records of generate, rows made of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from posttrain.batch import Segment
from posttrain.cli.app import app
from posttrain.data.rows import load_rows
from posttrain.errors import DataError, RecipeError
from posttrain.evaluate import generate
from posttrain.loss.reward_model import soft_label
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Data
from posttrain.run.directory import RunDirectory
from posttrain.run.jsonl import read_rows
from posttrain.shapes.protocol import Asked, Grade, Row, Sampled
from posttrain.shapes.step_values import cut_step, step_values

Values = dict[str, Any]
BUILDERS = shipped_folder("recipes") / "data" / "trees.py"
REWARD = '''
def digits(completion, token_count):
    """Share of tokens that are digits: it differs between the completions of an untrained model."""
    return sum(c.isdigit() for c in completion) / max(token_count, 1)
'''


def asked_of(answers: Callable[[tuple[int, ...], int], tuple[int, ...]], right: Callable[[Row], bool]) -> Asked:
    """Search from the prompt (9,) with up to four tokens; answers: (request, limit) -> tokens, where 0 ends a
    completion.
    """

    async def draw(prompts: Sequence[tuple[int, ...]], limits: Sequence[int], *, greedy: bool = False) -> list[Sampled]:
        assert not greedy
        ids = [answers(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
        return [Sampled(Segment("model", one, (-1.0,) * len(one)), "stop" if one[-1] == 0 else "length") for one in ids]

    async def grade(rows: Sequence[Row]) -> list[Grade]:
        return [Grade(float(right(row)), right(row)) for row in rows]

    return Asked((9,), {}, 4, 100, 0, draw, grade, lambda _: (), lambda ids: "".join(map(str, ids)), lambda _: "")


def tokens_of(row: Row) -> tuple[int, ...]:
    return tuple(i for segment in row.segments for i in segment.ids)


def test_step_value_is_the_share_of_right_continuations() -> None:
    """Steps of one token, two a node; what is asked for after a text is 1, 2, 1, 2, ... in turn, and a completion ends
    with 0 behind it. Right are texts that begin with 1, 1. Behind the prompt completions are (1,0) and (2,0): none
    of 6. Behind step (1) they are (1,1,0) and (1,2,0): 3 of 5; behind (2) none. The search goes below (1), where (1,1)
    is worth 1 and (1,2) 0. (1,1) then gets one completion to the end, which is right. So (1) has 1 twice and 0 once."""
    counts: dict[tuple[int, ...], int] = {}

    def answers(prompt: tuple[int, ...], limit: int) -> tuple[int, ...]:
        counts[prompt, limit] = counts.get((prompt, limit), 0) + 1  # type: ignore[index]
        kind = 2 - counts[prompt, limit] % 2  # type: ignore[index]
        return (kind,) if limit == 1 and len(prompt) < 4 else (kind, 0)

    rows = asyncio.run(
        step_values(
            asked_of(answers, lambda row: tokens_of(row)[:2] == (1, 1)),
            step_tokens=1,
            ends="",
            width=2,
            base=6,
            max_nodes=7,
            right_ends=1,
            c=0.1,
        )
    )
    nodes = {node.number: node for row in rows for node in row.nodes}
    paths = {tokens_of(row): row for row in rows}
    assert set(paths) == {(2,), (1, 2), (1, 1, 2, 0)}
    assert [nodes[n].value for n in sorted(nodes)] == pytest.approx([2 / 3, 0.0, 1.0, 0.0, 1.0])
    assert [nodes[n].visits for n in sorted(nodes)] == [4, 1, 2, 1, 1]
    assert [row.scored for row in rows] == [tokens_of(row) == (1, 1, 2, 0) for row in rows]


def test_wrong_leaf_gets_a_second_try() -> None:
    """Every step ends at once with 2, which is wrong. Behind 2 without its end, and the injected (8, 8), follows 1:
    right if the text is (2, 8, 8, 1). The root has two wrong ends and two second tries worth 1: (0 + 0 + 1 + 1) / 4."""

    def answers(prompt: tuple[int, ...], _: int) -> tuple[int, ...]:
        return (1, 0) if prompt[-1] == 8 else (2, 0)

    asked = dataclasses.replace(
        asked_of(answers, lambda row: tokens_of(row)[:4] == (2, 8, 8, 1)),
        max_new_tokens=6,
        encode=lambda text: (8,) * len(text),
    )
    how: Values = {"step_tokens": 2, "ends": "", "width": 2, "base": 5, "max_nodes": 9}
    rows = asyncio.run(step_values(asked, right_ends=1, reflection="..", **how))
    assert [tokens_of(row) for row in rows] == [(2, 0), (2, 0), (2, 8, 8, 1, 0), (2, 8, 8, 1, 0)]
    assert all(row.scored for row in rows) and [s.kind for s in rows[2].segments] == ["model", "injected", "model"]
    values = {node.number: node.value for row in rows for node in row.nodes}
    assert values == {1: 0.0, 2: 0.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 1.0, 8: 1.0}
    plain = asyncio.run(step_values(asked, right_ends=1, **how))
    assert [tokens_of(row) for row in plain] == [(2, 0), (2, 0)]


def test_prompt_solved_by_every_completion_gives_no_tree() -> None:
    rows = asyncio.run(step_values(asked_of(lambda *_: (1, 0), lambda _: True), step_tokens=1, base=6))
    assert len(rows) == 1 and rows[0].nodes == () and rows[0].scored


def test_step_ends_after_its_delimiter() -> None:
    """`33` in 1 33 2 ends a step; a delimiter at its start does not; text that ends with the delimiter stays whole."""
    asked = asked_of(lambda *_: (1,), lambda _: True)

    def cut(*ids: int) -> tuple[tuple[int, ...], str]:
        found = cut_step(Sampled(Segment("model", ids, (-1.0,) * len(ids)), "stop"), "33", asked)
        assert len(found.segment.logps or ()) == len(found.ids)
        return found.ids, found.finish

    assert cut(1, 3, 3, 2, 0) == ((1, 3, 3), "length")
    assert cut(1, 2, 0) == ((1, 2, 0), "stop") and cut(1, 3, 3) == ((1, 3, 3), "stop")


def recipe_of(folder: Path, shape: Any = None, **changes: Any) -> Any:
    (folder / "rewards.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(6)))
    steps = {"use": "step_values", "step_tokens": 3, "ends": "", "width": 2, "base": 5, "max_nodes": 5, "right_ends": 2}
    tree = {
        "shape": shape or steps,
        "rewards": [{"use": "rewards.py:digits", "correct": True}],
        "scoring": {"workers": 1, "correct_at": 0.15},
    }
    values = {
        "stage": "generate",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "sampling": {"max_new_tokens": 8, "stop": ["a", "e", "o"]},
        "engine": {"batch_size": 2},
        "tree": tree,
        **changes,
    }
    return load_dict(values, base_dir=folder, where="test").recipe


def generate_records(recipe: Any, folder: Path) -> list[Values]:
    resume = (folder / "completions.jsonl").exists()
    with RunDirectory.open(folder, name="g", text="", resolved={}, resume=resume) as directory:
        generate.run(recipe, directory)
    return read_rows(folder / "completions.jsonl")


@pytest.mark.parametrize(
    "shape", [None, {"use": "mcts", "segment_tokens": 3, "width": 2, "max_depth": 3, "paths": 3}], ids=["steps", "mcts"]
)
def test_record_has_its_tree_and_the_best_path(tmp_path: Path, shape: Any) -> None:
    """Each node's text begins with its parent's; the completion is the path of the highest reward; step values are
    probabilities, and a node with children has a value between theirs.
    """
    records = generate_records(recipe_of(tmp_path, shape), tmp_path / "run")
    assert len(records) == 6 and sum(len(r["tree"]["nodes"]) > 3 for r in records) > 2
    for record in records:
        nodes = {node["number"]: node for node in record["tree"]["nodes"]}
        children: dict[int, list[float]] = {}
        for node in nodes.values():
            children.setdefault(node["parent"], []).append(node["value"])
            if node["parent"]:
                assert node["text"].startswith(nodes[node["parent"]]["text"])
            assert shape or 0 <= node["value"] <= 1
        for number, below in children.items():
            if number and not shape:
                assert min(below) <= nodes[number]["value"] <= max(below)
        scored = [path for path in record["tree"]["paths"] if "reward" in path]
        assert record["reward"] == max(path["reward"] for path in scored)
        if nodes:
            assert record["completion"] in [nodes[path["nodes"][-1]]["text"] for path in scored]


def test_tree_generation_resumes_after_the_last_complete_chunk(tmp_path: Path) -> None:
    """Three chunks of two prompts; the last one is truncated and sampled again: the same records."""
    recipe = recipe_of(tmp_path)
    whole = generate_records(recipe, tmp_path / "run")
    lines = (tmp_path / "run" / "completions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "completions.jsonl").write_text("".join(lines[:5]))
    assert generate_records(recipe, tmp_path / "run") == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": [{"use": "calculator"}]}, "a tree has no tools"),
        ({"sampling": {"temperature": 0.0}}, "greedy branches are all the same"),
        ({"samples": 2, "best_of": {"rewards": [{"use": "rewards.py:digits"}]}}, "a tree has its own rewards"),
    ],
)
def test_keys_incompatible_with_a_tree_are_refused(tmp_path: Path, changes: Values, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(tmp_path, **changes)


def test_shape_without_trees_and_unknown_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="`chunks` samples no tree"):
        recipe_of(tmp_path, {"use": "chunks"})
    with pytest.raises(RecipeError, match="withd"):
        recipe_of(tmp_path, {"use": "step_values", "withd": 2})


def rows_of(function: str, run: Path, **params: Any) -> list[Values]:
    data = Data(source=f"{BUILDERS}:{function}", params={"run": str(run), **params})
    return [{k: v for k, v in row.items() if k != "uid"} for row in load_rows(data, run)]


def test_rows_made_of_a_tree(tmp_path: Path) -> None:
    """Nodes 1 "a" and 2 "b" below the prompt, 3 "ac" and 4 "ad" below 1; the path to 3 ended right, the one to 4 wrong.
    paths: "ac". values: all four. steps: a over b (0.5 more), ac over ad; with a margin of 0.6 the latter alone."""
    nodes = [
        {"number": n, "parent": p, "text": t, "value": v, "visits": 1.0}
        for n, p, t, v in [(1, 0, "a", 0.5), (2, 0, "b", 0.0), (3, 1, "ac", 1.0), (4, 1, "ad", 0.0)]
    ]
    ends = [{"nodes": [1, 3], "finish": "stop", "reward": 1.0, "correct": True}]
    ends += [{"nodes": [1, 4], "finish": "stop", "reward": 0.0, "correct": False}, {"nodes": [2], "finish": "length"}]
    easy = {"uid": "y", "tree": {"nodes": [], "paths": [{"nodes": [], "finish": "stop", "correct": True}]}}
    records = [{"uid": "x", "tree": {"nodes": nodes, "paths": ends}}, easy]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    problems = [{"uid": "x", "prompt": "q?"}, {"uid": "y", "prompt": "z?"}]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(r) + "\n" for r in problems))
    assert rows_of("paths", tmp_path) == [{"prompt": "q?", "completion": "ac"}]
    found = rows_of("values", tmp_path / "completions.jsonl")
    assert [(r["completion"], r["value"]) for r in found] == [("a", 0.5), ("b", 0.0), ("ac", 1.0), ("ad", 0.0)]
    assert [(r["chosen"], r["rejected"]) for r in rows_of("steps", tmp_path)] == [("a", "b"), ("ac", "ad")]
    assert [r["chosen"] for r in rows_of("steps", tmp_path, margin=0.6)] == ["ac"]
    (tmp_path / "completions.jsonl").write_text(json.dumps({"uid": "x"}) + "\n")
    with pytest.raises(DataError, match="a completion without a tree"):
        rows_of("values", tmp_path)


def test_soft_label_is_trained_as_a_probability() -> None:
    """Logit 0 against 1, 0 and 1/2: log 2 each; the gradient is probability - label: -1/2, 1/2, 0."""
    logits = torch.zeros(3, requires_grad=True)
    losses = soft_label(logits, torch.tensor([1.0, 0.0, 0.5]))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([math.log(2)] * 3) and logits.grad is not None
    assert logits.grad.tolist() == [-0.5, 0.5, 0.0]


@pytest.mark.slow
def test_shipped_pipeline_trains_a_policy_and_a_verifier(tmp_path: Path) -> None:
    """MedS3 on the tiny model: trees, SFT on right paths, a verifier of their nodes, and best of n by that verifier."""
    found = CliRunner().invoke(app, ["run", "meds3_tiny", "--output", str(tmp_path / "run")])
    assert found.exit_code == 0, found.output
    trees = read_rows(next((tmp_path / "run").rglob("trees/completions.jsonl")))
    assert any(len(record["tree"]["nodes"]) > 3 for record in trees)
    best = read_rows(next((tmp_path / "run").rglob("answers/best.jsonl")))
    assert len(best) == 12 and all(0 <= record["reward"] <= 1 for record in best)
