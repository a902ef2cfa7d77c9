"""Predicted duration of a step on a cluster, from stated rates: computation, network, generation. No torch, no recipe.

Units are bytes, FLOP and seconds. `Rates` are the assumptions, all of which `posttrain plan` prints. They are compared
with the measured runs in benchmarks/results by tests/train/test_step_time.py: most updates and rollouts are within a
fifth, those on slow hosts are not. Nothing beyond two GPUs has been measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from posttrain.train.memory import Shape

CARDS = {  # name -> dense bf16 FLOP/s, bytes/s of its memory, bytes/s to GPUs of the same machine, GiB
    "a100": (312e12, 2.0e12, 300e9, 80),
    "h100": (989e12, 3.35e12, 450e9, 80),
    "h200": (989e12, 4.8e12, 450e9, 141),
    "b200": (2250e12, 7.7e12, 900e9, 180),
}


@dataclass(frozen=True)
class Rates:
    """Assumed rates of the machines, and of the model's completions."""

    flops: float = 989e12  # FLOP per second of a GPU, bf16 dense
    used: float = 0.5  # share of `flops` that an update reaches
    memory: float = 3.35e12  # bytes per second of GPU memory
    nvlink: float = 450e9  # bytes per second to GPUs of the same machine
    link: float = 50e9  # bytes per second of each GPU to other machines
    link_used: float = 0.7  # share of `nvlink` and `link` that collectives reach
    gpus_a_node: int = 8
    launch: float = 1.5e-3  # seconds of the host per layer and micro-batch; model.compile off: 5e-3
    decode: float = 3.5e-3  # seconds of the engine's host per decoding step
    decode_row: float = 4e-6  # seconds of the engine's host per decoding step and row
    length: float = 0.5  # mean completion, as a share of the longest
    prompt: int = 512  # tokens of a prompt, if neither tokenizer nor data can be read
    gather: float = 4e-7  # seconds per token of the step to send rollouts to all ranks
    reward: float = 0.0  # seconds of scoring per step after the last rollout
    engine_tokens: float = 0.0  # tokens per second of one engine; 0: computed from the rates above


@dataclass(frozen=True)
class Step:
    """Properties of a run's step that determine its duration."""

    rows: int
    longest: int  # tokens of a completion at most
    prompt: int  # tokens of a prompt
    ranks: int = 1  # training ranks
    shards: int = 1  # ranks among which each weight is divided; further ranks hold copies
    context: int = 1  # ranks that run a part each of the same rows
    tensor: int = 1  # ranks that run the same tokens with parts of each layer
    expert: int = 1  # ranks that hold some of the experts each
    micro_tokens: int = 16384  # tokens of a micro-batch, over such a group of ranks together
    updates: int = 1  # per step
    epochs: int = 1
    passes: float = 0.0  # passes over all rows without gradient
    checkpointing: bool = False
    generates: bool = True
    engines: int = 1
    engine_gpus: int = 1  # of each engine
    engine_room: float = 0.0  # bytes on each engine GPU for weights and keys
    apart: bool = False  # engines have separate GPUs
    ahead: bool = False  # engines sample the next step's rollouts during the update

    def row_tokens(self, rates: Rates) -> float:
        """Return the mean tokens of a row."""
        return self.prompt + self.longest * (rates.length if self.generates else 1.0)


def forward_flops(shape: Shape, context: float) -> float:
    """Return the FLOP of one token's forward pass: 2 per active weight, and causal attention over half of its row."""
    return 2 * shape.active + 2 * shape.layers * shape.heads * context


def update_seconds(shape: Shape, s: Step, rates: Rates) -> float:
    """Return the computation time of a step's updates on one rank.

    Forward; backward (twice a forward; with an adapter, whose base has no gradients, once, and half as much for its
    narrow products); another forward with checkpointing; passes without gradient; kernel launches by the host.
    """
    tokens = s.rows * s.row_tokens(rates) / s.ranks
    times = (2.5 if shape.adapter else 3) + s.checkpointing
    flop = tokens * forward_flops(shape, s.row_tokens(rates)) * (times * s.epochs + s.passes)
    launches = shape.layers * micro_batches(s, rates) * rates.launch
    moments = s.updates * 28 * (shape.adapter or shape.parameters / s.shards) / rates.memory
    return flop / (rates.flops * rates.used) + launches + moments


def micro_batches(s: Step, rates: Rates) -> int:
    """Return the number of micro-batches of a step's updates on one rank. A row is never divided."""
    rows = s.rows * s.epochs / s.updates / s.ranks * s.context * s.tensor
    size = max(1.0, s.micro_tokens // s.row_tokens(rates))
    return s.updates * math.ceil(max(rows, 1.0) / size)


def update_bytes(shape: Shape, s: Step, rates: Rates) -> tuple[float, float]:
    """Return the bytes that a rank receives for a step's updates: (from its sharding group, from replicas).

    Divided weights are gathered twice per micro-batch (forward, backward), layers in two bytes per number and other
    weights in four, and gradients are sent in four bytes after each; without division, and between replicas, a ring
    sums the gradients once per update. With an adapter, gradients are the adapter's. Ranks that divide a row exchange
    keys and values of all of it, and the last states.
    """
    if s.ranks == 1:
        return 0.0, 0.0
    own, parts = shape.rank_share(s.tensor, s.expert), s.shards / s.tensor
    share, share_of_experts = 1 - 1 / parts, 1 - s.expert / parts
    layers = (own.linear - own.experts) * share + own.experts * share_of_experts
    outside = (own.parameters - own.linear) * share
    weights = 2 * layers + (2 if shape.adapter else 4) * outside
    divided = 0 if shape.adapter else layers + outside
    micro = micro_batches(s, rates)
    received = weights * (2 * micro + micro * s.passes / s.epochs) + 4 * divided * micro
    copies, summed = (s.ranks, shape.adapter) if shape.adapter else (s.ranks // s.shards, shape.parameters / s.shards)
    line = s.rows * s.row_tokens(rates) * s.epochs * s.context * s.tensor / s.ranks  # of the neighbors together
    keys = 4 * shape.layers * own.kv_heads * (2 + s.checkpointing) + 8 * shape.hidden
    received += line * keys * (s.context - 1) / s.context
    return received, s.updates * 8 * summed * (copies - 1) / copies


def exchange_bytes(shape: Shape, s: Step, rates: Rates) -> float:
    """Return the bytes that a rank receives for activations that computation waits for, in two bytes per number.

    Tensor parallelism: two sums of all states per layer and direction, each by a ring. Experts: each token's states to
    the ranks of its experts, and back.
    """
    tokens = s.rows * s.row_tokens(rates) * s.epochs / s.ranks
    runs = 2 + s.checkpointing + s.passes / s.epochs  # forward, backward, and forward once more or alone
    states = 2 * shape.hidden * shape.layers * runs
    sums = tokens * s.tensor * states * 2 * 2 * (s.tensor - 1) / s.tensor
    return sums + tokens * states * 2 * shape.experts_a_token * (s.expert - 1) / s.expert


def network_rate(group: int, rates: Rates) -> float:
    """Return the bytes per second that each of `group` GPUs gets from a collective.

    Beyond one machine a ring enters and leaves each machine once, over the links of all its GPUs.
    """
    inside = rates.nvlink * rates.link_used
    return inside if group <= rates.gpus_a_node else min(inside, rates.gpus_a_node * rates.link * rates.link_used)


def decode_seconds(shape: Shape, s: Step, rates: Rates) -> float:
    """Return the time until an engine's last rollout is complete: decoding steps, each limited by host or GPU.

    The GPU reads its part of the weights (for a mixture of experts, of the experts to which some row is routed) and the
    keys of all rows; as many rows run together as fit into memory.
    """
    rows = s.rows / s.engines
    mean = s.longest * rates.length
    if rates.engine_tokens:
        return max(rows * mean / rates.engine_tokens, s.longest * rates.decode)
    kv = 4 * shape.layers * shape.kv_heads / s.engine_gpus
    weights = 2 * shape.parameters / s.engine_gpus
    fit = max(1.0, (s.engine_room - weights) / (kv * s.row_tokens(rates))) if s.engine_room else rows
    together = min(rows, fit)
    steps = max(float(s.longest), rows * mean / together)
    idle = 2 * shape.experts * (1 - shape.routed) ** together / s.engine_gpus
    read = (weights - idle + together * kv * (s.prompt + mean / 2)) / (0.8 * rates.memory)
    compute = 2 * shape.active * together / s.engine_gpus / (0.5 * rates.flops)
    host = rates.decode + rates.decode_row * together + (4e-5 * shape.layers if s.engine_gpus > 1 else 0.0)
    return steps * max(host, read, compute)


def sync_seconds(shape: Shape, s: Step, rates: Rates) -> float:
    """Return the time to send weights (or the adapter) from one rank to each engine, gathering divided weights
    first.
    """
    size = 4 * shape.adapter or 2 * shape.parameters
    together = size / network_rate(s.shards, rates) if s.shards > 1 and not shape.adapter else 0.0
    return 0.15 + size / min(20e9, rates.link * rates.link_used if s.apart else 20e9) + together


def step_seconds(shape: Shape, s: Step, rates: Rates) -> dict[str, float]:
    """Return the seconds of a step by part, and of the whole step as `step`.

    Weights are sent while other layers compute, so an update takes the longer of both, plus `exchange` for activations
    that layers wait for. Engines on separate GPUs generate while the trainer trains, if they may be a step ahead.
    """
    compute = update_seconds(shape, s, rates)
    parts, copies = update_bytes(shape, s, rates)
    network = parts / network_rate(s.shards, rates) + copies / network_rate(s.ranks, rates)
    seconds = {"update": compute, "network": network}
    train = max(compute, network)
    if s.tensor * s.expert > 1:
        group = max(s.tensor, s.expert)
        seconds["exchange"] = exchange_bytes(shape, s, rates) / network_rate(group, rates)
        train += seconds["exchange"]
    if not s.generates:
        return {**seconds, "step": train}
    generate = decode_seconds(shape, s, rates) + rates.reward
    gather = rates.gather * s.rows * s.row_tokens(rates) if s.ranks > 1 else 0.0
    sync = sync_seconds(shape, s, rates)
    work = max(generate, train + gather) if s.ahead and s.apart else generate + gather + train
    return {"generate": generate, "gather": gather, **seconds, "sync": sync, "step": work + sync}


def slowest(found: dict[str, float]) -> str:
    """Return the part of a step that takes longest."""
    return max((name for name in found if name != "step"), key=found.__getitem__)
