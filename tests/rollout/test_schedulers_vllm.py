"""vLLM's schedulers with outputs in chunks: what is sent when, and that joined outputs equal those of single steps."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def output(request: str, token: int, **values: Any) -> Any:
    """Return vLLM's output of one step: a token, its log-prob -token / 10 and its rank."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    logprobs = LogprobsLists(np.array([[token]]), np.array([[-token / 10]]), np.array([token + 1]))
    return EngineCoreOutput(request, [token], new_logprobs=logprobs, **values)


class Steps:
    """A `ChunkedScheduler` whose parent returns these outputs. unmarked: requests whose every token is needed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, requests: str, unmarked: str = "") -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from posttrain.rollout.engine_process import IN_CHUNKS
        from posttrain.rollout.schedulers import ChunkedScheduler

        monkeypatch.setattr(Scheduler, "__init__", lambda _: None)
        monkeypatch.setattr(Scheduler, "update_from_output", lambda _, messages: messages)
        self.scheduler: Any = ChunkedScheduler()
        marks = {name: None if name in unmarked else {IN_CHUNKS: True} for name in requests}
        self.scheduler.requests = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=mark)) for name, mark in marks.items()
        }

    def step(self, *outputs: Any, **values: Any) -> Any:
        """Return the message to the one client, or None if nothing is sent."""
        from vllm.v1.engine import EngineCoreOutputs

        message = EngineCoreOutputs(outputs=list(outputs), **values)
        for name in [one.request_id for one in outputs if one.finished]:
            del self.scheduler.requests[name]  # as vLLM does
        return self.scheduler.update_from_output({0: message}).get(0)


def test_running_requests_are_sent_every_chunk_and_ended_ones_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import FinishReason

    from posttrain.rollout.schedulers import CHUNK_STEPS

    steps = Steps(monkeypatch, "ab")
    sent = [steps.step(output("a", t), output("b", t)) for t in range(3)]
    assert sent == [None, None, None]
    (ended,) = steps.step(output("a", 3), output("b", 3, finish_reason=FinishReason.LENGTH)).outputs
    assert (ended.request_id, ended.new_token_ids, ended.finish_reason) == ("b", [0, 1, 2, 3], FinishReason.LENGTH)
    assert ended.new_logprobs.logprobs.tolist() == [[-0.0], [-0.1], [-0.2], [-0.3]]
    assert ended.new_logprobs.logprob_token_ids.tolist() == [[0], [1], [2], [3]]
    assert ended.new_logprobs.sampled_token_ranks.tolist() == [1, 2, 3, 4]
    rest = [steps.step(output("a", t)) for t in range(4, 2 * CHUNK_STEPS)]
    chunks = [message.outputs for message in rest if message is not None]
    assert [len(chunk) for chunk in chunks] == [1, 1]
    assert [chunk[0].new_token_ids for chunk in chunks] == [
        [*range(CHUNK_STEPS)],
        [*range(CHUNK_STEPS, 2 * CHUNK_STEPS)],
    ]
    assert chunks[0][0].finish_reason is None and steps.scheduler.held == {}


def test_unmarked_requests_are_sent_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, "ab", unmarked="b")
    for token in range(3):
        (sent,) = steps.step(output("a", token), output("b", token)).outputs
        assert (sent.request_id, sent.new_token_ids) == ("b", [token])


def test_outputs_of_aborted_requests_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.rollout.schedulers import CHUNK_STEPS

    steps = Steps(monkeypatch, "ab")
    steps.step(output("a", 0), output("b", 0))
    del steps.scheduler.requests["b"]
    sent = [steps.step(output("a", t)) for t in range(1, CHUNK_STEPS)]
    assert [one.request_id for one in sent[-1].outputs] == ["a"] and steps.scheduler.held == {}


def test_a_preempted_request_keeps_its_tokens_when_the_others_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room in the cache vLLM preempts a request, which then has no output for some steps, and continues it."""
    from vllm.v1.engine import FinishReason

    from posttrain.rollout.schedulers import CHUNK_STEPS

    steps = Steps(monkeypatch, "ab")
    steps.step(output("a", 0), output("b", 0))
    sent = [steps.step(output("a", t)) for t in range(1, CHUNK_STEPS)]
    assert [one.request_id for one in sent[-1].outputs] == ["a"]
    (ended,) = steps.step(output("b", 1, finish_reason=FinishReason.LENGTH)).outputs
    assert ended.new_token_ids == [0, 1]
    assert ended.new_logprobs.logprob_token_ids.tolist() == [[0], [1]]


def test_messages_without_outputs_are_still_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, "a")
    assert steps.step(output("a", 0), finished_requests={"z"}).finished_requests == {"z"}


def test_values_of_the_prompt_come_with_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import FinishReason

    steps = Steps(monkeypatch, "a")
    prompt: Any = object()
    assert steps.step(output("a", 0, new_prompt_logprobs_tensors=prompt)) is None
    (ended,) = steps.step(output("a", 1, finish_reason=FinishReason.STOP, stop_reason=7)).outputs
    assert ended.new_prompt_logprobs_tensors is prompt and (ended.stop_reason, ended.new_token_ids) == (7, [0, 1])


def test_one_output_is_passed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import FinishReason

    steps = Steps(monkeypatch, "a")
    whole = output("a", 5, finish_reason=FinishReason.STOP)
    (sent,) = steps.step(whole).outputs
    assert sent is whole
