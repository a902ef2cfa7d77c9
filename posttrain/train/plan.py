"""Report of `posttrain plan` on a recipe before it runs: counts of rows, steps and tokens, and memory by phase."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.batch import Prompt
from posttrain.errors import RecipeError
from posttrain.models import load as models
from posttrain.models.model_paths import has_tokenizer
from posttrain.recipe.stages import DpoRecipe, RewardModelRecipe, RlRecipe, SftRecipe
from posttrain.rollout import vllm_start
from posttrain.rollout.continuation import rehearse_shape
from posttrain.rollout.engine_group import check_groups
from posttrain.train import assemble
from posttrain.train.cluster_plan import plan_cluster
from posttrain.train.memory import GIB
from posttrain.train.memory_plan import (
    Machine,
    Recipe,
    count_passes,
    edits,
    predict_phases,
    shape_of,
    skeleton,
    trains_on_pairs,
)
from posttrain.train.row_plan import row_plan
from posttrain.train.step_time import Rates

SHOWN_GIB = 0.01  # sizes are rounded to this; a change that lowers the peak by less is not suggested


def plan(recipe: Any, machine: Machine | None = None, rates: Rates | None = None) -> dict[str, Any]:
    """Return everything that `posttrain plan` prints, in GiB and plain numbers.

    rates: if given, also predict the time of a step from these rates. Raises RecipeError if the recipe does not train.
    """
    if not isinstance(recipe, RlRecipe | SftRecipe | DpoRecipe | RewardModelRecipe):
        raise RecipeError(
            f"`plan` is for recipes that train; this is one for `posttrain {recipe.verb}`",
            allowed="allowed: recipes for rl, sft, dpo and reward-model",
            hint="to plan a stage of a pipeline, write it as a separate recipe" if recipe.verb == "run" else "",
        )
    machine = machine or Machine.here()
    with models.read_gguf_once(recipe.model, recipe.base_dir):
        model = skeleton(recipe)
        if isinstance(recipe, RlRecipe):
            check_engine_gpus(recipe, model.config, machine.ranks)
        shape = shape_of(model, recipe.model.lora)
        counts, longest = count_rows_and_tokens(recipe, rates.prompt if rates else Rates.prompt)
    found = predict_phases(recipe, shape, longest, machine)
    timed = {} if rates is None else {"cluster": plan_cluster(recipe, shape, longest, machine, rates)}
    return {
        **timed,
        "machine": machine.name,
        "ranks": machine.ranks,
        "parameters": shape.parameters,
        "trained": shape.adapter or shape.parameters,
        "batch": counts,
        "memory_gib": {
            name: {part: round(size / GIB, 2) for part, size in {**parts, "sum": sum(parts.values())}.items()}
            for name, parts in found.parts.items()
        },
        "peak_gib": round(found.peak / GIB, 2),
        "peak_phase": found.peak_phase,
        "host_gib": {part: round(size / GIB, 2) for part, size in found.host.items()},
        "card_gib": round(machine.card / GIB, 1),
        "fits": found.peak < machine.card,
        "elsewhere": engine_servers(recipe, machine),
        "edits": [
            {"change": e.text, "peak_gib": round(e.peak / GIB, 2)}
            for e in edits(recipe, shape, longest, machine, at_least=int(SHOWN_GIB * GIB))
        ],
    }


def check_engine_gpus(recipe: RlRecipe, config: Any, ranks: int) -> None:
    """Raise RecipeError if the engine's GPUs cannot divide the model, or do not fit the number of training ranks."""
    vllm = recipe.rollout.vllm
    vllm_start.check_divisible(config, vllm.tensor_parallel)
    if recipe.rollout.engine == "vllm" and vllm.server is None:
        check_groups(vllm.tensor_parallel, ranks, ranks)


def engine_servers(recipe: Recipe, machine: Machine) -> dict[str, float]:
    """Return the number of engine servers, the GPUs of each, and GiB per GPU if they are like the trainer's.

    {} if the engine runs beside the trainer.
    """
    vllm = recipe.rollout.vllm if isinstance(recipe, RlRecipe) and recipe.rollout.engine == "vllm" else None
    if vllm is None or vllm.server is None:
        return {}
    count = vllm.servers
    gib = round(vllm.share * machine.card / GIB, 1)
    return {"servers": count, "gpus_each": vllm.tensor_parallel, "gib_each": gib}


def count_rows_and_tokens(recipe: Recipe, prompt: int = Rates.prompt) -> tuple[dict[str, float], int]:
    """Return (counts of rows, steps, updates and tokens, length of the longest prompt or row) from the prepared data.

    If the model's folder has no tokenizer, prompts of `prompt` tokens are assumed.
    """
    if not has_tokenizer(recipe.model.path, recipe.base_dir):
        return _assumed_counts(recipe, prompt)
    return _rl_counts(recipe) if isinstance(recipe, RlRecipe) else _row_counts(recipe)


def _assumed_counts(recipe: Recipe, prompt: int) -> tuple[dict[str, float], int]:
    """Return counts for a model without a tokenizer, where no text becomes tokens.

    In stages other than rl a row has `data.max_length` tokens, or `prompt` if that is not set.
    """
    if not isinstance(recipe, RlRecipe):
        longest = recipe.data.max_length or prompt
        return {"longest row (no tokenizer: assumed)": longest, "rows a step": recipe.batch.size}, longest
    rows = recipe.rollout.prompts_per_step * recipe.rollout.group_size
    return {
        "tokens of a prompt (no tokenizer: assumed)": prompt,
        "rollouts a step": rows,
        "updates a step": recipe.batch.epochs * recipe.batch.minibatches,
        "tokens a step at most": rows * (prompt + recipe.rollout.max_new_tokens),
    }, prompt


def _rl_counts(recipe: RlRecipe) -> tuple[dict[str, float], int]:
    from posttrain.data.prepare import prepare_prompts
    from posttrain.train.variants import PromptVariants

    tokenizer = models.load_tokenizer(recipe.model, recipe.base_dir)
    reader = models.load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    prompts = prepare_prompts(recipe.data, tokenizer, recipe.base_dir, reader=reader).items
    variants = PromptVariants.from_recipe(recipe, prompts, tokenizer, None, reader)
    room = variants.room if variants else 0
    shape = assemble.build_shape(recipe, tokenizer, prompts, reader)
    longest = max(len(p.ids) for p in prompts) + room + (shape.room if shape else 0)
    parts = len(rehearse_shape(shape, prompts[0], recipe.rollout)) if shape else 1
    rollout, batch = recipe.rollout, recipe.batch
    steps, rows = assemble.total_steps(recipe, len(prompts)), rollout.prompts_per_step * rollout.group_size
    mean, extra = sum(len(p.ids) for p in prompts) / len(prompts), count_passes(recipe)
    return {
        "prompts": len(prompts),
        "longest prompt": longest,
        **({"of these tokens a variant may add": room} if room else {}),
        "steps": steps,
        "rollouts a step": rows,
        **({"rows of a rollout that fills its limits": parts} if shape else {}),
        **_of_sampler(recipe, prompts, steps),
        **_of_replay(recipe),
        "updates a step": batch.epochs * batch.minibatches,
        "updates": steps * batch.epochs * batch.minibatches,
        "rollouts an update": rows // batch.minibatches,
        "passes without gradient a step": round(extra, 2) if extra % 1 else int(extra),
        "tokens a step at most": round(rows * parts * (mean + rollout.max_new_tokens + (shape.room if shape else 0))),
    }, longest


def _of_sampler(recipe: RlRecipe, prompts: Sequence[Prompt], steps: int) -> dict[str, float]:
    """Return the counts that a prompt sampler other than `uniform` adds."""
    from posttrain.train.prompt_sampler import StepSampler

    if recipe.sampler.use == "uniform":
        return {}
    source, rollout = StepSampler.from_recipe(recipe, prompts, steps), recipe.rollout
    candidates = source.places(rollout)
    return {
        "rollouts of a prompt at most": source.sampler.most(rollout.prompts_per_step, rollout.group_size)[1],
        **({"candidates a step": candidates} if candidates > rollout.prompts_per_step else {}),
    }


def _of_replay(recipe: RlRecipe) -> dict[str, float]:
    """Return what is stored for later steps, on the host and in each checkpoint."""
    if recipe.replay is None:
        return {}
    limit = recipe.replay.limit
    return {"stored rollouts at most": limit, "their tokens at most": limit * recipe.rollout.max_new_tokens}


def _row_counts(recipe: SftRecipe | DpoRecipe | RewardModelRecipe) -> tuple[dict[str, float], int]:
    from posttrain.data import prepare
    from posttrain.train.reward_rows import held_out

    tokenizer = models.load_tokenizer(recipe.model, recipe.base_dir)
    kind: Callable[..., Any] = prepare.prepare_pairs if trains_on_pairs(recipe) else prepare.prepare_examples
    reader = models.load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    items = kind(recipe.data, tokenizer, recipe.base_dir, reader=reader).items
    lengths = [_length(item) for item in items]
    share = recipe.objective.holdout if isinstance(recipe, RewardModelRecipe) else 0.0
    rows = len(items) - len(held_out([item.uid for item in items], share, recipe.run.seed))
    cut = row_plan(recipe, rows)
    size = min(cut.size, cut.rows)  # epochs may end before one step is full
    return {
        "rows": rows,
        "longest row": max(lengths),
        "steps": cut.steps,
        "rows a step": size,
        "rows a forward pass": min(cut.micro, size),
        "forward passes a step": math.ceil(size / cut.micro),
        "tokens a step on average": round(size * sum(lengths) / len(lengths)),
    }, max(lengths)


def _length(item: Any) -> int:
    """Return the tokens of an example; of a pair, of the longer of its two rows."""
    if hasattr(item, "ids"):
        return len(item.ids)
    return len(item.prompt_ids) + max(len(item.chosen_ids), len(item.rejected_ids))
