"""VERL (not the trainer of that name): an advantage bonus from the effective rank of a completion's hidden states."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from posttrain.advantage.group import require_field
from posttrain.batch import Remembered, RolloutBatch, to_device
from posttrain.registry import register

EPS = 1e-8
MAX_ELEMENTS = 1 << 22  # of a padded batch of hidden states
MEASURES = ("er", "erv", "era")


@register(
    "advantage_transform",
    "effective_rank",
    paper="2509.23808",
    needs=("hidden",),
    note="The authors' code adds the bonus at the last token only, which is negligible in a long row under a token "
    "loss; here the whole row gets it.",
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
    """Add a bonus to the advantages from the effective rank of hidden states -> shape of A (VERL).

    A + min(max(Phi, 0), |A| / kappa). Remembers running means of the three measures between steps. ER: exp of the
    entropy of the singular values of the centered hidden states (`effective_ranks`). er: ER of the whole completion;
    erv, era: mean first and second differences of ER over windows that grow by `stride` tokens, within the last max_len
    tokens. dev(x) = (x - its running mean) / |running mean|, within +-clip. beta = sigmoid(gain * dev(era)); Phi =
    weight * (beta tanh(dev(er)) + (1 - beta) tanh(dev(erv))). Running means start at 0 and are updated with rate
    ema_alpha; the first step adds nothing. Rows with A = 0 stay 0. Costs length / stride decompositions per row: with
    512 rows, seconds.
    """
    advantages = require_field(batch.advantages, "advantages")
    hidden = require_field(batch.hidden, "hidden")
    rows = [states[mask] for states, mask in zip(hidden, batch.mask, strict=True)]
    shaped = add_rank_bonus(
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
class RankBonus:
    """Result of `add_rank_bonus`.

    advantages in the given shape; phi, er, erv, era [N]; ema_next: the running means after this step.
    """

    advantages: Tensor
    phi: Tensor
    er: Tensor
    erv: Tensor
    era: Tensor
    ema_next: dict[str, float]


def add_rank_bonus(
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
) -> RankBonus:
    """Add the bonus of `effective_rank` from hidden states [L, D] by row; ema: the running means, None = first step."""
    er = effective_ranks(hidden).to(advantages)
    last = [states[-max_len:] for states in hidden]
    windows = [states[: end + 1] for states in last for end in range(stride, len(states), stride)]
    ranks = iter(effective_ranks(windows).tolist())
    by_row = [[next(ranks) for _ in range(stride, len(states), stride)] for states in last]
    changes = torch.tensor([_mean_differences(row) for row in by_row], dtype=torch.float64).to(advantages)
    measures = {"er": er, "erv": changes[:, 0], "era": changes[:, 1]}
    start = ema or dict.fromkeys(MEASURES, 0.0)
    ema_next = {n: (1 - ema_alpha) * start[n] + ema_alpha * float(x.mean()) for n, x in measures.items()}
    phi = torch.zeros_like(er)
    if ema is not None:
        dev = {n: ((x - ema[n]) / (abs(ema[n]) + EPS)).clamp(-clip, clip) for n, x in measures.items()}
        beta = torch.sigmoid(gain * dev["era"])
        phi = weight * (beta * dev["er"].tanh() + (1 - beta) * dev["erv"].tanh())
    bonus = phi.clamp(min=0) if advantages.dim() == 1 else phi.clamp(min=0)[:, None]
    return RankBonus(advantages + torch.minimum(bonus, advantages.abs() / kappa), phi, **measures, ema_next=ema_next)


def effective_ranks(rows: Sequence[Tensor]) -> Tensor:
    """Compute the effective rank of the hidden states of each row [N]: exp of the entropy of the singular values.

    exp(-sum p ln(p + 1e-8)), p the singular values of a row's centered states [L, D] over (their sum + 1e-8). 0 if L <
    2. In float64. Rows of similar length are decomposed together, because a GPU is slow row by row.
    """
    ranks = torch.zeros(len(rows), dtype=torch.float64, device=rows[0].device if rows else None)
    for indices in _batch_by_length([len(row) for row in rows], rows[0].shape[-1] if rows else 1):
        padded = pad_sequence([rows[n].detach() for n in indices], batch_first=True)
        lengths = to_device([len(rows[n]) for n in indices], padded.device)
        values = singular_values(padded, lengths)
        p = values / (values.sum(-1, keepdim=True) + EPS)
        ranks[to_device(indices, ranks.device)] = (-(p * (p + EPS).log()).sum(-1)).exp()
    return ranks


def _batch_by_length(lengths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield row indices in batches of similar length, longest first, at most MAX_ELEMENTS numbers each.

    Rows of fewer than two states are skipped.
    """
    pending = sorted((n for n, length in enumerate(lengths) if length > 1), key=lambda n: -lengths[n])
    while pending:
        longest = lengths[pending[0]]
        fitting = pending[: max(1, MAX_ELEMENTS // (longest * width))]
        yield (batch := [n for n in fitting if lengths[n] > 0.9 * longest])
        pending = pending[len(batch) :]


def singular_values(states: Tensor, lengths: Tensor) -> Tensor:
    """Compute the singular values [B, K], in any order, of the centered first lengths [B] of the states [B, L, D].

    Padding states are set to 0 and add singular values of 0. float64 states are decomposed directly, because roots of
    eigenvalues of a Gram matrix turn rounding into rank. For narrower dtypes the Gram matrix in float64 is a hundred
    times as exact as a decomposition in float32, and takes a third of its time.
    """
    padding = torch.arange(states.shape[1], device=states.device) >= lengths[:, None]
    wide = states.double()
    centered = (wide - (wide.sum(1) / lengths[:, None])[:, None]).masked_fill_(padding[..., None], 0.0)
    if states.dtype == torch.float64:
        return torch.linalg.svdvals(centered)
    gram = centered.mT @ centered if states.shape[2] < states.shape[1] else centered @ centered.mT
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()


def _mean_differences(windows: Sequence[float]) -> tuple[float, float]:
    """Return the mean first and second difference of the effective rank over growing windows."""
    first = [rank - sum(windows[:k]) / k for k, rank in enumerate(windows) if k > 0]
    second = [later - earlier for earlier, later in itertools.pairwise(first)]
    return _mean(first), _mean(second)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
