"""`posttrain export`: accepted and refused options, and the preview; the exports themselves are in tests/export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.export.licenses import warn_unknown_license
from posttrain.models import tiny

Call = Callable[..., Any]


@pytest.fixture
def model(folder: Path) -> Path:
    made, tokenizer = tiny.build()
    made.save_pretrained(folder / "mine")
    tokenizer.save_pretrained(folder / "mine")
    return folder / "mine"


def test_export_to_merged(call: Call, model: Path, folder: Path) -> None:
    done = call("export", str(model), "--to", "merged", "--output", "out", "--license", "mit")
    assert done.exit_code == 0, done.stderr
    assert "logit_gap  0" in done.stdout and "license    mit" in done.stdout
    assert (folder / "out" / "README.md").is_file() and (folder / "out" / "model.safetensors").is_file()
    again = call("export", str(model), "--to", "merged", "--output", "out")
    assert again.exit_code == 2 and "--overwrite replaces it" in again.stderr
    report = json.loads(call("export", str(model), "--to", "merged", "--output", "out", "--overwrite", "--json").stdout)
    assert report["license"] == "unknown" and report["files"] == sorted(report["files"])


def test_dry_run_writes_nothing(call: Call, model: Path, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = call("export", str(model), "--to", "hub:me/mine", "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("---\nlibrary_name: transformers")
    assert "to me/mine on the hub (private, if it is new)" in done.stderr and "model.safetensors" in done.stderr
    found = json.loads(call("export", str(model), "--to", "merged", "--dry-run", "--json").stdout)
    assert found["output"] == "exports/mine/merged" and {"README.md", "tokenizer.json"} <= set(found["files"])
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "ggfu"], "did you mean `gguf`?"),
        (["--to", "me/mine"], "the hub is written hub:OWNER/NAME"),
        (["--to", "hub:mine"], "`mine` is not a model name of the hub"),
        (["--to", "adapter"], "an adapter is already a folder"),
        (["--to", "merged", "--public"], "--public is for the hub"),
        (["--to", "gguf", "--as", "gguf"], "--as is for the hub"),
        (["--to", "merged", "--dtype", "q8_0"], "q8_0 is for gguf and ollama"),
        (["--to", "merged", "sampling.top_p=0.9"], "overrides of an export are model.KEY=VALUE"),
        (["--to", "merged", "--eval", "nowhere"], "nowhere is no finished evaluation"),
        (["--to", "merged", "model.revision=x"], "only models of the hub have revisions"),
        (["--to", "gguf"], "this model cannot be written as GGUF here"),
    ],
)
def test_invalid_options_raise(call: Call, model: Path, folder: Path, arguments: list[str], said: str) -> None:
    done = call("export", str(model), *arguments)
    assert done.exit_code == 2 and said in done.stderr, done.stderr
    assert not (folder / "exports").exists()


def test_unknown_license_is_noted(call: Call, model: Path) -> None:
    assert warn_unknown_license("apache-2.0") == ""
    assert warn_unknown_license("mine").endswith("one without an id is `other`")
    told = call("export", str(model), "--to", "merged", "--license", "apache", "--dry-run").stderr
    assert "note: --license apache is not a licence id of the model hub; did you mean `apache-2.0`?" in told


def test_training_run_as_evaluation_is_refused(call: Call, model: Path, folder: Path) -> None:
    (folder / "trained").mkdir()
    (folder / "trained" / "summary.json").write_text("{}", encoding="utf-8")
    (folder / "trained" / "resolved.json").write_text('{"stage": "rl"}', encoding="utf-8")
    refused = call("export", str(model), "--to", "merged", "--eval", "trained")
    assert refused.exit_code == 2 and "trained is no finished evaluation" in refused.stderr


def test_missing_models_raise(call: Call) -> None:
    done = call("export", "./nowhere", "--to", "merged")
    assert done.exit_code == 2 and "model not found: ./nowhere" in done.stderr
    tinny = call("export", "tinny", "--to", "merged")
    assert tinny.exit_code == 2 and "did you mean `tiny`?" in tinny.stderr
