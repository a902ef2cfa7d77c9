"""`posttrain tool test`: shows what a model sees of a tool, and the results of its calls."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli import imports
from posttrain.cli.help import App
from posttrain.cli.show import print_json
from posttrain.cli.stage import Json
from posttrain.errors import ToolError, count_noun
from posttrain.path_resolution import find

if TYPE_CHECKING:
    from posttrain.tools.load import LoadedTool
    from posttrain.tools.tool_tests import ToolTrial

app = App()
SHOWN_CHARS = 400  # characters of a result printed

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="What to test: FILE.py[:name], or a shipped tool (calculator).")
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Arguments of a call, or one JSON object with all arguments."),
]
Params = Annotated[
    list[str] | None,
    typer.Option(
        "--param", metavar="NAME=VALUE", help="A parameter of the tool, as in a recipe's `params`; repeatable."
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.01, help="Time limit of a call, in seconds.")
]
MaxChars = Annotated[
    int,
    typer.Option("--max-chars", metavar="N", min=1, help="Maximum characters of a result; longer ones are truncated."),
]


@app.callback()
def group() -> None:
    """Test tools before a model calls them."""


@app.command()
def test(
    target: Target,
    arguments: Arguments = None,
    param: Params = None,
    timeout: Timeout = 5.0,
    max_chars: MaxChars = 4000,
    as_json: Json = False,
) -> None:
    """Show the schema that a model gets of a tool, run the tool's EXAMPLES and the given call, and show the results of
    malformed calls.

    Calls run as in training: in a worker process with the same limits. Exit code 2 if an example or the given call
    fails.
    """
    from posttrain.recipe.tool_sections import Tool
    from posttrain.tools.load import load_tool
    from posttrain.tools.tool_tests import make_sample_params, run_calls, try_examples, try_wrong

    uses = _list_uses(target)
    if arguments and len(uses) > 1:
        names = ", ".join(use.rpartition(":")[2] for use in uses)
        raise ToolError(f"{target} holds several tools: {names}", hint=f"write {target}:NAME")
    params, given = _parse_pairs(param or [], "--param"), _parse_arguments(arguments or [])
    results, failed = [], False
    for use in uses:
        with tempfile.TemporaryDirectory() as folder:
            sample = make_sample_params(use, Path(folder))
            section = Tool(use=use, params={**sample, **params}, timeout_s=timeout, max_chars=max_chars)
            tool = load_tool(section, Path.cwd())
            examples = try_examples(replace(tool, params={**tool.params, **sample}), alone=len(uses) == 1)
            asked = run_calls(tool, [("call", given)]) if arguments else []
            wrong = try_wrong(tool, given or (examples[0].call.arguments if examples else {}))
        failed |= any(not trial.ok for trial in examples) or any(trial.call.kind != "ok" for trial in asked)
        results.append({"schema": tool.schema["function"], "examples": examples, "call": asked, "wrong": wrong})
        if not as_json:
            _print_trial(tool, examples, asked, wrong)
    if as_json:
        print_json(
            [{k: v if k == "schema" else list(map(_to_dict, v)) for k, v in result.items()} for result in results]
        )
    if failed:
        raise typer.Exit(2)


def _list_uses(target: str) -> list[str]:
    """Return the `use` value of each tool of the target."""
    from posttrain.tools.tool_tests import list_tools

    script = target if target.endswith(".py") else target.rpartition(":")[0]
    if not script.endswith(".py"):
        return [target]
    path = find(script, Path.cwd(), "tool", ToolError)
    imports.check_script(path)
    if script != target:
        return [target]
    return [f"{path}:{name}" for name in list_tools(path)]


def _parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `a=1 b=text`, or one JSON object."""
    if len(arguments) == 1 and arguments[0].lstrip().startswith("{"):
        try:
            return dict(json.loads(arguments[0]))
        except ValueError as cause:
            raise ToolError(f"not a JSON object: {arguments[0]:.60}: {cause}") from cause
    return _parse_pairs(arguments, "an argument")


def _parse_pairs(written: Sequence[str], what: str) -> dict[str, Any]:
    """Parse NAME=VALUE texts; a value that is valid JSON is decoded, any other is text."""
    arguments: dict[str, Any] = {}
    for text in written:
        name, mark, value = text.partition("=")
        if not mark or not name:
            raise ToolError(f"{what} is `{text}`", allowed="NAME=VALUE")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def _print_trial(
    tool: LoadedTool, examples: Sequence[ToolTrial], asked: Sequence[ToolTrial], wrong: Sequence[ToolTrial]
) -> None:
    function = tool.schema["function"]
    terminal.say(f"{tool.name}: {function['description']}")
    properties: Mapping[str, Any] = function["parameters"]["properties"]
    for name, about in properties.items():
        kind = about.get("type") or json.dumps({k: v for k, v in about.items() if k not in ("description", "default")})
        need = (
            "required"
            if name in tool.required_arguments
            else f"default {json.dumps(about.get('default'), default=str)}"
        )
        terminal.say(f"  {name} ({kind}, {need}): {about.get('description', 'no description: write it under Args')}")
    if not properties:
        terminal.say("  no arguments")
    if examples:
        terminal.say(f"{sum(bool(trial.ok) for trial in examples)} of {count_noun(len(examples), 'example')} right")
    for trial in (trial for trial in examples if not trial.ok):
        terminal.say(f"  {json.dumps(dict(trial.call.arguments), default=str)}")
        terminal.say(f"    expected {trial.expected!r:.200}, got {trial.call.result!r:.200}")
    for trial in asked:
        took = f"{1000 * trial.seconds:.1f} ms of {tool.timeout_s:g} s"
        terminal.say(
            f"{trial.call.kind}, {took}, {count_noun(len(trial.call.result), 'character')} (maximum {tool.max_chars}):"
        )
        terminal.say(_indent(trial.call.result))
    terminal.say("results of malformed calls:")
    for trial in wrong:
        terminal.say(f"  {trial.what} ({trial.call.kind}): {trial.call.result:.200}")


def _indent(text: str) -> str:
    cut = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} [...]"
    return "\n".join(f"  {line}" for line in cut.splitlines()) or "  (an empty text)"


def _to_dict(trial: ToolTrial) -> dict[str, Any]:
    call = {"arguments": dict(trial.call.arguments), "kind": trial.call.kind, "result": trial.call.result}
    return {"what": trial.what, **call, "seconds": trial.seconds, "ok": trial.ok, "expected": trial.expected}
