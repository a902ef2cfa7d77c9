"""Prompt variants: hints, prefixes, templates, instructions; supervised steps on unsolved prompts."""

from hint_modes import (
    added_to,
    buffered,
    by_part,
    by_row,
    curve,
    cuts,
    first_of_group,
    fit,
    formed,
    halves,
    on_failure,
    one_group,
    paired,
    pruned,
    ratios,
    rows_of_prompts,
    shortest,
)
from mechanics import call, on_batch, on_tensors, optimised, reward

from posttrain.advantage import group, hints
from posttrain.data import guidance, unsolved
from posttrain.loss import hybrid, regularise
from posttrain.variants import help, item_response, solutions, templates

ADAPTERS = {
    "ghpo": on_failure(solutions.hint_on_failure),
    "pope": shortest(solutions.shortest_fraction, solutions.prefix_tokens),
    "prefixrl": cuts(solutions.cut_tokens, solutions.prefixed_share),
    "seele": by_part(
        {
            "curve": ("p k mu b", curve(item_response.Curve, "accuracy")),
            "next_rate": ("k mu b target", curve(item_response.Curve, "next_rate")),
            "hint_tokens": (
                "rates lengths",
                by_row(
                    {
                        "hint_tokens": (item_response.hint_tokens, {"rates": "rate", "lengths": "length"}),
                        "cold_start_rate": (item_response.first_rate, {"lengths": "length"}),
                    }
                ),
            ),
            "advantages": ("rewards norm_std", one_group(group.group, {True: "group", False: "none"})),
            "loss": ("logp hint_mask gamma rl_loss", added_to("hint_nll", regularise.hint_nll, "gamma", "rl_loss")),
            "fit": ("rates accuracy weights target", fit(item_response.fit_curve)),
        }
    ),
    "adhint": by_part(
        {
            "ratio": (
                "naive_rewards noise lengths w_min w_max",
                ratios(help.difficulty, help.hint_ratio, help.hint_length),
            ),
            "token_weight": (
                "entropy hint_mask mask advantages",
                on_tensors(hints.hint_weights, outputs="weight"),
            ),
            "advantages": ("naive_rewards hinted_rewards", halves(hints.hint_advantages)),
        }
    ),
    "guide_grpo": first_of_group(
        "keep",
        optimised(
            "guide_grpo",
            params={
                "acc_low": "keep.low",
                "acc_high": "keep.high",
                "clip": "loss.clip_low",
                "gamma_strategy": "loss.strategy",
                "gamma_value": "loss.value",
            },
            ignored=["hinted"],
            made={"hinted": (rows_of_prompts, {"hinted": "hinted"})},
            outputs={"advantages": "batch.advantages", "keep": "batch.keep"},
            tables=["keep"],
        ),
    ),
    "agent_rlvr": paired(guidance.guided_pairs),
    "prior_prompt": formed(reward("templates.prior"), {"style": "strategies"}, "prior_prompt"),
    "prompt_augmentation": formed(reward("templates.augmented"), {"template": "templates"}, "prompt_augmentation"),
    "inspo": by_part(
        {
            "probs": (
                "weights tau",
                call(templates.softmax, outputs="probs", names={"tau": "temperature"}),
            ),
            "update": ("weights instruction rewards ema", call(templates.moved_weights, outputs="weights")),
            "prune": ("weights protected keep_ratio num_new", pruned(templates.prune_population)),
        }
    ),
    "relift": by_part(
        {
            "buffer": (
                "uids rewards sft_data_size fail_value",
                buffered(unsolved.has_failed, unsolved.with_newest, unsolved.take_batch),
            ),
            "sft_loss": (
                "logp entropy mask entropy_coef",
                on_batch(
                    hybrid.nll_less_entropy,
                    {"loss": "loss"},
                    fields={"entropy": "new_entropy"},
                    logp=True,
                    grads={"grad_logp": "logp"},
                    aggregation="token_mean",
                ),
            ),
        }
    ),
}
