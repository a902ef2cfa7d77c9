"""Sections of training: optimizer, batches, and token weights in SFT. Does not import torch."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from posttrain.recipe.section import (
    ComponentSection,
    Count,
    Idle,
    ModelName,
    NoImages,
    Positive,
    Rate,
    Refused,
    Section,
    StepsOrShare,
    Unused,
)


class SftObjective(ComponentSection):
    """Token weights of the sum of negative log-probs."""

    kinds: ClassVar = ("token_weight",)
    use: str = "ce"
    divide_by: Annotated[
        Literal["tokens", "weights"] | None,
        Refused(
            "divisor = weights and logp in needs",
            "the weights of {use} change with the model: their sum is not known before a step",
            "write `divide_by: tokens`",
        ),
    ] = Field(
        None,
        description="what the loss sum of a step is divided by; default: weights for action_aware, else the "
        "number of trained tokens",
    )
    behavior_model: Annotated[
        ModelName | None,
        Idle("not behavior_logp in needs and not is_function", "with {use}"),
        NoImages("behavior_model", "reads text only"),
    ] = Field(
        None, description="pear: the model that wrote the data; its log-probs are computed once and stored in the run"
    )
    neftune: Annotated[float, Field(ge=0, le=1000)] = Field(
        0.0,
        description="noise on the input embeddings during training (NEFTune): alpha, 5 is usual; smaller with packing",
    )

    router_aux_loss: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None,
        description="mixtures of experts: coefficient of the router's load-balancing loss; default: the "
        "model's router_aux_loss_coef; 0 = none",
    )

    @property
    def divisor(self) -> str:
        """`tokens` or `weights`: what the loss sum is divided by."""
        return self.divide_by or ("weights" if self.use == "action_aware" else "tokens")


PAGED = "paged_adamw_8bit"
NOT_DECAYING = Idle("schedule != stable_decay", "with schedule {schedule}", "write `schedule: stable_decay`")
Decay = Annotated[float, Field(ge=0, le=100)]
LR = "learning rate, after the warm-up"


class Optim(Section):
    """Optimizer and learning rate. Warm-up is linear, counted in optimizer steps."""

    use: Annotated[
        Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "muon"],
        Refused(
            "use = muon and model.lora",
            "Muon orthogonalizes the update of a whole matrix, and an adapter trains two factors of it",
            "write `optim.use: adamw`",
        ),
        Refused(
            "use = muon and model.divided",
            "Muon needs a whole matrix for its update, and each GPU has a part of it",
            "write `optim.use: adamw`",
        ),
        Refused(
            "use = muon and model.half_weights", "Muon is untested with model.half_weights", "write `optim.use: adamw`"
        ),
        Refused(
            "use = adamw_8bit|paged_adamw_8bit and model.half_weights",
            "8-bit moments are untested with model.half_weights",
            "write `optim.use: adamw`",
        ),
        Refused(
            "use = adamw_8bit|paged_adamw_8bit and model.divided and not model.lora",
            "8-bit moments have one scale per block of 256 numbers, and a GPU's part may end inside a block",
            "write `optim.use: adamw`",
        ),
        Refused(
            "use = paged_adamw_8bit and model.device = cpu",
            "there is no GPU memory to page out",
            "write `optim.use: adamw_8bit`",
        ),
    ] = Field(
        "adamw",
        description="optimizer; 8-bit moments (bitsandbytes) need a quarter of the memory; paged: they are "
        "moved off a GPU that is full; muon: Muon for the layers' matrices, AdamW for everything "
        "else",
    )
    lr: Rate = Field(1e-6, description=LR)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default_factory=lambda: [0.9, 0.999],
        min_length=2,
        max_length=2,
        description="decay rates of Adam's two moments",
    )
    momentum: Annotated[
        float, Field(ge=0, lt=1), Idle("use != muon", "with {use}", "write `optim.use: muon`, or `betas`")
    ] = Field(0.95, description="muon: decay rate of the gradient average")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="added to the square root of the second moment")
    weight_decay: Decay = Field(0.0, description="each step shrinks a weight by lr times this share")
    schedule: Literal["constant", "linear", "cosine", "stable_decay"] = Field(
        "constant", description="stable_decay: constant, then decays to min_lr in the last decay_steps"
    )
    decay_steps: Annotated[Count | None, NOT_DECAYING] = Field(
        None, description="stable_decay: number of steps; default: a tenth of all steps"
    )
    min_lr: Annotated[Annotated[float, Field(ge=0, le=10)] | None, NOT_DECAYING] = Field(
        None, description="stable_decay: final learning rate; default: lr / 10"
    )
    warmup_steps: StepsOrShare = Field(
        0, description="steps over which lr rises from 0; below 1: fraction of all steps"
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="gradient clipping norm; null = no clipping"
    )
    offload: Annotated[
        bool,
        Refused(
            "offload and use != adamw",
            "it is for AdamW in float32",
            "write `optim.use: adamw`, or remove it (paged_adamw_8bit leaves a GPU that is full)",
        ),
        Refused("offload and model.lora", "an adapter's moments are few", "remove it"),
        Refused("offload and model.divided", "the moments are divided among the GPUs already", "remove one of them"),
    ] = Field(False, description="keep the moments, and the master weights of model.half_weights, in host memory")

    @property
    def in_eight_bits(self) -> bool:
        return self.use in ("adamw_8bit", "paged_adamw_8bit")


class SftOptim(Optim):
    """The optimizer, with a typical learning rate for supervised fine-tuning."""

    lr: Rate = Field(1e-5, description=LR)


class DpoOptim(Optim):
    """The optimizer, with a typical learning rate for preference optimization."""

    lr: Rate = Field(5e-7, description=LR)


class RewardOptim(Optim):
    """The optimizer, with a typical learning rate for a full reward model (LoRA: 1e-4)."""

    lr: Rate = Field(1e-5, description=LR)


class TrainBatch(Section):
    """Rows per optimizer step and per forward pass."""

    size: Positive = Field(32, description="rows (pairs) per optimizer step")
    micro_size: Positive | None = Field(None, description="rows per forward pass; default: size; must divide size")
    packing: Annotated[
        bool,
        Unused("dpo|reward_model", "only sft packs rows"),
        Idle(
            "micro_size = 1 or size = 1",
            "with one row per forward pass",
            "write a larger `batch.micro_size`",
            note=True,
        ),
    ] = Field(False, description="concatenate short rows into one sequence (sft)")

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.micro_size and self.size % self.micro_size:
            raise ValueError(f"micro_size {self.micro_size} does not divide size {self.size}")
        return self
