"""Activation checkpointing: what is stored, that it is restored exactly, and that gradients do not change."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.models import activation_offload, load
from posttrain.models.activation_offload import ActivationOffload
from posttrain.models.checkpointing import keep_attention
from posttrain.recipe.sections import Lora, Model

IDS = torch.arange(60).reshape(2, 30)


@pytest.fixture(autouse=True)
def _every_input_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)
    yield


def loaded(**section: Any) -> Any:
    return load.load(Model(path="tiny", **section), Path(), training=True).model


def loss(model: Any) -> Tensor:
    value: Tensor = model(IDS, labels=IDS, use_cache=False).loss
    return value


def functions(model: Any) -> list[Any]:
    """Return the functions that run checkpointed layers."""
    return [m._gradient_checkpointing_func for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]


def gradients(model: Any) -> dict[str, Tensor]:
    loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_every_kind_of_checkpointing_gives_the_same_gradients(lora: Lora | None) -> None:
    wanted = gradients(loaded(lora=lora, gradient_checkpointing=True))
    assert wanted
    for kind, offload in ((True, True), ("selective", False), ("selective", True)):
        found = gradients(loaded(lora=lora, gradient_checkpointing=kind, activation_offloading=offload))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), (kind, offload)


def test_layer_inputs_are_offloaded_in_order_and_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two layers' inputs of `tiny` stay in place; earlier ones are each loaded while a later layer runs."""
    model = loaded(gradient_checkpointing=True, activation_offloading=True)
    value = loss(model)
    offload = functions(model)[0]
    assert isinstance(offload, ActivationOffload) and offload.newest is not None
    chain = [offload.newest()]
    while chain[-1] is not None and chain[-1].before is not None:
        chain.append(chain[-1].before())
    layers = model.config.num_hidden_layers
    assert len(chain) == layers, "inputs of layers, and nothing else"
    assert [kept is not None and kept.tensor is not None for kept in chain] == [n < 2 for n in range(layers)]
    events: list[tuple[str, int]] = []
    places = {id(kept): layers - 1 - n for n, kept in enumerate(chain)}
    take, begin = activation_offload._Input.take, activation_offload._Input.load

    def taken(kept: Any) -> Tensor:
        events.append(("take", places[id(kept)]))
        return take(kept)

    def loading(kept: Any) -> None:
        if kept.tensor is None:
            events.append(("load", places[id(kept)]))
        begin(kept)

    monkeypatch.setattr(activation_offload._Input, "take", taken)
    monkeypatch.setattr(activation_offload._Input, "load", loading)
    del chain
    value.backward()
    assert [place for what, place in events if what == "take"] == list(range(layers))[::-1]
    for place in range(layers - 2):
        assert events.index(("load", place)) < events.index(("take", place))
    assert offload.newest() is None, "nothing is kept behind the backward pass"


def test_two_passes_before_one_backward_and_a_second_backward() -> None:
    model, plain = loaded(gradient_checkpointing=True, activation_offloading=True), loaded()
    for one in (model, plain):
        first, second = loss(one), one(IDS.flip(0), labels=IDS, use_cache=False).loss
        (first + second).backward(retain_graph=True)
        (first * 0.5).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.grad is not None and torch.allclose(p.grad, q.grad, atol=1e-6), name


def test_checkpointing_keeps_its_kind_after_being_disabled_and_enabled() -> None:
    model = loaded(gradient_checkpointing=True, activation_offloading=True)
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable()
    for one in (model, copy.deepcopy(model)):
        assert functions(one) and all(isinstance(f, ActivationOffload) for f in functions(one))


class Calls(TorchDispatchMode):
    """Counts the attention operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += keep_attention(None, func).name == "MUST_SAVE"
        return func(*args, **(kwargs or {}))


def test_attention_is_not_recomputed() -> None:
    counts = {}
    for kind in (True, "selective"):
        model = loaded(gradient_checkpointing=kind)
        value = loss(model)
        with Calls() as calls:
            value.backward()
        counts[kind] = calls.count
    assert counts == {True: model.config.num_hidden_layers, "selective": 0}


def test_autocast_weight_cache_is_off_with_checkpointing() -> None:
    """A recomputed layer casts its weights again: cached copies of the first pass would only take memory."""
    for checkpointed in (False, True):
        loaded = load.load(Model(path="tiny", gradient_checkpointing=checkpointed), Path(), training=True)
        with dataclasses.replace(loaded, half=torch.bfloat16).autocast():
            assert torch.is_autocast_cache_enabled() != checkpointed
