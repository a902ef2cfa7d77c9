"""The sections of `data.select`. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.recipe.section import DataName, EvalName, Positive, Refused, Section, Share


class Benchmark(Section):
    """Rows that must not be trained on."""

    source: DataName = Field(description="a file, a datasets directory, a hub id, gym:TASK or file.py:function")
    split: str = Field("test", description="of a hub id or a datasets directory")
    config: str | None = Field(None, description="hub configuration name")
    size: Positive | None = Field(None, description="rows to take")
    columns: dict[str, str] = Field(default_factory=dict, description="our column name: the file's column name")


class Decontaminate(Section):
    """Leave out prompts that a benchmark has too (Light-R1): equal, equal without digits and signs, or with so many
    words in a row in common."""

    benchmarks: list[Benchmark] = Field(min_length=1, description="whose prompts are left out")
    ngram: Positive = Field(32, description="words in a row")
    skip_empty: bool = Field(
        True,
        description="prompts of digits and signs alone are compared as they are; false: the official rule, by "
        "which one such benchmark item takes out all of them",
    )


class PassRate(Section):
    """Keep rows by how often a model solved them in an evaluation of the same data."""

    run: EvalName = Field(description="the eval run; in a pipeline stage:NAME/problems.jsonl")
    low: Share = Field(0.0, description="lowest pass rate, included")
    high: Annotated[Share, Refused("low > high", "low {low} is above high {high}", "turn them round")] = Field(
        1.0, description="highest pass rate, included"
    )
    lowest: Positive | None = Field(None, description="of these, so many with the lowest pass rate (DRIVE)")


class Reasoning(Section):
    """One side of a split by how much reasoning a row takes (DeReason)."""

    part: Literal["sft", "rl"] = Field(description="which side these rows are for")
    column: str = Field("reasoning", description="the score, 1 (recall) to 5 (many steps)")
    sft_max: float = Field(2, description="up to here for sft")
    rl_min: float = Field(4, description="from here for rl")
    middle: Literal["sft", "rl", "drop"] = Field("sft", description="where scores between go; the paper is not clear")


class Failed(Section):
    """Keep rows that a model did not solve in an evaluation of the same data (DRIVE's arena learning)."""

    run: EvalName = Field(description="the eval run; in a pipeline stage:NAME/problems.jsonl")
    solved: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="pass rate from which a row is solved")
    hard: str | None = Field(None, description="a column that marks hard rows")
    copies: Positive = Field(2, description="how often a hard row stays")


class Selection(Section):
    """Which rows of the data are used; every rule that is written must hold."""

    decontaminate: Decontaminate | None = Field(None, description="leave out what benchmarks have too")
    pass_rate: list[PassRate] = Field(
        default_factory=list, description="by how often a model solved them; one rule after the other"
    )
    reasoning: Reasoning | None = Field(None, description="by how much reasoning they take")
    failed: Failed | None = Field(None, description="only what a model failed")
