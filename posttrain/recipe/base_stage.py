"""What every recipe has, and what those have whose metrics are tracked or whose model may call tools. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr

from posttrain.recipe.limits import MOST
from posttrain.recipe.sampling_sections import ONE_TURN
from posttrain.recipe.section import (
    Idle,
    Refused,
    Section,
    Workers,
)
from posttrain.recipe.sections import Run, Track
from posttrain.recipe.tool_sections import Environment, Tool


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
    environment: Annotated[
        Environment | None,
        Refused("environment and tools", "give either `tools` or `environment`", "an environment offers its own tools"),
    ] = Field(None, description="what it acts in, instead of tools")
    earlier_turns: Annotated[Literal["refuse", "as_sampled"], ONE_TURN] = Field(
        "refuse",
        description="a template that rewrites earlier turns (drops their thoughts): refuse it, or go on with the "
        "tokens as they were sampled",
    )

    @property
    def acts(self) -> bool:
        return bool(self.tools or self.environment)
