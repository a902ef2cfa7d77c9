"""Format of all help pages: arguments named as in the usage line, whole sentences in lists of commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

OVERRIDES = "KEY.PATH=VALUE"  # metavar of the argument that takes recipe overrides
SENTENCE_LIMIT = 200  # characters of a command's sentence in a list; longer than any of them


class Command(TyperCommand):
    """A command whose arguments are shown as `NAME`, `[NAME]` or `[NAME]...`, without Python types.

    If it takes recipe overrides, an unknown option is answered with the override to write instead.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return list(super().parse_args(ctx, args))
        except Exception as error:
            option = getattr(error, "option_name", None) if type(error).__name__ == "NoSuchOption" else None
            if option is None or not any(argument.metavar == OVERRIDES for argument in _list_arguments(self, ctx)):
                raise
            from posttrain.cli.option_hints import no_such_option

            named = ctx.command_path.partition(" ")[2]
            options = [
                name for option in self.get_params(ctx) if option.param_type_name == "option" for name in option.opts
            ]
            raise no_such_option(option, words, named, options) from None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(_format_argument(argument) for argument in _list_arguments(self, ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        if arguments := [
            (_format_argument(argument), getattr(argument, "help", "") or "") for argument in _list_arguments(self, ctx)
        ]:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        options = [option.get_help_record(ctx) for option in self.get_params(ctx) if option.param_type_name == "option"]
        with formatter.section("Options"):
            formatter.write_dl([record for record in options if record])


class Group(TyperGroup):
    """A group that lists its commands with the whole first sentence of each, under `headings` if it has any."""

    headings: Mapping[str, Sequence[str]] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name. Raises UserError with the closest name for an unknown command."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            from posttrain.cli.option_hints import no_such_command

            names = [name for listed in self.headings.values() for name in listed] or list(self.commands)
            raise no_such_command(args[0], names, ctx.command_path.partition(" ")[2])
        return super().resolve_command(ctx, args)

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        for heading, names in (self.headings or {"Commands": tuple(self.commands)}).items():
            with formatter.section(heading):
                shown = [(name, self.commands[name]) for name in names if not self.commands[name].hidden]
                formatter.write_dl(
                    [(name, command.get_short_help_str(limit=SENTENCE_LIMIT)) for name, command in shown]
                )


class App(typer.Typer):
    """A Typer app whose commands and groups are `Command` and `Group`."""

    def __init__(self, **settings: Any) -> None:
        # importing rich takes longer than everything else that `--help` does
        super().__init__(**{"cls": Group, "no_args_is_help": True, "rich_markup_mode": None, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Command, **settings})


def _list_arguments(command: TyperCommand, ctx: Any) -> list[Any]:
    return [param for param in command.get_params(ctx) if param.param_type_name == "argument"]


def _format_argument(argument: Any) -> str:
    name = argument.metavar or str(argument.name).upper()
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs != 1 else "")
