"""Length rewards, adaptive thinking, and rewards that are normalised apart."""

from mechanics import both, cells, controlled, on_batch, reward
from step_modes import (
    admission,
    chosen,
    each,
    first_column,
    only,
    scheduled,
    scored,
    split_first,
    staged_values,
    through,
)

from posttrain.advantage import channels, gate, group, length_rewards, recompose, thinking_modes, thought
from posttrain.control import stages
from posttrain.loss import drpo, groups
from posttrain.verify import efficiency

CORRECT_IS_REWARD = {"correct": ["correct", "rewards"]}
ZSCORE = {"alpha": "group_rewards.0.alpha", "eps": "group_rewards.0.eps"}
OPENED = {"efficiency_group": (gate.open_groups, "group_rewards.0", ".")}
HDPO_INPUTS = {"answer": ["components.accuracy"], "format_ok": ["components.structure"]}
HDPO_REWARDS = {
    "inverse_calls": scored(efficiency.inverse_calls, names={"answer": "correct", "tool_calls": "calls"}),
}
MODES = {
    "rewards": scored(
        efficiency.mode_reward,
        names={
            "mode": "mode",
            "correct": "correct",
            "correct_short": "correct_short",
            "correct_think": "correct_think",
            "wrong_short": "wrong_short",
            "wrong_think": "wrong_think",
            "missing_mode": "missing_mode",
        },
    )
}
THINKLESS = through(
    "thinkless",
    params={"alpha": "spread.alpha", "clip": "loss.clip_low"},
    rewards=MODES,
    without=["keep", "kl"],
    outputs={"loss": "loss", "grad_logp": "grad_logp"},
    details={"advantages": (group.group, "advantage", ".")},
    flags=["kept"],
)
TRUNCATION = {
    "rewards": scored(
        reward("length.truncation"),
        names={"correct": "correct", "lengths": "token_count", "truncated": "truncated", "max_length": "max_length"},
    )
}
ADACTRL = {
    "acc_reward": scored(
        reward("efficiency.outcome"),
        names={"correct": "correct", "correct_reward": "right", "wrong_reward": "wrong"},
    ),
    "overlong_reward": scored(
        reward("length.soft_overlong"),
        names={
            "lengths": "token_count",
            "overlong_max": "max_length",
            "overlong_buffer": "buffer",
            "overlong_factor": "factor",
        },
        constants={"unbounded": True},
        needs=["overlong_max", "overlong_buffer"],
    ),
}
REDUNDANCY = {"nrp_ratio": "rewards/necessary_prefix/mean", "all_correct_fraction": "signal/too_easy"}

ADAPTERS = {
    "gdpo": through(
        "gdpo",
        params={"weights": "advantage.weights", "conditions": "advantage.conditions", "eps": "advantage.eps"},
        objects={"reward_components": "components"},
        outputs={"advantages": "batch.advantages"},
        details={"pre_batch": (channels.gdpo_terms, "advantage", "pre_batch")},
    ),
    "dler": first_column(
        through(
            "dler",
            params={"eps": "advantage.floor"},
            rewards=TRUNCATION,
            width="lengths",
            outputs={"advantages": "batch.advantages"},
            flags=["kept"],
        ),
        "advantages",
    ),
    "dler_difficulty": through(
        "dler_difficulty",
        params={
            "thresholds": "group_rewards.0.thresholds",
            "target_lengths": "group_rewards.0.target_lengths",
        },
        fields=CORRECT_IS_REWARD,
        outputs={"rewards": "batch.rewards"},
        details={
            "ratio": (length_rewards.tiers, "group_rewards.0", "ratio"),
            "target_length": (length_rewards.tiers, "group_rewards.0", "target_length"),
        },
        tables=["rewards"],
    ),
    "grpo_lambda": chosen(
        {
            "top_lambda": through(
                "grpo_lambda",
                params={**ZSCORE, "top_lambda": "group_rewards.0.gate.top_share", "threshold": []},
                fields=CORRECT_IS_REWARD,
                outputs={"rewards": "batch.rewards"},
                details=OPENED,
                tables=["rewards"],
            ),
            "threshold": through(
                "grpo_lambda_threshold",
                params={**ZSCORE, "threshold": "group_rewards.0.gate.pass_rate", "top_lambda": []},
                fields=CORRECT_IS_REWARD,
                outputs={"rewards": "batch.rewards"},
                details=OPENED,
                tables=["rewards"],
            ),
        },
        by="selection",
        default="top_lambda",
    ),
    "drpo": through(
        "drpo",
        params={
            "tau": "loss.tau",
            "lam": "loss.lam",
            "delta": "loss.kl_delta",
            "beta": "loss.kl_beta",
            "kl": "loss.kl_type",
            "max_length": "loss.max_length",
        },
        fields=CORRECT_IS_REWARD,
        outputs={"loss": "loss", "grad_logp": "grad_logp"},
        details={
            "weights": (drpo.drpo_weights, "surrogate", "."),
            "kl": (groups.kl_to_old, "surrogate", "."),
        },
        tables=["weights"],
    ),
    "conciser": chosen(
        {
            "1": through(
                "grpo_plus_plus",
                params={"max_length": [], "length_weight": []},
                fields=CORRECT_IS_REWARD,
                outputs={"rewards": "batch.rewards"},
                tables=["rewards"],
                flags=["kept"],
            ),
            "2": through(
                "conciser",
                params={"max_length": "group_rewards.0.max_length", "length_weight": "group_rewards.0.weight"},
                fields=CORRECT_IS_REWARD,
                outputs={"rewards": "batch.rewards"},
                tables=["rewards"],
                flags=["kept"],
            ),
        },
        by="stage",
        default="2",
    ),
    "hdpo": both(
        through(
            "hdpo",
            params={
                "w_acc": "advantage.channels.0.weight",
                "w_tool": "regularisers.0.coef",
                "eps_low": ["loss.clip_low", "regularisers.0.clip_low"],
                "eps_high": ["loss.clip_high", "regularisers.0.clip_high"],
                "eps": "advantage.eps",
            },
            fields=HDPO_INPUTS,
            rewards=HDPO_REWARDS,
            outputs={"loss": "loss", "grad_logp": "grad_logp", "loss_tool": "terms.0"},
            details={
                "acc_advantages": (channels.channel_terms, "advantage", "advantages.0"),
                "tool_advantages": (channels.channel_terms, "advantage", "advantages.1"),
                "acc_rewards": (channels.channel_terms, "advantage", "rewards.0"),
            },
            tables=["acc_rewards"],
        ),
        through(
            "hdpo",
            params={
                "eps_low": "loss.clip_low",
                "eps_high": "loss.clip_high",
                "eps": "advantage.eps",
                "w_acc": [],
                "w_tool": [],
            },
            fields=HDPO_INPUTS,
            rewards=HDPO_REWARDS,
            outputs={"loss_acc": "policy"},
        ),
        only(
            each(
                {"tool_rewards": efficiency.inverse_calls},
                depth="cell",
                over="answer",
                names={"answer": "correct", "tool_calls": "calls"},
            ),
            inputs=["answer", "tool_calls"],
        ),
    ),
    "otc": through(
        "otc",
        params={
            "variant": "group_rewards.0.variant",
            "alpha": "group_rewards.0.alpha",
            "smooth": "group_rewards.0.smooth",
        },
        fields={**CORRECT_IS_REWARD, "tool_calls": ["components.tool_calls"]},
        outputs={"rewards": "batch.rewards"},
        details={
            "optimal_calls": (thinking_modes.tool_terms, "group_rewards.0", "optimal_calls"),
            "tool_reward": (thinking_modes.tool_terms, "group_rewards.0", "tool_reward"),
        },
        tables=["rewards", "tool_reward"],
    ),
    "thinkless": both(
        THINKLESS,
        split_first("thinkless", outputs=["loss_control", "loss_response"], step=THINKLESS),
    ),
    "ada_grpo": through(
        "ada_grpo",
        params={"eps": "advantage.eps"},
        fields={**CORRECT_IS_REWARD, "formats": ["components.mode"]},
        without=["kl"],
        outputs={"rewards": "batch.rewards", "advantages": "batch.advantages"},
        details={"scale": (thinking_modes.diversity_scale, "group_rewards.0", ".")},
        tables=["rewards", "scale"],
    ),
    "adactrl": through(
        "adactrl",
        params={
            "threshold": "group_rewards.0.threshold",
            "w_length": "group_rewards.0.length_weight",
            "w_tag": "group_rewards.0.tag_weight",
        },
        fields={"tags": ["components.tag"]},
        rewards=ADACTRL,
        outputs={"rewards": "batch.rewards"},
        details={
            "difficulty": (thinking_modes.difficulty_terms, "group_rewards.0", "difficulty"),
            "tag_reward": (thinking_modes.difficulty_terms, "group_rewards.0", "tag_reward"),
            "length_reward": (thinking_modes.difficulty_terms, "group_rewards.0", "length_reward"),
        },
        tables=["rewards", "tag_reward", "length_reward"],
    ),
    "decs": through(
        "decs",
        params={
            "max_length": "advantage.max_length",
            "r_plus": "advantage.r_plus",
            "r_zero": "advantage.r_zero",
            "eps": "advantage.eps",
            "redundant_top": "advantage.redundant_top",
        },
        fields={
            "redundant_start": ["components.necessary_prefix/start"],
            "think_end": ["components.necessary_prefix/end"],
        },
        width="width",
        without=["keep"],
        outputs={"advantages": "batch.advantages"},
        details={"token_rewards": (thought.decs_rewards, "advantage", ".")},
    ),
    "decs_curriculum": both(
        controlled(
            stages.Redundancy,
            outputs={"kappa": "value"},
            traces=REDUNDANCY,
            params={"beta": "beta"},
            initial="kappa0",
        ),
        admission(
            stages.Redundancy,
            "admitted",
            traces=REDUNDANCY,
            mixed="mixed_groups",
            solved="all_correct_groups",
            initial="kappa0",
            params={"beta": "beta"},
        ),
    ),
    "open_rs": cells(
        reward("length.open_rs"),
        output="rewards",
        names={
            "lengths": "token_count",
            "max_len": "max_length",
            "min_correct": "min_value_correct",
            "max_correct": "max_value_correct",
            "min_wrong": "min_value_wrong",
            "max_wrong": "max_value_wrong",
        },
    ),
    "rorecomp": both(
        only(on_batch(recompose.priority, "priority", tables=["priority"]), params=["alpha"]),
        scheduled(
            stages.Cosine,
            "p_comp",
            names={"p_start": "high", "p_end": "low", "total_steps": "total_steps"},
            step="step",
            ignored=["alpha"],
        ),
    ),
    "ptst": staged_values(
        stages.Stages,
        outputs={"max_length": "max_length", "num_generations": "num_generations"},
        stages="stages",
        steps="steps",
        until="until",
    ),
    "pixelthink": through(
        "pixelthink",
        params={
            "hard": "group_rewards.0.hard",
            "medium": "group_rewards.0.medium",
            "hard_budget": "group_rewards.0.hard_budget",
            "easy_budget": "group_rewards.0.easy_budget",
            "uncertainty_scale": "group_rewards.0.uncertainty_scale",
            "beta": "group_rewards.0.beta",
        },
        fields={
            "base_reward": ["rewards"],
            "difficulty": ["columns.difficulty"],
            "top2_logprobs": ["topk_logp"],
        },
        by_prompt=["difficulty"],
        outputs={"rewards": "batch.rewards"},
        details={
            "uncertainty": (thinking_modes.uncertainty, "group_rewards.0", "."),
            "budget": (thinking_modes.budget_terms, "group_rewards.0", "budget"),
            "length_score": (thinking_modes.budget_terms, "group_rewards.0", "length_score"),
        },
        tables=["rewards", "uncertainty", "budget", "length_score"],
    ),
    "scma": each(
        {"rewards": efficiency.segment_reward, "penalty": efficiency.segment_penalty},
        depth="cell",
        over="correct",
        names={"chunk_lengths": "lengths", "chunk_scores": "scores"},
    ),
    "kimi_length": on_batch(length_rewards.kimi_term, "rewards", tables=["rewards"]),
    "ngram_repetition": each(
        {"rewards": efficiency.repetition}, depth="row", over="token_ids", names={"token_ids": "items"}
    ),
    "l1_exact": each(
        {"rewards": reward("length.l1_exact")},
        depth="cell",
        over="correct",
        names={"lengths": "token_count"},
    ),
    "l1_max": each(
        {"rewards": reward("length.l1_max")}, depth="cell", over="correct", names={"lengths": "token_count"}
    ),
}
