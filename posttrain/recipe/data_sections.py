"""The section `data`: where rows come from and how they become tokens. Lengths are in tokens. Does not import torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from posttrain.path_resolution import PATHS, ROW_FILES, split_function
from posttrain.recipe.section import READ_ONLY, Count, DataName, Idle, Positive, Refused, Section, Seed, Share, Unused
from posttrain.recipe.select_sections import Selection

# Marks of keys that belong to a single source, and of keys that only sources with splits have.
ONE_SOURCE = Idle(".mix", "with `data.mix`: it belongs to one source", "write it in an entry of `data.mix`")
NO_SPLITS = Idle(
    "form = gym|task|accepted|function|file", "with {source}, which has no splits and no configurations", note=True
)


def source_form(name: str) -> str:
    """Return the kind of a source of rows: gym, task, accepted, function, file, folder or hub."""
    before, colon, _ = name.partition(":")
    if colon and before in ("gym", "task", "accepted"):
        return before
    if split_function(name) is not None:
        return "function"
    return "file" if name.endswith(ROW_FILES) else "folder" if name.startswith(PATHS) else "hub"


class Rows(Section):
    """A source of rows."""

    source: DataName | None = Field(
        None,
        description="a .jsonl/.json/.csv/.parquet file, a datasets directory, a hub id, gym:TASK, task:NAME, "
        "file.py:function, or accepted:EVAL_RUN (the correct completions of an evaluation run)",
    )
    split: Annotated[str, ONE_SOURCE, NO_SPLITS] = Field(
        "train", description="split of a hub id or a datasets directory"
    )
    config: Annotated[
        str | None,
        ONE_SOURCE,
        NO_SPLITS,
        Idle("form = folder", "with {source}: only the hub has configurations", note=True),
    ] = Field(None, description="configuration name on the hub")
    size: Positive | None = Field(
        None, description="number of rows to take (gym, tasks and functions: rows to generate)"
    )
    skip: Annotated[Count, ONE_SOURCE] = Field(
        0, description="rows to leave out at the start, e.g. rows already trained on elsewhere"
    )
    seed: Annotated[
        Seed,
        ONE_SOURCE,
        Idle(
            "form = accepted|file|folder|hub and not thought_dropout",
            "with {source}: its rows are read, not generated (`run.seed` decides their order)",
            note=True,
        ),
    ] = Field(0, description="seed of generated rows (gym, tasks and functions)")
    params: Annotated[
        dict[str, Any],
        ONE_SOURCE,
        Idle("form = file|folder|hub", "with {source}: only gym:, task:, accepted: and file.py:function take `params`"),
    ] = Field(default_factory=dict, description="arguments of the gym task, task or function")
    columns: Annotated[dict[str, str], ONE_SOURCE] = Field(
        default_factory=dict, description="posttrain's column name: the file's column name"
    )

    @property
    def form(self) -> str | None:
        """Kind of source (`source_form`); None without a source."""
        return None if self.source is None else source_form(self.source)


class Source(Rows):
    """A source of rows that may be one of several in a mixture."""

    weight: Annotated[float, Field(gt=0), Idle("data.mix < 2", "in a mixture of one source")] = Field(
        1.0, description="share of this source in a mixture"
    )


class ImageLimits(Section):
    """Size limits of the images shown to the model, and whether images may be downloaded."""

    max_pixels: Positive = Field(1_048_576, description="larger images are scaled down, aspect ratio preserved")
    min_pixels: Positive = Field(1, description="smaller images are scaled up, aspect ratio preserved")
    fetch: bool = Field(False, description="download images given by URL; false: a row with a URL is an error")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"`min_pixels` {self.min_pixels} is more than `max_pixels` {self.max_pixels}")
        return self


RL_SAMPLES = Unused("rl", "rl trains on the completions that it samples")


class Data(Source):
    """Rows, how they become tokens, and which tokens are trained on."""

    weight: Annotated[float, Field(gt=0), ONE_SOURCE, Idle("", "without `data.mix`", "write `data.mix`")] = Field(
        1.0, description="share of this source in a mixture"
    )
    mix: Annotated[list[Source], Field(min_length=1)] | None = Field(
        None, description="several sources with weights, instead of `source`"
    )
    select: Annotated[
        Selection | None,
        Refused(
            "select and not select.decontaminate and not select.pass_rate and not select.reasoning "
            "and not select.failed",
            "does nothing without a rule",
            "write `decontaminate`, `pass_rate`, `reasoning` or `failed`, or remove it",
        ),
    ] = Field(None, description="selection of rows by properties known before the run")
    system: str | None = Field(None, description="system message of rows that have none and no column `system`")
    prompt_template: str | None = Field(
        None, description="user message with {column} fields, instead of the column `prompt`"
    )
    completion_template: Annotated[
        str | None,
        READ_ONLY,
        RL_SAMPLES,
        Unused("dpo", "pairs have two answers: `chosen` and `rejected`"),
        Unused("reward_model", "a reward model reads the answers as they are"),
    ] = Field(None, description="answer to train on, with {column} fields, instead of the column `completion`")
    image: Annotated[ImageLimits, Idle("model.path = tiny", "with {model.path}, which sees no images", below=True)] = (
        Field(default_factory=ImageLimits)
    )
    chat: bool = Field(True, description="render with the chat template; false: prompt and completion are plain text")
    train_on: Annotated[
        Literal["completion", "assistant", "all"],
        READ_ONLY,
        RL_SAMPLES,
        Unused("dpo", "pairs are compared on their completions"),
        Unused("reward_model", "a reward model reads whole answers"),
        Idle("train_on = assistant and not chat", "with `data.chat: false`, which has no turns", note=True),
    ] = Field(
        "completion",
        description="completion: the last assistant turn (in a column `completion` of messages: each turn of it); "
        "assistant: every assistant turn; all: every token",
    )
    thought_dropout: Annotated[Share, READ_ONLY, Unused("rl|dpo|reward_model", "only sft empties thoughts")] = Field(
        0.0, description="share of rows whose first thought (<think>...</think>) is emptied; the rows are chosen once"
    )
    max_length: Positive | None = Field(None, description="maximum sequence length (RL: maximum prompt length)")
    overlong: Annotated[
        Literal["drop", "truncate_prompt", "error", "keep"],
        Idle("not max_length", "without `data.max_length`", "write `data.max_length`"),
    ] = Field("drop", description="treatment of rows longer than max_length")
    shuffle: Annotated[bool, Unused("eval|generate", "every row is used once, in order")] = Field(
        True, description="reshuffle the rows in every epoch; false: the order of the source"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.source is None) == (self.mix is None):
            raise ValueError("give either `source` or `mix`")
        return self
