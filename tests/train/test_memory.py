"""Memory formulas: hand-computed values, and comparison with what autograd saves."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.errors import RecipeError
from posttrain.models import tiny
from posttrain.models.precision import keep_master_weights
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Lora, Model
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.compiled import compile_layers
from posttrain.train.logprobs import completion_logprobs
from posttrain.train.memory import (
    GIB,
    Settings,
    Shape,
    activations,
    block_bytes,
    moments_of_update,
    phases,
    reference,
)
from posttrain.train.memory_plan import (
    Machine,
    component_bytes,
    count_passes,
    edits,
    predict_phases,
    settings_of,
    shape_of,
    skeleton,
    teacher_shape,
)
from posttrain.train.memory_probe import calibrate
from posttrain.train.plan import plan
from posttrain.train.step_time import Rates

SHAPE = Shape(parameters=1000, linear=800, layers=2, hidden=10, heads=10, kv_heads=5, intermediate=30, vocabulary=50)
CHUNK = 1 << 26


def test_memory_of_full_training() -> None:
    """Float32 weights and gradients (4 a parameter each), two moments (8); bfloat16 casts (2) of the 800 in matrices
    and of the head, 50 * 10; 26*10 + 8*10 + 8*30 = 580 bytes a token and block, once more for the
    gradients of one; logits 10 a cell; of the head a float32 sum and a bfloat16 product, 6 a weight."""
    found = phases(SHAPE, Settings(micro_tokens=100), chunk_cells=CHUNK).parts["update"]
    assert found == {
        "weights (float32)": 4000,
        "AdamW moments": 8000,
        "CUDA context": GIB // 2,
        "gradients": 4000,
        "activations": 100 * 580 * 2,
        "a block's backward pass": 100 * 580,
        "logits": 10 * 100 * 50,
        "gradient of the head": 6 * 500,
        "bfloat16 casts of weights": 2 * 1300,
    }


def test_adapter_has_gradients_and_moments_only_for_its_weights() -> None:
    shape = replace(SHAPE, adapter=60)
    found = phases(shape, Settings(micro_tokens=1), chunk_cells=CHUNK).parts["update"]
    assert (found["frozen base"], found["adapter (float32)"]) == (2000, 240)
    assert (found["AdamW moments"], found["gradients"]) == (480, 240)
    assert "bfloat16 casts of weights" not in found
    four_bit = phases(shape, Settings(micro_tokens=1, quantized=True), chunk_cells=CHUNK).parts["update"]
    assert four_bit["frozen base"] == int(0.53 * 800) + 2 * 200


def test_engine_counts_while_awake() -> None:
    settings = Settings(micro_tokens=1, engine=7000, reference_copy=True)
    awake = phases(SHAPE, settings, chunk_cells=CHUNK)
    asleep = phases(SHAPE, replace(settings, engine_sleeps=True), chunk_cells=CHUNK)
    assert awake.parts["update"]["engine"] == 7000 == asleep.parts["rollout"]["engine"]
    assert "engine" not in asleep.parts["update"]
    apart = phases(SHAPE, replace(settings, engine_sleeps=True, engine_processes=1), chunk_cells=CHUNK)
    contexts = {name: part.get("CUDA context of the engine") for name, part in apart.parts.items()}
    assert contexts == dict.fromkeys(asleep.parts, GIB // 2), "also while it sleeps"
    assert apart.total("update") - asleep.total("update") == GIB // 2
    assert awake.total("update") - asleep.total("update") == 7000
    assert awake.parts["sync"]["reference copy"] == 2 * 800 + 4 * 200
    assert awake.peak_phase == "update" and awake.peak == awake.total("update")


def test_sleeping_engine_sleeps_with_every_staleness(recipe: Any) -> None:
    """It then generates before the update. An engine that generates during the update keeps its memory meanwhile."""
    machine, peaks = Machine(80 * GIB, True, "test"), set()
    for staleness in (0, 1, 4):
        for sleep in (True, False):
            vllm = {"gpu_memory": 0.5, "sleep": sleep}
            asked = recipe(rollout={"engine": "vllm", "vllm": vllm, "staleness": staleness}, corrections=["tis"])
            parts = predict_phases(asked, shape_of(skeleton(asked), None), 20, machine).parts
            assert parts["rollout"]["engine"] >= 40 * GIB and ("engine" in parts["update"]) is not sleep
            peaks.add((sleep, sum(parts["update"].values())))
    assert len(peaks) == 2


def test_offloaded_reference_counts_while_it_is_used() -> None:
    """At that time there are no gradients (4000) and no activations, so offloading lowers the peak by its full size."""
    settings = Settings(micro_tokens=1, reference_copy=True)
    here = phases(SHAPE, settings, chunk_cells=CHUNK)
    away = phases(SHAPE, replace(settings, reference_offloaded=True), chunk_cells=CHUNK)
    assert list(away.parts) == ["measure", "update"]
    assert away.host == {"reference copy": 2400} and not here.host
    assert away.parts["measure"]["reference copy"] == 2400 and "reference copy" not in away.parts["update"]
    assert here.peak - away.peak == 2400 and away.peak_phase == "update"


def test_teacher_has_its_own_size() -> None:
    """Twice the student, 1600 of 2000 in matrices: 2 bytes there, 4 elsewhere; 0.53 and 2 in 4 bits."""
    teacher = replace(SHAPE, parameters=2000, linear=1600)
    settings = Settings(micro_tokens=1, reference_copy=True, teacher=teacher)
    assert phases(SHAPE, settings, chunk_cells=CHUNK).parts["update"]["reference copy"] == 2 * 1600 + 4 * 400
    four_bit = phases(replace(SHAPE, adapter=10), replace(settings, quantized=True), chunk_cells=CHUNK)
    assert four_bit.parts["update"]["reference copy"] == 848 + 2 * 400


def test_plan_reads_the_teachers_configuration(recipe: Any, tmp_path: Path) -> None:
    """A teacher with ten times the layers, of which only the configuration exists."""
    config = tiny.build()[0].config
    config.num_hidden_layers *= 10
    config.save_pretrained(tmp_path / "teacher")
    kl = {"use": "k1_straight_through", "coef": 1.0, "reference": "teacher"}
    asked = recipe(kl=kl)
    shape = shape_of(skeleton(asked), None)
    found = teacher_shape(asked)
    assert found is not None and found.linear == 10 * shape.linear
    assert teacher_shape(recipe()) is None
    counted = settings_of(asked, shape, half=True, longest=8, card=GIB)
    assert counted.reference_copy and counted.teacher == found
    assert settings_of(recipe(model={"path": "tiny", "lora": {}}, kl=kl), shape, half=True, longest=8, card=GIB).teacher


def test_memory_of_a_sharded_model() -> None:
    """Of 1000 parameters 800 are in 2 blocks: in four shards 16 bytes per parameter become 4. Temporarily whole: three
    times a block of 400 in bfloat16, and the 200 outside with their gradients; of the casts, the head's 50 * 10
    remain."""
    settings = Settings(micro_tokens=100, ranks=4, reference_copy=True)
    found = phases(SHAPE, settings, chunk_cells=CHUNK).parts["update"]
    assert found == {
        "weights (float32)": 1000,
        "AdamW moments": 2000,
        "CUDA context": GIB // 2,
        "reference copy": 1000,
        "gradients": 1000,
        "whole for a while": 3 * 2 * 400 + 8 * 200,
        "activations": 100 * 580 * 2,
        "a block's backward pass": 100 * 580,
        "logits": 10 * 100 * 50,
        "gradient of the head": 6 * 500,
        "bfloat16 casts of weights": 2 * 500,
    }


def test_memory_of_a_sharded_base_under_an_adapter() -> None:
    """In four shards 500 of the base's 2000 bytes stay; the adapter, its gradients and moments are whole. Temporarily
    two blocks of 400 and the 200 outside are whole, in bfloat16."""
    shape = replace(SHAPE, adapter=64)
    found = phases(shape, Settings(micro_tokens=100, ranks=4), chunk_cells=CHUNK).parts["update"]
    assert found["frozen base"] == 500
    assert found["adapter (float32)"] == found["gradients"] == 4 * 64 and found["AdamW moments"] == 8 * 64
    assert found["whole for a while"] == 2 * (2 * 400 + 200)
    packed = phases(shape, Settings(micro_tokens=100, ranks=4, quantized=True), chunk_cells=CHUNK).parts["update"]
    assert packed["frozen base"] == (int(0.53 * 800) + 2 * 200) // 4
    assert packed["scales of 4-bit weights"] == int(0.03 * 800 * 3 / 4), "they are whole on each rank"
    assert packed["whole for a while"] == 0.5 * 2 * 400 + 2 * 200
    halves = phases(shape, Settings(micro_tokens=100, ranks=4, context=2), chunk_cells=CHUNK).parts["update"]
    for name in ("activations", "a block's backward pass"):  # of half of the tokens; the head runs all of them
        assert 2 * halves[name] == found[name]
    assert halves["logits"] == found["logits"]


def test_memory_with_tensor_parallelism() -> None:
    """Four ranks, two of which run the same tokens with half of each layer: 400 of the 800 parameters of layers, and
    200 outside minus half of the head's 100, in two shards: 275. A rank has half of the logits."""
    shape = replace(SHAPE, vocabulary=10)
    plain, halves = (Settings(micro_tokens=100, ranks=4, tensor=tensor) for tensor in (1, 2))
    whole, found = (phases(shape, s, chunk_cells=1000).parts["update"] for s in (plain, halves))
    assert whole["weights (float32)"] == 4 * 250 and found["weights (float32)"] == 4 * 275
    assert found["gradients"] == 4 * 275 and found["AdamW moments"] == 8 * 275
    assert found["logits"] == whole["logits"] // 2 and found["activations"] < whole["activations"]


def test_memory_of_8_bit_moments() -> None:
    """A byte per moment and 8/256 of scales for 900 parameters, and 8 bytes for the 100 of embeddings; paged moments
    may be moved out."""
    shape, settings = replace(SHAPE, embeddings=100), Settings(micro_tokens=1, optimizer="adamw_8bit")
    expected = int(2.03125 * 900) + 8 * 100
    assert phases(shape, settings, chunk_cells=CHUNK).parts["update"]["8-bit AdamW moments"] == expected
    paged = phases(shape, replace(settings, optimizer="paged_adamw_8bit"), chunk_cells=CHUNK)
    assert paged.host == {"8-bit AdamW moments": expected}
    assert "8-bit AdamW moments" not in paged.parts["update"]
    adapted = phases(replace(shape, adapter=64), settings, chunk_cells=CHUNK).parts["update"]
    assert adapted["8-bit AdamW moments"] == 2 * 64 + 2


def test_memory_of_muon() -> None:
    """One moment per weight of a layer's matrix. Of 1000 parameters 800 are in matrices; experts in one 3-dimensional
    tensor use AdamW."""
    settings = Settings(micro_tokens=1, optimizer="muon")
    for experts in (0, 300):
        found = phases(replace(SHAPE, experts=experts), settings, chunk_cells=CHUNK).parts["update"]
        matrices = 800 - experts
        assert (found["Muon momentum"], found["AdamW moments"]) == (4 * matrices, 8 * (1000 - matrices))


def test_logits_memory_is_a_chunk_in_rl_and_a_tile_in_sft() -> None:
    """5000 cells. Tiles have 4096 tokens and 32768 columns, more than these; TRL's are in bfloat16."""
    found = {
        name: phases(SHAPE, Settings(micro_tokens=100, **{name: True}), chunk_cells=1000).parts["update"]["logits"]
        for name in ("plain_head", "trl_logits")
    }
    assert found == {"plain_head": 10 * 1000, "trl_logits": 2 * 5000}
    by_autograd = phases(SHAPE, Settings(micro_tokens=100, plain_head=False), chunk_cells=1000).parts["update"]
    assert by_autograd["logits"] == 18 * 1000 and "gradient of the head" not in by_autograd


@pytest.mark.parametrize(("half", "lora"), [(False, False), (True, False), (True, True)])
def test_activation_memory_equals_what_autograd_saves(half: bool, lora: bool) -> None:
    """Of four blocks minus two, without parameters and their casts, on the packed path.

    On a CPU the attention of trained weights copies its output once more than the GPU's kernel: 2 bytes per head cell.
    """
    shape = shape_of(llama(4, lora), Lora(rank=4) if lora else None)
    settings = Settings(micro_tokens=TOKENS, half=half)
    expected = block_bytes(shape, settings) + (2 * shape.heads if half and not lora else 0)
    measured = (count_saved_bytes(llama(4, lora), half) - count_saved_bytes(llama(2, lora), half)) / 2 / TOKENS
    assert measured == pytest.approx(expected, rel=0.05)


def test_memory_of_bfloat16_weights() -> None:
    """Two bytes per weight and four for its master; no casts. What autograd saves of a block, as above."""
    shape = shape_of(llama(4, lora=False), None)
    settings = Settings(micro_tokens=TOKENS, half_weights=True)
    measured = (
        count_saved_bytes(llama(4, lora=False).bfloat16(), False)
        - count_saved_bytes(llama(2, lora=False).bfloat16(), False)
    ) / 2
    assert measured / TOKENS == pytest.approx(block_bytes(shape, settings) + 2 * shape.heads, rel=0.05)
    found = phases(SHAPE, replace(settings, micro_tokens=1), chunk_cells=CHUNK).parts["update"]
    assert (found["weights (bfloat16)"], found["master weights (float32)"]) == (2000, 4000)
    assert (found["AdamW moments"], found["gradients"]) == (8000, 4000) and "bfloat16 casts of weights" not in found
    assert reference(SHAPE, settings) == 2000


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("varlen_on_cpu")
def test_compiled_blocks_recompute_cheap_operations(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are split into forward and backward as for a GPU, and run without generated code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    shape = shape_of(llama(4, lora), Lora(rank=4) if lora else None)
    expected = block_bytes(shape, Settings(micro_tokens=TOKENS, compiled=True))

    def held(layers: int) -> int:
        model = llama(layers, lora)
        torch.compiler.reset()
        with compile_layers(model, Model(path="tiny", compile=True))():
            return count_saved_bytes(model, half=True)

    assert (held(4) - held(2)) / 2 / TOKENS == pytest.approx(expected, rel=0.05)


def test_gradient_checkpointing_saves_block_inputs() -> None:
    settings = Settings(micro_tokens=TOKENS, checkpointing=True)
    assert activations(SHAPE, settings) == TOKENS * 4 * 10 * 2
    adapted = replace(SHAPE, adapter=60)
    assert activations(adapted, settings) == TOKENS * 2 * 10 * 2, "in bfloat16"
    selective = replace(settings, attention_kept=True)
    assert activations(SHAPE, selective) - activations(SHAPE, settings) == TOKENS * 2 * 10 * 2, "outputs of attention"


def test_peak_with_checkpointing_is_the_head_or_a_block() -> None:
    """Of 1000 tokens 80,000 bytes of inputs, and the head (20*10 and 10*50 a token, 6*500, a cast of 2*500), or a block
    with half as much again for its way back (580 a token) and the casts of one of two blocks (2*800). Under an adapter
    nothing is cast."""
    settings = Settings(micro_tokens=1000, checkpointing=True)
    head, block = moments_of_update(SHAPE, settings, CHUNK)
    around = {"states around the head": 200_000, "logits": 500_000, "gradient of the head": 3000}
    assert head == {"activations": 80_000, **around, "bfloat16 casts of weights": 1000}
    own = {"a block's backward pass": 290_000, "bfloat16 casts of weights": 800}
    assert block == {"activations": 80_000 + 580_000, **own}
    update = phases(SHAPE, settings, chunk_cells=CHUNK).parts["update"]
    assert update["a block's backward pass"] == 290_000 and "logits" not in update
    many = replace(SHAPE, vocabulary=100)
    assert phases(many, settings, chunk_cells=CHUNK).parts["update"]["logits"] == 1_000_000
    adapted, _ = moments_of_update(replace(SHAPE, adapter=60), settings, CHUNK)
    assert adapted["states around the head"] == 140_000 and not adapted["bfloat16 casts of weights"]


# An H200's peaks, torch 2.11: settings of a 1.39B model (Qwen2), tokens of the one row of a pass, and GiB allocated
MEASURED: list[tuple[dict[str, Any], int, float]] = [
    ({}, 15_107, 25.75),
    ({"inputs_offloaded": True}, 15_107, 23.50),
    ({"attention_kept": True}, 15_107, 26.93),
    ({"inputs_offloaded": True, "optimizer_offloaded": True}, 15_107, 13.17),
    ({"inputs_offloaded": True, "optimizer_offloaded": True, "half_weights": True}, 15_107, 10.22),
    ({"inputs_offloaded": True, "adapter": 18_464_768}, 30_213, 7.10),
    ({"inputs_offloaded": True, "attention_kept": True, "adapter": 18_464_768}, 30_213, 9.48),
]


@pytest.mark.parametrize(("settings", "tokens", "peak"), MEASURED)
def test_predicted_peaks_match_measured_long_rows(settings: dict[str, Any], tokens: int, peak: float) -> None:
    """Within a tenth of `benchmarks/results/long_rows_h200.json`, except for CUDA itself, which no allocator
    reports."""
    linear = 28 * (1536 * (1536 + 2 * 256 + 1536) + 3 * 1536 * 8960)
    shape = Shape(
        parameters=1_385_838_080, linear=linear, layers=28, hidden=1536, heads=1536, kv_heads=256, intermediate=8960,
        vocabulary=49_152, embeddings=49_152 * 1536, adapter=settings.get("adapter", 0),
    )  # fmt: skip
    own = {key: value for key, value in settings.items() if key != "adapter"}
    found = phases(shape, Settings(micro_tokens=tokens, checkpointing=True, trl_logits=True, **own), chunk_cells=CHUNK)
    assert (found.total("update") - GIB // 2) / GIB == pytest.approx(peak, rel=0.1)


def test_memory_of_offloaded_inputs() -> None:
    """Of eight blocks, three inputs of 4 * 10 bytes per token are on the GPU, and eight of 300 * 40 = 12000 bytes,
    rounded up to 16384, on the host."""
    shape, settings = replace(SHAPE, layers=8), Settings(micro_tokens=TOKENS, checkpointing=True, inputs_offloaded=True)
    assert activations(shape, settings) == TOKENS * 4 * 10 * 3
    assert phases(shape, settings, chunk_cells=CHUNK).host == {"inputs of blocks": 8 * 16384}


def test_memory_of_offloaded_moments_and_masters() -> None:
    """Eight bytes per weight, and four more of master weights; gradients stay on the GPU."""
    for half, host in ((False, 8000), (True, 12000)):
        settings = Settings(micro_tokens=1, half_weights=half, optimizer_offloaded=True)
        found = phases(SHAPE, settings, chunk_cells=CHUNK)
        assert sum(found.host.values()) == host and found.parts["update"]["gradients"] == 4000
        there = phases(SHAPE, replace(settings, optimizer_offloaded=False), chunk_cells=CHUNK)
        assert there.peak - found.peak == host and not there.host


# The table of docs/memory.md: settings of a row of 32,768 tokens of Qwen2.5-7B, and GiB on the card and on the host.
LONG_ROWS: list[tuple[dict[str, Any], float, float]] = [
    ({"lora": {"rank": 16}}, 219.4, 0),
    ({"lora": {"rank": 16}, "gradient_checkpointing": True}, 32.0, 0),
    ({"lora": {"rank": 16}, "gradient_checkpointing": True, "activation_offloading": True}, 26.5, 7),
    ({"lora": {"rank": 16}, "gradient_checkpointing": "selective", "activation_offloading": True}, 32.6, 7),
    ({"gradient_checkpointing": True}, 139.2, 0),
    ({"gradient_checkpointing": True, "activation_offloading": True, "offload": True}, 71.5, 70.7),
    (
        {"gradient_checkpointing": True, "activation_offloading": True, "offload": True, "half_weights": True},
        54.6,
        92.1,
    ),
]


def test_plan_of_long_rows_of_a_7b_model(tmp_path: Path) -> None:
    """Nothing but a config.json is there. By hand, of the last: 7.616e9 weights in bfloat16 (14.2 GiB) and their
    gradients in float32 (28.4); of 32,768 tokens three inputs of 3584 numbers (0.7), a block (7.2) and half as much for
    its backward pass (3.6); CUDA itself (0.5)."""
    config = {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
        "max_position_embeddings": 131072, "architectures": ["Qwen2ForCausalLM"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for settings, peak, host in LONG_ROWS:
        values = {
            "stage": "sft",
            "model": {"path": str(tmp_path), **{k: v for k, v in settings.items() if k != "offload"}},
            "data": {"source": "rows.jsonl", "max_length": 32768},
            "batch": {"size": 8, "micro_size": 1},
            "optim": {"offload": settings.get("offload", False)},
            "run": {"steps": 1},
        }
        recipe = load_dict(values, base_dir=tmp_path, where="test").recipe
        found = plan(recipe, Machine(80 * GIB, True, "test"))
        assert found["peak_gib"] == pytest.approx(peak, abs=0.06), settings
        assert sum(found["host_gib"].values()) == pytest.approx(host, abs=0.06), settings
        assert found["fits"] == (peak < 80)


TOKENS = 300


def llama(layers: int, lora: bool) -> Any:
    """Return a small random Llama, optionally with a LoRA adapter on a bfloat16 base."""
    config = LlamaConfig(
        vocab_size=400, hidden_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=384,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model.to(torch.bfloat16), LoraConfig(r=4, target_modules="all-linear"))
        keep_master_weights(model)
    use_packed_attention(model)
    return model


def count_saved_bytes(model: Any, half: bool) -> int:
    """Return the bytes of distinct storages that autograd holds after a forward pass, except those of weights and their
    casts."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape[::-1]) for p in model.parameters()}
    held: list[torch.Tensor] = []
    sequences = Sequences((tuple(i % 400 for i in range(TOKENS)),), (1,))
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t),  # type: ignore[func-returns-value]
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=half),
    ):
        completion_logprobs(model, sequences, TOKENS - 1, packed=True)
    held = [t for t in held if t.untyped_storage().data_ptr() not in weights and tuple(t.shape) not in shapes]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


# --- recipes ---


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(40)))
    (tmp_path / "r.py").write_text("def r(completion):\n    return 1.0\n")

    def make(**changes: Any) -> Any:
        values = {
            "stage": "rl",
            "model": {"path": "tiny"},
            "data": {"source": "rows.jsonl"},
            "rollout": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 16},
            "rewards": [{"use": "r.py:r"}],
            "batch": {"minibatches": 2},
            "run": {"epochs": 1},
            **changes,
        }
        return load_dict(values, base_dir=tmp_path, where="test").recipe

    return make


@pytest.mark.parametrize("lora", [None, Lora(rank=8), Lora(rank=8, targets=["q_proj", "v_proj"])])
def test_shape_equals_the_loaded_models(recipe: Any, lora: Lora | None) -> None:
    shape = shape_of(skeleton(recipe()), lora)
    model: Any = tiny.build()[0]
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    if lora is not None:
        from posttrain.models import adapters

        model = adapters.add(model, lora, seed=0)
        assert shape.adapter == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert shape_of(model, lora) == shape


def test_tokens_of_a_step(recipe: Any) -> None:
    """40 prompts in steps of 4; 32 rollouts a step, 2 updates on 16 each."""
    found = plan(recipe())["batch"]
    assert found["prompts"] == 40 and found["steps"] == 10
    assert (found["rollouts a step"], found["updates a step"], found["updates"]) == (32, 2, 20)
    assert found["rollouts an update"] == 16
    assert 32 * 16 < found["tokens a step at most"] <= 32 * (16 + found["longest prompt"])


def test_engine_on_other_gpus_is_not_counted_for_the_trainer(recipe: Any) -> None:
    """80 GiB assumed, 0.9 of each of two other cards."""
    sizes = {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 16, "engine": "vllm"}
    here, there = (plan(recipe(rollout={**sizes, **more})) for more in ({}, {"vllm": {"server": {"devices": [1, 2]}}}))
    assert "engine" in here["memory_gib"]["update"] and here["elsewhere"] == {}
    assert list(there["memory_gib"]) == ["update"] and "engine" not in there["memory_gib"]["update"]
    assert there["elsewhere"] == {"servers": 2, "gpus_each": 1, "gib_each": 72.0}
    assert not any(edit["change"].startswith("rollout.vllm") for edit in there["edits"])


def test_engine_over_several_training_gpus(recipe: Any) -> None:
    """On each of its GPUs it has its share, 0.3; four ranks have two engines of two GPUs, three ranks cannot."""
    sizes = {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 16, "engine": "vllm"}
    one, two = (recipe(rollout={**sizes, "vllm": {"tensor_parallel": size}}) for size in (1, 2))
    machine = Machine(80 * GIB, True, "test", ranks=4)
    found = plan(two, machine, Rates())
    assert found["memory_gib"] == plan(one, machine)["memory_gib"]
    assert found["memory_gib"]["update"]["engine"] == 24.0 and found["elsewhere"] == {}
    assert found["cluster"]["engines"] == {"count": 2, "gpus_each": 2, "apart": False}
    for ranks in (1, 3):
        with pytest.raises(RecipeError, match="cannot be divided into engines of 2 GPUs"):
            plan(two, replace(machine, ranks=ranks))


def test_advised_edits_lower_the_peak(recipe: Any) -> None:
    machine = Machine(80 * GIB, True, "test")
    asked = recipe(
        rollout={"engine": "vllm", "vllm": {"gpu_memory": 0.5}, "group_size": 64, "max_new_tokens": 512},
        kl={"coef": 0.1},
    )
    shape = replace(shape_of(skeleton(asked), None), layers=24, hidden=1024, heads=1024, intermediate=4096)
    before = predict_phases(asked, shape, 20, machine)
    assert before.parts["update"]["engine"] == 40 * GIB and "reference copy" in before.parts["rollout"]
    found = edits(asked, shape, 20, machine)
    assert [e.text for e in found] == [
        "batch.micro_tokens=8192",
        "model.gradient_checkpointing=true",
        "rollout.vllm.sleep=true",
    ]
    for edit in found:
        assert edit.peak == predict_phases(edit.recipe, shape, 20, machine).peak < before.peak


@pytest.mark.parametrize("compiled", [False, True])
def test_refused_edits_are_not_advised(recipe: Any, compiled: bool) -> None:
    """4 bits lower the peak of a large frozen base, but are refused with model.compile."""
    asked = recipe(model={"path": "tiny", "lora": {"rank": 8}, "compile": compiled})
    shape = replace(shape_of(skeleton(asked), Lora(rank=8)), parameters=10**9, linear=9 * 10**8)
    texts = [e.text for e in edits(asked, shape, 20, Machine(80 * GIB, True, "test"), count=9)]
    assert ("model.quantize=nf4" in texts) is not compiled


def test_sharding_is_advised_only_with_several_gpus(recipe: Any) -> None:
    shape = replace(shape_of(skeleton(recipe()), None), parameters=10**9, linear=9 * 10**8)
    texts = [[e.text for e in edits(recipe(), shape, 20, Machine(80 * GIB, True, "test", n))] for n in (1, 2)]
    assert "model.shard=true" not in texts[0] and "model.shard=true" in texts[1]
    eight_bits = recipe(optim={"use": "adamw_8bit"})
    assert "model.shard=true" not in [e.text for e in edits(eight_bits, shape, 20, Machine(80 * GIB, True, "test", 2))]
    parts = predict_phases(
        recipe(model={"path": "tiny", "shard": True}), shape, 20, Machine(80 * GIB, True, "test", 2)
    ).parts
    assert parts["update"]["AdamW moments"] == 4 * 10**9


def test_micro_batch_has_at_most_the_tokens_of_an_update(recipe: Any) -> None:
    """16 rollouts of at most 16 new tokens after the longest prompt, 20: less than the allowed 16384 tokens."""
    asked = recipe()
    assert settings_of(asked, SHAPE, half=True, longest=20, card=GIB).micro_tokens == 16 * 36
    assert settings_of(asked, SHAPE, half=True, longest=30000, card=GIB).micro_tokens == 30016


def test_calibration_runs_an_update(recipe: Any) -> None:
    found = calibrate(recipe(batch={"micro_tokens": 128}), prompt=8, tokens_a_step=1000)
    rows = 128 // 24
    assert found["update_s"] == pytest.approx(found["micro_batch_s"] / (rows * 24) * 1000)


def test_memory_of_component_needs() -> None:
    """Hidden states of 64 float32 numbers per token; the 50 likeliest tokens, a float32 and a flag each."""
    assert component_bytes({"hidden", "groups"}, 64) == 256
    assert component_bytes({"topk_logp", "topk_chosen"}, 64) == 250
    assert component_bytes({"values", "new_values"}, 64) == 8
    assert component_bytes({"groups", "ref_logp"}, 64) == 0
    base = {
        "stage": "rl", "model": {"path": "tiny"}, "data": {"source": "x"}, "rewards": [{"use": "math.accuracy"}],
        "run": {"steps": 1},
    }  # fmt: skip
    found = {
        name: count_passes(load_dict({**base, **more}, base_dir=Path(), where="test").recipe)
        for name, more in {
            "one update": {},
            "two updates": {"batch": {"minibatches": 2}},
            "a reference too": {"batch": {"minibatches": 2}, "kl": {"coef": 0.1}},
        }.items()
    }
    assert found == {"one update": 0, "two updates": 0.5, "a reference too": 1.5}
