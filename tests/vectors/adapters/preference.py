"""Losses on preference pairs, pair building, reward models."""

from mechanics import advantages, both, call, fed, on_batch, optimised, parts, reading
from pair_modes import ONE, TENTH, by_inputs, offline_and_online, pairs, tensors, weighted

from posttrain.advantage import group
from posttrain.curriculum import selection
from posttrain.data import decontaminate, separability
from posttrain.data import pairs as builders
from posttrain.evaluate import search
from posttrain.loss import (
    distribution,
    group_pairs,
    nash,
    offline_rl,
    pair,
    pair_labels,
    pair_rounds,
    reward_model,
)
from posttrain.verify import judging

LIGHT_R1 = (  # what its parts read
    "train bench ngram beta chosen_logps rejected_logps ref_chosen_logps ref_rejected_logps pass_rate low high"
)
POLICY = {
    "chosen_logps": "chosen_logp",
    "rejected_logps": "rejected_logp",
    "chosen_lengths": "chosen_length",
    "rejected_lengths": "rejected_length",
}
RANKED = {
    "chosen_logps": "chosen_logp",
    "rejected_logps": "rejected_logp",
    "ref_chosen_logps": "ref_chosen_logp",
    "ref_rejected_logps": "ref_rejected_logp",
    "chosen_lengths": "chosen_length",
    "rejected_lengths": "rejected_length",
    "prev_chosen_logps": "prev_chosen_logp",
    "prev_rejected_logps": "prev_rejected_logp",
    "history_chosen_logps": "history_chosen_logp",
    "history_rejected_logps": "history_rejected_logp",
    "chosen_rewards": "chosen_win",
    "rejected_rewards": "rejected_win",
}
TWO_SAMPLES = {
    "logps_a": "chosen_logp",
    "logps_b": "rejected_logp",
    "ref_logps_a": "ref_chosen_logp",
    "ref_logps_b": "ref_rejected_logp",
    "old_logps_a": "prev_chosen_logp",
    "old_logps_b": "prev_rejected_logp",
    "lengths_a": "chosen_length",
    "lengths_b": "rejected_length",
    "pref_a": "chosen_win",
    "pref_b": "rejected_win",
    "rewards_a": "chosen_score",
    "rewards_b": "rejected_score",
}
UNRANKED = {"grad_a": "chosen_logp", "grad_b": "rejected_logp"}
ANCHORS = {
    "chosen_logps": "chosen_logp",
    "rejected_logps": "rejected_logp",
    "ref_chosen_logps": "ref_chosen_logp",
    "ref_rejected_logps": "ref_rejected_logp",
}
SUMS = {"logps": "logp", "ref_logps": "ref_logp"}
PHASES = {"half_policy": "half", "policy": "policy"}
LIKELIHOOD = {"alpha": "nll_weight", "sft_weight": "nll_weight"}
ADAPTERS = {
    "dpo": pairs(
        pair.dpo,
        RANKED,
        rows={"chosen_rewards": "chosen_rewards", "rejected_rewards": "rejected_rewards"},
        means={"accuracy": "accuracy"},
    ),
    "simpo": pairs(pair.simpo, POLICY),
    "ipo": pairs(pair.ipo, RANKED),
    "f_dpo": pairs(pair.f_dpo, RANKED),
    "rpo_reg": pairs(pair.rpo_reg, RANKED, params={"sft_reduction": "reduction"}),
    "reasoning_po": pairs(pair.dpo, RANKED, params=LIKELIHOOD, start={"nll_weight": ONE}),
    "cpo": pairs(pair.cpo, POLICY),
    "orpo": pairs(pair.orpo, POLICY, rows={"log_odds_ratio": "log_odds_ratio"}),
    "nca_pair": pairs(pair.nca_pair, RANKED),
    "kto": pairs(
        pair_labels.kto,
        {
            "logps": "chosen_logp",
            "ref_logps": "ref_chosen_logp",
            "kl_logps": "rejected_logp",
            "ref_kl_logps": "ref_rejected_logp",
            "labels": "label",
        },
        grads={"grad_logps": "chosen_logp"},
        means={"kl": "kl"},
    ),
    "sppo": by_inputs(
        {
            "scores": call(
                builders.win_rates,
                outputs={"pairwise": "pairwise", "win": "win", "chosen": "chosen", "rejected": "rejected"},
            ),
            "chosen_logps": pairs(
                pair_rounds.sppo,
                RANKED,
                params={"hard": "targets"},
                words={"hard": {True: "hard", False: "soft"}},
            ),
        },
        drops={"scores": ["beta", "hard"]},
    ),
    "inpo": by_inputs(
        {
            "pref": call(
                builders.tournament,
                outputs={
                    "chosen": "chosen",
                    "rejected": "rejected",
                    "keep": "keep",
                    "comparisons": "comparisons",
                },
            ),
            "chosen_logps": pairs(pair_rounds.inpo, RANKED, rows={"h": "h"}),
        },
        drops={"pref": ["eta", "ratio", "tau", "target"]},
    ),
    "dno": by_inputs(
        {
            "scores": call(builders.large_margin, outputs="pairs"),
            "chosen_rewards": pairs(pair_rounds.dno_soft, RANKED),
            "chosen_logps": pairs(pair_rounds.dno, RANKED),
        },
        drops={"scores": ["eta"]},
    ),
    "mnpo": pairs(pair_rounds.mnpo, RANKED, start={"length_normalize": False}, rows={"h": "h"}),
    "egpo": by_inputs(
        {
            "pref": tensors(nash.extragradient, PHASES),
            "logps_a": pairs(pair_rounds.online_ipo, TWO_SAMPLES, grads=UNRANKED),
        },
        drops={"pref": ["length_normalize"], "logps_a": ["eta", "steps"]},
    ),
    "nash_mp": by_inputs(
        {
            "log_policy": tensors(nash.mirror_prox, PHASES),
            "logps": tensors(
                nash.nash_step,
                {"loss": "loss", "advantages": "advantages"},
                grads={"grad_logps": ["logps", "loss"]},
            ),
        },
        drops={"logps": ["steps"]},
    ),
    "xpo": pairs(
        pair_rounds.xpo,
        RANKED,
        params={"loss_type": "base"},
        words={"loss_type": {"sigmoid": "dpo"}},
    ),
    "hypo": offline_and_online(
        distribution.hypo, ANCHORS, {"loss": "loss", "dpo_loss": "dpo_loss", "kl": "kl"}, group_size="group_size"
    ),
    "copg_pair": by_inputs(
        {
            "rewards": both(
                optimised(
                    "copg",
                    params={"beta": "loss.beta"},
                    start={"loss.beta": TENTH},
                    fields=SUMS,
                    single=["logps", "ref_logps"],
                    grads={"grad_logps": "logps"},
                ),
                fed(
                    on_batch(
                        group_pairs.regularised_rewards,
                        outputs="kl_rewards",
                        fields=SUMS,
                        single=["logps", "ref_logps"],
                        start={"beta": TENTH},
                        logp=True,
                        tables=["kl_rewards"],
                    ),
                    {"rewards": "kl_rewards"},
                    on_batch(group.rloo, outputs="advantages"),
                ),
            ),
            "rewards_a": pairs(pair_rounds.copg_pair, TWO_SAMPLES, grads=UNRANKED),
        }
    ),
    "p3o_pair": pairs(pair_rounds.p3o_pair, TWO_SAMPLES, grads=UNRANKED),
    "seppo_text": pairs(
        pair_rounds.seppo,
        {
            "chosen_logps": "chosen_logp",
            "sampled_logps": "rejected_logp",
            "ref_chosen_logps": "ref_chosen_logp",
            "ref_sampled_logps": "ref_rejected_logp",
        },
        rows={"sign": "sign"},
    ),
    "gdc": tensors(
        distribution.match_distribution,
        {"loss": "loss", "log_z": "log_z", "pseudo_rewards": "pseudo_rewards"},
        grads={"grad_logps": ["logps", "loss"]},
    ),
    "light_r1_dpo": call(builders.own_failures, outputs="pairs"),
    "light_r1": parts(
        {
            "decontaminate": reading(
                "train bench ngram", call(decontaminate.flag_contaminated, outputs="contaminated"), LIGHT_R1
            ),
            "nca": reading(
                "beta chosen_logps rejected_logps ref_chosen_logps ref_rejected_logps",
                pairs(
                    pair.nca_pair,
                    RANKED,
                    grads={"grad_chosen_logps": "chosen_logp", "grad_rejected_logps": "rejected_logp"},
                ),
                LIGHT_R1,
            ),
            "rl_filter": reading("pass_rate low high", call(selection.choose_pass_rates, outputs="kept"), LIGHT_R1),
        }
    ),
    "direct_advantage_po": tensors(
        offline_rl.direct_advantage,
        {"loss": "loss", "advantages": "advantages"},
        grads={"grad_step_logps": ["step_logps", "loss"]},
        flags=["step_mask"],
    ),
    "oreo": by_inputs(
        {
            "value0": tensors(
                offline_rl.oreo_response, {"loss": "."}, grads={"grad_logp": ["logp", "loss"]}, flags=["mask"]
            ),
            "values": tensors(
                offline_rl.oreo,
                {"value_loss": "value_loss", "policy_loss": "policy_loss", "residual": "residual"},
                grads={"grad_values": ["values", "value_loss"], "grad_logp": ["logp", "policy_loss"]},
                flags=["mask"],
            ),
        }
    ),
    "dpo_token_credit": tensors(
        offline_rl.token_credit,
        {
            "token_rewards": "token_rewards",
            "prefix_rewards": "prefix_rewards",
            "sequence_rewards": "sequence_rewards",
        },
        flags=["mask"],
    ),
    "drqa": call(builders.concise_labels, outputs={"labels": "labels", "rewards": "rewards"}),
    "self_rewarding": call(
        builders.best_worst,
        outputs={"mean_scores": "mean_scores", "chosen": "chosen", "rejected": "rejected", "keep": "keep"},
    ),
    "temporal_self_rewarding": call(
        builders.past_and_future,
        outputs={
            "phase1_chosen": "phase1_chosen",
            "phase1_rejected": "phase1_rejected",
            "phase1_rejected_source": "phase1_rejected_source",
            "phase1_keep": "phase1_keep",
            "phase2_chosen": "phase2_chosen",
            "phase2_chosen_source": "phase2_chosen_source",
            "phase2_keep": "phase2_keep",
        },
    ),
    "veripo": call(builders.after_verification, outputs="pairs"),
    "specs": by_inputs(
        {
            "gain_id": call(builders.generalisation_factor, outputs="gf"),
            "chosen_logps": pairs(pair.dpo, RANKED, params=LIKELIHOOD, start={"nll_weight": ONE}),
        },
        drops={"gain_id": ["sft_weight"]},
    ),
    "spo_winrate": call(judging.win_rate_rewards, outputs="rewards"),
    "preference_separability": call(
        separability.separability,
        outputs={
            "train_accuracy": "train_accuracy",
            "loo_accuracy": "loo_accuracy",
            "fisher_ratio": "fisher_ratio",
        },
    ),
    "reward_model": tensors(
        reward_model.bradley_terry,
        {"losses": "losses"},
        averaged={"loss": "losses", "accuracy": "accuracy"},
        grads={
            "grad_chosen_rewards": ["chosen_rewards", "loss"],
            "grad_rejected_rewards": ["rejected_rewards", "loss"],
        },
    ),
    "multilabel_reward": both(
        advantages(group.group, params={}),
        weighted("rewards", components="reward_components", weights="weights"),
    ),
    "rm_ensemble": tensors(reward_model.ensemble, {"rewards": "."}),
    "brme": tensors(
        reward_model.brme,
        {"rewards": "rewards", "nominal": "nominal", "minimum": "minimum"},
        names={"alpha": "nominal_weight"},
    ),
    "maxmin_rlhf": by_inputs(
        {
            "margins": tensors(
                reward_model.mixture_round,
                {
                    "loglik": "loglik",
                    "assignment": "assignment",
                    "responsibilities": "responsibilities",
                    "m_step_losses": "m_step_losses",
                },
                counts=["user"],
            ),
            "group_rewards": tensors(
                reward_model.maxmin,
                {"rewards": "rewards", "utilities": "utilities", "worst_group": "worst_group"},
            ),
        },
        drops={"margins": ["beta"], "group_rewards": ["soft", "log_prior"]},
    ),
    "urpo": tensors(
        reward_model.urpo,
        {"judge_rewards": "judge_rewards", "player_rewards": "player_rewards"},
        tables=["referee_scores"],
    ),
    "pra": by_inputs(
        {
            "step_rewards": call(search.beam_step, outputs={"kept": "kept", "cumulative": "cumulative"}),
            "logp1": call(
                search.step_labels,
                outputs={"reasoning": "reasoning", "shift": "shift", "threshold": "threshold", "search": "search"},
            ),
        }
    ),
    "accel_po": by_inputs(
        {
            "theta_hat_new": tensors(
                nash.extrapolate, {"theta": "."}, names={"theta_hat_new": "new", "theta_hat_old": "old"}
            ),
            "log_hat_new": tensors(
                nash.accelerated_policy,
                {"policy": "."},
                names={"log_hat_new": "log_new", "log_hat_old": "log_old"},
            ),
        }
    ),
}
