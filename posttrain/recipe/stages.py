"""The recipe of each stage: which sections it takes. A key that a stage does not use is an error."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag, model_validator

from posttrain.errors import count_noun
from posttrain.recipe import merging
from posttrain.recipe.builder_keys import Builder
from posttrain.recipe.eval_sections import BestOf, EvalSettings, GrowTree, RlEval, RowsEval, Search
from posttrain.recipe.limits import MOST
from posttrain.recipe.merge_sections import MergeModel, MergeParameters, MergeSlice, MergeTokenizer
from posttrain.recipe.preference_sections import Anchors, OnlineKl, PairLossSection, PairRules, RewardObjective
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
from posttrain.recipe.rollout_sections import ONE_TURN, EngineSection, Environment, Rollout, Sampling, Tool
from posttrain.recipe.section import (
    CompletionsName,
    ComponentSection,
    Count,
    Idle,
    ModelName,
    NonNegative,
    PairsName,
    Positive,
    Refused,
    Section,
    Seed,
    Share,
    Workers,
    find_registered,
)
from posttrain.recipe.sections import Data, Model, Run, Track
from posttrain.recipe.training_sections import DpoOptim, Optim, RewardOptim, SftObjective, SftOptim, TrainBatch

BY_REFERENCE = ("ref_logp", "tempered_ref_logp")  # what components read of the reference
TAGS = ("one of keep", "list of keep")  # pydantic puts them into the places of errors
OneOrMany = Annotated[
    Annotated[Keep, Tag(TAGS[0])] | Annotated[list[Keep], Tag(TAGS[1])],
    Discriminator(lambda value: TAGS[isinstance(value, list)]),
]


class Stage(Section):
    """What every recipe has. Scripts and data are looked for in `base_dir` first, the folder of the recipe file."""

    verb: ClassVar[str]
    presets: ClassVar[bool] = False
    unused: ClassVar[dict[str, str]] = {}  # keys of a shared section that this stage has no use for, and why
    extends: str | None = Field(None, description="a recipe whose values this one overrides")
    run: Annotated[
        Run,
        Refused(
            "stage = sft|dpo|rl and not run.steps and not run.epochs",
            "says not how long to train",
            "write `run.steps` or `run.epochs`",
        ),
    ] = Field(default_factory=Run)
    _base_dir: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def base_dir(self) -> Path:
        return self._base_dir


class Tracked(Stage):
    """A stage whose metrics and samples experiment trackers may get."""

    track: list[Track] = Field(default_factory=list, description="trackers that get metrics and samples")


NO_CALLS = Idle("not tools", "with an `environment`, which reads the model's text as it is", note=True)


class ToolUseStage(Stage):
    """A stage whose model may call tools or act in an environment."""

    tools: list[Tool] = Field(default_factory=list, description="what the model can call")
    tool_format: Annotated[
        Literal[
            "auto",
            "json",
            "xml",
            "llama3",
            "pythonic",
            "mistral",
            "harmony",
            "glm",
            "deepseek",
            "kimi",
            "gemma",
            "invoke",
        ],
        ONE_TURN,
        NO_CALLS,
    ] = Field("auto", description="how it writes calls; auto: as its chat template does")
    tool_prompt: Annotated[Literal["auto", "none"], ONE_TURN, NO_CALLS] = Field(
        "auto", description="auto: prompts tell of the tools; none: the model knows them from its training"
    )
    tool_workers: Annotated[Workers, ONE_TURN] = Field(
        4, description="worker processes of tools, threads of environments"
    )
    tool_memory_mb: Annotated[Annotated[int, Field(ge=64, le=MOST)] | None, ONE_TURN, NO_CALLS] = Field(
        4096, description="memory of a worker of tools; null = no limit"
    )
    environment: Environment | None = Field(None, description="what it acts in, instead of tools")
    earlier_turns: Annotated[Literal["refuse", "as_sampled"], ONE_TURN] = Field(
        "refuse",
        description="a template that rewrites earlier turns (drops their thoughts): refuse it, or go on with the "
        "tokens as they were sampled",
    )

    @property
    def acts(self) -> bool:
        return bool(self.tools or self.environment)

    @model_validator(mode="after")
    def _acts_in_one_way(self) -> ToolUseStage:
        if self.tools and self.environment:
            raise ValueError("give either `tools` or `environment`: an environment offers its own tools")
        return self


_NO_REFERENCE_COPY = {"model.offload_reference": "only rl keeps a copy of the starting policy"}
_NO_ROLLOUTS = dict.fromkeys(("run.samples_per_step", "run.keep_rollouts"), "only rl writes rollouts as it goes")
_NO_TRAINING = dict.fromkeys(
    (
        "run.steps",
        "run.epochs",
        "run.max_minutes",
        "run.save_every",
        "run.keep_checkpoints",
        "run.log_every",
        "run.samples_per_step",
        "run.keep_rollouts",
        "run.hang_minutes",
        "run.max_idle_steps",
    ),
    "this stage does not train",
)
_READ_ONLY = {
    **_NO_TRAINING,
    "model.gradient_checkpointing": "this stage does not train",
    "model.compile": "this stage does not train",
    "model.half_weights": "this stage does not train",
    "model.offload_reference": "this stage has no reference",
    "model.shard": "this stage does not train",
    "model.lora": "an adapter is evaluated by naming its directory in model.path",
    "data.train_on": "this stage does not train",
    "data.thought_dropout": "this stage does not train",
    "data.completion_template": "this stage does not train",
    "data.shuffle": "every row is used once, in order",
}


UNSEEN = Refused(
    "eval and model.shard",
    "a model that is divided among GPUs is not evaluated while it trains",
    "use `posttrain eval` after it",
)


class SftRecipe(Tracked):
    """Supervised fine-tuning."""

    verb: ClassVar = "sft"
    unused: ClassVar = {**_NO_ROLLOUTS, **_NO_REFERENCE_COPY}
    stage: Literal["sft"] = "sft"
    model: Model
    data: Data
    objective: Annotated[
        SftObjective,
        Refused(
            "behavior_logp in objective.needs and not objective.behavior_model",
            "{objective.use} needs the log-probs of the model that wrote the data",
            "write `behavior_model`",
        ),
    ] = Field(default_factory=lambda: SftObjective.model_validate({}))
    batch: TrainBatch = Field(default_factory=TrainBatch)
    optim: SftOptim = Field(default_factory=SftOptim)
    eval: Annotated[RowsEval | None, UNSEEN] = Field(None, description="evaluation while training")


class DpoRecipe(Tracked):
    """Preference optimisation on pairs."""

    verb: ClassVar = "dpo"
    presets: ClassVar = True
    unused: ClassVar = {
        **_NO_ROLLOUTS,
        **_NO_REFERENCE_COPY,
        "data.train_on": "pairs are compared on their completions",
        "data.completion_template": "pairs have two answers: `chosen` and `rejected`",
        "data.thought_dropout": "only sft empties thoughts",
        "batch.packing": "only sft packs rows",
    }
    stage: Literal["dpo"] = "dpo"
    algorithm: str | None = Field(None, description="a preset; see `posttrain methods list`")
    model: Model
    data: Data
    loss: PairLossSection = Field(default_factory=lambda: PairLossSection.model_validate({}))
    online_kl: Annotated[
        OnlineKl | None,
        Refused(
            "online_kl and anchors.reference",
            "the KL is to the policy as it is loaded, and the loss has another reference",
            "remove it, or `anchors.reference`",
        ),
    ] = Field(None, description="a KL on the policy's own answers, besides the loss (hypo)")
    anchors: Anchors = Field(default_factory=Anchors)
    pairs: PairRules = Field(default_factory=PairRules)
    batch: TrainBatch = Field(default_factory=TrainBatch)
    optim: DpoOptim = Field(default_factory=DpoOptim)
    eval: Annotated[RowsEval | None, UNSEEN] = Field(None, description="evaluation while training")


class RewardModelRecipe(Tracked):
    """A reward model: scores of answers, learnt from pairs or from labels."""

    verb: ClassVar = "reward-model"
    presets: ClassVar = True
    unused: ClassVar = {
        **_NO_ROLLOUTS,
        **_NO_REFERENCE_COPY,
        "model.compile": "a reward model is not compiled",
        "model.half_weights": "a reward model is trained in float32 weights",
        "model.shard": "a reward model is trained whole on each GPU",
        "data.train_on": "a reward model reads whole answers",
        "data.completion_template": "a reward model reads the answers as they are",
        "data.thought_dropout": "only sft empties thoughts",
        "batch.packing": "only sft packs rows",
        "model.quantize": "a reward model is saved with its adapter merged in, which 4-bit weights do not take",
    }
    stage: Literal["reward_model"] = "reward_model"
    algorithm: str | None = Field(None, description="a preset; see `posttrain methods list`")
    model: Model
    data: Data
    objective: RewardObjective = Field(default_factory=RewardObjective)
    batch: TrainBatch = Field(default_factory=TrainBatch)
    optim: RewardOptim = Field(default_factory=RewardOptim)


def unread_credit(key: str, *, of_channels: bool = True) -> tuple[Refused, ...]:
    """The marks of a key that changes advantages, beside a loss that reads others."""
    right = "remove it, or write `loss: clip`"
    own, what = f"{key} and own_credit in loss.needs", "changes advantages, and loss `{loss.use}` reads"
    found = (Refused(own, f"{what} rewards or correctness", right),)
    beside = f"{key} and loss.use = clip_channels"
    return (*found, Refused(beside, f"{what} each channel by itself", right)) if of_channels else found


class RlRecipe(ToolUseStage, Tracked):
    """Reinforcement learning with verifier rewards."""

    verb: ClassVar = "rl"
    presets: ClassVar = True
    unused: ClassVar = {
        "run.log_every": "rl writes every step",
        "data.train_on": "rl trains on the completions that it samples",
        "data.completion_template": "rl trains on the completions that it samples",
        "data.thought_dropout": "only sft empties thoughts",
    }
    stage: Literal["rl"] = "rl"
    algorithm: str | None = Field(None, description="a preset; see `posttrain methods list`")
    model: Model
    data: Data
    sampler: PromptSamplerSection = Field(
        default_factory=lambda: PromptSamplerSection.model_validate({}),
        description="which prompts a step draws, and how many rollouts each gets",
    )
    rollout: Rollout = Field(default_factory=Rollout)
    prompt_variants: Annotated[
        PromptVariants | None,
        Refused("prompt_variants and rollout.engine = stored", "rollout.engine stored samples nothing"),
        Refused("prompt_variants and opponent", "the opponent answers the data's own prompts"),
    ] = Field(None, description="what is sampled from in place of the data's prompts, and what the loss sees of it")
    rewards: list[Reward] = Field(min_length=1)
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
        Refused(
            "replay and solutions.in_group", "a given solution stands in each group already (`solutions.in_group`)"
        ),
        Refused(
            "replay and rollout.several_rows",
            "a rollout of several rows (`rollout.shape`, `rollout.workflow`) is stored row by row, and they belong "
            "together",
        ),
        Refused("replay and opponent", "a stored rollout was compared with an opponent of an earlier step"),
    ] = Field(None, description="stored rollouts of earlier steps that a step trains on beside its fresh ones")
    group_rewards: Annotated[
        list[GroupReward],
        Refused(
            "group_rewards and own_credit in loss.needs and correct in loss.needs and not keeps.by_reward and not "
            "regularisers and not select",
            "change rewards, and loss `{loss.use}` reads correctness alone",
            "remove them",
        ),
    ] = Field(default_factory=list, description="rewards of whole groups, in order, before `keep`")
    keep: OneOrMany | None = Field(None, description="one filter, or a list: all must hold")
    advantage: Annotated[
        Advantage,
        Refused(
            "own_credit in loss.needs and advantage.use != group|reward and not regularisers and not select",
            "does nothing: loss `{loss.use}` reads rewards or correctness",
            "remove it",
        ),
    ] = Field(default_factory=lambda: Advantage.model_validate({}))
    factors: Annotated[list[Factor], *unread_credit("factors", of_channels=False)] = Field(
        default_factory=list, description="what multiplies the advantages of a row"
    )
    advantage_transforms: Annotated[list[AdvantageTransform], *unread_credit("advantage_transforms")] = Field(
        default_factory=list, description="what changes advantages after the factors"
    )
    credit_assignment: Annotated[CreditAssignment | None, *unread_credit("credit_assignment")] = None
    select: list[Select] = Field(default_factory=list, description="tokens to train on: all must hold")
    corrections: Annotated[
        list[CorrectionSection],
        Refused(
            "corrections and loss.is_group_loss",
            "loss `{loss.use}` has one value a group: there are no tokens to weigh",
            "remove them",
        ),
    ] = Field(default_factory=list, description="weights and masks on the policy-gradient term")
    loss: Loss = Field(default_factory=lambda: Loss.model_validate({}))
    kl: Kl = Field(default_factory=lambda: Kl.model_validate({}))
    regularisers: list[Regulariser] = Field(default_factory=list, description="terms added to the loss")
    controllers: dict[str, Controller] = Field(
        default_factory=dict, description="key of a number (`kl.coef`, `advantage_transforms.0.alpha`): what drives it"
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
    ] = Field(None, description="given solutions, mixed with what the policy samples")
    opponent: Annotated[
        Opponent | None,
        Refused(
            "opponent and not opponent_rewards in reads and not opponent_logp in reads and not has_function",
            "does nothing: no component reads it",
            "write `group_rewards: [versus_opponent]`, or remove it",
        ),
        Refused(
            "opponent and rollout.engine = stored",
            "has nothing to say where no rollout is sampled",
            "remove it, or sample",
        ),
        Refused(
            "opponent and rounds in sampler.needs",
            "`{sampler.use}` samples a step in several rounds, and the opponent answers once",
        ),
    ] = Field(None, description="what the policy plays against (`versus_opponent`, `nash_mp`)")
    batch: RlBatch = Field(default_factory=RlBatch)
    optim: Optim = Field(default_factory=Optim)
    eval: RlEval | None = Field(None, description="evaluation while training")

    @property
    def keeps(self) -> list[Keep]:
        """The filters of `keep`, however they are written."""
        return self.keep if isinstance(self.keep, list) else [self.keep] if self.keep else []

    @property
    def has_kl(self) -> bool:
        """Whether a step has a KL term: its coefficient is not 0, or a controller drives it."""
        return self.kl.coef != 0 or "kl.coef" in self.controllers

    @property
    def aggregations(self) -> set[str]:
        """How the terms of the loss are aggregated."""
        return {self.loss.aggregation, *(term.aggregation or self.loss.aggregation for term in self.regularisers)}

    @property
    def reads(self) -> set[str]:
        """What the components that do something need."""
        return {need for _, section in self.active_components() for need in section.needs}

    @property
    def has_function(self) -> bool:
        """Whether a component is a function of the user, which may read anything."""
        return any(section.is_function for _, section in self.components())

    @property
    def weighs_behaviour(self) -> bool:
        """Whether a component reads the log-probs of the policy that sampled; a function of the user may."""
        return "rollout_logp" in self.reads or any(section.is_function for _, section in self.active_components())

    @property
    def reads_critic(self) -> bool:
        """Whether a component reads a critic's values; a function of the user may."""
        needs = {need for _, section in self.components() for need in section.needs}
        return self.has_function or bool(needs & {"values", "new_values", "frozen_critic"})

    @property
    def has_reference(self) -> bool:
        """Whether something reads the reference: a component, a frozen critic, or maybe a function of the user."""
        read = self.kl.reference or self.critic.path or self.has_function
        return bool(read) or bool(self.reads & {*BY_REFERENCE})

    def active_components(self) -> list[tuple[str, ComponentSection]]:
        """The components that do something: a KL without a coefficient does not."""
        return [(key, section) for key, section in self.components() if key != "kl" or self.has_kl]

    def components(self) -> list[tuple[str, ComponentSection]]:
        """Every component of the objective with its key, in the order in which a step calls them."""
        order = (
            "group_rewards",
            "keep",
            "advantage",
            "factors",
            "advantage_transforms",
            "credit_assignment",
            "select",
            "corrections",
        )
        found: list[tuple[str, ComponentSection]] = []
        for key in (*order, "loss", "kl", "regularisers", "controllers"):
            value = getattr(self, key)
            if isinstance(value, list):
                found += [(f"{key}.{number}", section) for number, section in enumerate(value)]
            elif isinstance(value, dict):
                found += [(f"{key}.{name}", section) for name, section in value.items()]
            elif value is not None:
                found.append((key, value))
        return found

    def every_component(self) -> list[tuple[str, ComponentSection]]:
        """`components`, and those that a step calls before it has rewards."""
        variants = [("prompt_variants", self.prompt_variants)] if self.prompt_variants else []
        rollout = self.rollout
        shapes = [("rollout.shape", rollout.shape)] if rollout.shape else []
        flows = [("rollout.workflow", rollout.workflow)] if rollout.workflow else []
        replay = [("replay", self.replay)] if self.replay else []
        return [("sampler", self.sampler), *variants, *shapes, *flows, *replay, *self.components()]

    @model_validator(mode="after")
    def _minibatches_have_rows(self) -> RlRecipe:
        rows = self.rollout.prompts_per_step * self.rollout.group_size
        if self.batch.minibatches > rows:
            raise ValueError(
                f"batch.minibatches {self.batch.minibatches} exceeds the {count_noun(rows, 'rollout')} of a step"
            )
        return self


class MergeRecipe(Stage):
    """Model merging; mergekit's keys. mergekit's own files run as they are."""

    verb: ClassVar = "merge"
    unused: ClassVar = _NO_TRAINING
    stage: Literal["merge"] = "merge"
    merge_method: Annotated[str, AfterValidator(partial(find_registered, "merge"))] = Field(
        description="see `posttrain methods list`"
    )
    models: list[MergeModel] = Field(default_factory=list, description="whole models; or `slices`")
    slices: list[MergeSlice] = Field(
        default_factory=list, description="layers of models, stacked: the result may have another depth"
    )
    base_model: ModelName | None = Field(
        None, description="what the models were made from: differences are taken from it"
    )
    parameters: MergeParameters = Field(default_factory=MergeParameters)
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="default: the models'")
    tokenizer_source: str | None = Field(
        None, description="union, base, or one of the models: for models whose vocabularies differ"
    )
    tokenizer: MergeTokenizer | None = Field(None, description="the same, with embeddings of single tokens")
    chat_template: str | None = Field(
        None,
        description="chatml, auto (what most of the models have), or the template itself; default: the tokenizer's",
    )

    @property
    def reads(self) -> set[str]:
        """The arguments that the method reads."""
        return merging.arguments_of(self.merge_method)

    @property
    def is_ours(self) -> bool:
        """Whether mergekit has no such method."""
        return self.merge_method in merging.OURS

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, values: Any) -> Any:
        return merging.as_written_here(values)


class EvalRecipe(ToolUseStage, Tracked):
    """Accuracy of a model on rows graded by reward scripts."""

    verb: ClassVar = "eval"
    unused: ClassVar = _READ_ONLY
    stage: Literal["eval"] = "eval"
    model: Model
    data: Data
    sampling: Sampling = Field(default_factory=Sampling)
    engine: EngineSection = Field(default_factory=EngineSection)
    rewards: list[Reward] = Field(min_length=1)
    scoring: Scoring = Field(default_factory=Scoring)
    eval: EvalSettings = Field(default_factory=EvalSettings)


class HarnessRecipe(Tracked):
    """Benchmarks of lm-eval (lm-evaluation-harness), with the model that posttrain loads."""

    verb: ClassVar = "harness"
    unused: ClassVar = {key: why for key, why in _READ_ONLY.items() if not key.startswith("data.")}
    stage: Literal["harness"] = "harness"
    model: Model
    tasks: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1, description="tasks, groups or tags of lm-eval (gsm8k, mmlu, leaderboard_*), or FILE.yaml"
    )
    fewshot: Count | None = Field(None, description="examples in a prompt; default: the task's")
    limit: Positive | None = Field(None, description="problems a task, the first ones; default: all")
    chat: bool | None = Field(None, description="ask by the chat template; default: where the tokenizer has one")
    max_new_tokens: Positive | None = Field(None, description="longest completion; default: the task's, or 256")
    thought_end: str | None = Field(
        None, description="text behind which the answer begins, e.g. </think>: what stands before is not graded"
    )
    engine: EngineSection = Field(default_factory=EngineSection)
    bootstrap: Positive = Field(10000, description="resamples of the intervals")
    level: Annotated[float, Field(gt=0, lt=1)] = Field(0.95, description="confidence level of the intervals")


class GenerateRecipe(ToolUseStage):
    """Completions of prompts, as JSON lines."""

    verb: ClassVar = "generate"
    unused: ClassVar = _READ_ONLY
    stage: Literal["generate"] = "generate"
    model: Model
    data: Data
    sampling: Sampling = Field(default_factory=Sampling)
    engine: EngineSection = Field(default_factory=EngineSection)
    samples: Positive = Field(1, description="completions a prompt")
    best_of: BestOf | None = Field(None, description="score the samples of a prompt, and write the best to best.jsonl")
    search: Search | None = Field(None, description="one completion a prompt, found by a search over its steps")
    tree: GrowTree | None = Field(
        None,
        description="`samples` trees a prompt, in completions.jsonl with their best paths: data to train on",
    )

    @model_validator(mode="after")
    def _search_finds_one(self) -> GenerateRecipe:
        if self.search and self.acts:
            raise ValueError("a search has no tools and no environment: remove `search`, or them")
        if self.search and self.samples > 1:
            raise ValueError("a search finds one completion a prompt: leave `samples` out")
        if self.search and self.sampling.stop:
            raise ValueError("`sampling.stop` would end a search's steps: write `search.ends`")
        if self.search and self.sampling.temperature == 0:
            raise ValueError("greedy steps are all the same: a search needs sampling.temperature above 0")
        return self

    @model_validator(mode="after")
    def _trees_grow_alone(self) -> GenerateRecipe:
        if self.tree is None:
            return self
        if self.acts:
            raise ValueError("a tree has no tools and no environment: remove `tree`, or them")
        if self.search or self.best_of:
            raise ValueError("a tree has rewards of its own, and picks its best path: remove `search` and `best_of`")
        if not (self.tree.shape.may("tree") or ":" in self.tree.shape.use):
            raise ValueError(f"`{self.tree.shape.use}` grows no tree: write mcts or step_values")
        if self.sampling.temperature == 0:
            raise ValueError("greedy branches are all the same: a tree needs sampling.temperature above 0")
        return self

    @model_validator(mode="after")
    def _best_of_several(self) -> GenerateRecipe:
        if self.best_of and self.samples < 2:
            raise ValueError("best_of picks among the samples of a prompt: write `samples`, e.g. 8")
        return self


def for_builders(*builders: Builder) -> Idle:
    """The mark of a key that only these builders of pairs read."""
    return Idle(f"builder != {'|'.join(builders)}", "with builder {builder}", f"it is for {', '.join(builders)}")


class PairsRecipe(Stage):
    """Preference pairs from completions of prompts, graded by `eval` or here."""

    verb: ClassVar = "pairs"
    unused: ClassVar = _NO_TRAINING
    stage: Literal["pairs"] = "pairs"
    completions: CompletionsName = Field(
        description="the policy's: the run directory of an eval or a generate, or its completions.jsonl; in a pipeline "
        "stage:NAME/completions.jsonl"
    )
    builder: Annotated[
        Builder,
        Refused(
            "builder = temporal|versus_past and not past",
            "{builder} needs `past`",
            "write `past`: completions of that model",
        ),
        Refused(
            "builder = guided and not teacher",
            "{builder} needs `teacher`",
            "write `teacher`: completions of that model",
        ),
    ] = Field("right_wrong", description="which answers make pairs: docs/preference.md")
    past: Annotated[CompletionsName | None, for_builders("temporal", "versus_past")] = Field(
        None, description="completions of an earlier policy (temporal, versus_past)"
    )
    future: Annotated[CompletionsName | None, for_builders("temporal")] = Field(
        None, description="completions of the model of phase 1 (temporal)"
    )
    teacher: Annotated[CompletionsName | None, for_builders("large_margin", "verified", "guided")] = Field(
        None, description="completions of a teacher (verified, large_margin), or with guidance in the prompt (guided)"
    )
    max_pairs: Annotated[Positive, for_builders("right_wrong", "versus_past", "gold_vs_own", "broken_format")] = Field(
        10, description="pairs a prompt at most, where a builder makes several"
    )
    prefer_teacher: Annotated[bool, for_builders("verified")] = Field(
        True, description="verified: the teacher's answer before the policy's own right one"
    )
    min_positive: Annotated[float, for_builders("large_margin")] = Field(
        5.0, description="large_margin: least score of a chosen answer"
    )
    margin: Annotated[float, for_builders("large_margin")] = Field(
        2.0, description="large_margin: least gap of the scores"
    )
    margin_student: Annotated[float, for_builders("large_margin")] = Field(
        1.0, description="large_margin: the same where the chosen answer is the policy's own"
    )
    min_length: Annotated[NonNegative, for_builders("after_verification")] = Field(
        0.0, description="after_verification: tokens of a good answer at least"
    )
    flags: Annotated[
        dict[Literal["consistent", "repetitive", "reflective"], str], for_builders("after_verification", "large_margin")
    ] = Field(default_factory=dict, description="after_verification: the reward component that says it")
    balance_lengths: bool = Field(False, description="as many pairs with a longer chosen side as with a shorter one")
    max_gap: Annotated[float, Field(ge=1)] | None = Field(
        None, description="leave out pairs whose longer side has more than this times the tokens of the other"
    )
    not_in: list[PairsName] = Field(
        default_factory=list, description="pairs of earlier rounds (files or run directories), not to be made again"
    )
    separability: Share | None = Field(
        0.9, description="warn when style alone tells unseen pairs apart more often than this; null = do not ask"
    )
    rewards: list[Reward] = Field(
        default_factory=list, description="what grades completions of `generate`; those of `eval` keep their grades"
    )
    scoring: Annotated[Scoring, Idle("not rewards", "without `rewards`", "write `rewards`", note=True, below=True)] = (
        Field(default_factory=Scoring)
    )


class PipelineRecipe(Stage):
    """Stages in order, each with the sections of its own verb; `stage:NAME` names the model of an earlier one.

    After loading, `defaults` is merged into the entries of `stages` and empty.
    """

    verb: ClassVar = "run"
    unused: ClassVar = {**_NO_TRAINING, "run.seed": "`seeds` decides, once a seed"}
    stage: Literal["pipeline"] = "pipeline"
    defaults: dict[str, Any] = Field(
        default_factory=dict, description="sections merged under every stage that takes them"
    )
    stages: list[dict[str, Any]] = Field(min_length=1, description="name, stage, and that stage's sections")
    seeds: list[Seed] = Field(default_factory=lambda: [0], min_length=1, description="the whole pipeline once a seed")
    parallel: Annotated[Positive, Idle("seeds < 2", "with one seed", "write `seeds`", note=True)] = Field(
        1, description="seeds run side by side, each with its share of the cores"
    )
    table: list[str] = Field(default_factory=list, description="eval stages compared in the closing table, in order")


STAGES: dict[str, type[Stage]] = {
    c.verb: c
    for c in (
        *(SftRecipe, DpoRecipe, RewardModelRecipe, RlRecipe),
        *(MergeRecipe, EvalRecipe, HarnessRecipe, GenerateRecipe, PairsRecipe, PipelineRecipe),
    )
}
