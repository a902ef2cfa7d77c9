"""Sections of `rl`, from the rewards of a step to its loss, in order. Does not import torch."""

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
    """Modified prompts from which rollouts are sampled: hints, templates, instructions."""

    kinds: ClassVar = ("prompt_variants",)
    use: Annotated[
        str,
        Refused(
            "acts and begins_answer in needs",
            "`{use}` writes the start of the answer, which `tools` or an `environment` divide into turns",
            "choose one that writes into the prompt",
        ),
    ]
    solution: str = Field("solution", description="data column of solutions, for kinds that show a part of one")

    def may(self, word: str) -> bool:
        """Return whether the kind declares `word` in its `needs`; a user's function may do anything."""
        return word in self.needs or ":" in self.use


ONE_SIZE = "remove one of them, or use a sampler with groups of equal size"


class PromptSamplerSection(ComponentSection):
    """Sampler of prompts: which prompts a step uses, and how many rollouts each gets."""

    kinds: ClassVar = ("sampler",)
    use: Annotated[
        str,
        Refused(
            "use != uniform and rollout.engine = stored",
            "`{use}` adapts to the policy's rollouts, and nothing is sampled",
            "remove it, or sample (`rollout.engine: transformers` or `vllm`)",
        ),
        Refused(
            "row_loss in needs and loss.is_group_loss",
            "`{use}` reads the loss of each row, and loss `{loss.use}` has one value per group",
            "write a loss by token, such as `loss: clip`",
        ),
        Refused(
            "unequal in needs and prompt_variants",
            "`{use}` and prompt_variants `{prompt_variants.use}` both assign rollouts to prompts",
            ONE_SIZE,
        ),
        Refused(
            "unequal in needs and solutions.in_group",
            "`{use}` assigns rollouts to prompts, and `solutions` adds to each group",
            ONE_SIZE,
        ),
    ] = "uniform"


class ReplaySection(ComponentSection):
    """Stored rollouts of earlier steps that a step trains on in addition to fresh ones."""

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
        """Whether stored rows replace fresh ones; true for a user's class, which may do so."""
        return self.is_function or "replaces" in self.needs

    @property
    def adds_rows(self) -> bool:
        """Whether stored rows are added to the fresh ones; true for a user's class, which may do so."""
        return self.is_function or "adds_rows" in self.needs

    @property
    def brings_advantages_alone(self) -> bool:
        """Whether stored rows carry only their advantages: they are added to the batch, or trained in an update of
        their own."""
        return self.adds_rows or "trains_apart" in self.needs

    limit: Positive = Field(
        2048, description="maximum number of stored rollouts over all prompts; the oldest are dropped first"
    )


class GroupReward(ComponentSection):
    """A reward of a whole group: computes new rewards from the rows' rewards, components and lengths."""

    kinds: ClassVar = ("group_reward",)


class Keep(ComponentSection):
    """A filter for groups or rows of the batch."""

    kinds: ClassVar = ("keep",)

    @property
    def by_reward(self) -> bool:
        """Whether the filter reads rewards; true for a user's function, which may do so."""
        return self.is_function or self.params.get("metric") == "reward"


class Advantage(ComponentSection):
    """The advantage estimator, which turns rewards into advantages."""

    kinds: ClassVar = ("advantage",)
    use: Annotated[
        str,
        Refused(
            "shared_reward in rollout.shape.needs and not trajectory_ids in needs and not is_function",
            "`{rollout.shape.use}` gives a rollout several rows and one reward, and `{use}` gives rows without a "
            "reward an advantage of 0",
            "write `advantage: trajectory`",
        ),
        Refused(
            "goes_on in rollout.shape.needs and not finished in needs and not is_function",
            "`{rollout.shape.use}` has unfinished rollouts, and `{use}` compares their rewards",
            "write `advantage: extended_gae`",
        ),
    ] = "group"


class Factor(ComponentSection):
    """A factor on the advantages of each row."""

    kinds: ClassVar = ("factor",)


class AdvantageTransform(ComponentSection):
    """A transform of the advantages."""

    kinds: ClassVar = ("advantage_transform",)


class CreditAssignment(ComponentSection):
    """How a row's advantage is distributed over its turns or tokens."""

    kinds: ClassVar = ("credit_assignment",)


class Select(ComponentSection):
    """Selection of the rows and tokens that are trained on."""

    kinds: ClassVar = ("select",)
    use: Annotated[
        str,
        Refused(
            "replay.adds_rows", "stored rows carry only their advantages, not the tokens that `{use}` has selected"
        ),
    ]


class CorrectionSection(ComponentSection):
    """A weight or mask that corrects for the difference between the engine's and the trainer's log-probs."""

    kinds: ClassVar = ("correction",)


Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "local_token_mean", "trajectory_mean"
]


A_RATIO = "use a loss with a ratio, such as `loss: clip`"
ONE_ROW = Refused(
    "aggregation = trajectory_mean and not rollout.several_rows",
    "without `rollout.shape` or `rollout.workflow` every row is a rollout",
    "write seq_mean_token_mean",
)


class Loss(ComponentSection):
    """The policy loss, and how its per-token matrix is aggregated."""

    kinds: ClassVar = ("loss", "group_loss")
    use: Annotated[
        str,
        Refused(
            "replay and is_group_loss", "`{use}` does not weight rollouts by the policy that sampled them", A_RATIO
        ),
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
            "does nothing: loss `{use}` has one value per group",
            "remove it",
        ),
    ] = Field("seq_mean_token_mean", description="how tokens and rows are weighted in the mean")
    norm_len: Annotated[
        Positive | None,
        Idle("not fixed in aggregations", "with aggregation {aggregation}", "write `aggregation: fixed`"),
    ] = Field(None, description="constant length that `fixed` divides by; default: max_new_tokens")
    count_empty_rows: Annotated[
        bool,
        Idle(
            "aggregation = local_token_mean",
            "with aggregation local_token_mean, whose micro-batches are weighted by all of their rows",
        ),
        Idle("aggregations = token_mean", "with aggregation token_mean, which counts no rows"),
    ] = Field(True, description="count rows without trained tokens in the number of rows")
    mask_truncated: Annotated[
        bool, Idle("rollout.engine = stored", "with rollout.engine stored: no completion was cut", note=True)
    ] = Field(False, description="mask the loss of completions that reach the length limit")

    @property
    def is_group_loss(self) -> bool:
        """Whether the loss has one value per group instead of values by token."""
        return self.use in registry.load_index().get("group_loss", {})


class Kl(ComponentSection):
    """KL to the reference policy. With coef 0 no reference model is loaded."""

    kinds: ClassVar = ("kl",)
    use: Annotated[
        str,
        Refused(
            "has_kl and where = loss and use = k1",
            "k1 in the loss has gradient 1 for every token, independent of the reference",
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
            "`full` compares with the head of a separate model",
            "write `kl.reference: TEACHER`, or k1_straight_through",
        ),
        Refused(
            "has_kl and use = full and model.offload_reference",
            "`full` reads the reference's head in every update, which `model.offload_reference` moves to the host",
            "remove `model.offload_reference`",
        ),
    ] = "k3"
    coef: NonNegative = Field(0.0, description="coefficient of the KL; 0 = no reference model")
    where: Annotated[
        Literal["loss", "reward"],
        Refused(
            "where = reward and has_kl and own_credit in loss.needs",
            "it is subtracted from rewards, and loss `{loss.use}` reads no advantages",
            "write `kl.where: loss`",
        ),
        Refused(
            "where = reward and has_kl and components in advantage.needs and not own_credit in loss.needs",
            "it is subtracted from the total reward, and advantage `{advantage.use}` reads single rewards",
            "write `kl.where: loss`",
        ),
    ] = Field("loss", description="add the KL to the loss, or subtract it from the reward")
    reference: Annotated[
        ModelName | None,
        Refused(
            "reference and critic.path",
            "a critic that was trained separately reads the starting policy",
            "remove one of the two",
        ),
        Refused("reference and model.divided", "a separate reference model cannot be divided among GPUs", "remove it"),
        Idle("not has_kl", "while kl.coef is 0", "write `kl.coef`, or remove it"),
    ] = Field(
        None, description="another model as reference, such as a teacher; default: the policy at the start of training"
    )
    reset_at: Annotated[
        Positive | None,
        Refused("reset_at and reference", "the reference is another model (`kl.reference`)", "remove one of the two"),
        Refused(
            "reset_at and critic.path", "a critic that was trained separately reads the first reference", "remove it"
        ),
        Refused(
            "reset_at and model.divided", "the reference of a divided model is divided too", "remove model.parallel"
        ),
        Idle("not has_kl", "while kl.coef is 0", "write `kl.coef`, or remove it"),
    ] = Field(None, description="step, from 1, at whose start the reference is replaced by the current policy")

    @property
    def lacks_coef(self) -> bool:
        """Whether keys are written, but no coefficient."""
        return bool(self.model_fields_set) and "coef" not in self.model_fields_set


class Regulariser(ComponentSection):
    """A term added to the loss."""

    kinds: ClassVar = ("regulariser",)
    coef: float = Field(1.0, description="coefficient of the term")
    aggregation: Annotated[Aggregation | None, ONE_ROW] = Field(
        None, description="default: the aggregation of the loss"
    )


class Controller(ComponentSection):
    """A schedule or feedback rule that changes one number of the recipe during the run."""

    kinds: ClassVar = ("controller",)


class Critic(Section):
    """The value head: a linear layer on the policy's last hidden states; no gradient flows into the policy."""

    lr: Annotated[Rate, Idle("path", "with `path`: such a critic is not trained")] = Field(
        1e-5, description="learning rate of the value head"
    )
    twin: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="two heads instead of one; the value is their soft minimum at this temperature, "
        "pessimistic if they disagree (SAFE uses 0.3); null = one head",
    )
    path: CriticName | None = Field(
        None,
        description="run with a value head trained earlier (`loss: critic`) on the model that this run starts "
        "from: it stays frozen and reads the reference's hidden states",
    )


class Opponent(Section):
    """A slow copy of the policy to play against: the policy's answers are compared with its answers to the same
    prompts."""

    ema: Annotated[float, Field(gt=0, le=1)] = Field(
        0.01, description="fraction by which it moves toward the policy after each step; 1 = the policy itself"
    )
    samples: Positive = Field(1, description="answers of the opponent per prompt")


class UnsolvedSft(Section):
    """Supervised steps, between RL steps, on the solutions of prompts that no rollout has solved."""

    size: Positive = Field(128, description="number of collected prompts at which a supervised epoch starts")
    minibatch: Positive = Field(128, description="rows per supervised update")
    lr: Rate = Field(1e-6, description="learning rate of these updates, which use their own optimizer")
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="gradient clipping norm of these updates; null = no clipping"
    )
    entropy_coef: NonNegative = Field(0.001, description="the loss is -logp minus this times the policy's entropy")
    fail_value: float = Field(0.0, description="a prompt is unsolved if all of its rewards equal this")
    dedupe: bool = Field(False, description="a prompt that fails again replaces its older entry")


class Solutions(Section):
    """Given solutions of the prompts, used in addition to sampled rollouts."""

    column: str = Field("solution", description="data column of solutions; rows may lack one")
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
        description="add the prompt's solution to each group as one more row, scored by the same rewards and "
        "trained on (`rl_plus`); group_size counts sampled rows only",
    )
    sft: Annotated[
        UnsolvedSft | None,
        Refused(
            "sft and rollout.max_gen_batches > 1",
            "failed groups are replaced before the step, and none is collected",
            "write `rollout.max_gen_batches: 1`",
        ),
    ] = Field(None, description="supervised steps on the solutions of unsolved prompts (`relift`)")


class RlBatch(Section):
    """Division of a step's rollouts into updates and forward passes."""

    minibatches: Annotated[
        Positive,
        Refused(
            "loss.is_group_loss and minibatches > rollout.prompts_per_step",
            "loss `{loss.use}` needs whole groups in a minibatch, and a step has {rollout.prompts_per_step}",
            "write {rollout.prompts_per_step} or fewer",
        ),
    ] = Field(1, description="optimizer updates per epoch")
    epochs: Positive = Field(1, description="passes over the rollouts of a step")
    micro_tokens: Positive = Field(
        16384, description="maximum number of tokens (prompt + completion) in one forward pass"
    )
