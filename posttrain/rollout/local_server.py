"""Starting and ending `vllm serve` on this machine: by a run for itself, or by `posttrain serve` for other runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import EngineError, RecipeError
from posttrain.recipe.engine_sections import Vllm
from posttrain.rollout import engine_process, vllm_start
from posttrain.rollout.vllm_process import GRACE_S, KEY_VARIABLE
from posttrain.run import ranks
from posttrain.scratch import Scratch

_ENTRY = "import sys; sys.path.insert(0, {root!r}); from posttrain.rollout.vllm_process import main; main({parent})"
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", ranks.LAUNCHED)
# vLLM's default, 5 s, is the age at which the client gives up an idle connection too: a request that the client sent
# while the server closed its connection ended without an answer, as if the server had died.
IDLE_CONNECTION_S = 86_400
_SERVER_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # endpoints of weights and pauses, behind `vllm_process.Guard`
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(IDLE_CONNECTION_S),
}
DEVICES = "rollout.vllm.server.devices"
SOCKET = "vllm"
GROUP_EXIT_S = 2.0  # for the other processes of an ended server to exit by themselves


@dataclass
class LocalServer:
    """A `vllm serve` process with its own process group and session, so that Ctrl-C does not reach it.

    It ends when this process does, in whatever way.
    """

    section: Vllm
    place: str  # for messages, e.g. GPU 1
    process: subprocess.Popen[bytes]
    log: Path | None
    home: Scratch  # folder of its socket files, which no other user can enter
    uds: Path | None  # socket file that it listens on, if any

    @classmethod
    def start(
        cls,
        section: Vllm,
        arguments: Mapping[str, Any],
        key: str,
        *,
        devices: Sequence[str] = (),
        log: Path | None = None,
        listen: tuple[str, int] | None = None,
    ) -> LocalServer:
        """Start the process, without waiting for it.

        arguments: vLLM's, by name. devices: for CUDA_VISIBLE_DEVICES; empty: unchanged. log: file for its output; None:
        our stderr. listen: (host, port); None: a socket file.
        """
        root = str(Path(__file__).resolve().parents[2])
        home = Scratch("server")
        uds = home.path / SOCKET if listen is None else None
        address = ["--host", listen[0], "--port", str(listen[1])] if listen else ["--uds", str(uds)]
        entry = _ENTRY.format(root=root, parent=os.getpid())
        command = [sys.executable, "-P", "-c", entry, "serve", *options(arguments), *address]
        env = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        env |= vllm_start.socket_settings(home.path) | _SERVER_VARIABLES | {KEY_VARIABLE: key}
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        with contextlib.ExitStack() as stack:
            output: Any = 2
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
            )
        return cls(section, f"GPU {' and '.join(devices)}" if devices else "the CPU", process, log, home, uds)

    def exit_error(self, wait_s: float = 0.0) -> EngineError | None:
        """Return the error for a process that has ended; None while it runs.

        wait_s: time to wait for its end: connections close a moment before the process can be reaped.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
            code = self.process.returncode
            error = vllm_start.death_error(code, self.log, self.section, f"vLLM on {self.place}")
            return error.at(str(self.log)) if self.log else error
        return None

    def close(self) -> None:
        """End the process and everything that it started. May be called twice."""
        group = self.process.pid
        left = named_memory(group)
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        deadline = time.monotonic() + GROUP_EXIT_S
        with contextlib.suppress(ProcessLookupError):  # raised once the group is empty
            while time.monotonic() < deadline:  # Python's resource trackers remove what other processes leave behind
                os.killpg(group, 0)
                time.sleep(0.02)
                self.process.poll()
            os.killpg(group, signal.SIGKILL)
        self.process.wait()
        for path in left:
            Path(path).unlink(missing_ok=True)
        self.home.close()


def named_memory(group: int) -> set[str]:
    """Return the shared memory files of vLLM in the processes of a process group: on a CPU with tensor parallelism vLLM
    does not remove them."""
    found = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if os.getpgid(int(process.name)) == group:
                found |= engine_process.mapped_files(engine_process.VLLM_SHARED_MEMORY, process.name)
    return found


def options(arguments: Mapping[str, Any]) -> list[str]:
    """Return vLLM's arguments as a command line of `vllm serve`: the model by position, the others as options."""
    found = [str(arguments["model"])]
    for name, value in arguments.items():
        if name == "model":
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list | tuple):
            found += [f"--{option}", *map(str, value)]
        else:
            found += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def visible_device(number: int, option: str) -> str:
    """Return the CUDA_VISIBLE_DEVICES entry of a GPU, numbered among those that this process was given.

    option: the option that named the number, for the RecipeError if there are fewer GPUs.
    """
    given = ranks.given_devices()
    if given is not None and number >= len(given):
        raise RecipeError(f"{option}: there is no GPU {number}: CUDA_VISIBLE_DEVICES lists {len(given)}")
    return given[number] if given is not None else str(number)


def check_not_training(number: int) -> int:
    """Return the number of a GPU that no training process uses. Raises RecipeError for any other."""
    training = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if number < training:
        raise RecipeError(
            f"{DEVICES}: GPU {number} trains",
            allowed=f"GPUs from {training} on: training takes the first {training}",
            hint="without `server` vLLM shares the trainer's GPU",
        )
    return number
