"""Distribution of a step's work among ranks; idle passes add no gradient."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, PretrainedConfig, Qwen2MoeConfig

from posttrain.data.prepare import prepare_examples
from posttrain.models import load as models
from posttrain.rollout.hf import TransformersEngine
from posttrain.train import data_parallel, distributed, hf_trainer, load_balancing, rl, sft, update

Opened = Callable[..., AbstractContextManager[Any]]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "costs", [[9, 1, 9, 1, 9, 1, 9, 1], [100, 1, 1, 1], [5], [], [7, 7, 7], [64, 32, 16, 8, 4, 2, 1, 1, 1]]
)
def test_work_is_assigned_evenly(world: int, costs: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item goes to one rank, numbers of items differ by at most one, and no rank exceeds a fair share by more than
    one item."""
    monkeypatch.setattr(distributed, "world", lambda: world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(data_parallel.my_even_shard(costs))
    assert sorted(n for share in shares for n in share) == list(range(len(costs)))
    assert max(map(len, shares)) <= -(-len(costs) // world)
    loads = [sum(costs[n] for n in share) for share in shares]
    assert max(loads) <= sum(costs) / world + max(costs, default=0)


def test_alternating_long_and_short_micro_batches_are_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other micro-batch is long: assigned by number, one of two ranks would do nine tenths of the work."""
    monkeypatch.setattr(distributed, "world", lambda: 2)
    costs = [9, 1] * 4
    loads = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        loads.append(sum(costs[n] for n in data_parallel.my_even_shard(costs)))
    assert loads == [20, 20]


@pytest.mark.parametrize("packing", [False, True])
def test_sft_splits_a_step_by_length(
    packing: bool, sft_recipe: Any, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows are grouped by length; packed lines have about equal numbers of tokens."""
    rows = "".join(f'{{"prompt": "{"x" * (40 if i % 2 else 1)}", "completion": "y"}}\n' for i in range(16))
    (tmp_path / "rows.jsonl").write_text(rows)
    seen: list[list[int]] = []
    loop = sft.Sft.get_batch_samples

    def watched(self: Any, *args: Any) -> Any:
        batches, count = loop(self, *args)
        lengths = [[int(n) for n in batch["attention_mask"].sum(-1)] for batch in batches if "attention_mask" in batch]
        seen.extend(lengths or [[batch["input_ids"].numel()] for batch in batches])
        return batches, count

    monkeypatch.setattr(sft.Sft, "get_batch_samples", watched)
    changes = {"data": {"source": "rows.jsonl", "shuffle": False}, "run": {"steps": 1}}
    with opened() as directory:
        sft.run(sft_recipe(**changes, batch={"size": 16, "micro_size": 4, "packing": packing}), directory)
    assert len(seen) == 4
    if packing:
        assert len({tokens for (tokens,) in seen}) == 1
    else:
        assert all(max(lengths) == min(lengths) for lengths in seen), "no padding at all"
        assert [lengths[0] for lengths in seen] == sorted((lengths[0] for lengths in seen), reverse=True)


@pytest.mark.parametrize("sizes", [[3, 4, 5, 1, 9, 2, 2], [20, 1, 1], [], [1] * 50])
def test_gradient_buckets_hold_neighbors_of_one_dtype_up_to_their_size(sizes: list[int], monkeypatch: Any) -> None:
    monkeypatch.setattr(data_parallel, "BUCKET_NUMEL", 8)
    tensors = [torch.zeros(n, dtype=torch.float64 if i == 2 else torch.float32) for i, n in enumerate(sizes)]
    buckets = list(data_parallel._buckets(tensors))
    assert [id(t) for bucket in buckets for t in bucket] == [id(t) for t in tensors]
    assert all(len({t.dtype for t in bucket}) == 1 for bucket in buckets)
    assert all(len(bucket) == 1 or sum(t.numel() for t in bucket) <= 8 for bucket in buckets)
    for bucket, following in itertools.pairwise(buckets):
        fits = sum(t.numel() for t in bucket) + following[0].numel() <= 8
        assert not fits or following[0].dtype != bucket[0].dtype


def moe(kind: type[PretrainedConfig], vocabulary: int) -> nn.Module:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = kind(
        vocab_size=vocabulary,
        **sizes,
        **experts,
        intermediate_size=32,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", [MixtralConfig, Qwen2MoeConfig, OlmoeConfig], ids=lambda kind: kind.model_type)
def test_idle_pass_adds_no_router_gradient(
    kind: type[PretrainedConfig], sft_recipe: Any, opened: Opened, tmp_path: Path
) -> None:
    """The load-balancing loss is not divided by the tokens of the step: it was once added once for each waiting
    rank."""
    recipe = sft_recipe()
    loaded = models.load(recipe.model, tmp_path, seed=0, training=True)
    loaded = dataclasses.replace(loaded, model=moe(kind, len(loaded.tokenizer)))
    examples = prepare_examples(recipe.data, loaded.tokenizer, tmp_path).items
    with opened() as directory:
        job = hf_trainer.Job.of(recipe, directory, loaded, len(examples))
        trainer = sft.make_trainer(job, examples, sft.make_padding_collator(loaded.pad_id))
        assert trainer.aux_loss_enabled
        trainer.sums, trainer.current_gradient_accumulation_steps = {}, 1
        batch = next(iter(trainer.get_train_dataloader()))
        items = torch.tensor(4)
        trainer._idle_pass(loaded.model, dict(batch), items)
        assert trainer.sums == {}, "and counts no tokens"
        gradients = [p.grad for p in loaded.model.parameters() if p.grad is not None]
        assert gradients, "it went through the model"
        assert all(not g.any() for g in gradients)
        trainer._pass(loaded.model, dict(batch), items)
        routers = [p.grad for name, p in loaded.model.named_parameters() if name.endswith("gate.weight")]
        assert routers and all(g is not None and g.abs().max() > 0 for g in routers), "a pass of its own does"


def test_colocated_engine_sleeps_during_the_update_with_every_staleness(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a server, rollouts of later steps are sampled before the update; then the engine's memory is free."""
    from posttrain.recipe.load import load_dict

    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}="}}\n' for i in range(8)))
    (tmp_path / "digits.py").write_text("def digits(completion):\n    return sum(c.isdigit() for c in completion)\n")
    said: list[str] = []
    for name in ("generate_batch", "sleep", "sync"):
        method = getattr(TransformersEngine, name)

        def telling(self: Any, *args: Any, _name: str = name, _method: Any = method, **keys: Any) -> Any:
            said.append(_name)
            return _method(self, *args, **keys)

        monkeypatch.setattr(TransformersEngine, name, telling)
    update_once = update.update_once
    monkeypatch.setattr(update, "update_once", lambda *args: (said.append("update"), update_once(*args))[1])
    for staleness in (0, 1, 4):
        said.clear()
        values = {
            "stage": "rl",
            "model": {"path": "tiny"},
            "data": {"source": "rows.jsonl"},
            "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6, "staleness": staleness},
            "rewards": [{"use": "digits.py:digits"}],
            "scoring": {"workers": 1},
            "optim": {"lr": 1e-3},
            "run": {"steps": 3},
            **({"corrections": [{"use": "tis"}]} if staleness else {}),
        }
        with opened(f"run-{staleness}") as directory:
            rl.run(load_dict(values, base_dir=tmp_path, where="test").recipe, directory)
        assert said.count("update") == 3
        before = [said[i - 1] for i, what in enumerate(said) if what == "update"]
        assert before == ["sleep"] * 3, said


def test_assignment_by_length_and_in_equal_lines() -> None:
    lengths = [1, 9, 2, 8, 3, 7]
    assert load_balancing.sort_by_length(lengths, [0, 1, 2, 3], 2) == [1, 3, 2, 0]
    lines = load_balancing.balance_micro_batches(lengths, list(range(6)), 2)
    assert [sum(lengths[r] for r in lines[i : i + 2]) for i in (0, 2, 4)] == [10, 10, 10]
