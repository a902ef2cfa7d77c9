"""Training of mixtures of experts: the dtype of their products, and the load balance of their routers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from posttrain.errors import ModelError, RecipeError
from posttrain.models import adapters, experts, weights
from posttrain.models.load import load
from posttrain.models.precision import keep_master_weights
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Lora, Model
from posttrain.rollout import vllm_start
from posttrain.train import rl, sft
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import Extras, completion_scores

from .families import family, save_family

KINDS = ("mixtral", "qwen3_moe", "gpt_oss")
ROWS = Sequences(((5, 6, 7, 8, 9), (11, 12, 13), (21, 22, 23, 24, 25, 26, 27)), (2, 1, 3))


def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """Record the dtypes of both factors of each grouped product from here on."""
    found: list[tuple[torch.dtype, torch.dtype]] = []
    product = functional.grouped_mm

    def grouped(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        found.append((a.dtype, b.dtype))
        return product(a, b, **more)

    monkeypatch.setattr(functional, "grouped_mm", grouped)
    return found


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_compute_in_the_product_dtype(kind: str, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Master weights and adapters are float32; products are in bfloat16, and gradients are float32 again."""
    model = family(kind).to(torch.bfloat16)
    if lora:
        model = adapters.add(model, Lora(rank=2))
    assert keep_master_weights(model) == torch.bfloat16
    types = seen(monkeypatch)
    ids = torch.arange(5, 12)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(input_ids=ids, use_cache=False).logits
        half.float().square().mean().backward()
    assert set(types) == {(torch.bfloat16, torch.bfloat16)} and len(types) >= 4
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and "experts" in name}
    assert trained or (kind == "gpt_oss" and lora), "PEFT's all-linear knows the experts of Mixtral and Qwen MoE"
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained.values())
    types.clear()
    exact = model.float()(input_ids=ids, use_cache=False).logits
    assert set(types) == {(torch.float32, torch.float32)}, "without autocast nothing is cast"
    assert float((half.float() - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize(
    ("kind", "packed"), [*((kind, False) for kind in KINDS), ("mixtral", True), ("qwen3_moe", True)]
)
def test_router_loss_equals_transformers_per_row(kind: str, packed: bool) -> None:
    """With one layer, transformers' mean over all tokens of all layers equals ours. Padding and filler tokens do not
    count."""
    model = family(kind, num_hidden_layers=1, **({"layer_types": ["full_attention"]} if kind == "gpt_oss" else {}))
    assert not packed or use_packed_attention(model)
    found = completion_scores(model, ROWS, 4, packed=packed, fill=8, extras=Extras(router=True))["router_loss"]
    for row, value in zip(ROWS.ids, found, strict=True):
        out = model(input_ids=torch.tensor([row]), use_cache=False, output_router_logits=True)
        text = model.config
        wanted = load_balancing_loss_func(out.router_logits, text.num_experts, text.num_experts_per_tok)
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    found.sum().backward()
    routers = [p.grad for name, p in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))]
    assert routers and all(g is not None and g.abs().max() > 0 for g in routers)


def test_model_without_a_router_is_refused() -> None:
    assert experts.experts_a_token(family("mixtral")) == 2
    for kind in ("llama", "deepseek_v3"):  # the second balances its load by a bias, without a loss in transformers
        with pytest.raises(ModelError, match="no router whose load could be balanced"):
            experts.experts_a_token(family(kind))


REWARD = """
def spread(completion):
    return sum(map(ord, completion)) % 97 / 97
"""


@pytest.fixture
def ran(tmp_path: Path, rows_of: Any) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that runs rl on a small mixture of experts; keyword arguments change sections of the recipe."""
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": str(2 * i)}) for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    base: dict[str, Any] = {
        "stage": "rl",
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
        "rewards": [{"use": "rewards.py:spread"}],
        "scoring": {"workers": 1},
        "run": {"steps": 2},
    }

    def run(name: str, kind: str, **changes: Any) -> list[dict[str, Any]]:
        model = {"path": str(save_family(kind, tmp_path / kind)), **changes.pop("model", {})}
        recipe = load_dict({**base, "model": model, **changes}, base_dir=tmp_path, where="test").recipe
        found: list[dict[str, Any]] = rows_of(rl.run, recipe, name)
        return found

    return run


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_mixture_of_experts_trains_and_is_saved(kind: str, lora: Any, ran: Any, tmp_path: Path) -> None:
    """The engine uses the trainer's own model; the final model is loaded again by transformers, or PEFT."""
    rows = ran("run", kind, model={"lora": lora}, optim={"lr": 1e-2}, batch={"minibatches": 2})
    assert all(row["grad_norm"] > 0 and row["updates"] == 2 and row["mismatch/max"] < 1e-3 for row in rows)
    assert (tmp_path / "run" / "final" / ("adapter_config.json" if lora else "model.safetensors")).is_file()


def test_router_loss_does_not_depend_on_micro_batches(ran: Any) -> None:
    """Its denominator is that of the whole update; with a coefficient it changes the router whatever the rewards."""
    term = [{"use": "router_balance", "coef": 0.5}]
    whole, cut, without = (
        ran(name, "mixtral", batch={"minibatches": 2, "micro_tokens": tokens}, regularisers=terms)
        for name, tokens, terms in (("whole", 10000, term), ("cut", 30, term), ("without", 10000, []))
    )
    for one, other in zip(whole, cut, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)
    assert whole[0]["router_loss"] > 2 and "router_loss" not in without[0], "an even load of 2 of 4 experts gives 2"
    assert abs(whole[0]["loss"] - without[0]["loss"] - 0.5 * whole[0]["router_loss"]) < 0.05


def test_router_loss_without_a_router_is_refused(ran: Any) -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM has no router"):
        ran("run", "llama", regularisers=[{"use": "router_balance", "coef": 0.01}])


def test_sft_router_loss_coefficient(sft_recipe: Any, rows_of: Any, tmp_path: Path) -> None:
    """The model's own is 0.001. A larger one shows in the loss; it is refused for models without a router loss."""
    base, dense = (str(save_family(kind, tmp_path / kind)) for kind in ("mixtral", "llama"))
    losses = [
        rows_of(
            sft.run, sft_recipe(model={"path": base}, objective={"router_aux_loss": coef}, run={"steps": 1}), str(coef)
        )[0]["loss"]
        for coef in (0.0, 0.5, 1.0)
    ]
    assert losses[2] - losses[0] == pytest.approx(2 * (losses[1] - losses[0]), rel=1e-3) and losses[1] > losses[0] + 0.9
    weighed = {"path": base}, {"use": "dft", "router_aux_loss": 0.1}, "beside an objective with weights of tokens"
    for model, objective, why in (({"path": dense}, {"router_aux_loss": 0.1}, "no router"), weighed):
        with pytest.raises(ModelError, match=f"router_aux_loss does nothing: .*{why}"):
            rows_of(sft.run, sft_recipe(model=model, objective=objective), why[:4])


def test_expert_adapters_are_refused_before_vllm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters on experts are products with one tensor for all experts; vLLM has one tensor per expert."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    everywhere = adapters.add(family("mixtral"), Lora(rank=2)).get_base_model()
    with pytest.raises(RecipeError, match=r"adapter on experts .*\n.*merge_adapter: true"):
        vllm_start.check_adapter(everywhere)
    attention = adapters.add(family("mixtral"), Lora(rank=2, targets=["q_proj", "v_proj"])).get_base_model()
    vllm_start.check_adapter(attention)
    vllm_start.check_adapter(adapters.add(family("llama"), Lora(rank=2)).get_base_model())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"on a CPU, vLLM cannot load an adapter .*\n.*merge_adapter: true"):
        vllm_start.check_adapter(attention)
    vllm_start.check_experts(family("mixtral", intermediate_size=64).config)
    with pytest.raises(RecipeError, match="experts with 48 hidden units"):
        vllm_start.check_experts(family("mixtral", intermediate_size=48).config)


def test_base_weights_under_an_adapter_have_checkpoint_names(tmp_path: Path) -> None:
    """As vLLM reads them: no `base_layer` of PEFT, and one tensor per expert projection."""
    for kind in ("mixtral", "qwen3_moe"):
        folder = save_family(kind, tmp_path / kind)
        loaded = load(Model(path=str(folder), lora=Lora(rank=2), device="cpu"), tmp_path, training=True)
        weights.write_base(loaded, weights.write_config(loaded, tmp_path / "base"), torch.float32)
        stored, written = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "base"))
        assert written.keys() == stored.keys()
        assert all(torch.equal(written[name], stored[name]) for name in stored)
