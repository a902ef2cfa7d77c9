"""Log-probs of completion tokens under a model, computed without materializing the full logits.

The backbone runs on rows packed one after another (no padding), or on right-padded rows of similar length if the
architecture does not support packing. The vocabulary projection (`Head`) then runs on completion positions only, chunk
by chunk, so that the logits of all tokens never exist at the same time.

For a plain head (a linear layer without bias, perhaps with constant scalings) the backward pass is written out here: d
logp / d logits = onehot - softmax, from recomputed logits. Every other head (capped logits, adapters, quantized or
sharded weights) and every extra with a gradient uses autograd with a checkpoint for each chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import call
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.batch import concatenate_ranges, to_device
from posttrain.loss.distill import full_distill
from posttrain.loss.router import load_balance
from posttrain.models.adapters import activate, backbone, causal_of
from posttrain.models.experts import experts_a_token
from posttrain.models.images import ImageReader
from posttrain.train.attention import Packed, uses_packed_attention
from posttrain.train.collate import Sequences, completion_positions, pad_right
from posttrain.train.collectives import local, reduce
from posttrain.train.divided_head import (
    VocabularyShard,
    gather_tokens,
    log_softmax,
    sharded_gradient,
    sharded_scores,
    sum_over_vocabulary,
    topk,
)
from posttrain.train.load_balancing import group_rows, partition
from posttrain.train.packed_pass import borders_of, image_inputs, prompts_end_in_text, run_packed
from posttrain.train.prompt_sharing import Prompts
from posttrain.train.sharding import PASS
from posttrain.train.tensor_split import VOCABULARY_SHARD

MIN_CHUNK = 16  # tokens
CHUNK_CELLS = 1 << 26  # maximum number of logits per chunk: 256 MiB in float32


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    packed: bool,
    groups: Sequence[int] | None = None,
    prompts: Prompts | None = None,
) -> list[list[int]]:
    """Split rows into micro-batches of at most `max_tokens` tokens, padding included.

    A longer row forms its own micro-batch. Rows are processed longest first, so that running out of memory shows
    immediately. Each row goes to the first micro-batch with enough room; padded rows go to the newest, where lengths
    are similar. Packed micro-batches are then balanced without increasing their number, so that none is short. groups:
    a group number per row; rows of a group stay together, and a too large group forms its own micro-batch. prompts: of
    these rows, if rows of one prompt share its pass; such rows are placed together as far as they fit.
    """
    units = [[row] for row in range(len(lengths))] if groups is None else group_rows(groups)
    if prompts is not None and groups is None:
        units = prompts.units(prompts.numbers, max_tokens)
    longest = [max(lengths[r] for r in unit) for unit in units]
    sizes = [sum(lengths[r] for r in unit) if prompts is None else prompts.cost(unit) for unit in units]
    batches: list[list[int]] = []
    tokens_in: list[int] = []  # tokens of each micro-batch
    width = 0  # width of the newest padded micro-batch: its first row is its longest
    for n in sorted(range(len(units)), key=lambda n: (-longest[n], units[n][0])):
        if packed:
            batch = next((m for m, tokens in enumerate(tokens_in) if tokens + sizes[n] <= max_tokens), len(batches))
        else:
            fits = bool(batches) and width * (len(batches[-1]) + len(units[n])) <= max_tokens
            batch = len(batches) - 1 if fits else len(batches)
        if batch == len(batches):
            batches.append([])
            tokens_in.append(0)
            width = longest[n]
        batches[batch] += units[n]
        tokens_in[batch] += sizes[n]
    return (_balance_packed(units, sizes, len(batches), max_tokens) or batches) if packed else batches


def _balance_packed(
    units: list[list[int]], sizes: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Distribute units of rows over `count` micro-batches of nearly equal tokens; None if one became too large.

    A short micro-batch at the end would be computed less efficiently and, with compiled layers, in a graph of its own:
    torch's kernels for norm gradients need 4096 tokens or more.
    """
    parts = partition(sizes, count)
    if any(len(part) > 1 and sum(sizes[n] for n in part) > max_tokens for part in parts):
        return None
    return [[row for n in part for row in units[n]] for part in parts]


@dataclass(frozen=True)
class Extras:
    """Optional outputs of a pass besides log-probs and entropies; each costs nothing unless requested."""

    vocab_mean: bool = False  # mean of the log-probs over the vocabulary, with gradient
    entropy: bool = False  # the entropy again, with gradient: `new_entropy`
    top_k: int = 0  # the K largest log-probs, and which of them is the sampled token
    hidden: bool = False  # the last hidden states
    value_head: nn.Module | None = None  # value head, applied to detached hidden states
    router: bool = False  # the load-balancing loss of each row, with gradient
    teacher: Teacher | None = None  # divergence from the teacher over the vocabulary, with gradient


def completion_scores(
    model: Any,
    sequences: Sequences,
    width: int,
    temperature: float | Tensor = 1.0,
    *,
    packed: bool = False,
    share: bool = False,
    fill: int = 1,
    extras: Extras | None = None,
    reader: ImageReader | None = None,
) -> dict[str, Tensor]:
    """Compute `logp` and `entropy` [N,width] of each row's completion tokens, and extras.

    The distribution is softmax(logits / temperature). Cells after a row's completion are 0. Entropy (nats) is detached.
    `temperature` is a number or [N], one per row; 0 (greedy) is treated as 1. packed: if the model was switched by
    `attention.use_packed_attention`, rows have no padding, and the line is filled up to a multiple of `fill` tokens, so
    that the allocator can reuse blocks of equal size. share: rows of one prompt share its pass in a packed line, if
    that saves enough (`prompt_sharing`). reader: the model's image reader, for rows with images. With several LoRA
    adapters, all rows must use the same adapter.

    Extras: `vocab_mean_logp`, `values` [N,width], `topk_logp`, `topk_chosen` [N,width,K], `hidden` [N,width,H],
    `divergence` [N,width], `router_loss` [N].
    """
    if len(getattr(model, "peft_config", ())) > 1:
        (adapter,) = sequences.by_adapter(range(len(sequences)))
        activate(model, adapter)
    causal = causal_of(model)
    line = fill if packed and uses_packed_attention(causal) else None
    prompts = sequences.prompts if share and line is not None and prompts_end_in_text(sequences, reader) else None
    prompts = prompts if prompts is not None and prompts.is_worthwhile() else None
    run_whole = getattr(causal, PASS, call)  # a sharded model gathers its weights around a pass
    scores: dict[str, Tensor] = run_whole(
        lambda: _completion_scores(causal, sequences, width, temperature, line, prompts, extras or Extras(), reader)
    )
    return scores


def _completion_scores(
    causal: Any,
    sequences: Sequences,
    width: int,
    temperature: float | Tensor,
    line: int | None,
    prompts: Prompts | None,
    extras: Extras,
    reader: ImageReader | None = None,
) -> dict[str, Tensor]:
    """Compute `completion_scores`.

    line: packed lines are filled up to a multiple of this number of tokens; None = rows are padded.
    """
    device = next(causal.parameters()).device
    rows, positions, columns, targets = completion_positions(sequences, device)
    backbone_kwargs = {"output_router_logits": True} if extras.router else {}
    borders = None
    if line is not None:
        borders, starts = borders_of(sequences, prompts, line, device)
        out = run_packed(causal, sequences, borders, backbone_kwargs, reader)
        states = out.last_hidden_state[0, to_device(starts, device)[rows] + positions]
    else:
        ids, mask = pad_right(sequences, device)
        image_kwargs = {} if sequences.images is None else image_inputs(causal, sequences.images, ids, reader)
        out = backbone(causal)(input_ids=ids, attention_mask=mask, use_cache=False, **image_kwargs, **backbone_kwargs)
        states = out.last_hidden_state[rows, positions]
    scale = temperature[rows, None] if isinstance(temperature, Tensor) else temperature or 1.0
    teacher = extras.teacher
    scores = token_scores(
        Head(causal),
        states,
        targets,
        scale,
        vocab_mean=extras.vocab_mean,
        entropy=extras.entropy,
        top_k=extras.top_k,
        teacher=None if teacher is None else teacher._replace(states=teacher.states[rows, columns]),
    )
    if extras.hidden:
        scores["hidden"] = states.detach().float()
    if extras.value_head is not None:
        scores["values"] = extras.value_head(states.detach().float())[:, 0]
    placed = {}
    for name, value in scores.items():
        empty = value.new_zeros((len(sequences), width, *value.shape[1:]))
        placed[name] = empty.index_put((rows, columns), value)
    if extras.router:
        placed["router_loss"] = _router_loss(causal, out, sequences, borders, device)
    return placed


def _router_loss(causal: Any, out: Any, sequences: Sequences, borders: Packed | None, device: torch.device) -> Tensor:
    """Compute the load-balancing loss [N] of each row. borders: of rows in one packed line; None = padded rows."""
    lengths = to_device(sequences.lengths, device)
    rows = torch.arange(len(sequences), device=device).repeat_interleave(lengths)
    if borders is None:
        length = out.last_hidden_state.shape[1]
        positions = to_device(
            concatenate_ranges(sequences.lengths, [n * length for n in range(len(sequences))]), device
        )
    elif borders.keys is None:
        positions = torch.arange(len(rows), device=device)
    else:
        positions = borders.keys.sources[: len(rows)]
    logits = [layer.reshape(-1, layer.shape[-1])[positions] for layer in out.router_logits]
    return load_balance(logits, rows, len(sequences), experts_a_token(causal))


def completion_logprobs(
    model: nn.Module,
    sequences: Sequences,
    width: int,
    temperature: float = 1.0,
    *,
    packed: bool = False,
    reader: ImageReader | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (logp, entropy) [N,width] of `completion_scores` without extras."""
    found = completion_scores(model, sequences, width, temperature, packed=packed, reader=reader)
    return found["logp"], found["entropy"]


class Head(nn.Module):
    """Output head of a model: from hidden states to logits, including the scalings of some architectures."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        config = causal.config.get_text_config()
        self.project = causal.get_output_embeddings()
        self.own = getattr(self.project, VOCABULARY_SHARD, None)  # this rank's shard; None = whole vocabulary
        self.softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
        self.multiply = getattr(config, "logit_scale", None) or 1.0  # Cohere
        self.divide = getattr(config, "logits_scaling", None) or 1.0  # Granite

    def forward(self, hidden: Tensor) -> Tensor:
        project = self.project if self.own is None else self.own.logits
        logits = project(hidden).float() * (self.multiply / self.divide)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    @property
    def plain_weight(self) -> Tensor | None:
        """Weight of the projection if logits are a constant times hidden @ weight.T, else None.

        With a sharded head, the rows of this rank.
        """
        if type(self.project) is not nn.Linear or self.project.bias is not None or self.softcap:
            return None
        weight = self.project.weight if type(self.project.weight) is nn.Parameter else local(self.project.weight)
        return weight if type(weight) in (nn.Parameter, Tensor) and weight.is_floating_point() else None


class Teacher(NamedTuple):
    """Frozen model that a pass is compared with over the whole vocabulary.

    states: its last hidden states, [N,T,H] of rollouts or [M,H] of tokens. beta: parameter of `full_distill`.
    """

    head: Head
    states: Tensor
    beta: float


def token_scores(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    vocab_mean: bool = False,
    entropy: bool = False,
    top_k: int = 0,
    teacher: Teacher | None = None,
) -> dict[str, Tensor]:
    """Compute `logp`, `entropy` [M] of `targets` [M] given hidden states [M,H] under softmax(logits / temperature).

    temperature: a number, or [M,1]. vocab_mean adds `vocab_mean_logp` [M], the mean log-prob over the vocabulary, with
    gradient; top_k adds `topk_logp`, `topk_chosen` [M,K]. `entropy` (nats) is detached; entropy=True adds `new_entropy`
    [M] with gradient. teacher adds `divergence` [M] from the teacher over the vocabulary at the same temperature, with
    gradient.
    """
    weight = head.plain_weight
    vocabulary = (local(head.project.weight) if weight is None else weight).shape[0]  # size on this rank
    size = max(MIN_CHUNK, CHUNK_CELLS // vocabulary)  # tokens per chunk of logits
    if weight is not None and not vocab_mean and not entropy and not top_k and teacher is None:
        scale = temperature * (head.divide / head.multiply)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        logp, detached = _TokenScores.apply(hidden, weight, targets, scale, size, head.own)
        return {"logp": logp, "entropy": detached}
    options: dict[str, Any] = {"vocab_mean": vocab_mean, "with_entropy": entropy, "top_k": top_k, "teacher": teacher}
    return _token_scores_autograd(head, hidden, targets, temperature, size, **options)


class _TokenScores(torch.autograd.Function):
    """Compute (logp, entropy) [M] in float32 from hidden [M,H] and weight [V,H].

    own: this rank's shard of the vocabulary, whose rows `weight` has; None = the whole vocabulary. Matmuls run in the
    dtype of hidden; the gradient of the weight is accumulated in float32. The memory saved for backward does not grow
    with the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float | Tensor,
        size: int,
        own: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, log_totals = list[Tensor](), list[Tensor](), list[Tensor]()
        w = weight.to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):  # autocast would compute the entropy in half precision
            for _, t, _, logits in _scaled_logits(hidden, w, targets, scale, size):
                if own is None:
                    every = logits.log_softmax(-1, dtype=torch.float32)
                    logp.append(every.gather(-1, t[:, None])[:, 0])
                    entropy.append(-torch.linalg.vecdot(every.exp(), every))
                else:
                    chunk_logp, chunk_entropy, log_total = sharded_scores(logits.float(), t, own)
                    logp.append(chunk_logp)
                    entropy.append(chunk_entropy)
                    log_totals.append(log_total)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.scale, ctx.size, ctx.own = scale, size, own
        ctx.log_totals = torch.cat(log_totals) if log_totals else None
        found = torch.cat(entropy)
        ctx.mark_non_differentiable(found)
        return torch.cat(logp), found

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        w, at = weight.to(hidden.dtype), 0
        for h, t, s, logits in _scaled_logits(hidden, w, targets, ctx.scale, ctx.size):
            rows = slice(at, at + len(h))
            g = (grad[rows].float() / (s[:, 0] if isinstance(s, Tensor) else s))[:, None]
            if ctx.own is None:
                to_logits = logits.softmax(-1, dtype=torch.float32).mul_(-g).scatter_add_(-1, t[:, None], g)
            else:
                to_logits = sharded_gradient(logits.float(), ctx.log_totals[rows], t, g, ctx.own)
            to_logits = to_logits.to(w.dtype)
            if to_hidden is not None:
                to_hidden[rows] = to_logits @ w
            if to_weight is not None:
                to_weight += to_logits.T @ h
            at += len(h)
        if to_hidden is not None and ctx.own is not None:
            to_hidden = reduce(to_hidden, ctx.own.group)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None


def _scaled_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float | Tensor, size: int
) -> Iterator[tuple[Tensor, Tensor, float | Tensor, Tensor]]:
    """Yield (hidden states, targets, scale, logits / scale) of `size` tokens at a time.

    The logits are in float32, except with scale 1, which saves a pass over them.
    """
    scales = scale.split(size) if isinstance(scale, Tensor) else repeat(scale)
    for h, t, s in zip(hidden.split(size), targets.split(size), scales, strict=False):
        logits = h @ weight.T
        if isinstance(s, Tensor) or s != 1.0:
            logits = logits.float() / s
        yield h, t, s, logits


def _token_scores_autograd(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    size: int,
    *,
    vocab_mean: bool,
    with_entropy: bool,
    top_k: int,
    teacher: Teacher | None,
) -> dict[str, Tensor]:
    names = ["logp", "entropy", *(["vocab_mean_logp"] if vocab_mean else [])]
    names += ["new_entropy"] if with_entropy else []
    names += ["topk_logp", "topk_chosen"] if top_k else []
    names += ["divergence"] if teacher is not None else []

    vocabulary = head.project.weight.shape[0] if vocab_mean else 0
    own = head.own

    def chunk(h: Tensor, t: Tensor, scale: float | Tensor, teacher_states: Tensor) -> tuple[Tensor, ...]:
        logp_all = log_softmax(head(h) / scale, own)
        scores = [gather_tokens(logp_all, t, own)]
        with torch.no_grad():
            scores.append(-sum_over_vocabulary(logp_all.exp() * logp_all, own))
        if vocab_mean:
            scores.append(sum_over_vocabulary(logp_all, own) / vocabulary)
        if with_entropy:
            scores.append(-sum_over_vocabulary(logp_all.exp() * logp_all, own))
        if top_k:
            values, tokens = topk(logp_all, top_k, own)
            scores += [values, tokens == t[:, None]]
        if teacher is not None:
            with torch.no_grad():
                teacher_logits = teacher.head(teacher_states) / scale
            common = min(teacher_logits.shape[-1], logp_all.shape[-1])  # heads may be padded to different sizes
            ones = torch.ones_like(t, dtype=torch.bool)
            distilled = full_distill(logp_all[:, :common], teacher_logits[:, :common], ones, beta=teacher.beta)
            scores.append(distilled.per_token)
        return tuple(scores)

    teacher_states = hidden if teacher is None else teacher.states
    if len(targets) <= size:
        return dict(zip(names, chunk(hidden, targets, temperature, teacher_states), strict=True))
    pieces = hidden.split(size)
    scales = temperature.split(size) if isinstance(temperature, Tensor) else repeat(temperature, len(pieces))
    chunks = zip(pieces, targets.split(size), scales, teacher_states.split(size), strict=True)
    parts = [checkpoint(chunk, *of_chunk, use_reentrant=False) for of_chunk in chunks]
    return {name: torch.cat([part[n] for part in parts]) for n, name in enumerate(names)}
