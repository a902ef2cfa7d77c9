"""Scripts and scorers for the tests of rewards."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.recipe.sections import Reward, Scoring
from posttrain.verify.score import Sample, Scorer


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Write a reward script and return its path."""

    def write(text: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def scorer() -> Iterator[Callable[..., Scorer]]:
    """Make scorers, closed at the end: `scorer(reward, ..., max_error_rate=1.0)`; a reward is a dict or its `use`."""
    made: list[Scorer] = []

    def make(*rewards: dict[str, Any] | str, base_dir: Path | None = None, **scoring: Any) -> Scorer:
        sections = [Reward.model_validate({"use": r} if isinstance(r, str) else r) for r in rewards]
        made.append(Scorer(sections, Scoring.model_validate({"workers": 1, **scoring}), base_dir))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    """One sample a row, with uids r0, r1, ... and groups of `group_size`."""

    def make(rows: list[dict[str, Any]], completion: str = "x", group_size: int = 4) -> list[Sample]:
        return [Sample(completion, {"uid": f"r{i}", **row}, group=i // group_size) for i, row in enumerate(rows)]

    return make
