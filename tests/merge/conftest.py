"""Small model folders to merge, and a run directory for the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models import tiny
from posttrain.recipe.stages import MergeRecipe
from posttrain.run.directory import RunDirectory


def save_tiny(
    folder: Path, seed: int, *, dtype: torch.dtype = torch.float32, shard: str = "5GB", **config: Any
) -> Path:
    """Save a tiny model and its tokenizer with transformers."""
    model, tokenizer = tiny.build(seed)
    for key, value in config.items():
        setattr(model.config, key, value)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _short_library_calls(short_library_calls: None) -> None: ...


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with the models `base`, `a` and `b`."""
    for seed, name in enumerate(("base", "a", "b")):
        save_tiny(tmp_path / name, seed)
    return tmp_path


@pytest.fixture
def merge(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the stage on recipe values; models are found in tmp_path; the result is in
    tmp_path/run/final."""
    from posttrain.merge.run import run

    def go(output: Path | None = None, resume: bool = False, **values: Any) -> dict[str, Any]:
        recipe = MergeRecipe.model_validate({"stage": "merge", **values})
        recipe._base_dir = tmp_path
        with RunDirectory.open(
            output or tmp_path / "run", name="merge", text="", resolved=values, resume=resume
        ) as directory:
            return run(recipe, directory)

    return go
