"""Base classes of recipes: keys of every stage, of stages with trackers, and of stages with tools. Does not import
torch."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from posttrain.recipe.limits import MAX_COUNT
from posttrain.recipe.sampling_sections import ONE_TURN
from posttrain.recipe.section import Idle, Refused, Section, Unused, Workers
from posttrain.recipe.sections import Run, Track
from posttrain.recipe.tool_sections import Environment, Tool


class Stage(Section):
    """Keys that every recipe has. Scripts and data are looked up in `base_dir`, the folder of the recipe file,
    first."""

    verb: ClassVar[str]
    presets: ClassVar[bool] = False
    unused: ClassVar[dict[str, str]] = {}  # SECTION.KEY that this stage does not use -> why (`Unused` at its field)
    extends: str | None = Field(None, description="recipe whose values this one overrides")
    run: Annotated[
        Run,
        Refused(
            "stage = sft|dpo|rl and not run.steps and not run.epochs",
            "does not say how long to train",
            "write `run.steps` or `run.epochs`",
        ),
    ] = Field(default_factory=Run)
    _base_dir: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def base_dir(self) -> Path:
        return self._base_dir

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        stage = cls.model_fields["stage"].default if "stage" in cls.model_fields else None
        sections = {key: field.annotation for key, field in cls.model_fields.items()}
        cls.unused = {
            f"{key}.{inner}": mark.why
            for key, section in sections.items()
            if isinstance(section, type) and issubclass(section, Section)
            for inner, field in section.model_fields.items()
            for mark in field.metadata
            if isinstance(mark, Unused) and stage in mark.stages.split("|")
        }


class Tracked(Stage):
    """A stage whose metrics and samples can be sent to experiment trackers."""

    track: list[Track] = Field(default_factory=list, description="experiment trackers that receive metrics and samples")


NO_CALLS = Idle("not tools", "with an `environment`, which reads the model's text as it is", note=True)


class ToolUseStage(Stage):
    """A stage whose model may call tools or act in an environment."""

    tools: list[Tool] = Field(default_factory=list, description="tools that the model can call")
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
    ] = Field("auto", description="format of the model's tool calls; auto: the format of its chat template")
    tool_prompt: Annotated[Literal["auto", "none"], ONE_TURN, NO_CALLS] = Field(
        "auto", description="auto: prompts describe the tools; none: the model knows them from its training"
    )
    tool_workers: Annotated[Workers, ONE_TURN] = Field(
        4, description="number of worker processes for tools, or of threads for environments"
    )
    tool_memory_mb: Annotated[Annotated[int, Field(ge=64, le=MAX_COUNT)] | None, ONE_TURN, NO_CALLS] = Field(
        4096, description="memory limit of a tool worker, in MB; null = no limit"
    )
    environment: Annotated[
        Environment | None,
        Refused("environment and tools", "give either `tools` or `environment`", "an environment offers its own tools"),
    ] = Field(None, description="environment that the model acts in, instead of tools")
    earlier_turns: Annotated[Literal["refuse", "as_sampled"], ONE_TURN] = Field(
        "refuse",
        description="for a chat template that rewrites earlier turns (such as dropping their thoughts): "
        "refuse it, or continue from the tokens as they were sampled",
    )

    @property
    def acts(self) -> bool:
        return bool(self.tools or self.environment)
