"""What makes tiny runs short: slow parts, a third of such a run, that other folders test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.models import save
from posttrain.models.load import LoadedModel
from posttrain.run import environment

COMMIT = functools.cache(environment.git)


def skip_parts_tested_elsewhere(replace: Callable[[Any, str, Any], None]) -> None:
    """The git state of the repository (tests/run) is read once, the saved model (tests/models) writes few tokens, and
    a plain `tiny` is reloaded after the first run only. replace: `setattr`, or that of a monkeypatch."""
    verify, found = save.verify_folder, dict[str, Any]()

    def verify_once(loaded: LoadedModel, folder: Path, compare: save.Compare) -> dict[str, Any]:
        if loaded.source != "tiny" or loaded.is_lora or loaded.half is not None or loaded.is_sharded:
            return verify(loaded, folder, compare)
        found.update(found or verify(loaded, folder, compare))
        return dict(found)

    replace(environment, "git", COMMIT)
    replace(save, "NEW_TOKENS", 4)
    replace(save, "verify_folder", verify_once)
