"""`tools: [{use: python}]`: programs of the model in the sandbox: no network, no files of yours (docs/sandbox.md)."""

from collections.abc import Mapping
from typing import Any

from posttrain.verify import sandbox
from posttrain.verify.sandbox import Limits, run_python


def python(code: str, *, seconds: float = 3.0, memory_mb: int = 256, allow_unsandboxed: bool = False) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the program; print what you want to know
    """
    limits = Limits(seconds=seconds, memory_mb=memory_mb, output_bytes=20_000)
    done = run_python(code, limits=limits, allow_unsandboxed=allow_unsandboxed)
    if done.status != "ended":
        raise ValueError(f"the program hit its limit of {done.status}; it printed: {done.stdout[:200]!r}")
    if done.exit_code:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.exit_code}"])[-1])
    return done.stdout or "(nothing was printed)"


def CHECK(tool: str, params: Mapping[str, Any]) -> list[str]:
    """Nothing runs where there is no sandbox."""
    del tool
    return sandbox.problems(params)


EXAMPLES = [
    ({"code": "print(6 * 7)"}, "42\n"),
    ({"code": "x = 1"}, "(nothing was printed)"),
    ({"code": "1 / 0"}, ValueError),
    ({"code": "while True: pass"}, ValueError, {"seconds": 0.5}),
]
