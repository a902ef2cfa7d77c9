"""Rollouts of one prompt packed with the prompt once: log-probs and gradients equal separate rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models import adapters
from posttrain.models.load import LoadedModel
from posttrain.models.precision import keep_master_weights
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Lora
from posttrain.run.metrics import read_metrics
from posttrain.train import assemble, attention, packed_line, packed_pass, rl
from posttrain.train.attention import Packed, use_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import Extras, completion_scores, micro_batches
from posttrain.train.pass_checks import shares_prompts
from posttrain.train.prompt_sharing import Prompts, build_shared_line

from .families import family

LONG, OTHER = tuple(range(20, 36)), tuple(range(50, 62))
ROWS = Sequences(
    (
        (*LONG, 5, 6, 7),
        (*OTHER, 8, 9),
        (*LONG, 7),
        (*LONG, 6, 5, 7, 9, 11),
        (3, 4, 5),  # alone
        (*OTHER, 9, 8, 8),
        LONG,  # no completion
        (*LONG, 5, 6, 8),
    ),
    (16, 12, 16, 16, 2, 12, 16, 16),
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 4},
    "qwen3_moe": {},
}


def model_of(kind: str, *, lora: bool = False) -> Any:
    model = family(kind, **FAMILIES[kind])
    assert use_packed_attention(model)
    if not lora:
        return model
    model = adapters.add(model, Lora(rank=2))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return model


def log_probs_and_gradient(model: Any, *, share: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return log-probs of all rows, and the gradient of their sum with a weight for each token."""
    extras = Extras(router="moe" in model.config.model_type)
    found = completion_scores(model, ROWS, 5, packed=True, share=share, fill=16, extras=extras)
    weights = torch.linspace(-1.0, 2.0, 40).view(8, 5)
    loss = (found["logp"] * weights).sum() + found.get("router_loss", torch.zeros(8)).dot(weights[:, 0])
    model.zero_grad()
    loss.backward()
    return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "lora"), [*((kind, False) for kind in FAMILIES), ("llama", True), ("qwen3", True)])
def test_log_probs_and_gradients_equal_whole_rows(kind: str, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding windows are shorter than the prompts. Attention between rows would change a gradient."""
    model = model_of(kind, lora=lora)
    wanted, gradients = log_probs_and_gradient(model, share=False)
    tokens: list[int] = []
    below = packed_pass.backbone

    def counted(causal: Any) -> Any:
        def run(**inputs: Any) -> Any:
            tokens.append(inputs["input_ids"].numel())
            return below(causal)(**inputs)

        return run

    monkeypatch.setattr(packed_pass, "backbone", counted)
    found, shared_gradients = log_probs_and_gradient(model, share=True)
    assert sum(ROWS.lengths) == 124 and tokens == [64], "4 x 15 + 11 fall away of 124, filled to a multiple of 16"
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=2e-6, msg=name)
    assert shared_gradients.keys() == gradients.keys() and gradients
    scale = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        assert float((shared_gradients[name] - gradient).abs().max()) < 3e-6 * max(scale, 1.0), name


@pytest.mark.usefixtures("varlen_on_cpu")
def test_shared_prompt_with_the_variable_length_kernel() -> None:
    """One variable-length kernel for all rows, as on a GPU."""
    model = model_of("llama")
    wanted, gradients = log_probs_and_gradient(model, share=False)
    found, shared_gradients = log_probs_and_gradient(model, share=True)
    torch.testing.assert_close(found["logp"], wanted["logp"], rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(shared_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def loaded_of(model: Any) -> LoadedModel:
    return LoadedModel(model, None, (2,), 0, "test", half=keep_master_weights(model))


@pytest.mark.parametrize("kind", FAMILIES)
def test_packing_is_tried_per_architecture(kind: str) -> None:
    assert shares_prompts(loaded_of(model_of(kind)))


def test_trial_rejects_attention_that_misses_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")

    def own_tokens_alone(prompts: Prompts, filling: int, device: torch.device) -> Packed:
        made = build_shared_line(prompts, filling, device)
        assert made.keys is not None
        starts = torch.tensor([0, *made.lengths[:-1]]).cumsum(0).repeat_interleave(torch.tensor(made.keys.lengths))
        return dataclasses.replace(made, keys=dataclasses.replace(made.keys, sources=starts))

    monkeypatch.setattr(packed_pass, "build_shared_line", own_tokens_alone)
    assert not shares_prompts(loaded_of(model))


def test_shared_tokens_and_cost() -> None:
    prompts = ROWS.prompts
    assert prompts.shared_token_counts(range(8)) == [0, 0, 15, 15, 0, 11, 15, 15]
    assert prompts.shared_token_counts([7, 5, 3]) == [0, 0, 15], "the first in a line is whole"
    assert prompts.cost([0, 2]) == 19 + 17 - 13, "an eighth of the 15 tokens stays: their keys and values"
    assert prompts.is_worthwhile() and not Prompts.of([(1, 2, 3, 4, 5)] * 2, [2, 2]).is_worthwhile()


def test_rows_of_a_prompt_are_packed_together_within_the_budget() -> None:
    lengths, prompts = ROWS.lengths, ROWS.prompts
    whole = micro_batches(lengths, 1000, packed=True, prompts=prompts)
    assert [sorted(rows) for rows in whole] == [list(range(8))]
    cut = micro_batches(lengths, 40, packed=True, prompts=prompts)
    assert sorted(row for rows in cut for row in rows) == list(range(8)) and len(cut) > 1
    assert all(prompts.cost(rows) <= 40 for rows in cut)
    assert len(cut) < len(micro_batches(lengths, 40, packed=True))
    groups = [0, 1, 0, 0, 2, 1, 0, 0]
    kept = micro_batches(lengths, 22, packed=True, groups=groups, prompts=prompts)
    assert sorted(sorted(rows) for rows in kept) == [[0, 2, 3, 6, 7], [1, 5], [4]], "a loss over groups gets whole ones"


REWARD = """
def spread(completion):
    return sum(map(ord, completion)) % 97 / 97
"""


@pytest.mark.parametrize("tools", [False, True])
def test_run_with_prompt_sharing_equals_a_run_without(
    tools: bool, tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts, two minibatches, a reference, and replies of tools within completions. Packed as on a GPU."""
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"{i}+{i}=" + "?" * 40, "answer": str(2 * i)}) for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    base: dict[str, Any] = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 24 if tools else 8},
        "rewards": [{"use": "rewards.py:spread"}],
        "scoring": {"workers": 1},
        "kl": {"coef": 0.1},
        "batch": {"minibatches": 2, "micro_tokens": 200},
        "optim": {"lr": 1e-3, "eps": 1e-2},
        "run": {"steps": 2},
    }
    if tools:
        (tmp_path / "world.py").write_text(WORLD)
        base |= {"environment": {"use": "world.py:Echo"}}
        base["rollout"] |= {"max_turns": 2, "turn_tokens": 6}
    recipe = load_dict(base, base_dir=tmp_path, where="test").recipe
    monkeypatch.setattr(assemble, "enable_row_packing", lambda loaded, _: use_packed_attention(loaded.model))
    found = []
    for name in ("shared", "whole"):
        with monkeypatch.context() as patch, opened(name) as directory:
            if name == "whole":
                patch.setattr(assemble, "shares_prompts", lambda _: False)
            rl.run(recipe, directory)
            found.append([{k: v for k, v in row.items() if "time/" not in k} for row in read_metrics(directory.path)])
    for row, wanted in zip(*found, strict=True):
        ratio = row.pop("shared_prompt_ratio")
        assert 0.3 < ratio < 0.75
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6)


WORLD = '''
class Echo:
    """Two turns; what it replies is no token of the model."""
    def reset(self, row): self.turn = 0
    def step(self, text):
        self.turn += 1
        return "again", self.turn == 2, 0.0
    def score(self): return 0.0
    def close(self): pass
'''


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_attention_in_blocks_of_short_rows_equals_single_rows(
    shared: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, with two queries per key. Rows of two prompts alternate; a third prompt has a single row,
    a fourth is too long to share a line, and filler tokens are not read."""
    prompts = [(1, 2, 3, 4)] * 2 + [(5, 6)] + [(1, 2, 3, 4), (5, 6), (7,), tuple(range(40))]
    ids = [(*prompt, *range(9, 10 + n)) for n, prompt in enumerate(prompts)]
    known = Prompts.of(ids, [len(prompt) for prompt in prompts])
    line = (
        build_shared_line(known, 3, torch.device("cpu"))
        if shared
        else Packed.of([*map(len, ids), 3], torch.device("cpu"))
    )
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, sum(line.lengths), 8, generator=draw).requires_grad_() for heads in (4, 2, 2)]
    blocks = packed_line.blocks_of(line, window)
    assert blocks is not None and 1 < len(blocks) < len(ids)

    def measure() -> list[torch.Tensor]:
        line.blocks.clear()
        out = attention._attend_by_row(*given, line, None, window)
        return [out, *torch.autograd.grad((out * torch.arange(8)).sum(), given)]

    found = measure()
    monkeypatch.setattr(packed_line, "MAX_WIDTH", 0)
    for one, other in zip(found, measure(), strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)
