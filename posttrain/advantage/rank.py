"""VERL: a bonus from the effective rank of a completion's hidden states. (Not the trainer of the same name.)"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.advantage.group import required
from posttrain.batch import Remembered, RolloutBatch
from posttrain.registry import register

TINY = 1e-8
MEASURES = ("er", "erv", "era")


@register(
    "bonus",
    "effective_rank",
    paper="2509.23808",
    needs=("hidden",),
    note="The authors' code adds the bonus at the last token only, next to nothing in a long row under a token loss; "
    "here the whole row gets it.",
)
def effective_rank(
    batch: RolloutBatch,
    *,
    stride: int = 40,
    gain: float = 2.0,
    kappa: float = 2.0,
    weight: float = 1.0,
    ema_alpha: float = 0.3,
    max_len: int = 512,
    clip: float = 5.0,
) -> Remembered:
    """A + min(max(Phi, 0), |A| / kappa) -> like A; remembers running means of the three measures.

    ER: exp of the entropy of the singular values of the centred hidden states (`rank_of`). er: of the whole completion;
    erv, era: mean first and second differences of ER over windows that grow by `stride` tokens, within the last max_len
    tokens. dev(x) = (x - its running mean) / |running mean|, within +-clip. beta = sigmoid(gain * dev(era)); Phi =
    weight * (beta tanh(dev(er)) + (1 - beta) tanh(dev(erv))). Running means start at 0 and move by ema_alpha; the
    first step adds nothing. Rows with A = 0 stay 0. Costs length / stride decompositions a row.
    """
    advantages = required(batch.advantages, "advantages")
    hidden = required(batch.hidden, "hidden")
    rows = [states[mask] for states, mask in zip(hidden, batch.mask, strict=True)]
    shaped = shape(
        advantages,
        rows,
        batch.memory.get("effective_rank"),
        stride=stride,
        gain=gain,
        kappa=kappa,
        weight=weight,
        ema_alpha=ema_alpha,
        max_len=max_len,
        clip=clip,
    )
    return Remembered(shaped.advantages, shaped.ema_next)


@dataclass(frozen=True)
class Shaped:
    """advantages as given; phi, er, erv, era [N]; ema_next: the running means after this step."""

    advantages: Tensor
    phi: Tensor
    er: Tensor
    erv: Tensor
    era: Tensor
    ema_next: dict[str, float]


def shape(
    advantages: Tensor,
    hidden: list[Tensor],
    ema: Mapping[str, float] | None = None,
    *,
    stride: int = 2,
    gain: float = 2.0,
    kappa: float = 2.0,
    weight: float = 1.0,
    ema_alpha: float = 0.3,
    max_len: int = 512,
    clip: float = 5.0,
) -> Shaped:
    """The bonus of `effective_rank` on hidden states [L, D] by row; ema: the running means, None = first step."""
    er = torch.stack([rank_of(states) for states in hidden]).to(advantages)
    changes = torch.tensor([_changes(states[-max_len:], stride) for states in hidden], dtype=torch.float64).to(
        advantages
    )
    measures = {"er": er, "erv": changes[:, 0], "era": changes[:, 1]}
    start = ema or dict.fromkeys(MEASURES, 0.0)
    ema_next = {n: (1 - ema_alpha) * start[n] + ema_alpha * float(x.mean()) for n, x in measures.items()}
    phi = torch.zeros_like(er)
    if ema is not None:
        dev = {n: ((x - ema[n]) / (abs(ema[n]) + TINY)).clamp(-clip, clip) for n, x in measures.items()}
        beta = torch.sigmoid(gain * dev["era"])
        phi = weight * (beta * dev["er"].tanh() + (1 - beta) * dev["erv"].tanh())
    bonus = phi.clamp(min=0) if advantages.dim() == 1 else phi.clamp(min=0)[:, None]
    return Shaped(advantages + torch.minimum(bonus, advantages.abs() / kappa), phi, **measures, ema_next=ema_next)


def rank_of(states: Tensor) -> Tensor:
    """exp(-sum p ln(p + 1e-8)), p the singular values of the centred states [L, D] over (their sum + 1e-8); 0 if L < 2.

    Singular values themselves, in float32 or better: roots of eigenvalues of a Gram matrix turn rounding into rank.
    """
    if len(states) < 2:
        return states.new_zeros(())
    wide = states.detach().to(torch.promote_types(states.dtype, torch.float32))
    values = torch.linalg.svdvals(wide - wide.mean(0))
    p = values / (values.sum() + TINY)
    return (-(p * (p + TINY).log()).sum()).exp()


def _changes(states: Tensor, stride: int) -> tuple[float, float]:
    """Mean first and second difference of the effective rank over growing windows of states [L, D]."""
    ranks = [float(rank_of(states[: end + 1])) for end in range(stride, len(states), stride)]
    first = [rank - sum(ranks[:k]) / k for k, rank in enumerate(ranks) if k > 0]
    second = [later - earlier for earlier, later in itertools.pairwise(first)]
    return _mean(first), _mean(second)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
