"""Dry run of one objective step on made-up numbers, before a model is loaded.

Reports mistakes that only the functions themselves can detect: a missing reward component or data column, prompts that
do not divide into bundles, a user function that fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.batch import CallRecord, Node, Prompt, Rollout, RolloutBatch, Segment, Turn, WorkflowCall
from posttrain.errors import RecipeError, UserError
from posttrain.path_resolution import split_function
from posttrain.recipe.needs import fields_from_sampler, provided_fields
from posttrain.recipe.reward_checks import reward_name
from posttrain.recipe.stages import RlRecipe
from posttrain.registry import find_script_line
from posttrain.train.collate import rollout_batch
from posttrain.train.objective import Objective

TOKENS, HIDDEN, TOP = 6, 4, 8
NEEDED = (
    "a batch carries `ref_logp`, `entropy` and the like if a component says that it needs them: "
    "@register(KIND, NAME, needs=(...)), see docs/adding_a_method.md"
)


def dry_run(objective: Objective, recipe: RlRecipe, prompts: Sequence[Prompt]) -> None:
    """Run every component once on random rewards and log-probs of a whole step.

    Re-raises a component's error; for a user function, as a RecipeError with its line.
    """
    names = [reward_name(reward) for reward in recipe.rewards]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            _run(objective, _batch(objective, recipe, prompts, names))
        except UserError as error:
            if not any(f"`{name}/" in str(error) for name in names):  # a reward's components are known after it ran
                raise
        except Exception as error:
            if not (line := find_script_line(error)):
                raise
            hint = NEEDED if "NoneType" in str(error) else ""
            raise RecipeError(f"{type(error).__name__}: {error}", where=line, hint=hint) from error


def _run(objective: Objective, batch: RolloutBatch) -> None:
    assigned = objective.compute_advantages(batch)
    rows = assigned if assigned.keep is None else assigned.select(assigned.keep)
    if len(rows):
        logp = _random_like(rows.mask).requires_grad_()
        objective.loss(rows, logp, objective.totals(rows))[0].backward()


def _batch(objective: Objective, recipe: RlRecipe, prompts: Sequence[Prompt], names: Sequence[str]) -> RolloutBatch:
    by_turn = "turn_scores" in objective.needs
    given = provided_fields(recipe)
    rollouts = [
        Rollout(
            prompt=prompts[group % len(prompts)],
            group=group,
            segments=(Segment("model", tuple(range(TOKENS)), (-1.0,) * TOKENS),),
            text=str(row % 2),
            finish="stop",
            version=0,
            scores=dict.fromkeys(names, float(row % 2)),
            reward=float(torch.rand(())),
            correct=row % 2 == 0,
            bin=group % 2 if "bins" in objective.needs else None,
            against=(0.5,) * recipe.opponent.samples if recipe.opponent else (),
            greedy_reward=0.5,
            trajectory=group if recipe.rollout.several_rows else None,
            nodes=(Node(group, float(row % 2), 1.0),) if "node_ids" in given else (),
            part=row,
            call=_call_of(recipe, row),
            turns=(Turn(str(row % 2), reward=float(row % 2)),) if recipe.acts else (),
            part_ends=(TOKENS - 1,) if by_turn else (),
            turn_scores={name: (float(row % 2),) for name in names} if by_turn else {},
        )
        for group, size in enumerate(_sizes(recipe))
        for row in range(size)
    ]
    external = objective.needs & {"hinted", "hint_mask", "external"}
    by_part = recipe.acts or recipe.scoring.split or {"part_ids", "finished"} & given
    needs = objective.needs if by_part else external
    batch = rollout_batch(rollouts, ("last_number",), needs)
    weights = {reward_name(reward): reward.weight for reward in recipe.rewards}
    wanted = objective.needs | ({"prompt_mask"} if "prompt_logp" in objective.needs else set())
    fields = {name: _make_field(name, batch.mask) for name in wanted if name in _SHAPES}
    if "router_loss" in wanted:
        fields["router_loss"] = torch.rand(len(batch))
    if "new_values" in fields:
        fields["new_values"].requires_grad_()  # a loss may train only the critic
    if "divergence" in fields:
        fields["divergence"].requires_grad_()
    sampler = {"scores": {"0": 0.5, "1": -0.5}, "kl_threshold": 0.5} if fields_from_sampler(recipe) else {}
    return batch.replace(**fields, reward_weights=weights, sampler_state=sampler)


def _call_of(recipe: RlRecipe, row: int) -> WorkflowCall | None:
    """Return a call of one of the trained workflow roles, cycling by row; None without a workflow."""
    if (workflow := recipe.rollout.workflow) is None:
        return None
    role = recipe.advantage.params.get("role")
    roles = workflow.train or workflow.roles or [str(role or "solver"), "other"]
    return WorkflowCall((CallRecord(roles[row % len(roles)], ""),), 0)


def _sizes(recipe: RlRecipe) -> list[int]:
    """Return the number of rollouts of each prompt: unequal ones if the sampler may divide them so."""
    prompts, size = recipe.rollout.prompts_per_step, recipe.rollout.group_size
    unequal = "unequal" in recipe.sampler.needs or split_function(recipe.sampler.use) is not None
    if recipe.rollouts_are_groups:
        return [2] * (prompts * size)
    if recipe.rollout.workflow is not None:  # its calls form separate groups, also with a single rollout
        return [max(2, size)] * prompts
    return [size + (unequal and size > 1) * (1 - 2 * (group % 2)) for group in range(prompts)]


def _random_like(mask: Tensor, *extra: int) -> Tensor:
    return -torch.rand(*mask.shape, *extra)


_SHAPES = {
    **dict.fromkeys(("expert_logp", "answer_logp", "masked_logp", "perturbed_logp"), ()),
    **dict.fromkeys(("old_logp", "ref_logp", "entropy", "new_entropy", "values", "new_values", "prompt_logp"), ()),
    **dict.fromkeys(
        ("vocab_mean_logp", "old_vocab_mean_logp", "tempered_ref_logp", "opponent_logp", "prox_logp", "prompt_mask"), ()
    ),
    **dict.fromkeys(("hidden", "ref_hidden"), (HIDDEN,)),
    "divergence": (),
    **dict.fromkeys(("topk_logp", "topk_chosen"), (TOP,)),
}


def _make_field(name: str, mask: Tensor) -> Tensor:
    value = _random_like(mask, *_SHAPES[name])
    if name == "topk_chosen":
        return torch.zeros_like(value, dtype=torch.bool).index_fill(-1, torch.tensor([0]), True)
    return mask if name == "prompt_mask" else value
