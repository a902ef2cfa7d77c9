"""`posttrain generate`, from a recipe and with --prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

SHORT = ("--max-new-tokens", "2")
Call = Callable[..., Any]


@pytest.fixture
def asked(stage: Callable[..., None]) -> list[Any]:
    """The recipes that were run; the stage answers each prompt with its text in capitals."""
    recipes: list[Any] = []

    def end(row: dict[str, Any]) -> dict[str, Any]:
        return {"finish": "length", "tokens": 9} if "long" in row["prompt"] else {}

    def run(recipe: Any, directory: Any) -> dict[str, Any]:
        recipes.append(recipe)
        rows = [json.loads(line) for line in Path(recipe.data.source).read_text().splitlines()]
        path = directory.path / "completions.jsonl"
        lines = [
            json.dumps({"problem": problem, "sample": sample, "completion": row["prompt"].upper(), **end(row)})
            for problem, row in enumerate(rows)
            for sample in range(recipe.samples)
        ]
        path.write_text("\n".join(lines) + "\n")
        asked = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]  # as the stage writes them
        (directory.path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
        return {"completions": str(path)}

    stage(run)
    return recipes


def test_prompts_given_on_the_command_line(call: Call, asked: list[Any], folder: Path) -> None:
    result = call("generate", "some/model", "--prompt", "one", "-p", "two\nlines", "--max-new-tokens", "9")
    assert (result.exit_code, result.stdout) == (0, "> one\nONE\n\n> two\n> lines\nTWO\nLINES\n")
    (recipe,) = asked
    assert (recipe.model.path, recipe.sampling.max_new_tokens, recipe.sampling.temperature) == ("some/model", 9, 0.0)
    assert sorted(p.name for p in folder.iterdir()) == ["r.yaml", "rows.jsonl"], "nothing is kept"


def test_samples_and_json(call: Call, asked: list[Any]) -> None:
    result = call("generate", "m", "-p", "x", "-n", "2", "--temperature", "0.5", "--seed", "4", "--json")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"problem": 0, "sample": n, "completion": "X"} for n in range(2)
    ]
    assert (asked[0].samples, asked[0].sampling.temperature, asked[0].run.seed) == (2, 0.5, 4)


@pytest.mark.usefixtures("asked")
def test_completions_are_labeled_with_their_prompt(call: Call) -> None:
    """A single completion is printed alone, for pipes; several samples are numbered, and several prompts repeated."""
    assert call("generate", "m", "-p", "x").stdout == "X\n"
    sampled = call("generate", "m", "-p", "x", "-n", "2", "--temperature", "1")
    assert sampled.stdout == "> [1]\nX\n\n> [2]\nX\n"
    assert call("generate", "m", "-p", "long").stderr.endswith(
        "cut after 9 tokens by --max-new-tokens or the model's context window\n"
    )
    assert "\n1 of 2 completions cut after 9 tokens" in "\n" + call("generate", "m", "-p", "x", "-p", "long").stderr
    both = call("generate", "m", "-p", "x", "-p", "y", "-n", "2", "--temperature", "1")
    assert both.stdout.split("\n\n")[-1] == "> y [2]\nY\n"


def test_overrides(call: Call, asked: list[Any]) -> None:
    assert call("generate", "m", "model.dtype=float32", "sampling.top_p=0.5", "-p", "x").exit_code == 0
    assert (asked[0].model.dtype, asked[0].sampling.top_p) == ("float32", 0.5)


def test_greedy_samples_are_refused(call: Call) -> None:
    result = call("generate", "m", "-p", "x", "-n", "2")
    assert (result.exit_code, "--temperature above 0" in result.stderr) == (2, True)


@pytest.mark.parametrize("option", [["--resume"], ["--allow-changed"], ["--output", "kept"], ["--dry-run"]])
def test_run_options_with_a_prompt_are_refused(option: list[str], call: Call, asked: list[Any], folder: Path) -> None:
    """They were once accepted without effect."""
    result = call("generate", "m", "-p", "x", *option)
    assert (result.exit_code, f"{option[0]} is for recipes" in result.stderr) == (2, True)
    assert not asked and not (folder / "kept").exists()


def test_generate_from_a_recipe(call: Call, asked: list[Any], folder: Path) -> None:
    (folder / "p.jsonl").write_text('{"prompt": "x"}\n')
    (folder / "g.yaml").write_text("stage: generate\nmodel: {path: tiny}\ndata: {source: p.jsonl}\n")
    result = call("generate", "g.yaml", "samples=2", "--output", "out")
    assert result.exit_code == 0
    assert "out/completions.jsonl" in result.stdout
    assert asked[0].samples == 2
    refused = call("generate", "g.yaml", "--temperature", "1")
    assert (refused.exit_code, "--temperature goes with --prompt" in refused.stderr) == (2, True)
    assert "sampling.temperature=..." in refused.stderr


def test_image_is_sent_with_each_prompt(call: Call, folder: Path) -> None:
    """The page of completions gets it from the record."""
    Image.new("RGB", (8, 8), "red").save(folder / "red.png")
    shown = call("generate", "tiny-vision", "-p", "one", "-p", "two", "--image", "red.png", "--json", *SHORT)
    assert shown.exit_code == 0, shown.stderr
    records = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [record["prompt"].count("<image>") for record in records] == [1, 1]
    assert all(url.startswith("data:image/jpeg") for record in records for url in record["pictures"])
    assert [len(record["pictures"]) for record in records] == [1, 1]
    refused = call("generate", "r.yaml", "--image", "red.png")
    assert (refused.exit_code, "--image goes with --prompt" in refused.stderr) == (2, True)
    blind = call("generate", "tiny", "-p", "one", "--image", "red.png")
    assert (blind.exit_code, "reads none" in blind.stderr) == (2, True)
