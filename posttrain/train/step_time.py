"""How long a step takes on a cluster, from stated rates: computation, network, generation. No torch, no recipe.

Bytes, FLOP and seconds everywhere; `Rates` are the assumptions, all of which `posttrain plan` prints. They are held to
the measured runs in benchmarks/results by tests/train/test_step_time.py: most updates and rollouts within a fifth,
those of slow hosts not. Nothing beyond two GPUs has been measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from posttrain.train.memory import Shape

CARDS = {  # name -> dense bf16 FLOP/s, bytes/s of its memory, bytes/s to cards of the same machine, GiB
    "a100": (312e12, 2.0e12, 300e9, 80),
    "h100": (989e12, 3.35e12, 450e9, 80),
    "h200": (989e12, 4.8e12, 450e9, 141),
    "b200": (2250e12, 7.7e12, 900e9, 180),
}


@dataclass(frozen=True)
class Rates:
    """What is assumed of the machines and of the model's completions."""

    flops: float = 989e12  # a second of a card, bf16 dense
    used: float = 0.5  # share of it that an update reaches
    memory: float = 3.35e12  # bytes a second of the card's memory
    nvlink: float = 450e9  # bytes a second to cards of the same machine
    link: float = 50e9  # bytes a second of each card to other machines
    link_used: float = 0.7  # share of both that collectives reach
    gpus_a_node: int = 8
    launch: float = 1.5e-3  # seconds a layer and micro-batch that the host takes; model.compile off: 5e-3
    decode: float = 3.5e-3  # seconds a decoding step that the engine's host takes
    decode_row: float = 7e-6  # and for each row of it
    length: float = 0.5  # mean completion, as a share of the longest
    prompt: int = 512  # tokens of a prompt, where neither tokenizer nor data can be read
    gather: float = 4e-7  # seconds a token of the step, to bring rollouts to all ranks
    reward: float = 0.0  # seconds a step that scoring takes after the last rollout
    engine_tokens: float = 0.0  # tokens a second of one engine; 0: what follows from the rates above


@dataclass(frozen=True)
class Step:
    """One step of a run, as far as its time depends on it."""

    rows: int
    longest: int  # tokens of a completion at most
    prompt: int  # tokens of a prompt
    ranks: int = 1  # that train
    shards: int = 1  # ranks that each weight is divided among; the others hold copies
    context: int = 1  # neighbours that run a part each of the same rows
    tensor: int = 1  # neighbours that run the same tokens with parts of each layer
    expert: int = 1  # neighbours that have some of the experts each
    micro_tokens: int = 16384  # of such neighbours together
    updates: int = 1  # a step
    epochs: int = 1
    passes: float = 0.0  # without gradient, over all rows
    checkpointing: bool = False
    generates: bool = True
    engines: int = 1
    engine_gpus: int = 1  # of each
    engine_room: float = 0.0  # bytes on each of its GPUs for weights and keys
    apart: bool = False  # engines have GPUs of their own
    ahead: bool = False  # they sample the next step's rollouts meanwhile

    def row_tokens(self, rates: Rates) -> float:
        """Tokens of a row on average."""
        return self.prompt + self.longest * (rates.length if self.generates else 1.0)


def forward_flops(shape: Shape, context: float) -> float:
    """FLOP of one token's forward pass: 2 a weight that computes it, and causal attention over half of its row."""
    return 2 * shape.active + 2 * shape.layers * shape.heads * context


def update_seconds(shape: Shape, s: Step, rates: Rates) -> float:
    """Computation of a step's updates on one rank: forward, backward (twice a forward; under an adapter, whose base has
    no gradients, once, and half as much for its narrow products), once more forward with checkpointing; passes without
    gradient; what the host launches."""
    tokens = s.rows * s.row_tokens(rates) / s.ranks
    times = (2.5 if shape.adapter else 3) + s.checkpointing
    flop = tokens * forward_flops(shape, s.row_tokens(rates)) * (times * s.epochs + s.passes)
    launches = shape.layers * micro_batches(s, rates) * rates.launch
    moments = s.updates * 28 * (shape.adapter or shape.parameters / s.shards) / rates.memory
    return flop / (rates.flops * rates.used) + launches + moments


def micro_batches(s: Step, rates: Rates) -> int:
    """Of a step's updates on one rank. A row is never divided."""
    rows = s.rows * s.epochs / s.updates / s.ranks * s.context * s.tensor
    size = max(1.0, s.micro_tokens // s.row_tokens(rates))
    return s.updates * math.ceil(max(rows, 1.0) / size)


def update_bytes(shape: Shape, s: Step, rates: Rates) -> tuple[float, float]:
    """What a rank receives over the network for a step's updates: from ranks that hold parts of its weights, and from
    those that hold copies.

    Divided weights come twice a micro-batch (forward, backward), layers in two bytes and what is outside of them in
    four, and gradients go in four bytes after each; without division, and between copies, a ring adds up the gradients
    once an update. Under an adapter gradients are the adapter's. Neighbours of a row have keys and values of all of it,
    and the last states.
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
    line = s.rows * s.row_tokens(rates) * s.epochs * s.context * s.tensor / s.ranks  # of the neighbours together
    keys = 4 * shape.layers * own.kv_heads * (2 + s.checkpointing) + 8 * shape.hidden
    received += line * keys * (s.context - 1) / s.context
    return received, s.updates * 8 * summed * (copies - 1) / copies


def exchange_bytes(shape: Shape, s: Step, rates: Rates) -> float:
    """What a rank receives for activations that computation waits for, in two bytes a number.

    Tensor parallelism: two sums of all states a layer and direction, each by a ring. Experts: each token's states to
    those that it is sent to, and back.
    """
    tokens = s.rows * s.row_tokens(rates) * s.epochs / s.ranks
    runs = 2 + s.checkpointing + s.passes / s.epochs  # forward, backward, and forward once more or alone
    states = 2 * shape.hidden * shape.layers * runs
    sums = tokens * s.tensor * states * 2 * 2 * (s.tensor - 1) / s.tensor
    return sums + tokens * states * 2 * shape.experts_a_token * (s.expert - 1) / s.expert


def network_rate(group: int, rates: Rates) -> float:
    """Bytes a second that each of `group` cards gets from a collective. Beyond one machine a ring enters and leaves
    each machine once, over all of its cards' links."""
    inside = rates.nvlink * rates.link_used
    return inside if group <= rates.gpus_a_node else min(inside, rates.gpus_a_node * rates.link * rates.link_used)


def decode_seconds(shape: Shape, s: Step, rates: Rates) -> float:
    """Until an engine's last rollout is there: decoding steps, each as long as the host or the GPU takes for it.

    The GPU reads its part of the weights (of a mixture, the experts that some row is sent to) and the keys of all rows;
    as many rows run as the room holds.
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
    """Weights (or the adapter) to the engines; divided ones come together first. From one rank to each engine."""
    size = 4 * shape.adapter or 2 * shape.parameters
    together = size / network_rate(s.shards, rates) if s.shards > 1 and not shape.adapter else 0.0
    return 0.15 + size / min(20e9, rates.link * rates.link_used if s.apart else 20e9) + together


def step_seconds(shape: Shape, s: Step, rates: Rates) -> dict[str, float]:
    """Seconds of a step by part, and of the whole as `step`. Weights travel while others compute, so an update takes
    the longer of both, and `exchange` besides, for activations that layers wait for; engines on GPUs of their own
    generate while the trainer trains, if they may be a step ahead."""
    compute = update_seconds(shape, s, rates)
    parts, copies = update_bytes(shape, s, rates)
    network = parts / network_rate(s.shards, rates) + copies / network_rate(s.ranks, rates)
    found = {"update": compute, "network": network}
    train = max(compute, network)
    if s.tensor * s.expert > 1:
        group = max(s.tensor, s.expert)
        found["exchange"] = exchange_bytes(shape, s, rates) / network_rate(group, rates)
        train += found["exchange"]
    if not s.generates:
        return {**found, "step": train}
    generate = decode_seconds(shape, s, rates) + rates.reward
    gather = rates.gather * s.rows * s.row_tokens(rates) if s.ranks > 1 else 0.0
    sync = sync_seconds(shape, s, rates)
    work = max(generate, train + gather) if s.ahead and s.apart else generate + gather + train
    return {"generate": generate, "gather": gather, **found, "sync": sync, "step": work + sync}


def slowest(found: dict[str, float]) -> str:
    """The part of a step that takes longest."""
    return max((name for name in found if name != "step"), key=found.__getitem__)
