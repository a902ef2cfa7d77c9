"""Prompt samplers: which prompts, how many rollouts each."""

from mechanics import call, parts, reading, taking
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

GDRO = (
    "ema_beta eta_q gamma loss_norm_by_class max_weight mode num_bins sample_bin sample_loss score_clip scores z_cap "
    "z_std_floor zscore"
)
ROLLOUT_GDRO = (
    "arm_scores arms bin_counts bin_loss chosen dual_lr eta_q gamma mean_n mode mu n_max n_min part pass_rate "
    "total_budget"
)
DRIVE = "copies fold_solved hard keep pass_rates"
XRPO = "budget conf_alpha counts lam max_per_prompt stds total alpha explore n_max n_total per_round rewards"
ALLOCATOR = taking(XRPO, granted(allocation.half_width, allocation.priority, allocation.grant, allocation.spread_of))

ADAPTERS = {
    "balanced_difficulty_filter": taking(
        "beta correct t_high t_low",
        filtered(filters.balanced_difficulty_filter, filters.row_pass_rates, difficulty.learnability, default_beta="1"),
    ),
    "curriculum_stage": call(
        selection.curriculum_stage, outputs={"stage": "number", "allowed": "allowed", "probs": "probabilities"}
    ),
    "dereason": call(selection.by_reasoning, outputs={"sft": "sft", "rl": "rl", "dropped": "dropped"}),
    "drive": parts(
        {
            "hard_focus": reading(
                "pass_rates keep", taking("pass_rates keep", shrinking(selection.lowest_pass_rates)), DRIVE
            ),
            "sft_mix": reading("fold_solved hard copies", call(selection.fold_copies, outputs="copies"), DRIVE),
        }
    ),
    "passk_difficulty_classifier": taking(
        "correct edges exclude_extremes history_len hysteresis uids",
        classified(difficulty.bin_of, difficulty.windowed_mean, difficulty.any_right),
    ),
    "pcl": taking(
        "m part rewards tau values values_selected",
        chosen(
            {"select": nearest(selection.nearest_to), "value_loss": regressed(prompt_values.value_loss)},
            by="part",
            default="select",
        ),
    ),
    "prompt_gdro": taking(
        GDRO,
        weighed(selection.weights_of_bins, selection.averaged_losses),
    ),
    "rollout_gdro": taking(
        ROLLOUT_GDRO,
        chosen(
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
    ),
    "self_curation": several(selection.greedy_failures, "kept", "padded"),
    "skywork_ssb": several(buffer.selective_buffer, "kept", "probs"),
    "taco": taking(
        "buffer high interval kl low mean_reward part step threshold uids",
        chosen(
            {"band": banded(difficulty.ecdf, difficulty.middle), "rollback": set_aside(rollback.set_aside)},
            by="part",
            default="band",
        ),
    ),
    "xrpo_allocation": ALLOCATOR,
    "xrpo_allocator": ALLOCATOR,
}
