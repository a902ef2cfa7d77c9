"""The sections of evaluation: what is measured, and how one of several answers is found. No torch here."""

from __future__ import annotations

import re
from typing import Annotated, Literal

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
    NonNegative,
    Positive,
    Refused,
    Section,
    Share,
)
from posttrain.recipe.sections import Data, Rows


class Contamination(Section):
    """Show the model the first part of each problem, without a chat template, and see whether it writes the rest."""

    ratios: list[Annotated[float, Field(gt=0, lt=1)]] = Field(
        default_factory=lambda: [0.8, 0.6, 0.4], min_length=1, description="shares of a problem that are shown"
    )
    max_new_tokens: Positive = Field(512, description="greedy continuation")
    unit: Literal["word", "char"] = Field("word", description="what is compared; char for scripts without blanks")


class FormatConsensus(Section):
    """Three cheap formats of an answer and a long one where they disagree (ARM): the texts that begin them."""

    direct: str = Field("<ANSWER>", min_length=1, description="an answer without a thought")
    short: str = Field("<COT>", min_length=1, description="a short thought")
    code: str = Field("<CODE>", min_length=1, description="a program")
    long: str = Field("<LONG_COT>", min_length=1, description="a long thought, generated only where these disagree")


NO_BASELINE = Idle("not baseline", "without a run to compare with", "write `eval.baseline`")
ONE_SAMPLE = Idle("samples = 1", "with one completion a prompt", "write `eval.samples`, e.g. 8", note=True)


class EvalSettings(Section):
    """What is measured."""

    samples: Positive = Field(1, description="completions a prompt")
    k: list[Positive] = Field(
        default_factory=lambda: [1],
        description="pass@k and, for k > 1, cons@k (equal answers vote together); each k <= samples",
    )
    bootstrap: Positive = Field(10000, description="resamples of the interval")
    level: Annotated[float, Field(gt=0, lt=1)] = Field(0.95, description="confidence level of the intervals")
    baseline: EvalName | None = Field(
        None,
        description="run directory of an evaluation of the same problems (the start model) to compare with; in a "
        "pipeline stage:NAME/problems.jsonl",
    )
    aes: Annotated[list[NonNegative], NO_BASELINE] = Field(
        default_factory=lambda: [1.0, 3.0, 5.0],
        min_length=3,
        max_length=3,
        description="accuracy-efficiency score against the baseline: weights of shortening, gain and loss of accuracy",
    )
    edges: Annotated[list[Share], NO_BASELINE] = Field(
        default_factory=lambda: [0.25, 0.5, 0.75], description="borders of the difficulty buckets by baseline accuracy"
    )
    contamination: Contamination | None = Field(None, description="probe whether the problems were seen in training")
    best_of: Annotated[str | None, ONE_SAMPLE] = Field(
        None,
        description="name of a reward, or `reward` for their weighted sum: how right is the best-scored of n samples",
    )
    consensus: FormatConsensus | None = Field(
        None, description="also answer in three cheap formats, and in the long one where these disagree (ARM)"
    )
    stability: Annotated[Annotated[float, Field(gt=0)] | None, ONE_SAMPLE] = Field(
        None,
        description="share by which each reward's weight is moved: how many problems get another best completion, how "
        "many have ties (The Policy Cliff); needs several samples",
    )
    labels: list[str] | None = Field(
        None, min_length=2, description="answers are one of these: F1 by label, probabilities by sampling, calibration"
    )
    habits: bool = Field(False, description="count verification, backtracking, subgoals, backward chaining by patterns")


class HeldOut(Rows):
    """Rows that are not trained on. How they are rendered is said in `data`."""

    source: DataName = Field(description="as `data.source`")


def held_out_data(data: Data, rows: HeldOut) -> Data:
    """`data` with the rows of an evaluation: rendered like those of training, and each as it is."""
    places = {key: getattr(rows, key) for key in HeldOut.model_fields}
    return data.model_copy(update={**places, "mix": None, "thought_dropout": 0.0})


class TrainingEval(Section):
    """Evaluation while training: before the first step, every so many steps, and at the end."""

    every: Positive = Field(description="steps between evaluations")
    data: HeldOut = Field(description="rows that are not trained on: {source: held_out.jsonl}")
    metric: Annotated[
        Literal["accuracy", "reward", "loss"] | None,
        Refused(
            "metric and not keep_best and not patience",
            "does nothing: no checkpoint is chosen by it, and nothing stops by it",
            "write `keep_best: true` or `patience`, or remove it",
        ),
        Refused("metric = loss and stage = rl", "rl measures no validation loss", "write accuracy or reward"),
        Refused(
            "metric = accuracy|reward and n = 0",
            "nothing is generated: n is 0",
            "write `metric: loss`, or `n: 1` and rewards",
        ),
    ] = Field(
        None, description="what keep_best and patience go by; default: accuracy, or loss where nothing is generated"
    )
    keep_best: bool = Field(False, description="keep the model of the best evaluation in `best`, besides `final`")
    patience: Positive | None = Field(None, description="stop after so many evaluations in a row that are not the best")

    @property
    def generates(self) -> bool:
        """Whether completions are sampled."""
        return True

    @property
    def judged_by(self) -> str:
        """The metric that says which evaluation is best."""
        return self.metric or ("accuracy" if self.generates else "loss")


class RlEval(TrainingEval):
    """Evaluation of the policy while it trains: completions of held-out prompts, scored."""

    n: Positive = Field(1, description="completions a prompt")
    temperature: Temperature | None = Field(None, description="0 = greedy; default: that of `rollout`")
    max_new_tokens: Positive | None = Field(None, description="longest completion; default: that of `rollout`")
    rewards: list[Reward] = Field(default_factory=list, description="what scores them; default: the recipe's rewards")
    shaped: Annotated[
        bool | None,
        Idle("shaped and not rollout.shape", "without `rollout.shape`", "write `rollout.shape`, or remove it"),
        Refused(
            "shaped and rollout.shape.described and not rollout.shape.has_one_answer",
            "a rollout of `{rollout.shape.use}` has several answers",
            "remove it: held-out prompts are answered by one completion",
        ),
    ] = Field(
        None,
        description="answer in `rollout.shape`, with one scored row; default: where the shape is chunks, summaries or "
        "shuffled_options",
    )


NOTHING_GENERATED = Idle("n = 0", "with eval.n 0: nothing is generated", "write `n` and `rewards`", note=True)


class RowsEval(TrainingEval):
    """Validation loss while training; with `n`, also completions of the rows' prompts, scored."""

    n: Count = Field(0, description="completions a prompt; 0 = the loss alone")
    temperature: Annotated[Temperature, NOTHING_GENERATED] = Field(1.0, description="0 = greedy")
    max_new_tokens: Annotated[Positive, NOTHING_GENERATED] = Field(512, description="longest completion")
    batch_size: Annotated[Positive, NOTHING_GENERATED] = Field(64, description="sequences generated together")
    rewards: Annotated[
        list[Reward],
        Refused("n > 0 and not rewards", "the completions need rewards", "write `rewards`, or n: 0 for the loss alone"),
        Refused("n = 0 and rewards", "nothing is generated: n is 0", "write `n: 1`, or remove the rewards"),
    ] = Field(default_factory=list, description="what scores them")

    @property
    def generates(self) -> bool:
        return self.n > 0


class BestOf(Section):
    """What scores the completions of a prompt; the best one of each goes to best.jsonl."""

    rewards: list[Reward] = Field(min_length=1, description="e.g. a reward_model")
    scoring: Scoring = Field(default_factory=Scoring)


class Evidence(Section):
    """What the judge of a search reads beside a step: texts that share words with the question and the step."""

    corpus: CorpusName | None = Field(None, description="a file with a text a line, which is searched for each step")
    column: str | None = Field(None, description="or a column of the data that holds the evidence")
    top: Annotated[Positive, Idle("column", "with `column`, which is shown as it is")] = Field(
        3, description="texts that are shown at most"
    )
    template: str = Field(
        "Evidence:\n{document}\n\n{question}", description="the question as the judge reads it with evidence"
    )
    rewards: list[Reward] = Field(
        default_factory=list,
        description="what says of a trace without evidence whether it needs some, e.g. the label `search` of a reward "
        "model; default: every step is read with evidence",
    )
    above: Annotated[float, Idle("not rewards", "without `rewards`: every step is read with evidence")] = Field(
        0.5, description="a step whose trace `rewards` score above it is read with evidence"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Evidence:
        if bool(self.corpus) == bool(self.column):
            raise ValueError("give either `corpus` or `column`")
        return self

    def show(self, document: str, question: str) -> str:
        """The question as the judge reads it."""
        texts = {"document": document, "question": question}
        return re.sub(r"\{(document|question)\}", lambda found: texts[found[1]], self.template)


class Search(Section):
    """Step-wise decoding: traces grow a step at a time, rewards score each, the best go on."""

    beam: Positive = Field(4, description="traces of a prompt that go on")
    branch: Positive = Field(4, description="next steps tried for each")
    ends: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=lambda: ["\n\n"], min_length=1, description="texts that end a step, besides EOS"
    )
    step_tokens: Positive = Field(256, description="longest step")
    max_steps: Positive = Field(32, description="steps of an answer at most")
    mean: bool = Field(False, description="compare traces by the mean of their steps' rewards instead of the sum")
    sigmoid: bool = Field(False, description="a step's reward is the sigmoid of the score, e.g. of a reward model")
    rewards: list[Reward] = Field(min_length=1, description="what scores a trace so far, e.g. a reward_model")
    evidence: Evidence | None = Field(None, description="texts that `rewards` read before the question")
    scoring: Scoring = Field(default_factory=Scoring)


class GrowTree(Section):
    """A tree behind each prompt instead of a completion; rewards say which of its ends are right."""

    shape: RolloutShape = Field(description="how it grows: mcts, step_values, or a function of your own")
    rewards: list[Reward] = Field(min_length=1, description="what judges the ends")
    scoring: Scoring = Field(default_factory=Scoring)
