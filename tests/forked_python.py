"""Run as a program: `python` as forks of a process that has imported the libraries, at a tenth of the time. See
`forked_python` of conftest.py.

Last arguments: modules to import, options, the socket to listen on, and the program to write, which takes python's
arguments. If their first is one of the options or a script, it asks for a fork with its arguments, folder, variables
and open files, forwards signals and ends as the fork does; if it is killed, so is the fork. Otherwise it runs python.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import warnings
from pathlib import Path

CLIENT = """#!{python} -IS
import os, sys
if sys.argv[1] not in {options} and not sys.argv[1].endswith(".py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import json, signal, socket
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)]
files.remove(server.fileno())
server.connect({path!r})
job = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ), "numbers": files}}
socket.send_fds(server, [json.dumps(job).encode()], files)
fork = int(server.recv(99))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(fork, number))
code = int(server.recv(99) or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def serve(modules: str, options: str, path: str, client: str) -> None:
    for name in modules.split():
        importlib.import_module(name)
    if "accelerate" in sys.modules:
        shortcuts = runpy.run_path(str(Path(__file__).with_name("library_shortcuts.py")))
        shortcuts["shorten_library_calls"](setattr)
    gc.freeze()  # no collection of a fork goes over the libraries, which would copy their pages as well
    gc.enable()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    text = CLIENT.format(python=sys.executable, path=path, options=options.split())
    Path(client).write_text(text, encoding="utf-8")
    Path(client).chmod(0o700)
    print(flush=True)
    while select.select([listener, 0], [], [])[0] == [listener]:  # stdin ends with who started this
        caller, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return answer(caller)
        caller.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def answer(caller: socket.socket) -> None:
    """In a fork: have another run what is asked for, and tell the caller how it ended."""
    message, received, *_ = socket.recv_fds(caller, 1 << 20, 200)
    job = json.loads(message)
    program = os.fork()
    if program == 0:
        caller.close()
        return run(received, **job)
    for file in received:
        os.close(file)
    caller.send(str(program).encode())
    if caller in select.select([caller, os.pidfd_open(program)], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        caller.send(str(code).encode())
    os._exit(0)


def run(
    received: list[int], arguments: list[str], folder: str, environment: dict[str, str], numbers: list[int]
) -> None:
    """In a fork of its own, which ends as the program does."""
    os.setsid()
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in received]  # no number is taken before it is copied
    os.closerange(3, 1000)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get("FORKED_PYTHON", sys.executable)
    sys.stdout.reconfigure(line_buffering="PYTHONUNBUFFERED" in environment)  # type: ignore[union-attr]
    random.seed()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # what runs has been imported
    sys.path[:1] = [] if arguments[0] == "-P" else [""]
    first, *rest = arguments[arguments[0] == "-P" :]
    if first == "-m":
        sys.argv, sys.path[0] = rest, folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = arguments, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve(*sys.argv[-4:])
