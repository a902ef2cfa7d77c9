"""The JSON schema of a tool from its signature and docstring, in the form that chat templates take."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

from posttrain.errors import ToolError

_ARGUMENTS = re.compile(r"^(?:Args|Arguments|Parameters):[ \t]*$", re.MULTILINE)
_ENTRY = re.compile(r"\s*(\w+)(?:\s*\([^)]*\))?:(?:\s+(.*))?$")


def build_schema(function: Callable[..., Any], name: str, fixed: typing.Collection[str] = ()) -> dict[str, Any]:
    """Build the schema {"type": "function", "function": {name, description, parameters}}.

    The description is the docstring up to `Args:`, whose entries `argument: description` describe the arguments, also
    over several lines. Arguments in `fixed` and keyword-only ones belong to the recipe, not the model. Raises ToolError
    for an argument without a type, or a type or default that JSON cannot represent.
    """
    try:
        arguments = inspect.signature(function).parameters
        hints = typing.get_type_hints(function)
    except (TypeError, ValueError, NameError) as cause:
        raise ToolError(f"tool {name}: its signature cannot be read: {cause}") from cause
    text, described = _parse_docstring(inspect.getdoc(function) or "")
    if not text:
        raise ToolError(f"tool {name} has no docstring", hint="the model reads it: say what the tool does")
    properties: dict[str, Any] = {}
    required = []
    for argument in arguments.values():
        if argument.name in fixed or argument.kind is inspect.Parameter.KEYWORD_ONLY:
            continue
        if argument.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ToolError(f"tool {name}: *{argument.name} has no schema", hint="name the arguments")
        if argument.name not in hints:
            hint = f"write `{argument.name}: str`, or another type"
            raise ToolError(f"tool {name}: argument `{argument.name}` has no type", hint=hint)
        properties[argument.name] = _json_type(hints[argument.name], name, argument.name)
        if argument.name in described:
            properties[argument.name]["description"] = described[argument.name]
        if argument.default is inspect.Parameter.empty:
            required.append(argument.name)
        else:
            properties[argument.name]["default"] = _json_default(hints[argument.name], name, argument)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def _json_type(annotation: Any, tool: str, argument: str) -> dict[str, Any]:
    from pydantic import PydanticUserError, TypeAdapter

    try:
        found = TypeAdapter(annotation).json_schema()
    except (PydanticUserError, ValueError) as cause:
        raise ToolError(f"tool {tool}: the type of `{argument}` has no JSON form: {annotation}") from cause
    return {key: value for key, value in found.items() if key != "title"}


def _json_default(annotation: Any, tool: str, argument: inspect.Parameter) -> Any:
    """Return a default as JSON has it: the value of an enum, the text of a date, the list of a tuple."""
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(annotation).dump_python(argument.default, mode="json", warnings=False)
    except ValueError as cause:
        raise ToolError(
            f"tool {tool}: the default of `{argument.name}` has no JSON form: {argument.default}"
        ) from cause


def _parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into (text before `Args:`, argument -> its description).

    Deeper lines continue a description; the next line without indentation (`Returns:`, `Raises:`) ends the arguments.
    """
    header = _ARGUMENTS.search(doc)
    if header is None:
        return " ".join(doc.split()), {}
    descriptions: dict[str, str] = {}
    name, outer = "", None
    for line in filter(str.strip, doc[header.end() :].splitlines()):
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            break
        outer = indent if outer is None else outer
        if indent <= outer and (entry := _ENTRY.match(line)):
            name, line = entry[1], entry[2] or ""
        descriptions[name] = " ".join(f"{descriptions.get(name, '')} {line}".split())
    return " ".join(doc[: header.start()].split()), {name: text for name, text in descriptions.items() if text}
