"""Program for `test_compiled`: one micro-batch through compiled layers.

Prints what torch had to compile, and the relative difference of its gradients from those of eager layers.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import varlen_on_cpu
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters

from posttrain.models import tiny
from posttrain.recipe.sections import Model
from posttrain.train import attention
from posttrain.train.collate import Sequences
from posttrain.train.compiled import compile_layers
from posttrain.train.logprobs import completion_logprobs

attention.varlen_attn = varlen_on_cpu.varlen_attn  # type: ignore[assignment]
attention.has_kernel = lambda _: True
model: Any = get_peft_model(tiny.build(0)[0], LoraConfig(r=4, target_modules="all-linear"))
assert attention.use_packed_attention(model)
rows = Sequences(((1, 2, 3, 4, 5), (6, 7, 8), (9, 10, 11, 12)), (2, 2, 2))


def compute_gradients() -> torch.Tensor:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        completion_logprobs(model, rows, 3, packed=True)[0].sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


eager = compute_gradients()
with compile_layers(model, Model(path="tiny", compile=True))():
    gap = float((compute_gradients() - eager).norm() / eager.norm())
found = counters["inductor"]
print(json.dumps({"compiled": found["fxgraph_cache_miss"], "found": found["fxgraph_cache_hit"], "gap": gap}))
