"""Inputs of a reward: the sample, as the reward's role sees it, and the built-in arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from posttrain.thoughts import opening_mark
from posttrain.verify import trl_form
from posttrain.verify.transcript import Message, make_transcript
from posttrain.verify.workflow import build_workflow


@dataclass(frozen=True)
class Sample:
    """One completion with everything a reward may read. Samples with the same `group` are completions of one prompt."""

    completion: str
    row: Mapping[str, Any]  # data row with all its columns
    prompt: str = ""  # as the model saw it
    finish: Literal["stop", "length"] = "stop"
    token_count: int = 0
    group: int = 0
    token_ids: Sequence[int] = ()
    token_ends: Sequence[int] = ()  # character offset where each token ends, if requested
    # Multi-turn rollouts only; empty or None for a single turn:
    messages: Sequence[Mapping[str, Any]] = ()  # the whole conversation
    tool_calls: Sequence[Mapping[str, Any]] | None = None  # {name, arguments, result, kind, turn}, in order
    turns: int = 1  # number of model turns
    world_score: float | None = None  # score of the environment
    parts: Sequence[str] = ()  # texts of the model's turns
    turn_rewards: Sequence[float | None] = ()  # rewards of the environment, one per turn
    observations: Sequence[str | None] = ()  # observations of the environment, one after each turn
    transcript: Sequence[Message] = ()  # of a row that has its own; otherwise built from the fields above
    # Workflows only: all calls of the rollout (fields of `workflow.RoleCall`), and the index of this sample's call.
    calls: Sequence[Mapping[str, Any]] = ()
    call: int = 0


def view_sample(sample: Sample, roles: Sequence[str] | None, reads: str | None) -> Sample | None:
    """Return the sample as a reward sees it; None if the reward is not for the role of the sample's call.

    roles: roles of the calls that the reward scores; None = all. reads: role whose last text the reward reads, from the
    call's descendants if the role occurs among them, else from the whole rollout. A plain completion is returned
    unchanged.
    """
    if not sample.calls or (roles is None and reads is None):
        return sample
    if roles is not None and sample.calls[sample.call]["role"] not in roles:
        return None
    if reads is None:
        return sample
    of_role = [number for number, call in enumerate(sample.calls) if call["role"] == reads]
    later = {sample.call}  # the call and its descendants
    for number, call in enumerate(sample.calls):
        if call["parent"] in later:
            later.add(number)
    last = sample.calls[([n for n in of_role if n in later] or of_role)[-1]] if of_role else None
    if last is None:  # the role was never reached
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
    """Return the value of a built-in argument; the comment at `load.BUILT_INS` gives the meaning of each."""
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
            return opening_mark(sample.prompt) != ""
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
