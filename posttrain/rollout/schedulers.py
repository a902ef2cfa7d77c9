"""vLLM's schedulers, sending a request's tokens to the trainer in chunks instead of one by one.

The engine core encodes and sends its outputs in a thread that competes with the decoding loop for Python's lock. The
trainer reads only finished completions, so most of that work is unnecessary: on an H200, 512 sequences of a 1.39B model
decode a third slower with an output per token than in one process without any sending (benchmarks/generation.py).

vLLM imports this module in its engine core, by the names in `vllm_start`; nothing else imports it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

from posttrain.rollout.engine_process import IN_CHUNKS

CHUNK_STEPS = 16  # steps between two outputs of a request


class _ChunkedOutputs(scheduler.Scheduler):  # type: ignore[misc]
    """Holds back the outputs of running requests and sends them every `CHUNK_STEPS` steps, or when the request ends.

    This applies to requests marked `IN_CHUNKS`. Other requests need each token: the trainer's process ends them at a
    stop string, or a sync may interrupt them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0
        self.held: defaultdict[str, list[EngineCoreOutput]] = defaultdict(list)  # not sent yet, by request

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """Return vLLM's outputs of a step by client, without those that are held back."""
        by_client: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)
        self.steps += 1
        sends_all = self.steps % CHUNK_STEPS == 0
        for message in by_client.values():
            sent = []
            for output in message.outputs:
                request_id = output.request_id
                self.held[request_id].append(output)
                if sends_all or output.finish_reason is not None or not self._in_chunks(request_id):
                    sent.append(join_outputs(self.held.pop(request_id)))
            message.outputs = sent
        if sends_all:  # tokens of aborted requests, which vLLM has answered; a preempted request continues later
            for request_id in self.held.keys() - self.requests.keys():
                del self.held[request_id]
        return {
            client: message
            for client, message in by_client.items()
            if message.outputs or message.finished_requests or message.scheduler_stats is not None
        }

    def _in_chunks(self, request_id: str) -> bool:
        params = self.requests[request_id].sampling_params
        return bool(params and params.extra_args and params.extra_args.get(IN_CHUNKS))


class ChunkedScheduler(_ChunkedOutputs):
    """vLLM's `Scheduler` with outputs in chunks."""


class ChunkedAsyncScheduler(_ChunkedOutputs, async_scheduler.AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler`, which schedules a step while the one before it runs, with outputs in chunks."""


def join_outputs(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Return consecutive outputs of a request as one: their tokens and log-probs together, the prompt's values from the
    first, the end from the last."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return last
    logprobs = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    return msgspec.structs.replace(
        last,
        new_token_ids=[token for output in outputs for token in output.new_token_ids],
        new_logprobs=_join_logprobs(logprobs) if logprobs else None,
        new_prompt_logprobs_tensors=first.new_prompt_logprobs_tensors,
        prefill_stats=first.prefill_stats,
        events=[event for output in outputs for event in output.events or ()] or None,
    )


def _join_logprobs(parts: Sequence[LogprobsLists]) -> LogprobsLists:
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.sampled_token_ranks for part in parts]),
    )
