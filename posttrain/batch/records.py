"""Conversions of multi-turn rollouts: to fields of a reward's `Sample`, to records of samples.jsonl, to metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.batch import Rollout, ToolCall


def sample_fields(rollout: Rollout) -> dict[str, Any]:
    """Return the `verify.score.Sample` fields of a rollout's turns or workflow calls; {} for a single-turn rollout."""
    if not rollout.turns:
        return _workflow_fields(rollout)
    return {
        "messages": to_messages(rollout),
        "tool_calls": [
            {**call_record(call), "turn": number} for number, turn in enumerate(rollout.turns) for call in turn.calls
        ],
        "turns": len(rollout.turns),
        "world_score": rollout.world_score,
        "parts": tuple(turn.text for turn in rollout.turns),
        "turn_rewards": tuple(turn.reward for turn in rollout.turns),
        "observations": tuple(None if turn.calls else turn.reply for turn in rollout.turns),
    }


def _workflow_fields(rollout: Rollout) -> dict[str, Any]:
    """Return the `Sample` fields of a workflow call, with its turns if it was replied to; {} for other rollouts."""
    if rollout.call is None:
        return {}
    call, fields = rollout.call.calls[rollout.call.number], call_records(rollout)
    if not call.shown:
        return fields
    observations = (*call.shown, None)
    return {**fields, "tool_calls": [], "turns": len(call.parts), "parts": call.parts, "observations": observations}


def sample_fields_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `sample_fields` from a completions.jsonl record, as far as `turn_records` stores them."""
    turns = record.get("turns")
    if not turns:
        return {}
    return {
        "tool_calls": [{**call, "turn": number} for number, turn in enumerate(turns) for call in turn["calls"]],
        "turns": len(turns),
        "parts": tuple(turn["text"] for turn in turns),
        "turn_rewards": tuple(turn.get("reward") for turn in turns),
        "observations": tuple(None if turn["calls"] else turn.get("reply") for turn in turns),
    }


def to_messages(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the rollout as chat messages: the prompt's messages, then each turn with the tool results or reply."""
    row = rollout.prompt.row
    asked = row.get("prompt") if row.get("prompt") is not None else row.get("messages")
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(m) for m in asked or ()]
    for turn in rollout.turns:
        messages.append({"role": "assistant", "content": turn.text})
        if turn.reply is not None and turn.calls:
            messages += [{"role": "tool", "name": call.name, "content": call.result} for call in turn.calls]
        elif turn.reply is not None:
            messages.append({"role": "user", "content": turn.reply})
    return messages


def call_record(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as the dict that rewards receive and samples.jsonl stores."""
    return {"name": call.name, "arguments": dict(call.arguments), "result": call.result, "kind": call.kind}


def call_records(rollout: Rollout) -> dict[str, Any]:
    """Return the samples.jsonl fields of a workflow call: all calls of its rollout, and its index. {} for others."""
    if rollout.call is None:
        return {}
    calls = [
        {name: value for name, value in call._asdict().items() if value or name in ("role", "text", "parent")}
        for call in rollout.call.calls
    ]
    return {"calls": calls, "call": rollout.call.number}


def turn_records(rollout: Rollout) -> dict[str, Any]:
    """Return the samples.jsonl and completions.jsonl fields of a multi-turn rollout; {} for a single-turn rollout."""
    if not rollout.turns:
        return {}
    turns = [
        {
            "text": turn.text,
            "calls": [call_record(call) for call in turn.calls],
            **({} if turn.reply is None else {"reply": turn.reply}),
            **({} if turn.reward is None else {"reward": turn.reward}),
        }
        for turn in rollout.turns
    ]
    return {"turns": turns, "ended": rollout.ended}


def turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Compute means per rollout (also per tool) and the share of each end reason; {} if no rollout has turns.

    turns/productivity: correct answers / tool calls of the step; absent if the step has no call.
    """
    acting = [r for r in rollouts if r.turns]
    if not acting:
        return {}
    calls = [call for r in acting for turn in r.turns for call in turn.calls]
    count = len(acting)
    replied = sum(len(s.ids) for r in acting for s in r.segments if s.kind != "model")
    values = {
        "turns/mean": sum(len(r.turns) for r in acting) / count,
        "turns/calls": len(calls) / count,
        "turns/failed_calls": sum(call.kind != "ok" for call in calls) / count,
        "turns/reply_tokens": replied / count,
    }
    for kind in ("error", "timeout", "malformed", "unknown"):
        values[f"turns/{kind}"] = sum(call.kind == kind for call in calls) / count
    for why in ("answer", "done", "turns", "tokens", "time", "error"):
        if share := sum(r.ended == why for r in acting) / count:
            values[f"turns/ended_{why}"] = share
    if calls:
        values["turns/productivity"] = sum(r.correct is True for r in acting) / len(calls)
    known = [call for call in calls if call.kind not in ("malformed", "unknown")]
    failed = Counter(call.name for call in known if call.kind != "ok")
    for name, times in Counter(call.name for call in known).items():
        values |= {f"tools/{name}/calls": times / count, f"tools/{name}/errors": failed[name] / count}
    return values
