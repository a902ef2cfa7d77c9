"""Policy losses, corrections, regularisers and controllers."""

from mechanics import (
    REMIX_STEPS,
    ZERO,
    at_steps,
    both,
    call,
    controlled,
    fed,
    on_batch,
    on_tensors,
    only,
    optimised,
    parts,
    shared,
)

from posttrain.advantage import beta, group, tokens
from posttrain.control import safe, schedules
from posttrain.loss import curvature, decoupled, group_pairs, groups, proximal, regularise, value
from posttrain.train import episodes

CLIP = {"epsilon": "loss.clip_low", "epsilon_high": "loss.clip_high"}
SYMMETRIC = {"loss.clip_high": None}
SUMS = {"seq_logp": "logp", "old_seq_logp": "old_logp", "ref_seq_logp": "ref_logp"}
SEQUENCES = ["seq_logp", "old_seq_logp", "ref_seq_logp"]
BY_SEQUENCE = {"grad_seq_logp": "seq_logp"}
CENTRED = {"advantages": "batch.advantages"}
ROVER = {"rho": "loss.rho", "next_q_scale": "loss.next_q_scale"}
FITTED = {"q": "surrogate.stats.q", "target": "surrogate.stats.target"}
RAPO = {"ref_logits": "logits", "tokens": "tokens"}
RANGE = {"phi_min": "phi_min", "reward_min": "reward_min", "reward_max": "reward_max"}
ADAPTERS = {
    "bnpo": optimised(
        "bnpo",
        params={"epsilon": "loss.clip_low", "beta": "kl.coef", "adv_eps": "advantage.eps"},
        outputs={"advantages": "batch.advantages", "clip_frac": "metrics.clip_ratio/region_mean"},
    ),
    "bnpo_beta": on_batch(
        beta.beta_normalised,
        outputs={"advantages": "advantages", "weights": "weights", "alpha": "alpha", "beta": "beta"},
    ),
    "gspo": optimised(
        "gspo",
        params={**CLIP, "level": "loss.level"},
        start=SYMMETRIC,
        outputs={"seq_ratio": "surrogate.stats.seq_ratio"},
    ),
    "cispo": optimised(
        "cispo",
        params={"ratio_min": "loss.ratio_min", "ratio_max": "loss.ratio_max"},
        outputs={"weights": "surrogate.stats.weights"},
    ),
    "rloo": optimised(
        "rloo",
        params={"epsilon": "loss.clip_low", "beta": "kl.coef", "normalize_advantages": "advantage.normalize"},
        start={"kl.coef": ZERO},
        outputs={"advantages": "batch.advantages", "kl_rewards": "paid.rewards"},
        tables=["kl_rewards"],
    ),
    "reinforce_pp": parts(
        {
            "plain": optimised(
                "reinforce_pp",
                params={"epsilon": "loss.clip_low", "beta": "kl.coef", "gamma": "advantage.gamma"},
                start={"kl.coef": ZERO},
                choices={"advantage": {"whitening": "verl", "skip_masked": True}},
                outputs=CENTRED,
            ),
            "baseline": optimised(
                "reinforce_pp_baseline",
                params={"epsilon": "loss.clip_low", "beta": "kl.coef"},
                start={"kl.coef": ZERO},
                choices={"advantage": {"whitening": "verl"}},
                ignored=["gamma"],
                outputs=CENTRED,
            ),
        },
        name="variant",
    ),
    "ppo": both(
        optimised(
            "ppo",
            params={
                "gamma": "advantage.gamma",
                "lam": "advantage.lam",
                "cliprange": "loss.clip_low",
                "cliprange_value": "regularisers.0.clip",
                "vf_coef": "regularisers.0.coef",
            },
            fields={"vpreds": "new_values"},
            outputs={
                "advantages": "batch.advantages",
                "returns": "batch.returns",
                "policy_loss": "policy",
                "value_loss": "terms.regularisers0.value",
            },
            grads={"grad_logp": "logp", "grad_vpreds": "vpreds"},
        ),
        only(
            ["gamma", "lam", "token_rewards", "values", "mask"],
            on_batch(tokens.gae_terms, outputs={"advantages_raw": "raw"}),
        ),
    ),
    "dual_clip": optimised("dual_clip", params={**CLIP, "clip_ratio_c": "loss.dual_clip"}, start=SYMMETRIC),
    "minirl": optimised(
        "minirl",
        params={
            "epsilon": "corrections.0.clip_low",
            "epsilon_high": "corrections.0.clip_high",
            "is_max": "corrections.0.cap",
        },
        start={"corrections.0.clip_high": None},
        outputs={
            "advantages": "batch.advantages",
            "keep_tokens": "corrections.0.mask",
            "is_weights": "corrections.0.weights",
        },
    ),
    "tis": optimised(
        "tis",
        params={
            **CLIP,
            "level": "corrections.0.level",
            "mode": "corrections.0.mode",
            "clip_min": "corrections.0.clip_min",
            "clip_max": "corrections.0.clip_max",
            "veto_threshold": "corrections.0.veto",
        },
        start={"loss.clip_high": None, "corrections.0.clip_max": None},
        outputs={"weights": "corrections.0.weights"},
    ),
    "off_policy_seq_mask": optimised(
        "off_policy_seq_mask",
        params={"threshold": "corrections.0.threshold"},
        outputs={"seq_kl": "corrections.0.stats.seq_kl", "keep": "corrections.0.stats.off_policy_kept"},
    ),
    "decoupled_ppo": both(
        optimised(
            "decoupled_ppo",
            params={"epsilon": "loss.clip_low", "is_max": "loss.cap"},
            fields={"prox_logp": "old_logp"},
            ignored=["weight_trace", "ewma_decay"],
        ),
        only(
            ["weight_trace", "ewma_decay"],
            call(decoupled.ewma, outputs="ewma_trace", names={"weight_trace": "values", "ewma_decay": "decay"}),
        ),
    ),
    "disco": both(
        optimised(
            "disco",
            params={
                "objective": "loss.objective",
                "score": "loss.score",
                "tau": "loss.tau",
                "kl_type": "loss.kl_type",
                "kl_delta": "loss.kl_delta",
                "kl_beta": "loss.kl_beta",
            },
        ),
        only(
            ["score", "logp", "old_logp", "mask", "correct"],
            on_batch(groups.disco_scores, outputs="scores", logp=True, tables=["scores"]),
        ),
        only(["kl_type", "logp", "old_logp", "mask"], on_batch(groups.kl_to_old, outputs="kl", logp=True)),
    ),
    "mhpo": optimised(
        "mhpo",
        params={
            "c": "loss.c",
            "k_pos": "loss.k_pos",
            "lambda_pos": "loss.lambda_pos",
            "k_neg": "loss.k_neg",
            "lambda_neg": "loss.lambda_neg",
        },
        outputs={"psi": "surrogate.stats.psi", "zeta": "surrogate.stats.zeta"},
    ),
    "fiberpo": optimised(
        "fiberpo",
        params={"c_pos": "loss.c_pos", "c_neg": "loss.c_neg", "epsilon": "loss.epsilon"},
        outputs={
            "base_log_weight": "surrogate.stats.base_log_weight",
            "gated_ratio": "surrogate.stats.gated_ratio",
        },
    ),
    "pacs": both(
        optimised(
            "pacs",
            params={
                "beta": "loss.beta",
                "reward": "loss.reward",
                "score": "loss.score",
                "class_balance": "loss.class_balance",
            },
            start={"loss.beta": ZERO},
        ),
        only(
            ["beta", "reward", "score", "logp", "old_logp", "mask", "correct"],
            on_batch(groups.pacs_scores, outputs="scores", start={"beta": ZERO}, logp=True, tables=["scores"]),
        ),
        only(
            ["class_balance", "correct", "mask"],
            on_batch(groups.pacs_weights, outputs="weights", tables=["weights"]),
        ),
    ),
    "rover": parts(
        {
            True: optimised("rover", params=ROVER, start={"advantage.scale": "group"}, outputs=FITTED),
            False: optimised("rover", params=ROVER, outputs=FITTED),
            None: optimised("rover", params=ROVER, outputs=FITTED),
        },
        name="norm_std",
    ),
    "trpa": both(
        optimised(
            "trpa",
            params={"beta": "loss.beta", "anisotropy": "loss.anisotropy", "tr_kl_coef": "regularisers.0.coef"},
            fields={"levels": "components.level"},
            start={"loss.beta": ZERO, "loss.level": "level"},
        ),
        only(
            ["levels"],
            on_batch(
                group_pairs.number_of_pairs,
                outputs="n_pairs",
                fields={"levels": "components.level"},
                start={"level": "level"},
            ),
        ),
    ),
    "rapo": both(
        optimised(
            "rapo",
            params={
                "epsilon": "loss.clip_low",
                "alpha": "regularisers.0.coef",
                "phi_min": "regularisers.0.phi_min",
                "reward_min": "regularisers.0.reward_min",
                "reward_max": "regularisers.0.reward_max",
                "adv_eps": "advantage.eps",
            },
            ignored=["ref_logits", "tokens"],
            made={"tempered_ref_logp": [regularise.tempered_reference, {**RAPO, **RANGE}]},
            outputs={
                "tempered_ref_logp": "batch.tempered_ref_logp",
                "forward_kl": "terms.regularisers0.term.values",
            },
        ),
        only(["phi_min", "reward_min", "reward_max", "rewards"], on_batch(regularise.reference_power, outputs="phi")),
    ),
    "llds": optimised(
        "llds",
        params={
            "lambda": "regularisers.0.coef",
            "gate": "regularisers.0.gate",
            "answer_weight": "regularisers.0.answer_weight",
            "denominator": "regularisers.0.denominator",
        },
        choices={"kl": {"coef": ZERO}},
        of="terms.regularisers0.loss",
        outputs={"active_tokens": "terms.regularisers0.term.stats.llds/active"},
    ),
    "capo": on_tensors(
        curvature.filter_tokens,
        outputs={"m_fisher": "fisher", "m_hessian": "hessian", "keep_tokens": "keep"},
        names={"action_onehot": "chosen", "adam_m": "m", "adam_v": "v", "adam_step": "step", "adam_eps": "eps"},
    ),
    "remix": both(
        optimised(
            "remix",
            params={"epsilon": "loss.clip", "beta": "kl.coef regularisers.0.coef"},
            start={"kl.coef": ZERO, "regularisers.0.coef": ZERO},
        ),
        only(["step"], call(schedules.reference_share, outputs="kl_lambda")),
        at_steps(schedules.reference_share, "kl_lambda_at", REMIX_STEPS),
    ),
    "rl_plus": optimised(
        "dr_grpo",
        params={
            "gamma": "loss.gamma",
            "remove_clip": "loss.remove_clip",
            "epsilon": "loss.clip_low",
            "norm_len": "loss.norm_len",
        },
        fields={"off_policy_mask": "external"},
        choices={"loss": {"use": "rl_plus"}},
        outputs={"advantages": "batch.advantages", "off_policy_ratio": "surrogate.stats.off_policy_ratio"},
    ),
    "calibrl": optimised(
        "dr_grpo",
        params={
            "epsilon": "loss.clip_low",
            "clip_ratio_c": "loss.dual_clip",
            "negative_slope": "regularisers.0.negative_slope",
            "guide_coef": "regularisers.0.coef",
        },
        choices={"loss": {"aggregation": "token_mean"}, "regularisers": [{"use": "calibrl"}]},
        outputs={"advantages": "batch.advantages", "guided_loss": "terms.regularisers0.value"},
    ),
    "grpo_d": controlled(
        schedules.GrpoD, outputs={"beta": "value"}, steps="steps", params={"beta_min": "low", "beta_max": "high"}
    ),
    "copg": both(
        optimised(
            "copg",
            params={"beta": "loss.beta"},
            fields=SUMS,
            start={"loss.beta": ZERO},
            single=SEQUENCES,
            grads=BY_SEQUENCE,
        ),
        fed(
            on_batch(
                group_pairs.regularised_rewards,
                outputs="kl_rewards",
                fields=SUMS,
                single=SEQUENCES,
                start={"beta": ZERO},
                logp=True,
                tables=["kl_rewards"],
            ),
            {"rewards": "kl_rewards"},
            on_batch(group.rloo, outputs="loo_advantages", tables=["loo_advantages"]),
        ),
    ),
    "p3o": both(
        optimised(
            "p3o",
            params={"variant": "loss.variant", "beta": "loss.beta", "epsilon": "loss.clip"},
            fields=SUMS,
            start={"loss.beta": ZERO},
            single=SEQUENCES,
            grads=BY_SEQUENCE,
        ),
        only(
            ["beta", "rewards", "old_seq_logp", "ref_seq_logp"],
            on_batch(
                group_pairs.regularised_rewards,
                outputs="kl_rewards",
                fields={"old_seq_logp": "logp", "ref_seq_logp": "ref_logp"},
                single=SEQUENCES,
                start={"beta": ZERO},
                logp=True,
                tables=["kl_rewards"],
            ),
        ),
    ),
    "mdpo": parts(
        {
            "token": both(
                on_batch(
                    proximal.mirror_step,
                    outputs={"loss": "loss"},
                    logp=True,
                    grads={"grad_logp": "logp"},
                    aggregation="token_mean",
                ),
                only(["iteration", "total_iterations", "t_min"], call(proximal.step_size, outputs="t_k")),
            ),
            "sequence": both(
                optimised(
                    "mdpo_sequence",
                    params={"tau": "loss.tau"},
                    fields=SUMS,
                    single=SEQUENCES,
                    ignored=["iteration", "total_iterations", "t_min", "kl"],
                    grads=BY_SEQUENCE,
                ),
                only(["iteration", "total_iterations", "t_min"], call(proximal.step_size, outputs="t_k")),
            ),
        },
        name="variant",
    ),
    "safe": shared(
        (
            ["base_threshold", "entropy_floor", "kp", "ki", "kd", "kl_trace", "entropy_trace", "reward_trace"],
            controlled(
                safe.Safe,
                outputs={"threshold": "threshold", "penalty": "penalty", "kl_short": "kl_short", "phase": "phase"},
                traces={"kl_trace": "kl", "entropy_trace": "entropy", "reward_trace": "reward"},
                params={"base_threshold": "base"},
            ),
        ),
        (
            ["v1", "v2", "alpha"],
            on_tensors(value.soft_minimum, outputs="soft_min", names={"v1": "first", "v2": "second"}),
        ),
        (
            ["v1", "v2", "old_values", "rewards_n", "alpha", "cliprange_value"],
            on_tensors(
                value.twin_value_loss,
                outputs="value_loss",
                names={
                    "v1": "first",
                    "v2": "second",
                    "old_values": "old",
                    "rewards_n": "returns",
                    "cliprange_value": "clip",
                },
            ),
        ),
    ),
    "vl_dac": on_batch(
        episodes.step_loss,
        outputs={
            "advantages": "steps.advantages",
            "advantages_raw": "steps.raw",
            "returns": "steps.returns",
            "policy_loss": "policy",
            "value_loss": "value",
            "loss": "loss",
        },
        params={"cliprange": "clip", "beta": "kl_coef"},
        fields={"step_rewards": "rewards", "step_values": "values", "step_values_new": "new_values"},
        rows=["dones", "values", "new_values"],
        logp=True,
        grads={"grad_logp": "logp"},
    ),
}
