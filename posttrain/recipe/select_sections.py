"""Sections of `data.select`. Does not import torch."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.recipe.section import DataName, EvalName, Positive, Refused, Section, Share


class Benchmark(Section):
    """A benchmark whose rows must not be trained on."""

    source: DataName = Field(description="a file, a datasets directory, a hub id, gym:TASK or file.py:function")
    split: str = Field("test", description="split of a hub id or a datasets directory")
    config: str | None = Field(None, description="configuration name on the hub")
    size: Positive | None = Field(None, description="number of rows to take")
    columns: dict[str, str] = Field(default_factory=dict, description="posttrain's column name: the file's column name")


class Decontaminate(Section):
    """Drops prompts that also occur in a benchmark (Light-R1): equal, equal without digits and punctuation, or sharing
    a sequence of `ngram` words."""

    benchmarks: list[Benchmark] = Field(min_length=1, description="benchmarks whose prompts are dropped")
    ngram: Positive = Field(32, description="length of a shared word sequence")
    skip_empty: bool = Field(
        True,
        description="compare prompts of digits and punctuation only as they are; false: the official rule, by "
        "which one such benchmark item drops all of them",
    )


class PassRate(Section):
    """Keeps rows by how often a model solved them in an evaluation of the same data."""

    run: EvalName = Field(description="eval run; in a pipeline stage:NAME/problems.jsonl")
    low: Share = Field(0.0, description="lowest pass rate, included")
    high: Annotated[Share, Refused("low > high", "low {low} is above high {high}", "swap them")] = Field(
        1.0, description="highest pass rate, included"
    )
    lowest: Positive | None = Field(
        None, description="of the remaining rows, keep this many with the lowest pass rate (DRIVE)"
    )


class Reasoning(Section):
    """One side of a split by the amount of reasoning that a row needs (DeReason)."""

    part: Literal["sft", "rl"] = Field(description="side of the split that these rows are for")
    column: str = Field("reasoning", description="column of the score, 1 (recall) to 5 (many steps)")
    sft_max: float = Field(2, description="scores up to this belong to sft")
    rl_min: float = Field(4, description="scores from this belong to rl")
    middle: Literal["sft", "rl", "drop"] = Field(
        "sft", description="side of the scores in between; the paper leaves it open"
    )


class Failed(Section):
    """Keeps rows that a model did not solve in an evaluation of the same data (DRIVE's arena learning)."""

    run: EvalName = Field(description="eval run; in a pipeline stage:NAME/problems.jsonl")
    solved: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="pass rate from which a row counts as solved")
    hard: str | None = Field(None, description="column that marks hard rows")
    copies: Positive = Field(2, description="number of copies of a hard row")


class Selection(Section):
    """Selection of the rows that are used; every given rule must hold."""

    decontaminate: Decontaminate | None = Field(None, description="drop prompts that also occur in benchmarks")
    pass_rate: list[PassRate] = Field(
        default_factory=list, description="by how often a model solved them; rules are applied in order"
    )
    reasoning: Reasoning | None = Field(None, description="by the amount of reasoning they need")
    failed: Failed | None = Field(None, description="only rows that a model failed")
