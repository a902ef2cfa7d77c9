"""Estimators of evaluation."""

from mechanics import call, parts, reading, reward, taking
from model_modes import listed, on_states
from pair_modes import weighted
from step_modes import chosen

from posttrain.evaluate import consensus, contamination, efficiency, estimators, labels
from posttrain.run import scaling

MODERATION = "alphas components asymptote midpoint r0 slope x classes labels"  # what its parts read

ADAPTERS = {
    "pass_at_k": call(estimators.pass_at_k, outputs="pass_at_k"),
    "avg_at_k": call(estimators.avg_at_k, outputs={"avg": "avg", "per_problem": "per_problem"}),
    "cons_at_k": call(
        estimators.cons_at_k, outputs={"majority": "majority", "per_problem": "per_problem", "cons": "cons"}
    ),
    "bootstrap_ci": call(estimators.bootstrap_ci, outputs={"mean": "mean", "low": "low", "high": "high"}),
    "arm_consensus": call(consensus.arm_consensus, outputs={"answer": "answer", "used": "used"}),
    "efficiency_metrics": call(
        efficiency.efficiency_metrics,
        outputs={
            "accuracy": "accuracy",
            "mean_length": "mean_length",
            "mean_length_correct": "mean_length_correct",
            "mean_length_wrong": "mean_length_wrong",
            "tokens_per_correct": "tokens_per_correct",
            "accuracy_per_1k": "accuracy_per_1k",
            "aes": "aes",
        },
    ),
    "contamination_check": call(
        contamination.contamination_check,
        outputs={
            "exact": "exact",
            "rouge_l": "rouge_l",
            "completion_rate": "completion_rate",
            "mean_rouge_l": "mean_rouge_l",
        },
    ),
    "accuracy_capability": call(
        efficiency.accuracy_capability,
        outputs={
            "pass_at_k_before": "pass_at_k_before",
            "pass_at_k_after": "pass_at_k_after",
            "buckets": "buckets",
            "self_distillation_gain": "self_distillation_gain",
            "capability_gain": "capability_gain",
        },
    ),
    "moderation_rl": taking(
        "alphas asymptote classes components labels midpoint part r0 slope x",
        parts(
            {
                "reward": reading(
                    "alphas components",
                    weighted("rewards", components="components", weights="alphas", table=False),
                    MODERATION,
                ),
                "sigmoid": reading(
                    "asymptote midpoint r0 slope x", call(scaling.scaling_curve, outputs="y"), MODERATION
                ),
                "calibrate": reading("classes labels", call(labels.label_probabilities, outputs="prob"), MODERATION),
            }
        ),
    ),
    "four_habits": listed(
        reward("countdown.expression"),
        "rewards",
        names={"responses": "completion", "targets": "target", "numbers": "numbers"},
    ),
    "random_calculation": chosen(
        {
            "reward": listed(reward("numeric.closeness"), "rewards", names={"answer": "value", "truth": "truth"}),
            "contamination": on_states(
                contamination.probe,
                {"shown_words": "shown_words", "rouge_l": "rouge_l", "exact_match": "exact_match"},
            ),
        },
        by="part",
        default="reward",
        drops={"reward": ["fraction"], "contamination": ["eps"]},
    ),
}
