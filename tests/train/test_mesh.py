"""Device meshes: ranks that shard a model, in one or several replicas, with and without an adapter, compute what one
rank does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.errors import RecipeError
from posttrain.models import load, tiny
from posttrain.recipe.sections import Model, Parallel
from posttrain.recipe.training_sections import Optim
from posttrain.run.metrics import read_metrics
from posttrain.train import attention, optim, sft, sharding
from posttrain.train.attention import use_packed_attention
from posttrain.train.mesh import check_mesh, shard_ranks

Values = dict[str, Any]

DIGITS = "def digits(completion):\n    return sum(c.isdigit() for c in completion) / max(len(completion), 1)\n"
# Micro-batches that two and four ranks cannot divide evenly, so that some passes are idle.
RECIPES: dict[str, Values] = {
    "sft": {
        "data": {"source": "rows.jsonl"},
        "batch": {"size": 6, "micro_size": 2, "packing": True},
        "optim": {"lr": 3e-3},
    },
    "dpo": {"data": {"source": "pairs.jsonl"}, "batch": {"size": 3, "micro_size": 1}, "optim": {"lr": 1e-3}},
    "rl": {
        "algorithm": "grpo",
        "data": {"source": "pairs.jsonl"},
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 10},
        "rewards": [{"use": "digits.py:digits"}],
        "scoring": {"workers": 1, "correct_at": 0.15},
        "kl": {"coef": 0.05},
        "batch": {"micro_tokens": 48, "minibatches": 2},
        "optim": {"lr": 2e-3},
    },
}
LORA = {"lora": {"rank": 4}}


@pytest.fixture
def folder(sft_recipe: Any, dpo_recipe: Any, tmp_path: Path) -> Path:
    """Holds rows, pairs and a reward."""
    del sft_recipe, dpo_recipe  # they write the rows
    (tmp_path / "digits.py").write_text(DIGITS)
    return tmp_path


@pytest.fixture
def rows(answer: Callable[..., Any], folder: Path) -> Callable[..., list[Values]]:
    """Return the metrics of a run with this number of processes (ranked.py)."""

    def run(
        stage: str,
        ranks: int,
        *,
        steps: int = 5,
        name: str = "",
        resume: bool = False,
        keys: Values | None = None,
        **model: Any,
    ) -> Any:
        recipe = {"stage": stage, **RECIPES[stage], **(keys or {}), "model": {**{"path": "tiny"}, **model}}
        recipe["run"] = {"steps": steps, "save_every": 2}
        output = folder / (name or f"{stage}-{ranks}-{len(list(folder.iterdir()))}")
        job = {"recipe": recipe, "base_dirs": [str(folder)], "output": str(output), "resume": resume}
        assert answer("ranked", **job, ranks=ranks, lost_sync=None, engine=None) == [0] * ranks
        return read_metrics(output)

    return run


def assert_equal(found: list[Values], expected: list[Values]) -> None:
    """Assert losses and gradient norms equal within 1e-5; values that are 0 up to rounding, absolutely."""
    assert len(found) == len(expected) and all(row["grad_norm"] > 0 for row in expected)
    for row, other in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), (row["step"], name)


@pytest.mark.parametrize("stage", [pytest.param("sft", marks=pytest.mark.slow), "rl"])
def test_sharded_base_under_an_adapter_equals_the_unsharded(rows: Any, stage: str, folder: Path) -> None:
    """Two shards, read from files, that stop; one process resumes with the whole model, and two with shards again. The
    checkpoint and the final model contain only the adapter."""
    model = {**LORA, "path": save_model(folder)}
    expected = rows(stage, 1, steps=3, **model)
    assert_equal(rows(stage, 2, steps=1, name="run", parallel={}, **model), expected[:1])
    assert_equal(rows(stage, 1, steps=2, name="run", resume=True, **model), expected[:2])
    assert_equal(rows(stage, 2, steps=3, name="run", resume=True, shard=True, **model), expected)
    newest = folder / "run" / "checkpoints" / "step-00000003"
    assert (newest / "adapter_model.safetensors").is_file() and not (newest / "model.safetensors").exists()
    assert json.loads((folder / "run" / "summary.json").read_text())["save"]["kind"] == "adapter"


def save_model(folder: Path) -> str:
    """Write the tiny model to files."""
    model, tokenizer = tiny.build(0)
    model.save_pretrained(folder / "model", max_shard_size="200KB")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("stage", RECIPES)
def test_replicas_of_sharded_models_equal_the_unsharded_model(
    rows: Any, stage: str, model: Values, folder: Path
) -> None:
    model = {**model, "path": save_model(folder)}
    expected = rows(stage, 1, **model)
    assert_equal(rows(stage, 2, parallel={"shard": 2}, **model), expected)
    assert_equal(rows(stage, 4, parallel={"replicate": 2}, **model), expected)
    assert_equal(rows(stage, 4, parallel={"shard": 4}, **model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("stage", RECIPES)
def test_context_parallel_ranks_equal_one(rows: Any, stage: str, model: Values) -> None:
    """Context 2, alone and with two shards and two replicas of the weights. Adam amplifies rounding: SFT's rows are
    packed on one rank as well."""
    expected = rows(stage, 1, **model)
    for ranks, parallel in ((2, {"context": 2}), (4, {"context": 2}), (4, {"context": 2, "replicate": 2})):
        assert_equal(rows(stage, ranks, parallel=parallel, **model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
def test_compiled_layers_of_a_sharded_model_equal_the_unsharded(rows: Any, model: Values) -> None:
    expected = rows("sft", 1, steps=3, **model)
    assert_equal(rows("sft", 2, steps=3, parallel={}, compile=True, **model), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        ("sft", {}),
        ("sft", {"gradient_checkpointing": True, "activation_offloading": True}),
        ("dpo", {"parallel": {"context": 2}}),
        ("rl", {}),
        ("rl", {"engine": "vllm"}),
    ],
)
def test_sharded_4_bit_base_equals_the_unsharded(
    rows: Any, stage: str, more: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards that stop, and one process that resumes with the whole model. An engine with its own model (a stand-in
    for vLLM) gets the base dequantized."""
    pytest.importorskip("bitsandbytes")
    own = {"parallel": {}, **more}
    if "engine" in own:
        rollout = {**RECIPES["rl"]["rollout"], "engine": own.pop("engine")}
        monkeypatch.setitem(RECIPES, "rl", {**RECIPES["rl"], "rollout": rollout})
    parallel, model = own.pop("parallel"), {**LORA, "quantize": "nf4", **own}
    expected = rows(stage, 1, steps=3, **model)
    assert_equal(rows(stage, 2, steps=2, name="run", parallel=parallel, **model), expected[:2])
    assert_equal(rows(stage, 1, steps=3, name="run", resume=True, **model), expected)


def test_context_parallel_run_resumes_on_one_rank(rows: Any) -> None:
    expected = rows("dpo", 1, steps=3, **LORA)
    assert_equal(rows("dpo", 2, steps=2, name="run", parallel={"context": 2}, **LORA), expected[:2])
    assert_equal(rows("dpo", 1, steps=3, name="run", resume=True, **LORA), expected)


def test_replicas_reduce_gradients_once_per_update(sft_recipe: Any, opened: Any, monkeypatch: Any) -> None:
    """After the last of four micro-batches; the test of replicas checks the results."""
    told = list[bool]()
    monkeypatch.setattr(sharding, "sum_over_copies", lambda _, now: told.append(now))
    with opened() as directory:
        sft.run(sft_recipe(batch={"micro_size": 2}, run={"steps": 2}), directory)
    assert told == [False, False, False, True] * 2


@pytest.fixture
def shard_alone() -> Iterator[Callable[..., None]]:
    """Shard a model in this process, the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    yield lambda model, half=None: sharding.shard(model, mesh, half, set())
    dist.destroy_process_group()


def test_pass_over_half_precision_layers_has_half_precision_products(shard_alone: Any) -> None:
    """The packing trial opens no autocast for weights that are float32 on each rank."""
    model = load.load(Model(path="tiny"), Path(), training=True).model
    shard_alone(model, torch.bfloat16)
    assert model.dtype == torch.float32 and use_packed_attention(model)


def test_packing_trial_tolerates_the_rounding_of_half_precision_layers(shard_alone: Any, monkeypatch: Any) -> None:
    """Kernels round differently for a row alone and in a line. Weights are float32 in either case."""
    by_row = attention._attend_by_row
    monkeypatch.setattr(attention, "_attend_by_row", lambda *args: by_row(*args) * (1 + 2**-6))
    models = [load.load(Model(path="tiny"), Path(), training=True).model for _ in range(2)]
    for model, half in zip(models, (None, torch.bfloat16), strict=True):
        shard_alone(model, half)
    assert [use_packed_attention(model) for model in models] == [False, True]


class OperandTypes(TorchDispatchMode):
    """Collects the tensor subclasses that operations are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[type]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= set(types)
        return func(*args, **(kwargs or {}))


def test_divided_weights_are_updated_as_ordinary_tensors(shard_alone: Any) -> None:
    """AdamW's kernel takes all weights at once, for which DTensors take seconds."""
    divided, whole = (tiny.build(0)[0] for _ in range(2))
    shard_alone(divided)
    optimizers = [optim.build(model, Optim(lr=1e-2)) for model in (divided, whole)]
    for step in range(3):
        for one, other in zip(divided.parameters(), whole.parameters(), strict=True):
            other.grad = torch.randn(other.shape, generator=torch.Generator().manual_seed(step))
            one.grad = sharding.shard_like(other.grad, one)
        with OperandTypes() as operands:
            optimizers[0].step()
        optimizers[1].step()
    assert DTensor not in operands.found, "after the first step, which makes the moments"
    assert all(isinstance(state["exp_avg"], DTensor) for state in optimizers[0].state.values())
    for one, other in zip(divided.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one.to_local(), other)


def test_mesh_sizes_must_match_the_number_of_ranks() -> None:
    assert shard_ranks(Parallel(), 8) == shard_ranks(Parallel(context=4), 8) == 8
    assert shard_ranks(Parallel(replicate=2), 8) == shard_ranks(Parallel(shard=4, replicate=2), 8) == 4
    for parallel in (Parallel(shard=4), Parallel(replicate=3), Parallel(shard=8, replicate=2), Parallel(context=3)):
        with pytest.raises(RecipeError, match=r"does not fit the 8 processes of this run: shard \w+ x replicate \d"):
            shard_ranks(parallel, 8)
    check_mesh(Model(path="tiny"), 1)
    with pytest.raises(RecipeError, match="this is one"):
        check_mesh(Model(path="tiny", parallel=Parallel()), 1)
