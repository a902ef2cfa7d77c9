"""Merge rules."""

from mechanics import both, merged
from model_modes import drawn, on_matrices, on_states, ruled
from step_modes import chosen

from posttrain.merge import blends, deltas, lora, rules, selective, state_dict_merges

DELLA_CHANCES = on_states(
    state_dict_merges.keep_probabilities, "probabilities", drops=["draws", "lam", "weights", "normalize", "rescale"]
)

ADAPTERS = {
    "linear_merge": merged(rules.linear, names={}),
    "task_arithmetic": merged(rules.task_arithmetic, names={}),
    "slerp": ruled(blends.slerp),
    "ties": ruled(deltas.ties),
    "dare": chosen(
        {
            "None": drawn(deltas.dare_linear),
            "linear": drawn(deltas.dare_linear),
            "ties": drawn(deltas.dare_ties),
        },
        by="consensus",
        default="None",
    ),
    "della": chosen(
        {
            "None": both(drawn(deltas.della_linear), DELLA_CHANCES),
            "ties": both(drawn(deltas.della), DELLA_CHANCES),
            "linear": both(drawn(deltas.della_linear), DELLA_CHANCES),
        },
        by="consensus",
        default="ties",
    ),
    "breadcrumbs": ruled(deltas.breadcrumbs),
    "model_stock": both(ruled(deltas.model_stock), on_states(state_dict_merges.stock_shares, "t")),
    "ram_merge": ruled(selective.ram),
    "checkpoint_average": ruled(blends.checkpoint_average, names={"checkpoints": "models"}),
    "model_soup": on_states(state_dict_merges.model_soup, {"merged": "merged", "kept": "kept"}),
    "update_selective_merge": on_states(state_dict_merges.update_selective, "merged"),
    "dler_merge": on_states(
        state_dict_merges.update_selective,
        "merged",
        names={"model": "tuned", "scope": "granularity"},
        start={"at_least_one": False},
    ),
    "reasoning_vector": on_states(
        state_dict_merges.reasoning_vector,
        {"merged": "merged", "incompatible": "incompatible", "compatible": "compatible"},
    ),
    "lora_merge": on_matrices(
        lora.fold_matrices, {"merged": "merged", "scaling": "scaling"}, ["weight", "lora_a", "lora_b"]
    ),
    "lora_combine": on_matrices(lora.combined_delta, "delta", [], {"adapters": lora.Factors}),
}
