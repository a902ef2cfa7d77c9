"""Our pair losses compared with TRL's DPOTrainer on one batch and a policy moved away from its reference."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import DPOConfig, DPOTrainer

from posttrain import registry
from posttrain.batch import PairBatch
from posttrain.data.prepare import prepare_pairs
from posttrain.models import load as models
from posttrain.train import preference
from posttrain.train.hf_trainer import Job

# our loss, its keys, TRL's settings, and the ratio of TRL's value to ours.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "robust": (
        "dpo",
        {"variant": "robust", "label_smoothing": 0.2},
        {"loss_types": ["robust"], "label_smoothing": 0.2},
        1,
    ),
    "ipo, by token": ("ipo", {}, {"loss_types": ["ipo"]}, 1),
    "nca_pair": ("nca_pair", {}, {"loss_types": ["nca_pair"]}, 1),
    "sppo: TRL leaves out the half": ("sppo", {"targets": "hard"}, {"loss_types": ["sppo_hard"]}, 2),
    "a likelihood by token": (
        "dpo",
        {"nll_weight": 0.7, "nll_reduction": "token"},
        {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
        1,
    ),
    "js": ("f_dpo", {"divergence": "js"}, {"f_divergence_type": "js_divergence"}, 1),
    "forward_kl": ("f_dpo", {"divergence": "forward_kl"}, {"f_divergence_type": "forward_kl"}, 1),
    "alpha: TRL's is 1 - ours": (
        "f_dpo",
        {"divergence": "alpha", "alpha": 0.7},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
        1,
    ),
}  # fmt: skip


class Stock(DPOTrainer):
    """TRL's unmodified trainer, except for tokenization, which our renderer did."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


def test_losses_and_gradients_match_trl(dpo_recipe: Any, opened: Any, tmp_path: Any) -> None:
    recipe = dpo_recipe(batch={"size": 6, "micro_size": 6})
    loaded = models.load(recipe.model, tmp_path, seed=0, training=True)
    pairs = prepare_pairs(recipe.data, loaded.tokenizer, tmp_path).items
    reference = copy.deepcopy(loaded.model)
    args = DPOConfig(
        output_dir=str(tmp_path / "trl"), beta=0.3, per_device_train_batch_size=6, max_length=None,
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    with opened() as directory:
        job = Job.of(recipe, directory, loaded, len(pairs))
        ours = preference.make_trainer(job, pairs, lambda batch: batch)
        ours.use_reference(pairs, tmp_path / "reference.safetensors")
        torch.manual_seed(1)
        with torch.no_grad():
            for p in loaded.model.parameters():
                p.add_(0.02 * torch.randn_like(p))
        rows = preference.dataset(pairs)
        theirs = Stock(
            copy.deepcopy(loaded.model), reference, args, train_dataset=rows, processing_class=loaded.tokenizer
        )
        batch = ours.data_collator([ours.train_dataset[n] for n in range(6)])
        plain = {name: getattr(theirs, name) for _, _, settings, _ in CASES.values() for name in settings}
        for name, (use, keys, settings, factor) in CASES.items():
            loss = registry.get("pair_loss", use).function
            ours.pair_loss = lambda made, loss=loss, keys=keys: loss(made, beta=0.3, **keys)
            for key, value in {**plain, "loss_weights": [1.0], **settings}.items():
                setattr(theirs, key, value)
            ours.sums = {}
            mine, expected = step(ours, batch), step(theirs, batch)
            assert factor * mine[0] == pytest.approx(expected[0], rel=1e-5), name
            torch.testing.assert_close(factor * mine[1], expected[1], rtol=1e-3, atol=1e-6, msg=name)


def step(trainer: Any, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Compute loss and gradient of one batch."""
    trainer.model.zero_grad()
    value = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(6))
    value.backward()
    return value.item(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def test_reference_free_losses_match_trl() -> None:
    """ORPO's term (TRL takes means by token in float32 and adds the likelihood elsewhere) and CPO without the
    likelihood.
    """
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    theirs: Any = SimpleNamespace(
        beta=0.3, alpha=0.0, label_smoothing=0.1, loss_type="sigmoid", accelerator=SimpleNamespace(device="cpu")
    )
    chosen, rejected, lengths = torch.tensor([-4.0, -9.0]), torch.tensor([-7.0, -3.0]), torch.tensor([4, 3])
    made = PairBatch(chosen, rejected, lengths, lengths)
    orpo = registry.get("pair_loss", "orpo").function(made, beta=0.3)
    term = ORPOTrainer.odds_ratio_loss(theirs, chosen / lengths, rejected / lengths)[0]
    torch.testing.assert_close(orpo.losses, -chosen / lengths - term)
    cpo = registry.get("pair_loss", "cpo").function(made, beta=0.3, alpha=0.0, label_smoothing=0.1)
    torch.testing.assert_close(cpo.losses, CPOTrainer.cpo_loss(theirs, chosen, rejected)[0])
    theirs.loss_type, theirs.simpo_gamma = "simpo", 0.3 * 0.5  # gamma; ours is its ratio to beta
    simpo = registry.get("pair_loss", "simpo").function(made, beta=0.3, gamma_beta_ratio=0.5, label_smoothing=0.1)
    expected = CPOTrainer.cpo_loss(theirs, chosen / lengths, rejected / lengths)[0]  # TRL's own averages
    torch.testing.assert_close(simpo.losses, expected)


def test_kto_matches_trl() -> None:
    """Loss and gradient with respect to log-probs, with a positive KL estimate and with a negative one, which counts
    as 0. TRL estimates KL on a micro-batch, we on the step: here they are the same.
    """
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7}
    labels, ref = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([-5.0, -6.0, -2.0, -4.0])
    for gap in (0.8, -0.8):
        mine, other = (torch.tensor([-4.0, -7.0, -1.0, -3.5], requires_grad=True) for _ in range(2))
        mismatched = torch.tensor([-9.0, -8.0, -7.0, -6.0])
        batch = PairBatch(
            mine,
            mismatched + gap,
            ref_chosen_logp=ref,
            ref_rejected_logp=mismatched,
            label=labels,
        )
        losses = registry.get("pair_loss", "kto").function(batch, beta=0.3, **weights).losses
        expected = trl_kto(other, ref, labels, mismatched + gap, mismatched, beta=0.3, **weights)
        torch.testing.assert_close(losses.mean(), expected)
        losses.mean().backward()
        expected.backward()
        torch.testing.assert_close(mine.grad, other.grad)


def trl_kto(logp: Any, ref: Any, labels: Any, kl: Any, ref_kl: Any, **settings: float) -> torch.Tensor:
    """Compute the loss of TRL's KTOTrainer for one-token completions with these log-probs."""
    from collections import defaultdict

    from trl import KTOTrainer

    ones = torch.ones(len(logp), 2, dtype=torch.long)
    inputs = {"input_ids": ones, "attention_mask": ones, "completion_mask": ones, "label": labels.bool()}
    inputs |= {"ref_logps": ref, "ref_KL_logps": ref_kl}
    column = torch.zeros(len(logp), 1)
    outputs = SimpleNamespace(log_probs=logp[:, None], entropy=column, mean_logits=column)
    theirs: Any = SimpleNamespace(
        model=torch.nn.Identity(), loss_type="kto", calculate_KL=True, precompute_ref_logps=True,
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x), _total_train_tokens=0, _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)), _compute_kl_logps=lambda *_: kl, **settings,
    )  # fmt: skip
    return KTOTrainer._compute_loss(theirs, lambda **_: outputs, inputs, False)
