"""Execution of tool calls in worker processes, with limits on time and output; every failure becomes a text for the
model.

The workers are those of rewards (`verify.pool`): fresh interpreters, killed and replaced when a call exceeds its time
limit. Each worker runs one call at a time and has a thread that waits for it, so no call waits while a worker is free.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from posttrain.batch import CallKind, ToolCall
from posttrain.errors import ToolError
from posttrain.images import Image
from posttrain.tools.call import Call
from posttrain.tools.load import LoadedTool
from posttrain.tools.worker import ERROR_CHARS, ERROR_PREFIX, read_images
from posttrain.verify import pool
from posttrain.verify.captured_output import OutputLog
from posttrain.verify.worker import Call as Work
from posttrain.verify.worker import Result, Target

MEMORY_MB = 4096  # the default of `tool_memory_mb`


class Caller:
    """Context manager that holds the workers. Any free worker answers a call, first come, first served. A failing tool
    never raises here.

    memory_mb: memory limit of each worker; a call that needs more fails.
    """

    def __init__(
        self,
        tools: Sequence[LoadedTool],
        workers: int,
        output_log: OutputLog | None = None,
        memory_mb: int | None = MEMORY_MB,
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self._numbers = {tool.name: n for n, tool in enumerate(tools)}
        targets = [
            Target(
                "posttrain.tools.worker:invoke",
                {
                    "target": tool.target,
                    "fixed": tool.params,
                    "max_chars": tool.max_chars,
                    "max_pixels": tool.max_pixels,
                },
                False,
                False,
                tool.timeout_s,
                text=True,
            )
            for tool in tools
        ]
        self.pools = [pool.Pool(targets, 1, memory_mb, output_log) for _ in range(workers)]  # one worker each
        self._free = deque(self.pools)
        self._taking = threading.Lock()
        # One thread per pool, so a free thread always finds a free pool.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tools")

    def __enter__(self) -> Self:
        for worker in self.pools:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker processes, aborting their calls. Can be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.pools:
            worker.abandon()
        self._threads.shutdown()
        for worker in self.pools:
            worker.close()

    def run(self, calls: Sequence[Call], images: Sequence[Image] = ()) -> list[ToolCall]:
        """Run calls in parallel and return their results in order. Blocks. images: see `answer`."""
        return [future.result() for future in [self._submit(call, images, []) for call in calls]]

    async def answer(self, call: Call, images: Sequence[Image] = ()) -> ToolCall:
        """Run a call and return its result. Cancelling this coroutine kills the worker that runs the call. images: all
        images of the conversation so far, for tools that take images."""
        taken: list[pool.Pool] = []
        try:
            return await asyncio.wrap_future(self._submit(call, images, taken))
        except asyncio.CancelledError:
            with self._taking:
                for worker in taken:
                    worker.abandon()
            raise

    def _submit(self, call: Call, images: Sequence[Image], taken: list[pool.Pool]) -> Future[ToolCall]:
        """Queue a call. taken: holds the worker's pool while the pool runs the call, so that it can be killed."""
        problem = self._find_problem(call)
        if problem is None:
            return self._threads.submit(self._run_call, call, images, taken)
        answered: Future[ToolCall] = Future()
        answered.set_result(ToolCall(call.name, dict(call.arguments), *problem))
        return answered

    def _run_call(self, call: Call, images: Sequence[Image], taken: list[pool.Pool]) -> ToolCall:
        worker, tool = self._free.popleft(), self.tools[call.name]
        seen = {"images": list(images)} if tool.sees else {}
        with self._taking:
            taken.append(worker)
        try:
            (result,) = worker.run([Work(0, self._numbers[call.name], json.dumps(dict(call.arguments)), seen)])
        finally:
            with self._taking:
                taken.clear()
                worker.abandoned = False
            self._free.append(worker)
        text, kind = self._format_result(result, tool)
        text, shown = read_images(text)
        if shown and not tool.shows:
            raise ToolError(
                f"tool {call.name} returned an image, and its annotation says that it returns none",
                hint="annotate what it returns as `-> Any`",
            )
        return ToolCall(call.name, dict(call.arguments), text, kind, seconds=result.seconds, images=shown)

    def _find_problem(self, call: Call) -> tuple[str, CallKind] | None:
        if call.problem:
            return f"error: the call cannot be read: {call.problem}", "malformed"
        tool = self.tools.get(call.name)
        if tool is None:
            return f"error: no tool `{call.name[:50]}`; there are: {', '.join(self.tools)}", "unknown"
        if missing := [name for name in tool.required_arguments if name not in call.arguments]:
            return f"error: {tool.name} needs `{missing[0]}`", "malformed"
        if extra := [name for name in call.arguments if name not in tool.arguments]:
            return f"error: {tool.name} has no argument `{extra[0][:50]}`: {', '.join(tool.arguments)}", "malformed"
        return None

    def _format_result(self, result: Result, tool: LoadedTool) -> tuple[str, CallKind]:
        if result.kind == "timeout":
            return f"error: {tool.name} took longer than {tool.timeout_s:g} s", "timeout"
        if result.kind != "value":
            last = str(result.value).strip().splitlines()
            return f"error: {last[-1][:ERROR_CHARS] if last else 'the tool failed'}", "error"
        text = str(result.value).encode(errors="replace").decode()  # a tokenizer does not accept lone surrogates
        return (f"error: {text.removeprefix(ERROR_PREFIX)}", "error") if text.startswith(ERROR_PREFIX) else (text, "ok")
