"""How a command ends when something is wrong: problems on stderr, an exit code, and a run that can go on.

2: the user's mistake. 1: a failed run. 130: Ctrl-C, 143: SIGTERM, 129: SIGHUP, 138: SIGUSR1.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import typer

from posttrain import terminal
from posttrain.errors import Interrupted, NothingTrained, PosttrainError, Problem, UserError, as_data

# keys of the context's meta
DEBUG, RUN, RESUME, JSON = "posttrain.debug", "posttrain.run", "posttrain.resume", "posttrain.json"


def run_guarded(meta: MutableMapping[str, Any], command: Callable[[], Any]) -> Any:
    """Run a command's body; tell what went wrong and raise typer.Exit with the code that says so."""
    try:
        return command()
    except PosttrainError as error:
        _debug(meta)
        tell(error)
        _tell_how_to_go_on(meta, error)
        _print_as_json(meta, error.exit_code, error.problems)
        raise typer.Exit(_exit_code(error)) from None
    except KeyboardInterrupt as stopped:
        raise _exit_for_signal(meta, stopped) from None
    except BrokenPipeError:  # the reader of stdout has gone, as in `posttrain methods list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except Exception as error:
        if isinstance(error, typer.Exit | typer.Abort):
            raise
        if hasattr(error, "format_message"):  # typer's own, of a command that is not written right
            if type(error).__name__ == "NoArgsIsHelpError":  # prints the help page
                raise
            wrong = _usage_error(error)
            tell(wrong)
            _print_as_json(meta, wrong.exit_code, wrong.problems)
            raise typer.Exit(wrong.exit_code) from None
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python wraps what is raised while a class is made
            raise _exit_for_signal(meta, error.__cause__) from None
        if refused := _refused_by_system(error):
            _debug(meta)
            tell(refused)
            _tell_how_to_go_on(meta, refused)
            _print_as_json(meta, refused.exit_code, refused.problems)
            raise typer.Exit(refused.exit_code) from None
        _tell_unexpected(error, meta)
        _print_as_json(meta, 1, [Problem("", f"{type(error).__name__}: {error}")])
        raise typer.Exit(1) from None


def _exit_code(error: PosttrainError) -> int:
    from posttrain.run import ranks

    return ranks.exit_code(error)


def _usage_error(error: Any) -> UserError:
    """A command line that typer cannot read, as one of our errors: what is wrong, the usage line, where help is."""
    from posttrain.cli.option_hints import wrong_value

    if refused := wrong_value(error.format_message()):
        return refused
    context = getattr(error, "ctx", None)
    if context is None:
        return UserError(error.format_message())
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ")
    return UserError(error.format_message(), allowed=f"usage: {usage}", hint=f"{context.command_path} --help")


def _refused_by_system(error: Exception) -> PosttrainError | None:
    """A file that could not be read or written, where no step on the way has explained it."""
    from posttrain.run.atomic_io import system_error

    return system_error(error)


def _print_as_json(meta: MutableMapping[str, Any], code: int, problems: Sequence[Problem]) -> None:
    """With --json: the error on stdout as well, for programs."""
    from posttrain.run import ranks

    if not meta.get(JSON) or not ranks.is_main():
        return
    import json

    from posttrain.redact import redacted_text

    directory: Any = meta.get(RUN)
    there = directory is not None and directory.path.is_dir()
    going_on = {"run": str(directory.path), "resume": redacted_text(shlex.join(meta[RESUME]))} if there else {}
    told = {"exit_code": code, "problems": [as_data(problem) for problem in problems], **going_on}
    terminal.say(json.dumps(told, indent=2, ensure_ascii=False))


def _exit_for_signal(meta: MutableMapping[str, Any], stopped: KeyboardInterrupt) -> typer.Exit:
    """The exit with a shell's code for the signal; `GracefulStop` raises with its number."""
    _debug(meta)
    say("interrupted")
    _tell_how_to_go_on(meta, stopped)
    return typer.Exit(128 + next((int(n) for n in stopped.args if isinstance(n, int)), 2))


def say(text: str) -> None:
    """A line for people, on stderr."""
    terminal.note(text)


def tell(error: PosttrainError) -> None:
    """All problems of an error on stderr, a blank line between those of several lines."""
    texts = [_text(problem) for problem in error.problems]
    who = "" if isinstance(error, UserError | Interrupted) else _who(str(error))  # those are every rank's
    terminal.note_escaped(who + "\n".join(texts))
    if len(texts) > 1:
        say(f"\n{len(texts)} problems")


def _who(text: str) -> str:
    """Which of several processes tells it, unless it says who failed."""
    from posttrain.run import ranks

    return f"rank {ranks.rank()}: " if ranks.world() > 1 and not text.startswith("rank ") else ""


def _text(problem: Problem) -> str:
    head, _, rest = str(problem).partition("\n")
    bold = terminal.bold(head)
    return f"{bold}\n{terminal.escape_control_characters(rest)}" if rest else bold


def _debug(meta: MutableMapping[str, Any]) -> None:
    if meta.get(DEBUG):
        terminal.note(traceback.format_exc().rstrip())


def _tell_how_to_go_on(meta: MutableMapping[str, Any], error: BaseException | None) -> None:
    """Where the run is and the command that resumes it, if that can help; a run that never began leaves no directory
    behind. After a mistake of the user's the same files fail again: the command takes the mended ones."""
    from posttrain.redact import redacted_text

    directory: Any = meta.get(RUN)
    if directory is None:
        return
    if isinstance(error, UserError | KeyboardInterrupt) and _remove_if_unused(directory):
        say("no step was made: the run directory, which held no results, is removed")
        return
    say(f"run directory: {directory.path}")
    if isinstance(error, NothingTrained):
        return
    first = "when that is mended, " if isinstance(error, UserError) else ""
    changed = ["--allow-changed"] if isinstance(error, UserError) and _compares_files(directory) else []
    say(f"{first}resume with:   {redacted_text(shlex.join([*meta[RESUME], *changed]))}")


def _compares_files(directory: Any) -> bool:
    """Whether a resumed run asks if the files that its recipe names have changed."""
    from posttrain.run.atomic_io import read_json

    return bool(read_json(directory.path / "inputs.json"))


def _remove_if_unused(directory: Any) -> bool:
    """Remove a directory that this attempt made and that holds nothing but the recipe and the environment."""
    import shutil

    written = {"recipe.yaml", "resolved.json", "env.json", "inputs.json", "status.json", "report.html"}
    written |= {directory.logs.parent.name, "track"}
    if (
        directory.follows
        or directory.attempt != 1
        or any(p.name not in written and not p.name.startswith(".") for p in _entries(directory))
    ):
        return False
    shutil.rmtree(directory.path)
    return True


def _entries(directory: Any) -> list[Path]:
    return list(directory.path.iterdir()) if directory.path.is_dir() else []


def _tell_unexpected(error: Exception, meta: MutableMapping[str, Any]) -> None:
    directory: Any = meta.get(RUN)
    where = ""
    if directory is not None and directory.logs.is_dir():
        saved = directory.logs / "traceback.txt"
        with contextlib.suppress(OSError):  # the disk may be full; the error itself must be told
            saved.write_text(traceback.format_exc(), encoding="utf-8")
            where = f" (traceback: {saved})"
    if meta.get(DEBUG):
        terminal.note(traceback.format_exc().rstrip())
    from posttrain.registry import script_line

    first = (str(error).splitlines() or [""])[0]
    script = script_line(error)
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    head = f"{script}  {what}" if script else f"unexpected {what}"
    terminal.note_escaped(_who(head) + terminal.bold(head) + terminal.escape_control_characters(where))
    if not meta.get(DEBUG):
        say(f"run with --debug for the traceback{'' if script else '; please report it'}")
    _tell_how_to_go_on(meta, None)
