"""Errors for people: where, what, what is allowed, one hint.

Every error that a user can cause derives from `UserError` (exit code 2); a run that fails for another reason
raises `RunError` (exit code 1). Each is also a standard exception, so library users can catch `ValueError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `where` is `file:line:column`, a file, or a row; `hint` is one sentence."""

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
    """Several problems as one text; a hint that several have stands behind the last of them."""
    last = {problem.hint: number for number, problem in enumerate(problems)}
    return "\n".join(str(p if last[p.hint] == n else replace(p, hint="")) for n, p in enumerate(problems))


_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?(?=$|[ ,])")
_KEY = re.compile(r"([A-Za-z_]\w*(?:\.[\w-]+)*): ")


def as_data(problem: Problem) -> dict[str, str | int | None]:
    """A problem for programs: file, line, column and key (None where it has none) beside its texts."""
    place, key = _PLACE.match(problem.where), _KEY.match(problem.what)
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
    """Base of all errors that posttrain raises on purpose."""

    exit_code = 1
    can_restart = True  # whether the same run, started anew from its newest checkpoint, may go well

    def __init__(self, what: str, *, where: str = "", allowed: str = "", hint: str = "") -> None:
        self.problems: Sequence[Problem] = (Problem(where, what, allowed, hint),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Self:
        """One error that carries several problems, told together."""
        error = cls(problems[0].what)
        error.problems = tuple(problems)
        error.args = (join_problems(problems),)
        return error

    def at(self, where: str) -> Self:
        """The same error, told to be `where` if it does not say itself."""
        return self.of([replace(p, where=p.where or where) for p in self.problems])

    def copy(self) -> Self:
        """The same error as a new object, to be raised once more: each object's traceback grows when it is raised."""
        return self.of(self.problems)


class UserError(PosttrainError, ValueError):
    """Something the user wrote or gave is wrong. Nothing was started or lost."""

    exit_code = 2
    can_restart = False


class RecipeError(UserError):
    """A recipe that cannot be read or does not make sense."""


class DataError(UserError):
    """A data source, a row or a column that cannot be used."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded or saved as asked."""


class RewardError(UserError):
    """A reward script that cannot be loaded or breaks its contract."""


class ToolError(UserError):
    """A tool or an environment that cannot be loaded or described to a model."""


class MergeError(UserError):
    """Models that cannot be merged as asked."""


def install_command(extra: str) -> str:
    """The command that installs an extra of posttrain, and what the machine must have for it."""
    needs = " (pip compiles a part of it: gcc and Python's headers must be there)" if extra == "gym" else ""
    return f"pip install 'posttrain[{extra}]'{needs}"


class MissingExtra(UserError):
    """A command needs a package that is not installed."""

    def __init__(self, package: str, why: str, extra: str) -> None:
        super().__init__(f"{why} needs {package}, which is not installed", hint=install_command(extra))


class RunError(PosttrainError, RuntimeError):
    """A run that was started could not go on. The last good checkpoint is kept."""


class NothingTrained(RunError):
    """A run whose steps are all done, and none has changed a weight: resuming it finds the same."""

    can_restart = False


class GivenUp(RunError):
    """A run that ends because its newest steps made no update: as many as the recipe allows."""

    can_restart = False


class Interrupted(PosttrainError, RuntimeError):
    """A signal stopped a run (2 SIGINT, 15 SIGTERM, 1 SIGHUP, 10 SIGUSR1). What was reached is saved; the message says
    how to go on. The exit code is a shell's for that signal: 130, 143, 129, 138."""

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
    """The generation engine failed or holds other weights than the trainer."""


class PeerLost(RunError):
    """Another process of the same run has ended; its own error says why."""


class NonFiniteError(RunError):
    """A loss, gradient or log-prob is NaN or infinite: a step made again from its checkpoint finds the same."""

    can_restart = False


def count_noun(number: int, one: str, many: str = "") -> str:
    """`1 row`, `2 rows`; `many` where it is not the word with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


SHORTEST = 3  # letters of a word that may begin many names


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The known name that `word` was most likely meant to be, or None: one that differs in case alone, then of close
    ones one of the same letters first, then the only one that begins with the word.

    alike: difflib's ratio that a name must reach; at 0.9 long words differ by one letter.
    """
    import difflib  # here: every command imports this file, and few need it

    names = list(dict.fromkeys(known))
    if same := [name for name in names if name.lower() == word.lower()]:
        return same[0]
    if found := difflib.get_close_matches(word, names, n=5, cutoff=alike):
        return next((name for name in found if sorted(name) == sorted(word)), found[0])
    begun = [name for name in names if len(word) > SHORTEST and name.startswith(word)]
    return begun[0] if len(begun) == 1 else None


def did_you_mean(word: str, known: Iterable[str], form: str = "{}", alike: float = 0.6) -> str:
    """The hint that names the nearest known name, written as `form` says; "" where none is near. alike: as in
    `nearest`."""
    near = nearest(word, known, alike)
    return f"did you mean `{form.format(near)}`?" if near else ""
