"""The transformers engine: samples with the trainer's own model object, so weights are not copied. Also its decoding
loop, from prompt tokens to completions, one batch at a time.

If the weights are sharded among ranks, the engine has its own copy: ranks decode different prompts of different
lengths.

Why not transformers' `generate`: its per-token log-probs need the whole [rows, tokens, vocabulary] tensor of scores; it
prefills every sample of a prompt separately, keeps finished rows in the batch to the end, and uses the global random
state. Shapes: R running rows, L longest prompt, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache

from posttrain.batch import Rollout
from posttrain.errors import EngineError, NonFiniteError
from posttrain.images import Image
from posttrain.models.adapters import backbone, causal_of, use
from posttrain.models.precision import compute_dtype
from posttrain.models.rounding_bounds import logp_tolerance
from posttrain.models.weights import dense_weights, weight_stream
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.engine import Completion, GenerationBatch, StatelessEngine, as_rollouts, check_fits

if TYPE_CHECKING:
    from posttrain.models.images import ImageReader
    from posttrain.models.load import LoadedModel

UNBOUNDED = 1 << 30
ImageInputs = Callable[[Tensor, Tensor], tuple[Mapping[str, Any], Tensor | None]]

# Finished rows are dropped once they are this share of the batch, since each drop copies the key-value cache. On the
# tiny model (512 rows, 46 tokens, 2 threads): 0.23 s at 0.1, 0.24 s at 0.25, 0.28 s at 0.5, 0.30 s without.
DROP_SHARE = 0.1


class TransformersEngine(StatelessEngine):
    """An Engine on the trained model itself: `sync` only counts versions, and `probe` is 0 by construction.

    For a model sharded among ranks the engine is given a copy, and `sync` copies the weights on all ranks together.
    """

    def __init__(self, loaded: LoadedModel, *, batch_size: int) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.eos_ids = loaded.eos_ids
        self.pad_id = loaded.pad_id
        self.batch_size = batch_size
        self.checked = False  # whether the model continues from its key-value cache
        self.window = loaded.window or UNBOUNDED

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """Sample the batch (`Engine.generate`). Prompts with the same adapter and similar lengths are decoded together,
        at most `batch_size` rows at a time; `done` is called between two such batches."""
        prompts, n, sampling, done = batch.prompts, batch.n, batch.sampling, batch.done
        check_fits(prompts, sampling, self.window, batch.limits)
        adapters = [prompt.adapter or "" for prompt in prompts]
        rows = [p * n + i for p in batch.share for i in range(n)]
        rows.sort(key=lambda r: (adapters[r // n], len(prompts[r // n].ids), r))
        u = uniforms(len(prompts) * n, sampling.max_new_tokens, batch.seed)
        stops = stop_check(sampling.stop, self.tokenizer) if sampling.stop else None
        found: dict[int, Completion] = {}
        made: dict[int, list[Rollout]] = {}
        with eval_mode(self.model), self.loaded.autocast():
            if rows and not self.checked:
                self._check_cache()
            by_adapter = [list(group) for _, group in itertools.groupby(rows, lambda r: adapters[r // n])]
            size = self.batch_size
            for chunk in [group[at : at + size] for group in by_adapter for at in range(0, len(group), size)]:
                owners = [row // n for row in chunk]
                texts = [(tuple(prompts[p].ids), prompts[p].shown if self.loaded.images else ()) for p in owners]
                place = {text: i for i, text in enumerate(dict.fromkeys(texts))}  # each distinct prompt is run once
                adapter = prompts[owners[0]].adapter
                with use(self.model, adapter) if hasattr(self.model, "peft_config") else contextlib.nullcontext():
                    completions = decode(
                        self.model,
                        [ids for ids, _ in place],
                        [place[text] for text in texts],
                        u[chunk],
                        sampling,
                        eos_ids=self.eos_ids,
                        pad_id=self.pad_id,
                        stops=stops,
                        limits=None if batch.limits is None else [batch.limits[p] for p in owners],
                        reader=self.loaded.images,
                        images=[images for _, images in place],
                    )
                if not batch.logprobs:
                    completions = [Completion(c.ids, None, c.finish) for c in completions]
                found.update(zip(chunk, completions, strict=True))
                for p in dict.fromkeys(owners):
                    samples = [found[p * n + i] for i in range(n) if p * n + i in found]
                    if len(samples) == n:
                        about: dict[str, Any] = {"first_group": batch.first_group, "version": self.version}
                        made[p] = as_rollouts(prompts, n, samples, self.tokenizer, share=[p], **about)
                        if done is not None and len(found) < len(rows):
                            done(made[p])
        return [rollout for p in sorted(made) for rollout in made[p]]

    def _check_cache(self) -> None:
        """Raise EngineError for an architecture whose state is not in the key-value cache that sampling passes on."""
        why = ""
        try:
            gap = cache_gap(self.model, self.pad_id)
            if not gap <= logp_tolerance(compute_dtype(self.loaded.device, self.model.dtype)):
                why = f"log-probs token by token are {gap:.3g} nats from those of a whole pass"
        except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
            why = str(error).splitlines()[0]
        if why:
            name = type(causal_of(self.model)).__name__
            raise EngineError(
                f"the transformers engine cannot sample from {name}", allowed=why, hint="use `engine: vllm`"
            )
        self.checked = True

    def sync(self, model: Any, version: int) -> None:
        """Set the version. Raises EngineError if `model` is not the model that generates."""
        if model is not self.model:
            if not isinstance(causal_of(model), FSDPModule):
                raise EngineError("the transformers engine generates with the model it was made with; got another one")
            self._copy_from(model)
        self.version = version

    def _copy_from(self, model: Any) -> None:
        """Copy the trained weights of a sharded model; only the adapter's if the base is frozen."""
        with torch.no_grad():
            if model is not causal_of(model):
                trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
                for name, weight in self.model.named_parameters():
                    if name in trained:
                        weight.copy_(trained[name])
                return
            target = dict(dense_weights(self.model))
            with weight_stream(model, names="modules") as whole:
                for name, weight in whole:
                    target[name].copy_(weight)


@contextlib.contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Switch to evaluation mode (no dropout, no checkpointing) inside the block, and restore every module's mode
    afterwards.

    4-bit layers stay in training mode, which changes nothing else about them: on some CPUs bitsandbytes repacks a layer
    in evaluation mode and permanently rounds its scales to bfloat16, so sampler and trainer would differ.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for module, _ in modes:
        if type(module).__module__.startswith("bitsandbytes."):
            module.training = True
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


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
    stops: Callable[[Tensor], Tensor] | None = None,
    limits: Sequence[int] | None = None,
    reader: ImageReader | None = None,
    images: Sequence[Sequence[Image]] | None = None,
) -> list[Completion]:
    """Return one completion for each row. Row r continues prompts[owner[r]] and draws its t-th token with u[r, t].

    Each prompt is run through the model once, however many rows continue it. `u` is [rows, sampling.max_new_tokens].
    limits: maximum number of tokens of each row, by default max_new_tokens. reader: of a vision model, with the images
    of each prompt; image placeholder tokens are never sampled.
    """
    device = model.device
    image_inputs = (
        None if reader is None or images is None or not any(images) else reader.bind(backbone(causal_of(model)), images)
    )
    state = _Rows(model, prompts, torch.tensor(owner, device=device), pad_id, image_inputs)
    forbidden = None if reader is None else torch.tensor(sorted(reader.token_ids), device=device)
    eos = torch.tensor(sorted(eos_ids), device=device)
    u = u.to(device)
    alive = torch.arange(len(owner), device=device)  # output row of each running row
    tokens = torch.full((len(owner), sampling.max_new_tokens), pad_id, device=device)
    logps = torch.zeros(tokens.shape, device=device)
    longest = max(limits, default=0) if limits is not None else sampling.max_new_tokens
    lengths = torch.tensor(limits, device=device) if limits is not None else torch.full_like(alive, longest)
    stopped = torch.zeros(len(owner), dtype=torch.bool, device=device)

    for t in range(longest):
        new, logp = sample(state.logits, u[alive, t], sampling, forbidden)
        running = ~stopped[alive] & (t < lengths[alive])
        tokens[alive, t] = torch.where(running, new, pad_id)
        logps[alive, t] = torch.where(running, logp, 0.0)
        ends = torch.isin(new, eos)
        if stops:
            ends = ends | stops(tokens[alive, : t + 1])
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
        state.step(new[:, None])
    if not bool(logps.isfinite().all()):
        raise NonFiniteError("the model's logits are NaN or infinite while it generates")
    rows = zip(tokens.tolist(), logps.tolist(), lengths.tolist(), stopped.tolist(), strict=True)
    return [
        Completion(tuple(ids[:length]), tuple(values[:length]), "stop" if stop else "length")
        for ids, values, length, stop in rows
    ]


def cache_gap(model: Any, pad_id: int) -> float:
    """Return the mean gap in nats between log-probs from `decode`, token by token, and from one forward pass.

    It is rounding if the model takes its state from the cache that it is given; some architectures keep their own.
    """
    size, device = model.config.get_text_config().vocab_size, model.device
    prompts = [[n % size for n in range(11, 11 + length)] for length in (9, 5)]
    greedy = Sampling(temperature=0.0, max_new_tokens=4)
    gaps: list[float] = []
    for prompt, sample in zip(
        prompts, decode(model, prompts, [0, 1], torch.zeros(2, 4), greedy, eos_ids=(-1,), pad_id=pad_id), strict=True
    ):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *sample.ids]], device=device), use_cache=False).logits[0]
        every = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        whole = every.gather(-1, torch.tensor(sample.ids, device=device)[:, None])[:, 0].tolist()
        gaps += [abs(a - b) for a, b in zip(whole, sample.logps or (), strict=True)]
    return sum(gaps) / len(gaps)


def stop_check(texts: Sequence[str], tokenizer: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that finds rows that end with one of `texts`: sampled tokens [R, t] -> [R] bool.

    Special tokens count as their text, so `</answer>` may be either.

    Only the last tokens are decoded. A character takes at most four byte tokens, so four tokens per character of the
    longest text, and four for a character cut at the edge, always hold a text that the newest token completes.
    """
    reach = 4 * max(len(t) for t in texts) + 4

    def has_ended(tokens: Tensor) -> Tensor:
        ids = tokens[:, -reach:].tolist()
        tails = tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return torch.tensor([any(text in tail for text in texts) for tail in tails], device=tokens.device)

    return has_ended


class _Rows:
    """Model state of the running rows: key-value cache, padding mask, positions, next-token logits [R,V]."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        owner: Tensor,
        pad_id: int,
        image_inputs: ImageInputs | None = None,
    ) -> None:
        """image_inputs: returns the model's inputs for the prompts' images, and the positions that follow from them."""
        self.model = model
        self.cache = DynamicCache(config=model.config)
        longest = max(len(p) for p in prompts)  # left-padded, so that all rows end together
        ids = torch.tensor([[pad_id] * (longest - len(p)) + list(p) for p in prompts], device=owner.device)
        self.mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=owner.device)
        self.padded = not bool(self.mask.all())  # without padding no mask is passed, for the faster attention path
        self.position = (self.mask.cumsum(-1) - 1).clamp(min=0)  # of the next tokens
        self.logits: Tensor  # of the next token [R,V], set by `step`
        given, by_grid = (None, None) if image_inputs is None else image_inputs(ids, self.mask)
        if by_grid is not None:
            self.position = by_grid
        self.step(ids, given)
        if by_grid is not None:
            self.position = by_grid.amax((0, 2))[:, None] + 1
        self.select(owner)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, in this order; a row may be repeated."""
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]  # any index tensor
        self.mask, self.position, self.logits = self.mask[rows], self.position[rows], self.logits[rows]

    def step(self, tokens: Tensor, given: Mapping[str, Any] | None = None) -> None:
        """Append tokens [R,S] to all rows and compute the next logits. given: additional inputs of the model."""
        out = self.model(
            input_ids=tokens,
            attention_mask=self.mask if self.padded else None,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **(given or {}),
        )
        self.logits = out.logits[:, -1]
        self.position = self.position[..., -1:] + 1
        if self.padded:  # 1 = a token
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=-1)


def uniforms(rows: int, length: int, seed: int) -> Tensor:
    """Return random numbers in [0, 1) [rows, length], drawn on the CPU from their own generator.

    One number per row and position decides a token, so a row does not depend on the batch in which it is decoded or on
    when other rows finish, and the global random state is neither read nor changed.
    """
    return torch.rand(rows, length, generator=torch.Generator().manual_seed(seed))


def sample(logits: Tensor, u: Tensor, sampling: Sampling, forbidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sample one token per row: logits [R,V], u [R] in [0,1) -> tokens [R], log-probs [R] (fp32, before top-k, top-p
    and the exclusion of forbidden tokens)."""
    scaled = logits.float()
    if sampling.temperature > 0:
        scaled = scaled / sampling.temperature
    logp = scaled.log_softmax(-1)
    allowed = logp if forbidden is None else logp.index_fill(-1, forbidden, -torch.inf)
    if sampling.temperature == 0:
        tokens = allowed.argmax(-1)
    else:
        probs = allowed.exp()
        if sampling.top_k or sampling.top_p < 1.0:
            probs = truncate(probs, top_k=sampling.top_k, top_p=sampling.top_p)
        tokens = inverse_cdf(probs, u)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds u * total: weights [R,V] >= 0, u [R] in [0,1) -> [R].

    Never returns a token of weight 0: the target is kept below the total, which rounding could otherwise reach.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(u[:, None].to(total.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    # NaN weights give the last token; `decode` raises for them
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def truncate(probs: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return probs [R,V] with all tokens set to 0 outside the top k (0 = all) and outside the nucleus of mass p.

    The nucleus is taken after top-k. It is the smallest set of most likely tokens whose mass reaches p, so at least one
    token remains. Ties at the k-th place are all kept.
    """
    if 0 < top_k < probs.shape[-1]:
        kth = probs.topk(top_k, dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < kth, 0.0)
    if top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of all more likely tokens
        outside = before >= top_p * ordered.sum(-1, keepdim=True)
        outside[:, 0] = False
        probs = probs.masked_fill(outside.scatter(-1, order, outside), 0.0)
    return probs
