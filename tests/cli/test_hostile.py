"""Recipes and files made to hang or crash a command: one sentence, exit code 2, within a second or two."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from posttrain.cli.app import app

SFT = "stage: sft\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrun: {steps: 1}\n"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{{', '.join(f'k{n}: *{old}' for n in range(10))}}}\n"
    for old, new in zip("abcdef", "bcdefg", strict=True)
)
TEXTS = {
    "aliases that multiply": (SFT + LAUGHS, "more than 10,000 values, counting those of aliases every time"),
    "mappings that multiply": (SFT + MERGED, "more than 10,000 values"),
    "an alias in itself": (SFT + "defaults: &a [*a]\n", "an alias inside its own anchor"),
    "20,000 unknown keys": (SFT + "".join(f"key{n}: {n}\n" for n in range(20_000)), "too many for a recipe"),
    "5,000 unknown keys": (SFT + "".join(f"key{n}: {n}\n" for n in range(5_000)), "and 4970 mistakes more"),
    "5,000 unknown keys of a section": (
        SFT.replace("{steps: 1}", "{steps: 1, " + ", ".join(f"stepz{n}: {n}" for n in range(5_000)) + "}"),
        "mistakes more",
    ),
    "an integer of 5,000 digits": (SFT.replace("steps: 1", f"steps: {'9' * 5000}"), "a number of 5000 digits"),
    "a float of 5,000 digits": (SFT.replace("steps: 1", f"steps: {'9' * 5000}.0"), "a number of 5002 digits"),
    "a hexadecimal of 5,000 digits": (SFT.replace("steps: 1", f"steps: 0x{'f' * 5000}"), "a number of 5002 digits"),
    "an integer of 30 digits": (
        SFT.replace("steps: 1", f"steps: {'9' * 30}"),
        "run.steps: must be at most 1,000,000,000",
    ),
    "a learning rate": (SFT + "optim: {lr: 1.0e+300}\n", "optim.lr: must be at most 10"),
    "infinity": (SFT + "optim: {lr: 1.0e+999}\n", "optim.lr: must be a finite number"),
    "a group": (
        SFT.replace("sft", "rl") + "rewards: [{use: math.accuracy}]\nrollout: {group_size: 1.0e+20}\n",
        "group_size",
    ),
    "nesting of lists": (SFT + f"defaults: {'[' * 400}{']' * 400}\n", "nested more than 50 deep"),
    "nesting of mappings": (SFT + f"defaults: {'{a: ' * 400}1{'}' * 400}\n", "nested more than 50 deep"),
    "deeper nesting": (SFT + f"defaults: {'[' * 40_000}\n", "nested more than 50 deep"),
    "a long file name": (
        SFT.replace("rows.jsonl", f"{'x' * 5000}.jsonl"),
        "is not a file name: it has 5006 characters",
    ),
    "a long model": (SFT.replace("tiny", f"./{'x' * 5000}"), "is not a file name"),
    "a long script": (SFT.replace("rows.jsonl", f"{'x' * 5000}.py:f"), "is not a file name"),
    "a long template": (SFT.replace("path: tiny", f"path: tiny, chat_template: {'x/' * 3000}t"), "is not a file name"),
    "a NUL": (SFT.replace("rows.jsonl", '"rows\\0.jsonl"'), "is not a file name: it contains a NUL character"),
    "a long value": (SFT.replace("steps: 1", f"steps: {'y' * 50_000}"), "run.steps: must be a whole number"),
    "a long key": (SFT + f"{'k' * 900}: 1\n", "unknown key"),
    "a long override of an alias": (SFT + "x: &a 1\ny: *b\n", "an alias (`*name`) without its anchor"),
    "binary": ("\x00\x01\x02", "not readable as YAML"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "completion": "2"}\n')
    return tmp_path


def expect_refusal(*words: str) -> str:
    """What a command says on stderr, with exit code 2 and in time."""
    started = time.process_time()
    result = CliRunner().invoke(app, list(words))
    assert time.process_time() - started < 2.5
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr and "report it" not in result.stderr
    assert len(result.stderr) < 20_000
    return result.stderr


@pytest.mark.parametrize("what", TEXTS)
def test_excessive_yaml_is_refused_with_one_sentence(what: str, folder: Path) -> None:
    text, told = TEXTS[what]
    (folder / "r.yaml").write_text(text)
    assert told in expect_refusal("recipe", "validate", "r.yaml")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (f"run.steps={'9' * 5000}", "a number of 5000 digits"),
        (f"run.steps={'[' * 400}{']' * 400}", "nested more than 50 deep"),
        (f"optim.lr={'1e300'}", "optim.lr: must be at most 10"),
        (f"{'x' * 5000}=1", "unknown key"),
    ],
)
def test_excessive_overrides_are_refused(override: str, told: str, folder: Path) -> None:
    (folder / "r.yaml").write_text(SFT)
    assert told in expect_refusal("recipe", "validate", "r.yaml", override)


def test_excessive_recipe_names_are_refused(folder: Path) -> None:
    assert "is not a file name" in expect_refusal("recipe", "validate", "x" * 5000)
    assert "is a folder, not a recipe" in expect_refusal("recipe", "validate", str(folder))
    os.mkfifo(folder / "pipe.yaml")
    assert "recipe: pipe.yaml is a pipe, not a file" in expect_refusal("recipe", "validate", "pipe.yaml")
    assert "recipe: /dev/zero is a device, not a file" in expect_refusal("recipe", "validate", "/dev/zero")


@pytest.mark.parametrize("key", ["data", "script", "template", "extends", "model"])
def test_pipes_and_devices_as_files_are_refused(key: str, folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    os.mkfifo(folder / "pipe.py")
    os.symlink("/dev/zero", folder / "zero.yaml")
    os.symlink("/dev/zero", folder / "zero.gguf")
    texts = {
        "data": SFT.replace("rows.jsonl", "pipe.jsonl"),
        "script": SFT.replace("sft", "rl") + "rewards: [{use: 'pipe.py:f'}]\n",
        "template": SFT.replace("path: tiny", "path: tiny, chat_template: pipe.py"),
        "extends": SFT + "extends: zero.yaml\n",
        "model": SFT.replace("tiny", "zero.gguf"),
    }
    (folder / "r.yaml").write_text(texts[key])
    assert ("is a pipe, not a file" if "pipe" in texts[key] else "is a device, not a file") in expect_refusal(
        "recipe", "validate", "r.yaml"
    )


def test_large_valid_recipes_are_accepted(folder: Path) -> None:
    """A pipeline of 60 stages, and a merge over the layers of a large model."""
    stages = [{"name": f"s{n}", "stage": "sft", **yaml.safe_load(SFT)} for n in range(60)]
    (folder / "p.yaml").write_text(yaml.safe_dump({"stage": "pipeline", "stages": stages}))
    assert CliRunner().invoke(app, ["recipe", "validate", "p.yaml"]).exit_code == 0
