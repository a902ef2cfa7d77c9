"""Supervised objectives and their rows."""

from mechanics import call
from model_modes import listed, on_logits, on_matrices, token_loss
from step_modes import chosen

from posttrain.data import sft_rows
from posttrain.loss import distill, token_weights
from posttrain.train import optim

ADAPTERS = {
    "sft_completion_only": token_loss(token_weights.ce, token_weights.weighted_nll, token_weights.TokenRows),
    "dft": token_loss(token_weights.dft, token_weights.weighted_nll, token_weights.TokenRows),
    "pear": token_loss(token_weights.pear, token_weights.weighted_nll, token_weights.TokenRows),
    "action_aware_sft": token_loss(token_weights.action_aware, token_weights.nll_over_weights, token_weights.TokenRows),
    "neftune": on_matrices(token_weights.neftune, "embeddings", ["embeddings", "attention_mask", "noise"]),
    "on_policy_distill": chosen(
        {
            "full": on_logits(distill.full_distill, {"per_token": "per_token", "loss": "loss"}),
            "sampled": on_logits(
                distill.sampled_distill, {"advantages": "advantages", "loss": "loss"}, read=distill.sampled_logp
            ),
        },
        by="mode",
        default="full",
    ),
    "thought_dropout": call(sft_rows.thought_dropout, outputs={"responses": "responses", "dropped": "dropped"}),
    "rejection_sampling_ft": call(sft_rows.select_accepted, outputs="kept"),
    "agent_r": call(sft_rows.splice, outputs="messages"),
    "packing": call(sft_rows.pack, outputs={"bins": "bins", "position_ids": "position_ids"}),
    "octothinker": listed(optim.stable_decay, "lr", names={"steps": "step"}),
}
