"""Policy losses, advantages, selection, KL and aggregation."""

from mechanics import advantages, aggregations, both, call, rl_step, token_terms, trace

from posttrain.advantage import group, keep
from posttrain.control import adaptive
from posttrain.loss import kl

ADAPTERS = {
    "grpo": rl_step(
        "grpo",
        params={
            "epsilon": "loss.clip_low",
            "epsilon_high": "loss.clip_high",
            "beta": "kl.coef",
            "adv_eps": "advantage.eps",
            "std_ddof": "advantage.ddof",
            "scale_rewards": "advantage.scale",
        },
    ),
    "dr_grpo": rl_step(
        "dr_grpo",
        params={"epsilon": "loss.clip_low", "beta": "kl.coef", "max_completion_length": "loss.norm_len"},
    ),
    "dapo": rl_step(
        "dapo",
        params={"epsilon": "loss.clip_low", "epsilon_high": "loss.clip_high", "adv_eps": "advantage.eps"},
        fields={"correct": ("correct", "rewards")},
        start={"loss.clip_high": None},
    ),
    "grpo_norm": advantages(group.group, params={}),
    "dynamic_sampling": call(
        keep.oversample,
        names={"metric_batches": "batches", "train_batch_size": "want", "max_num_gen_batches": "max_batches"},
        outputs={"keep": "kept", "selected": "selected", "num_gen_batches": "batches", "status": "status"},
    ),
    "kl_estimators": both(
        token_terms({"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "k3_is": kl.k3_is}, ignored=["kl_trace"]),
        trace(
            adaptive.adaptive_coef,
            output="adaptive_kl_coef",
            over="kl_trace",
            state="kl_coef",
            names={"kl_target": "target", "kl_horizon": "horizon", "n_steps": "n_steps"},
        ),
    ),
    "loss_aggregation": aggregations(
        values="per_token_loss",
        modes={
            "token_mean": ("token_mean", True),
            "seq_mean_token_mean": ("seq_mean_token_mean", True),
            "seq_mean_token_sum": ("seq_mean_token_sum", True),
            "fixed": ("fixed", True),
            "seq_mean_token_mean_drop_empty": ("seq_mean_token_mean", False),
            "seq_mean_token_sum_drop_empty": ("seq_mean_token_sum", False),
        },
    ),
}
