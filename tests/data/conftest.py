"""Tokenizers, chat templates that treat turns in different ways, and rows written to files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from posttrain.models.load import load_tokenizer
from posttrain.models.tiny import build_tokenizer
from posttrain.recipe.sections import Model


@pytest.fixture(scope="session")
def tiny() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: str) -> Any:
    """The real tokenizer and chat template of SmolLM2-135M-Instruct (about 4 s)."""
    return load_tokenizer(Model(path=smollm2_path), Path.cwd())


@pytest.fixture
def with_template() -> Callable[[str], Any]:
    """The tiny tokenizer with another chat template."""

    def make(template: str) -> Any:
        tokenizer = build_tokenizer()
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[[Iterable[dict[str, Any]]], str]:
    """Write rows to a file and return its path."""

    def write(rows: Iterable[dict[str, Any]]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
