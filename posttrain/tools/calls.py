"""Running calls: in worker processes with limits on time and output; whatever goes wrong becomes a text for the model.

The workers are those of rewards (`verify.pool`): fresh interpreters, killed and replaced when a call is over its time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Self

from posttrain.batch import CallKind, ToolCall
from posttrain.tools.call import Call
from posttrain.tools.load import LoadedTool
from posttrain.tools.worker import ERROR_CHARS, MARK
from posttrain.verify import pool
from posttrain.verify.printed import Printed
from posttrain.verify.worker import Call as Work
from posttrain.verify.worker import Result, Target

MEMORY_MB = 4096  # the default of `tool_memory_mb`


class Caller:
    """A context manager that holds the workers. `run` answers calls in their order; it never raises for a tool.

    memory_mb: of each worker; a call that needs more fails.
    """

    def __init__(
        self,
        tools: Sequence[LoadedTool],
        workers: int,
        printed: Printed | None = None,
        memory_mb: int | None = MEMORY_MB,
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self._numbers = {tool.name: n for n, tool in enumerate(tools)}
        targets = [
            Target(
                "posttrain.tools.worker:invoke",
                {"target": tool.target, "fixed": tool.params, "max_chars": tool.max_chars},
                False,
                False,
                tool.timeout_s,
                text=True,
            )
            for tool in tools
        ]
        self.pool = pool.Pool(targets, workers, memory_mb, printed)

    def __enter__(self) -> Self:
        self.pool.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes. Calling it twice is fine."""
        self.pool.close()

    def run(self, calls: Sequence[Call]) -> list[ToolCall]:
        """What each call gave. All calls that can be made run at once."""
        problems = [self._problem(call) for call in calls]
        work = [
            Work(n, self._numbers[call.name], json.dumps(dict(call.arguments)), {})
            for n, (call, problem) in enumerate(zip(calls, problems, strict=True))
            if problem is None
        ]
        done = {result.number: result for result in (self.pool.run(work) if work else [])}
        return [
            ToolCall(call.name, dict(call.arguments), *(problem or self._answer(done[n], self.tools[call.name])))
            for n, (call, problem) in enumerate(zip(calls, problems, strict=True))
        ]

    def _problem(self, call: Call) -> tuple[str, CallKind] | None:
        if call.problem:
            return f"error: the call cannot be read: {call.problem}", "malformed"
        tool = self.tools.get(call.name)
        if tool is None:
            return f"error: no tool `{call.name[:50]}`; there are: {', '.join(self.tools)}", "unknown"
        if missing := [name for name in tool.required if name not in call.arguments]:
            return f"error: {tool.name} needs `{missing[0]}`", "malformed"
        if extra := [name for name in call.arguments if name not in tool.arguments]:
            return f"error: {tool.name} has no argument `{extra[0][:50]}`: {', '.join(tool.arguments)}", "malformed"
        return None

    def _answer(self, result: Result, tool: LoadedTool) -> tuple[str, CallKind]:
        if result.kind == "timeout":
            return f"error: {tool.name} took longer than {tool.timeout_s:g} s", "timeout"
        if result.kind != "value":
            last = str(result.value).strip().splitlines()
            return f"error: {last[-1][:ERROR_CHARS] if last else 'the tool failed'}", "error"
        text = str(result.value).encode(errors="replace").decode()  # half of a character is no text for a tokenizer
        return (f"error: {text.removeprefix(MARK)}", "error") if text.startswith(MARK) else (text, "ok")
