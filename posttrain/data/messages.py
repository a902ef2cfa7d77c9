"""Conversion of messages in common file formats to {role, content, ...}.

Supported: OpenAI (role, content as text or parts, `weight`, the deprecated `function_call` and role function), ShareGPT
(from, value; function-call turns and their observations; its names of roles in `role`, too), and `train: true | false`
on a message, which sets whether it may be trained on. A flag in every part of a content counts as the message's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from posttrain import chat
from posttrain.errors import DataError, nearest
from posttrain.thoughts import THINK_END, THINK_START

Message = dict[str, Any]

# Role names of ShareGPT files, for `from` and `role`. A call is an assistant turn; its result is a tool message.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALL_ROLES = ("function_call", "tool_call")
KNOWN_ROLES = (*ROLES, "system", "developer", "user", "assistant", "tool", "function")
_NEED_CONTENT = ("system", "developer", "user")  # roles whose messages must have a content


def parse_messages(value: Any, column: str, where: str, *, trained: bool = False) -> list[Message]:
    """Return a list of {role, content, ...} without null fields from a list of messages or its JSON text.

    trained: the messages are trained on, so a turn with a trained and an untrained part is an error.
    """
    if isinstance(value, str):
        value = json.loads(value)
    return [_parse_message(message, f"{column}[{i}]", where, trained) for i, message in enumerate(value)]


def are_messages(value: Any) -> bool:
    """Return whether a column holds messages: a list, or JSON text of a list of messages (as in a CSV file)."""
    if not (isinstance(value, str) and value.lstrip().startswith("[{")):
        return isinstance(value, list | tuple)
    try:
        found = json.loads(value)
    except ValueError:
        return False
    return all(isinstance(m, dict) and ("role" in m or "from" in m) for m in found)


def _parse_message(message: Any, name: str, where: str, trained: bool) -> Message:
    """Return one message as {role, content, ...} without null fields. Raises DataError for an invalid message."""
    if not isinstance(message, Mapping):
        raise DataError(f"`{name}` is {describe_value(message)}, not a message", where=where)
    parsed = {k: v for k, v in message.items() if v is not None}
    parsed = _convert_sharegpt(parsed, name, where)
    if not isinstance(parsed.get("role"), str):
        raise DataError(f"`{name}` has no role; it has: {', '.join(parsed)}", where=where)
    _check_role(parsed["role"], name, where)
    if parsed["role"] in _NEED_CONTENT and "content" not in parsed:
        held = ", ".join(message)
        raise DataError(f"`{name}` has no content; its keys: {held}", where=where, allowed="`content`: a text")
    if "content" in parsed:
        parsed = _lift_part_flags(parsed, name, where, trained)
        parsed["content"] = _join_content(parsed["content"], name, where)
    parsed = _convert_function_call(parsed, name, where)
    _check_calls(parsed, name, where)
    return _apply_weight(parsed, name, where)


def _check_role(role: str, name: str, where: str) -> None:
    """Raise DataError for a misspelled role, which a template would copy verbatim and training would ignore."""
    meant = None if role in KNOWN_ROLES else nearest(role.lower(), KNOWN_ROLES, 0.66)
    if meant is not None and not role.startswith(meant):  # `user_2` is a different, valid name
        allowed = "roles: system, developer, user, assistant, tool; also human, gpt, ..."
        raise DataError(
            f"`{name}` has the role `{role}`", where=where, allowed=allowed, hint=f"did you mean `{meant}`?"
        )


_CALLS_FORMAT = '[{"function": {"name": ..., "arguments": {...}}}, ...]; arguments may be JSON text of an object'


def _check_calls(message: Message, name: str, where: str) -> None:
    """Raise DataError for `tool_calls` that are not a list of calls with a name and arguments."""
    key = f"`{name}.tool_calls`"
    _check_json(message.get("tool_calls"), key, where)
    try:
        calls = chat.clean_messages([{k: v for k, v in message.items() if k == "tool_calls"}])[0].get("tool_calls", [])
    except (ValueError, TypeError, AttributeError, RecursionError):
        calls = None
    if not isinstance(calls, list) or not isinstance(message.get("tool_calls", []), str | list | tuple):
        raise DataError(f"{key} cannot be read: {str(message['tool_calls'])[:60]}", where=where, allowed=_CALLS_FORMAT)
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{key} has a call without a name: {str(call)[:60]}", where=where, allowed=_CALLS_FORMAT)
        if not isinstance(function.get("arguments", {}), Mapping):
            what = describe_value(function["arguments"])
            raise DataError(
                f"{key}: the arguments of {function['name']} are {what}", where=where, allowed=_CALLS_FORMAT
            )


def _check_json(calls: Any, key: str, where: str) -> None:
    """Raise DataError for invalid JSON text, of the whole call list or of the arguments of one call."""
    if isinstance(calls, str):
        _check_json_text(calls or "[]", f"{key} cannot be read:", where)
    for i, call in enumerate(calls if isinstance(calls, list | tuple) else ()):
        function = (call.get("function") or call) if isinstance(call, Mapping) else {}
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            head = f"{key} cannot be read: in call {i}, the arguments of {function.get('name')} are"
            _check_json_text(function["arguments"] or "{}", head, where)


def _check_json_text(text: str, head: str, where: str) -> None:
    """Raise DataError for invalid JSON text, with the position of the error."""
    try:
        json.loads(text)
    except json.JSONDecodeError as cause:
        near = text[max(cause.pos - 30, 0) : cause.pos + 30]
        problem = f"{head} broken JSON at character {cause.pos + 1} ({cause.msg}), near {near!r}"
        raise DataError(problem, where=where, allowed=_CALLS_FORMAT) from cause
    except (ValueError, RecursionError):
        return  # number too long or nesting too deep: _check_calls reports it


def _convert_function_call(message: Message, name: str, where: str) -> Message:
    """Convert OpenAI's deprecated `function_call` and role function to `tool_calls` and role tool."""
    if message["role"] == "function":
        message = {**message, "role": "tool"}
    if "function_call" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "function_call"}
    call = message["function_call"]
    if message["role"] != "assistant" or "tool_calls" in message:
        raise DataError(
            f"`{name}` has a `function_call` beside its role or `tool_calls`",
            where=where,
            allowed="a call of an assistant message, as `tool_calls` or as the older `function_call`",
        )
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise DataError(
            f"`{name}.function_call` is {describe_value(call)}", where=where, allowed='{"name": ..., "arguments": ...}'
        )
    return {**rest, "tool_calls": [{"type": "function", "function": dict(call)}]}


def get_answer(messages: list[Message]) -> str | list[Message]:
    """Return the last message as an answer: its text, or [message] if it has keys besides role and content."""
    last = messages[-1]
    more = any(key not in ("role", "content", "train") for key in last)
    return [last] if more else str(last.get("content", ""))


def _convert_sharegpt(message: Message, name: str, where: str) -> Message:
    """Convert ShareGPT's keys `from` and `value`, and its names of roles, to role and content; other keys stay.

    The role `observation` stays if it is under `role`: GLM's templates read it.
    """
    key = "role" if "role" in message else "from"
    sender = message.get(key)
    if not isinstance(sender, str):
        return message
    role = sender if (key, sender) == ("role", "observation") else ROLES.get(sender, sender)
    text_key = "value" if "content" not in message else "content"
    rest = {k: v for k, v in message.items() if k not in (key, text_key)}
    text = message.get(text_key)
    if sender in CALL_ROLES:
        thought, calls = _split_thought(text)
        return {**rest, "role": role, "content": thought, "tool_calls": _parse_calls(calls, name, where)}
    if text is None and (key == "role" or role in _NEED_CONTENT):
        return {**rest, "role": role}
    return {**rest, "role": role, "content": "" if text is None else text}


def _split_thought(text: Any) -> tuple[str, Any]:
    """Return (thought with its marks, call) of a ShareGPT call turn; "" if it begins without one."""
    if not isinstance(text, str) or not text.lstrip().startswith(THINK_START):
        return "", text
    thought, end, call = text.partition(THINK_END)
    return f"{thought.lstrip()}{end}", call


def _parse_calls(text: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Return the calls in a ShareGPT turn: a JSON object {name, arguments} or a list of them."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(
            f"`{name}.value` is no call: {str(text)[:60]!r}",
            where=where,
            allowed='{"name": ..., "arguments": {...}} as JSON, or a list of such objects',
        )
    return [{"type": "function", "function": {"name": c["name"], "arguments": c.get("arguments", {})}} for c in calls]


def _lift_part_flags(message: Message, name: str, where: str, trained: bool) -> Message:
    """Return the message with the flags `train` and `weight` of the parts of its content as its own flag.

    Flags that differ between the parts are an error if the message is trained on, since a turn is trained on as a
    whole; else they are left out.
    """
    content = message["content"]
    if message["role"] != "assistant" or not isinstance(content, list) or "train" in message or "weight" in message:
        return message
    parts = [part for part in content if isinstance(part, Mapping)]
    flags = [next((part[key] for key in ("train", "weight") if part.get(key) is not None), True) for part in parts]
    if trained and len(set(map(bool, flags))) > 1:
        raise DataError(
            f"`{name}.content` has parts that are trained on and parts that are not",
            where=where,
            allowed="`train: true | false` of the whole message: a turn is trained on as a whole",
            hint="leave the untrained part out of the turn",
        )
    return {**message, "train": False} if flags and not any(flags) else message


def _join_content(content: Any, name: str, where: str) -> str:
    """Return the content as one text: text parts are concatenated. Raises DataError for other parts (images)."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        others = [
            part for part in content if part.get("type", "text") != "text" or not isinstance(part.get("text"), str)
        ]
        if not others:
            return "".join(part["text"] for part in content)
        raise DataError(f"`{name}.content` has a part that is no text: {str(others[0])[:60]}", where=where)
    raise DataError(f"`{name}.content` is {describe_value(content)}, not text", where=where)


def _apply_weight(message: Message, name: str, where: str) -> Message:
    """Return the message with `train` validated, or derived from OpenAI's `weight`: 0 is not trained on, 1 is."""
    if "train" in message and not isinstance(message["train"], bool):
        raise DataError(f"`{name}.train` is {describe_value(message['train'])}", where=where, allowed="true or false")
    if "weight" not in message:
        return message
    weight = message["weight"]
    if weight not in (0, 1):
        raise DataError(f"`{name}.weight` is {weight!r}", where=where, allowed="0 (not trained on) or 1")
    rest = {k: v for k, v in message.items() if k != "weight"}
    return {"train": bool(weight), **rest}


def describe_value(value: Any) -> str:
    """Return type and value for error messages: `null`, `int (3)`."""
    return "null" if value is None else f"{type(value).__name__} ({str(value)[:40]})"
