"""What a reward may ask about a completion: the sample, as the reward's role reads it, and the built-in arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from posttrain.verify import trl_form
from posttrain.verify.transcript import Message, make_transcript
from posttrain.verify.workflow import build_workflow


@dataclass(frozen=True)
class Sample:
    """One completion and what a reward may ask about it. Rows of one `group` are completions of one prompt."""

    completion: str
    row: Mapping[str, Any]  # the data row with all its columns
    prompt: str = ""  # as the model saw it
    finish: Literal["stop", "length"] = "stop"
    token_count: int = 0
    group: int = 0
    token_ids: Sequence[int] = ()
    token_ends: Sequence[int] = ()  # the character at which each token ends, where it was asked for
    # Of a rollout of several turns; None and () for a single one:
    messages: Sequence[Mapping[str, Any]] = ()  # the whole conversation
    tool_calls: Sequence[Mapping[str, Any]] | None = None  # {name, arguments, result, kind, turn} in order
    turns: int = 1  # of the model
    world_score: float | None = None  # of its environment
    parts: Sequence[str] = ()  # texts of the model's turns
    turn_rewards: Sequence[float | None] = ()  # of its environment, one a turn
    observations: Sequence[str | None] = ()  # what its environment showed after each turn
    transcript: Sequence[Message] = ()  # of a row that brings its own; else made of the above
    # Of a workflow: all calls of the rollout (fields of `workflow.Said`), and the place of this one.
    calls: Sequence[Mapping[str, Any]] = ()
    call: int = 0


def view_sample(sample: Sample, roles: Sequence[str] | None, reads: str | None) -> Sample | None:
    """The sample as a reward reads it: with the last text of the role that it reads, of what goes on from the call if
    that role is there, else of the rollout. None for a call of another role than those that it is for. A plain
    completion is read as it is."""
    if not sample.calls or (roles is None and reads is None):
        return sample
    if roles is not None and sample.calls[sample.call]["role"] not in roles:
        return None
    if reads is None:
        return sample
    of_role = [number for number, call in enumerate(sample.calls) if call["role"] == reads]
    later = {sample.call}  # the call and what goes on from it
    for number, call in enumerate(sample.calls):
        if call["parent"] in later:
            later.add(number)
    last = sample.calls[([n for n in of_role if n in later] or of_role)[-1]] if of_role else None
    if last is None:  # it was never reached
        last = {"text": "", "finish": "length"}
    parts, shown = last.get("parts", ()), last.get("shown", ())
    return replace(
        sample,
        completion=last["text"],
        finish=last.get("finish", "stop"),
        token_count=last.get("tokens", 0),
        token_ids=(),
        token_ends=(),
        parts=parts,
        observations=(*shown, None) if shown else (),
        tool_calls=[] if shown else None,
        turns=max(1, len(parts)),
    )


def built_in(name: str, sample: Sample, step: int, correct: bool | None) -> Any:
    """The value of a built-in argument; `load.BUILT_INS` says what each means."""
    match name:
        case "prompt" | "prompts":
            return sample.prompt
        case "messages":
            asked = sample.row.get("messages") or [{"role": "user", "content": sample.row.get("prompt")}]
            return list(sample.messages) or asked
        case "finish_reason":
            return sample.finish
        case "truncated":
            return sample.finish == "length"
        case "token_count":
            return sample.token_count
        case "step":
            return step
        case "correct":
            return correct
        case "prefilled_think":
            return sample.prompt.rstrip().endswith("<think>")
        case "token_ids":
            return list(sample.token_ids)
        case "token_ends":
            return list(sample.token_ends)
        case "tool_calls":
            return None if sample.tool_calls is None else list(sample.tool_calls)
        case "turns":
            return sample.turns
        case "world_score":
            return sample.world_score
        case "parts":
            return list(sample.parts) or [sample.completion]
        case "turn_rewards":
            return list(sample.turn_rewards)
        case "transcript":
            calls, shown = sample.tool_calls, sample.observations
            made = make_transcript(sample.prompt, sample.completion, sample.parts, calls, shown)
            return list(sample.transcript) or made
        case "workflow":
            return build_workflow(sample.calls, sample.call, sample.completion)
    return trl_form.built_in(name, sample.token_ids, step)
