"""The shipped row builders (critiques, spliced paths), through their recipes, on the tiny model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.data.rows import load_rows
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.load import load
from posttrain.recipe.sections import Data

BUILDERS = shipped_folder("recipes") / "data" / "concise.py"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(recipe: str, file: Path) -> list[dict[str, Any]]:
    loaded: Any = load(recipe, [f"data.params.file={file}"]).recipe
    return load_rows(loaded.data, loaded.base_dir)


def test_only_critiques_confirmed_by_a_verifier_are_kept(tmp_path: Path) -> None:
    """Kept: the verdict equals the correctness.

    Dropped: another verdict, none, nothing verified, a repeated solution.
    """
    base = {"question": "1+1?", "solution": "2", "correct": True}
    lines = [
        {**base, "critique": "Fine. Conclusion: right [END] and more"},
        {**base, "critique": "Conclusion: right", "solution": " 2 "},
        {**base, "critique": "Conclusion: wrong", "solution": "two"},
        {**base, "critique": "I am not sure.", "solution": "ii"},
        {**base, "critique": "Conclusion: right", "solution": "2.0", "correct": None},
        {**base, "critique": "Not: Conclusion: right. Or rather\nconclusion: WRONG", "solution": "3", "correct": False},
    ]
    found = rows_of("sft/critiques", write(tmp_path / "c.jsonl", lines))
    assert [row["completion"] for row in found] == [
        "Fine. Conclusion: right",
        "Not: Conclusion: right. Or rather\nconclusion: WRONG",
    ]
    assert found[0]["prompt"].startswith("1+1?") and "\n2\n" in found[0]["prompt"]


def test_spliced_path_trains_the_reflection_and_the_good_tail(tmp_path: Path) -> None:
    start = {"role": "user", "content": "go"}
    good = [start, {"role": "assistant", "content": "left"}, {"role": "user", "content": "there"}]
    bad = [start, {"role": "assistant", "content": "right"}, {"role": "user", "content": "wall"}]
    path = {"good": good, "bad": bad, "good_reward": 1.0, "bad_reward": 0.0, "first_bad": 1}
    lines = [path, {**path, "good_reward": 0.1}, {**path, "first_bad": None}]
    [row] = rows_of("sft/agent_r", write(tmp_path / "p.jsonl", lines))
    trained = [m["content"] for m in row["messages"] if m["train"]]
    assert trained[0].startswith("Thought:") and trained[1:] == ["left"]
    assert [m["content"] for m in row["messages"] if not m["train"]][:3] == ["go", "right", "wall"]


def test_inspect_shows_the_trained_tokens(tmp_path: Path) -> None:
    base = {"question": "1+1?", "critique": "Conclusion: wrong", "correct": False}
    lines = [{**base, "solution": str(n)} for n in (3, 4)]
    file = write(tmp_path / "c.jsonl", lines)
    arguments = ["data", "inspect", "sft/critiques", f"data.params.file={file}", "model.path=tiny"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert "»Conclusion: wrong" in result.stdout


def test_chains_are_labelled_by_correctness_and_by_batching(tmp_path: Path) -> None:
    """DRQA: short chains from batches are A, chains of a single question B, wrong ones C; longer chains are left
    out.
    """
    problems = write(tmp_path / "p.jsonl", [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(6)])
    bundle = Data(source=f"{BUILDERS}:bundles", size=3, params={"file": str(problems)})
    asked = load_rows(bundle, tmp_path)
    assert all(row["prompt"].count("Question ") == 2 for row in asked)
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir(), together.mkdir()
    write(alone / "problems.jsonl", [{"uid": str(n), "row": {"prompt": f"{n}+1?"}} for n in range(6)])
    long = "Let me think about this for a long while. " * 3
    write(
        alone / "completions.jsonl",
        [{"uid": str(n), "completion": f"{long}\\boxed{{{n + 1}}}", "correct": n < 4} for n in range(6)],
    )
    write(together / "problems.jsonl", [{"uid": str(n), "row": row} for n, row in enumerate(asked)])

    def answered(row: dict[str, Any], before: str = "") -> str:
        golds = json.loads(row["answer"])
        return "\n".join(f"Answer {n}: {before}\\boxed{{{gold}}}" for n, gold in enumerate(golds, 1))

    write(
        together / "completions.jsonl",
        [
            {"uid": "0", "completion": answered(asked[0])},
            {"uid": "1", "completion": answered(asked[1], long * 2)},
            {"uid": "2", "completion": "no headings"},
        ],
    )
    params = {"alone": str(alone), "together": str(together)}
    rows = load_rows(Data(source=f"{BUILDERS}:chains", params=params), tmp_path)
    assert [row["answer"] for row in rows] == ["A", "B", "C", "A", "B", "C"]
    assert all(long in row["prompt"] for row in rows if row["answer"] in "BC")
    assert not any(long in row["prompt"] for row in rows if row["answer"] == "A")
