"""Memory estimates of a run by phase: formulas over the shape of a model. All sizes are in bytes; no torch.

Written for Llama-style decoder blocks (two RMS norms, grouped-query attention, a gated MLP) as trained by posttrain:
trained weights in float32, matmuls in bfloat16, log-probs in chunks. What autograd saves of a block was counted tensor
by tensor and is verified by a test.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

GIB = 1 << 30
CONTEXT = GIB // 2  # CUDA context and libraries of one process
CELL = 10  # bytes per logit of a chunk: bf16 and float32 logits, log-softmax (`logprobs._TokenScores`)
GRAPH_CELL = 18  # bytes per logit with autograd: probabilities and their gradient as well
TRL_TILE = 4096, 32768  # of TRL's kernel (sft, dpo): tokens and columns of the logits held at the same time
TRL_CELL = 2  # bytes per logit of a tile
INPUTS = 3  # block inputs on the GPU with offloading: of the running block, and two in transfer
MASTERS = "master weights (float32)"
NF4 = 0.53  # bytes per 4-bit weight, including scales


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that the formulas use."""

    parameters: int  # tied weights counted once
    linear: int  # parameters in matrices of the blocks: quantized, and cast under autocast
    layers: int
    hidden: int
    heads: int  # query heads x head size
    kv_heads: int  # key/value heads x head size
    intermediate: int
    vocabulary: int
    embeddings: int = 0  # parameters of input embeddings
    experts: int = 0  # parameters of routed experts; the share `routed` of them computes a token
    routed: float = 1.0
    experts_a_token: int = 0
    adapter: int = 0  # parameters of the adapter; 0 = full training

    @property
    def active(self) -> float:
        """Number of parameters that compute one token."""
        return self.parameters - self.experts * (1 - self.routed)

    def rank_share(self, tensor: int, expert: int) -> Shape:
        """Return the part of each layer and the head that one rank computes.

        tensor: ranks that run the same tokens. expert: ranks that divide the experts. Input embeddings not tied to the
        head stay whole.
        """
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
    """Recipe settings that affect memory. `half`: matmuls in bfloat16 (on a GPU), otherwise everything in float32."""

    micro_tokens: int  # tokens per forward and backward pass
    quantized: bool = False
    half: bool = True
    checkpointing: bool = False
    attention_kept: bool = False  # with checkpointing: attention outputs are saved as well
    inputs_offloaded: bool = False  # with checkpointing: block inputs are offloaded to host memory
    compiled: bool = False  # model.compile
    half_weights: bool = False  # trained weights in bfloat16, float32 masters in the optimizer
    optimizer: str = "adamw"  # optim.use
    optimizer_offloaded: bool = False  # moments, and master weights of `half_weights`, are offloaded to host memory
    reference_copy: bool = False  # full training with a component that needs the reference
    teacher: Shape | None = None  # the reference, if it is another model
    reference_offloaded: bool = False  # the reference is offloaded to host memory
    trl_logits: bool = False  # sft and dpo, except sft with token weights
    plain_head: bool = True  # the head's backward pass does not use autograd
    ranks: int = 1  # ranks that the model is sharded over
    context: int = 1  # ranks that each run a part of the same rows
    tensor: int = 1  # ranks that run the same tokens with shards of each layer
    expert: int = 1  # ranks that each hold some of the experts
    engine: int = 0  # bytes held by the engine during generation, in addition to the trainer's weights
    engine_sleeps: bool = False  # the engine frees them for the update
    engine_processes: int = 0  # engine processes on the trainer's GPU besides the trainer
    measured: int = 0  # bytes per step of other values read by components: hidden states, top-k tokens


@dataclass(frozen=True)
class Phases:
    """Bytes by part for each phase of a step, and bytes in host memory."""

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
    """Return the bytes of the model between steps.

    Trained weights are in float32; a frozen base is in bfloat16 or 4 bits, with a float32 adapter.
    """
    if s.half_weights:
        return {"weights (bfloat16)": 2 * shape.parameters, MASTERS: 4 * shape.parameters}
    if not shape.adapter:
        return {"weights (float32)": 4 * shape.parameters}
    half = 2 if s.half else 4
    unquantized = shape.parameters - shape.linear
    base = int(NF4 * shape.linear) + half * unquantized if s.quantized else half * shape.parameters
    return {"frozen base": base, "adapter (float32)": 4 * shape.adapter}


def count_trained(shape: Shape) -> int:
    return shape.adapter or shape.parameters


def optimizer(shape: Shape, s: Settings) -> dict[str, int]:
    """Return the bytes of the optimizer's state.

    AdamW: two float32 moments; in 8 bits two bytes, and two float32 scales per block of 256, except for embeddings.
    Muon: one float32 number per entry of the layers' matrices.
    """
    if s.optimizer == "adamw":
        return {"AdamW moments": 8 * count_trained(shape)}
    if s.optimizer == "muon":
        matrices = shape.linear - shape.experts
        return {"Muon momentum": 4 * matrices, "AdamW moments": 8 * (shape.parameters - matrices)}
    embeddings = 0 if shape.adapter else shape.embeddings
    return {"8-bit AdamW moments": int((2 + 8 / 256) * (count_trained(shape) - embeddings)) + 8 * embeddings}


def block_bytes(shape: Shape, s: Settings) -> int:
    """Return the bytes that autograd saves per token and block (omitting a few bytes of softmax and norm statistics).

    Trained weights: the float32 residual and the normalized rows of two norms (16 h), a bfloat16 cast for each of five
    projections (10 h), query, key, value (repeated to all heads) and attention output (8 heads), gate, up, their
    activation and product (8 m). With an adapter, the norms save a float32 input (8 h) and return bfloat16 (4 h), and
    the output projection saves its input again (2 heads). In float32 there are no casts: residuals, normalized and
    scaled rows (24 h), attention with a copy of its output (20 heads), the MLP (16 m).

    With bfloat16 weights (`half_weights`) there are no casts: each of two norms saves its input and its result (16 h
    including a float32 copy of the input).

    A compiled block is one graph if attention has a kernel, and recomputes cheap operations: it saves query, key, value
    and attention output (8 heads), gate, up and their product (6 m), the inputs of its projections and of its residuals
    (10 h, with an adapter 8 h).
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
    """Return the bytes that all blocks save for a rank's part of a micro-batch; with checkpointing, their inputs."""
    tokens = s.micro_tokens // s.context
    if not s.checkpointing:
        return tokens * block_bytes(shape, s) * shape.layers
    on_gpu = min(shape.layers, INPUTS) if s.inputs_offloaded else shape.layers
    attention = (2 if s.half else 4) * shape.heads * shape.layers if s.attention_kept else 0
    return tokens * (input_bytes(shape, s) * on_gpu + attention)


def input_bytes(shape: Shape, s: Settings) -> int:
    """Return the bytes of a block's input per token.

    Residuals are float32 if weights are, otherwise in the matmul dtype.
    """
    return (2 if s.half_weights or (s.half and shape.adapter) else 4) * shape.hidden


def inputs_on_host(shape: Shape, s: Settings) -> int:
    """Return the host bytes of all block inputs, each rounded up to a power of two, as torch does for pinned memory."""
    size = s.micro_tokens // s.context * input_bytes(shape, s)
    return shape.layers * (1 << (size - 1).bit_length())


def logits(shape: Shape, s: Settings, chunk_cells: int) -> int:
    """Return the bytes of logits: a chunk of tokens (rl, sft with token weights) or a tile of columns (sft, dpo)."""
    cells = s.micro_tokens * shape.vocabulary
    if s.trl_logits:
        return TRL_CELL * min(s.micro_tokens, TRL_TILE[0]) * min(shape.vocabulary, TRL_TILE[1])
    return (CELL if s.plain_head else GRAPH_CELL) * min(cells, chunk_cells)


def head_gradient(shape: Shape, s: Settings) -> int:
    """Return the bytes of the head's gradient before it reaches `.grad`: a float32 sum, and the product of a chunk."""
    if shape.adapter or not s.plain_head:
        return 0
    return (4 + (2 if s.half else 4)) * shape.vocabulary * shape.hidden


def head_states(shape: Shape, s: Settings) -> int:
    """Return the bytes of states around the head, beyond what blocks save.

    Input and output of the last norm, the gathered states, and their gradient: 20 bytes per number of the residual in
    float32, 14 in bfloat16.
    """
    wide = not s.half or not (shape.adapter or s.half_weights)
    return (20 if wide else 14) * s.micro_tokens * shape.hidden


def moments_of_update(shape: Shape, s: Settings, chunk_cells: int) -> list[dict[str, int]]:
    """Return the temporary bytes of gradient computation at each point in time that may be the peak.

    Without checkpointing, all blocks are saved when the head and then the last block run backward; both are counted,
    which is one block too much, and about what the allocator wastes. With checkpointing, the peak is the head, or a
    block that is recomputed and runs backward, which takes half of what the block saves; only casts of the computed
    part count. Measured on an H200 with rows of 16,000 and 32,000 tokens: `benchmarks/long_rows.py`.
    """
    tokens = s.micro_tokens // s.context
    block, saved = tokens * block_bytes(shape, s), activations(shape, s)
    of_layers, of_head = casts(shape, s)
    head = {"logits": logits(shape, s, chunk_cells), "gradient of the head": head_gradient(shape, s)}
    if not s.checkpointing:
        cast = {"bfloat16 casts of weights": of_layers + of_head}
        return [{"activations": saved, "a block's backward pass": block, **head, **cast}]
    forward = {"states around the head": head_states(shape, s), **head, "bfloat16 casts of weights": of_head}
    backward = {"a block's backward pass": block // 2, "bfloat16 casts of weights": of_layers // shape.layers}
    return [{"activations": saved, **forward}, {"activations": saved + block, **backward}]


def kv_bytes(shape: Shape, s: Settings) -> int:
    """Return the bytes of keys and values per token in all layers.

    transformers keeps keys in float32 with float32 weights.
    """
    key = 2 if s.half and (shape.adapter or s.half_weights) else 4
    return shape.layers * shape.kv_heads * (key + (2 if s.half else 4))


def reference(shape: Shape, s: Settings) -> int:
    """Return the bytes of the frozen copy in full training, or of a teacher.

    Block matrices are in the matmul dtype, other weights in float32. A teacher is in 4 bits if the policy is.
    """
    shape = s.teacher or shape
    if s.quantized:
        return int(NF4 * shape.linear) + (2 if s.half else 4) * (shape.parameters - shape.linear)
    if s.half_weights:
        return 2 * shape.parameters
    return 4 * shape.parameters - (2 * shape.linear if s.half else 0)


def transient_bytes(shape: Shape, s: Settings) -> int:
    """Return the bytes of a sharded model that are temporarily gathered.

    The running layer, the next one, and a layer's gradients, in the matmul dtype; weights outside the layers with their
    gradients, in float32. A frozen base has no gradients, and its own dtype.
    """
    if s.ranks == 1:
        return 0
    outside = shape.parameters - shape.linear
    if shape.adapter:
        each = 0.5 if s.quantized else 2 if s.half else 4
        return int(each * 2 * shape.linear / shape.layers) + (2 if s.half else 4) * outside
    return 3 * (2 if s.half else 4) * shape.linear // shape.layers + 8 * outside


def casts(shape: Shape, s: Settings) -> tuple[int, int]:
    """Return the bytes of autocast copies of trained weights: (block matrices, output head), in bfloat16.

    Sharded blocks are already gathered in bfloat16.
    """
    if not s.half or shape.adapter or s.half_weights:
        return 0, 0
    return 2 * shape.linear if s.ranks == 1 else 0, 2 * shape.vocabulary * shape.hidden


def sharded_parts(shape: Shape) -> tuple[str, ...]:
    """Return the names of the parts sharded over ranks; an adapter is whole on each rank."""
    return ("frozen base",) if shape.adapter else ("weights (float32)", "AdamW moments")


def bytes_on_rank(shape: Shape, s: Settings, size: int) -> int:
    """Return the bytes that one rank holds of `size` bytes of all weights.

    An even share, except for embeddings and norms, which all ranks of a tensor-parallel group hold.
    """
    own = shape.rank_share(s.tensor, 1).parameters * s.tensor
    return size * own // (shape.parameters * s.ranks)


def phases(shape: Shape, s: Settings, *, chunk_cells: int) -> Phases:
    """Return the bytes of the phases rollout (with an engine), measure (with an offloaded reference), update and sync.

    The peak of a phase is the sum of its parts. Gradients exist only in the update.
    """
    resident = {**weights(shape, s), **optimizer(shape, s), "CUDA context": CONTEXT if s.half else 0}
    host: dict[str, int] = {}
    offloaded = list(optimizer(shape, s)) if s.optimizer_offloaded or s.optimizer == "paged_adamw_8bit" else []
    offloaded += [MASTERS] if s.optimizer_offloaded and s.half_weights else []
    host |= {name: resident.pop(name) for name in offloaded}
    if s.checkpointing and s.inputs_offloaded:
        host["inputs of blocks"] = inputs_on_host(shape, s)
    copy = {"reference copy": reference(shape, s)} if s.reference_copy else {}
    own = shape.rank_share(s.tensor, s.expert)
    if s.ranks > 1:  # a sharded reference is float32 throughout
        copy = dict.fromkeys(copy, bytes_on_rank(shape, s, 4 * shape.parameters))
        sharded = sharded_parts(shape)
        resident = {n: bytes_on_rank(shape, s, size) if n in sharded else size for n, size in resident.items()}
    if s.ranks > 1 and s.quantized:  # scales are not sharded
        resident["scales of 4-bit weights"] = int((NF4 - 0.5) * shape.linear * (s.ranks - 1) / s.ranks)
    if s.engine_processes:  # created before vLLM checks for free memory, and never freed
        resident["CUDA context of the engine"] = s.engine_processes * CONTEXT
    if s.reference_offloaded:
        host |= copy
    else:
        resident |= copy
    update = {
        **resident,
        "gradients": 4 * shape.adapter or bytes_on_rank(shape, s, 4 * shape.parameters),
        "whole for a while": transient_bytes(own, s),
        "measured for components": s.measured,
        **max(moments_of_update(own, s, chunk_cells), key=lambda moment: sum(moment.values())),
    }
    parts = {"update": update}
    if s.reference_offloaded and copy:
        measure = {**resident, **copy, "logits": logits(own, s, chunk_cells), "measured for components": s.measured}
        parts = {"measure": measure, **parts}
    if s.engine:
        for part in parts.values():
            part["engine"] = 0 if s.engine_sleeps else s.engine
        idle = {**resident, "engine": s.engine}
        parts = {"rollout": idle, **parts, "sync": dict(idle)}
    return Phases({name: {k: v for k, v in part.items() if v} for name, part in parts.items()}, host)
