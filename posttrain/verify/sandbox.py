"""Sandbox for untrusted programs: bounded in time, memory, processes, files and output, and without a network.

`isolation()` returns the isolation level of this machine. With `namespaces` the program sees no network, no files
except the interpreter's and the system's libraries, and no other processes. If namespaces are not available (many
containers), a program runs only if the caller sets `allow_unsandboxed`: then only resource limits, the system call
filter and Landlock apply, and without Landlock the program can read and write the user's files. See docs/sandbox.md.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.scratch import scratch
from posttrain.verify import system_calls

Isolation = Literal["namespaces", "limits"]
Status = Literal["ended", "timeout", "memory", "processes", "output", "disk"]

JAIL = Path(__file__).with_name("jail.py")
GRACE_SECONDS = 2.0  # time that the jail itself may take beyond the program's limit
_STATUS_OF_REPORT: dict[str, Status] = {
    "ended": "ended",
    "timeout": "timeout",
    "memory": "memory",
    "processes": "processes",
}
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxError(RuntimeError):
    """Raised if the sandbox itself failed or is not available on this machine, whatever the program does."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run.

    seconds: wall clock. memory_mb: per process, and in total under namespaces. disk_mb: per file, and in total under
    namespaces. processes: includes threads. output_bytes: of stdout and of stderr, each.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    processes: int = 16
    disk_mb: int = 16
    output_bytes: int = 1_000_000


@dataclass(frozen=True)
class Finished:
    """Result of a program.

    status: ended normally, or the limit it exceeded; stdout and stderr are truncated at the limit.
    """

    status: Status
    exit_code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == "ended" and self.exit_code == 0


def run_python(
    code: str, stdin: str = "", *, limits: Limits | None = None, allow_unsandboxed: bool = False
) -> Finished:
    """Run a Python program. A program larger than `disk_mb` is not run and gets the status `disk`.

    Raises SandboxError if this machine offers no namespaces and `allow_unsandboxed` is false.
    """
    level = isolation()
    if level == "limits" and not allow_unsandboxed:
        raise SandboxError(
            "this machine offers no namespaces, so a program could read and write the user's files; run where user"
            " namespaces are allowed, or accept that with allow_unsandboxed: true"
        )
    limits = limits or Limits()
    if len(code.encode(errors="replace")) > limits.disk_mb << 20:
        return Finished("disk", -1, "", "", 0.0)
    return _run(code, stdin, limits, level)


@functools.cache
def isolation() -> Isolation:
    """Return the best isolation level of this machine, found by running a trivial program in it."""
    return "limits" if _try_namespaces() else "namespaces"


@functools.cache
def _try_namespaces() -> str:
    """Return why namespaces cannot be used here; "" if they can."""
    if sys.platform != "linux":
        return "they need Linux"
    try:
        done = _run("print('in')", "", Limits(), "namespaces")
    except (SandboxError, OSError) as error:
        return str(error)
    return "" if done.ok and done.stdout == "in\n" else f"exit code {done.exit_code}: {done.stderr}"


def problems(params: Mapping[str, Any]) -> list[str]:
    """Return the problems for the `CHECK` of a script that runs programs: why programs cannot run here, [] if they can.

    params: of the recipe; `allow_unsandboxed` accepts the level `limits`.
    """
    if params.get("allow_unsandboxed") or isolation() == "namespaces":
        return []
    why = f"this machine has no sandbox for the programs that it runs ({_try_namespaces()})"
    return [f"{why}; run where user namespaces are allowed, or write `allow_unsandboxed: true` in `params`"]


def describe() -> str:
    """Describe, in one sentence for a log, the isolation that programs get here and why they do not get more."""
    if isolation() == "namespaces":
        calls = "system calls that are filtered" if system_calls.is_supported() else "but no filter of system calls"
        return (
            f"namespaces: no network, a read-only file system but for a scratch one, no capabilities, limits, {calls}"
        )
    return f"limits only (no namespaces: {_try_namespaces()})"


@functools.cache
def _interpreter() -> tuple[str, tuple[str, ...]]:
    """Return (path of the interpreter, paths it needs to read), without paths inside other listed folders."""
    prefixes = {os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)}
    wanted = [*_SYSTEM, *sorted(prefixes | {sys.prefix})]
    paths: list[str] = []
    for path in wanted:
        if os.path.lexists(path) and not any(path == k or path.startswith(k + "/") for k in paths if os.path.isdir(k)):
            paths.append(path)
    return sys.executable, tuple(paths)


def _spec(code: str, root: str, limits: Limits, level: Isolation) -> dict[str, Any]:
    executable, readable = _interpreter()
    scratch = "/tmp" if level == "namespaces" else root
    return {
        "level": level,
        "root": root,
        "code": code,
        "readable": readable,
        "filter": system_calls.filter_program(as_user=level == "limits") if system_calls.is_supported() else [],
        "command": [executable, "-I", "-B", f"{scratch}/main.py"],
        "environment": {**_ENVIRONMENT, "HOME": scratch, "TMPDIR": scratch},
        "seconds": limits.seconds,
        "memory_mb": limits.memory_mb,
        "processes": limits.processes,
        "disk_mb": limits.disk_mb,
    }


def _run(code: str, stdin: str, limits: Limits, level: Isolation) -> Finished:
    started = time.monotonic()
    give_up = started + limits.seconds + GRACE_SECONDS
    with (
        scratch("sandbox") as root,
        tempfile.TemporaryFile() as spec,
        tempfile.TemporaryFile() as report,
    ):
        spec.write(json.dumps(_spec(code, str(root), limits, level)).encode())
        spec.seek(0)
        process = _start_jail(spec.fileno(), report.fileno())
        out = err = b""
        try:
            out, err, status = _exchange(process, stdin.encode(errors="replace"), limits.output_bytes, give_up)
            if status == "ended":
                process.wait(timeout=max(0.1, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            _stop(process)
        report.seek(0)
        report_kind, _, detail = report.read().decode(errors="replace").partition(" ")
    if status == "ended":
        if report_kind not in _STATUS_OF_REPORT:
            raise SandboxError(f"the sandbox could not be set up: {detail or 'it was killed from outside'}")
        status = _STATUS_OF_REPORT[report_kind]
    text = [data.decode(errors="replace") for data in (out, err)]
    return Finished(status, int(detail) if status == "ended" else -1, text[0], text[1], time.monotonic() - started)


def _start_jail(spec: int, report: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(JAIL), str(spec), str(report)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(spec, report),
        env={"PATH": _ENVIRONMENT["PATH"]},
        start_new_session=True,
    )


def _exchange(
    process: subprocess.Popen[bytes], stdin: bytes, max_bytes: int, give_up: float
) -> tuple[bytes, bytes, Status]:
    """Write the input and read the outputs until both close, up to `max_bytes` each and the time `give_up`."""
    assert process.stdin and process.stdout and process.stderr
    source, sinks = process.stdin.fileno(), (process.stdout.fileno(), process.stderr.fileno())
    received = {sink: bytearray() for sink in sinks}
    opened, remaining = set(sinks), memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for fd in (source, *sinks):
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_WRITE if fd == source else selectors.EVENT_READ)
        while opened:
            wait = give_up - time.monotonic()
            if wait <= 0:
                return bytes(received[sinks[0]]), bytes(received[sinks[1]]), "timeout"
            for key, _ in selector.select(timeout=wait):
                if key.fd == source:
                    remaining = _write_available(source, remaining)
                    if not remaining:
                        selector.unregister(source)
                        process.stdin.close()
                elif data := os.read(key.fd, 65536):
                    received[key.fd] += data
                else:
                    selector.unregister(key.fd)
                    opened.discard(key.fd)
            if any(len(text) > max_bytes for text in received.values()):
                return bytes(received[sinks[0]][:max_bytes]), bytes(received[sinks[1]][:max_bytes]), "output"
    return bytes(received[sinks[0]]), bytes(received[sinks[1]]), "ended"


def _write_available(fd: int, data: memoryview) -> memoryview:
    """Write as much of the data as the pipe accepts; return the remainder, empty if the reader has closed the pipe."""
    try:
        return data[os.write(fd, data[:65536]) :] if data else data
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the jail and everything in it, and close this process's ends of the pipes."""
    process.terminate()  # the jail then kills its children and exits
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_SECONDS)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
