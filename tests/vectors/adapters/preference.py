"""Losses on preference pairs."""

from mechanics import pairs

from posttrain.loss import pair

ADAPTERS = {
    "dpo": pairs(
        pair.dpo,
        inputs={
            "chosen_logps": "chosen_logp",
            "rejected_logps": "rejected_logp",
            "ref_chosen_logps": "ref_chosen_logp",
            "ref_rejected_logps": "ref_rejected_logp",
        },
        rows=["chosen_rewards", "rejected_rewards"],
        means=["accuracy"],
    ),
    "simpo": pairs(
        pair.simpo,
        inputs={
            "chosen_logps": "chosen_logp",
            "rejected_logps": "rejected_logp",
            "chosen_lengths": "chosen_length",
            "rejected_lengths": "rejected_length",
        },
    ),
}
