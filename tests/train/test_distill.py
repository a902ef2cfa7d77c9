"""`kl.reference` in rl: a teacher scores the student's samples, which are the only training signal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from posttrain.errors import ModelError, RecipeError, RunError
from posttrain.loss.distill import full_distill
from posttrain.models import tiny
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import Stage
from posttrain.run.metrics import read_metrics
from posttrain.train import logprobs, rl
from posttrain.train.logprobs import Head, Teacher, token_scores

Make = Callable[..., Stage]
TEACHER = {"use": "k1_straight_through", "coef": 1.0, "reference": "teacher"}


@pytest.fixture
def distill(tmp_path: Path) -> Make:
    """Return a recipe whose student is `tiny`; the teacher is another tiny model, of seed 5. Keyword arguments replace
    keys."""
    model, tokenizer = tiny.build(5)
    model.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    rows = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base: dict[str, Any] = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 8, "group_size": 2, "max_new_tokens": 12},
        "rewards": [{"use": "math.accuracy", "weight": 0, "params": {"extract": ["last_number"]}}],
        "scoring": {"workers": 1},
        "advantage": {"use": "reward"},
        "loss": {"use": "clip", "aggregation": "token_mean"},
        "kl": TEACHER,
        "optim": {"lr": 5e-3},
        "run": {"steps": 10},
    }
    return lambda **changes: load_dict({**base, **changes}, base_dir=tmp_path, where="test").recipe


@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 16}], ids=["full", "lora"])
def test_kl_to_the_teacher_falls(distill: Make, rows_of: Any, lora: Any) -> None:
    lr = 5e-3 if lora is None else 2e-2
    recipe = distill(
        model={"path": "tiny", "lora": lora, "offload_reference": True},
        optim={"lr": lr},
        run={"steps": 20},
    )
    kl = [row["kl"] for row in rows_of(rl.run, recipe)]
    assert kl[0] > 0.05
    assert sum(kl[-3:]) / 3 < 0.8 * kl[0]


def test_run_resumes_exactly(distill: Make, rows_of: Any) -> None:
    whole = rows_of(rl.run, distill(run={"steps": 4}), "whole")
    first = rows_of(rl.run, distill(run={"steps": 2}), "two")
    assert first == whole[:2]
    assert rows_of(rl.run, distill(run={"steps": 4}), "two", resume=True) == whole


def test_student_as_its_own_teacher_has_no_gradient(distill: Make, rows_of: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing was trained"):
        rows_of(rl.run, distill(kl={**TEACHER, "reference": "tiny"}, run={"steps": 1}))
    (row,) = read_metrics(tmp_path / "run")
    assert row["kl"] == pytest.approx(0, abs=1e-6) and row["grad_norm"] == pytest.approx(0, abs=1e-5)


def test_teacher_with_another_vocabulary_is_refused(distill: Make, rows_of: Any, tmp_path: Path) -> None:
    model, tokenizer = tiny.build(5)
    tokenizer.add_tokens(["<more>"])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ModelError, match=r"kl\.reference  teacher has another vocabulary than tiny"):
        rows_of(rl.run, distill())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kl": {**TEACHER, "coef": 0.0}}, "does nothing while kl.coef is 0"),
        ({"kl": {**TEACHER, "reference": "stage:sft"}}, "names a stage of a pipeline"),
        ({"kl": {"use": "k1_straight_through", "coef": 1.0}}, "every weight is 0"),
        ({"kl": {**TEACHER, "where": "reward"}}, "differs from k1 only in its gradient"),
        ({"model": {"path": "tiny", "shard": True}}, "cannot be divided among GPUs"),
    ],
)
def test_invalid_recipes_are_refused(distill: Make, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        distill(**changes)


@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_chunked_divergence_over_the_vocabulary_is_exact(beta: float) -> None:
    """In chunks of 16 tokens, against `full_distill` on full logits: values, and gradients of the hidden states, at a
    temperature; the teacher's head has one more column, which is never sampled."""
    torch.manual_seed(0)
    student, teacher = tiny.build(1)[0], tiny.build(5)[0]
    head, other = Head(student), Head(teacher)
    size = student.get_output_embeddings().weight.shape[1]
    hidden, states = torch.randn(40, size, requires_grad=True), torch.randn(40, size)
    targets = torch.randint(0, 9, (40,))
    with patch.object(logprobs, "CHUNK_CELLS", 1):
        found = token_scores(head, hidden, targets, 0.7, teacher=Teacher(other, states, beta))
    logits = [head(hidden)[None], other(states)[None]]
    ones = torch.ones(1, 40, dtype=torch.bool)
    exact = full_distill(*logits, ones, beta=beta, temperature=0.7).per_token[0]
    torch.testing.assert_close(found["divergence"], exact, rtol=1e-4, atol=1e-5)
    weights = torch.rand(40)
    (ours,) = torch.autograd.grad((found["divergence"] * weights).sum(), hidden)
    (theirs,) = torch.autograd.grad((exact * weights).sum(), hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_full_distillation_lowers_the_exact_kl(distill: Make, rows_of: Any) -> None:
    """The exact KL falls faster than by distillation on sampled tokens in as many steps; a resumed run is the same."""
    full = {"use": "full", "coef": 1.0, "reference": "teacher"}
    kl = [row["kl"] for row in rows_of(rl.run, distill(kl=full, run={"steps": 12}), "full")]
    sampled = [row["kl"] for row in rows_of(rl.run, distill(run={"steps": 12}), "sampled")]
    assert min(kl) >= 0 and kl[0] > 0.05 and sum(kl[-3:]) < 0.6 * 3 * kl[0]
    assert sum(kl[-3:]) < sum(sampled[-3:]) + 0.05
    two = rows_of(rl.run, distill(kl=full, run={"steps": 2}), "two")
    whole = rows_of(rl.run, distill(kl=full, run={"steps": 4}), "two", resume=True)
    assert whole[:2] == two and whole == rows_of(rl.run, distill(kl=full, run={"steps": 4}), "four")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kl": {"use": "full", "coef": 1.0}}, "compares with the head of a separate model"),
        ({"kl": {"use": "full", "coef": 1.0, "reference": "teacher", "where": "reward"}}, "a reward has none"),
        (
            {
                "kl": {"use": "full", "coef": 1.0, "reference": "teacher"},
                "model": {"path": "tiny", "offload_reference": True},
            },
            "moves to the host",
        ),
    ],
)
def test_full_distillation_with_unsupported_settings_is_refused(
    distill: Make, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(RecipeError, match=told):
        distill(**changes)
