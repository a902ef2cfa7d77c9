"""Notes of a run about its weights and learning rate, for common mistakes."""

from __future__ import annotations

import pytest

from posttrain.data.prepare import Prepared
from posttrain.data.render import Pair
from posttrain.recipe.training_sections import Optim
from posttrain.train.start_notes import USUAL, few_rows_note, rate_note, shared_rows_note, warmup_note


@pytest.mark.parametrize(
    ("weights", "lr", "said"),
    [
        (7_000_000_000, 2e-4, "high for all weights of a model of this size (usual is below 1e-04"),
        (7_000_000_000, 1e-5, ""),
        (135_000_000, 3e-4, "(larger models take such a rate only with LoRA)"),  # 1e-4 * 7.4^0.75 = 4.5e-4
        (135_000_000, 1e-3, "usual is below 4e-04"),
        (100_000, 4e-3, "(larger models take such a rate only with LoRA)"),
    ],
)
def test_full_training_at_a_lora_learning_rate_is_noted(weights: int, lr: float, said: str) -> None:
    line = rate_note(weights, weights, lr, USUAL["sft"], adapter=False)
    assert line.startswith(f"all {weights:,} weights are trained, learning rate {lr:.3g}")
    assert said in line and (said or line.endswith(f"{lr:.3g}"))


def test_lora_at_a_full_training_learning_rate_is_noted() -> None:
    low = rate_note(10_000, 1_000_000, 1e-6, USUAL["rl"], adapter=True)
    assert low.startswith("10,000 of 1,000,000 weights are trained (LoRA), learning rate 1e-06: low for LoRA")
    assert rate_note(10_000, 1_000_000, 1e-5, USUAL["rl"], adapter=True).endswith("learning rate 1e-05")


def test_warm_up_longer_than_the_run_is_noted() -> None:
    """The 4th of 4 updates has 4/11 of the rate if the warm-up takes 10."""
    assert warmup_note(Optim(lr=1.1e-3, warmup_steps=10), 4) == (
        "optim.warmup_steps is 10, and the run has 4 updates: the learning rate rises to 0.0004 and never reaches"
        " optim.lr 0.0011"
    )
    assert warmup_note(Optim(warmup_steps=4), 5) is None and warmup_note(Optim(warmup_steps=0.5), 1) is None


def test_fewer_rows_than_a_step_needs_is_noted() -> None:
    assert few_rows_note(3, 32, "row", "batch.size") == (
        "3 rows, and batch.size is 32: one step takes all of them, some of them more than once"
    )
    assert few_rows_note(32, 32, "row", "batch.size") is None
    assert few_rows_note(20, 64, "row", "batch.size", planned=40) == (
        "20 rows, and batch.size is 64: the run's only step has 40, each of them 2 times"
    )
    assert few_rows_note(20, 64, "row", "batch.size", planned=20) is None


def test_evaluation_rows_in_the_training_data_are_noted() -> None:
    """Only words count: case, blanks and other columns do not; an empty question matches none."""
    trained = [{"prompt": "What is 3 + 4?"}, {"prompt": "Name a sea."}, {"prompt": ""}]
    asked = ["what is  3 + 4", "What is 3 - 4?", ""]
    held_out = Prepared([0, 1, 2], [{"prompt": text, "answer": "7"} for text in asked])
    assert shared_rows_note(trained, held_out) == (
        "evaluation: 1 of 3 rows ask the same as training rows, so it also measures memorisation"
        " (`posttrain data audit` names them)"
    )
    assert shared_rows_note(trained[1:], held_out) == shared_rows_note(trained, None) == ""


def test_rows_used_for_training() -> None:
    rows = [{"uid": "a", "prompt": "1"}, {"uid": "b", "prompt": "2"}]
    kept = Pair("b", (1,), (2,), (3,))
    assert Prepared([kept], rows).kept_rows == rows[1:]
