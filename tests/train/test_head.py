"""Hand-written backward pass of the output head, compared with autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posttrain.train import logprobs as heads
from posttrain.train.logprobs import Head, token_scores

VOCABULARY, HIDDEN, TOKENS = 40, 6, 23


def a_head(**config: Any) -> Head:
    torch.manual_seed(1)
    project = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    return Head(
        SimpleNamespace(
            config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config)),
            get_output_embeddings=lambda: project,
        )
    )


def log_probs_and_gradients(head: Head, scale: float | Tensor) -> tuple[Tensor, ...]:
    """Return log-probs, entropies, and the gradients of a weighted sum of the log-probs by states and by weight."""
    torch.manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    scores = token_scores(head, hidden, targets, scale)
    (scores["logp"] * torch.linspace(-1, 2, TOKENS)).sum().backward()
    return scores["logp"].detach(), scores["entropy"], hidden.grad, head.project.weight.grad  # type: ignore[return-value]


@pytest.mark.parametrize("scale", [1.0, 0.7, torch.linspace(0.5, 2, TOKENS)[:, None]], ids=["1", "0.7", "by row"])
@pytest.mark.parametrize("config", [{}, {"logit_scale": 0.25, "logits_scaling": 2.0}], ids=["plain", "scaled"])
def test_head_equals_autograd(scale: float | Tensor, config: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MIN_CHUNK", 5)  # five chunks, the last one short
    monkeypatch.setattr(heads, "CHUNK_CELLS", 1)
    assert a_head(**config).plain_weight is not None
    ours = log_probs_and_gradients(a_head(**config), scale)
    monkeypatch.setattr(Head, "plain_weight", None)
    for value, expected in zip(ours, log_probs_and_gradients(a_head(**config), scale), strict=True):
        assert expected.abs().max() > 0.05
        torch.testing.assert_close(value, expected, atol=2e-6, rtol=1e-5)


def test_frozen_head_gets_no_gradient_but_propagates_one() -> None:
    head = a_head()
    head.project.weight.requires_grad_(False)
    logp, _, to_hidden, to_weight = log_probs_and_gradients(head, 1.0)
    assert to_weight is None and to_hidden.abs().max() > 0.1 and logp.dtype == torch.float32


def test_capped_biased_and_wrapped_heads_use_autograd() -> None:
    assert a_head(final_logit_softcapping=30.0).plain_weight is None
    biased = a_head()
    biased.project = nn.Linear(HIDDEN, VOCABULARY)
    assert biased.plain_weight is None
    wrapped = a_head()
    wrapped.project = nn.Sequential(nn.Linear(HIDDEN, VOCABULARY, bias=False))
    wrapped.project.weight = nn.Parameter(torch.zeros(VOCABULARY, HIDDEN))
    assert wrapped.plain_weight is None


def test_autocast_uses_half_products_and_a_float32_weight_gradient() -> None:
    exact = log_probs_and_gradients(a_head(), 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = log_probs_and_gradients(a_head(), 1.0)
    assert half[0].dtype == half[3].dtype == torch.float32
    for value, expected in zip(half, exact, strict=True):
        torch.testing.assert_close(value, expected, atol=0.05, rtol=0.05)
    assert not torch.equal(half[0], exact[0])
