"""The recipe of `rl`: its sections in the order of a step, and queries about its components. Does not import torch."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from posttrain.errors import count_noun
from posttrain.recipe.base_stage import ToolUseStage, Tracked
from posttrain.recipe.eval_sections import RlEval
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.recipe.rl_sections import (
    Advantage,
    AdvantageTransform,
    Controller,
    CorrectionSection,
    CreditAssignment,
    Critic,
    Factor,
    GroupReward,
    Keep,
    Kl,
    Loss,
    Opponent,
    PromptSamplerSection,
    PromptVariants,
    Regulariser,
    ReplaySection,
    RlBatch,
    Select,
    Solutions,
)
from posttrain.recipe.rollout_sections import Rollout
from posttrain.recipe.section import ComponentSection, Idle, NoImages, Refused
from posttrain.recipe.sections import Data, Model
from posttrain.recipe.training_sections import Optim

# Keys of the parts of the objective, in the order in which a step calls them. Those before the loss see whole steps.
BEFORE_THE_LOSS = (
    "group_rewards",
    "keep",
    "advantage",
    "factors",
    "advantage_transforms",
    "credit_assignment",
    "select",
)
OBJECTIVE = (*BEFORE_THE_LOSS, "corrections", "loss", "kl", "regularisers", "controllers")
# Log-probs computed on rows with other tokens than the rollouts.
WITH_ALL_TOKENS = {"answer_logp", "expert_logp", "masked_logp", "perturbed_logp"}
BY_REFERENCE = ("ref_logp", "ref_hidden", "tempered_ref_logp")  # what components read from the reference model
ROLLOUT_NUMBERS = ("rollout.max_new_tokens", "rollout.group_size", "rollout.temperature", "rollout.max_turns")
# Losses without a ratio to the old policy.
WITHOUT_RATIO = {"reinforce", "nash_mp", "oreo", "oreo_step", "direct_advantage", "critic"}
TAGS = ("one of keep", "list of keep")  # pydantic adds these tags to the locations of errors
OneOrMany = Annotated[
    Annotated[Keep, Tag(TAGS[0])] | Annotated[list[Keep], Tag(TAGS[1])],
    Discriminator(lambda value: TAGS[isinstance(value, list)]),
]


def unread_credit(key: str, *, of_channels: bool = True) -> tuple[Refused, ...]:
    """Return the marks of a key that changes advantages, for losses that do not read these advantages."""
    right = "remove it, or write `loss: clip`"
    own, what = f"{key} and own_credit in loss.needs", "changes advantages, and loss `{loss.use}` reads"
    found = (Refused(own, f"{what} rewards or correctness", right),)
    channels = f"{key} and loss.use = clip_channels"
    return (*found, Refused(channels, f"{what} each channel separately", right)) if of_channels else found


class RlRecipe(ToolUseStage, Tracked):
    """Reinforcement learning with verifiable rewards."""

    verb: ClassVar = "rl"
    presets: ClassVar = True
    stage: Literal["rl"] = "rl"
    algorithm: str | None = Field(None, description="name of a preset; see `posttrain methods list`")
    model: Model
    data: Data
    sampler: Annotated[
        PromptSamplerSection,
        NoImages("values in sampler.needs", "reads the policy's states of prompts without their images"),
    ] = Field(
        default_factory=lambda: PromptSamplerSection.model_validate({}),
        description="which prompts a step uses, and how many rollouts each gets",
    )
    rollout: Rollout = Field(default_factory=Rollout)
    prompt_variants: Annotated[
        PromptVariants | None,
        Refused("prompt_variants and rollout.engine = stored", "rollout.engine stored samples nothing"),
        Refused("prompt_variants and opponent", "the opponent answers the data's own prompts"),
    ] = Field(None, description="modified prompts to sample from, and which part of them the loss sees")
    rewards: Annotated[
        list[Reward],
        Refused(  # distillation from a teacher needs no reward
            "not rewards.weight and not kl.reference",
            "every weight is 0: there is nothing to learn from",
            "give one a weight",
        ),
    ] = Field(min_length=1)
    scoring: Scoring = Field(default_factory=Scoring)
    replay: Annotated[
        ReplaySection | None,
        Refused(
            "replay and rollout.engine = stored",
            "rollout.engine stored trains on given completions already, whose sampler is unknown",
        ),
        Refused(
            "replay and prompt_variants", "a stored rollout answers the data's prompt, and `prompt_variants` change it"
        ),
        Refused("replay and solutions.in_group", "each group already contains a given solution (`solutions.in_group`)"),
        Refused(
            "replay and rollout.several_rows",
            "a rollout of several rows (`rollout.shape`, `rollout.workflow`) is stored row by row, and they belong "
            "together",
        ),
        Refused(
            "trains_apart in replay.needs and not select",
            "`{replay.use}` trains on rows that a `select` left out, and there is none",
            "write `select: [rorecomp]`",
        ),
        Refused("replay and opponent", "a stored rollout was compared with an opponent of an earlier step"),
    ] = Field(None, description="stored rollouts of earlier steps to train on in addition to fresh ones")
    group_rewards: Annotated[
        list[GroupReward],
        Refused(
            "group_rewards and own_credit in loss.needs and correct in loss.needs and not keeps.by_reward and not "
            "regularisers and not select",
            "change rewards, and loss `{loss.use}` reads correctness alone",
            "remove them",
        ),
    ] = Field(default_factory=list, description="rewards of whole groups, in order, applied before `keep`")
    keep: OneOrMany | None = Field(None, description="one filter, or a list of filters that must all hold")
    advantage: Annotated[
        Advantage,
        Refused(
            "own_credit in loss.needs and advantage.use != group|reward and not regularisers and not select",
            "does nothing: loss `{loss.use}` reads rewards or correctness",
            "remove it",
        ),
    ] = Field(default_factory=lambda: Advantage.model_validate({}))
    factors: Annotated[list[Factor], *unread_credit("factors", of_channels=False)] = Field(
        default_factory=list, description="factors on the advantages of a row"
    )
    advantage_transforms: Annotated[list[AdvantageTransform], *unread_credit("advantage_transforms")] = Field(
        default_factory=list, description="transforms of the advantages, applied after the factors"
    )
    credit_assignment: Annotated[CreditAssignment | None, *unread_credit("credit_assignment")] = None
    select: list[Select] = Field(default_factory=list, description="tokens to train on; all selections must hold")
    corrections: Annotated[
        list[CorrectionSection],
        Refused(
            "corrections and loss.is_group_loss",
            "loss `{loss.use}` has one value per group: there are no tokens to weight",
            "remove them",
        ),
    ] = Field(default_factory=list, description="weights and masks on the policy-gradient term")
    loss: Loss = Field(default_factory=lambda: Loss.model_validate({}))
    kl: Annotated[
        Kl, Refused("kl.lacks_coef and not controllers.kl.coef", "does nothing while its coef is 0", "write `kl.coef`")
    ] = Field(default_factory=lambda: Kl.model_validate({}))
    regularisers: list[Regulariser] = Field(default_factory=list, description="terms added to the loss")
    controllers: dict[str, Controller] = Field(
        default_factory=dict,
        description="key of a number (`kl.coef`, `advantage_transforms.0.alpha`): what changes it during the run",
    )
    critic: Annotated[Critic, Idle("not reads_critic", ": no component reads a critic's values")] = Field(
        default_factory=Critic
    )
    solutions: Annotated[
        Solutions | None,
        Refused(
            "solutions and not solutions.in_group and not solutions.sft and not external in reads and not "
            "expert_logp in reads and not has_function",
            "does nothing: no component reads given solutions",
            "write `in_group: true` or `sft: {}`, or take a component that reads them, such as regulariser calibrl",
        ),
        Refused("solutions and rollout.engine = stored", "rollout.engine stored trains on given completions already"),
    ] = Field(None, description="given solutions, used in addition to sampled rollouts")
    opponent: Annotated[
        Opponent | None,
        Refused(
            "opponent and not opponent_rewards in reads and not opponent_logp in reads and not has_function",
            "does nothing: no component reads it",
            "write `group_rewards: [versus_opponent]`, or remove it",
        ),
        Refused(
            "opponent and rollout.engine = stored", "has no effect if no rollout is sampled", "remove it, or sample"
        ),
        Refused(
            "opponent and rounds in sampler.needs",
            "`{sampler.use}` samples a step in several rounds, and the opponent answers once",
        ),
    ] = Field(None, description="opponent of the policy (`versus_opponent`, `nash_mp`)")
    batch: RlBatch = Field(default_factory=RlBatch)
    optim: Optim = Field(default_factory=Optim)
    eval: RlEval | None = Field(None, description="evaluation during training")

    @property
    def keeps(self) -> list[Keep]:
        """The filters of `keep` as a list."""
        return self.keep if isinstance(self.keep, list) else [self.keep] if self.keep else []

    @property
    def has_kl(self) -> bool:
        """Whether the recipe has a KL term: its coefficient is not 0, or a controller drives it."""
        return self.kl.coef != 0 or "kl.coef" in self.controllers

    @property
    def aggregations(self) -> set[str]:
        """Aggregations of the loss and its regularisers."""
        return {self.loss.aggregation, *(term.aggregation or self.loss.aggregation for term in self.regularisers)}

    @property
    def reads(self) -> set[str]:
        """Needs of all active components."""
        return {need for _, section in self.active_components() for need in section.needs}

    @property
    def has_function(self) -> bool:
        """Whether a component is a user's function, which may read any field."""
        return any(section.is_function for _, section in self.components())

    @property
    def weighs_behavior(self) -> bool:
        """Whether a component may read the log-probs of the sampling policy (a user's function may)."""
        return "rollout_logp" in self.reads or any(section.is_function for _, section in self.active_components())

    @property
    def reads_critic(self) -> bool:
        """Whether a component may read a critic's values (a user's function may)."""
        needs = {need for _, section in self.components() for need in section.needs}
        return self.has_function or bool(needs & {"values", "new_values", "frozen_critic"})

    @property
    def has_reference(self) -> bool:
        """Whether anything may read the reference model: a component, a frozen critic, or a user's function."""
        read = self.kl.reference or self.critic.path or self.has_function
        return bool(read) or bool(self.reads & {*BY_REFERENCE})

    @property
    def rollouts_are_groups(self) -> bool:
        """Whether the rows of each rollout form a group of their own."""
        return self.rollout.shape is not None and self.rollout.shape.may("own_group")

    @property
    def compares_with_sampler(self) -> bool:
        """Whether the loss itself reads the log-probs of the sampling policy in addition to those at the start of the
        step."""
        reads_sampler = not self.loss.is_group_loss and "rollout_logp" in self.loss.needs
        return reads_sampler or self.loss.use in WITHOUT_RATIO

    def controllable_numbers(self) -> dict[str, float]:
        """Return key -> value of each number that a controller may drive: numbers of components, and
        ROLLOUT_NUMBERS."""
        numbers = {key: getattr(self.rollout, key.partition(".")[2]) for key in ROLLOUT_NUMBERS}
        for key, section in self.components():
            if not key.startswith("controllers."):
                own = {"coef": section.coef} if hasattr(section, "coef") else {}
                numbers |= {f"{key}.{name}": value for name, value in {**section.params, **own}.items()}
        return {key: v for key, v in numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}

    def active_components(self) -> list[tuple[str, ComponentSection]]:
        """Return the components that have an effect: all except a KL whose coefficient stays 0."""
        return [(key, section) for key, section in self.components() if key != "kl" or self.has_kl]

    def components(self) -> list[tuple[str, ComponentSection]]:
        """Return (key, section) of every component of the objective, in the order in which a step calls them."""
        sections: list[tuple[str, ComponentSection]] = []
        for key in OBJECTIVE:
            value = getattr(self, key)
            if isinstance(value, list):
                sections += [(f"{key}.{number}", section) for number, section in enumerate(value)]
            elif isinstance(value, dict):
                sections += [(f"{key}.{name}", section) for name, section in value.items()]
            elif value is not None:
                sections.append((key, value))
        return sections

    def every_component(self) -> list[tuple[str, ComponentSection]]:
        """Return `components` and the components that a step calls before rewards are known."""
        early = {
            "sampler": self.sampler,
            "prompt_variants": self.prompt_variants,
            "rollout.shape": self.rollout.shape,
            "rollout.workflow": self.rollout.workflow,
            "replay": self.replay,
        }
        return [*((key, section) for key, section in early.items() if section), *self.components()]

    @model_validator(mode="after")
    def _minibatches_have_rows(self) -> Self:
        rows = self.rollout.prompts_per_step * self.rollout.group_size
        if self.batch.minibatches > rows:
            raise ValueError(
                f"batch.minibatches {self.batch.minibatches} exceeds the {count_noun(rows, 'rollout')} of a step"
            )
        return self
