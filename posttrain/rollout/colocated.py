"""Client of a vLLM engine core in another process on this machine, on the trainer's GPU if there is one.

vLLM's AsyncLLM is the half in this process: it passes requests on and assembles outputs. The engine core holds the
model: vLLM spawns it, and both communicate over a private socket. No part of the model is in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from posttrain.batch import PromptImages
from posttrain.errors import EngineError
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop, vllm_start
from posttrain.rollout.engine import Completion
from posttrain.rollout.engine_client import INFO, EngineClient, TransferCall, close_all, make_completion
from posttrain.rollout.requests import Request
from posttrain.rollout.vllm_samples import engine_prompt, prompt_logprobs, sampled_logprobs
from posttrain.rollout.vllm_start import EngineSpec
from posttrain.scratch import Scratch
from posttrain.tools.time_limits import in_thread

T = TypeVar("T")
CLEAN_UP_S = 2.0
EXIT_WAIT_S = 10.0  # for the process to end after vLLM has noticed that its engine core failed


class ColocatedClient(EngineClient):
    """An `EngineClient` of vLLM 0.22 to 0.32."""

    name = "the engine beside the trainer"

    def __init__(self, llm: Any, spec: EngineSpec, log: Path, home: Scratch) -> None:
        """llm: a started AsyncLLM (`start`). home: folder of the socket files of all engines of this start; each client
        takes ownership of it."""
        self.llm, self.spec, self.log, self.home = llm, spec, log, home
        self.workers = spec.section.tensor_parallel
        self.worker_pidfds: list[int] = []  # of workers in processes of their own; a process id may be reused
        self.adapters: dict[str, Any] = {}  # vLLM's LoRARequest for the newest version of each adapter
        self.adapter_numbers = itertools.count(1)
        self.numbers = itertools.count()
        self.adding = self.asked = 0  # requests being added to vLLM; requests without an answer
        self.pausing = self.stopped = False  # aborted samples count as paused; vLLM accepts no requests
        self.processes = list(llm.engine_core.resources.engine_manager.processes)
        self.ended = loop.run(self._watch())

    @classmethod
    def start(cls, spec: EngineSpec, folder: Path, log: Path) -> list[ColocatedClient]:
        """Start the section's engines on the model in `folder`, from any thread; returns when they are ready.

        Without `spec.lora_rank` the folder needs only configuration and tokenizer: the weights are random until the
        first update. Otherwise it has the base weights, to which adapters are added. log: file for the output of the
        processes. Raises RecipeError or EngineError with what to change.
        """
        home = Scratch("engine")
        try:
            clients = [cls(llm, spec, log, home) for llm in vllm_start.start(spec, folder, log, home.path)]
        except BaseException:
            home.close()
            raise
        try:
            measured = loop.run_all([client._detach() for client in clients])
        except BaseException:
            close_all(clients)
            raise
        vllm_start.remember_kv_size(spec, folder, measured[0])
        return clients

    async def _watch(self) -> asyncio.Future[None]:
        """Return a future that is done when one of the engine's processes has ended."""

        def wait() -> None:
            connection.wait([process.sentinel for process in self.processes])
            deadline = time.monotonic() + EXIT_WAIT_S
            while self.processes[0].exitcode is None and time.monotonic() < deadline:
                time.sleep(0.01)  # not `join`: of two threads that wait for a process, one may get no exit code

        return asyncio.wrap_future(in_thread(wait, "engine-watch"))

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        greedy = sampling.temperature == 0  # all samples of a prompt are equal, and vLLM takes n = 1 only
        params = vllm_start.sampling_values(sampling, request, self.spec.eos_ids, self.spec.image_ids)
        output = await self._call(self._answer(request.ids, params, request.images, request.adapter))
        found = [
            make_completion(
                sample.finish_reason,
                sample.token_ids,
                sampled_logprobs(sample) if request.logprobs else None,
                pausing=self.pausing,
            )
            for sample in output.outputs
        ]
        return found * request.n if greedy else found

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        return prompt_logprobs(await self._call(self._answer(ids, vllm_start.SCORING, adapter=adapter)), ids)

    async def _answer(
        self,
        ids: Sequence[int],
        values: Mapping[str, Any],
        images: PromptImages | None = None,
        adapter: str | None = None,
    ) -> Any:
        """Return vLLM's RequestOutput. values: arguments of its SamplingParams."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**values, output_kind=RequestOutputKind.FINAL_ONLY)
        self.asked += 1
        try:
            self.adding += 1
            try:
                answer = await self.llm.add_request(
                    str(next(self.numbers)),
                    engine_prompt(images.shorten(tuple(ids)), images.shown) if images else engine_prompt(ids, ()),
                    params,
                    lora_request=self.adapters.get(adapter or next(iter(self.adapters), "")),  # None for `base`
                )
            finally:
                self.adding -= 1
            try:
                output = await answer.get()
                while not output.finished:
                    output = await answer.get()
            except asyncio.CancelledError:
                if not self.ended.done():
                    await self.llm.abort(answer.request_id, internal=True)
                raise
            return output
        finally:
            self.asked -= 1

    async def pause(self) -> None:
        self.pausing = True
        while self.adding:  # part of a request's samples may have been added
            await asyncio.sleep(0)
        while self.asked:
            self.stopped = True
            await self._call(self.llm.pause_generation(mode="abort"))

    async def resume(self) -> None:
        if self.stopped:
            await self._call(self.llm.resume_generation())
        self.pausing = self.stopped = False

    async def transfer(self, call: TransferCall, info: Mapping[str, Any] | None = None) -> None:
        await self._all_workers(call, **({INFO[call]: dict(info)} if info is not None else {}))
        if call == "finish_weight_update":
            if not torch.cuda.is_available():
                await self._all_workers("posttrain_repack_head")
            await self._call(self.llm.reset_prefix_cache())
            if self.spec.image_ids and hasattr(self.llm, "reset_encoder_cache"):
                await self._call(self.llm.reset_encoder_cache())  # image features of the old vision tower

    async def _detach(self) -> list[int | None]:
        """Call `worker.Extension.posttrain_detach` in all processes, and return the sizes of the KV cache that they
        have measured. Keep pidfds of workers behind the engine core's process, to kill them with it."""
        found = await self._call(self.llm.collective_rpc("posttrain_detach"))
        self.worker_pidfds = [os.pidfd_open(pid) for pid, _ in found if pid != self.processes[0].pid]
        return [measured for _, measured in found]

    async def _all_workers(self, method: str, **arguments: Any) -> None:
        await self._call(self.llm.collective_rpc(method, kwargs=arguments))

    async def load_adapters(self, folders: Mapping[str, Path], version: int) -> None:
        """Load adapters under new ids: vLLM takes a known id for a known adapter."""
        from vllm.lora.request import LoRARequest

        for name, folder in folders.items():
            adapter = LoRARequest(f"{name}-version-{version}", next(self.adapter_numbers), str(folder))
            await self._call(self.llm.add_lora(adapter))
            self.adapters[name] = adapter
        await self._call(self.llm.reset_prefix_cache())

    async def sleep(self, *, keep_weights: bool) -> None:
        await self._call(self.llm.sleep(level=1 if keep_weights else 2))

    async def wake(self) -> None:
        await self._call(self.llm.wake_up())

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises EngineError for vLLM's exceptions, and as soon as the process
        has ended."""
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self.ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        except EngineError:
            raise
        except Exception as cause:
            from vllm.v1.engine.exceptions import EngineDeadError

            if not isinstance(cause, EngineDeadError):
                raise vllm_start.error_of(cause, self.spec.section, "failed", self.log) from cause
            await asyncio.wait({self.ended}, timeout=EXIT_WAIT_S)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        raise vllm_start.death_error(self.processes[0].exitcode, self.log, self.spec.section)

    def close(self) -> None:
        """Kill the engine's processes: vLLM's own shutdown takes seconds that nobody needs."""
        if self.llm is None:
            return
        with contextlib.suppress(EngineError, TimeoutError):  # the engine may have ended, or hang
            loop.run(asyncio.wait_for(self._all_workers("posttrain_clean_up"), CLEAN_UP_S))
        llm, self.llm = self.llm, None
        llm.engine_core.resources.engine_manager.manager_stopped.set()  # keeps vLLM from reporting that the engine died
        if llm.output_handler is not None:  # it would report the end of its connection
            loop.call(llm.output_handler.cancel)
        for process in self.processes:
            process.kill()
            process.join()
        for worker in self.worker_pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
        for worker in self.worker_pidfds:
            connection.wait([worker])
            os.close(worker)
        llm.shutdown()
        llm.shutdown = lambda: None  # vLLM calls it again when the object is collected, and fails at interpreter exit
        self.home.close()
