"""Models on disk: small ones built here, SmolLM2-135M from its GGUF once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models.load import LoadedModel, load
from posttrain.models.save import save
from posttrain.recipe.sections import Model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: tiny tensors are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _short_library_calls(short_library_calls: None) -> None: ...


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., LoadedModel]:
    """`load` with the section's keys; `training` is the default here."""

    def make(path: str | Path = "tiny", *, training: bool = True, seed: int = 0, **keys: Any) -> LoadedModel:
        section = Model.model_validate({"path": str(path), "device": "cpu", **keys})
        return load(section, tmp_path, seed=seed, training=training)

    return make


@pytest.fixture
def plain(tmp_path: Path, loaded: Callable[..., LoadedModel]) -> Path:
    """A directory with an ordinary model: `tiny`, saved to disk."""
    model = loaded()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save(model, tmp_path / "plain", verify=False)
    return tmp_path / "plain"


@pytest.fixture(scope="session")
def smollm2(smollm2_path: str) -> LoadedModel:
    """SmolLM2-135M-Instruct, dense float32, with a fresh LoRA adapter (12 s)."""
    return load(
        Model.model_validate({"path": smollm2_path, "device": "cpu", "lora": {"rank": 4}}), Path.cwd(), training=True
    )
