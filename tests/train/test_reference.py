"""The frozen reference of full training: it computes what the policy did, in half the memory, and can be offloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.models.load import LoadedModel
from posttrain.train.objective import Objective
from posttrain.train.reference import describe_reference, frozen_copy, reference_policy
from tests.preset_objectives import preset_recipe


def llama(tied: bool) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_half_precision_linear_weights_change_no_bit(tied: bool) -> None:
    """Autocast rounds them at every use: rounded once they give the same products. A tied head stays in float32."""
    model, ids = llama(tied), torch.arange(12)[None]
    frozen: Any = frozen_copy(model, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(frozen(ids).logits, model(ids).logits)
    assert frozen.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert frozen.model.embed_tokens.weight.dtype == frozen.model.norm.weight.dtype == torch.float32
    assert frozen.lm_head.weight.dtype == (torch.float32 if tied else torch.bfloat16)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all(p.dtype == torch.float32 for p in frozen_copy(model, None).parameters())


def test_offloaded_reference_equals_the_starting_policy() -> None:
    """On a CPU it is not moved: the same storages before, inside and after. See tests/gpu."""
    model = llama(True)
    start = [p.detach().clone() for p in model.parameters()]
    reference = reference_policy(LoadedModel(model, None, (1,), 0, "test"), offload=True)
    places = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        with reference() as frozen:
            assert not torch.is_grad_enabled()
            assert all(torch.equal(a, b) for a, b in zip(frozen.parameters(), start, strict=True))
        places.append([p.data_ptr() for p in frozen.parameters()])
    assert places[0] == places[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "reference model: none, because no term of the loss or the reward uses one"),
        ({"kl": {"coef": 0.01}}, "reference: the starting policy (base); KL: k3, coef 0.01, in the loss"),
        (
            {"kl": {"coef": 0.1, "use": "k2", "where": "reward", "reference": "runs/teacher/final"}},
            "reference: runs/teacher/final (kl.reference); KL: k2, coef 0.1, in the reward",
        ),
        (
            {"regularisers": [{"use": "forward_kl", "coef": 0.1}]},
            "reference: the starting policy (base)",
        ),
    ],
)
def test_run_header_names_the_reference(changes: dict[str, Any], said: str) -> None:
    recipe = preset_recipe("grpo", **changes)
    assert describe_reference(recipe, Objective.from_recipe(recipe).needs, "base") == said
