"""Notes before a run's first step: trained weights, learning rate, too few rows, evaluation rows in training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from posttrain.data import duplicates
from posttrain.data.prepare import Prepared
from posttrain.errors import count_noun
from posttrain.recipe.stages import DpoRecipe, RewardModelRecipe, RlRecipe, SftRecipe
from posttrain.recipe.training_sections import Optim
from posttrain.train.optim import lr_factor
from posttrain.train.update_check import count_weights

LARGE = 1e9  # number of weights of a model for which the rates below are usual


@dataclass(frozen=True)
class UsualRates:
    """Usual learning rates of a stage for models of a billion weights or more: lowest with LoRA, highest without."""

    adapter: float
    full: float


USUAL = {
    "sft": UsualRates(adapter=5e-5, full=1e-4),
    "dpo": UsualRates(adapter=2e-6, full=1e-5),
    "reward_model": UsualRates(adapter=2e-5, full=1e-4),
    "rl": UsualRates(adapter=2e-6, full=2e-5),
}


def start_notes(
    recipe: SftRecipe | DpoRecipe | RewardModelRecipe | RlRecipe, model: nn.Module, updates: int
) -> list[str]:
    """Return notes on the number of trained weights with their learning rate, and on a warm-up longer than the run.

    updates: optimizer updates of the whole run.
    """
    trained, weights = count_weights(model)
    adapter = recipe.model.lora is not None
    notes = [rate_note(trained, weights, recipe.optim.lr, USUAL[recipe.stage], adapter=adapter)]
    if note := warmup_note(recipe.optim, updates):
        notes.append(note)
    return notes


def rate_note(trained: int, weights: int, lr: float, usual: UsualRates, *, adapter: bool) -> str:
    """Return a note on how many weights are trained at which learning rate, and whether that rate is usual.

    Small models take larger rates: the highest usual rate grows by (1e9 / weights)^0.75, a rule of thumb that gives
    1e-4 for a billion weights, 5e-4 for SmolLM2-135M and 1e-2 for models of a few million.
    """
    if adapter:
        line = f"{trained:,} of {weights:,} weights are trained (LoRA), learning rate {lr:.3g}"
        small = lr < usual.adapter
        return f"{line}: low for LoRA (usual is {usual.adapter:.0e} or more)" if small else line
    line = f"all {trained:,} weights are trained" if trained == weights else f"{trained:,} of {weights:,} are trained"
    line += f", learning rate {lr:.3g}"
    highest = usual.full * max(1.0, LARGE / weights) ** 0.75
    if lr >= highest:
        return f"{line}: high for all weights of a model of this size (usual is below {highest:.0e}; LoRA takes more)"
    return f"{line} (larger models take such a rate only with LoRA)" if lr >= usual.full else line


def warmup_note(section: Optim, updates: int) -> str | None:
    """Return a note if the warm-up is longer than the run, so that the rate stays below `optim.lr`; else None."""
    if section.warmup_steps < max(updates, 1):
        return None
    reached = section.lr * lr_factor(updates - 1, section, updates)
    return (
        f"optim.warmup_steps is {section.warmup_steps:g}, and the run has {count_noun(updates, 'update')}: the learning"
        f" rate rises to {reached:.3g} and never reaches optim.lr {section.lr:.3g}"
    )


def few_rows_note(rows: int, wanted: int, what: str, key: str, planned: int | None = None) -> str | None:
    """Return a note if the data has fewer rows than a step takes, so that a step repeats some or is smaller; else None.

    planned: rows of all steps of the run together, a multiple of `rows` if it is less than `wanted`.
    """
    taken = wanted if planned is None else min(wanted, planned)
    if rows >= taken:
        return None
    head = f"{count_noun(rows, what)}, and {key} is {wanted}: "
    if taken < wanted:
        return f"{head}the run's only step has {taken}, each of them {taken // rows} times"
    return f"{head}one step takes all of them, some of them more than once"


def shared_rows_note(trained: Sequence[Mapping[str, Any]], held_out: Prepared[Any] | None) -> str:
    """Return a note if evaluation rows ask the same question, word for word, as training rows; else ""."""
    if held_out is None:
        return ""
    questions = [text for row in held_out.rows if (text := duplicates.question(row)).strip()]
    shared = duplicates.match_same_words(questions, [duplicates.question(row) for row in trained])
    if not shared:
        return ""
    return (
        f"evaluation: {len(shared)} of {count_noun(len(held_out.rows), 'row')} ask the same as training rows,"
        " so it also measures memorisation (`posttrain data audit` names them)"
    )
