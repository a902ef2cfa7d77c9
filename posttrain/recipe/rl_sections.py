"""The sections of `rl`: from the rewards of a step to its loss, one part after the other. No torch here."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from posttrain.recipe.section import (
    ComponentSection,
    CriticName,
    Idle,
    ModelName,
    NonNegative,
    Positive,
    Rate,
    Refused,
    Section,
)


class PromptVariants(ComponentSection):
    """What rollouts are sampled from in place of the data's prompts: hints, templates, instructions."""

    kinds: ClassVar = ("prompt_variants",)
    solution: str = Field("solution", description="the data column of solutions, for kinds that show a part of one")

    def may(self, word: str) -> bool:
        """Whether the kind says so in its `needs`; a function of the user's may do everything."""
        return word in self.needs or ":" in self.use


class PromptSamplerSection(ComponentSection):
    """Which prompts a step draws, and how many rollouts each gets."""

    kinds: ClassVar = ("sampler",)
    use: str = "uniform"


class ReplaySection(ComponentSection):
    """Stored rollouts of earlier steps that a step trains on beside its fresh ones."""

    kinds: ClassVar = ("replay",)
    limit: Positive = Field(2048, description="rollouts that are stored at most, of all prompts; the oldest go first")


class GroupReward(ComponentSection):
    """A reward of a whole group: it makes new rewards from those of the rows, their components and lengths."""

    kinds: ClassVar = ("group_reward",)


class Keep(ComponentSection):
    """Which groups or rows stay in the batch."""

    kinds: ClassVar = ("keep",)


class Advantage(ComponentSection):
    """How rewards become advantages: the normaliser."""

    kinds: ClassVar = ("advantage",)
    idle_arguments: ClassVar = {
        "group": dict.fromkeys(("eps", "ddof"), Idle("scale = none", "with scale none", note=True))
    }
    use: str = "group"


class Factor(ComponentSection):
    """A factor on the advantages of each row."""

    kinds: ClassVar = ("factor",)


class AdvantageTransform(ComponentSection):
    """New advantages from those that there are."""

    kinds: ClassVar = ("advantage_transform",)


class CreditAssignment(ComponentSection):
    """How a row's advantage is divided among its turns or tokens."""

    kinds: ClassVar = ("credit_assignment",)


class Select(ComponentSection):
    """Which rows and tokens are trained on."""

    kinds: ClassVar = ("select",)


class CorrectionSection(ComponentSection):
    """A weight or mask against the difference between the engine's and the trainer's log-probs."""

    kinds: ClassVar = ("correction",)


Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "local_token_mean", "trajectory_mean"
]


class Loss(ComponentSection):
    """The policy loss and how its token matrix becomes one number."""

    kinds: ClassVar = ("loss", "group_loss")
    use: str = "clip"
    aggregation: Aggregation = Field("seq_mean_token_mean", description="how much tokens and rows weigh in the mean")
    norm_len: Annotated[
        Positive | None,
        Idle("not fixed in aggregations", "with aggregation {aggregation}", "write `aggregation: fixed`"),
    ] = Field(None, description="constant length of `fixed`; default: max_new_tokens")
    count_empty_rows: Annotated[
        bool,
        Idle(
            "aggregation = local_token_mean",
            "with aggregation local_token_mean, whose micro-batches weigh by all of their rows",
        ),
        Idle("aggregations = token_mean", "with aggregation token_mean, which counts no rows"),
    ] = Field(True, description="rows without trained tokens stay in the row count")
    mask_truncated: Annotated[
        bool, Idle("rollout.engine = stored", "with rollout.engine stored: no completion was cut", note=True)
    ] = Field(False, description="completions that hit the limit carry no loss")


class Kl(ComponentSection):
    """Distance to the reference policy. coef 0 = no reference model at all."""

    kinds: ClassVar = ("kl",)
    use: Annotated[
        str,
        Refused(
            "has_kl and where = loss and use = k1",
            "k1 in the loss has gradient 1 for every token, whatever the reference says",
            "use k2 or k3",
        ),
        Refused(
            "has_kl and where = reward and use = k3_is|k3_straight_through",
            "{use} differs from k3 only in its gradient, and a reward has none",
            "use k1 or k3",
        ),
        Refused(
            "has_kl and where = reward and use = k1_straight_through",
            "{use} differs from k1 only in its gradient, and a reward has none",
            "use k1 or k3",
        ),
    ] = "k3"
    coef: NonNegative = Field(0.0, description="what it is multiplied by; 0 = no reference model")
    where: Literal["loss", "reward"] = Field("loss", description="added to the loss, or taken off the reward")
    reference: Annotated[
        ModelName | None,
        Refused(
            "reference and critic.path",
            "a critic that was trained apart reads the starting policy",
            "remove one of the two",
        ),
        Refused("reference and model.shard", "a reference of its own is not divided among GPUs", "remove model.shard"),
        Idle("not has_kl", "while kl.coef is 0", "write `kl.coef`, or remove it"),
    ] = Field(
        None, description="a model to measure against, such as a teacher; default: the policy that training starts from"
    )


class Regulariser(ComponentSection):
    """A term added to the loss."""

    kinds: ClassVar = ("regulariser",)
    coef: float = Field(1.0, description="it is multiplied by this")
    aggregation: Aggregation | None = Field(None, description="default: that of the loss")


class Controller(ComponentSection):
    """What drives one number of the recipe over the run."""

    kinds: ClassVar = ("controller",)


class Critic(Section):
    """The value head: a linear layer on the policy's last hidden states, which it does not change."""

    lr: Rate = Field(1e-5, description="learning rate of the value head")
    path: CriticName | None = Field(
        None,
        description="a run whose value head was trained before (`loss: critic`), on the model that this run starts "
        "from: it stays as it is, and reads the reference's hidden states",
    )

    @model_validator(mode="after")
    def _stays(self) -> Critic:
        if self.path and "lr" in self.model_fields_set:
            raise ValueError("a critic with a `path` is not trained: remove `lr`")
        return self


class Opponent(Section):
    """A slow copy of the policy to play against: its answers to a step's prompts are what the policy's must beat."""

    ema: Annotated[float, Field(gt=0, le=1)] = Field(
        0.01, description="share of the way to the policy that it goes after each step; 1 = the policy itself"
    )
    samples: Positive = Field(1, description="its answers to a prompt")


class UnsolvedSft(Section):
    """Supervised steps on the solutions of prompts that no rollout has solved, between those of RL."""

    size: Positive = Field(128, description="prompts that begin a supervised epoch, once so many are collected")
    minibatch: Positive = Field(128, description="rows of one supervised update")
    lr: Rate = Field(1e-6, description="learning rate of these updates, which have an optimiser of their own")
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(1.0, description="of their gradients; null = never cut")
    entropy_coef: NonNegative = Field(0.001, description="their loss is -logp less so much of the policy's entropy")
    fail_value: float = Field(0.0, description="a prompt is unsolved if all of its rewards are exactly this")
    dedupe: bool = Field(False, description="a prompt that fails again takes the place of its older entry")


class Solutions(Section):
    """Given solutions of the prompts, beside the rollouts that the policy samples."""

    column: str = Field("solution", description="the data column of solutions; rows may lack one")
    in_group: bool = Field(
        False,
        description="each group gets the prompt's solution as one more row, scored by the same rewards and trained on "
        "(`rl_plus`); group_size counts what is sampled",
    )
    sft: UnsolvedSft | None = Field(
        None, description="supervised steps on the solutions of unsolved prompts (`relift`)"
    )


class RlBatch(Section):
    """How a step's rollouts are divided for the update."""

    minibatches: Positive = Field(1, description="optimiser updates an epoch")
    epochs: Positive = Field(1, description="passes over the rollouts")
    micro_tokens: Positive = Field(16384, description="tokens (prompt + completion) of one forward pass at most")
