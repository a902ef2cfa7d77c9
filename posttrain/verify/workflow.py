"""Who said what in a workflow, and in answer to whom: what a reward asks for by an argument `workflow`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import RewardError
from posttrain.registry import shown_value

FIELDS = ("role", "text", "parent", "finish", "tokens", "note", "parts", "shown")


@dataclass(frozen=True)
class Said:
    """One call of a workflow.

    role: who wrote it. text: what it wrote, all turns of it. parent: the place of the call that it goes on from, None =
    the data's prompt. finish: stop or length. tokens: that it wrote. note: what the workflow tells of it. parts, shown:
    of a call that was replied to, the texts of its turns, and what was shown between them.
    """

    role: str
    text: str
    parent: int | None = None
    finish: str = "stop"
    tokens: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[str] = ()
    shown: Sequence[str] = ()

    @property
    def answer(self) -> str:
        """What it wrote behind its thought."""
        return self.text.rpartition("</think>")[2].strip()


@dataclass(frozen=True)
class Workflow:
    """The calls of one rollout in order. number: the place of the one that is scored."""

    calls: tuple[Said, ...]
    number: int = 0

    @property
    def mine(self) -> Said:
        """The call that is scored."""
        return self.calls[self.number]

    @property
    def parent(self) -> Said | None:
        """The call that it goes on from; None = the data's prompt."""
        return None if self.mine.parent is None else self.calls[self.mine.parent]

    def children(self, role: str | None = None, of: Said | None = None) -> list[Said]:
        """The calls that go on from the scored one (or from `of`), of one role or of all."""
        place = self.number if of is None else next(n for n, call in enumerate(self.calls) if call is of)
        return [call for call in self.calls if call.parent == place and role in (None, call.role)]

    def by(self, role: str) -> list[Said]:
        """The calls of a role."""
        return [call for call in self.calls if call.role == role]

    def last(self, role: str) -> Said | None:
        """The last call of a role; None if it was never called."""
        return next(reversed(self.by(role)), None)


def read_workflow(given: Any, completion: str, where: str) -> Workflow:
    """A workflow as an example writes it: a list of {"role", "text", "parent", ...} in order; the scored call has the
    text of the completion, the last of several, or `"mine": true`. None: the completion is the only call, of no role.

    Raises RewardError, which names the place by `where`.
    """
    if given is None:
        return Workflow((Said("", completion),))
    listed = list(given) if isinstance(given, list | tuple) else []
    known = {*FIELDS, "mine"}
    if not listed or not all(isinstance(one, Mapping) and {"role", "text"} <= set(one) <= known for one in listed):
        raise RewardError(
            f"no calls of a workflow: {shown_value(given)}",
            where=where,
            allowed=f"a list of {{{', '.join(sorted(known))}}}, of which role and text must be there",
        )
    calls = tuple(Said(**{key: value for key, value in one.items() if key != "mine"}) for one in listed)
    marked = [n for n, one in enumerate(listed) if one.get("mine")]
    found = marked or [n for n, call in enumerate(calls) if call.text == completion]
    if not found:
        raise RewardError("no call of the workflow has the text of the completion", where=where)
    return Workflow(calls, found[-1])


def build_workflow(calls: Sequence[Mapping[str, Any]], number: int, completion: str) -> Workflow:
    """The workflow of a row; of a plain completion, one call of no role."""
    return Workflow(tuple(Said(**one) for one in calls), number) if calls else Workflow((Said("", completion),))
