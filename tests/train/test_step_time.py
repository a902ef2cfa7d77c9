"""Step-time formulas: hand-computed values, and comparison with measured runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from posttrain.train.memory import GIB, Shape
from posttrain.train.step_time import (
    CARDS,
    Rates,
    Step,
    decode_seconds,
    exchange_bytes,
    micro_batches,
    network_rate,
    step_seconds,
    update_bytes,
    update_seconds,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPE = Shape(parameters=1000, linear=800, layers=2, hidden=10, heads=10, kv_heads=5, intermediate=30, vocabulary=20)
PLAIN = Rates(flops=1e6, used=0.5, launch=0.0, memory=1e30, length=0.5)
STEP = Step(rows=8, longest=20, prompt=10, ranks=4, shards=4, micro_tokens=20)
# SmolLM2-135M, and Qwen2.5-1.5B with SmolLM2's vocabulary, as rl_step.py trains them
SMOL = Shape(134_515_008, 106_168_320, 30, 576, 576, 192, 1536, 49152)
QWEN = Shape(1_385_838_080, 1_310_195_712, 28, 1536, 1536, 256, 8960, 49152)


def test_time_of_an_update() -> None:
    """Rows of 10 + 10 tokens, two per rank: 40 tokens; a forward pass is 2 * 1000 + 2 * 2 * 10 * 20 = 2800 FLOP, three
    times: 336,000 FLOP at 500,000 per second. With checkpointing four times, with an adapter two and a half."""
    assert update_seconds(SHAPE, STEP, PLAIN) == pytest.approx(0.672)
    assert update_seconds(SHAPE, replace(STEP, checkpointing=True), PLAIN) == pytest.approx(0.896)
    assert update_seconds(replace(SHAPE, adapter=10), STEP, PLAIN) == pytest.approx(0.56)
    assert update_seconds(SHAPE, replace(STEP, passes=1.0), PLAIN) == pytest.approx(0.896)


def test_communicated_bytes() -> None:
    """Two micro-batches of a row: weights are gathered four times, (2*800 + 4*200) * 3/4 = 1800 bytes, and gradients
    reduced twice, 4000 * 3/4. Two groups of two: 1200 and 2000, and 8 bytes of half the weights * 1/2 between replicas.
    Whole models: a ring of four."""
    assert micro_batches(STEP, PLAIN) == 2
    assert update_bytes(SHAPE, STEP, PLAIN) == (4 * 1800 + 2 * 3000, 0)
    assert update_bytes(SHAPE, replace(STEP, shards=2), PLAIN) == (4 * 1200 + 2 * 2000, 8 * 500 / 2)
    assert update_bytes(SHAPE, replace(STEP, shards=1), PLAIN) == (0, 8 * 1000 * 3 / 4)
    assert update_bytes(SHAPE, replace(STEP, ranks=1, shards=1), PLAIN) == (0, 0)
    adapter = replace(SHAPE, adapter=100)
    assert update_bytes(adapter, replace(STEP, shards=1), PLAIN) == (0, 8 * 100 * 3 / 4)
    assert update_bytes(adapter, STEP, PLAIN) == (4 * 2 * 1000 * 3 / 4, 8 * 100 * 3 / 4)


def test_context_parallel_ranks_exchange_keys() -> None:
    """Two neighbors run four rows, 80 tokens, one row at a time: weights are gathered eight times, gradients reduced
    four times; half of 2 layers * 5 heads * 2 (keys, values) * 2 bytes, there and back, and of float32 states of 10,
    there and back."""
    found = update_bytes(SHAPE, replace(STEP, context=2), PLAIN)
    assert found == (8 * 1800 + 4 * 3000 + 80 / 2 * (2 * 2 * 5 * 2 * 2 + 2 * 4 * 10), 0)


def test_bytes_with_tensor_and_expert_parallelism() -> None:
    """Two ranks with the same tokens: 400 of 800 numbers of layers are each one's and 200 outside of both (there is no
    vocabulary), of which half comes from the other two; four rows, 80 tokens, in four micro-batches. Two layers of 10
    states in two bytes, forward and backward: two sums of a ring of two each. Without them a rank sends 40 tokens to
    two experts each, half of it to the other one, and the results come back; 400 of the 800 numbers are experts', of
    which two ranks have the same half."""
    tensor = replace(STEP, tensor=2)
    assert update_bytes(replace(SHAPE, vocabulary=0), tensor, PLAIN)[0] == 4 * (
        2 * (2 * 400 + 4 * 200) / 2 + 4 * 600 / 2
    )
    assert exchange_bytes(SHAPE, tensor, PLAIN) == 80 * (2 * 10 * 2 * 2) * 2
    mixture = replace(SHAPE, experts=400, experts_a_token=2)
    experts = replace(STEP, ranks=4, shards=4, expert=2)
    assert exchange_bytes(mixture, experts, PLAIN) == 40 * (2 * 10 * 2 * 2) * 2 * 2 / 2
    layers, outside = 400 * 3 / 4 + 200 / 2, 200 * 3 / 4  # received per pass
    expected = 4 * (2 * layers + 4 * outside) + 2 * 4 * (layers + outside)
    assert update_bytes(mixture, experts, PLAIN)[0] == expected
    assert "exchange" in step_seconds(mixture, experts, PLAIN)


def test_sharding_within_a_machine_is_faster() -> None:
    """16 ranks in two machines of eight: sharded over all ranks, the ring crosses the links between machines; with two
    replicas only sums do."""
    rates = Rates(nvlink=100.0, link=1.0, link_used=1.0, launch=0.0, flops=1e30)
    whole = step_seconds(SHAPE, replace(STEP, ranks=16, shards=16, generates=False), rates)
    copies = step_seconds(SHAPE, replace(STEP, ranks=16, shards=8, generates=False), rates)
    assert whole["network"] == pytest.approx((2 * 2400 + 4000) * 15 / 16 / 8)
    assert copies["network"] == pytest.approx((2 * 2400 + 4000) * 7 / 8 / 100 + 8 * 125 / 2 / 8)


def test_ring_across_machines_uses_all_links() -> None:
    rates = Rates(nvlink=450e9, link=10e9, link_used=1.0)
    assert (network_rate(8, rates), network_rate(16, rates)) == (450e9, 80e9)


def test_engine_with_a_small_cache_decodes_in_turns() -> None:
    """Keys of a token take 4 * 2 * 5 = 40 bytes, of a row of 20 tokens 800; beside 2000 bytes of weights, 1600 bytes
    hold two of eight rows: 8 * 10 / 2 = 40 steps instead of 20."""
    rates = replace(PLAIN, decode=1.0, decode_row=0.0)
    assert decode_seconds(SHAPE, replace(STEP, engine_room=0), rates) == 20
    assert decode_seconds(SHAPE, replace(STEP, engine_room=3600), rates) == 40
    assert decode_seconds(SHAPE, replace(STEP, engines=4, engine_room=3600), rates) == 20
    assert decode_seconds(SHAPE, STEP, replace(rates, engine_tokens=2.0)) == 40, "80 tokens, 2 a second"


def test_separate_engines_overlap_rollouts_and_updates() -> None:
    together = step_seconds(SHAPE, STEP, PLAIN)
    apart = step_seconds(SHAPE, replace(STEP, apart=True, ahead=True), PLAIN)
    assert apart["step"] < together["step"]
    work = max(apart["generate"], max(apart["update"], apart["network"]) + apart["gather"])
    assert apart["step"] == pytest.approx(work + apart["sync"])
    assert "generate" not in step_seconds(SHAPE, replace(STEP, generates=False), PLAIN)


# record -> (shape, card, allowed error of the update, of the rollouts). Some hosts were slow: benchmarks/README.md.
MEASURED = {
    "rl_A_h100": (SMOL, "h100", 0.2, 0.2),
    "rl_A_h200": (SMOL, "h200", 0.3, 0.2),  # two engines
    "rl_B_lora_h200": (QWEN, "h200", 0.2, 0.2),
    "rl_B_full_h200": (QWEN, "h200", 0.2, 0.2),
    "rl_A_compiled_h100": (SMOL, "h100", 0.45, 0.4),
    "rl_A_other_host_h100": (SMOL, "h100", 0.2, 0.3),
    "rl_B_lora_h100": (QWEN, "h100", 0.2, 0.2),
    "rl_B_full_h100": (QWEN, "h100", 0.2, 0.2),
    "rl_L_h200": (QWEN, "h200", 0.2, 0.3),
    "two_gpus_lora_h100:one": (QWEN, "h100", 0.2, 0.3),
    "two_gpus_lora_h100:both": (QWEN, "h100", 0.2, 0.2),
    "two_gpus_lora_h100:twice": (QWEN, "h100", 0.2, 0.2),
    "server_lora_h100:one": (QWEN, "h100", 0.3, 0.5),
}

# in other records the engine sent a message per token, which took the host more time per row
TOKENS_IN_CHUNKS = ("rl_B_lora_h200", "rl_L_h200")


def read_record(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a record's side or run."""
    file, _, run = name.partition(":")
    record = json.loads((RESULTS / f"{file}.json").read_text())
    return record, record["runs"][run] if run else record["posttrain"]


@pytest.mark.parametrize("name", MEASURED)
def test_predicted_step_times_match_measured_runs(name: str) -> None:
    shape, card, update, rollout = MEASURED[name]
    record, side = read_record(name)
    settings, setting = side["settings"], record["setting"]
    flops, memory, nvlink, gib = CARDS[card]
    rows, ranks = setting["prompts"] * setting["group"], side.get("processes", 1)
    left_out = min(setting.get("left_out", 1), len(side["step_s"]) - 1)
    tokens = mean(side["tokens"][left_out:])
    rows *= 2 if name.endswith("twice") else 1
    lora = record["lora"]
    step = Step(
        rows=rows,
        longest=setting["new"],
        prompt=30,
        ranks=ranks,
        micro_tokens=settings["micro_tokens"],
        engines=ranks * settings.get("engines", 1),
        engine_room=settings["share"] * gib * GIB,
    )
    rates = Rates(
        flops=flops, memory=memory, nvlink=nvlink, launch=1.5e-3 if settings["compile"] else 5e-3,
        length=(tokens / rows - 30) / setting["new"],
        decode_row=Rates.decode_row if name in TOKENS_IN_CHUNKS else 7e-6,
    )  # fmt: skip
    found = step_seconds(replace(shape, adapter=18_464_768 if lora else 0), step, rates)
    for part, allowed in (("update", update), ("generate", rollout)):
        taken = mean(side["phases"][part][left_out:])
        assert found[part] == pytest.approx(taken, rel=allowed), (part, found[part], taken)
