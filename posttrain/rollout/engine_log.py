"""The log of a vLLM engine: finding the error that ended it among those that only refer to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LAST_LINES = 3
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
# e.g. `(Worker_TP1 pid=20417) ERROR 11-30 20:39:34 [core.py:1195] `, and torch's `[rank1]: `
_PREFIX = re.compile(
    r"(?:\((?P<process>\S+) pid=\d+\) ?)?(?:(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
    r"(?:\[rank\d+\]: ?)?"
)
_TRACEBACK = "Traceback (most recent call last):"
_CAUSE = "The above exception was the direct cause"  # the next one was raised `from` it
_CONTEXT = "During handling of the above exception"
_IGNORED = "Exception ignored in"
_RAISED = re.compile(r"([\w.<>]+)(?:: *(.*))?")  # last line of a traceback
_ERROR = re.compile(r"\b([A-Za-z_.]*(?:Error|Exception)): (.+)")  # anywhere in a line
_UNFINISHED = re.compile(r":$|\d+ validation errors? for \S+$")  # the next line has the message
_REFERENCE = re.compile(
    r"root cause|stack trace|^EngineDeadError|^EngineGenerateError$|^RuntimeError: Executor failed"
    r"|: cancelled$|^CancelledError|^SystemExit|^KeyboardInterrupt"
)


class LogLine(NamedTuple):
    """A line of a log without its prefix. logged: by an engine core or a worker, with level ERROR."""

    number: int
    logged: bool
    text: str


class LoggedError(NamedTuple):
    """An error in a log, `Type: message`. rank: 0 logged by an engine core or a worker, 1 another traceback, 2 a line
    without traceback."""

    rank: int
    number: int
    text: str


def read_log(log: Path | None) -> str:
    """Return the output of an engine's process; "" if there is none."""
    try:
        return "" if log is None else log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def last_lines(text: str) -> str:
    """Return the last non-empty lines of a log, each on an indented line of its own."""
    return "".join(f"\n    {line}" for line in [line for line in text.splitlines() if line.strip()][-LAST_LINES:])


def refers_to_another(error: str) -> bool:
    """Return whether an error `Type: message` only says that another one has occurred."""
    return _REFERENCE.search(error) is not None


def root_cause(text: str) -> str:
    """Return the error in an engine's log that explains the others, as `Type: message`; "" if there is none.

    It is the first one that does not refer to another: when a worker fails, the other workers lose their connection to
    it, and the engine core only reports that a worker has failed.
    """
    processes: dict[str, list[LogLine]] = {}  # their lines may alternate
    for number, line in enumerate(_COLOR.sub("", text).splitlines()):
        prefix = _PREFIX.match(line)
        assert prefix is not None  # it may be empty
        process, level = prefix["process"] or "", prefix["level"]
        if level in (None, "ERROR", "CRITICAL"):
            logged = level is not None and process.startswith(("EngineCore", "Worker", "VllmWorker"))
            processes.setdefault(process, []).append(LogLine(number, logged, line[prefix.end() :]))
    errors = [error for lines in processes.values() for error in _errors(lines)]
    return min((error for error in errors if not refers_to_another(error.text)), default=LoggedError(0, 0, "")).text


def _errors(lines: Sequence[LogLine]) -> list[LoggedError]:
    """Return the errors in the output of one process. Of exceptions raised `from` each other, the first; of those
    raised while another was handled, the last."""
    raised, others = list[LoggedError](), list[LoggedError]()
    link, source, in_stack = "", "", False
    for place, (number, logged, text) in enumerate(lines):
        if text == _TRACEBACK:
            in_stack = True
        elif in_stack and (not text or text[0].isspace()):
            source = source if not text.strip("^~ ") else text.strip()
        elif in_stack:
            in_stack = False
            following = lines[place + 1].text.strip() if place + 1 < len(lines) else ""
            error = LoggedError(0 if logged else 1, number, _describe_raised(text, source, following))
            refers = refers_to_another(error.text)
            if link == _CONTEXT and raised and not refers:
                raised[-1] = error
            elif link != _IGNORED and not (link == _CAUSE and raised and not refers_to_another(raised[-1].text)):
                raised.append(error)
            link = ""
        elif found := [start for start in (_CAUSE, _CONTEXT, _IGNORED) if text.startswith(start)]:
            link = found[0]
        elif (match := _ERROR.search(text)) and "Warning:" not in text[: match.start()]:
            others.append(LoggedError(2, number, f"{match[1].rpartition('.')[2]}: {match[2].strip()}"))
    return raised + others


def _describe_raised(line: str, source: str, following: str) -> str:
    """Return the last line of a traceback as `Type: message`. source: the statement that raised it, the message of an
    exception without one. following: the next line, which has the message if this one ends with a colon or counts
    pydantic's errors."""
    match = _RAISED.fullmatch(line)
    if match is None:
        return line.strip()
    kind, message = match[1].rpartition(".")[2], (match[2] or "").strip() or source
    return f"{kind}: {message} {following if _UNFINISHED.search(message) else ''}".strip()
