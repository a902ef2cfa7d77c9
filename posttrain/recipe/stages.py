"""The recipe of each stage: the sections it takes. A key that a stage does not use is an error."""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from posttrain.recipe import merging
from posttrain.recipe.base_stage import Stage as Stage
from posttrain.recipe.base_stage import ToolUseStage as ToolUseStage
from posttrain.recipe.base_stage import Tracked
from posttrain.recipe.builder_keys import OTHERS, Builder, Other
from posttrain.recipe.engine_sections import EngineSection
from posttrain.recipe.eval_sections import BestOf, EvalSettings, GrowTree, RowsEval, Search
from posttrain.recipe.merge_sections import MergeModel, MergeParameters, MergeSlice, MergeTokenizer
from posttrain.recipe.preference_sections import Anchors, OnlineKl, PairLossSection, PairRules, RewardObjective
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.recipe.rl_stage import RlRecipe as RlRecipe
from posttrain.recipe.rollout_sections import PlayWorkflow, ShapedSampling
from posttrain.recipe.section import (
    CompletionsName,
    Count,
    Idle,
    ModelName,
    NoImages,
    NonNegative,
    PairsName,
    Positive,
    Refused,
    Seed,
    Share,
    find_registered,
)
from posttrain.recipe.sections import Data, Model
from posttrain.recipe.training_sections import DpoOptim, RewardOptim, SftObjective, SftOptim, TrainBatch

NO_EVAL_IF_DIVIDED = Refused(
    "eval and model.divided",
    "a model that is divided among GPUs cannot be evaluated during training",
    "use `posttrain eval` after training",
)


class SftRecipe(Tracked):
    """Supervised fine-tuning."""

    verb: ClassVar = "sft"
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
    eval: Annotated[RowsEval | None, NO_EVAL_IF_DIVIDED] = Field(None, description="evaluation during training")


class DpoRecipe(Tracked):
    """Preference optimization on pairs."""

    verb: ClassVar = "dpo"
    presets: ClassVar = True
    stage: Literal["dpo"] = "dpo"
    algorithm: str | None = Field(None, description="name of a preset; see `posttrain methods list`")
    model: Model
    data: Data
    loss: PairLossSection = Field(default_factory=lambda: PairLossSection.model_validate({}))
    online_kl: Annotated[
        OnlineKl | None,
        Refused(
            "online_kl and anchors.reference",
            "the KL compares with the policy as loaded, and the loss has another reference",
            "remove it, or `anchors.reference`",
        ),
    ] = Field(None, description="KL on the policy's own answers, added to the loss (hypo)")
    anchors: Anchors = Field(default_factory=Anchors)
    pairs: PairRules = Field(default_factory=PairRules)
    batch: TrainBatch = Field(default_factory=TrainBatch)
    optim: DpoOptim = Field(default_factory=DpoOptim)
    eval: Annotated[RowsEval | None, NO_EVAL_IF_DIVIDED] = Field(None, description="evaluation during training")


class RewardModelRecipe(Tracked):
    """A reward model that scores answers, trained on pairs or labels."""

    verb: ClassVar = "reward-model"
    presets: ClassVar = True
    stage: Literal["reward_model"] = "reward_model"
    algorithm: str | None = Field(None, description="name of a preset; see `posttrain methods list`")
    model: Model
    data: Data
    objective: RewardObjective = Field(default_factory=RewardObjective)
    batch: TrainBatch = Field(default_factory=TrainBatch)
    optim: RewardOptim = Field(default_factory=RewardOptim)


class MergeRecipe(Stage):
    """Model merging with mergekit's keys. mergekit's own files run unchanged."""

    verb: ClassVar = "merge"
    stage: Literal["merge"] = "merge"
    merge_method: Annotated[str, AfterValidator(partial(find_registered, "merge"))] = Field(
        description="merge method; see `posttrain methods list`"
    )
    models: list[MergeModel] = Field(default_factory=list, description="whole models to merge; or `slices`")
    slices: list[MergeSlice] = Field(
        default_factory=list, description="layer ranges of models, stacked: the result may have a different depth"
    )
    base_model: ModelName | None = Field(None, description="model from which differences are taken")
    parameters: MergeParameters = Field(default_factory=MergeParameters)
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="dtype of the result; default: the dtype of the models"
    )
    tokenizer_source: str | None = Field(
        None, description="tokenizer of the result if vocabularies differ: union, base, or one of the models"
    )
    tokenizer: MergeTokenizer | None = Field(None, description="the same, with embeddings of single tokens")
    chat_template: str | None = Field(
        None,
        description="chatml, llama3, auto (that of most models), or the template itself; default: the tokenizer's",
    )

    @property
    def reads(self) -> set[str]:
        """Arguments that the method reads."""
        return merging.arguments_of(self.merge_method)

    @property
    def is_ours(self) -> bool:
        """Whether mergekit does not have the method."""
        return self.merge_method in merging.OURS

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, values: Any) -> Any:
        return merging.from_mergekit_keys(values)


class EvalRecipe(ToolUseStage, Tracked):
    """Accuracy of a model on rows graded by reward scripts."""

    verb: ClassVar = "eval"
    stage: Literal["eval"] = "eval"
    model: Model
    data: Data
    sampling: ShapedSampling = Field(default_factory=ShapedSampling)
    engine: EngineSection = Field(default_factory=EngineSection)
    rewards: list[Reward] = Field(min_length=1)
    scoring: Scoring = Field(default_factory=Scoring)
    eval: EvalSettings = Field(default_factory=EvalSettings)


class HarnessRecipe(Tracked):
    """Benchmarks of lm-eval (lm-evaluation-harness) with a model loaded by posttrain."""

    verb: ClassVar = "harness"
    stage: Literal["harness"] = "harness"
    model: Model
    tasks: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1, description="tasks, groups or tags of lm-eval (gsm8k, mmlu, leaderboard_*), or FILE.yaml"
    )
    fewshot: Count | None = Field(None, description="examples in a prompt; default: the task's")
    limit: Positive | None = Field(None, description="number of problems per task, from the first; default: all")
    chat: bool | None = Field(None, description="apply the chat template; default: if the tokenizer has one")
    max_new_tokens: Positive | None = Field(None, description="maximum completion length; default: the task's, or 256")
    thought_end: str | None = Field(
        None, description="text that ends the thought, e.g. </think>: only what follows is graded"
    )
    engine: EngineSection = Field(default_factory=EngineSection)
    bootstrap: Positive = Field(10000, description="bootstrap resamples of the confidence intervals")
    level: Annotated[float, Field(gt=0, lt=1)] = Field(0.95, description="confidence level of the intervals")


class GenerateRecipe(ToolUseStage):
    """Completions of prompts, written as JSON lines."""

    verb: ClassVar = "generate"
    stage: Literal["generate"] = "generate"
    model: Model
    data: Data
    sampling: ShapedSampling = Field(default_factory=ShapedSampling)
    engine: EngineSection = Field(default_factory=EngineSection)
    samples: Positive = Field(1, description="completions per prompt")
    best_of: Annotated[
        BestOf | None,
        Refused("best_of and samples < 2", "best_of picks among the samples of a prompt", "write `samples`, e.g. 8"),
    ] = Field(None, description="score the samples of a prompt and write the best to best.jsonl")
    search: Annotated[
        Search | None,
        Refused("search and acts", "a search has no tools and no environment", "remove `search`, or them"),
        Refused("search and samples > 1", "a search finds one completion per prompt", "leave `samples` out"),
        Refused("search and sampling.stop", "`sampling.stop` would end a search's steps", "write `search.ends`"),
        Refused(
            "search and sampling.temperature = 0",
            "greedy steps are all the same",
            "write a sampling.temperature above 0",
        ),
        NoImages("search", "samples answers from text only"),
    ] = Field(None, description="one completion per prompt, found by a search over its steps")
    tree: Annotated[
        GrowTree | None,
        Refused(
            "tree and tools or tree and environment and not world in tree.shape.needs and not tree.shape.is_function",
            "a tree has no tools and no environment (except `episodes`)",
            "remove `tree`, or them",
        ),
        Refused(
            "world in tree.shape.needs and not environment",
            "`{tree.shape.use}` is a tree of turns in an environment",
            "write `environment`",
        ),
        Refused(
            "tree and search or tree and best_of",
            "a tree has its own rewards, and selects its best path",
            "remove `search` and `best_of`",
        ),
        Refused(
            "tree and not tree in tree.shape.needs and not tree.shape.is_function",
            "`{tree.shape.use}` samples no tree",
            "write mcts, step_values or episodes",
        ),
        Refused(
            "tree and sampling.temperature = 0",
            "greedy branches are all the same",
            "write a sampling.temperature above 0",
        ),
        NoImages("tree", "samples turns from text only"),
    ] = Field(
        None,
        description="`samples` trees per prompt, written to completions.jsonl with their best paths, as training data",
    )
    workflow: Annotated[
        PlayWorkflow | None,
        Refused("workflow and acts", "calls by role have no tools and no environment"),
        Refused("workflow and tree", "`tree` decides what is sampled for a prompt"),
        Refused("workflow and search", "`search` makes one completion of steps"),
        Refused("workflow and best_of", "a rollout of several calls has no single answer to score"),
        Refused(
            "grades in workflow.needs", "`{workflow.use}` calls rewards while it runs, and generate has none", "use rl"
        ),
    ] = Field(
        None,
        description="`samples` rollouts of calls by role per prompt (docs/workflows.md), written to "
        "completions.jsonl with all their `calls`",
    )


def for_builders(*builders: Builder) -> Idle:
    """Return the mark of a key that only these builders of pairs read."""
    return Idle(f"builder != {'|'.join(builders)}", "with builder {builder}", f"it is for {', '.join(builders)}")


def for_readers(other: Other) -> Idle:
    """Return the mark of a key with completions of another model, which only the builders in OTHERS read."""
    return for_builders(*(builder for builder, others in OTHERS.items() if other in others))


class PairsRecipe(Stage):
    """Preference pairs built from completions that `eval` or this stage has graded."""

    verb: ClassVar = "pairs"
    stage: Literal["pairs"] = "pairs"
    completions: CompletionsName = Field(
        description="completions of the policy: the run directory of an eval or a generate, or its "
        "completions.jsonl; in a pipeline stage:NAME/completions.jsonl"
    )
    builder: Annotated[
        Builder,
        *(
            Refused(
                f"builder = {builder} and not {other}",
                f"{builder} needs `{other}`",
                f"write `{other}`: completions of that model",
            )
            for builder, others in OTHERS.items()
            for other, needed in others.items()
            if needed
        ),
    ] = Field("right_wrong", description="how pairs are built: docs/preference.md")
    past: Annotated[CompletionsName | None, for_readers("past")] = Field(
        None, description="completions of an earlier policy (temporal, versus_past)"
    )
    future: Annotated[CompletionsName | None, for_readers("future")] = Field(
        None, description="completions of the model of phase 1 (temporal)"
    )
    teacher: Annotated[CompletionsName | None, for_readers("teacher")] = Field(
        None, description="completions of a teacher (verified, large_margin), or with guidance in the prompt (guided)"
    )
    max_pairs: Annotated[Positive, for_builders("right_wrong", "versus_past", "gold_vs_own", "broken_format")] = Field(
        10, description="maximum number of pairs per prompt, for builders that make several"
    )
    prefer_teacher: Annotated[bool, for_builders("verified")] = Field(
        True, description="verified: prefer the teacher's answer to the policy's own correct one"
    )
    min_positive: Annotated[float, for_builders("large_margin")] = Field(
        5.0, description="large_margin: minimum score of a chosen answer"
    )
    margin: Annotated[float, for_builders("large_margin")] = Field(
        2.0, description="large_margin: minimum difference of the scores"
    )
    margin_student: Annotated[float, for_builders("large_margin")] = Field(
        1.0, description="large_margin: minimum difference if the chosen answer is the policy's own"
    )
    min_length: Annotated[NonNegative, for_builders("after_verification")] = Field(
        0.0, description="after_verification: minimum number of tokens of a good answer"
    )
    flags: Annotated[
        dict[Literal["consistent", "repetitive", "reflective"], str], for_builders("after_verification", "large_margin")
    ] = Field(
        default_factory=dict, description="after_verification, large_margin: reward component that sets each flag"
    )
    balance_lengths: bool = Field(
        False, description="keep as many pairs with a longer chosen side as with a shorter one"
    )
    max_gap: Annotated[float, Field(ge=1)] | None = Field(
        None,
        description="leave out pairs whose longer side has more than this many times the tokens of the shorter one",
    )
    not_in: list[PairsName] = Field(
        default_factory=list, description="pairs of earlier rounds (files or run directories) that are not built again"
    )
    separability: Share | None = Field(
        0.9, description="warn if style alone separates unseen pairs more often than this; null = no test"
    )
    rewards: list[Reward] = Field(
        default_factory=list,
        description="rewards that grade completions of `generate`; completions of `eval` are already graded",
    )
    scoring: Annotated[Scoring, Idle("not rewards", "without `rewards`", "write `rewards`", note=True, below=True)] = (
        Field(default_factory=Scoring)
    )


class PipelineRecipe(Stage):
    """Stages in order, each with the sections of its own recipe; `stage:NAME` names the model of an earlier stage.

    After loading, `defaults` is merged into the entries of `stages` and empty.
    """

    verb: ClassVar = "run"
    stage: Literal["pipeline"] = "pipeline"
    defaults: dict[str, Any] = Field(
        default_factory=dict, description="sections merged under every stage that takes them"
    )
    stages: list[dict[str, Any]] = Field(min_length=1, description="name, stage, and the sections of that stage")
    seeds: list[Seed] = Field(
        default_factory=lambda: [0], min_length=1, description="run the whole pipeline once per seed"
    )
    parallel: Annotated[Positive, Idle("seeds < 2", "with one seed", "write `seeds`", note=True)] = Field(
        1, description="number of seeds run in parallel, each with its share of the cores"
    )
    table: list[str] = Field(default_factory=list, description="eval stages compared in the final table, in order")


STAGES: dict[str, type[Stage]] = {
    c.verb: c
    for c in (
        *(SftRecipe, DpoRecipe, RewardModelRecipe, RlRecipe),
        *(MergeRecipe, EvalRecipe, HarnessRecipe, GenerateRecipe, PairsRecipe, PipelineRecipe),
    )
}
