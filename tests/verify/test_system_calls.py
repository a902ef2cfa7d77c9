"""The system call filter: what programs need is allowed, what damages the machine is denied."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from posttrain.verify import sandbox, system_calls
from posttrain.verify.sandbox import Finished, Limits, run_python
from tests.verify.hostile_programs import HELPERS

pytestmark = pytest.mark.skipif(not system_calls.is_supported(), reason="no filter on this machine")
LEVELS = [
    pytest.param(
        "namespaces",
        marks=pytest.mark.skipif(sandbox.isolation() != "namespaces", reason="this machine offers no namespaces"),
    ),
    "limits",
]


def run(code: str, level: str, monkeypatch: pytest.MonkeyPatch, *, seconds: float = 5.0) -> Finished:
    monkeypatch.setattr(sandbox, "isolation", lambda: level)
    return run_python(code, limits=Limits(seconds=seconds, memory_mb=400), allow_unsandboxed=True)


# Prints the calls that succeeded. Each call leaves the machine unchanged even if it is allowed.
DENIED = """
import fcntl, mmap, resource, socket
PARENT, NUMBERS, EPERM = os.getppid(), ctypes.create_string_buffer(128), 1
def filtered(what, x86, arm, *arguments):
    'Other errors come from the kernel: the call was made.'
    number = arm if ARM else x86
    if number and (libc.syscall(number, *arguments) >= 0 or ctypes.get_errno() != EPERM):
        print('escaped', what, flush=True)
tried('sockets', lambda: socket.socket(socket.AF_UNIX))
pair = socket.socketpair()
tried('larger buffers', lambda: pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20))
tried('larger input buffers', lambda: pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20))
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC):
    tried('packets', lambda: socket.socketpair(socket.AF_UNIX, kind))
tried('another family', lambda: socket.socketpair(30, socket.SOCK_STREAM))
for what, x86, arm in (('connect', 42, 203), ('bind', 49, 200), ('listen', 50, 201), ('accept', 43, 202)):
    filtered(what, x86, arm, pair[0].fileno(), b'\\1\\0/nowhere\\0', 11)
filtered('an address', 44, 206, pair[0].fileno(), b'x', 1, 0, b'\\1\\0/nowhere\\0', 11)
filtered('io_setup', 206, 0, 8, ctypes.byref(ctypes.c_ulong()))
filtered('a POSIX timer', 222, 107, 1, None, ctypes.byref(ctypes.c_int()))
filtered('timerfd', 283, 85, 1, 0)
tried('a lock on a file of the system', lambda: fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_SH))
r, w = os.pipe()
tried('a signal of a descriptor', lambda: fcntl.fcntl(r, fcntl.F_SETOWN, PARENT))
tried('its kind', lambda: fcntl.fcntl(r, 10, signal.SIGURG))
tried('an owner by ioctl', lambda: fcntl.ioctl(pair[0], 0x8901, PARENT.to_bytes(4, sys.byteorder)))
tried('a larger pipe', lambda: fcntl.fcntl(w, 1031, 1 << 18))
open('lease', 'w').close()
tried('a lease', lambda: fcntl.fcntl(os.open('lease', os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK))
tried('a notice', lambda: fcntl.fcntl(os.open('.', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_CREATE))
tried('an attribute', lambda: os.setxattr('lease', 'user.x', b'x'))
tried('a device', lambda: os.mknod('null', 0o20600, os.makedev(1, 3)))
tried('limits of its parent', lambda: resource.prlimit(PARENT, resource.RLIMIT_CORE))
priority = os.getpriority(os.PRIO_PROCESS, PARENT)
tried('priority of its parent', lambda: os.setpriority(os.PRIO_PROCESS, PARENT, priority))
tried('priority of a group', lambda: os.setpriority(os.PRIO_PGRP, 0, 0))
tried('processors of its parent', lambda: os.sched_setaffinity(PARENT, os.sched_getaffinity(0)))
filtered('scheduling', 144, 119, 0, 0, NUMBERS)
tried('huge pages', lambda: mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000) and True)
filtered('another filter', 317, 277, 2, 0, None)
filtered('a filter by prctl', 157, 167, 22, 1, 0, 0, 0)
filtered('modify_ldt', 154, 0, 0, NUMBERS, 16)
filtered('memory policy', 238, 237, 0, None, 0)
filtered('sync', 162, 81)
filtered('the clock', 159, 171, NUMBERS)
filtered('the host name', 170, 161, b'', -1)
filtered('personality', 135, 92, 0xffffffff)
tried('another user', lambda: os.setuid(os.getuid()))
for number in (451, 470, 600, 5000):
    try:
        call(number, number, 0)
    except OSError as error:
        pass
    print(ctypes.get_errno(), flush=True)
queued = 0
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
while queued < 3000 and libc.sigqueue(os.getpid(), 40, None) == 0:
    queued += 1
tried('3000 waiting signals', lambda: queued == 3000)
"""


@pytest.mark.parametrize("level", LEVELS)
def test_calls_that_harm_others_are_denied(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(HELPERS + DENIED, level, monkeypatch)
    assert (done.stdout, done.stderr, done.exit_code) == ("38\n" * 4, "", 0)


ORDINARY = {
    "every module of the standard library": (
        """
        import importlib, sys, warnings
        warnings.simplefilter("ignore")
        unwanted = {"antigravity", "this", "idlelib", "turtledemo"}  # a browser, a poem, windows
        for name in sorted(sys.stdlib_module_names - unwanted):
            if not name.startswith("_"):
                try:
                    importlib.import_module(name)
                except ImportError:
                    pass  # not on this system
        print(len(sys.modules) > 300)
        """,
        "True\n",
    ),
    "numpy": (
        """
        import numpy as np
        a = np.random.default_rng(0).normal(size=(200, 200))
        np.save("a.npy", a)
        print(np.allclose(a @ np.linalg.inv(a), np.eye(200)), (np.load("a.npy", mmap_mode="r") == a).all())
        """,
        "True True\n",
    ),
    "files": (
        """
        import os, pathlib, shutil, tempfile
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "a").write_text("text")
            shutil.copy2(folder / "a", folder / "b"); shutil.copyfile(folder / "a", folder / "c")
            os.replace(folder / "c", folder / "d"); os.symlink("a", folder / "e"); os.link(folder / "a", folder / "f")
            os.mkfifo(folder / "g"); os.utime(folder / "a", (1, 1)); (folder / "a").chmod(0o600)
            os.truncate(folder / "b", 2); shutil.copytree(folder, name + "-2", ignore=lambda *_: ["g"])
            print(*sorted(os.listdir(name)), (folder / "b").read_text(), os.listxattr(name))
            print(*sorted(os.listdir(name + "-2")))
        """,
        "a b d e f g te []\na b d e f\n",
    ),
    "databases": (
        """
        import fcntl, shelve, sqlite3
        for mode in ("delete", "wal"):
            with sqlite3.connect("d.db") as connection:
                connection.execute(f"pragma journal_mode={mode}")
                connection.execute("create table if not exists t (a)")
                connection.execute("insert into t values (3)")
                connection.commit()
                print(connection.execute("select sum(a) from t").fetchone())
        with open("l", "w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
        with shelve.open("s") as shelf:
            shelf["a"] = 1
            print(dict(shelf))
        """,
        "(3,)\n(6,)\n{'a': 1}\n",
    ),
    "pairs of sockets and asyncio": (
        """
        import asyncio, selectors, socket
        async def talk():
            one, other = socket.socketpair()
            reader, writer = await asyncio.open_connection(sock=one)
            writer.write(b"abc")
            await writer.drain()
            other.sendall(other.recv(3) + b"!")
            got = await reader.readexactly(4)
            writer.close()
            return got, await asyncio.to_thread(sum, (1, 2))
        print(*asyncio.run(talk()))
        a, b = socket.socketpair()
        a.send(b"x"); a.shutdown(socket.SHUT_WR)
        with selectors.DefaultSelector() as selector:
            selector.register(b, selectors.EVENT_READ)
            print(len(selector.select(1)), b.recv(9))
        """,
        "b'abc!' 3\n1 b'x'\n",
    ),
    "signals and time": (
        """
        import os, resource, signal, threading, time
        got = []
        signal.signal(signal.SIGALRM, lambda *_: got.append("alarm"))
        signal.signal(signal.SIGUSR1, lambda *_: got.append("usr1"))
        os.kill(os.getpid(), signal.SIGUSR1); signal.raise_signal(signal.SIGUSR1)
        signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1)
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        threading.stack_size(1 << 22)
        thread = threading.Thread(target=got.append, args=("thread",)); thread.start(); thread.join()
        os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))
        print(*got, os.isatty(0), time.thread_time() > 0)
        """,
        "usr1 usr1 alarm thread False True\n",
    ),
    "a shell": (
        """
        import asyncio, subprocess, sys
        script = "for i in 2 1; do echo $i; done | sort | tr 1 a; (sleep 0.01) & wait; touch q; find . -name q"
        print(subprocess.run(script, shell=True, capture_output=True, text=True).stdout)
        async def child():
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(input())", stdin=-1, stdout=-1)
            return await process.communicate(b"in")
        print(*asyncio.run(child()))
        """,
        "a\n2\n./q\n\nb'in\\n' None\n",
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ORDINARY)
def test_calls_that_programs_need_are_allowed(name: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = ORDINARY[name]
    done = run(textwrap.dedent(code), level, monkeypatch, seconds=20.0)
    assert (done.stdout, done.exit_code) == (printed, 0), done


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_call_numbers_match_the_kernel_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("no headers of the kernel here")
    text = HEADERS[machine].read_text()
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", text))
    known.setdefault("newfstatat", known.get("fstatat", ""))
    at = list(HEADERS).index(machine)
    tables = [
        system_calls._ALLOWED,
        system_calls._SIGNALS,
        {n: x for n, (x, _) in system_calls._WITH_ARGUMENTS.items()},
    ]
    for name, numbers in [item for table in tables for item in table.items()]:
        if name == "fchmodat2" and name not in known:
            continue  # newer than these headers
        assert str(numbers[at] if numbers[at] is not None else "") == known.get(name, ""), name


def test_each_call_is_in_one_rule() -> None:
    for at in range(2):
        rules = [*system_calls._ALLOWED.values(), *(numbers for numbers, _ in system_calls._WITH_ARGUMENTS.values())]
        numbers = [rule[at] for rule in [*rules, *system_calls._SIGNALS.values()] if rule[at] is not None]
        assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("machine", HEADERS)
@pytest.mark.parametrize("as_user", [False, True])
def test_every_jump_stays_within_the_filter(machine: str, as_user: bool) -> None:
    *program, last = system_calls.filter_program(machine, as_user=as_user)
    assert len(program) < 4095
    assert last == (system_calls._RETURN, 0, 0, system_calls._DENY)
    assert all(at + 1 + max(yes, no) <= len(program) for at, (_, yes, no, _) in enumerate(program))
    assert all(0 <= yes < 256 and 0 <= no < 256 for _, yes, no, _ in program)
