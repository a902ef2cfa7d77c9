"""VERL: a bonus from the effective rank of a completion's hidden states. (Not the trainer of the same name.)"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from posttrain.advantage.group import require_field
from posttrain.batch import Remembered, RolloutBatch, on_device
from posttrain.registry import register

TINY = 1e-8
CELLS = 1 << 22  # numbers at a time
MEASURES = ("er", "erv", "era")


@register(
    "advantage_transform",
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

    ER: exp of the entropy of the singular values of the centred hidden states (`ranks_of`). er: of the whole
    completion; erv, era: mean first and second differences of ER over windows that grow by `stride` tokens, within the
    last max_len tokens. dev(x) = (x - its running mean) / |running mean|, within +-clip. beta = sigmoid(gain *
    dev(era)); Phi = weight * (beta tanh(dev(er)) + (1 - beta) tanh(dev(erv))). Running means start at 0 and move by
    ema_alpha; the first step adds nothing. Rows with A = 0 stay 0. Costs length / stride decompositions a row: with 512
    rows, seconds.
    """
    advantages = require_field(batch.advantages, "advantages")
    hidden = require_field(batch.hidden, "hidden")
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
    er = ranks_of(hidden).to(advantages)
    last = [states[-max_len:] for states in hidden]
    windows = [states[: end + 1] for states in last for end in range(stride, len(states), stride)]
    ranks = iter(ranks_of(windows).tolist())
    by_row = [[next(ranks) for _ in range(stride, len(states), stride)] for states in last]
    changes = torch.tensor([_changes(row) for row in by_row], dtype=torch.float64).to(advantages)
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


def ranks_of(rows: Sequence[Tensor]) -> Tensor:
    """exp(-sum p ln(p + 1e-8)) [N], p the singular values of a row's centred states [L, D] over (their sum + 1e-8); 0
    if L < 2. In float64; rows of similar length together, so that a GPU is not asked row by row.
    """
    found = torch.zeros(len(rows), dtype=torch.float64, device=rows[0].device if rows else None)
    for part in _parts([len(row) for row in rows], rows[0].shape[-1] if rows else 1):
        padded = pad_sequence([rows[n].detach() for n in part], batch_first=True)
        lengths = on_device([len(rows[n]) for n in part], padded.device)
        values = singular_values(padded, lengths)
        p = values / (values.sum(-1, keepdim=True) + TINY)
        found[on_device(part, found.device)] = (-(p * (p + TINY).log()).sum(-1)).exp()
    return found


def _parts(lengths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Numbers of the rows of two states and more, the longest first, in parts of CELLS numbers and about one length."""
    left = sorted((n for n, length in enumerate(lengths) if length > 1), key=lambda n: -lengths[n])
    while left:
        longest = lengths[left[0]]
        room = left[: max(1, CELLS // (longest * width))]
        yield (part := [n for n in room if lengths[n] > 0.9 * longest])
        left = left[len(part) :]


def singular_values(states: Tensor, lengths: Tensor) -> Tensor:
    """Singular values [B, K], in any order, of the first lengths [B] of the states [B, L, D], less their mean. The
    other states are 0, and so are the values that they add.

    Of states in float64 they are taken themselves, as roots of eigenvalues of a Gram matrix turn rounding into rank. Of
    narrower ones that matrix, in float64, is a hundred times as exact as a decomposition in float32, and takes a third
    of its time.
    """
    behind = torch.arange(states.shape[1], device=states.device) >= lengths[:, None]
    wide = states.double()
    centred = (wide - (wide.sum(1) / lengths[:, None])[:, None]).masked_fill_(behind[..., None], 0.0)
    if states.dtype == torch.float64:
        return torch.linalg.svdvals(centred)
    gram = centred.mT @ centred if states.shape[2] < states.shape[1] else centred @ centred.mT
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()


def _changes(windows: Sequence[float]) -> tuple[float, float]:
    """Mean first and second difference of the effective rank over growing windows."""
    first = [rank - sum(windows[:k]) / k for k, rank in enumerate(windows) if k > 0]
    second = [later - earlier for earlier, later in itertools.pairwise(first)]
    return _mean(first), _mean(second)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
