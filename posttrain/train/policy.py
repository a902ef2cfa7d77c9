"""Forward passes of the policy, its reference and its critic on rollouts, limited to what the objective needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.batch import Rollout, RolloutBatch
from posttrain.errors import UserError
from posttrain.images import Image, add_noise, degrade
from posttrain.loss.regularise import reference_power
from posttrain.models.adapters import causal_of
from posttrain.models.weight_names import class_of
from posttrain.recipe.rl_stage import BY_REFERENCE
from posttrain.rollout.hf import eval_mode
from posttrain.seeds import derive
from posttrain.train.collate import Sequences, sequences_of, with_images
from posttrain.train.context import TrainContext
from posttrain.train.context_split import is_split
from posttrain.train.logprobs import Extras, Head, Teacher, completion_scores, micro_batches
from posttrain.train.prompt_sharing import Prompts
from posttrain.train.turn_fields import turn_of_each

# Computed once a step, without gradient, before the first update: field of the batch -> its name in `scores`.
AT_ROLLOUT = {
    "old_logp": "logp",
    "entropy": "entropy",
    "values": "values",
    "hidden": "hidden",
    "topk_logp": "topk_logp",
    "topk_chosen": "topk_chosen",
    "old_vocab_mean_logp": "vocab_mean_logp",
}
ON_OTHER_SEQUENCES = {"expert_logp", "answer_logp"}  # computed on other sequences than those that are trained on
Run = Callable[[Sequences, list[int]], dict[str, Tensor]]  # a pass over some rows, given the rows and their indices
TOP_K = 50  # number of most likely tokens for components without a key `top_k`


def scores(
    p: TrainContext, model: nn.Module, sequences: Sequences, width: int, extras: Extras, power: Tensor | None = None
) -> dict[str, Tensor]:
    """Run one forward pass at the rollouts' temperature, in the run's precision.

    power [N]: raises each row's distribution to this power, which divides the temperature by it.
    """
    temperature: float | Tensor = p.recipe.rollout.temperature or 1.0
    if power is not None:
        temperature = temperature / power.clamp(min=1e-6)
    # Lines of many lengths would fragment the memory of a GPU, and ranks divide lines among them.
    fills_lines = p.packed and (p.loaded.device.type == "cuda" or is_split(causal_of(p.loaded.model)))
    with p.loaded.autocast():
        return completion_scores(
            model,
            sequences,
            width,
            temperature,
            packed=p.packed,
            share=p.shares
            and class_of(causal_of(model)) is class_of(causal_of(p.loaded.model)),  # a teacher may differ
            fill=max(1, p.recipe.batch.micro_tokens // 16) if fills_lines else 1,
            extras=extras,
            reader=p.loaded.images,
        )


def prompts_of(p: TrainContext, sequences: Sequences) -> Prompts | None:
    """Return which of these rows share the pass of their prompt; None if sharing is not possible or not worthwhile."""
    prompts = sequences.prompts
    return prompts if p.shares and prompts.is_worthwhile() else None


def micro_batches_of(
    p: TrainContext, sequences: Sequences, rows: Sequence[int], groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Split the row indices `rows` into micro-batches (`micro_batches`), none with rows of two adapters.

    groups: of all rows.
    """
    batches: list[list[int]] = []
    for own in sequences.by_adapter(rows).values():
        micro = micro_batches(
            [len(sequences.ids[r]) for r in own],
            p.recipe.batch.micro_tokens,
            packed=p.packed,
            groups=None if groups is None else [groups[r] for r in own],
            prompts=prompts_of(p, sequences.select(own)) if p.shares else None,
        )
        batches += [[own[m] for m in part] for part in micro]
    return batches


def current_logprobs(p: TrainContext, batch: RolloutBatch, sequences: Sequences) -> tuple[Tensor, Tensor, RolloutBatch]:
    """Compute (logp, entropy, batch) of the current policy with gradient.

    The batch gets the other fields that the loss reads of this pass.
    """
    needs = p.objective.needs
    head = p.critic if "new_values" in needs else None
    extras = Extras(
        vocab_mean="vocab_mean_logp" in needs,
        entropy="new_entropy" in needs,
        value_head=head,
        router="router_loss" in needs,
        teacher=teacher_of(p, batch) if "divergence" in needs else None,
    )
    found = scores(p, p.loaded.model, sequences, batch.mask.shape[1], extras)
    same = ("vocab_mean_logp", "new_entropy", "router_loss", "divergence")
    read = {"new_values": "values", **{name: name for name in same}}
    batch = batch.replace(**{field: found.get(name) for field, name in read.items()})
    return found["logp"], found["entropy"], batch


def teacher_of(p: TrainContext, batch: RolloutBatch) -> Teacher:
    """Return the reference's head with its hidden states of these rows, and the KL term's beta."""
    assert p.reference is not None and batch.ref_hidden is not None and p.objective.kl is not None
    with p.reference() as model:  # stays on its device afterwards: `kl.use` is refused with an offloaded reference
        head = Head(causal_of(model))
    return Teacher(head, batch.ref_hidden, float(p.objective.kl.params.get("beta", 1.0)))


def compute_logprobs(
    p: TrainContext, batch: RolloutBatch, sequences: Sequences, rows: Sequence[int], needs: Collection[str]
) -> RolloutBatch:
    """Return the batch with the fields of `needs` that it lacks and that a forward pass can give; 0 outside `rows`.

    Call this before the first update, while the policy is the one at the start of the step. Runs without dropout. A
    pass of the policy also gives `old_logp` if the updates will need it.
    """
    missing = {name for name in needs if hasattr(batch, name) and getattr(batch, name) is None}
    width = batch.mask.shape[1]
    frozen = p.recipe.critic.path is not None  # a frozen critic reads the features of the starting policy
    wanted = [name for name in AT_ROLLOUT if name in missing and not (name == "values" and frozen)]
    if wanted and batch.old_logp is None and p.needs_old_logp:
        wanted = list(dict.fromkeys(["old_logp", *wanted]))
    if wanted:
        top_k = {"topk_logp", "topk_chosen"}
        sizes = [part.params.get("top_k", TOP_K) for part in p.objective.every_part if part.needs & top_k]
        extras = Extras(
            vocab_mean="old_vocab_mean_logp" in wanted,
            top_k=max(sizes, default=TOP_K) if top_k & missing else 0,
            hidden="hidden" in wanted,
            value_head=p.critic if "values" in wanted else None,
        )
        found = _policy_scores(p, sequences, rows, width, extras)
        batch = batch.replace(**{name: found[AT_ROLLOUT[name]] for name in wanted})
    if p.reference is not None and missing & {*BY_REFERENCE, *(("values",) if frozen else ())}:
        with torch.no_grad(), p.reference() as model:
            frozen_values = frozen and "values" in missing
            if "ref_logp" in missing or frozen_values:
                extras = Extras(value_head=p.critic if frozen_values else None)
                found = _in_parts(p, sequences, rows, lambda s, _: scores(p, model, s, width, extras))
                batch = batch.replace(ref_logp=found["logp"], **({"values": found["values"]} if frozen_values else {}))
            if "ref_hidden" in missing:
                found = _in_parts(p, sequences, rows, lambda s, _: scores(p, model, s, width, Extras(hidden=True)))
                batch = batch.replace(ref_hidden=found["hidden"])
            if "tempered_ref_logp" in missing:
                part = next(part for part in p.objective.terms if "tempered_ref_logp" in part.needs)
                power = reference_power(batch, **part.params).float()
                found = _in_parts(p, sequences, rows, lambda s, r: scores(p, model, s, width, Extras(), power[r]))
                batch = batch.replace(tempered_ref_logp=found["logp"])
    for name, weights in (("opponent_logp", p.opponent), ("prox_logp", p.proximal)):
        if weights is not None and name in missing:
            with weights.in_place(p.loaded.model) as model:
                found = _in_parts(p, sequences, rows, lambda s, _: scores(p, model, s, width, Extras()))
            batch = batch.replace(**{name: found["logp"]})
    if "prompt_logp" in missing:
        batch = _prompts(p, batch, sequences)
    for name in CHANGED_IMAGES:
        if name in missing:
            batch = _by_changed_images(p, batch, sequences, rows, name)
    return batch


def compute_on_other_sequences(p: TrainContext, batch: RolloutBatch, rollouts: Sequence[Rollout]) -> RolloutBatch:
    """Return the batch with log-probs of other sequences than those that are trained on, before the first update.

    These are `old_logp` under the prompts that were sampled from, if the trained pass reads other prompts;
    `expert_logp`; `answer_logp`.
    """
    if any(rollout.loss_ids is not None for rollout in rollouts):
        batch = compute_logprobs(p, batch, sequences_of(rollouts, sampled=True), range(len(batch)), {"old_logp"})
    if "expert_logp" in p.objective.needs:
        batch = batch.replace(expert_logp=_expert_logp(p, rollouts, batch.mask.shape[1]).to(batch.mask.device))
    if "answer_logp" in p.objective.needs:
        batch = batch.replace(answer_logp=answer_logprobs(p, rollouts).to(batch.mask.device))
    return batch


def answer_logprobs(p: TrainContext, rollouts: Sequence[Rollout]) -> Tensor:
    """Compute the mean log-prob [N,S] of the data's answer before each turn of a rollout.

    The answer follows the rollout so far and the `closing` of the component that reads it. NaN past a rollout's last
    turn, and if the data has no answer.
    """
    params = next(part for part in p.objective.every_part if "answer_logp" in part.needs).params
    # (tokens, images, adapter) of a pass -> (row, turn) cells of its result; `answers`: length of each pass's answer
    cells: dict[tuple[tuple[int, ...], tuple[Image, ...], str | None], list[tuple[int, int]]] = {}
    answers: list[int] = []
    counts = [0] * len(rollouts)
    closing = _encode(p, params["closing"])
    for row, rollout in enumerate(rollouts):
        gold, turn_ids = rollout.prompt.row.get(params["answer"]), turn_of_each(rollout)
        answer = _encode(p, gold) if isinstance(gold, str) else ()
        counts[row] = int(turn_ids[np.array(rollout.loss_mask, bool)].max(initial=-1)) + 1
        for turn in range(counts[row] if answer else 0):
            prefix = rollout.ids[: int((turn_ids < turn).sum())]
            tokens = (*rollout.prompt.ids, *prefix, *closing, *answer)
            key = tokens, rollout.images_within(len(prefix)), rollout.prompt.adapter
            if key not in cells:
                cells[key] = []
                answers.append(len(answer))
            cells[key].append((row, turn))
    logprobs = torch.full((len(rollouts), max([*counts, 1])), torch.nan)
    if not cells:
        return logprobs
    ids = tuple(np.array(tokens, np.int64) for tokens, *_ in cells)
    lengths = tuple(len(row) - answer for row, answer in zip(ids, answers, strict=True))
    sequences = with_images(ids, lengths, [images for _, images, _ in cells])
    sequences = _with_adapters(sequences, [adapter for *_, adapter in cells])
    width = max(answers)
    passed = _policy_scores(p, sequences, range(len(cells)), width, Extras())
    for cells_of_pass, answer_length, logp in zip(cells.values(), answers, passed["logp"].cpu(), strict=True):
        for row, turn in cells_of_pass:
            logprobs[row, turn] = logp[:answer_length].mean()
    return logprobs


def _with_adapters(sequences: Sequences, adapters: Sequence[str | None]) -> Sequences:
    """Return the rows with the name of each row's adapter (None: the first)."""
    return dataclasses.replace(sequences, adapters=tuple(adapters) if any(adapters) else None)


def _encode(p: TrainContext, text: str) -> tuple[int, ...]:
    return tuple(p.loaded.tokenizer(text, add_special_tokens=False)["input_ids"])


def _expert_logp(p: TrainContext, rollouts: Sequence[Rollout], width: int) -> Tensor:
    """Compute log-probs [N,T] of the given solution of each row's prompt, under the row's adapter; NaN past its end and
    without a solution."""
    logp = torch.full((len(rollouts), width), torch.nan)
    # roles of a workflow have prompts of their own for one row of the data, and may have adapters of their own
    keys = [(r.prompt.uid, r.prompt.ids, r.prompt.adapter) for r in rollouts]
    solved = {key: r.prompt for key, r in zip(keys, rollouts, strict=True) if r.prompt.uid in p.solutions}
    if not solved:
        return logp
    prompts = list(solved.values())
    ids = tuple(np.array(prompt.ids + p.solutions[prompt.uid], np.int64) for prompt in prompts)
    sequences = _with_adapters(
        with_images(ids, tuple(len(prompt.ids) for prompt in prompts), [prompt.shown for prompt in prompts]),
        [prompt.adapter for prompt in prompts],
    )
    longest = max(len(p.solutions[prompt.uid]) for prompt in prompts)
    passed = _policy_scores(p, sequences, range(len(ids)), longest, Extras())
    index = {key: n for n, key in enumerate(solved)}
    for row, key in enumerate(keys):
        if (n := index.get(key)) is not None:
            length = min(len(p.solutions[key[0]]), width)
            logp[row, :length] = passed["logp"][n, :length].cpu()
    return logp


# field of the batch -> (function that changes the images of its pass, purpose of its random seed)
CHANGED_IMAGES: dict[str, tuple[Callable[..., Image], str]] = {
    "masked_logp": (degrade, "masked images"),
    "perturbed_logp": (add_noise, "noisy images"),
}


def _by_changed_images(
    p: TrainContext, batch: RolloutBatch, sequences: Sequences, rows: Sequence[int], name: str
) -> RolloutBatch:
    """Compute the policy's log-probs with masked or noisy images, changed in the same way for all rollouts of a prompt.

    Rows without images give the unchanged log-probs. Raises UserError for a step without images if no prompt of the
    data has one.
    """
    make, purpose = CHANGED_IMAGES[name]
    part = next(part for part in p.objective.terms if name in part.needs)
    if sequences.images is None and not any(prompt.images for prompt in p.prompts):
        raise UserError(
            f"`{part.name}` compares log-probs under an image and under a changed image, and no row has an image",
            where=part.key,
            hint="give the rows a column `images`, or leave it out",
        )
    seed = derive(p.recipe.run.seed, purpose, batch.step)

    def change(image: Image) -> Image:
        return make(image, **part.params, seed=derive(seed, image.source))

    changed = sequences
    if sequences.images is not None:
        replaced = {image: change(image) for row in rows for image in sequences.images[row]}
        images = tuple(tuple(replaced.get(image, image) for image in row) for row in sequences.images)
        changed = dataclasses.replace(sequences, images=images)
    width = batch.mask.shape[1]
    return batch.replace(**{name: _policy_scores(p, changed, rows, width, Extras())["logp"]})


def _prompts(p: TrainContext, batch: RolloutBatch, sequences: Sequences) -> RolloutBatch:
    """Compute log-probs of the prompts' tokens, once a group. The first token of a prompt has none."""
    firsts: dict[int, int] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        firsts.setdefault(group, row)
    rows = list(firsts.values())
    ids = tuple(sequences.ids[r][: sequences.prompt_lengths[r]] for r in rows)
    images = [() if sequences.images is None else sequences.images[r][: sequences.shown_in_prompt(r)] for r in rows]
    adapters = sequences.select(rows).adapters
    prompts = dataclasses.replace(with_images(ids, (1,) * len(ids), images), adapters=adapters, own=sequences.own)
    width = max(max(prompts.lengths) - 1, 1)
    found = _policy_scores(p, prompts, range(len(ids)), width, Extras())
    index = {group: n for n, group in enumerate(firsts)}
    expand = torch.tensor([index[group] for group in batch.group_ids.tolist()], device=batch.mask.device)
    lengths = torch.tensor([n - 1 for n in prompts.lengths], device=batch.mask.device)
    mask = torch.arange(width, device=batch.mask.device) < lengths[:, None]
    return batch.replace(prompt_logp=found["logp"][expand], prompt_mask=mask[expand])


def prompt_states(p: TrainContext, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Compute the policy's last hidden state [N,H] at the last token of each prompt, without gradient; on all ranks."""
    ids = tuple(np.array([*prompt, prompt[-1]], np.int64) for prompt in prompts)  # the appended token is arbitrary
    sequences = Sequences(ids, tuple(map(len, prompts)))

    def last(some: Sequences, _: list[int]) -> dict[str, Tensor]:
        return {"hidden": scores(p, p.loaded.model, some, 1, Extras(hidden=True))["hidden"][:, 0]}

    with torch.no_grad(), eval_mode(p.loaded.model):
        return _in_parts(p, sequences, range(len(ids)), last)["hidden"]


def _policy_scores(
    p: TrainContext, sequences: Sequences, rows: Sequence[int], width: int, extras: Extras
) -> dict[str, Tensor]:
    """Run the policy on `rows` in micro-batches, without gradient or dropout."""
    with torch.no_grad(), eval_mode(p.loaded.model):
        return _in_parts(p, sequences, rows, lambda s, _: scores(p, p.loaded.model, s, width, extras))


def _in_parts(
    p: TrainContext,
    sequences: Sequences,
    rows: Sequence[int],
    run: Run,
    *,
    here: bool = False,
) -> dict[str, Tensor]:
    """Call `run` on `rows` in micro-batches; return results indexed by row, 0 elsewhere.

    here: this rank runs these rows alone; else they are divided (`_among_ranks`). A rank without rows runs one pass
    whose result is dropped, to learn the names and shapes of the results.
    """
    if p.ranks.count > 1 and not here:
        return _among_ranks(p, sequences, rows, run)
    out: dict[str, Tensor] = {}
    parts = micro_batches_of(p, sequences, rows)
    idle = p.ranks.idle_passes(len(parts)) if sequences.own else 0
    for chosen in [*parts, *[list[int]()] * max(idle, not parts)]:
        passed = chosen or [shortest(sequences)]
        for name, value in run(sequences.select(passed), passed).items():
            value = value.float() if value.is_floating_point() else value
            if name not in out:
                out[name] = value.new_zeros((len(sequences), *value.shape[1:]))
            if chosen:
                out[name][chosen] = value
    return out


def _among_ranks(p: TrainContext, sequences: Sequences, rows: Sequence[int], run: Run) -> dict[str, Tensor]:
    """Call `_in_parts` on several ranks; an error of one rank is raised on all.

    Sequences that all ranks hold are divided among them if there is at least one row per rank, and every rank gets all
    results. Otherwise each rank runs all of these rows.
    """
    in_parts = partial(_in_parts, here=True)
    if sequences.own or p.ranks.count > len(rows) * p.ranks.model_parallel_size:
        return p.ranks.run_passes(in_parts, p, sequences, rows, run)  # all these rows, on each rank
    prompts = prompts_of(p, sequences.select(rows)) if p.shares else None
    units = None  # or a prompt index per row, so that one rank gets all rows of a prompt
    if prompts is not None and len(set(prompts.numbers)) >= 4 * p.ranks.count // p.ranks.model_parallel_size:
        units = prompts.numbers
    own_rows = [rows[n] for n in p.ranks.my_rows([len(sequences.ids[r]) for r in rows], units)]
    results = p.ranks.run_passes(in_parts, p, dataclasses.replace(sequences, own=True), own_rows, run)
    return {name: p.ranks.sum(value) for name, value in results.items()}


def shortest(sequences: Sequences) -> int:
    """Return the index of the row whose pass costs least, with a completion if any row has one."""
    lengths = sequences.lengths
    return min(range(len(lengths)), key=lambda row: (lengths[row] == sequences.prompt_lengths[row], lengths[row]))
