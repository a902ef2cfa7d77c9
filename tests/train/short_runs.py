"""What makes tiny runs short: slow parts, a third of such a run, that other folders test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.models import save
from posttrain.models.adapters import causal_of
from posttrain.models.load import LoadedModel
from posttrain.rollout import hf
from posttrain.run import environment

COMMIT = functools.cache(environment.git)


def skip_parts_tested_elsewhere(replace: Callable[[Any, str, Any], None]) -> None:
    """The git state of the repository (tests/run) is read once, the saved model (tests/models) writes few tokens, a
    `tiny` is reloaded after the first run only, with an adapter after the first run of each model section, and an
    architecture samples once without and with a cache before rollouts. replace: `setattr`, or that of a monkeypatch."""
    verify, found = save.verify_folder, dict[str, dict[str, Any]]()
    measure, gaps = hf.cache_gap, dict[tuple[type, Any], float]()

    def measure_once(model: Any, pad_id: int) -> float:
        key = (type(causal_of(model)), model.dtype)
        gaps[key] = gaps[key] if key in gaps else measure(model, pad_id)
        return gaps[key]

    def verify_once(loaded: LoadedModel, folder: Path, compare: save.Compare) -> dict[str, Any]:
        if loaded.source != "tiny" or loaded.half is not None or loaded.is_sharded or len(loaded.adapters) > 1:
            return verify(loaded, folder, compare)
        kind = repr(loaded.origin and loaded.origin.section) if loaded.is_lora else ""
        if kind not in found:
            found[kind] = verify(loaded, folder, compare)
        return dict(found[kind])

    replace(environment, "git", COMMIT)
    replace(save, "NEW_TOKENS", 4)
    replace(save, "verify_folder", verify_once)
    replace(hf, "cache_gap", measure_once)
