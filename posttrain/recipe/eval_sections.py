"""Sections of evaluation: what is evaluated, and how one of several answers is selected. Does not import torch."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.recipe.rollout_sections import RolloutShape
from posttrain.recipe.sampling_sections import Temperature
from posttrain.recipe.section import (
    CorpusName,
    Count,
    DataName,
    EvalName,
    Idle,
    NoImages,
    NonNegative,
    Positive,
    Refused,
    Section,
    Share,
)
from posttrain.recipe.sections import Data, Rows


class Contamination(Section):
    """Contamination probe: the model continues the first part of each problem, without a chat template."""

    ratios: list[Annotated[float, Field(gt=0, lt=1)]] = Field(
        default_factory=lambda: [0.8, 0.6, 0.4], min_length=1, description="fractions of a problem that are shown"
    )
    max_new_tokens: Positive = Field(512, description="maximum length of the greedy continuation")
    unit: Literal["word", "char"] = Field("word", description="unit of comparison; char for scripts without spaces")


class FormatConsensus(Section):
    """Three short answer formats and a long one for problems on which they disagree (ARM): the texts that start
    them."""

    direct: str = Field("<ANSWER>", min_length=1, description="starts an answer without a thought")
    short: str = Field("<COT>", min_length=1, description="starts a short thought")
    code: str = Field("<CODE>", min_length=1, description="starts a program")
    long: str = Field(
        "<LONG_COT>", min_length=1, description="starts a long thought, generated only if the other three disagree"
    )


NO_BASELINE = Idle("not baseline", "without a run to compare with", "write `eval.baseline`")
ONE_SAMPLE = Idle("samples = 1", "with one completion per prompt", "write `eval.samples`, e.g. 8", note=True)


class EvalSettings(Section):
    """Metrics of an evaluation."""

    samples: Positive = Field(1, description="completions per prompt")
    k: list[Positive] = Field(
        default_factory=lambda: [1],
        description="pass@k and, for k > 1, cons@k (equal answers vote together); each k <= samples",
    )
    bootstrap: Positive = Field(10000, description="bootstrap resamples of the confidence interval")
    level: Annotated[float, Field(gt=0, lt=1)] = Field(0.95, description="confidence level of the intervals")
    baseline: EvalName | None = Field(
        None,
        description="run directory of an evaluation on the same problems (e.g. of the start model) to compare "
        "with; in a pipeline stage:NAME/problems.jsonl",
    )
    aes: Annotated[list[NonNegative], NO_BASELINE] = Field(
        default_factory=lambda: [1.0, 3.0, 5.0],
        min_length=3,
        max_length=3,
        description="accuracy-efficiency score against the baseline: weights of shortening, accuracy gain and "
        "accuracy loss",
    )
    edges: Annotated[list[Share], NO_BASELINE] = Field(
        default_factory=lambda: [0.25, 0.5, 0.75],
        description="boundaries of the difficulty buckets by baseline accuracy",
    )
    contamination: Annotated[Contamination | None, NoImages("contamination", "asks with parts of texts")] = Field(
        None, description="test whether the problems were seen in training"
    )
    best_of: Annotated[str | None, ONE_SAMPLE] = Field(
        None,
        description="name of a reward, or `reward` for their weighted sum: accuracy of the best-scored of n samples",
    )
    consensus: FormatConsensus | None = Field(
        None, description="also answer in three short formats, and in the long one if these disagree (ARM)"
    )
    stability: Annotated[Annotated[float, Field(gt=0)] | None, ONE_SAMPLE] = Field(
        None,
        description="relative perturbation of each reward's weight: number of problems whose best completion "
        "changes, and number with ties (The Policy Cliff); needs several samples",
    )
    labels: list[str] | None = Field(
        None,
        min_length=2,
        description="the answers are one of these labels: F1 per label, probabilities by sampling, calibration",
    )
    habits: bool = Field(
        False, description="count verification, backtracking, subgoals and backward chaining by text patterns"
    )


class HeldOut(Rows):
    """Rows that are not trained on; they are rendered as `data` says."""

    source: DataName = Field(description="same forms as `data.source`")


def held_out_data(data: Data, rows: HeldOut) -> Data:
    """Return `data` with the rows of an evaluation, rendered like the training rows but without thought dropout."""
    places = {key: getattr(rows, key) for key in HeldOut.model_fields}
    return data.model_copy(update={**places, "mix": None, "thought_dropout": 0.0})


class TrainingEval(Section):
    """Evaluation during training: before the first step, every `every` steps, and at the end."""

    every: Positive = Field(description="steps between evaluations")
    data: HeldOut = Field(description="held-out rows: {source: held_out.jsonl}")
    metric: Annotated[
        Literal["accuracy", "reward", "loss"] | None,
        Refused(
            "metric and not keep_best and not patience",
            "does nothing: neither `keep_best` nor `patience` uses it",
            "write `keep_best: true` or `patience`, or remove it",
        ),
        Refused("metric = loss and stage = rl", "rl computes no validation loss", "write accuracy or reward"),
        Refused(
            "metric = accuracy|reward and n = 0",
            "nothing is generated: n is 0",
            "write `metric: loss`, or `n: 1` and rewards",
        ),
    ] = Field(None, description="metric of keep_best and patience; default: accuracy, or loss if nothing is generated")
    keep_best: bool = Field(False, description="store the model of the best evaluation in `best`, besides `final`")
    patience: Positive | None = Field(
        None, description="stop after this many consecutive evaluations without a new best"
    )

    @property
    def generates(self) -> bool:
        """Whether completions are sampled."""
        return True

    @property
    def judged_by(self) -> str:
        """Metric by which evaluations are compared."""
        return self.metric or ("accuracy" if self.generates else "loss")


class RlEval(TrainingEval):
    """Evaluation of the policy during RL: completions of held-out prompts are scored."""

    n: Positive = Field(1, description="completions per prompt")
    temperature: Temperature | None = Field(None, description="0 = greedy; default: `rollout.temperature`")
    max_new_tokens: Positive | None = Field(
        None, description="maximum completion length; default: `rollout.max_new_tokens`"
    )
    rewards: list[Reward] = Field(
        default_factory=list, description="rewards that score the completions; default: the recipe's rewards"
    )
    shaped: Annotated[
        bool | None,
        Idle("shaped and not rollout.shape", "without `rollout.shape`", "write `rollout.shape`, or remove it"),
        Refused(
            "shaped and rollout.shape.index_entry and not rollout.shape.has_one_answer",
            "a rollout of `{rollout.shape.use}` has several answers",
            "remove it: held-out prompts are answered by one completion",
        ),
    ] = Field(
        None,
        description="answer in `rollout.shape`, with one scored row; default: true if the shape is chunks, "
        "summaries or shuffled_options",
    )


NOTHING_GENERATED = Idle("n = 0", "with eval.n 0: nothing is generated", "write `n` and `rewards`", note=True)


class RowsEval(TrainingEval):
    """Validation loss during training; with `n`, also scored completions of the rows' prompts."""

    n: Count = Field(0, description="completions per prompt; 0 = loss only")
    temperature: Annotated[Temperature, NOTHING_GENERATED] = Field(1.0, description="0 = greedy")
    max_new_tokens: Annotated[Positive, NOTHING_GENERATED] = Field(512, description="maximum completion length")
    batch_size: Annotated[Positive, NOTHING_GENERATED] = Field(64, description="sequences generated together")
    rewards: Annotated[
        list[Reward],
        Refused("n > 0 and not rewards", "the completions need rewards", "write `rewards`, or n: 0 for the loss alone"),
        Refused("n = 0 and rewards", "nothing is generated: n is 0", "write `n: 1`, or remove the rewards"),
    ] = Field(default_factory=list, description="rewards that score the completions")

    @property
    def generates(self) -> bool:
        return self.n > 0


class BestOf(Section):
    """Rewards that score the completions of a prompt; the best completion of each prompt is written to best.jsonl."""

    rewards: list[Reward] = Field(min_length=1, description="rewards that score the completions, e.g. a reward_model")
    scoring: Scoring = Field(default_factory=Scoring)


class Evidence(Section):
    """Evidence for the judge of a search: texts that share words with the question and the step."""

    corpus: CorpusName | None = Field(None, description="file with one text per line, searched for each step")
    column: str | None = Field(None, description="or the data column that holds the evidence")
    top: Annotated[Positive, Idle("column", "with `column`, which is shown as it is")] = Field(
        3, description="maximum number of texts shown"
    )
    template: str = Field(
        "Evidence:\n{document}\n\n{question}",
        description="template of the question with evidence, as the judge reads it",
    )
    rewards: list[Reward] = Field(
        default_factory=list,
        description="rewards that decide, from a trace without evidence, whether it needs some, e.g. the "
        "label `search` of a reward model; default: every step is judged with evidence",
    )
    above: Annotated[float, Idle("not rewards", "without `rewards`: every step is read with evidence")] = Field(
        0.5, description="a step whose trace scores above this with `rewards` is judged with evidence"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.corpus) == bool(self.column):
            raise ValueError("give either `corpus` or `column`")
        return self

    def show(self, document: str, question: str) -> str:
        """Return the question as the judge reads it."""
        texts = {"document": document, "question": question}
        return re.sub(r"\{(document|question)\}", lambda match: texts[match[1]], self.template)


class Search(Section):
    """Step-wise beam search: traces grow one step at a time, rewards score each step, the best traces continue."""

    beam: Positive = Field(4, description="traces kept per prompt after each step")
    branch: Positive = Field(4, description="next steps sampled for each trace")
    ends: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=lambda: ["\n\n"], min_length=1, description="texts that end a step, besides EOS"
    )
    step_tokens: Positive = Field(256, description="maximum length of a step")
    max_steps: Positive = Field(32, description="maximum number of steps of an answer")
    mean: bool = Field(False, description="compare traces by the mean of their step rewards instead of the sum")
    sigmoid: bool = Field(False, description="the reward of a step is the sigmoid of its score, e.g. of a reward model")
    rewards: list[Reward] = Field(
        min_length=1, description="rewards that score an unfinished trace, e.g. a reward_model"
    )
    evidence: Evidence | None = Field(None, description="texts that `rewards` read before the question")
    scoring: Scoring = Field(default_factory=Scoring)


class GrowTree(Section):
    """A tree below each prompt instead of one completion; rewards judge its leaves."""

    shape: RolloutShape = Field(description="how the tree grows: mcts, step_values, or your own function")
    rewards: list[Reward] = Field(min_length=1, description="rewards that judge the leaves")
    scoring: Scoring = Field(default_factory=Scoring)
