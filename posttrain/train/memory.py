"""How much memory a run needs, by phase: formulas over the shape of a model. Bytes everywhere; no torch.

Written for decoder blocks of the Llama kind (two RMS norms, grouped attention, a gated MLP) trained as posttrain trains
them: trained weights in float32, products in bfloat16, log-probs in chunks. What autograd keeps of a block was counted
tensor by tensor and is held to what it really keeps by a test.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

GIB = 1 << 30
CONTEXT = GIB // 2  # CUDA context and libraries of a process
CELL = 10  # bytes of a cell of the logit chunk: bf16 and float32 logits, log-softmax (`head._TokenScores`)
GRAPH_CELL = 18  # of one that goes through autograd: probabilities and their gradient as well
TRL_TILE = 4096, 32768  # of TRL's kernel (sft, dpo): tokens and columns of the logits that it holds at once
TRL_CELL = 2  # bytes of one of its cells
INPUTS = 3  # of blocks that are on the GPU while others wait on the host: of one that runs, and two on their way
MASTERS = "master weights (float32)"
NF4 = 0.53  # bytes of a 4-bit weight with its scales


@dataclass(frozen=True)
class Shape:
    """What the formulas read of a model."""

    parameters: int  # tied weights counted once
    linear: int  # of them in matrices of the blocks: what is quantised, and cast under autocast
    layers: int
    hidden: int
    heads: int  # query heads x head size
    kv_heads: int  # key/value heads x head size
    intermediate: int
    vocabulary: int
    embeddings: int = 0  # parameters of input embeddings
    experts: int = 0  # parameters of routed experts; of each token's the share `routed` computes it
    routed: float = 1.0
    experts_a_token: int = 0
    adapter: int = 0  # parameters of the adapter; 0 = all weights are trained

    @property
    def active(self) -> float:
        """Parameters that compute one token."""
        return self.parameters - self.experts * (1 - self.routed)

    def own_part(self, tensor: int, expert: int) -> Shape:
        """What one of `tensor` ranks that run the same tokens computes of a layer and the head, with its share of the
        experts that `expert` ranks divide. Embeddings that are not the head's stay whole."""
        vocabulary = self.vocabulary // tensor if self.vocabulary % tensor == 0 else self.vocabulary
        experts = self.experts // (tensor * expert)
        linear = (self.linear - self.experts) // tensor + experts
        outside = self.parameters - self.linear - (self.vocabulary - vocabulary) * self.hidden
        return replace(
            self,
            parameters=linear + outside,
            linear=linear,
            heads=self.heads // tensor,
            kv_heads=self.kv_heads // tensor,
            intermediate=self.intermediate // tensor,
            vocabulary=vocabulary,
            experts=experts,
        )


@dataclass(frozen=True)
class Settings:
    """What of a recipe decides the memory. `half`: products in bfloat16 (a GPU), else all in float32."""

    micro_tokens: int  # tokens of one forward and backward pass
    quantized: bool = False
    half: bool = True
    checkpointing: bool = False
    attention_kept: bool = False  # with checkpointing: the outputs of attention as well
    inputs_offloaded: bool = False  # with checkpointing: the inputs of blocks wait in the host's memory
    compiled: bool = False  # model.compile
    half_weights: bool = False  # trained weights in bfloat16, their float32 masters with the optimiser
    optimizer: str = "adamw"  # optim.use
    optimizer_offloaded: bool = False  # moments, and master weights of `half_weights`, wait in the host's memory
    reference_copy: bool = False  # full training with a term that needs the reference
    teacher: Shape | None = None  # the reference where it is another model
    reference_offloaded: bool = False  # it waits in the host's memory
    trl_logits: bool = False  # sft and dpo, but for sft with weights of tokens
    plain_head: bool = True  # the backward pass of the head is written out
    ranks: int = 1  # that the model is divided among
    context: int = 1  # ranks that run a part each of the same rows
    tensor: int = 1  # ranks that run the same tokens with parts of each layer
    expert: int = 1  # ranks that have some of the experts each
    engine: int = 0  # bytes that the engine holds while it generates, beyond the trainer's weights
    engine_sleeps: bool = False  # it gives them back for the update
    engine_processes: int = 0  # those of engines on the trainer's GPU that are not in the trainer's process
    measured: int = 0  # bytes a step of what components read besides log-probs: hidden states, the likeliest tokens


@dataclass(frozen=True)
class Phases:
    """Bytes by part in each phase of a step, and what stands in the host's memory instead."""

    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)

    def total(self, phase: str) -> int:
        return sum(self.parts[phase].values())

    @property
    def peak(self) -> int:
        return max(map(self.total, self.parts))

    @property
    def peak_phase(self) -> str:
        return max(self.parts, key=self.total)


def weights(shape: Shape, s: Settings) -> dict[str, int]:
    """The model between steps: float32 where trained; a frozen base in bfloat16 or 4 bits, and its adapter."""
    if s.half_weights:
        return {"weights (bfloat16)": 2 * shape.parameters, MASTERS: 4 * shape.parameters}
    if not shape.adapter:
        return {"weights (float32)": 4 * shape.parameters}
    half = 2 if s.half else 4
    rest = shape.parameters - shape.linear
    base = int(NF4 * shape.linear) + half * rest if s.quantized else half * shape.parameters
    return {"frozen base": base, "adapter (float32)": 4 * shape.adapter}


def count_trained(shape: Shape) -> int:
    return shape.adapter or shape.parameters


def optimizer(shape: Shape, s: Settings) -> dict[str, int]:
    """AdamW: two float32 moments; in 8 bits two bytes, and two float32 scales a block of 256, but for embeddings. Muon:
    one float32 number of a layer's matrices."""
    if s.optimizer == "adamw":
        return {"AdamW moments": 8 * count_trained(shape)}
    if s.optimizer == "muon":
        matrices = shape.linear - shape.experts
        return {"Muon momentum": 4 * matrices, "AdamW moments": 8 * (shape.parameters - matrices)}
    embeddings = 0 if shape.adapter else shape.embeddings
    return {"8-bit AdamW moments": int((2 + 8 / 256) * (count_trained(shape) - embeddings)) + 8 * embeddings}


def block_bytes(shape: Shape, s: Settings) -> int:
    """What autograd keeps of one block for one token (a few bytes of softmax and norm statistics are left out).

    Trained weights: the float32 residual and the normalised rows of two norms (16 h), a bfloat16 cast for each of five
    projections (10 h), query, key, value (repeated to all heads) and output of attention (8 heads), gate, up, their
    activation and product (8 m). Under an adapter the norms keep a float32 input (8 h) and give bfloat16 (4 h), and the
    output projection has its input once more (2 heads). In float32 nothing is cast: the residuals, normalised and
    scaled rows (24 h), attention with a copy of its output (20 heads), the MLP (16 m).

    With weights in bfloat16 (`half_weights`) nothing is cast: each of two norms keeps its input and what it makes of it
    (16 h with a float32 copy of the input).

    A compiled block is one graph where attention has a kernel, and computes again what is cheap: it keeps query, key,
    value and output of attention (8 heads), gate, up and their product (6 m), the inputs of its projections and what
    its residuals come from (10 h, under an adapter 8 h).
    """
    h, heads, m = shape.hidden, shape.heads, shape.intermediate
    if not s.half:
        return 24 * h + 20 * heads + 16 * m
    if s.compiled:
        return (8 if shape.adapter or s.half_weights else 10) * h + 8 * heads + 6 * m
    if s.half_weights:
        return 16 * h + 8 * heads + 8 * m
    return 12 * h + 10 * heads + 8 * m if shape.adapter else 26 * h + 8 * heads + 8 * m


def activations(shape: Shape, s: Settings) -> int:
    """What all blocks keep of a rank's part of one micro-batch. With checkpointing: their inputs."""
    tokens = s.micro_tokens // s.context
    if not s.checkpointing:
        return tokens * block_bytes(shape, s) * shape.layers
    there = min(shape.layers, INPUTS) if s.inputs_offloaded else shape.layers
    attention = (2 if s.half else 4) * shape.heads * shape.layers if s.attention_kept else 0
    return tokens * (input_bytes(shape, s) * there + attention)


def input_bytes(shape: Shape, s: Settings) -> int:
    """The input of a block for one token: residuals are float32 where weights are, else in the type of products."""
    return (2 if s.half_weights or (s.half and shape.adapter) else 4) * shape.hidden


def inputs_on_host(shape: Shape, s: Settings) -> int:
    """Of all blocks, each rounded up to a power of two as torch does with pinned memory."""
    size = s.micro_tokens // s.context * input_bytes(shape, s)
    return shape.layers * (1 << (size - 1).bit_length())


def logits(shape: Shape, s: Settings, chunk_cells: int) -> int:
    """A chunk of tokens (rl, and sft with weights of tokens) or a tile of columns (sft, dpo)."""
    cells = s.micro_tokens * shape.vocabulary
    if s.trl_logits:
        return TRL_CELL * min(s.micro_tokens, TRL_TILE[0]) * min(shape.vocabulary, TRL_TILE[1])
    return (CELL if s.plain_head else GRAPH_CELL) * min(cells, chunk_cells)


def head_gradient(shape: Shape, s: Settings) -> int:
    """What the head's backward pass adds up before it reaches `.grad`: a float32 sum, and a chunk's product."""
    if shape.adapter or not s.plain_head:
        return 0
    return (4 + (2 if s.half else 4)) * shape.vocabulary * shape.hidden


def head_states(shape: Shape, s: Settings) -> int:
    """Around the head, beyond what blocks keep: input and output of the last norm, what is gathered of it, and its
    gradient. Twenty bytes a number of the residual in float32, fourteen in bfloat16."""
    wide = not s.half or not (shape.adapter or s.half_weights)
    return (20 if wide else 14) * s.micro_tokens * shape.hidden


def moments_of_update(shape: Shape, s: Settings, chunk_cells: int) -> list[dict[str, int]]:
    """Bytes that come and go while gradients are computed, at each moment that may be the peak.

    Without checkpointing all blocks are kept when the head and then the last block go backward; both are counted, which
    is a block too much, and about what the allocator keeps unused. With checkpointing it is the head, or a block that
    is computed again and goes backward, which takes half as much as the block keeps; casts are those of what is
    computed. Measured on an H200 with rows of 16,000 and 32,000 tokens: `benchmarks/long_rows.py`.
    """
    tokens = s.micro_tokens // s.context
    block, kept = tokens * block_bytes(shape, s), activations(shape, s)
    of_layers, of_head = casts(shape, s)
    head = {"logits": logits(shape, s, chunk_cells), "gradient of the head": head_gradient(shape, s)}
    if not s.checkpointing:
        cast = {"bfloat16 casts of weights": of_layers + of_head}
        return [{"activations": kept, "a block's backward pass": block, **head, **cast}]
    around = {"states around the head": head_states(shape, s), **head, "bfloat16 casts of weights": of_head}
    backward = {"a block's backward pass": block // 2, "bfloat16 casts of weights": of_layers // shape.layers}
    return [{"activations": kept, **around}, {"activations": kept + block, **backward}]


def kv_bytes(shape: Shape, s: Settings) -> int:
    """Keys and values of one token in all layers; transformers keeps keys in float32 with float32 weights."""
    key = 2 if s.half and (shape.adapter or s.half_weights) else 4
    return shape.layers * shape.kv_heads * (key + (2 if s.half else 4))


def reference(shape: Shape, s: Settings) -> int:
    """The frozen copy of full training, or a teacher: matrices of the blocks in the precision of products, the rest in
    float32. A teacher is in 4 bits where the policy is."""
    shape = s.teacher or shape
    if s.quantized:
        return int(NF4 * shape.linear) + (2 if s.half else 4) * (shape.parameters - shape.linear)
    if s.half_weights:
        return 2 * shape.parameters
    return 4 * shape.parameters - (2 * shape.linear if s.half else 0)


def transient_bytes(shape: Shape, s: Settings) -> int:
    """What is whole for a while of a divided model: a layer that runs, the next one, and a layer's gradients, in the
    precision of products; what is outside of the layers with its gradients, in float32. A frozen base has no gradients,
    and its own precision."""
    if s.ranks == 1:
        return 0
    outside = shape.parameters - shape.linear
    if shape.adapter:
        each = 0.5 if s.quantized else 2 if s.half else 4
        return int(each * 2 * shape.linear / shape.layers) + (2 if s.half else 4) * outside
    return 3 * (2 if s.half else 4) * shape.linear // shape.layers + 8 * outside


def casts(shape: Shape, s: Settings) -> tuple[int, int]:
    """What autocast makes of trained weights in a pass: matrices of the blocks, and the output head, in bfloat16. The
    blocks of a divided model come in bfloat16."""
    if not s.half or shape.adapter or s.half_weights:
        return 0, 0
    return 2 * shape.linear if s.ranks == 1 else 0, 2 * shape.vocabulary * shape.hidden


def divided_parts(shape: Shape) -> tuple[str, ...]:
    """The parts that ranks divide among them: an adapter is whole on each."""
    return ("frozen base",) if shape.adapter else ("weights (float32)", "AdamW moments")


def held_bytes(shape: Shape, s: Settings, size: int) -> int:
    """What a rank holds of `size` bytes of all weights: an even part, but for embeddings and norms, which ranks of a
    tensor-parallel group hold alike."""
    own = shape.own_part(s.tensor, 1).parameters * s.tensor
    return size * own // (shape.parameters * s.ranks)


def phases(shape: Shape, s: Settings, *, chunk_cells: int) -> Phases:
    """Bytes of rollout (if there is an engine), measure (if a reference comes from the host for it), update and sync.

    A phase's peak is its sum. Gradients live in the update alone.
    """
    kept = {**weights(shape, s), **optimizer(shape, s), "CUDA context": CONTEXT if s.half else 0}
    host: dict[str, int] = {}
    away = list(optimizer(shape, s)) if s.optimizer_offloaded or s.optimizer == "paged_adamw_8bit" else []
    away += [MASTERS] if s.optimizer_offloaded and s.half_weights else []
    host |= {name: kept.pop(name) for name in away}
    if s.checkpointing and s.inputs_offloaded:
        host["inputs of blocks"] = inputs_on_host(shape, s)
    copy = {"reference copy": reference(shape, s)} if s.reference_copy else {}
    own = shape.own_part(s.tensor, s.expert)
    if s.ranks > 1:  # a divided reference is float32 throughout
        copy = dict.fromkeys(copy, held_bytes(shape, s, 4 * shape.parameters))
        kept = {n: held_bytes(shape, s, size) if n in divided_parts(shape) else size for n, size in kept.items()}
    if s.ranks > 1 and s.quantized:  # scales are whole on each
        kept["scales of 4-bit weights"] = int((NF4 - 0.5) * shape.linear * (s.ranks - 1) / s.ranks)
    if s.engine_processes:  # made before vLLM looks what is free, and never given back
        kept["CUDA context of the engine"] = s.engine_processes * CONTEXT
    if s.reference_offloaded:
        host |= copy
    else:
        kept |= copy
    update = {
        **kept,
        "gradients": 4 * shape.adapter or held_bytes(shape, s, 4 * shape.parameters),
        "whole for a while": transient_bytes(own, s),
        "measured for components": s.measured,
        **max(moments_of_update(own, s, chunk_cells), key=lambda moment: sum(moment.values())),
    }
    parts = {"update": update}
    if s.reference_offloaded and copy:
        measure = {**kept, **copy, "logits": logits(own, s, chunk_cells), "measured for components": s.measured}
        parts = {"measure": measure, **parts}
    if s.engine:
        for part in parts.values():
            part["engine"] = 0 if s.engine_sleeps else s.engine
        around = {**kept, "engine": s.engine}
        parts = {"rollout": around, **parts, "sync": dict(around)}
    return Phases({name: {k: v for k, v in part.items() if v} for name, part in parts.items()}, host)
