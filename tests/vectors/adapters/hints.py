"""Prompt variants: hints, prefixes, templates, instructions; supervised steps on unsolved prompts."""

from hint_modes import buffered, by_part, cuts, on_failure, shortest
from mechanics import on_batch

from posttrain.data import unsolved
from posttrain.loss import hybrid
from posttrain.variants import solutions

ADAPTERS = {
    "ghpo": on_failure(solutions.hint_on_failure),
    "pope": shortest(solutions.shortest_fraction, solutions.prefix_tokens),
    "prefixrl": cuts(solutions.cut_tokens, solutions.prefixed_share),
    "relift": by_part(
        {
            "buffer": (
                "uids rewards sft_data_size fail_value",
                buffered(unsolved.has_failed, unsolved.with_newest, unsolved.taken),
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
