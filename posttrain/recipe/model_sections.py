"""The section `model`: which weights, their adapters, and how GPUs divide them. No torch here."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import Field, field_validator

from posttrain.path_resolution import PATHS
from posttrain.recipe.engine_sections import LORA_RANKS
from posttrain.recipe.rollout_sections import ONE_ADAPTER, ONE_SET_OF_WEIGHTS
from posttrain.recipe.section import Idle, ModelName, Positive, Refused, Section, TemplateName, Width

Texts = Annotated[list[str], Field(min_length=1)]
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]
OWN_NAMES = ("default", "reference", "base")  # of adapters that posttrain makes itself, and of none


class Lora(Section):
    """A low-rank adapter; the base stays frozen and serves as the reference policy."""

    rank: Annotated[
        Width,
        Refused(
            f"rank > {LORA_RANKS[-1]} and rollout.engine = vllm and not rollout.vllm.merge_adapter",
            f"{{rank}} is more than vLLM serves, {LORA_RANKS[-1]}",
            "write a smaller one",
        ),
    ] = Field(16, description="width of the two factors")
    alpha: Positive = Field(32, description="scale: the adapter's output is multiplied by alpha / rank")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of an adapter's inputs that are 0 while training"
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
        description="train the adapter that `model.path` names itself, with its shape; false: it is merged into its "
        "base and a fresh one is trained (with `quantize` it is always trained on)",
    )

    adapters: Annotated[
        Annotated[list[AdapterName], Field(min_length=2)] | None,
        Refused("adapters and stage != rl", "{stage} trains one adapter", "remove it"),
        Refused(
            "adapters and not rollout.workflow",
            "who is asked decides which adapter answers, and without `rollout.workflow` there are no roles",
            "write `rollout.workflow`, or remove it",
        ),
        Refused("adapters and continue_", "`continue` trains one adapter on", "remove one of them"),
        Refused("adapters and rollout.engine = vllm and rollout.vllm.merge_adapter", *ONE_SET_OF_WEIGHTS),
        Refused("adapters and rollout.engine = vllm and rollout.vllm.server", *ONE_ADAPTER),
    ] = Field(
        None,
        description="several adapters over the one base, for roles of `rollout.workflow`: [actor, critic]; each is "
        "trained on the calls of its roles alone, and final/ has a folder of each; the first one answers held-out "
        "prompts",
    )

    @field_validator("adapters")
    @classmethod
    def _tell_apart(cls, names: list[str] | None) -> list[str] | None:
        if taken := next((name for name in names or () if name in OWN_NAMES), None):
            raise ValueError(f"`{taken}` means something else to posttrain: take another name")
        if twice := next((name for name, count in Counter(names or ()).items() if count > 1), None):
            raise ValueError(f"`{twice}` is named twice")
        return names

    @property
    def on_head(self) -> bool:
        """Whether it names the output head. TRL multiplies by the head's weight itself, so that an adapter on it would
        not be trained."""
        names = [self.targets] if isinstance(self.targets, str) else self.targets
        return any(name.rpartition(".")[2] in ("lm_head", "embed_out") for name in names)


class Parallel(Section):
    """How the GPUs of a run divide a model among them. The product of all numbers is the number of GPUs."""

    shard: Literal["auto"] | Positive = Field(
        "auto",
        description="GPUs that hold a part each of every weight, gradient and moment (FSDP2); auto: all that the other "
        "keys leave",
    )
    replicate: Positive = Field(
        1, description="copies of such a group, e.g. one a machine: weights then come together within it"
    )
    context: Annotated[
        Positive,
        Refused(
            "context > 1 and stage = sft and not batch.packing",
            "GPUs divide lines of packed rows among them",
            "add `batch.packing: true`",
        ),
    ] = Field(
        1, description="GPUs that run a part each of the same rows, for rows that are long; they divide weights too"
    )
    tensor: Annotated[
        Positive,
        Refused(
            "tensor > 1 and divergence in kl.needs",
            "`{kl.use}` compares whole vocabularies, which GPUs divide among them",
            "write `shard` in its place",
        ),
    ] = Field(
        1,
        description="GPUs that run the same tokens, each with columns or rows of every layer's weights (tensor "
        "parallelism, as transformers plans it for the architecture)",
    )
    expert: Annotated[
        Positive,
        Refused(
            "expert > 1 and tensor > 1",
            "each was proven beside `shard` and `replicate`, not beside the other",
            "write one of them",
        ),
        Refused(
            "expert > 1 and context > 1",
            "each was proven beside `shard` and `replicate`, not beside the other",
            "write one of them",
        ),
    ] = Field(
        1,
        description="mixtures of experts: GPUs that have some of the experts each, and send them tokens of different "
        "rows; they divide other weights as those of `shard` do",
    )

    @property
    def follows_plan(self) -> bool:
        """Whether transformers' plan of the architecture says what is divided."""
        return self.tensor > 1 or self.expert > 1


class Model(Section):
    """Which weights, and how they are trained."""

    path: ModelName = Field(
        description="a directory, a hub id, a .gguf file, `tiny`, `tiny-vision`, or `stage:NAME` in a pipeline"
    )
    revision: Annotated[str | None, Idle("is_local", "with {path}: only models of the hub have revisions")] = Field(
        None, description="hub revision"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Refused(
            "dtype = float16 and stage = sft|dpo|reward_model",
            "training in float16 needs a scaled loss, which only rl has",
            "write `bfloat16`, or `auto`",
        ),
        Refused(
            "divided and dtype = float16",
            "float16 was not proven together with model.parallel",
            "write bfloat16 or float32",
        ),
    ] = Field(
        "auto",
        description="of products and of frozen weights; auto: bfloat16 on a GPU, float32 on a CPU;"
        " float16 (rl): trainer and vLLM agree better",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
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
        description="of a model that sees images, what is trained besides its language model: nothing (frozen, the "
        "default), the projector, or projector and vision tower (all); with lora: where adapters are put",
    )
    lora: Lora | None = Field(None, description="train a LoRA adapter instead of all weights")
    quantize: Annotated[
        Literal["nf4"] | None,
        Refused(
            "quantize and not lora and stage = sft|dpo|rl",
            "4-bit weights cannot be trained themselves",
            "add `lora: {}` to `model`",
        ),
    ] = Field(None, description="4-bit weights (bitsandbytes); training them needs lora")
    attention: Annotated[
        Literal["auto", "eager", "sdpa", "flash_attention_2"],
        Idle("path = tiny|tiny-vision", "with {path}, which is made here", note=True),
        Idle(
            "stage = eval|generate and engine.engine = vllm",
            "with engine.engine vllm, which attends in its own way",
            note=True,
        ),
    ] = Field("auto", description="how attention is computed; auto: what transformers takes")
    gradient_checkpointing: Annotated[
        bool | Literal["selective"],
        Refused(
            "gradient_checkpointing = selective and compile",
            "a compiled layer is one call, and what of it is kept was decided when it was compiled",
            "write `gradient_checkpointing: true`, or remove `compile`",
        ),
        Refused(
            "gradient_checkpointing = selective and parallel.follows_plan",
            "what attention gives was not proven to be kept in parts",
            "write `gradient_checkpointing: true`",
        ),
    ] = Field(
        False,
        description="recompute activations in the backward pass; selective: but for the outputs of attention",
    )
    activation_offloading: Annotated[
        bool,
        Refused(
            "activation_offloading and not gradient_checkpointing",
            "what waits on the host are the inputs of layers that are checkpointed",
            "write `model.gradient_checkpointing: true` beside it",
        ),
    ] = Field(False, description="inputs of checkpointed layers wait in host memory for the backward pass")
    shard: bool = Field(False, description="short for `parallel: {shard: auto}`")
    parallel: Annotated[
        Parallel | None,
        Refused("parallel and shard", "model.shard is short for it", "remove model.shard"),
        Refused(
            "parallel.follows_plan and quantize",
            "4-bit weights are packed in one row, and `tensor` and `expert` divide columns and experts",
            "write `shard` in its place, or remove `quantize`",
        ),
        Refused(
            "divided and online_kl",
            "with `online_kl` each GPU samples with the whole model",
            "remove one of them",
        ),
        Refused(
            "divided and opponent",
            "the opponent answers where the policy's weights stand, and these are divided among the GPUs",
            "use GPUs that hold it all",
        ),
        Refused(
            "divided and prox_logp in reads",
            "the average of the weights is a copy of the whole model, and no rank has one",
            "remove it, or write `loss: decoupled_ppo`",
        ),
        Refused(
            "divided and values in sampler.needs",
            "`{sampler.use}` reads the policy's hidden states of prompts, whose weights are divided among the GPUs",
        ),
        Refused(
            "divided and solutions.sft",
            "a second optimiser would keep weights of its own",
            "remove it, or `solutions.sft`",
        ),
    ] = Field(
        None,
        description="with --gpus N: how the GPUs divide the model among them; without it each holds all of it",
    )
    half_weights: Annotated[
        bool,
        Refused("half_weights and lora", "an adapter's weights are few, and float32", "remove it"),
        Refused("half_weights and divided", "a divided model computes in bfloat16 layer by layer already", "remove it"),
        Refused(
            "half_weights and dtype != auto|bfloat16",
            "it is for bfloat16, and model.dtype is {dtype}",
            "write bfloat16",
        ),
        Refused("half_weights and prox_logp in reads", "an average would be rounded in every update", "remove it"),
        Refused(
            "half_weights and opponent", "an opponent that follows slowly would be rounded in every step", "remove it"
        ),
        Refused(
            "half_weights and not divided and solutions.sft",
            "a second optimiser would keep weights of its own",
            "remove it, or `solutions.sft`",
        ),
    ] = Field(
        False,
        description="full training in bfloat16: weights, residuals and norms too, and float32 weights are the "
        "optimiser's own (docs/memory.md)",
    )
    compile: Annotated[
        bool,
        Refused("compile and quantize", "4-bit weights are unpacked by kernels that no graph holds", "remove it"),
        Refused(
            "compile and parallel.expert > 1",
            "how many tokens come to an expert is in no compiled graph",
            "remove one of the two",
        ),
        Refused(
            "compile and parallel.context > 1",
            "compiled layers were not proven beside lines that GPUs divide among them",
            "remove one of the two",
        ),
    ] = Field(False, description="torch.compile the layers for training: a minute once, then faster steps")
    offload_reference: Annotated[
        bool,
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
    ] = Field(False, description="full training: the frozen reference waits in host memory while it is not read")
    chat_template: Annotated[
        TemplateName | None,
        Idle("stage = eval|generate and not data.chat and not acts", "with `data.chat: false`", note=True),
    ] = Field(None, description="a Jinja file that replaces the tokenizer's template")
    trust_remote_code: Annotated[
        bool, Idle("path = tiny|tiny-vision", "with {path}, which is made here", note=True)
    ] = Field(False, description="run Python code that comes with the model")

    @property
    def divided(self) -> Parallel | None:
        """How GPUs divide the model among them; None: each holds all of it."""
        return self.parallel or (Parallel() if self.shard else None)

    @property
    def is_local(self) -> bool:
        """Whether `path` names no model of the hub."""
        return (
            self.path in ("tiny", "tiny-vision")
            or self.path.startswith(("stage:", *PATHS))
            or self.path.endswith(".gguf")
        )
