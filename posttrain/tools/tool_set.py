"""The tools or environment of a recipe: their descriptions in prompts, and the world that answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.recipe.sections import ImageLimits
from posttrain.recipe.stages import ToolUseStage
from posttrain.recipe.tool_sections import MAX_PIXELS
from posttrain.tools.calls import Caller
from posttrain.tools.environments import Environments, Simulations, Tools, World
from posttrain.tools.formats import Format, detect_format, explain_tools, render_call, template_knows_tools
from posttrain.tools.load import LoadedTool, load_environment, load_tools, may_return_images
from posttrain.verify.captured_output import OutputLog


@dataclass(frozen=True)
class ToolSet:
    """Tools or an environment, loaded and checked but not started. make: factory of environments; None = tools."""

    tools: tuple[LoadedTool, ...]
    form: Format
    make: Callable[[], Any] | None
    workers: int
    timeout_s: float
    earlier_turns: str
    system: str | None  # description of the tools for the system message, if the template does not describe them
    memory_mb: int | None  # memory limit of each tool worker
    shown: bool  # whether prompts describe the tools
    given_system: str | None = None  # the recipe's system message, which `system` is appended to
    simulations: Simulations | None = None  # of states before each turn, if an advantage reads their values
    output_log: OutputLog | None = None  # where output of tools goes; None = stderr
    limits: ImageLimits | None = None  # of the rows' images
    max_pixels: int = MAX_PIXELS  # of an image that an environment shows
    shows: bool = True  # whether a tool or a step of the environment may return images

    @property
    def reply_role(self) -> Literal["tool", "user"]:
        return "tool" if self.make is None else "user"

    def world(self) -> World:
        """Start the world; its workers run until it is closed."""
        if self.make is not None:
            return Environments(self.make, self.workers, self.timeout_s, self.simulations, self.max_pixels, self.shows)
        return Tools(Caller(self.tools, self.workers, self.output_log, self.memory_mb), self.form, self.limits)

    def row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data row to render, with the tools added."""
        if not self.shown or not self.tools:
            return dict(row)
        if self.system is None:
            return {**row, "tools": [tool.schema for tool in self.tools]}
        asked = row.get("prompt") if row.get("prompt") is not None else row.get("messages")
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked or ())
        system = row.get("system") if isinstance(row.get("system"), str) else None
        system = system or self.given_system
        if messages and messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        text = self.system if system is None else f"{system}\n\n{self.system}"
        key = "prompt" if row.get("prompt") is not None else "messages"
        return {**row, key: [{"role": "system", "content": text}, *messages]}


def load_tool_set(recipe: ToolUseStage, tokenizer: Any, base_dir: Path | None) -> ToolSet | None:
    """Load the recipe's tools or environment; None if it has neither. Raises ToolError if loading fails."""
    if not recipe.acts:
        return None
    tools = load_tools(recipe.tools, base_dir)
    form: Format = "json"
    if tools:
        form = detect_format(tokenizer) if recipe.tool_format == "auto" else recipe.tool_format
    shown = recipe.tool_prompt == "auto"
    schemas = [tool.schema for tool in tools]
    described = bool(tools) and template_knows_tools(tokenizer, schemas) and render_call(tokenizer) is not None
    silent = bool(tools) and shown and not described
    section = recipe.environment
    make = None if section is None else load_environment(section, base_dir)
    made: Any = None if make is None else make.func
    return ToolSet(
        tools=tuple(tools),
        form=form,
        make=make,
        workers=recipe.tool_workers,
        memory_mb=recipe.tool_memory_mb,
        timeout_s=10.0 if section is None else section.timeout_s,
        earlier_turns=recipe.earlier_turns,
        system=explain_tools(schemas, form) if silent else None,
        shown=shown,
        given_system=recipe.data.system,  # type: ignore[attr-defined]  # every stage that acts has data
        simulations=_load_simulations(recipe),
        limits=recipe.data.image,  # type: ignore[attr-defined]
        max_pixels=MAX_PIXELS if section is None else section.max_pixels,
        shows=any(tool.shows for tool in tools) if made is None else may_return_images(made.step),
    )


def _load_simulations(recipe: ToolUseStage) -> Simulations | None:
    """Return the simulation settings, with the discount of the advantage that reads them; evaluations have none."""
    section, advantage = recipe.environment, getattr(recipe, "advantage", None)
    if section is None or not section.simulations or advantage is None:
        return None
    gamma = float(advantage.params.get("gamma", 1.0))
    return Simulations(section.simulations, section.horizon, gamma, of_actions="legal_returns" in advantage.needs)
