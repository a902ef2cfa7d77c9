"""Advantages and what shapes them: factors, bonuses, credit by turn, selection; rewards over groups."""

from mechanics import call, on_batch, on_tensors, prepared, ragged, staged, with_hints

from posttrain.advantage import (
    bonuses,
    consistency,
    factors,
    group,
    hints,
    rank,
    reward_mix,
    risk,
    select,
    steps,
    tokens,
    turns,
)
from posttrain.variants import help
from posttrain.verify import stability

TRAJECTORIES = {"prompt_ids": "group_ids", "traj_ids": "trajectory_ids"}

ADAPTERS = {
    "dr_grpo_adv": on_batch(group.group, "advantages", start={"scale": "none"}),
    "rloo_adv": on_batch(group.rloo, "advantages"),
    "batch_norm": on_batch(group.whole_batch, "advantages"),
    "dr_mas": on_batch(
        group.agent,
        "advantages",
        fields=TRAJECTORIES,
        params={"std": "scale"},
        words={"std": {True: "group", False: "none"}},
    ),
    "reinforce_pp_adv": staged(
        "reinforce_pp",
        choices={"advantage": {"whitening": "openrlhf", "skip_masked": False}},
        params={"kl_coef": "kl.coef", "gamma": "advantage.gamma", "std_norm": "advantage.std_norm"},
        details={"returns": (tokens.reinforce_pp_terms, "advantage", "returns")},
    ),
    "reinforce_pp_baseline": on_batch(tokens.baseline_terms, {"advantages": "advantages", "centered": "centred"}),
    "gae": on_batch(tokens.gae_terms, {"advantages": "advantages", "advantages_raw": "raw", "returns": "returns"}),
    "lite_ppo": staged("lite_ppo", params={"clip": "loss.clip_low", "eps": "advantage.eps"}),
    "riskpo": on_tensors(
        risk.risk_terms,
        {
            "advantages": "advantages",
            "bundle_advantages": "bundle_advantages",
            "bundle_scores": "bundle_scores",
            "q_next": "q_next",
        },
    ),
    "progrpo_arm": staged(
        "progrpo_arm",
        params={
            "alpha": "bonuses.0.alpha",
            "low_frac": "bonuses.0.low_frac",
            "skip_all_correct": "bonuses.0.skip_all_correct",
            "eps": "advantage.eps",
        },
        by_prompt=["prompt_logp", "prompt_mask"],
        details={
            "c_answer": (bonuses.confidences, "bonuses.0", "answer"),
            "c_prompt": (bonuses.confidences, "bonuses.0", "prompt"),
        },
        per_prompt=["c_prompt"],
    ),
    "seed_grpo": staged(
        "seed_grpo",
        params={"alpha": "factors.0.alpha", "fn": "factors.0.fn", "estimator": "factors.0.estimator"},
        fields={"answers": "answer_ids"},
        details={
            "scale": (factors.semantic_entropy_terms, "factors.0", "by_group"),
            "semantic_entropy": (factors.semantic_entropy_terms, "factors.0", "measure"),
        },
    ),
    "adora": staged(
        "adora",
        params={
            "correct_threshold": "factors.0.correct_threshold",
            "max_length": "factors.0.max_length",
            "variant": "factors.0.variant",
            "w_tas": "factors.0.w_tas",
            "w_tds": "factors.0.w_tds",
            "eps": "advantage.eps",
        },
        details={
            "weights": (factors.adora_terms, "factors.0", "by_group"),
            "tas": (factors.adora_terms, "factors.0", "measure"),
        },
    ),
    "copo": staged(
        "copo",
        params={
            "k": "advantage.k",
            "b": "advantage.b",
            "mode": "advantage.mode",
            "use_coef": "advantage.use_coef",
            "eps": "advantage.eps",
            "clip_low": "loss.clip_low",
            "clip_high": "loss.clip_high",
            "dual_clip": "loss.dual_clip",
            "agg": "loss.aggregation",
        },
        words={"agg": {"seq-mean-token-mean": "seq_mean_token_mean", "token-mean": "token_mean"}},
        fields={"answers": "answer_ids"},
        details={
            "entropy": (consistency.copo_terms, "advantage", "entropy"),
            "local_advantages": (consistency.copo_terms, "advantage", "local"),
            "global_advantages": (consistency.copo_terms, "advantage", "overall"),
            "local_weight": (consistency.copo_terms, "advantage", "weight"),
        },
    ),
    "xrpo_novelty": staged(
        "xrpo_novelty",
        params={"lam": "bonuses.0.lam", "kappa": "bonuses.0.kappa", "eps": "advantage.eps"},
        details={"novelty": (bonuses.relative_likelihood, "bonuses.0", ".")},
    ),
    "gui_g1": staged(
        "gui_g1",
        params={"clip": "loss.clip_low", "length_norm": "loss.norm_len"},
        fields={"easiness": "columns.easiness"},
        by_prompt=["easiness"],
        details={
            "advantages": (group.group, "advantage", "."),
            "weights": (factors.inverse_easiness_terms, "factors.0", "by_group"),
        },
    ),
    "gui_libra_sngs": staged(
        "gui_libra_sngs",
        params={"base": "factors.0.base", "coef": "factors.0.coef", "eps": "advantage.eps"},
        details={"negative_scale": (factors.negative_scale_terms, "factors.0", "by_group")},
    ),
    "duration_aware": staged(
        params={"floor": "factors.0.floor", "cap": "factors.0.cap"},
        as_given=True,
        details={"weights": (factors.duration, "factors.0", ".")},
        preset="grpo",
        choices={"factors": [{"use": "duration"}]},
        fields={"durations": "columns.tool_seconds"},
    ),
    "duration_weights": staged(
        params={},
        as_given=True,
        details={"weights": (factors.duration, "factors.0", ".")},
        preset="grpo",
        choices={"factors": [{"use": "duration"}]},
        fields={"durations": "columns.tool_seconds"},
    ),
    "verl_rank": on_tensors(
        rank.shape,
        {
            "advantages": "advantages",
            "ema_next": "ema_next",
            "er": "er",
            "era": "era",
            "erv": "erv",
            "phi": "phi",
        },
        each=["hidden"],
    ),
    "high_entropy_tokens": staged(
        "high_entropy_tokens",
        params={"rho": "select.0.rho", "clip_low": "loss.clip_low", "clip_high": "loss.clip_high"},
        as_given=True,
        outputs={"token_mask": "selected"},
        details={"threshold": (select.entropy_threshold, "select.0", ".")},
    ),
    "d3s": on_batch(select.d3s_terms, {"selected": "selected", "token_mask": "token_mask"}),
    "d3s.d3s_schedule": call(select.d3s_schedule, {"n": "n", "token_frac": "token_frac"}),
    "dart_step_entropy": on_batch(
        select.step_terms,
        {"step_entropy": "step_entropy", "step_mask": "step_mask"},
        fields={"keep": "share"},  # no field of the batch here
    ),
    "gigpo": prepared(
        on_batch(
            steps.gigpo_terms,
            {
                "advantages": "advantages",
                "episode_advantages": "episode_advantages",
                "step_advantages": "step_advantages",
                "step_returns": "step_returns",
            },
            fields={
                "prompt_ids": "group_ids",
                "traj_ids": "trajectory_ids",
                "episode_rewards": "rewards",
                "step_rewards": "components.step",
            },
        ),
        into="state_ids",
        function=steps.state_numbers,
        takes={"states": "states", "prompt_ids": "group_ids", "similarity": "similarity"},
        drops=["states", "similarity"],
    ),
    "salt": call(turns.merged_steps, "step_advantages"),
    "igpo": ragged(
        turns.information_gain_terms,
        {"turn_rewards": "rewards", "turn_advantages": "advantages"},
        table="answer_mean_logp",
        counts="turns",
    ),
    "adhint_adv": with_hints(hints.hint_advantages, hints.protect_hint_tokens, help.hint_ratio),
    "proact_mc_critic": on_tensors(
        turns.critic_terms, {"advantages": "advantages", "blended": "blended", "returns": "returns"}
    ),
    "proact_mc_critic.proact_mc_grpo": call(turns.action_advantages, "advantages"),
    "thurstone_rank": on_batch(
        reward_mix.thurstone,
        "rewards",
        fields={"predictions": "components.prediction", "targets": "columns.target"},
        by_prompt=["targets"],
        tables=["rewards"],
    ),
    "hybrid_reward": on_batch(
        reward_mix.hybrid,
        "rewards",
        fields={"rule": "components.rule", "rm": "components.rm", "fmt": "components.format"},
        tables=["rewards"],
    ),
    "policy_cliff": call(
        stability.stability,
        {
            "hard_tv": "hard_tv",
            "soft_tv": "soft_tv",
            "soft_bound": "soft_bound",
            "margin": "margin",
            "n_optimal": "n_optimal",
            "cliff": "cliff",
        },
    ),
}
