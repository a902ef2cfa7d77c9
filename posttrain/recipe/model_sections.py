"""The section `model`: weights, adapters, and how GPUs divide the model. Does not import torch."""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from posttrain.path_resolution import PATHS
from posttrain.recipe.engine_sections import LORA_RANKS
from posttrain.recipe.rollout_sections import ONE_ADAPTER, ONE_SET_OF_WEIGHTS
from posttrain.recipe.section import (
    READ_ONLY,
    Idle,
    ModelName,
    NoImages,
    Positive,
    Refused,
    Section,
    TemplateName,
    Unused,
    Width,
)

Texts = Annotated[list[str], Field(min_length=1)]
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
RESERVED_NAMES = ("default", "reference", "base")  # names of posttrain's own adapters, and of no adapter


class Lora(Section):
    """A low-rank adapter; the base stays frozen and serves as the reference policy."""

    rank: Annotated[
        Width,
        Refused(
            f"rank > {LORA_RANKS[-1]} and rollout.engine = vllm and not rollout.vllm.merge_adapter",
            f"{{rank}} is more than vLLM serves, {LORA_RANKS[-1]}",
            "write a smaller one",
        ),
    ] = Field(16, description="rank of the adapter")
    alpha: Positive = Field(32, description="scale: the adapter's output is multiplied by alpha / rank")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="dropout of the adapter's inputs during training"
    )
    targets: Annotated[
        str | Texts,
        Refused(
            "on_head and stage = sft|dpo",
            "{stage} trains no adapter on the output head",
            "remove it; `rl` and full training train the head",
        ),
    ] = Field("all-linear", description="module names, or all-linear")
    continue_: Annotated[
        bool,
        Refused(
            "continue_ and stage = reward_model",
            "a reward model starts from a language model, into which an older adapter is merged",
            "remove it",
        ),
    ] = Field(
        False,
        alias="continue",
        description="continue to train the adapter that `model.path` names, with its rank and targets; false: "
        "it is merged into its base and a new one is trained (with `quantize` it is always "
        "continued)",
    )

    adapters: Annotated[
        Annotated[list[AdapterName], Field(min_length=2)] | None,
        Refused("adapters and stage != rl", "{stage} trains one adapter", "remove it"),
        Refused(
            "adapters and not rollout.workflow",
            "roles select the adapter, and without `rollout.workflow` there are no roles",
            "write `rollout.workflow`, or remove it",
        ),
        Refused("adapters and continue_", "`continue` continues a single adapter", "remove one of them"),
        Refused("adapters and rollout.engine = vllm and rollout.vllm.merge_adapter", *ONE_SET_OF_WEIGHTS),
        Refused("adapters and rollout.engine = vllm and rollout.vllm.server", *ONE_ADAPTER),
    ] = Field(
        None,
        description="several adapters over one base, for the roles of `rollout.workflow`: [actor, critic]; "
        "each is trained on the calls of its roles only and saved in its own folder of final/; "
        "the first one answers held-out prompts",
    )

    @field_validator("adapters")
    @classmethod
    def _tell_apart(cls, names: list[str] | None) -> list[str] | None:
        if taken := next((name for name in names or () if name in RESERVED_NAMES), None):
            raise ValueError(f"`{taken}` is a reserved name: choose another one")
        if twice := next((name for name, count in Counter(names or ()).items() if count > 1), None):
            raise ValueError(f"`{twice}` is listed twice")
        return names

    @property
    def on_head(self) -> bool:
        """Whether a target is the output head. TRL multiplies by the head's weight directly, so an adapter on it would
        not be trained."""
        names = [self.targets] if isinstance(self.targets, str) else self.targets
        return any(name.rpartition(".")[2] in ("lm_head", "embed_out") for name in names)


class Parallel(Section):
    """How the GPUs of a run divide a model. The product of all numbers is the number of GPUs."""

    shard: Literal["auto"] | Positive = Field(
        "auto",
        description="GPUs that each hold a part of every weight, gradient and optimizer state (FSDP2); auto: "
        "all GPUs that the other keys leave",
    )
    replicate: Positive = Field(
        1, description="number of such groups, e.g. one per machine: weights are gathered within a group"
    )
    context: Annotated[
        Positive,
        Refused(
            "context > 1 and stage = sft and not batch.packing",
            "context parallelism divides packed rows",
            "add `batch.packing: true`",
        ),
        NoImages("context > 1", "splits packed rows anywhere, also inside an image", in_replies=True),
    ] = Field(
        1,
        description="GPUs that each run a part of the same rows (context parallelism), for long rows; they "
        "also shard the weights",
    )
    tensor: Annotated[
        Positive,
        Refused(
            "tensor > 1 and divergence in kl.needs",
            "`{kl.use}` compares whole vocabularies, which the GPUs divide",
            "write `shard` in its place",
        ),
        NoImages(
            "tensor > 1", "divides language models only: transformers has no plan for vision towers", in_replies=True
        ),
    ] = Field(
        1,
        description="GPUs that run the same tokens, each with columns or rows of every layer's weights "
        "(tensor parallelism, as transformers plans it for the architecture)",
    )
    expert: Annotated[
        Positive,
        Refused(
            "expert > 1 and tensor > 1",
            "both are tested with `shard` and `replicate` only, not together",
            "write one of them",
        ),
        Refused(
            "expert > 1 and context > 1",
            "both are tested with `shard` and `replicate` only, not together",
            "write one of them",
        ),
        NoImages("expert > 1", "is untested with a vision tower", in_replies=True),
    ] = Field(
        1,
        description="mixtures of experts: GPUs that each hold some of the experts and exchange tokens of "
        "different rows (expert parallelism); other weights are divided as with `shard`",
    )

    @property
    def follows_plan(self) -> bool:
        """Whether transformers' plan for the architecture determines how weights are divided."""
        return self.tensor > 1 or self.expert > 1


TRAINED_WHOLE = Unused("reward_model", "a reward model is trained whole on each GPU")


class Model(Section):
    """The weights, and how they are trained."""

    path: ModelName = Field(
        description="a directory, a hub id, a .gguf file, `tiny`, `tiny-vision`, or `stage:NAME` in a pipeline"
    )
    revision: Annotated[str | None, Idle("is_local", "with {path}: only models of the hub have revisions")] = Field(
        None, description="revision on the hub"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Refused(
            "dtype = float16 and stage = sft|dpo|reward_model",
            "training in float16 needs a scaled loss, which only rl has",
            "write `bfloat16`, or `auto`",
        ),
        Refused("divided and dtype = float16", "float16 is untested with model.parallel", "write bfloat16 or float32"),
    ] = Field(
        "auto",
        description="dtype of matrix products and of frozen weights; auto: bfloat16 on a GPU, float32 on a "
        "CPU; float16 (rl): closer agreement between trainer and vLLM",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if available")
    vision: Annotated[
        Literal["frozen", "projector", "all"] | None,
        Idle("path = tiny", "with {path}, which sees no images"),
        Idle("stage = eval|generate", "in {stage}, which trains nothing"),
        Refused(
            "vision = projector|all and lora and rollout.engine = vllm and not rollout.vllm.merge_adapter",
            "vLLM loads no adapters on a vision tower or projector",
            "write `rollout.vllm.merge_adapter: true`, or `frozen`",
        ),
    ] = Field(
        None,
        description="what is trained of a vision-language model besides its language model: nothing (frozen, "
        "the default), the projector, or projector and vision tower (all); with lora: where "
        "adapters are added",
    )
    lora: Annotated[
        Lora | None,
        Unused("eval|harness|generate", "an adapter is evaluated by naming its directory in model.path"),
    ] = Field(None, description="train a LoRA adapter instead of all weights")
    quantize: Annotated[
        Literal["nf4"] | None,
        Unused("reward_model", "a reward model is saved with its adapter merged in, which 4-bit weights cannot hold"),
        Refused(
            "quantize and not lora and stage = sft|dpo|rl",
            "4-bit weights cannot be trained directly",
            "add `lora: {}` to `model`",
        ),
    ] = Field(None, description="4-bit weights (bitsandbytes); training them needs lora")
    attention: Annotated[
        Literal["auto", "eager", "sdpa", "flash_attention_2"],
        Idle("path = tiny|tiny-vision", "with {path}, which posttrain builds itself", note=True),
        Idle(
            "stage = eval|generate and engine.engine = vllm",
            "with engine.engine vllm, which uses its own attention kernels",
            note=True,
        ),
    ] = Field("auto", description="attention implementation; auto: the default of transformers")
    gradient_checkpointing: Annotated[
        bool | Literal["selective"],
        READ_ONLY,
        Refused(
            "gradient_checkpointing = selective and compile",
            "which activations a compiled layer keeps is fixed when it is compiled",
            "write `gradient_checkpointing: true`, or remove `compile`",
        ),
        Refused(
            "gradient_checkpointing = selective and parallel.follows_plan",
            "keeping attention outputs is untested with a divided model",
            "write `gradient_checkpointing: true`",
        ),
    ] = Field(
        False, description="recompute activations in the backward pass; selective: except the outputs of attention"
    )
    activation_offloading: Annotated[
        bool,
        READ_ONLY,
        Refused(
            "activation_offloading and not gradient_checkpointing",
            "only the inputs of checkpointed layers are offloaded",
            "also write `model.gradient_checkpointing: true`",
        ),
    ] = Field(False, description="move the inputs of checkpointed layers to host memory until the backward pass")
    shard: Annotated[bool, READ_ONLY, TRAINED_WHOLE] = Field(False, description="short for `parallel: {shard: auto}`")
    parallel: Annotated[
        Parallel | None,
        READ_ONLY,
        TRAINED_WHOLE,
        Refused("parallel and shard", "model.shard is short for it", "remove model.shard"),
        Refused(
            "parallel.follows_plan and quantize",
            "4-bit weights are packed into one row, which `tensor` and `expert` cannot divide",
            "write `shard` in its place, or remove `quantize`",
        ),
        Refused(
            "divided and online_kl", "with `online_kl` each GPU samples with the whole model", "remove one of them"
        ),
        Refused(
            "divided and opponent",
            "the opponent samples with the policy's weights, which are divided among the GPUs",
            "use GPUs that hold the whole model",
        ),
        Refused(
            "divided and prox_logp in reads",
            "the average of the weights is a copy of the whole model, and no rank holds all of it",
            "remove it, or write `loss: decoupled_ppo`",
        ),
        Refused(
            "divided and values in sampler.needs",
            "`{sampler.use}` reads the policy's hidden states of prompts, whose weights are divided among the GPUs",
        ),
        Refused(
            "divided and solutions.sft",
            "a second optimizer would keep its own copy of the weights",
            "remove it, or `solutions.sft`",
        ),
    ] = Field(None, description="with --gpus N: how the GPUs divide the model; default: each GPU holds all of it")
    half_weights: Annotated[
        bool,
        READ_ONLY,
        Unused("reward_model", "a reward model is trained in float32 weights"),
        Refused("half_weights and lora", "an adapter's weights are few and stay in float32", "remove it"),
        Refused("half_weights and divided", "a divided model computes in bfloat16 layer by layer already", "remove it"),
        Refused(
            "half_weights and dtype != auto|bfloat16",
            "it is for bfloat16, and model.dtype is {dtype}",
            "write bfloat16",
        ),
        Refused("half_weights and prox_logp in reads", "an average would be rounded in every update", "remove it"),
        Refused("half_weights and opponent", "a slowly moving opponent would be rounded in every step", "remove it"),
        Refused(
            "half_weights and not divided and solutions.sft",
            "a second optimizer would keep its own copy of the weights",
            "remove it, or `solutions.sft`",
        ),
    ] = Field(
        False,
        description="full training in bfloat16, including weights, residuals and norms; the optimizer keeps "
        "float32 weights (docs/memory.md)",
    )
    compile: Annotated[
        bool,
        READ_ONLY,
        Unused("reward_model", "a reward model is not compiled"),
        Refused("compile and quantize", "4-bit weights are unpacked by kernels that cannot be compiled", "remove it"),
        Refused(
            "compile and parallel.expert > 1",
            "the number of tokens of an expert varies, which a compiled graph cannot hold",
            "remove one of the two",
        ),
        Refused(
            "compile and parallel.context > 1",
            "compiled layers are untested with context parallelism",
            "remove one of the two",
        ),
    ] = Field(
        False, description="torch.compile the layers for training: about a minute of compilation, then faster steps"
    )
    offload_reference: Annotated[
        bool,
        Unused("eval|harness|generate", "this stage has no reference"),
        Unused("sft|dpo|reward_model", "only rl keeps a copy of the starting policy"),
        Refused(
            "offload_reference and lora and not kl.reference",
            "under LoRA the reference is the base itself, not a copy",
            "remove it",
        ),
        Refused("offload_reference and divided", "model.parallel divides the reference as well", "remove it"),
        Idle(
            "stage = rl and not lora and not divided and not has_reference",
            "without a reference: `kl.coef` is 0",
            note=True,
        ),
    ] = Field(False, description="full training: keep the frozen reference in host memory while it is not used")
    chat_template: Annotated[
        TemplateName | None,
        Idle("stage = eval|generate and not data.chat and not acts", "with `data.chat: false`", note=True),
    ] = Field(None, description="Jinja file that replaces the tokenizer's chat template")
    chat_template_kwargs: Annotated[
        dict[VariableName, Any],
        Idle("stage = eval|generate and not data.chat and not acts", "with `data.chat: false`", note=True),
    ] = Field(
        {},
        description="variables of the chat template: {enable_thinking: false}; the saved model's template has them as "
        "defaults",
    )
    thoughts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2, max_length=2)] | None = Field(
        None,
        description="text before and after a thought, if neither the chat template nor the vocabulary shows "
        'them: ["<reason>", "</reason>"]; rewards, evaluations and rows have `<think>` and `</think>` in their place',
    )
    trust_remote_code: Annotated[
        bool, Idle("path = tiny|tiny-vision", "with {path}, which posttrain builds itself", note=True)
    ] = Field(False, description="run the Python code that comes with the model")

    @field_validator("thoughts")
    @classmethod
    def _two_marks(cls, marks: list[str] | None) -> list[str] | None:
        if marks and (not all(mark.strip() for mark in marks) or marks[0] in marks[1] or marks[1] in marks[0]):
            raise ValueError("a mark is blank or a part of the other: a thought needs two marks that differ")
        return marks

    @property
    def divided(self) -> Parallel | None:
        """How GPUs divide the model; None if each GPU holds all of it."""
        return self.parallel or (Parallel() if self.shard else None)

    @property
    def is_local(self) -> bool:
        """Whether `path` is not a model of the hub."""
        return (
            self.path in ("tiny", "tiny-vision")
            or self.path.startswith(("stage:", *PATHS))
            or self.path.endswith(".gguf")
        )
