"""Sections of tools that a model calls, and environments that it acts in. Does not import torch."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from posttrain.recipe.section import Count, Idle, NamedSection, Positive, Section

MAX_PIXELS = 1 << 20  # limit of an image that a tool or an environment returns


class Tool(NamedSection):
    """A tool that the model can call: a function of a file, a shipped tool by name, or a command."""

    use: str | None = Field(
        None, description="a shipped tool (calculator, crop, python, sql, search), or file.py:function"
    )
    command: str | None = Field(None, description="instead of use: a command that reads the model's input from stdin")
    name: str | None = Field(None, description="name of the tool for the model; default: the name of the function")
    description: str | None = Field(None, description="description of a command, for the model")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword-only arguments of the function")
    timeout_s: Annotated[float, Field(gt=0)] = Field(5.0, description="wall-clock limit of a call")
    max_chars: Positive = Field(4000, description="maximum length of a reply; a longer one is truncated with a note")
    max_pixels: Positive = Field(
        MAX_PIXELS, description="maximum size of an image that the tool returns; a larger one is scaled down"
    )

    @model_validator(mode="after")
    def _one_thing(self) -> Self:
        if bool(self.use) == bool(self.command):
            raise ValueError("give either `use` or `command`")
        if self.command and self.params:
            raise ValueError("a command has no `params`: write its arguments after it")
        if self.use and self.description:
            raise ValueError("`description` is for a command: a function has its docstring")
        return self


class Environment(Section):
    """The environment that the model acts in, turn by turn: a class with reset(row), step(text), score() and
    close()."""

    use: str = Field(description="file.py:Class, `gym` for tasks of reasoning-gym, or `screen` for task:screen")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of the class")
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        10.0, description="wall-clock limit of a step, or of the simulations of a state"
    )
    max_pixels: Positive = Field(
        MAX_PIXELS, description="maximum size of an image that a step shows; a larger one is scaled down"
    )
    simulations: Annotated[
        Count,
        Idle(
            "not mc_values in advantage.needs and not legal_returns in advantage.needs and not advantage.is_function",
            ": nothing reads the values of states",
            "write `advantage: mc_critic` or `mc_actions`, or 0",
        ),
    ] = Field(
        0,
        description="random plays from the state before each turn, for advantage mc_critic; after each legal "
        "action of the first state, for mc_actions; needs a method actions()",
    )
    horizon: Annotated[
        Positive, Idle("not simulations", "without `environment.simulations`", "write `environment.simulations`")
    ] = Field(200, description="maximum number of steps of a simulation")
