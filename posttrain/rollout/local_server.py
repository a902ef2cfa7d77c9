"""Starting the process of `server` on this machine: by a run for itself, or by `posttrain serve` for runs elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from posttrain.errors import RecipeError, RunError
from posttrain.rollout import named_memory
from posttrain.rollout.token import TOKEN_VARIABLE, own_token
from posttrain.run import ranks

_BEGIN = "import sys; sys.path.append({root!r}); from posttrain.rollout import lifeline; lifeline.watch(); "
_SERVE = "from posttrain.rollout.server import main; main({fd})"
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", ranks.LAUNCHED)
GRACE_S = 10.0
SHORT_LIFE_S = 5.0
DEVICES = "rollout.vllm.server.devices"


def start_process(listener: socket.socket, output: IO[Any] | None, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A server on a listening socket, which it inherits. It ends when we do: we hold the other end of its stdin.

    It has a session of its own, so that Ctrl-C reaches only us.
    """
    fd = listener.fileno()
    entry = (_BEGIN + _SERVE).format(root=str(Path(__file__).resolve().parents[2]), fd=fd)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", entry],
        stdin=subprocess.PIPE,
        stdout=output if output is not None else 2,
        stderr=output,
        pass_fds=(fd,),
        env={name: value for name, value in {**os.environ, **env}.items() if name not in _OF_A_RANK},
        start_new_session=True,
    )


@dataclass
class LocalServer:
    """A server that this run started, on a port of its own that only this machine can reach."""

    place: str  # for people: GPU 1
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, devices: Sequence[int], log: Path) -> LocalServer:
        """On those GPUs of the machine; where there is none, on the CPU."""
        import torch

        gpu = torch.cuda.is_available()
        visible = [visible_device(not_training(device), DEVICES) for device in devices] if gpu else []
        env = {"CUDA_VISIBLE_DEVICES": ",".join(visible)} if gpu else {}
        log.parent.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as listener, log.open("wb") as output:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            process = start_process(listener, output, {**env, TOKEN_VARIABLE: own_token(url)})
        return cls(f"GPU {' and '.join(map(str, devices))}" if gpu else "the CPU", url, log, process)

    def fate(self) -> str:
        """What became of the process, with its last words; empty while it runs."""
        deadline = time.monotonic() + 1.0  # its connections close a moment before it can be waited for
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        code = self.process.poll()
        if code is None:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        silent = code == -signal.SIGKILL or not self.log.is_file()  # that one leaves no time for words
        said = [] if silent else self.log.read_text(errors="replace").strip().splitlines()[-5:]
        last = "; its last lines:\n    " + "\n    ".join(said) + "\n  " if said else "; "
        return f"the engine on {self.place} {how}{last}its output is in {self.log}"

    def close(self) -> None:
        """End it. Calling it twice is fine."""
        end(self.process)


def serve_runs(listener: socket.socket, env: dict[str, str], say: Callable[[str], None]) -> None:
    """Serve one run after the other, each with a fresh process, until Ctrl-C. Raises RunError if none can live."""
    try:
        short_lives = 0
        while True:
            began = time.monotonic()
            process = start_process(listener, None, env)
            try:
                code = process.wait()
            finally:
                end(process)
            short_lives = short_lives + 1 if code and time.monotonic() - began < SHORT_LIFE_S else 0
            if short_lives == 3:
                raise RunError(f"the engine's process ended with code {code} three times as soon as it was started")
            gone = f"the engine's process ended with code {code}" if code else "the run has gone"
            say(f"{gone}; ready again")
    except KeyboardInterrupt:
        say("stopped")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server's process, if it still runs: the end of its stdin asks it to. What it started ends too."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with contextlib.suppress(ProcessLookupError):  # of a server that was killed, vLLM's workers are left
        segments = named_memory.of_group(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        named_memory.remove(segments)


def visible_device(number: int, option: str) -> str:
    """What CUDA_VISIBLE_DEVICES must say for the GPU of that number among those that this process was given.

    option: what named it, for the RecipeError where there are fewer.
    """
    given = ranks.given_devices()
    if given is not None and number >= len(given):
        raise RecipeError(f"{option}: there is no GPU {number}: CUDA_VISIBLE_DEVICES lists {len(given)}")
    return given[number] if given is not None else str(number)


def not_training(number: int) -> int:
    """The number of a GPU that no training process has. Raises RecipeError for another."""
    training = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if number < training:
        raise RecipeError(
            f"{DEVICES}: GPU {number} trains",
            allowed=f"GPUs from {training} on: training takes the first {training}",
            hint="without `server` vLLM shares the trainer's GPU",
        )
    return number
