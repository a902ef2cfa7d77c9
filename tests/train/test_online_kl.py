"""HyPO: a KL term on the policy's own answers while it trains on pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import PairBatch
from posttrain.data.render import Pair
from posttrain.loss import distribution
from posttrain.models import load as models
from posttrain.recipe.preference_sections import OnlineKl
from posttrain.recipe.sections import Model
from posttrain.train.logprobs import completion_logprobs
from posttrain.train.online_kl import OnlinePolicy


@pytest.fixture
def command(dpo_recipe: Any, tmp_path: Path) -> list[str]:
    del dpo_recipe
    recipe = {
        "stage": "dpo",
        "algorithm": "hypo",
        "model": {"path": "tiny"},
        "data": {"source": "pairs.jsonl"},
        "online_kl": {"max_new_tokens": 6, "coef": 0.05, "samples": 2, "baseline": "rloo"},
        "batch": {"size": 8, "micro_size": 4},
        "optim": {"lr": 2e-3},
        "run": {"steps": 4, "save_every": 2},
    }
    (tmp_path / "hypo.yaml").write_text(json.dumps(recipe))
    return ["dpo", str(tmp_path / "hypo.yaml")]


def test_run_resumes_exactly_and_micro_batches_change_nothing(cli: Any, command: list[str], tmp_path: Path) -> None:
    rows = cli.resumed(tmp_path / "run", *command, steps=4)
    assert rows[0]["online_kl/kl"] == pytest.approx(0, abs=1e-4) and rows[-1]["online_kl/kl"] != 0
    cli.run(*command, "batch.micro_size=2", "--output", str(tmp_path / "cut"))
    for whole, cut in zip(rows, cli.rows_of(tmp_path / "cut"), strict=True):
        for row in (whole, cut):
            row.pop("rewards/accuracies")  # a margin of 0 is rounded to either side
        assert cut == pytest.approx(whole, rel=1e-3, abs=1e-4)


def test_gradient_equals_the_formula() -> None:
    """The parts of a step sum to `hypo` without its pairs."""
    loaded = models.load(Model(path="tiny"), None, training=True)
    pairs = [Pair(str(n), tuple(range(5, 8 + n)), (9,), (10,)) for n in range(3)]
    online = OnlinePolicy(loaded, OnlineKl(coef=0.5, samples=2, max_new_tokens=5, baseline="rloo"), pairs)
    weight = next(loaded.model.parameters())
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
    parts = [[2, 0], [1]]
    found = online.sample_answers(parts, [0, 1], seed=3)
    again = online.sample_answers([[0, 1, 2]], [0], seed=3)[0]
    (sum(online.loss_term(loaded.model, found[n])[0] for n in (0, 1)) / 3).backward()
    parted, weight.grad = weight.grad.clone(), None
    logp, _ = completion_logprobs(loaded.model, again.sequences, again.batch.mask.shape[1])
    none = PairBatch(torch.zeros(0), torch.zeros(0), ref_chosen_logp=torch.zeros(0), ref_rejected_logp=torch.zeros(0))
    wanted = distribution.hypo(none, again.batch, logp, kl_coef=0.5, baseline="rloo")
    wanted.loss.backward()
    torch.testing.assert_close(parted, weight.grad, rtol=1e-3, atol=1e-6)
    kl = sum(online.loss_term(loaded.model, found[n])[1].item() for n in (0, 1)) / 3
    assert kl == pytest.approx(wanted.kl.item(), rel=1e-3) and abs(kl) > 1e-3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("online_kl.samples=1", "write `samples` of 2 or more"),
        ("anchors.reference=tiny", "the loss has another reference"),
        ("online_kl.coeff=1", "did you mean `coef`"),
        ("online_kl.max_new_tokens=100000", "exceed the window"),
    ],
)
def test_invalid_settings_raise(cli: Any, command: list[str], change: str, told: str, tmp_path: Path) -> None:
    assert told in cli.refused(*command, change, "--output", str(tmp_path / "run"))
