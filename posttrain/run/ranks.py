"""Several equal processes of one run: which one this is, and starting them on one machine.

The environment says it, in torchrun's words: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT,
TORCHELASTIC_RESTART_COUNT. Rank 0 writes and speaks, the others compute. `launch` gives the same environment as
`torchrun --nproc-per-node N --max-restarts R`, so a rank does not know which of the two has started it.

Why `launch` is not torchelastic's LocalElasticAgent (read in torch 2.11 to 2.13):
- Ctrl-C: the agent raises in its main thread, signals the whole process group of every rank, workers of rewards and
  vLLM among them, and kills all after 30 seconds (2.12 on: after TORCH_ELASTIC_SHUTDOWN_TIMEOUT). A step with its save
  takes minutes, and only rank 0 must hear of it: the ranks agree on the step to stop after.
- A failure: before a restart the others always have 30 seconds, and then die in the middle of a checkpoint;
  `launch` waits as long as rank 0 writes one. Wrong input (exit code 2) is restarted as well.
- An agent that is killed leaves its ranks behind: they have no pipe to it.
- Its report is a table of exit codes in place of the error.
Only private methods of the agent could be changed to mend these. Across machines torchrun is what starts the ranks.
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

LAUNCHED = "POSTTRAIN_LAUNCHED"  # set in processes that `launch` started
RESTARTED, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
PIPE = "POSTTRAIN_BUSY"  # rank 0's end of a pipe to its launcher, see `defer_shutdown`
GIVEN = "POSTTRAIN_VISIBLE_DEVICES"  # CUDA_VISIBLE_DEVICES as it was before `claim_gpu`
GRACE_S = 3.0  # after the first failure: time for the others to tell an error of their own, before they are killed
GRACE_STOPPED_S = 120.0  # the same after Ctrl-C, when all have saved and are closing
POLL_S = 0.1
OUT_OF_MEMORY = "without anyone's doing that is most often the system's when memory is short; "
FOR_GOOD = 3  # exit code of a rank, for its launcher: starting anew would end in the same way
BEGUN, DONE = b"+", b"-"  # what rank 0 says around `defer_shutdown`
_writing = 0  # how many `defer_shutdown` blocks this process is in
_own_writing = 0  # of these, in which it writes itself, whichever rank it is
_counting = threading.Lock()  # blocks of several threads


def rank() -> int:
    """The number of this process among those of the run, from 0."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many processes the run has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world() -> int:
    """How many processes the run has on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world())


def is_main() -> bool:
    """The process that writes and speaks."""
    return rank() == 0


def is_launched() -> bool:
    """Whether `launch` started this process."""
    return LAUNCHED in os.environ


def restarts() -> int:
    """How often `launch` has started the processes of this run anew because one failed."""
    return int(os.environ.get(RESTARTED, "0")) if is_launched() else 0


def exit_code(error: PosttrainError) -> int:
    """The exit code of a process that ends with this error: FOR_GOOD where a launcher that restarts should not."""
    restarted = is_launched() and int(os.environ.get(MAX_RESTARTS, "0")) > 0
    return FOR_GOOD if restarted and error.exit_code == 1 and not error.can_restart else error.exit_code


def end_with_launcher() -> None:
    """A process that `launch` started stops, saved, when its launcher is gone."""
    if is_launched():
        stop_with_parent()


@contextlib.contextmanager
def defer_shutdown(*, every_rank: bool = False) -> Iterator[None]:
    """Inside, rank 0 writes what would be lost: nobody ends it, also when another rank has failed. every_rank: so does
    this one, whichever it is."""
    _count(1, every_rank)
    _say(BEGUN)
    try:
        yield
    finally:
        _count(-1, every_rank)
        _say(DONE)


def _count(blocks: int, own: bool) -> None:
    global _writing, _own_writing
    with _counting:
        _writing += blocks
        _own_writing += blocks * own


def is_writing() -> bool:
    """Whether this rank writes, inside of `defer_shutdown`."""
    return (_writing if is_main() else _own_writing) > 0


def _say(word: bytes) -> None:
    """To the launcher, if there is one."""
    pipe = os.environ.get(PIPE)
    if pipe is None:
        return
    with contextlib.suppress(OSError):  # the launcher is gone
        os.write(int(pipe), word)


def claim_gpu() -> None:
    """Leave this process one GPU, its own, so that no library can put anything on another's. Call it before torch is
    imported. Raises UserError if there is none."""
    if world() == 1:
        return
    local = int(os.environ.get("LOCAL_RANK", rank()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else []
    if devices and local >= len(devices):
        raise UserError(f"{local + 1} processes want a GPU each, but CUDA_VISIBLE_DEVICES lists {len(devices)}")
    os.environ[GIVEN] = visible or ""
    if visible != "":
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local] if devices else str(local)
    os.environ["LOCAL_RANK"] = "0"  # its place among the devices that it sees


def given_devices() -> list[str] | None:
    """The GPUs that this machine's processes of the run may use together, by the driver's names; None: all."""
    visible = os.environ.get(GIVEN) or (None if GIVEN in os.environ else os.environ.get("CUDA_VISIBLE_DEVICES"))
    return visible.split(",") if visible else None


@dataclass
class _Process:
    rank: int
    popen: subprocess.Popen[str]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=40))  # what it said; of rank 0 nothing, it speaks
    reader: threading.Thread | None = None

    @property
    def ended(self) -> bool:
        return self.popen.poll() is not None


def launch(command: Sequence[str], count: int, max_restarts: int = 0) -> int:
    """Run `command` in `count` processes and return the exit code of the run: 0 if all ended well.

    Rank 0 has our terminal. The first that fails ends all: its own message is told, unless it is rank 0's, which has
    told it. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP go to rank 0, which agrees with the others on the step to stop after.
    max_restarts: how often all are started anew after a failure, unless it is a signal to stop or an error that the
    next start would meet again (`PosttrainError.can_restart`).
    Raises RunError for a process that was killed; Interrupted after a second signal, or one that came before rank 0
    could heed it.
    """
    with _signals() as received:  # from before the first of them starts: none is left behind by a signal
        for attempt in range(max_restarts):
            try:
                code = _run(command, count, received, attempt, max_restarts)
            except RunError as error:
                code = error.exit_code
                terminal.note(str(error))
            if received or code in (0, UserError.exit_code, *(128 + number for number in STOPPING)):
                return code
            if code == FOR_GOOD:
                terminal.note("not started anew: the same would happen again")
                return 1
            terminal.note(f"restart {attempt + 1} of {max_restarts}: all {count} processes, from the newest checkpoint")
        code = _run(command, count, received, max_restarts, max_restarts)
        return 1 if code == FOR_GOOD else code


def _run(command: Sequence[str], count: int, received: list[int], attempt: int, max_restarts: int) -> int:
    """Start all, wait for all, and return the exit code. See `launch`."""
    busy = _Busy()
    processes: list[_Process] = []
    port = _reserve_port()
    try:
        started = {RESTARTED: str(attempt), MAX_RESTARTS: str(max_restarts), "MASTER_PORT": str(port.getsockname()[1])}
        for number in range(count):
            processes.append(_start(command, number, count, started, busy))
        first = _first_failure(processes, received)
        if first is None:
            return 0
        by_signal = first.popen.returncode in [128 + number for number in STOPPING]
        stopped = by_signal and len(received) < 2 and busy.ever
        _wait(processes, GRACE_STOPPED_S if stopped else GRACE_S, busy, received)
    finally:
        for process in processes:
            _kill(process)
        busy.close()
        port.close()
    return _tell(first, processes, received)


class _Busy:
    """Our end of the pipe on which rank 0 says that it writes."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._depth, self._heard = 0, False

    def __bool__(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            for word in os.read(self._ours, 1 << 16):
                self._depth, self._heard = self._depth + (1 if word == BEGUN[0] else -1), True
        return self._depth > 0

    @property
    def ever(self) -> bool:
        """Whether it has written: until then Ctrl-C just ends a run, and the others may wait for rank 0 for hours."""
        return bool(self) or self._heard

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


def _start(command: Sequence[str], number: int, count: int, started: dict[str, str], busy: _Busy) -> _Process:
    """In a process group of its own: Ctrl-C reaches only us. Its stdin ends with us, see `stop_with_parent`."""
    env = {
        "OMP_NUM_THREADS": str(max(1, usable_cpus() // count)),
        **os.environ,
        **{"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)},
        **{"MASTER_ADDR": "127.0.0.1", LAUNCHED: "1", **started},
        **({PIPE: str(busy.theirs)} if number == 0 else {}),
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
        pass_fds=[busy.theirs] if number == 0 else [],
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
    """Wait for the first process that fails; None when all have ended well. Raises Interrupted if rank 0 has not ended
    soon after a second signal: inside a library, where it waits for the others, it does not hear of one."""
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
        if all(process.ended for process in processes):
            return None
        if time.monotonic() > deadline:
            raise Interrupted("stopped at once; the last complete checkpoint is what remains", number=received[0])
        time.sleep(POLL_S)


def _wait(processes: Sequence[_Process], seconds: float, busy: _Busy, received: Sequence[int]) -> None:
    """Wait for all to end: so long, and as long as rank 0 writes; no longer once a signal comes."""
    deadline, heard = time.monotonic() + seconds, len(received)
    while time.monotonic() < deadline and len(received) == heard and not all(process.ended for process in processes):
        if busy and not processes[0].ended:
            deadline = max(deadline, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)


def _kill(process: _Process) -> None:
    """With its workers, which share its process group."""
    if not process.ended:
        os.killpg(process.popen.pid, signal.SIGKILL)
        process.popen.wait()
        process.popen.returncode = 0  # our doing, no failure of its own
    if process.popen.stdin is not None:
        process.popen.stdin.close()


def _tell(first: _Process, processes: Sequence[_Process], received: Sequence[int]) -> int:
    """The exit code; the failure is told unless rank 0 has told one. Of several codes that which says most: others end
    with 1 because of the rank that failed."""
    codes = [process.popen.returncode for process in processes]
    telling = next((code for code in codes if code in (FOR_GOOD, UserError.exit_code)), None)
    if codes[0] > 0:
        return telling or codes[0]
    code = first.popen.returncode
    if first.reader is not None:
        first.reader.join(timeout=5)
    said = "\n".join(line for line in first.tail if line)
    if code < 0 and -code in received:
        raise Interrupted(f"stopped by {signal.Signals(-code).name} before the first step", number=-code)
    if code < 0:
        raise RunError(
            f"rank {first.rank} was killed by signal {-code} ({signal.Signals(-code).name})",
            allowed=f"the last that it said:\n{said}" if said else "",
            hint=f"{OUT_OF_MEMORY if -code == signal.SIGKILL else ''}go on with the same command and --resume",
        )
    who = (
        "" if said.startswith("rank ") else f"rank {first.rank}: "
    )  # it says which one failed: see train/rank_failure_monitor.py
    terminal.note(f"{who}{said or f'ended with {code}'}")
    return telling or code


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP are collected in a list instead of ending this process."""
    received: list[int] = []
    heard = [n for n in STOPPING if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
    handled = heard if threading.current_thread() is threading.main_thread() else []
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
