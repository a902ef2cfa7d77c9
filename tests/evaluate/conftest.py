"""An evaluation of the tiny model with scripted completions: addition problems, graded by a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.evaluate import sampling
from posttrain.models import tiny
from posttrain.recipe.stages import EvalRecipe, GenerateRecipe
from posttrain.run.directory import RunDirectory

sys.path.append(str(Path(__file__).parents[1]))
from scripted_engines import ScriptedEngine

REWARD = """
def exact(completion: str, answer: str) -> float | None:
    if "crash" in completion:
        raise ValueError("crash")
    if "abstain" in completion:
        return None
    return float(f"<answer>{answer}</answer>" in completion)
"""


def values(**changes: Any) -> dict[str, Any]:
    """Recipe values: 6 problems, 4 samples each, 2 problems a chunk."""
    return {
        "stage": "eval",
        "model": {"path": "tiny"},
        "data": {"source": "problems.jsonl"},
        "sampling": {"max_new_tokens": 24},
        "engine": {"batch_size": 8},
        "rewards": [{"use": "score.py:exact"}],
        "scoring": {"workers": 1, "max_error_rate": 1.0},
        "eval": {"samples": 4, "k": [1, 2, 4], "bootstrap": 200},
        **changes,
    }


@pytest.fixture(scope="session", autouse=True)
def _short_library_calls(short_library_calls: None) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Problems 1+1 ... 1+6 and the reward script."""
    rows = [{"prompt": f"1+{i}", "answer": str(1 + i)} for i in range(1, 7)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text(REWARD)
    return tmp_path


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], ScriptedEngine]:
    """Replace the engine with one that follows a script: a function of (the row's `prompt` text, sample number)."""

    def use(script: Callable[[str, int], str]) -> ScriptedEngine:
        engine = ScriptedEngine(lambda prompt, i: script(str(prompt.row["prompt"]), i), tiny.build_tokenizer())
        monkeypatch.setattr(sampling, "make_engine", lambda *_, **__: engine)
        return engine

    return use


@pytest.fixture
def evaluate(folder: Path) -> Callable[..., dict[str, Any]]:
    """Run the stage in folder/NAME."""
    from posttrain.evaluate import generate, run

    def go(name: str = "run", *, resume: bool = False, **changes: Any) -> dict[str, Any]:
        recipe: EvalRecipe | GenerateRecipe
        if changes.get("stage") == "generate":
            resolved = changes
            recipe = GenerateRecipe.model_validate(changes)
        else:
            resolved = values(**changes)
            recipe = EvalRecipe.model_validate(resolved)
        recipe._base_dir = folder
        with RunDirectory.open(folder / name, name="eval", text="", resolved=resolved, resume=resume) as directory:
            if isinstance(recipe, GenerateRecipe):
                return generate.run(recipe, directory)
            return run.run(recipe, directory)

    return go


@pytest.fixture(autouse=True)
def _forked_workers(forked_workers: None) -> None:
    """Workers of rewards are forks; tests/verify tests how they start and end."""
