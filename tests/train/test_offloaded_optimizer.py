"""AdamW with moments on the host equals AdamW: updates, checkpoints and runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posttrain.errors import RecipeError
from posttrain.models import load as models
from posttrain.models import tiny
from posttrain.models.precision import keep_half_weights
from posttrain.recipe.sections import Model
from posttrain.recipe.training_sections import Optim
from posttrain.run import checkpoints
from posttrain.train import checkpoint, optim, optimizers, preference, rl, sft

SECTION = Optim(lr=1e-3, weight_decay=0.1, schedule="linear")


@pytest.fixture(autouse=True)
def _tensors_have_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "CHUNK_NUMEL", 1000)


def model(half: bool) -> Any:
    found: Any = tiny.build(0)[0]
    if half:
        keep_half_weights(found.bfloat16())
    return found


def update(one: nn.Module, optimizer: Any, first: int, count: int) -> None:
    """Run update number `first` with random gradients; one weight has none, like experts that got no token."""
    for step in range(first, first + count):
        draw = torch.Generator().manual_seed(step)
        for n, parameter in enumerate(one.parameters()):
            grad = torch.randn(parameter.shape, generator=draw)
            parameter.grad = None if n == 3 else grad
        optim.set_lr(optimizer, SECTION, step, 10)
        optimizer.step()
        optimizer.zero_grad()


def weights(one: nn.Module, optimizer: Any) -> list[Tensor]:
    exact = optim.state_dict_with_masters(optimizer, one) or dict(one.named_parameters())
    return [*exact.values(), *one.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("half", [False, True])
def test_updates_equal_adamw_and_checkpoints_are_interchangeable(half: bool) -> None:
    """Three updates, a checkpoint, two more: by each optimizer, and by each from the checkpoint of the other."""
    ends, saved = [], []
    for offload in (False, True):
        one = model(half)
        optimizer = optim.build(one, SECTION.model_copy(update={"offload": offload}))
        assert isinstance(optimizer, optimizers.OffloadedAdamW) == offload
        update(one, optimizer, 0, 3)
        saved.append(copy.deepcopy((one, optim.state_dict_with_masters(optimizer, one), optimizer.state_dict())))
        update(one, optimizer, 3, 2)
        ends.append(weights(one, optimizer))
    assert equal(*ends)
    assert not equal(ends[0], weights(saved[0][0], None))
    for offload, (one, exact, state) in zip((True, False), saved, strict=True):
        if half:
            keep_half_weights(one)  # an attribute that a copy of a model loses
        optimizer = optim.build(one, SECTION.model_copy(update={"offload": offload}))
        optim.load_masters(optimizer, one, exact or {})
        optimizer.load_state_dict(state)
        update(one, optimizer, 3, 2)
        assert equal(weights(one, optimizer), ends[0])


def test_moments_are_packed_in_few_buffers() -> None:
    one = model(half=False)
    optimizer: Any = optim.build(one, Optim(offload=True))
    update(one, optimizer, 0, 1)
    moments = [state[name] for state in optimizer.state.values() for name in optimizers.MOMENTS]
    assert len({tensor.untyped_storage().data_ptr() for tensor in moments}) == 1 < len(moments)


def test_checkpoint_contains_moments_without_their_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights and two moments take 4 bytes per number each."""
    loaded = models.load(Model(path="tiny"), tmp_path, training=True)
    optimizer: Any = optim.build(loaded.model, Optim(offload=True))
    update(loaded.model, optimizer, 0, 1)
    asked: list[int] = []
    monkeypatch.setattr(checkpoints, "require_space", lambda _, nbytes: asked.append(nbytes))
    saved = checkpoint.save(tmp_path / "checkpoints", checkpoint.State(step=1), loaded, optimizer, 1)
    moments = sum(state[name].nbytes for state in optimizer.state.values() for name in optimizers.MOMENTS)
    weights = sum(p.nbytes for p in loaded.model.parameters())
    assert asked[0] == pytest.approx(weights + moments, rel=0.01)
    assert (saved / "optimizer.pt").stat().st_size == pytest.approx(moments, rel=0.1)


RUNS: dict[str, Any] = {"sft": sft.run, "dpo": preference.run, "rl": rl.run}
HALF = {"dtype": "bfloat16", "half_weights": True}


@pytest.mark.parametrize(
    ("stage", "own"),
    [("sft", HALF), *(pytest.param(stage, {}, marks=pytest.mark.slow) for stage in ("dpo", "rl"))],
)
def test_offloaded_run_equals_adamw_and_resumes_exactly(
    stage: str, own: Any, sft_recipe: Any, dpo_recipe: Any, rows_of: Any, tmp_path: Path
) -> None:
    """The resumed run starts without offload."""
    make = {"sft": sft_recipe, "dpo": dpo_recipe, "rl": dpo_recipe}[stage]
    more: dict[str, Any] = {"model": {"path": "tiny", **own}}
    if stage == "rl":
        (tmp_path / "rewards.py").write_text(
            "def spread(completion):\n    return sum(map(ord, completion)) % 97 / 97\n"
        )
        more |= {"stage": "rl", "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6}}
        more |= {"rewards": [{"use": "rewards.py:spread"}], "scoring": {"workers": 1}, "batch": {"minibatches": 2}}

    def recipe(steps: int, offload: bool) -> Any:
        from posttrain.recipe.load import load_dict

        values = {"optim": {"lr": 1e-3, "offload": offload}, "run": {"steps": steps, "save_every": 2}, **more}
        if stage != "rl":
            return make(**values)
        return load_dict({"data": {"source": "pairs.jsonl"}, **values}, base_dir=tmp_path, where="test").recipe

    make()  # writes the rows
    expected = rows_of(RUNS[stage], recipe(4, False), "without")
    assert rows_of(RUNS[stage], recipe(4, True), "with") == expected
    rows_of(RUNS[stage], recipe(2, False), "broken")
    assert rows_of(RUNS[stage], recipe(4, True), "broken", resume=True) == expected


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"optim": {"offload": True, "use": "adamw_8bit"}}, "optim.offload: it is for AdamW in float32"),
        ({"optim": {"offload": True}, "model": {"path": "tiny", "lora": {}}}, "an adapter's moments are few"),
        ({"optim": {"offload": True}, "model": {"path": "tiny", "shard": True}}, "the moments are divided among"),
    ],
)
def test_incompatible_settings_are_refused(values: Any, said: str, sft_recipe: Any) -> None:
    with pytest.raises(RecipeError, match=said):
        sft_recipe(**values)
