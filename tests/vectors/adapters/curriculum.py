"""Prompt samplers: which prompts, how many rollouts each."""

from mechanics import call
from sampler_modes import (
    banded,
    chosen_arms,
    classified,
    divided,
    filtered,
    granted,
    moved_arms,
    nearest,
    regressed,
    set_aside,
    several,
    shrinking,
    weighed,
)
from step_modes import chosen

from posttrain.advantage import keep as filters
from posttrain.curriculum import allocation, difficulty, rollback, selection
from posttrain.replay import buffer
from posttrain.train import prompt_values

ALLOCATOR = granted(allocation.half_width, allocation.priority, allocation.grant, allocation.spread_of)

ADAPTERS = {
    "balanced_difficulty_filter": filtered(
        filters.balanced_difficulty_filter, filters.row_pass_rates, difficulty.learnability, default_beta="1"
    ),
    "curriculum_stage": call(
        selection.curriculum_stage, outputs={"stage": "number", "allowed": "allowed", "probs": "probabilities"}
    ),
    "dereason": call(selection.by_reasoning, outputs={"sft": "sft", "rl": "rl", "dropped": "dropped"}),
    "drive": chosen(
        {
            "hard_focus": shrinking(selection.lowest_pass_rates),
            "sft_mix": call(selection.fold_copies, outputs="copies"),
        },
        by="part",
        default="hard_focus",
    ),
    "passk_difficulty_classifier": classified(difficulty.bin_of, difficulty.windowed_mean, difficulty.any_right),
    "pcl": chosen(
        {"select": nearest(selection.nearest_to), "value_loss": regressed(prompt_values.value_loss)},
        by="part",
        default="select",
    ),
    "prompt_gdro": weighed(selection.weights_of_bins, selection.averaged_losses),
    "rollout_gdro": chosen(
        {
            "choose": chosen_arms(
                allocation.arm_probabilities,
                allocation.choose_arms,
                allocation.count_rollouts,
                allocation.arms_between,
                allocation.budget_for,
            ),
            "update": moved_arms(allocation.updated_arms, allocation.shadow_price, allocation.arms_between),
            "variance": divided(allocation.by_variance, allocation.budget_for),
        },
        by="part",
        default="choose",
    ),
    "self_curation": several(selection.greedy_failures, "kept", "padded"),
    "skywork_ssb": several(buffer.selective_buffer, "kept", "probs"),
    "taco": chosen(
        {"band": banded(difficulty.ecdf, difficulty.middle), "rollback": set_aside(rollback.set_aside)},
        by="part",
        default="band",
    ),
    "xrpo_allocation": ALLOCATOR,
    "xrpo_allocator": ALLOCATOR,
}
