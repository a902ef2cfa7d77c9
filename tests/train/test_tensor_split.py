"""Tensor parallelism: ranks that divide the columns and rows of every layer compute what one whole model computes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from posttrain.errors import ModelError
from posttrain.train import tensor_split
from posttrain.train.tensor_split import Divider, Part

from .families import family, save_family
from .test_mesh import LORA, RECIPES, Values, assert_equal, folder, rows, save_model

__all__ = ["folder", "rows"]  # fixtures

KEYS: dict[tuple[str, str], Values] = {
    ("rl", "tiny"): {"regularisers": [{"use": "entropy_bonus", "coef": 0.1}]},  # reads all of the vocabulary
    # its router loss is a mean over micro-batches, which must equal those of one process
    ("sft", "qwen3_moe"): {"batch": {"size": 8, "micro_size": 2, "packing": True}},
}
MESHES = {
    "tensor": (2, {"tensor": 2}),
    "shard": (4, {"tensor": 2, "shard": 2}),
    "context": (4, {"tensor": 2, "context": 2}),
    "copies": (4, {"tensor": 2, "replicate": 2}),
}


def test_two_ranks_divide_each_layer_and_the_head(rows: Any, folder: Path) -> None:
    """All weights are read in slices from files; one process continues with the whole model."""
    path = save_model(folder)
    expected = rows("sft", 1, steps=3, path=path)
    assert_equal(rows("sft", 2, steps=2, name="run", path=path, parallel={"tensor": 2}), expected[:2])
    assert_equal(rows("sft", 1, steps=3, name="run", resume=True, path=path), expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["tiny", "qwen3_moe"])
@pytest.mark.parametrize("stage", RECIPES)
def test_meshes_with_divided_layers_match_one_process(
    rows: Any, stage: str, kind: str, model: Values, folder: Path
) -> None:
    path = save_model(folder) if kind == "tiny" else str(save_family(kind, folder / kind))
    keys = KEYS.get((stage, kind), {})
    expected = rows(stage, 1, path=path, keys=keys, **model)
    for ranks, parallel in MESHES.values():
        assert_equal(rows(stage, ranks, path=path, parallel=parallel, keys=keys, **model), expected)


@pytest.mark.slow
def test_divided_experts_are_saved_in_their_layout(rows: Any, folder: Path) -> None:
    """Each rank has part of each half of a weight. Four ranks are followed by two that divide it evenly, then one."""
    path = str(save_family("qwen3_moe", folder / "moe"))
    keys = KEYS["sft", "qwen3_moe"]
    given: Values = {"path": path, "keys": keys, "name": "run"}
    expected = rows("sft", 1, path=path, keys=keys)
    for steps, (ranks, parallel) in enumerate([MESHES["shard"], MESHES["shard"], (2, {"shard": 2})], 1):
        found = rows("sft", ranks, steps=steps, resume=steps > 1, parallel=parallel, **given)
        assert_equal(found, expected[:steps])
    assert_equal(rows("sft", 1, resume=True, **given), expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
def test_compiled_divided_layers_match_whole_layers(rows: Any, model: Values) -> None:
    expected = rows("sft", 1, steps=3, **model)
    assert_equal(rows("sft", 2, steps=3, parallel={"tensor": 2}, compile=True, **model), expected)


# The families of docs/architectures.md that transformers has a plan for, and a few more.
FAMILIES = {
    "tensor": "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text phi phi3 olmo olmo2 olmo3 olmoe granite smollm3 glm"
    " glm4 glm4_moe deepseek_v2 deepseek_v3 qwen2_moe qwen3_moe mixtral cohere cohere2 gpt_neox starcoder2 ernie4_5"
    " exaone4 qwen3_next",
    "expert": "olmoe glm4_moe deepseek_v2 deepseek_v3 gpt_oss qwen2_moe qwen3_moe mixtral phimoe qwen3_next minimax_m2",
}


@pytest.mark.slow
@pytest.mark.parametrize("key", FAMILIES)
def test_divided_families_match_whole_models(answer: Any, key: str) -> None:
    """Log-probs within 1e-5 and gradient norms within 2e-6, whatever the plan contains."""
    assert answer("ranked", work="split_families", key=key, kinds=FAMILIES[key].split(), ranks=2) == [0, 0]


@pytest.mark.slow
def test_divided_trainable_activation_is_refused(rows: Any, folder: Path) -> None:
    """Apertus has two numbers per layer; the plan omits them, though each rank has only the gradient of its columns."""
    path = str(save_family("apertus", folder / "model"))
    with pytest.raises(AssertionError):
        rows("sft", 2, steps=1, name="run", path=path, parallel={"tensor": 2})
    told = (
        "transformers' plan for apertus leaves out model.layers.0.mlp.act_fn.alpha_p, whose gradient differs between"
        " ranks"
    )
    assert told in (folder / "run" / "status.json").read_text()


def test_tensor_parallel_plan_is_followed_or_refused() -> None:
    check = tensor_split.check
    with torch.device("meta"):
        llama = family("llama")
        check(llama, 2)
        with pytest.raises(ModelError, match=r"tensor: 4 GPUs cannot divide the 2 num_key_value_heads of this llama"):
            check(llama, 4)
        with pytest.raises(ModelError, match=r"no plan of tensor parallelism for the layers of gpt2"):
            check(family("gpt2"), 2)
        narrow = family("llama", intermediate_size=47)
    with pytest.raises(ModelError, match=r"cannot divide model\.layers\.0\.mlp\.gate_proj\.weight \(47, 32\)"):
        check(narrow, 2)


def test_adapter_biases_are_divided_like_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks run in turn: column outputs are concatenated and row terms are summed."""
    monkeypatch.setattr(tensor_split, "sum_parts", lambda x, _: x)
    x, whole = torch.randn(3, 8), build_adapted_layer()
    with torch.no_grad():
        columns = [run_part(whole, rank, Part(0), x) for rank in range(2)]
        rows = [run_part(whole, rank, Part(1), x.chunk(2, -1)[rank]) for rank in range(2)]
        expected = whole(x)
    torch.testing.assert_close(torch.cat(columns, -1), expected)
    torch.testing.assert_close(rows[0] + rows[1] - whole.base_layer.bias, expected)  # after each sum


def build_adapted_layer() -> Any:
    """Return a linear layer, 8 to 6, under an adapter with a bias; no number is 0."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["0"], lora_bias=True)
    module = get_peft_model(nn.Sequential(nn.Linear(8, 6)), config).base_model.model[0]
    for weight in module.parameters():
        nn.init.normal_(weight)
    return module


def run_part(whole: Any, rank: int, part: Part, x: torch.Tensor) -> torch.Tensor:
    module, divider = copy.deepcopy(whole), divider_of(rank)
    base = module.base_layer
    base.weight = nn.Parameter(part.of(base.weight, rank, 2))
    if part.dim == 0:
        base.bias = nn.Parameter(part.of(base.bias, rank, 2))
    connect = divider._connect_columns if part.dim == 0 else divider._connect_rows
    connect(module, base, "colwise" if part.dim == 0 else "rowwise")
    assert not any(tensor_split.has_whole_gradient(w) for n, w in module.named_parameters() if "lora" in n)
    found: torch.Tensor = module(x)
    return found


def divider_of(rank: int) -> Divider:
    """Return a divider without a process group."""
    divider = Divider.__new__(Divider)
    divider.rank, divider.count, divider.group, divider.head, divider.entered = rank, 2, None, None, None
    return divider


def test_block_input_is_held_only_until_the_row_parallel_layer() -> None:
    """Queries, keys and values share the input; a pass without gradient and the output head hold nothing."""
    divider = divider_of(0)
    states = torch.ones(2, 8, requires_grad=True) * 1
    with torch.no_grad():
        divider._enter(states)
    assert divider.entered is None
    assert divider._enter(states) is divider._enter(states) and divider._enter(states).requires_grad
    divider.entered = None
    divider.head = head = nn.Linear(8, 4)
    divider._connect_columns(head, head, "colwise_gather_output")
    assert tensor_split.vocabulary_shard(head).logits(states).requires_grad  # type: ignore[union-attr]
    assert divider.entered is None


def test_tied_embeddings_are_divided_with_the_head() -> None:
    """A head stays whole if the vocabulary cannot be divided evenly."""
    with torch.device("meta"):
        alone, tied = (family("llama", tie_word_embeddings=tie) for tie in (False, True))
        odd = family("llama", vocab_size=111)
    assert tensor_split.plan_of(alone, 2)["lm_head"] == "colwise_gather_output"
    assert "model.embed_tokens" not in tensor_split.plan_of(alone, 2)
    assert tensor_split.plan_of(tied, 2)["model.embed_tokens"] == tensor_split.EMBEDDING
    assert "lm_head" not in tensor_split.plan_of(odd, 2)


def test_fused_weight_is_divided_within_each_block() -> None:
    """Gate and up projections of experts are concatenated: rows 0 to 3 and 4 to 7."""
    whole = torch.arange(8)[None, :, None].expand(2, 8, 3)
    assert Part(1, 2).of(whole, 1, 2)[0, :, 0].tolist() == [2, 3, 6, 7]
    assert Part(1).of(whole, 1, 2)[0, :, 0].tolist() == [4, 5, 6, 7]
