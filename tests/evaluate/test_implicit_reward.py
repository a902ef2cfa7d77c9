"""DPO's implicit reward of an answer: token log-ratios of two models, and models that cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import RewardError
from posttrain.evaluate import implicit_reward
from posttrain.models import load
from posttrain.models.save import save
from posttrain.recipe.sections import Model
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import completion_logprobs

ASKED = [{"role": "user", "content": "2+2"}]


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    implicit_reward.close_models()


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """Folders of two models with the same tokenizer and different weights."""
    for seed in (0, 1):
        save(load.load(Model(path="tiny"), tmp_path, seed=seed), tmp_path / str(seed))
    return str(tmp_path / "0"), str(tmp_path / "1")


def test_sum_over_tokens_is_the_dpo_reward(two: tuple[str, str]) -> None:
    """beta (log pi - log ref) of the completion with its end, as in the trainer's passes."""
    [found, nothing] = implicit_reward.score(["44", ""], [ASKED] * 2, path=two[0], reference=two[1], beta=0.5)
    assert nothing is None
    models = [implicit_reward._load_model(path, ".", "auto", "auto") for path in two]
    example = implicit_reward._render_completion(models[0], ASKED, "44", None)
    assert example is not None
    start = example.trained.index(True)
    sequences = Sequences((torch.tensor(example.ids).numpy(),), (start,))
    own, theirs = (completion_logprobs(m.model, sequences, len(example.ids) - start)[0][0] for m in models)
    terms = 0.5 * (own - theirs).detach()
    assert isinstance(found, dict)
    assert found["reward"] == pytest.approx(float(terms.sum()), abs=1e-4)
    sums = [0.0, *terms.cumsum(0).tolist()]
    assert found["lowest"] == pytest.approx(min(sums), abs=1e-4)
    assert found["lowest_at"] == pytest.approx(sums.index(min(sums)) / len(terms))


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({}, "path: MODEL, reference: MODEL"),
        ({"path": "a"}, "{reference: MODEL}"),
        ({"path": "a", "reference": "a"}, "the same model"),
        ({"path": "a", "reference": "b", "beta": 0}, "not above 0"),
    ],
)
def test_models_that_cannot_be_compared_are_reported(params: dict[str, Any], told: str) -> None:
    assert any(told in line for line in implicit_reward.CHECK("score", params))


def test_different_vocabulary_is_refused(two: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    implicit_reward.open_models(path=two[0], reference=two[1])
    monkeypatch.setattr(implicit_reward._load_model(two[1], ".", "auto", "auto").tokenizer, "get_vocab", dict)
    with pytest.raises(RewardError, match="have different vocabularies"):
        implicit_reward.open_models(path=two[0], reference=two[1])
