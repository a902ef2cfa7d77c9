"""Processes (ranks) of one run: which one this is, and launching them on one machine.

The environment uses torchrun's names: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT,
TORCHELASTIC_RESTART_COUNT. Rank 0 writes files and output; the others only compute. `launch` sets the same environment
as `torchrun --nproc-per-node N --max-restarts R`, so a rank does not know which of the two has started it.

Why `launch` does not use torchelastic's LocalElasticAgent (as of torch 2.11 to 2.13):
- Ctrl-C: the agent raises in its main thread, signals the whole process group of every rank, including reward workers
  and vLLM, and kills all after 30 seconds (from 2.12 on: after TORCH_ELASTIC_SHUTDOWN_TIMEOUT). A step with its save
  takes minutes, and only rank 0 must get the signal: the ranks agree on the step to stop after.
- Failures: before a restart the other ranks always have 30 seconds, and then die in the middle of a checkpoint;
  `launch` waits while rank 0 writes one. Wrong input (exit code 2) is restarted as well.
- An agent that is killed leaves its ranks running: they have no pipe to it.
- Its report is a table of exit codes instead of the error.
Only private methods of the agent could change this. Across machines, torchrun starts the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from posttrain import terminal
from posttrain.errors import Interrupted, PosttrainError, RunError, UserError
from posttrain.run.environment import usable_cpus
from posttrain.run.interrupt import STOPPING, stop_with_parent

LAUNCHED = "POSTTRAIN_LAUNCHED"  # set in processes started by `launch`
RESTARTED, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
STATUS_PIPE = "POSTTRAIN_BUSY"  # descriptor of rank 0's pipe to its launcher (`defer_shutdown`)
VISIBLE_DEVICES = "POSTTRAIN_VISIBLE_DEVICES"  # CUDA_VISIBLE_DEVICES as it was before `claim_gpu`
GRACE_S = 3.0  # after the first failure: time for the other ranks to report errors of their own before they are killed
GRACE_STOPPED_S = 120.0  # the same after Ctrl-C, when all ranks have saved and are closing
POLL_S = 0.1
OUT_OF_MEMORY_HINT = "the system does this when memory runs out; "
NO_RESTART = 3  # exit code of a rank that tells its launcher that a restart would fail in the same way
WRITE_BEGIN, WRITE_END = b"+", b"-"  # status bytes that rank 0 writes around `defer_shutdown`
_writing = 0  # number of `defer_shutdown` blocks that this process is in
_own_writing = 0  # number of those with every_rank
_writing_lock = threading.Lock()  # the blocks may be in several threads


def rank() -> int:
    """Return the index of this process among the processes of the run."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """Return the number of processes of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world() -> int:
    """Return the number of processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world())


def is_main() -> bool:
    """Return whether this is rank 0, which writes files and output."""
    return rank() == 0


def is_launched() -> bool:
    """Return whether `launch` started this process."""
    return LAUNCHED in os.environ


def restarts() -> int:
    """Return how often `launch` has restarted the processes of this run after a failure."""
    return int(os.environ.get(RESTARTED, "0")) if is_launched() else 0


def exit_code(error: PosttrainError) -> int:
    """Return the exit code of a process that ends with this error: NO_RESTART if the launcher should not restart."""
    restarted = is_launched() and int(os.environ.get(MAX_RESTARTS, "0")) > 0
    return NO_RESTART if restarted and error.exit_code == 1 and not error.can_restart else error.exit_code


def end_with_launcher() -> None:
    """Stop, with a save, when the launcher has ended; no-op if `launch` did not start this process."""
    if is_launched():
        stop_with_parent()


@contextlib.contextmanager
def defer_shutdown(*, every_rank: bool = False) -> Iterator[None]:
    """Keep the launcher from killing rank 0 inside the block, even if another rank has failed: it writes what would be
    lost. every_rank: this rank writes too, whichever it is."""
    _count_writing(1, every_rank)
    _notify_launcher(WRITE_BEGIN)
    try:
        yield
    finally:
        _count_writing(-1, every_rank)
        _notify_launcher(WRITE_END)


def _count_writing(blocks: int, own: bool) -> None:
    global _writing, _own_writing
    with _writing_lock:
        _writing += blocks
        _own_writing += blocks * own


def is_writing() -> bool:
    """Return whether this rank is writing inside `defer_shutdown`."""
    return (_writing if is_main() else _own_writing) > 0


def _notify_launcher(status: bytes) -> None:
    """Write a status byte to the launcher's pipe; no-op without a launcher."""
    pipe = os.environ.get(STATUS_PIPE)
    if pipe is None:
        return
    with contextlib.suppress(OSError):  # the launcher has ended
        os.write(int(pipe), status)


def claim_gpu() -> None:
    """Make only this process's own GPU visible, so that no library can allocate memory on another one. Call it before
    torch is imported. Raises UserError if there is no GPU for it."""
    if world() == 1:
        return
    local = int(os.environ.get("LOCAL_RANK", rank()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else []
    if devices and local >= len(devices):
        raise UserError(f"{local + 1} processes want a GPU each, but CUDA_VISIBLE_DEVICES lists {len(devices)}")
    os.environ[VISIBLE_DEVICES] = visible or ""
    if visible != "":
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local] if devices else str(local)
    os.environ["LOCAL_RANK"] = "0"  # its index among the visible devices


def given_devices() -> list[str] | None:
    """Return the GPUs that all processes of the run on this machine may use, by the driver's names; None: all."""
    unclaimed = None if VISIBLE_DEVICES in os.environ else os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = os.environ.get(VISIBLE_DEVICES) or unclaimed
    return visible.split(",") if visible else None


@dataclass
class _Process:
    """A launched rank: its process and its newest output."""

    rank: int
    popen: subprocess.Popen[str]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=40))  # last lines of output; empty for rank 0
    reader: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        return self.popen.poll() is not None


def launch(command: Sequence[str], count: int, max_restarts: int = 0) -> int:
    """Run `command` in `count` processes and return the exit code of the run: 0 if all succeeded.

    Rank 0 has our terminal. The first rank that fails ends all: its error is printed, unless it is rank 0's, which has
    printed it. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP go to rank 0, which agrees with the other ranks on the step to stop
    after. max_restarts: maximum number of restarts of all ranks after a failure, except for a stop signal and for an
    error that a restart would repeat (`PosttrainError.can_restart`). Raises RunError for a killed process; Interrupted
    after a second signal, or after one that came before rank 0 could handle it.
    """
    with _collect_signals() as received:  # before the first rank starts: a signal leaves no rank running
        for attempt in range(max_restarts):
            try:
                code = _run(command, count, received, attempt, max_restarts)
            except RunError as error:
                code = error.exit_code
                terminal.note(str(error))
            if received or code in (0, UserError.exit_code, *(128 + number for number in STOPPING)):
                return code
            if code == NO_RESTART:
                terminal.note("not restarted: the same error would occur again")
                return 1
            terminal.note(f"restart {attempt + 1} of {max_restarts}: all {count} processes, from the newest checkpoint")
        code = _run(command, count, received, max_restarts, max_restarts)
        return 1 if code == NO_RESTART else code


def _run(command: Sequence[str], count: int, received: list[int], attempt: int, max_restarts: int) -> int:
    """Start all ranks, wait for them and return the exit code (`launch`)."""
    writing = _WritingStatus()
    processes: list[_Process] = []
    port = _reserve_port()
    try:
        started = {RESTARTED: str(attempt), MAX_RESTARTS: str(max_restarts), "MASTER_PORT": str(port.getsockname()[1])}
        for number in range(count):
            processes.append(_start(command, number, count, started, writing))
        first = _first_failure(processes, received)
        if first is None:
            return 0
        by_signal = first.popen.returncode in [128 + number for number in STOPPING]
        stopped = by_signal and len(received) < 2 and writing.ever
        _wait(processes, GRACE_STOPPED_S if stopped else GRACE_S, writing, received)
    finally:
        for process in processes:
            _kill(process)
        writing.close()
        port.close()
    return _report(first, processes, received)


class _WritingStatus:
    """The launcher's end of the pipe on which rank 0 reports that it is writing."""

    def __init__(self) -> None:
        self._own_end, self.rank_0_end = os.pipe()
        os.set_blocking(self._own_end, False)
        self._depth, self._has_written = 0, False

    def __bool__(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            for status in os.read(self._own_end, 1 << 16):
                self._depth, self._has_written = self._depth + (1 if status == WRITE_BEGIN[0] else -1), True
        return self._depth > 0

    @property
    def ever(self) -> bool:
        """Whether rank 0 has ever written: before that, Ctrl-C just ends a run, and the other ranks may wait for rank 0
        for hours."""
        return bool(self) or self._has_written

    def close(self) -> None:
        os.close(self._own_end)
        os.close(self.rank_0_end)


def _start(
    command: Sequence[str], number: int, count: int, started: dict[str, str], writing: _WritingStatus
) -> _Process:
    """Start a rank in its own process group, so that Ctrl-C reaches only the launcher. Its stdin ends with the launcher
    (`stop_with_parent`)."""
    env = {
        "OMP_NUM_THREADS": str(max(1, usable_cpus() // count)),
        **os.environ,
        **{"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)},
        **{"MASTER_ADDR": "127.0.0.1", LAUNCHED: "1", **started},
        **({STATUS_PIPE: str(writing.rank_0_end)} if number == 0 else {}),
    }
    popen = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=None if number == 0 else subprocess.PIPE,
        stderr=None if number == 0 else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=[writing.rank_0_end] if number == 0 else [],
    )
    process = _Process(number, popen)
    if popen.stdout is not None:
        process.reader = threading.Thread(target=_drain, args=(process,), daemon=True)
        process.reader.start()
    return process


def _drain(process: _Process) -> None:
    assert process.popen.stdout is not None
    for line in process.popen.stdout:
        process.tail.append(line.rstrip())


def _first_failure(processes: Sequence[_Process], received: list[int]) -> _Process | None:
    """Wait for the first rank that fails and return it; None if all succeed. Raises Interrupted if rank 0 has not ended
    soon after a second signal: it does not handle signals while it waits for other ranks inside a library."""
    forwarded, deadline = 0, float("inf")
    while True:
        for number in received[forwarded:]:
            forwarded += 1
            processes[0].popen.send_signal(number)
            if forwarded > 1:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for process in processes:
            if process.popen.poll():
                return process
        if all(process.has_ended for process in processes):
            return None
        if time.monotonic() > deadline:
            raise Interrupted("stopped immediately; complete checkpoints are kept", number=received[0])
        time.sleep(POLL_S)


def _wait(processes: Sequence[_Process], seconds: float, writing: _WritingStatus, received: Sequence[int]) -> None:
    """Wait for all ranks to end, for `seconds` and while rank 0 writes, but not after another signal."""
    deadline, signals = time.monotonic() + seconds, len(received)
    while (
        time.monotonic() < deadline and len(received) == signals and not all(process.has_ended for process in processes)
    ):
        if writing and not processes[0].has_ended:
            deadline = max(deadline, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)


def _kill(process: _Process) -> None:
    """Kill a rank with its workers, which share its process group."""
    if not process.has_ended:
        os.killpg(process.popen.pid, signal.SIGKILL)
        process.popen.wait()
        process.popen.returncode = 0  # killed by us, not a failure of its own
    if process.popen.stdin is not None:
        process.popen.stdin.close()


def _report(first: _Process, processes: Sequence[_Process], received: Sequence[int]) -> int:
    """Return the exit code, and print the failure unless rank 0 has printed one. The most specific code wins: other
    ranks exit with 1 because of the rank that failed."""
    codes = [process.popen.returncode for process in processes]
    specific = next((code for code in codes if code in (NO_RESTART, UserError.exit_code)), None)
    if codes[0] > 0:
        return specific or codes[0]
    code = first.popen.returncode
    if first.reader is not None:
        first.reader.join(timeout=5)
    output = "\n".join(line for line in first.tail if line)
    if code < 0 and -code in received:
        raise Interrupted(f"stopped by {signal.Signals(-code).name} before the first step", number=-code)
    if code < 0:
        raise RunError(
            f"rank {first.rank} was killed by signal {-code} ({signal.Signals(-code).name})",
            allowed=f"its last output:\n{output}" if output else "",
            hint=f"{OUT_OF_MEMORY_HINT if -code == signal.SIGKILL else ''}go on with the same command and --resume",
        )
    named = output.startswith("rank ")  # the message names the rank that failed: train/rank_failure_monitor.py
    terminal.note(f"{'' if named else f'rank {first.rank}: '}{output or f'ended with {code}'}")
    return specific or code


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP in a list inside the block instead of ending this process."""
    received: list[int] = []
    wanted = [n for n in STOPPING if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
    handled = wanted if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reserve_port() -> socket.socket:
    """Return a socket that keeps a port for rank 0's store, so that no other process gets the port meanwhile.

    The socket is bound and never listens. With SO_REUSEADDR on both sockets, as TCPStore has it, Linux lets rank 0
    bind and listen on the same port, and gives the port to nobody who asks for a free one.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
