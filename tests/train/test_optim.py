"""8-bit optimizers: their state, their closeness to AdamW, and exact resuming."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from posttrain.errors import MissingExtra, RecipeError
from posttrain.models import adapters, tiny
from posttrain.recipe.sections import Lora
from posttrain.recipe.training_sections import Optim
from posttrain.train import optim, preference, sft

CPU = torch.device("cpu")
bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


def states(optimizer: Any) -> dict[tuple[int, ...], set[torch.dtype]]:
    """Return by shape of a parameter the dtypes of its two moments."""
    return {tuple(p.shape): {s["state1"].dtype, s["state2"].dtype} for p, s in optimizer.state.items()}


def run_steps(use: Any, steps: int = 5) -> tuple[Any, nn.Module]:
    model: Any = tiny.build(0)[0]
    optimizer = optim.build(model, Optim(use=use, lr=1e-3))
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.step()
    return optimizer, model


@bitsandbytes
def test_weights_outside_the_adapters_are_clipped_too() -> None:
    """With gradients of ones, the gradient norms of the adapters and of the trained norm layers are the square roots of
    their sizes."""
    model = adapters.add(tiny.build(0)[0], Lora(rank=2, adapters=["one", "two"]), seed=0)
    norms = [p.requires_grad_() for name, p in model.named_parameters() if name.endswith("norm.weight")]
    parts = {**adapters.parameters_by_adapter(model), optim.OUTSIDE: norms}
    for parameter in (p for part in parts.values() for p in part):
        parameter.grad = torch.ones_like(parameter)
    found = optim.clip_adapters(model, 0.5)
    assert found == pytest.approx({name: sum(p.numel() for p in part) ** 0.5 for name, part in parts.items()})
    for part in parts.values():
        assert float(nn.utils.get_total_norm([p.grad for p in part])) == pytest.approx(0.5, rel=1e-4)


def test_matrices_have_8_bit_moments_and_embeddings_float32() -> None:
    """`tiny`: matrices of 64 x 64 = 4096 and more; norms of 64; tied embeddings of vocabulary x 64."""
    optimizer, model = run_steps("adamw_8bit", steps=1)
    embeddings = tuple(model.get_input_embeddings().weight.shape)  # type: ignore[operator]
    for shape, dtypes in states(optimizer).items():
        assert dtypes == {torch.float32 if len(shape) == 1 or shape == embeddings else torch.uint8}, shape


@bitsandbytes
def test_updates_equal_adamw_up_to_quantization() -> None:
    """Five steps of 1e-3 on random gradients: a weight changes by up to 5e-3, and 8 bits are exact to a few percent."""
    start: Any = tiny.build(0)[0]
    moved = [
        torch.cat([(a - b).detach().flatten() for a, b in zip(model.parameters(), start.parameters(), strict=True)])
        for _, model in (run_steps("adamw"), run_steps("adamw_8bit"))
    ]
    assert float(moved[0].norm()) > 0.1
    assert float((moved[0] - moved[1]).norm() / moved[0].norm()) < 0.05


@bitsandbytes
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_run_resumes_exactly(
    stage: str, sft_recipe: Callable[..., Any], dpo_recipe: Callable[..., Any], rows_of: Callable[..., Any]
) -> None:
    make, run = (sft_recipe, sft.run) if stage == "sft" else (dpo_recipe, preference.run)
    settings: dict[str, Any] = {"optim": {"use": "adamw_8bit"}}
    straight = rows_of(run, make(**settings, run={"steps": 4}), "straight")
    rows_of(run, make(**settings, run={"steps": 2}), "stopped")
    assert rows_of(run, make(**settings, run={"steps": 4}), "stopped", resume=True) == straight
    assert straight[0]["loss"] != straight[-1]["loss"]


def test_unsupported_optimizers_raise_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("bitsandbytes") is not None:
        with pytest.raises(RecipeError, match="needs a GPU") as told:
            optim.check(Optim(use="paged_adamw_8bit"), CPU)
        assert "adamw_8bit" in str(told.value)
        optim.check(Optim(use="adamw_8bit"), CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"optim\.use: adamw_8bit needs bitsandbytes"):
        optim.check(Optim(use="adamw_8bit"), CPU)
    optim.check(Optim(), CPU)


@pytest.mark.parametrize(
    ("schedule", "update", "planned", "total", "last", "before", "now"),
    [
        (
            "cosine",
            100,
            100,
            200,
            2.5e-7,
            "2.5e-07",
            "0.0005",
        ),  # the schedule had ended: a rate two thousand times higher
        ("cosine", 50, 100, 200, 5e-4, "0.0005", "0.000854"),
        ("linear", 90, 100, 200, 1e-4, "0.0001", "0.00055"),
        ("linear", 50, 200, 100, 7e-4, "0.00075", "0.0005"),  # shorter
        ("stable_decay", 99, 100, 200, 1.2e-4, "0.000122", "0.001"),
    ],
)
def test_schedule_of_another_length_is_reported_on_resume(
    schedule: Any, update: int, planned: int, total: int, last: float, before: str, now: str
) -> None:
    note = optim.changed_lr_note(Optim(lr=1e-3, schedule=schedule), update, planned, total, last)
    assert note is not None and f"continues at {now}," in note and note.endswith(f"it was {before}")


@pytest.mark.parametrize(
    ("schedule", "update", "planned", "total"),
    [
        ("constant", 100, 100, 200),
        ("cosine", 50, 100, 100),
        ("cosine", 50, None, 100),  # a checkpoint without the length of the run
        ("stable_decay", 10, 100, 200),  # far from the end of either
        ("linear", 2, 100, 200),  # within the warm-up
    ],
)
def test_unchanged_schedule_is_not_reported(schedule: Any, update: int, planned: Any, total: int) -> None:
    section = Optim(lr=1e-3, schedule=schedule, warmup_steps=5)
    assert optim.changed_lr_note(section, update, planned, total, 1e-3) is None


def test_resumed_run_reports_its_new_schedule(
    sft_recipe: Callable[..., Any], opened: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make = lambda steps: sft_recipe(optim={"schedule": "cosine"}, run={"steps": steps})  # noqa: E731
    with opened() as directory:
        sft.run(make(3), directory)
    capsys.readouterr()
    with opened(resume=True) as directory:
        sft.run(make(6), directory)
    assert "the run now has 6 updates instead of 3: the learning rate continues at 0.0015" in capsys.readouterr().err
