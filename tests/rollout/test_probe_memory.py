"""The probe of a sync, beside an engine that has most of the GPU, holds no second copy of the weights."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.models.load import load
from posttrain.recipe.sections import Model
from posttrain.rollout.probe import probe_ids, trainer_logps


class WeightCopies(TorchDispatchMode):
    """Counts the half-precision copies of weights that are alive at the same time."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.weights = {p.data_ptr() for p in model.parameters() if p.dim() == 2}
        self.alive: set[int] = set()
        self.made = self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.weights:
            key, self.made = self.made, self.made + 1
            self.alive.add(key)
            weakref.finalize(out, self.alive.discard, key)
            self.most = max(self.most, len(self.alive))
        return out


def test_probe_casts_one_weight_at_a_time() -> None:
    tiny = load(Model(path="tiny"), Path.cwd(), training=True)
    loaded = dataclasses.replace(tiny, half=torch.bfloat16)
    ids = probe_ids(loaded.tokenizer, 32)
    with WeightCopies(loaded.model) as copies:
        found = trainer_logps(loaded, loaded.model, ids)
    assert copies.made > 10
    assert copies.most <= 2

    with WeightCopies(loaded.model) as kept, torch.no_grad(), loaded.autocast():
        logits = loaded.model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    assert kept.most == kept.made  # copies alive in a training pass
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
    assert found == expected.tolist()
