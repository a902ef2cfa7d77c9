"""The sections of `rl`: from the rewards of a step to its loss, one part after the other. No torch here."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain import registry
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
    use: Annotated[
        str,
        Refused(
            "acts and begins_answer in needs",
            "`{use}` begins the answer, and with `tools` or an `environment` it is divided into turns",
            "take one that writes into the prompt",
        ),
    ]
    solution: str = Field("solution", description="the data column of solutions, for kinds that show a part of one")

    def may(self, word: str) -> bool:
        """Whether the kind says so in its `needs`; a function of the user's may do everything."""
        return word in self.needs or ":" in self.use


ONE_SIZE = "remove one of them, or take a sampler with groups of one size"


class PromptSamplerSection(ComponentSection):
    """Which prompts a step draws, and how many rollouts each gets."""

    kinds: ClassVar = ("sampler",)
    use: Annotated[
        str,
        Refused(
            "use != uniform and rollout.engine = stored",
            "`{use}` follows what the policy makes of prompts, and nothing is sampled",
            "remove it, or sample (`rollout.engine: transformers` or `vllm`)",
        ),
        Refused(
            "row_loss in needs and loss.is_group_loss",
            "`{use}` reads the loss of each row, and loss `{loss.use}` has one value a group",
            "write a loss by token, such as `loss: clip`",
        ),
        Refused(
            "unequal in needs and prompt_variants",
            "`{use}` and prompt_variants `{prompt_variants.use}` both divide rollouts",
            ONE_SIZE,
        ),
        Refused(
            "unequal in needs and solutions.in_group",
            "`{use}` divides rollouts, and `solutions` adds to each group",
            ONE_SIZE,
        ),
    ] = "uniform"


class ReplaySection(ComponentSection):
    """Stored rollouts of earlier steps that a step trains on beside its fresh ones."""

    kinds: ClassVar = ("replay",)
    use: Annotated[
        str,
        Refused(
            "trains_apart in needs and not select",
            "`{use}` trains on rows that a `select` left out, and there is none",
            "write `select: [rorecomp]`",
        ),
    ]

    @property
    def replaces(self) -> bool:
        """Whether stored rows take the place of fresh ones; a class of the user's may do both."""
        return self.is_function or "replaces" in self.needs

    @property
    def adds_rows(self) -> bool:
        """Whether stored rows come on top."""
        return self.is_function or "adds_rows" in self.needs

    @property
    def brings_advantages_alone(self) -> bool:
        """Whether stored rows come on top, or have an update of their own, with nothing else of their step."""
        return self.adds_rows or "trains_apart" in self.needs

    limit: Positive = Field(2048, description="rollouts that are stored at most, of all prompts; the oldest go first")


class GroupReward(ComponentSection):
    """A reward of a whole group: it makes new rewards from those of the rows, their components and lengths."""

    kinds: ClassVar = ("group_reward",)


class Keep(ComponentSection):
    """Which groups or rows stay in the batch."""

    kinds: ClassVar = ("keep",)

    @property
    def by_reward(self) -> bool:
        """Whether it looks at rewards; a function of the user may."""
        return self.is_function or self.params.get("metric") == "reward"


class Advantage(ComponentSection):
    """How rewards become advantages: the normaliser."""

    kinds: ClassVar = ("advantage",)
    idle_arguments: ClassVar = {
        "group": dict.fromkeys(("eps", "ddof"), Idle("scale = none", "with scale none", note=True))
    }
    use: Annotated[
        str,
        Refused(
            "shared_reward in rollout.shape.needs and not trajectory_ids in needs and not is_function",
            "`{rollout.shape.use}` gives a rollout several rows and one reward, and `{use}` leaves rows without a "
            "reward "
            "at 0",
            "write `advantage: trajectory`",
        ),
        Refused(
            "goes_on in rollout.shape.needs and not finished in needs and not is_function",
            "`{rollout.shape.use}` has rollouts that have not ended, and `{use}` compares their rewards",
            "write `advantage: extended_gae`",
        ),
    ] = "group"


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
    use: Annotated[
        str,
        Refused(
            "replay.adds_rows", "stored rows bring their advantages alone, and not which tokens `{use}` has chosen"
        ),
    ]


class CorrectionSection(ComponentSection):
    """A weight or mask against the difference between the engine's and the trainer's log-probs."""

    kinds: ClassVar = ("correction",)


Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "local_token_mean", "trajectory_mean"
]


A_RATIO = "take a loss with a ratio, such as `loss: clip`"
ONE_ROW = Refused(
    "aggregation = trajectory_mean and not rollout.several_rows",
    "without `rollout.shape` or `rollout.workflow` every row is a rollout",
    "write seq_mean_token_mean",
)


class Loss(ComponentSection):
    """The policy loss and how its token matrix becomes one number."""

    kinds: ClassVar = ("loss", "group_loss")
    use: Annotated[
        str,
        Refused("replay and is_group_loss", "`{use}` does not weigh rollouts by the policy that sampled them", A_RATIO),
        Refused(
            "replay and use = nash_mp|oreo|oreo_step|direct_advantage|critic"
            " or replay and use = reinforce and not rollout_logp in corrections.needs",
            "`{use}` has no ratio to the policy that sampled a stored rollout",
            A_RATIO,
        ),
    ] = "clip"
    aggregation: Annotated[
        Aggregation,
        ONE_ROW,
        Refused(
            "is_group_loss and aggregation != seq_mean_token_mean and not has_kl and not regularisers",
            "does nothing: loss `{use}` has one value a group",
            "remove it",
        ),
    ] = Field("seq_mean_token_mean", description="how much tokens and rows weigh in the mean")
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

    @property
    def is_group_loss(self) -> bool:
        """Whether it has one value a group, and none by token."""
        return self.use in registry.index().get("group_loss", {})


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
        Refused(
            "has_kl and where = reward and use = full",
            "`full` has a gradient to every token of the vocabulary, and a reward has none",
            "write `kl.where: loss`",
        ),
        Refused(
            "has_kl and use = full and not reference",
            "`full` compares with the head of a model of its own",
            "write `kl.reference: TEACHER`, or k1_straight_through",
        ),
        Refused(
            "has_kl and use = full and model.offload_reference",
            "`full` reads the reference's head in every update, and `model.offload_reference` takes it away",
            "remove `model.offload_reference`",
        ),
    ] = "k3"
    coef: NonNegative = Field(0.0, description="what it is multiplied by; 0 = no reference model")
    where: Annotated[
        Literal["loss", "reward"],
        Refused(
            "where = reward and has_kl and own_credit in loss.needs",
            "it comes off the reward of an advantage, and loss `{loss.use}` reads none",
            "write `kl.where: loss`",
        ),
        Refused(
            "where = reward and has_kl and components in advantage.needs and not own_credit in loss.needs",
            "it comes off the sum of the rewards, and advantage `{advantage.use}` reads them one by one",
            "write `kl.where: loss`",
        ),
    ] = Field("loss", description="added to the loss, or taken off the reward")
    reference: Annotated[
        ModelName | None,
        Refused(
            "reference and critic.path",
            "a critic that was trained apart reads the starting policy",
            "remove one of the two",
        ),
        Refused("reference and model.divided", "a reference of its own is not divided among GPUs", "remove it"),
        Idle("not has_kl", "while kl.coef is 0", "write `kl.coef`, or remove it"),
    ] = Field(
        None, description="a model to measure against, such as a teacher; default: the policy that training starts from"
    )
    reset_at: Annotated[
        Positive | None,
        Refused("reset_at and reference", "the reference is another model (`kl.reference`)", "remove one of the two"),
        Refused("reset_at and critic.path", "a critic that was trained apart reads the first reference", "remove it"),
        Refused(
            "reset_at and model.divided", "the reference of a divided model is divided too", "remove model.parallel"
        ),
        Idle("not has_kl", "while kl.coef is 0", "write `kl.coef`, or remove it"),
    ] = Field(None, description="step, from 1, from which on the reference is the policy as that step began")


class Regulariser(ComponentSection):
    """A term added to the loss."""

    kinds: ClassVar = ("regulariser",)
    coef: float = Field(1.0, description="it is multiplied by this")
    aggregation: Annotated[Aggregation | None, ONE_ROW] = Field(None, description="default: that of the loss")


class Controller(ComponentSection):
    """What drives one number of the recipe over the run."""

    kinds: ClassVar = ("controller",)


class Critic(Section):
    """The value head: a linear layer on the policy's last hidden states, which it does not change."""

    lr: Annotated[Rate, Idle("path", "with `path`: such a critic is not trained")] = Field(
        1e-5, description="learning rate of the value head"
    )
    twin: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="two heads instead of one, whose value is their soft minimum at this temperature, pessimistic "
        "where they disagree (SAFE takes 0.3); null = one head",
    )
    path: CriticName | None = Field(
        None,
        description="a run whose value head was trained before (`loss: critic`), on the model that this run starts "
        "from: it stays as it is, and reads the reference's hidden states",
    )


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
    in_group: Annotated[
        bool,
        Refused(
            "in_group and acts", "a solution is one turn, and with `tools` or an `environment` rollouts have several"
        ),
        Refused("in_group and opponent", "the opponent's answers are compared with sampled ones"),
        Refused(
            "in_group and prompt_variants",
            "`prompt_variants` decide what a group's prompt is, and the solution is that of the plain one",
        ),
    ] = Field(
        False,
        description="each group gets the prompt's solution as one more row, scored by the same rewards and trained on "
        "(`rl_plus`); group_size counts what is sampled",
    )
    sft: Annotated[
        UnsolvedSft | None,
        Refused(
            "sft and rollout.max_gen_batches > 1",
            "groups that failed are replaced before the step, and none is collected",
            "write `rollout.max_gen_batches: 1`",
        ),
    ] = Field(None, description="supervised steps on the solutions of unsolved prompts (`relift`)")


class RlBatch(Section):
    """How a step's rollouts are divided for the update."""

    minibatches: Annotated[
        Positive,
        Refused(
            "loss.is_group_loss and minibatches > rollout.prompts_per_step",
            "loss `{loss.use}` needs whole groups in a minibatch, and a step has {rollout.prompts_per_step}",
            "write {rollout.prompts_per_step} or fewer",
        ),
    ] = Field(1, description="optimiser updates an epoch")
    epochs: Positive = Field(1, description="passes over the rollouts")
    micro_tokens: Positive = Field(16384, description="tokens (prompt + completion) of one forward pass at most")
