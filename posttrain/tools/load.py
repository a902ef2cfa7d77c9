"""Loading and description of tools and environments, before any model is loaded. Does not import torch."""

from __future__ import annotations

import functools
import inspect
import shlex
import shutil
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import Problem, ToolError, did_you_mean, nearest
from posttrain.path_resolution import find, known_files, shipped_folder, split_function
from posttrain.recipe.tool_sections import MAX_PIXELS, Environment, Tool
from posttrain.registry import (
    awaits_stage,
    explain_type_mismatch,
    format_value,
    load_function,
    load_module,
    resolve_annotations,
    resolve_paths,
)
from posttrain.tools.schema import build_schema

IMAGES = "images"  # keyword-only argument that receives the conversation's images, unless the recipe sets it


@dataclass(frozen=True)
class LoadedTool:
    """A tool, ready to run. target: `absolute/file.py:name` or `module:name`; params: the recipe's arguments, with
    absolute paths; sees: whether the tool receives the conversation's images as `images`; shows: whether the tool may
    return images."""

    name: str
    target: str
    schema: dict[str, Any]
    params: dict[str, Any]
    timeout_s: float
    max_chars: int
    max_pixels: int = MAX_PIXELS
    sees: bool = False
    shows: bool = True

    @property
    def required_arguments(self) -> list[str]:
        return list(self.schema["function"]["parameters"]["required"])

    @property
    def arguments(self) -> list[str]:
        return list(self.schema["function"]["parameters"]["properties"])


def load_tools(sections: Sequence[Tool], base_dir: Path | None) -> list[LoadedTool]:
    """Load all tools of a recipe. Raises ToolError, naming the tool, also for two tools of the same name."""
    tools = [load_tool(section, base_dir) for section in sections]
    for tool in tools:
        if sum(other.name == tool.name for other in tools) > 1:
            raise duplicate_name_error(tool.name)
    return tools


def duplicate_name_error(name: str) -> ToolError:
    """Return the error for a second tool of the same name."""
    return ToolError(f"two tools are called `{name}`", hint="give one of them another `name`")


def load_tool(section: Tool, base_dir: Path | None, *, in_pipeline: bool = False) -> LoadedTool:
    """Load the tool of a recipe section. in_pipeline: its params may name what an earlier stage will make."""
    if section.command:
        return _load_command(section)
    target = locate(str(section.use), base_dir)
    function = load_function(target, base_dir, what="tool", error=ToolError)
    _check_kind(function, target)
    name = section.name or target.rpartition(":")[2]
    _check_params(function, name, section.params)
    params = resolve_paths(function, section.params, base_dir, f"tool {name}", ToolError, in_pipeline=in_pipeline)
    _check_types(f"tool {name}", function, params)
    if not (in_pipeline and awaits_stage(params)):
        _run_script_check(target, params)
    schema = build_schema(function, name, params)
    sees = IMAGES in _keyword_only(function) and IMAGES not in params
    limits = (section.timeout_s, section.max_chars, section.max_pixels)
    return LoadedTool(name, target, schema, params, *limits, sees=sees, shows=may_return_images(function))


def locate(use: str, base_dir: Path | None) -> str:
    """Resolve `calculator` (shipped), `file.py:name` or `module:name` to a target for `registry.load_function`."""
    split = split_function(use)
    if split is None:
        files = {
            path.stem: path for path in known_files("tools", [".py"]).values() if path.parent == shipped_folder("tools")
        }
        if use in files:
            return f"{files[use]}:{use}"
        near = nearest(use, files)
        raise ToolError(
            f"unknown tool: {use}",
            allowed=f"shipped: {', '.join(sorted(files))}; or path/file.py:function",
            hint=f"did you mean `{near}`?" if near else f"write {use}:FUNCTION" if use.endswith(".py") else "",
        )
    left, name = split
    return f"{find(left, base_dir, 'tool script', ToolError)}:{name}" if left.endswith(".py") else use


def _check_params(function: Callable[..., Any], name: str, given: Mapping[str, Any]) -> None:
    """Raise ToolError for an argument of the recipe that is not keyword-only, and for a missing one."""
    accepted = _keyword_only(function)
    for key in given:
        if key not in accepted:
            raise ToolError(
                f"tool {name} has no parameter `{key}`",
                allowed=f"it has: {', '.join(accepted) or 'none'} (keyword-only arguments are the recipe's)",
                hint=did_you_mean(key, accepted),
            )
    for key, argument in accepted.items():
        if argument.default is inspect.Parameter.empty and key not in given and key != IMAGES:
            raise ToolError(f"tool {name} needs params.{key}")


def _keyword_only(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: argument for name, argument in parameters.items() if argument.kind is inspect.Parameter.KEYWORD_ONLY}


def may_return_images(function: Callable[..., Any]) -> bool:
    """Return whether a function's return annotation allows images; a missing annotation does."""
    return not _is_text(resolve_annotations(function).get("return"))


def _is_text(annotation: Any) -> bool:
    """Return whether a type is text, a number, a mapping or None, or consists of such types."""
    kind = typing.get_origin(annotation) or annotation
    if isinstance(kind, type) and issubclass(kind, (str, int, float, type(None), Mapping)):
        return True
    inner = [argument for argument in typing.get_args(annotation) if argument is not ...]
    return bool(inner) and all(map(_is_text, inner))


def _check_kind(function: Any, target: str) -> None:
    """Raise ToolError unless the target is a plain or async function, with readable types and a usable result."""
    inner = inspect.unwrap(function)
    if not (inspect.isfunction(inner) or inspect.ismethod(inner)):
        raise ToolError(
            f"tool {target} is {type(inner).__name__}, not a function", hint="write a function (`def`) that calls it"
        )
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise ToolError(f"tool {target} is a generator: it has `yield`", hint="return the whole answer instead")


def _run_script_check(target: str, params: Mapping[str, Any]) -> None:
    """Run the script's own check, `CHECK(name, params) -> sentences`; raises ToolError if it reports problems."""
    file, _, name = target.rpartition(":")
    check = getattr(load_module(Path(file)), "CHECK", None) if file.endswith(".py") else None
    if callable(check) and (found := check(name, params)):
        raise ToolError.of([Problem(f"tool {name}", what) for what in found])


def _check_types(what: str, made: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ToolError for a recipe argument that does not match its annotation."""
    types = resolve_annotations(made)
    for key, value in given.items():
        if why := explain_type_mismatch(types.get(key), value):
            raise ToolError(f"{what}: parameter `{key}`: {why}, got {format_value(value)}")


def _load_command(section: Tool) -> LoadedTool:
    """Make a tool from a shell command, which reads its single text argument `input` from standard input."""
    words = shlex.split(str(section.command))
    if not words or shutil.which(words[0]) is None:
        raise ToolError(f"no command `{section.command}`", hint="its first word must be on the PATH")
    if not section.name or not section.description:
        raise ToolError(f"the tool `{section.command}` needs a `name` and a `description`: the model reads them")
    text = {"type": "string", "description": "what the command reads"}
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    function = {"name": section.name, "description": section.description, "parameters": parameters}
    params = {"words": words, "seconds": section.timeout_s, "max_chars": section.max_chars}
    schema = {"type": "function", "function": function}
    return LoadedTool(
        section.name,
        "posttrain.tools.worker:command",
        schema,
        params,
        section.timeout_s + 1.0,
        section.max_chars,
        shows=False,
    )


def load_class(use: str, base_dir: Path | None) -> Any:
    """Load the class of an environment: a shipped one by name, or `file.py:Class`."""
    split = split_function(use)
    if split is None:
        known = {path.stem: path for path in known_files("tools/environments", [".py"]).values()}
        if use not in known:
            allowed = f"shipped: {', '.join(sorted(known))}; or file.py:Class"
            hint = did_you_mean(use, known)
            hint = f"write {use}:CLASS" if use.endswith(".py") else hint
            raise ToolError(f"unknown environment: {use}", allowed=allowed, hint=hint)
        target = f"{known[use]}:Environment"
    else:
        left, name = split
        target = f"{find(left, base_dir, 'environment script', ToolError)}:{name}" if left.endswith(".py") else use
    return load_function(target, base_dir, what="environment", error=ToolError)


def load_environment(
    section: Environment, base_dir: Path | None, *, in_pipeline: bool = False
) -> functools.partial[Any]:
    """Return a factory of environments of the user's class. Raises ToolError for a class that lacks a method or does
    not accept the params. in_pipeline: the params may name what an earlier stage will make."""
    made = load_class(section.use, base_dir)
    for method in ("reset", "step", "score", "close", *(("actions",) if section.simulations else ())):
        if not callable(getattr(made, method, None)):
            raise ToolError(f"environment {section.use} has no method `{method}`")
    takes = inspect.signature(made).parameters
    for key in section.params:
        if key not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            raise ToolError(
                f"environment {section.use} has no parameter `{key}`",
                allowed=f"it has: {', '.join(takes) or 'none'}",
                hint=did_you_mean(key, takes),
            )
    what = f"environment {section.use}"
    params = resolve_paths(made, section.params, base_dir, what, ToolError, in_pipeline=in_pipeline)
    _check_types(what, made, params)
    try:
        inspect.signature(made).bind(**params)
    except TypeError as cause:
        raise ToolError(f"environment {section.use}: {cause}") from cause
    return functools.partial(made, **params)
