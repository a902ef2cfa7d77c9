"""The decoding loop of the transformers engine: prompts' tokens in, completions out, one batch at a time.

Why not `generate`: its per-token log-probs cost the whole [rows, tokens, vocabulary] block of scores, it prefills every
sample of a prompt anew, keeps finished rows in the batch to the end, and draws from the global random state.
Shapes: R rows still running, L the longest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from posttrain.errors import NonFiniteError
from posttrain.recipe.rollout_sections import Sampling
from posttrain.rollout.engine import Completion

# Finished rows are dropped once they are this share of the batch: each drop copies the key-value cache. Measured on the
# tiny model (512 rows, 46 tokens, 2 threads): 0.23 s at 0.1, 0.24 s at 0.25, 0.28 s at 0.5, 0.30 s without.
DROP_SHARE = 0.1


@torch.no_grad()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    owner: Sequence[int],
    u: Tensor,
    sampling: Sampling,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    stops: StopStrings | None = None,
    limits: Sequence[int] | None = None,
) -> list[Completion]:
    """One completion for each row. Row r continues prompts[owner[r]] and draws its t-th token with u[r, t].

    Each prompt is run through the model once, however many rows continue it. `u` is [rows, sampling.max_new_tokens].
    limits: the most tokens of each row, default that number.
    """
    device = model.device
    state = _Rows(model, *_left_padded(prompts, pad_id, device), torch.tensor(owner, device=device))
    eos = torch.tensor(sorted(eos_ids), device=device)
    u = u.to(device)
    alive = torch.arange(len(owner), device=device)  # which output row each running row is
    tokens = torch.full((len(owner), sampling.max_new_tokens), pad_id, device=device)
    logps = torch.zeros(tokens.shape, device=device)
    longest = max(limits, default=0) if limits is not None else sampling.max_new_tokens
    lengths = torch.tensor(limits, device=device) if limits is not None else torch.full_like(alive, longest)
    stopped = torch.zeros(len(owner), dtype=torch.bool, device=device)

    for t in range(longest):
        new, logp = sample(state.logits, u[alive, t], sampling)
        running = ~stopped[alive] & (t < lengths[alive])
        tokens[alive, t] = torch.where(running, new, pad_id)
        logps[alive, t] = torch.where(running, logp, 0.0)
        ends = torch.isin(new, eos)
        if stops:
            ends = ends | stops.has_ended(tokens[alive, : t + 1])
        ends = ends & running
        stopped[alive] |= ends
        lengths[alive] = torch.where(ends, t + 1, lengths[alive])
        if t + 1 == longest:
            break
        left = ~stopped[alive] & (t + 1 < lengths[alive])
        done = len(alive) - int(left.sum())
        if done == len(alive):
            break
        if done >= DROP_SHARE * len(alive):
            kept = left.nonzero().squeeze(-1)
            alive, new = alive[kept], new[kept]
            state.select(kept)
        state.step(new)
    if not bool(logps.isfinite().all()):
        raise NonFiniteError("the model's logits are NaN or infinite while it generates")
    rows = zip(tokens.tolist(), logps.tolist(), lengths.tolist(), stopped.tolist(), strict=True)
    return [
        Completion(tuple(ids[:length]), tuple(values[:length]), "stop" if stop else "length")
        for ids, values, length, stop in rows
    ]


def cache_gap(model: Any, pad_id: int) -> float:
    """Mean gap in nats between log-probs that `decode` gives, token by token, and those of a whole pass.

    Rounding, where the model takes its state from the cache that it is given; some architectures keep another one.
    """
    size, device = model.config.get_text_config().vocab_size, model.device
    prompts = [[n % size for n in range(11, 11 + length)] for length in (9, 5)]
    greedy = Sampling(temperature=0.0, max_new_tokens=4)
    gaps: list[float] = []
    for prompt, found in zip(
        prompts,
        decode(model, prompts, [0, 1], torch.zeros(2, 4), greedy, eos_ids=(-1,), pad_id=pad_id),
        strict=True,
    ):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *found.ids]], device=device), use_cache=False).logits[0]
        every = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        whole = every.gather(-1, torch.tensor(found.ids, device=device)[:, None])[:, 0].tolist()
        gaps += [abs(a - b) for a, b in zip(whole, found.logps or (), strict=True)]
    return sum(gaps) / len(gaps)


class StopStrings:
    """Tells which rows end with one of `texts`. Special tokens count as their text, so `</answer>` works as either.

    Only the last tokens are decoded. A character takes at most four byte tokens, so four tokens a character of the
    longest text, and four for a character cut at the edge, always hold a text that the newest token completed.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.texts = tuple(texts)
        self.tokenizer = tokenizer
        self.reach = 4 * max(len(t) for t in texts) + 4

    def has_ended(self, tokens: Tensor) -> Tensor:
        """tokens [R, t] sampled so far -> [R] bool."""
        tails = self.tokenizer.batch_decode(
            tokens[:, -self.reach :].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return torch.tensor([any(text in tail for text in self.texts) for tail in tails], device=tokens.device)


class _Rows:
    """The model's side of the running rows: key-value cache, padding mask, positions, next-token logits [R,V]."""

    def __init__(self, model: Any, ids: Tensor, mask: Tensor, owner: Tensor) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.mask = mask
        self.position = mask.sum(-1, keepdim=True)  # of the next token
        self.padded = not bool(mask.all())  # without padding no mask is passed: the faster attention path
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.logits = self._forward(ids, positions)
        self.select(owner)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        out = self.model(
            input_ids=ids,
            attention_mask=self.mask if self.padded else None,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be named several times."""
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]  # any index tensor
        self.mask, self.position, self.logits = self.mask[rows], self.position[rows], self.logits[rows]

    def step(self, tokens: Tensor) -> None:
        """Append one token [R] to every row and compute the logits of the next."""
        if self.padded:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=-1)
        self.logits = self._forward(tokens[:, None], self.position)
        self.position = self.position + 1


def uniforms(rows: int, length: int, seed: int) -> Tensor:
    """[rows, length] random numbers in [0, 1), drawn on the CPU from their own generator.

    One number a row and position decides a token, so that what a row becomes does not depend on the batch it is decoded
    in or on when its neighbours finish, and global random state is neither read nor moved.
    """
    return torch.rand(rows, length, generator=torch.Generator().manual_seed(seed))


def sample(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """logits [R,V], u [R] in [0,1) -> tokens [R], log-probs [R] (fp32, before top-k and top-p)."""
    scaled = logits.float()
    if sampling.temperature > 0:
        scaled = scaled / sampling.temperature
    logp = scaled.log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logp.argmax(-1)
    else:
        probs = logp.exp()
        if sampling.top_k or sampling.top_p < 1.0:
            probs = truncate(probs, top_k=sampling.top_k, top_p=sampling.top_p)
        tokens = inverse_cdf(probs, u)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds u * total: weights [R,V] >= 0, u [R] in [0,1) -> [R].

    Never picks a token of weight 0: the target stays below the total also where rounding would reach it.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(u[:, None].to(total.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    # NaN weights give the last token here; `decode` reports them
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def truncate(probs: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """probs [R,V] with everything outside the k likeliest (0 = all) and outside the nucleus of mass p set to 0.

    The nucleus is taken of what top-k left. It is the smallest set of likeliest tokens whose mass reaches p, so one
    token at least always stays. Ties at the k-th place all stay.
    """
    if 0 < top_k < probs.shape[-1]:
        kth = probs.topk(top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < kth, 0.0)
    if top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of the likelier tokens
        outside = before >= top_p * ordered.sum(-1, keepdim=True)
        outside[:, 0] = False
        probs = probs.masked_fill(outside.scatter(-1, order, outside), 0.0)
    return probs


def _left_padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [prompts, L] and attention mask (1 = a token), padded on the left so that all rows end together."""
    longest = max(len(p) for p in prompts)
    ids = [[pad_id] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
