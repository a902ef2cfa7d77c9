"""Typed transcript of a rollout, passed to rewards with the argument `transcript`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from posttrain.errors import RewardError, did_you_mean
from posttrain.registry import format_value

Role = Literal["prompt", "model", "tool", "environment"]
ROLES: tuple[str, ...] = get_args(Role)


class Message(NamedTuple):
    """One message of a transcript. Text written by the model always has the role `model`, whatever tags it contains.

    role: prompt (once, first), model (one per turn), tool (one per call of the turn before), environment (observation
    after the turn before). text: as the model saw it; the prompt includes its chat template. name: of the tool. kind:
    result of the call: ok, error, timeout, malformed or unknown; "" for other roles.
    """

    role: Role
    text: str
    name: str = ""
    kind: str = ""


def make_transcript(
    prompt: str,
    completion: str,
    turns: Sequence[str] = (),
    calls: Sequence[Mapping[str, Any]] | None = None,
    observations: Sequence[str | None] = (),
) -> list[Message]:
    """Build the transcript of a rollout.

    turns: texts of the model's turns in a rollout with tools or an environment; otherwise the completion is the only
    turn. calls: {"name", "result", "kind", "turn"} each, None without tools. observations: of the environment after
    each turn, None if it showed nothing.
    """
    transcript = [Message("prompt", prompt)]
    if calls is None:
        return [*transcript, Message("model", completion)]
    for number, text in enumerate(turns):
        transcript.append(Message("model", text))
        transcript += [Message("tool", str(c["result"]), c["name"], c["kind"]) for c in calls if c["turn"] == number]
        if number < len(observations) and (shown := observations[number]) is not None:
            transcript.append(Message("environment", shown))
    return transcript


def read_transcript(given: Any, completion: str, where: str) -> list[Message]:
    """Read a transcript from an example or a labeled row: a list of {"role", "text", "name", "kind"} or of such tuples.

    A missing `kind` of a tool is ok. None gives the completion alone, as the model's message. Raises RewardError,
    naming `where`.
    """
    if given is None:
        return [Message("model", completion)]
    if not isinstance(given, list | tuple) or isinstance(given, Message):
        raise _transcript_error(given, where)
    return [_message(entry, where) for entry in given]


def _message(entry: Any, where: str) -> Message:
    fields: Mapping[str, Any] = {}
    if isinstance(entry, Mapping):
        fields = entry
    elif _is_message(entry):
        fields = dict(zip(Message._fields, entry, strict=False))
    texts = all(isinstance(value, str) for value in fields.values())
    if not texts or not {"role", "text"} <= set(fields) <= set(Message._fields):
        raise _transcript_error(entry, where)
    if fields["role"] not in ROLES:
        hint = did_you_mean(fields["role"], ROLES)
        what = f"a transcript has no role {fields['role']!r}"
        raise RewardError(what, where=where, allowed=", ".join(ROLES), hint=hint)
    message = Message(**fields)
    return message._replace(kind="ok") if message.role == "tool" and not message.kind else message


def _is_message(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and 2 <= len(entry) <= len(Message._fields)


def _transcript_error(given: Any, where: str) -> RewardError:
    return RewardError(
        f"not a transcript: {format_value(given)}",
        where=where,
        allowed='a list of {"role", "text"}, of a tool also "name" and "kind"',
        hint='e.g. [{"role": "model", "text": "..."}, {"role": "tool", "name": "search", "text": "..."}]',
    )
