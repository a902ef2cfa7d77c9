"""Compiled layers compute what eager ones do, in as few graphs as possible, and only while training."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters

from posttrain.errors import ModelError, RecipeError
from posttrain.models import tiny
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Model
from posttrain.run.metrics import read_metrics
from posttrain.train import attention, rl, sft
from posttrain.train.attention import use_packed_attention
from posttrain.train.compiled import check, compiled, layers_of
from posttrain.train.logprobs import Sequences, completion_logprobs

COMPILED = Model(path="tiny", compile=True)


def sequences(lengths: list[int]) -> Sequences:
    draw = torch.Generator().manual_seed(len(lengths))
    rows = tuple(tuple(torch.randint(0, 60, (n,), generator=draw).tolist()) for n in lengths)
    return Sequences(rows, (2,) * len(rows))


def passed(model: Any, lengths: list[int]) -> Tensor:
    """Log-probs and gradients of one packed micro-batch, flat."""
    model.zero_grad()
    logp, _ = completion_logprobs(model, sequences(lengths), max(lengths) - 2, packed=True)
    logp.sum().backward()
    return torch.cat([logp.detach().flatten(), *(p.grad.flatten() for p in model.parameters() if p.requires_grad)])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_packed_batches_of_all_shapes_share_one_graph_a_part_and_equal_eager() -> None:
    """Here rows attend one by one, and layers are cut there: no frame is compiled after the first micro-batch."""
    model: Any = tiny.build(0)[0]
    use_packed_attention(model)
    batches = [[29, 33], [29, 9, 8], [8, 22, 37, 5], [24, 7, 15, 11, 20]]
    eager = [passed(model, lengths) for lengths in batches]
    torch.compiler.reset()
    counters.clear()
    with compiled(model, COMPILED)():
        first = passed(model, batches[0])
        frames = counters["frames"]["ok"]
        others = [passed(model, lengths) for lengths in batches[1:]]
    assert frames > 0 and counters["frames"]["ok"] == frames
    for found, expected in zip([first, *others], eager, strict=True):
        assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert torch.equal(passed(model, batches[0]), eager[0]), "eager again outside"
    assert counters["frames"]["ok"] == frames


@torch.library.custom_op("posttrain_tests::varlen", mutates_args={})
def varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Causal attention of rows behind each other, [tokens,heads,dim]: stands in for torch's kernel on a CPU."""
    assert longest == int(ends.diff().max())
    rows = zip(*(x.split(ends.diff().tolist()) for x in (q, k, v)), strict=True)
    return torch.cat([(shares(a, b) @ c.transpose(0, 1)).transpose(0, 1) for a, b, c in rows])


def shares(q: Tensor, k: Tensor) -> Tensor:
    """What each token [heads,L,L] of one row [L,heads,dim] takes of each."""
    products = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return products.masked_fill(~torch.ones(len(q), len(q), dtype=torch.bool).tril(), float("-inf")).softmax(-1)


@torch.library.custom_op("posttrain_tests::varlen_backward", mutates_args={})
def varlen_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> list[Tensor]:
    parts = []
    for a, b, c, g in zip(*(x.split(ends.diff().tolist()) for x in (q, k, v, grad)), strict=True):
        share, to_share = shares(a, b), torch.einsum("qhd,khd->hqk", g, c)
        to_products = share * (to_share - (share * to_share).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        sums = ("hqk,khd->qhd", to_products, b), ("hqk,qhd->khd", to_products, a), ("hqk,qhd->khd", share, g)
        parts.append([torch.einsum(*one) for one in sums])
    return [torch.cat(one) for one in zip(*parts, strict=True)]


varlen.register_fake(lambda q, *_: torch.empty_like(q))
varlen_backward.register_fake(lambda _, q, k, v, *__: [torch.empty_like(x) for x in (q, k, v)])
varlen.register_autograd(
    lambda ctx, grad: (*varlen_backward(grad.contiguous(), *ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:4]),  # noqa: ARG005  torch passes names
)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.usefixtures("without_code")
def test_with_a_kernel_for_all_rows_a_layer_is_one_graph(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is open to the numbers of rows and tokens. The first layer's input has no gradient under LoRA."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, _: Tensor, longest: int, *__: int, **___: Any) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        return varlen(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), ends, longest)

    model: Any = tiny.build(0)[0]
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        nn.init.normal_(model.base_model.model.model.layers[0].mlp.up_proj.lora_B["default"].weight)
    assert use_packed_attention(model)
    batches = [[29, 33], [29, 9, 8], [8, 22, 37, 5], [24, 7, 15, 11, 20]]
    by_row = [passed(model, lengths) for lengths in batches]
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "has_kernel", lambda _: True)
    with compiled(model, COMPILED)():
        found = [passed(model, lengths) for lengths in batches]
    assert counters["stats"]["unique_graphs"] == 1 + lora
    assert not counters["graph_break"]
    for one, expected in zip(found, by_row, strict=True):
        assert float((one - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced, forward and backward, but run as they are: what is tested is where layers are switched."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()


@pytest.mark.usefixtures("without_code")
def test_an_rl_run_and_its_checkpointed_layers_compute_the_same(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Two minibatches: passes with and without gradient."""
    (tmp_path / "r.py").write_text("def r(completion):\n    return sum(c.isdigit() for c in completion) / 9\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(8)))
    found = {}
    for switched in (False, True):
        model = {"path": "tiny", "gradient_checkpointing": True, "compile": switched}
        recipe = load_dict(
            {
                "stage": "rl",
                "model": model,
                "data": {"source": "rows.jsonl"},
                "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6},
                "rewards": [{"use": "r.py:r"}],
                "scoring": {"workers": 1},
                "batch": {"minibatches": 2, "micro_tokens": 40},
                "optim": {"lr": 1e-3},
                "run": {"steps": 1},
            },
            base_dir=tmp_path,
            where="test",
        ).recipe
        with opened(f"run-{switched}") as directory:
            rl.run(recipe, directory)  # type: ignore[arg-type]
        found[switched] = read_metrics(tmp_path / f"run-{switched}")
        assert bool(counters["frames"]["ok"]) == switched
    for row, other in zip(found[True], found[False], strict=True):
        for name in ("loss", "grad_norm", "entropy", "reward"):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


@pytest.mark.usefixtures("without_code")
def test_sft_takes_the_same_key(sft_recipe: Callable[..., Any], rows_of: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {"run": {"steps": 1}, "batch": {"packing": True}}
    eager = rows_of(sft.run, sft_recipe(**settings), "eager")
    assert not counters["frames"]["ok"]
    graphs = rows_of(sft.run, sft_recipe(**settings, model={"compile": True}), "compiled")
    assert counters["frames"]["ok"]
    assert [row["loss"] for row in graphs] == pytest.approx([row["loss"] for row in eager], rel=1e-5)


def test_what_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="Linear does not say"):
        layers_of(nn.Linear(2, 2))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RecipeError, match=r"needs a C\+\+ compiler"):
        check(COMPILED, torch.device("cpu"))
    check(Model(path="tiny"), torch.device("cpu"))
