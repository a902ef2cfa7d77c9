"""The transformers engine: compared with `generate`, with a teacher-forced pass, and with itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    JambaConfig,
    MambaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from posttrain.batch import Prompt, Rollout
from posttrain.errors import DataError, EngineError, NonFiniteError
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import EngineSection
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import hf
from posttrain.rollout.hf import TransformersEngine
from posttrain.rollout.make_engine import make_engine

GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
SAMPLED = Sampling(temperature=0.7, max_new_tokens=24)


def engine_of(loaded: LoadedModel, batch_size: int = 64) -> TransformersEngine:
    return TransformersEngine(loaded, batch_size=batch_size)


def ids_of(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [r.ids for r in rollouts]


def teacher_forced_logps(model: torch.nn.Module, rollout: Rollout, temperature: float) -> torch.Tensor:
    """Return log_softmax(logits / temperature) of each completion token from one pass over the whole sequence."""
    ids = torch.tensor([rollout.prompt.ids + rollout.ids])
    with torch.no_grad():
        logp = (model(input_ids=ids).logits[0, :-1].double() / temperature).log_softmax(-1)
    start = len(rollout.prompt.ids) - 1
    return logp[start:].gather(-1, ids[0, start + 1 :, None]).squeeze(-1)


def generate_ids(loaded: LoadedModel, prompt: Prompt, limit: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt.ids])
    out = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit, pad_token_id=loaded.pad_id
    )
    return tuple(out[0, len(prompt.ids) :].tolist())


def test_greedy_equals_generate_for_prompts_of_different_lengths(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    rollouts = engine_of(loaded).generate(prompts, 2, GREEDY, seed=0)
    expected = [generate_ids(loaded, p, 12) for p in prompts for _ in range(2)]
    assert ids_of(rollouts) == expected


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "gpt2"])
def test_greedy_equals_generate_on_other_architectures(kind: str, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """Query-key norms; sliding windows shorter than the sequence; learned positions."""
    size = {"vocab_size": len(loaded.tokenizer), "eos_token_id": loaded.eos_ids[0], "pad_token_id": loaded.pad_id}
    wide = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = {
        "qwen3": lambda: Qwen3Config(**size, **wide, head_dim=16, num_hidden_layers=2, initializer_range=0.3),
        "gemma3": lambda: Gemma3TextConfig(
            **size,
            **wide,
            head_dim=16,
            num_hidden_layers=2,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"],
            initializer_range=0.3,
        ),
        "gpt2": lambda: GPT2Config(**size, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3),
    }[kind]()
    torch.manual_seed(0)
    other = dataclasses.replace(loaded, model=AutoModelForCausalLM.from_config(config).eval())
    rollouts = engine_of(other).generate(prompts, 1, GREEDY, seed=0)
    assert ids_of(rollouts) == [generate_ids(other, p, 12) for p in prompts]
    assert len(set(ids_of(rollouts))) > 1


def test_log_probs_equal_a_teacher_forced_pass(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    rollouts = engine_of(loaded).generate(prompts, 3, SAMPLED, seed=1)
    assert len(rollouts) == 3 * len(prompts)
    for rollout in rollouts:
        expected = teacher_forced_logps(loaded.model, rollout, 0.7)
        assert len(rollout.logps) == len(rollout.ids)
        torch.testing.assert_close(torch.tensor(rollout.logps).double(), expected, atol=2e-5, rtol=0)


def test_log_probs_ignore_top_p_and_top_k(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    sampling = Sampling(top_p=0.5, top_k=5, max_new_tokens=8)
    rollouts = engine_of(loaded).generate(prompts, 2, sampling, seed=1)
    assert len(rollouts) == 2 * len(prompts)
    for rollout in rollouts:
        expected = teacher_forced_logps(loaded.model, rollout, 1.0)
        torch.testing.assert_close(torch.tensor(rollout.logps).double(), expected, atol=2e-5, rtol=0)


def test_rows_do_not_depend_on_their_batch(
    loaded: LoadedModel, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 1, of 5 (which splits the samples of a prompt) and of all rows; and each sample requested as its own
    prompt."""
    whole = ids_of(engine_of(loaded).generate(prompts, 4, SAMPLED, seed=3))
    copies, lengths, decode = [p for p in prompts for _ in range(4)], list[int](), hf.decode
    monkeypatch.setattr(hf, "decode", lambda *args, **how: (lengths.append(len(args[1])), decode(*args, **how))[1])
    assert ids_of(engine_of(loaded).generate(copies, 1, SAMPLED, seed=3)) == whole
    assert lengths[-1] == len(prompts), "equal prompts are run once"
    assert ids_of(engine_of(loaded, 5).generate(prompts, 4, SAMPLED, seed=3)) == whole
    assert ids_of(engine_of(loaded, 1).generate(prompts, 4, SAMPLED, seed=3)) == whole
    assert len(set(whole)) == len(whole)


def test_seed_determines_the_samples(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    engine = engine_of(loaded)
    first = ids_of(engine.generate(prompts, 2, SAMPLED, seed=1))
    assert ids_of(engine.generate(prompts, 2, SAMPLED, seed=1)) == first
    assert ids_of(engine.generate(prompts, 2, SAMPLED, seed=2)) != first


def test_global_random_state_and_module_modes_are_unchanged(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    model = loaded.model
    model.train()
    model.model.layers[0].eval()
    before = torch.get_rng_state()
    engine_of(loaded).generate(prompts, 1, SAMPLED, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and model.model.layers[1].mlp.training
    assert not model.model.layers[0].training


def test_generation_ignores_dropout_and_gradient_checkpointing(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    plain = ids_of(engine_of(loaded).generate(prompts, 2, SAMPLED, seed=0))
    loaded.model.config.attention_dropout = 0.5
    for layer in loaded.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    loaded.model.gradient_checkpointing_enable()
    loaded.model.config.use_cache = False
    loaded.model.train()
    assert ids_of(engine_of(loaded).generate(prompts, 2, SAMPLED, seed=0)) == plain


def test_four_bit_weights_are_not_repacked(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """On CPUs with AVX512-BF16, bitsandbytes would repack them as soon as a layer in eval mode is used."""
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer.weight = bnb.nn.Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
    loaded.model.model.layers[0].self_attn.o_proj = layer.to("cpu")
    x = torch.randn(3, 64)
    before = layer(x)
    engine_of(loaded).generate(prompts, 1, GREEDY, seed=0)
    assert torch.equal(layer(x), before)


def test_groups_are_in_prompt_order_with_complete_records(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    engine = engine_of(loaded)
    engine.sync(loaded.model, 7)
    rollouts = engine.generate(prompts, 3, GREEDY, seed=0, first_group=10)
    assert [r.prompt.uid for r in rollouts] == [p.uid for p in prompts for _ in range(3)]
    assert [r.group for r in rollouts] == [10 + i for i in range(len(prompts)) for _ in range(3)]
    assert {r.version for r in rollouts} == {7}
    for r in rollouts:
        assert r.text == loaded.tokenizer.decode(r.ids, skip_special_tokens=True)


def test_every_eos_id_ends_a_completion_and_is_included(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    ends = tuple(range(20, 27))  # one token in sixteen: most rows end early, but not all
    rollouts = engine_of(dataclasses.replace(loaded, eos_ids=ends)).generate(prompts, 8, SAMPLED, seed=0)
    finishes = {r.finish for r in rollouts}
    used = {r.ids[-1] for r in rollouts if r.finish == "stop"}
    assert finishes == {"stop", "length"} and len(used) > 3
    for r in rollouts:
        assert not set(ends) & set(r.ids[:-1])
        assert (r.ids[-1] in ends) == (r.finish == "stop")
        assert len(r.ids) == 24 or r.finish == "stop"


def test_prompt_is_prefilled_once_and_finished_rows_leave_the_batch(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    rows: list[int] = []
    loaded.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    ends = tuple(range(20, 40))
    engine = engine_of(dataclasses.replace(loaded, eos_ids=ends))
    engine.checked = True  # its cache; else that comes first
    engine.generate(prompts, 8, SAMPLED, seed=0)
    assert rows[0] == len(prompts)
    assert rows[1] <= len(prompts) * 8
    assert rows[-1] < rows[1] / 2


def test_generation_ends_when_all_rows_are_finished(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    steps: list[int] = []
    loaded.model.register_forward_pre_hook(lambda *_: steps.append(1))
    everything = tuple(range(len(loaded.tokenizer)))
    engine = engine_of(dataclasses.replace(loaded, eos_ids=everything))
    engine.checked = True
    rollouts = engine.generate(prompts, 2, SAMPLED, seed=0)
    assert {len(r.ids) for r in rollouts} == {1}
    assert len(steps) == 1


@pytest.mark.parametrize("length", [1, 2])
def test_stop_string_ends_a_completion(length: int, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """The token that completes the string is the last one; a special token counts as its text."""
    free = engine_of(loaded).generate(prompts[:1], 1, GREEDY, seed=0)[0]
    pieces = [loaded.tokenizer.decode([i]) for i in free.ids]
    stop = "".join(pieces[3 : 3 + length])
    at = next(i for i in range(len(pieces)) if stop in "".join(pieces[: i + 1]))
    sampling = Sampling(temperature=0.0, max_new_tokens=12, stop=["never there", stop])
    stopped = engine_of(loaded).generate(prompts[:1], 1, sampling, seed=0)[0]
    assert stopped.ids == free.ids[: at + 1]
    assert stopped.finish == "stop"


def test_logprobs_can_be_left_out(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    rollouts = engine_of(loaded).generate(prompts[:1], 2, GREEDY, seed=0, logprobs=False)
    assert all(r.segments[0].logps is None for r in rollouts)


def test_prompt_longer_than_the_window_raises_with_its_id(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    long = Prompt("row-9", {}, "", tuple([10] * 250))
    with pytest.raises(DataError, match=r"row row-9 .*250 tokens \+ 24 new ones.*window of 256"):
        engine_of(loaded).generate([*prompts, long], 1, SAMPLED, seed=0)


def test_longest_prompt_may_fill_the_window(loaded: LoadedModel) -> None:
    prompt = Prompt("edge", {}, "", tuple([10] * 244))
    assert len(engine_of(loaded).generate([prompt], 1, GREEDY, seed=0)[0].ids) <= 12


def test_nan_weights_raise(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    with torch.no_grad():
        loaded.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="NaN"):
        engine_of(loaded).generate(prompts, 1, SAMPLED, seed=0)


def test_sync_of_another_model_raises(loaded: LoadedModel) -> None:
    engine = engine_of(loaded)
    with pytest.raises(EngineError, match="another"):
        engine.sync(torch.nn.Linear(1, 1), 1)
    assert engine.version == 0


def test_sampling_uses_trainer_updates_immediately(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    engine = engine_of(loaded)
    before = ids_of(engine.generate(prompts, 1, GREEDY, seed=0))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(-1.0)
    assert ids_of(engine.generate(prompts, 1, GREEDY, seed=0)) != before


def test_make_engine_returns_the_hf_engine(loaded: LoadedModel, prompts: list[Prompt], tmp_path) -> None:
    engine = make_engine(EngineSection(batch_size=3), loaded, scratch=tmp_path, max_len=64)
    assert isinstance(engine, TransformersEngine) and engine.batch_size == 3
    assert len(engine.generate(prompts, 1, GREEDY, seed=0)) == len(prompts)
    assert engine.probe(loaded.model) == 0.0


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MambaConfig(vocab_size=110, hidden_size=16, num_hidden_layers=2, state_size=4), r"are [\d.]+ nats from"),
        (JambaConfig(vocab_size=110, hidden_size=32, num_hidden_layers=2, num_experts=2), "get_seq_length"),
    ],
    ids=["a cache of its own", "another kind of cache"],
)
def test_architecture_with_recurrent_state_is_refused(
    config: PretrainedConfig, why: str, loaded: LoadedModel, prompts: list[Prompt]
) -> None:
    """Without its state, each token would be decoded as if no token preceded it."""
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = TransformersEngine(dataclasses.replace(loaded, model=model), batch_size=8)
    with pytest.raises(EngineError, match=rf"cannot sample from \w+ForCausalLM\n.*{why}(.|\n)*engine: vllm"):
        engine.generate(prompts, 1, GREEDY, seed=0)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_token_limit_per_prompt_truncates_without_changing_tokens(
    sampling: Sampling, loaded: LoadedModel, prompts: list[Prompt]
) -> None:
    """Each prompt has its own limit, in one batch and in several; the window only needs to hold these limits."""
    limits = [(3, 1, 7, 20, 12)[i % 5] for i in range(len(prompts))]
    limits = [min(limit, sampling.max_new_tokens) for limit in limits]
    whole = engine_of(loaded).generate(prompts, 3, sampling, seed=5)
    for batch_size in (64, 4):
        engine = engine_of(loaded, batch_size)
        engine.window = max(len(p.ids) + limit for p, limit in zip(prompts, limits, strict=True))
        cut = engine.generate(prompts, 3, sampling, seed=5, limits=limits)
        for number, (one, other) in enumerate(zip(cut, whole, strict=True)):
            limit = limits[number // 3]
            assert one.ids == other.ids[:limit]
            assert one.finish == (other.finish if len(other.ids) <= limit else "length")
            assert one.segments[0].logps == pytest.approx(other.segments[0].logps[:limit], abs=1e-5)
    engine.window -= 1
    with pytest.raises(ValueError, match="exceed the window"):
        engine.generate(prompts, 3, sampling, seed=5, limits=limits)
