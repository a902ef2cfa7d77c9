"""Error handling around every command: problems on stderr, an exit code, and how to resume the run.

Exit codes: 2 user error, 1 failed run, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 138 SIGUSR1.
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
from posttrain.errors import Interrupted, NothingTrained, PosttrainError, Problem, UserError, problem_as_dict

# keys of typer's context.meta
DEBUG, RUN, RESUME, JSON = "posttrain.debug", "posttrain.run", "posttrain.resume", "posttrain.json"


def run_guarded(meta: MutableMapping[str, Any], command: Callable[[], Any]) -> Any:
    """Run a command's body; on an error print its problems and raise typer.Exit with the exit code."""
    try:
        return command()
    except PosttrainError as error:
        _print_traceback(meta)
        print_problems(error)
        _print_resume_command(meta, error)
        _print_as_json(meta, error.exit_code, error.problems)
        raise typer.Exit(_exit_code(error)) from None
    except KeyboardInterrupt as stopped:
        raise _exit_for_signal(meta, stopped) from None
    except BrokenPipeError:  # stdout was closed by its reader, as in `posttrain methods list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except Exception as error:
        if isinstance(error, typer.Exit | typer.Abort):
            raise
        if hasattr(error, "format_message"):  # a usage error of typer
            if type(error).__name__ == "NoArgsIsHelpError":  # prints the help page
                raise
            wrong = _usage_error(error)
            print_problems(wrong)
            _print_as_json(meta, wrong.exit_code, wrong.problems)
            raise typer.Exit(wrong.exit_code) from None
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python wraps errors raised while a class is created
            raise _exit_for_signal(meta, error.__cause__) from None
        if refused := _as_system_error(error):
            _print_traceback(meta)
            print_problems(refused)
            _print_resume_command(meta, refused)
            _print_as_json(meta, refused.exit_code, refused.problems)
            raise typer.Exit(refused.exit_code) from None
        _print_unexpected(error, meta)
        _print_as_json(meta, 1, [Problem("", f"{type(error).__name__}: {error}")])
        raise typer.Exit(1) from None


def _exit_code(error: PosttrainError) -> int:
    from posttrain.run import ranks

    return ranks.exit_code(error)


def _usage_error(error: Any) -> UserError:
    """Return typer's error for an unreadable command line as a UserError with the usage line and where to find help."""
    from posttrain.cli.option_hints import wrong_value

    if refused := wrong_value(error.format_message()):
        return refused
    context = getattr(error, "ctx", None)
    if context is None:
        return UserError(error.format_message())
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ")
    missing = getattr(error, "param", None) if type(error).__name__ == "MissingParameter" else None
    form = f" {missing.opts[0]} {missing.metavar}:" if missing is not None and missing.opts[0].startswith("-") else ""
    meaning = f"{form} {missing.help}" if missing is not None and getattr(missing, "help", None) else ""
    return UserError(
        f"{error.format_message()}{meaning}", allowed=f"usage: {usage}", hint=f"{context.command_path} --help"
    )


def _as_system_error(error: Exception) -> PosttrainError | None:
    """Return the error for a file that the system refused to read or write; None for any other error."""
    from posttrain.run.atomic_io import system_error

    return system_error(error)


def _print_as_json(meta: MutableMapping[str, Any], code: int, problems: Sequence[Problem]) -> None:
    """Print the error on stdout as JSON if the command has --json."""
    from posttrain.run import ranks

    if not meta.get(JSON) or not ranks.is_main():
        return
    import json

    from posttrain.redact import redacted_text

    directory: Any = meta.get(RUN)
    has_run = directory is not None and directory.path.is_dir()
    run = {"run": str(directory.path), "resume": redacted_text(shlex.join(meta[RESUME]))} if has_run else {}
    error = {"exit_code": code, "problems": [problem_as_dict(problem) for problem in problems], **run}
    terminal.say(json.dumps(error, indent=2, ensure_ascii=False))


def _exit_for_signal(meta: MutableMapping[str, Any], stopped: KeyboardInterrupt) -> typer.Exit:
    """Return the exit with a shell's code for the signal, whose number `GracefulStop` puts into the exception."""
    _print_traceback(meta)
    say("interrupted")
    _print_resume_command(meta, stopped)
    return typer.Exit(128 + next((int(n) for n in stopped.args if isinstance(n, int)), 2))


def say(text: str) -> None:
    """Print a line for people on stderr."""
    terminal.note(text)


def print_problems(error: PosttrainError) -> None:
    """Print all problems of an error on stderr."""
    texts = [_format_problem(problem) for problem in error.problems]
    who = "" if isinstance(error, UserError | Interrupted) else _rank_prefix(str(error))  # all ranks raise these
    terminal.note_escaped(who + "\n".join(texts))
    if len(texts) > 1:
        say(f"\n{len(texts)} problems")


def _rank_prefix(text: str) -> str:
    """Return the prefix `rank N: ` if several processes run, unless the text names a rank already."""
    from posttrain.run import ranks

    return f"rank {ranks.rank()}: " if ranks.world() > 1 and not text.startswith("rank ") else ""


def _format_problem(problem: Problem) -> str:
    head, _, rest = str(problem).partition("\n")
    bold = terminal.bold(head)
    return f"{bold}\n{terminal.escape_control_characters(rest)}" if rest else bold


def _print_traceback(meta: MutableMapping[str, Any]) -> None:
    """Print the traceback if --debug was given."""
    if meta.get(DEBUG):
        terminal.note(traceback.format_exc().rstrip())


def _print_resume_command(meta: MutableMapping[str, Any], error: BaseException | None) -> None:
    """Print the run directory and the command that resumes the run, if resuming can help.

    A run that made no step has its directory removed. After a user error the same files would fail again: the command
    is to be used after they are fixed, and allows changed files. A pipeline's error may also be about the recipe of a
    stage, which `--allow-changed` does not accept: there the option is only mentioned.
    """
    from posttrain.redact import redacted_text
    from posttrain.run.atomic_io import read_json

    directory: Any = meta.get(RUN)
    if directory is None:
        return
    if isinstance(error, UserError | KeyboardInterrupt) and _remove_if_unused(directory):
        say("no step was made: the run directory held no results and was removed")
        return
    say(f"run directory: {directory.path}")
    if isinstance(error, NothingTrained):
        return
    first = "after fixing that, " if isinstance(error, UserError) else ""
    flags, note = list[str](), ""
    if isinstance(error, UserError) and read_json(directory.path / "inputs.json"):  # the files will be compared
        if (read_json(directory.path / "resolved.json") or {}).get("stage") == "pipeline":
            note = "\n(add --allow-changed if rewards, tools or data have changed; it does not accept another recipe)"
        else:
            flags = ["--allow-changed"]
    say(f"{first}resume with:   {redacted_text(shlex.join([*meta[RESUME], *flags]))}{note}")


def _remove_if_unused(directory: Any) -> bool:
    """Remove a run directory that this attempt created and that holds only the recipe and the environment."""
    import shutil

    written = {"recipe.yaml", "resolved.json", "env.json", "inputs.json", "status.json", "report.html"}
    written |= {directory.logs.parent.name, "track"}
    if (
        directory.follows
        or directory.attempt != 1
        or any(p.name not in written and not p.name.startswith(".") for p in _list_entries(directory))
    ):
        return False
    shutil.rmtree(directory.path)
    return True


def _list_entries(directory: Any) -> list[Path]:
    return list(directory.path.iterdir()) if directory.path.is_dir() else []


def _print_unexpected(error: Exception, meta: MutableMapping[str, Any]) -> None:
    """Print an error that is not a PosttrainError, with where its traceback is saved."""
    directory: Any = meta.get(RUN)
    where = ""
    if directory is not None and directory.logs.is_dir():
        saved = directory.logs / "traceback.txt"
        with contextlib.suppress(OSError):  # the disk may be full; the error must be printed anyway
            saved.write_text(traceback.format_exc(), encoding="utf-8")
            where = f" (traceback: {saved})"
    if meta.get(DEBUG):
        terminal.note(traceback.format_exc().rstrip())
    from posttrain.registry import find_script_line

    first = (str(error).splitlines() or [""])[0]
    script = find_script_line(error)
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    head = f"{script}  {what}" if script else f"unexpected {what}"
    terminal.note_escaped(_rank_prefix(head) + terminal.bold(head) + terminal.escape_control_characters(where))
    if not meta.get(DEBUG):
        say(f"run with --debug for the traceback{'' if script else '; please report it'}")
    _print_resume_command(meta, None)
