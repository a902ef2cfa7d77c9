"""Compiled layers: same results as eager layers, few graphs, and used only while training."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from posttrain.errors import ModelError, RecipeError
from posttrain.models import tiny
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Model
from posttrain.run.metrics import read_metrics
from posttrain.train import rl, sft
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.compiled import check, compile_layers, layers_of
from posttrain.train.logprobs import completion_logprobs

COMPILED = Model(path="tiny", compile=True)


def sequences(lengths: list[int]) -> Sequences:
    draw = torch.Generator().manual_seed(len(lengths))
    rows = tuple(tuple(torch.randint(0, 60, (n,), generator=draw).tolist()) for n in lengths)
    return Sequences(rows, (2,) * len(rows))


def run_micro_batch(model: Any, lengths: list[int]) -> Tensor:
    """Return flat log-probs of one packed micro-batch, and gradients if enabled."""
    model.zero_grad()
    logp, _ = completion_logprobs(model, sequences(lengths), max(lengths) - 2, packed=True)
    if not torch.is_grad_enabled():
        return logp.flatten()
    logp.sum().backward()
    return torch.cat([logp.detach().flatten(), *(p.grad.flatten() for p in model.parameters() if p.requires_grad)])


@pytest.mark.usefixtures("without_code")
def test_packed_batches_of_all_shapes_share_graphs_and_equal_eager() -> None:
    """On a CPU rows attend one by one, with a graph break in each layer: no frame is compiled after the first
    micro-batch."""
    model: Any = tiny.build(0)[0]
    use_packed_attention(model)
    batches = [[29, 33], [29, 9, 8], [8, 22, 37, 5], [24, 7, 15, 11, 20]]
    eager = [run_micro_batch(model, lengths) for lengths in batches]
    with compile_layers(model, COMPILED)():
        first = run_micro_batch(model, batches[0])
        frames = counters["frames"]["ok"]
        others = [run_micro_batch(model, lengths) for lengths in batches[1:]]
    assert frames > 0 and counters["frames"]["ok"] == frames
    for found, expected in zip([first, *others], eager, strict=True):
        assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert torch.equal(run_micro_batch(model, batches[0]), eager[0]), "eager again outside"
    assert counters["frames"]["ok"] == frames


@pytest.mark.parametrize(
    ("lora", "graphs"), [(False, "without_code"), (True, "without_code"), (False, "code_of_forward_passes")]
)
def test_layer_is_one_graph_with_a_kernel_for_all_rows(lora: bool, graphs: str, request: pytest.FixtureRequest) -> None:
    """The graph does not depend on the numbers of rows and tokens; the first layer, whose input has no gradient under
    LoRA, shares the graph of the others."""
    request.getfixturevalue(graphs)
    model: Any = tiny.build(0)[0]
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        nn.init.normal_(model.base_model.model.model.layers[0].mlp.up_proj.lora_B["default"].weight)
    assert use_packed_attention(model)
    batches = [[29, 33], [29, 9, 8], [8, 22, 37, 5], [24, 7, 15, 11, 20]]
    same = model.config.head_dim  # a first batch in which the number of borders is one of the model's own
    batches = [[4 + n % 3 for n in range(same - 1)], *batches]
    by_row = [run_micro_batch(model, lengths) for lengths in batches]
    request.getfixturevalue("varlen_on_cpu")
    with compile_layers(model, COMPILED)():
        found = [run_micro_batch(model, lengths) for lengths in batches]
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for one, expected in zip(found, by_row, strict=True):
        assert float((one - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.fixture
def code_of_forward_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile C++ kernels of forward passes only: each of a dozen kernels costs a second of the compiler, and without
    gradients there are few. In this process, because parallel compile workers take longer to start than the compilation
    takes."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(inductor, "compile_threads", 1)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace graphs, forward and backward, but run them without generated code: the test checks where layers are
    switched."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compile_cache_is_reused_by_the_next_run(tmp_path: Path) -> None:
    """Each run is a separate process with its own temporary folder."""
    found = []
    for n in range(2):
        (tmp_path / f"tmp-{n}").mkdir()
        places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / f"tmp-{n}")}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("compiled_once.py"))],
            env={**os.environ, **places}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0]["compiled"] >= 2, "forward and backward"
    assert max(one["gap"] for one in found) < 0.02
    assert found[1]["compiled"] == 0 and found[1]["found"] >= 2


@pytest.mark.usefixtures("without_code")
def test_rl_run_with_checkpointed_layers_equals_eager(opened: Callable[..., Any], tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("without_code", "varlen_on_cpu")
def test_sft_supports_model_compile(sft_recipe: Callable[..., Any], rows_of: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {"run": {"steps": 1}, "batch": {"packing": True}}
    eager = rows_of(sft.run, sft_recipe(**settings), "eager")
    assert not counters["frames"]["ok"]
    graphs = rows_of(sft.run, sft_recipe(**settings, model={"compile": True}), "compiled")
    assert counters["frames"]["ok"]
    assert [row["loss"] for row in graphs] == pytest.approx([row["loss"] for row in eager], rel=1e-5)


def test_uncompilable_settings_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="Linear does not say"):
        layers_of(nn.Linear(2, 2))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RecipeError, match=r"needs a C\+\+ compiler"):
        check(COMPILED, torch.device("cpu"))
    check(Model(path="tiny"), torch.device("cpu"))
