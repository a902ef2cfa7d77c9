"""Models that see are merged tensor by tensor, and the report tells their parts apart."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoProcessor

from posttrain.merge.run import run
from posttrain.models.load import load
from posttrain.models.save import save
from posttrain.models.vision import find_part
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Model
from posttrain.run.directory import RunDirectory


def test_a_merge_of_models_that_see(tmp_path: Path) -> None:
    """Of the base's language model moved by 1 and its tower by 2, half of each: a mean with a base of their own."""
    for name, part, step in (("base", None, 0.0), ("words", "language", 1.0), ("eyes", "vision", 2.0)):
        loaded = load(Model(path="tiny-vision"), tmp_path)
        with torch.no_grad():
            for key, weight in loaded.model.named_parameters():
                weight.add_(step if find_part(key) == part else 0.0)
        save(loaded, tmp_path / name, verify=False)
    recipe = load_dict(
        {
            "stage": "merge",
            "merge_method": "task_arithmetic",
            "base_model": "base",
            "models": [{"model": name, "parameters": {"weight": 0.5}} for name in ("words", "eyes")],
        },
        base_dir=tmp_path,
        where="test",
    ).recipe
    with RunDirectory.open(tmp_path / "run", name="run", text="", resolved={}) as directory:
        summary = run(recipe, directory)
    counts = summary["changed_by_part"]
    assert counts["projector"] == [0, 4]
    assert counts["language"][0] == counts["language"][1] > 0 and counts["vision"][0] == counts["vision"][1] > 0
    merged, base = (load(Model(path=str(tmp_path / name)), tmp_path).model for name in ("run/final", "base"))
    for key, weight in merged.named_parameters():
        moved = {"language": 0.5, "vision": 1.0, "projector": 0.0}[find_part(key)]
        assert torch.allclose(weight, base.get_parameter(key) + moved, atol=1e-5), key
    assert AutoProcessor.from_pretrained(tmp_path / "run" / "final").image_token == "<image>"
