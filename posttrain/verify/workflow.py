"""Calls of a workflow with their roles and parents, passed to rewards with the argument `workflow`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.errors import RewardError
from posttrain.registry import format_value

FIELDS = ("role", "text", "parent", "finish", "tokens", "note", "parts", "shown")


@dataclass(frozen=True)
class RoleCall:
    """One call of a workflow.

    role: role that wrote it. text: text written, in all turns. parent: index of the call that it continues, None = the
    data's prompt. finish: stop or length. tokens: number of tokens written. note: annotations by the workflow. parts,
    shown: for a multi-turn call, the texts of its turns and the replies shown between them.
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
        """The text after the thought."""
        return self.text.rpartition("</think>")[2].strip()


@dataclass(frozen=True)
class Workflow:
    """The calls of one rollout, in order. number: index of the scored call."""

    calls: tuple[RoleCall, ...]
    number: int = 0

    @property
    def mine(self) -> RoleCall:
        """The scored call."""
        return self.calls[self.number]

    @property
    def parent(self) -> RoleCall | None:
        """The call that the scored call continues; None = the data's prompt."""
        return None if self.mine.parent is None else self.calls[self.mine.parent]

    def children(self, role: str | None = None, of: RoleCall | None = None) -> list[RoleCall]:
        """Return the calls that continue the scored call (or `of`), of one role or of all roles."""
        index = self.number if of is None else next(n for n, call in enumerate(self.calls) if call is of)
        return [call for call in self.calls if call.parent == index and role in (None, call.role)]

    def by(self, role: str) -> list[RoleCall]:
        """Return the calls of a role."""
        return [call for call in self.calls if call.role == role]

    def last(self, role: str) -> RoleCall | None:
        """Return the last call of a role; None if it was never called."""
        return next(reversed(self.by(role)), None)


def read_workflow(given: Any, completion: str, where: str) -> Workflow:
    """Read a workflow from an example: a list of {"role", "text", "parent", ...} in order.

    The scored call is the one with `"mine": true`, else the last one whose text is the completion. None gives one call
    with the completion and role "". Raises RewardError, naming `where`.
    """
    if given is None:
        return Workflow((RoleCall("", completion),))
    listed = list(given) if isinstance(given, list | tuple) else []
    known = {*FIELDS, "mine"}
    if not listed or not all(isinstance(call, Mapping) and {"role", "text"} <= set(call) <= known for call in listed):
        raise RewardError(
            f"not a list of workflow calls: {format_value(given)}",
            where=where,
            allowed=f"a list of {{{', '.join(sorted(known))}}}; role and text are required",
        )
    calls = tuple(RoleCall(**{key: value for key, value in call.items() if key != "mine"}) for call in listed)
    marked = [n for n, call in enumerate(listed) if call.get("mine")]
    found = marked or [n for n, call in enumerate(calls) if call.text == completion]
    if not found:
        raise RewardError("no call of the workflow has the text of the completion", where=where)
    return Workflow(calls, found[-1])


def build_workflow(calls: Sequence[Mapping[str, Any]], number: int, completion: str) -> Workflow:
    """Build the workflow of a row; a plain completion is one call with role ""."""
    return Workflow(tuple(RoleCall(**c) for c in calls), number) if calls else Workflow((RoleCall("", completion),))
