"""The runner as a module, its adapters loaded once, and what the shipped vectors compute to."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vector_runner", HERE / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def adapters(runner: ModuleType) -> dict[str, Any]:
    return runner.load_adapters()


@pytest.fixture(scope="session")
def vectors(runner: ModuleType) -> dict[str, list[dict[str, Any]]]:
    return runner.load_vectors(HERE)


@pytest.fixture(scope="session")
def interface() -> dict[str, Any]:
    return json.loads((HERE / "interface.json").read_text())
