"""User-facing errors: where, what, what is allowed, one hint.

Every error that a user can cause derives from `UserError` (exit code 2); a run that fails for another reason raises
`RunError` (exit code 1). Each is also a standard exception, so library users can catch `ValueError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True)
class Problem:
    """One mistake. `where` is `file:line:column`, a file, or a row; `hint` is one sentence."""

    where: str
    what: str
    allowed: str = ""
    hint: str = ""

    def __str__(self) -> str:
        head = f"{self.where}  {self.what}" if self.where else self.what
        lines = [head]
        if self.allowed:
            lines.append(f"  {self.allowed}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


def join_problems(problems: Sequence[Problem]) -> str:
    """Join several problems into one text; a hint shared by several problems is printed after the last of them."""
    last = {problem.hint: number for number, problem in enumerate(problems)}
    return "\n".join(str(p if last[p.hint] == n else replace(p, hint="")) for n, p in enumerate(problems))


_LOCATION = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?(?=$|[ ,])")
_KEY = re.compile(r"([A-Za-z_]\w*(?:\.[\w-]+)*): ")


def problem_as_dict(problem: Problem) -> dict[str, str | int | None]:
    """Return a problem as data: file, line, column and key (None if it has none), and its texts."""
    place, key = _LOCATION.match(problem.where), _KEY.match(problem.what)
    numbers = {name: int(place[name]) if place and place[name] else None for name in ("line", "column")}
    return {
        "file": place["file"] if place else None,
        **numbers,
        "key": key[1] if key else None,
        "where": problem.where,
        "what": problem.what,
        "allowed": problem.allowed,
        "hint": problem.hint,
    }


class PosttrainError(Exception):
    """Base class of all errors that posttrain raises deliberately."""

    exit_code = 1
    can_restart = True  # whether the run may succeed when restarted from its newest checkpoint

    def __init__(self, what: str, *, where: str = "", allowed: str = "", hint: str = "") -> None:
        self.problems: Sequence[Problem] = (Problem(where, what, allowed, hint),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Self:
        """Return one error that carries several problems."""
        error = cls.__new__(cls)  # subclasses have other arguments
        error.problems = tuple(problems)
        error.args = (join_problems(problems),)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the problems: ranks that share an engine send errors to each other."""
        return type(self).of, (self.problems,), vars(self)

    def at(self, where: str) -> Self:
        """Return the same error, with `where` for problems that have no location."""
        return self.of([replace(p, where=p.where or where) for p in self.problems])

    def copy(self) -> Self:
        """Return the same error as a new object to raise again: the traceback of an object grows with every raise."""
        return self.of(self.problems)


class UserError(PosttrainError, ValueError):
    """Wrong user input. No run was started and no data was lost."""

    exit_code = 2
    can_restart = False


class RecipeError(UserError):
    """A recipe that cannot be read or is invalid."""


class DataError(UserError):
    """A data source, row or column that cannot be used."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded or saved as requested."""


class RewardError(UserError):
    """A reward script that cannot be loaded or violates its contract."""


class ToolError(UserError):
    """A tool or an environment that cannot be loaded or described to a model."""


class MergeError(UserError):
    """Models that cannot be merged as requested."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of posttrain, with its system requirements."""
    needs = " (pip compiles a part of it: gcc and Python's headers must be there)" if extra == "gym" else ""
    return f"pip install 'posttrain[{extra}]'{needs}"


class MissingExtra(UserError):
    """A package required by a command is not installed."""

    def __init__(self, package: str, why: str, extra: str) -> None:
        super().__init__(f"{why} needs {package}, which is not installed", hint=install_command(extra))


class RunError(PosttrainError, RuntimeError):
    """A run that started but failed. The last good checkpoint is kept."""


class NothingTrained(RunError):
    """A run that completed all steps without changing a weight; resuming it gives the same result."""

    can_restart = False


class GivenUp(RunError):
    """A run that ended because its newest steps made no update, up to the recipe's limit."""

    can_restart = False


class Interrupted(PosttrainError, RuntimeError):
    """A run stopped by a signal (2 SIGINT, 15 SIGTERM, 1 SIGHUP, 10 SIGUSR1); its progress is saved.

    The message explains how to resume. The exit code is that of a shell for the signal: 130, 143, 129, 138.
    """

    exit_code = 130

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        allowed: str = "",
        hint: str = "go on with the same command and --resume",
        number: int = 2,
    ) -> None:
        super().__init__(what, where=where, allowed=allowed, hint=hint)
        self.exit_code = 128 + number


class EngineError(RunError):
    """The generation engine failed, or its weights differ from the trainer's."""


class PeerLost(RunError):
    """Another process of the same run has exited; its error has the cause."""


class NonFiniteError(RunError):
    """A NaN or infinite loss, gradient or log-prob; repeating the step from its checkpoint gives the same result."""

    can_restart = False


def count_noun(number: int, one: str, many: str = "") -> str:
    """Return `1 row` or `2 rows`; `many` is the plural if it is not formed with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


MIN_PREFIX_LENGTH = 3  # words up to this length are not completed to a name that begins with them


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the known name most likely meant by `word`, or None.

    Prefers a name that differs in case only, then among close matches one with the same letters, then the only name
    that begins with the word. alike: minimum difflib ratio; at 0.9 long words differ by one letter.
    """
    import difflib  # imported here because every command imports this file and few need difflib

    names = list(dict.fromkeys(known))
    if same := [name for name in names if name.lower() == word.lower()]:
        return same[0]
    if found := difflib.get_close_matches(word, names, n=5, cutoff=alike):
        return next((name for name in found if sorted(name) == sorted(word)), found[0])
    begun = [name for name in names if len(word) > MIN_PREFIX_LENGTH and name.startswith(word)]
    return begun[0] if len(begun) == 1 else None


def did_you_mean(word: str, known: Iterable[str], form: str = "{}", alike: float = 0.6) -> str:
    """Return a hint with the nearest known name, formatted by `form`; "" if none is close. alike: as in `nearest`."""
    near = nearest(word, known, alike)
    return f"did you mean `{form.format(near)}`?" if near else ""
