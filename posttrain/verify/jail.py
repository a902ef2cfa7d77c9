"""Launcher that isolates untrusted code; started by `sandbox.py` as a file, uses only the standard library.

    python -I -S jail.py SPEC_FD REPORT_FD

Level `namespaces`: separate user, network, process, IPC, host name and mount namespaces; a file system of read-only
mounts of the interpreter and the system's libraries, plus one small writable tmpfs; no capabilities, no new privileges.
The first process of the process namespace monitors the memory of all other processes and the clock; when it exits, the
kernel kills everything in the namespace. Level `limits`: only a session, kernel resource limits, and Landlock if
available. Both levels: a separate session keyring, and the system call filter built by `system_calls.py`.

The jail writes `ended CODE` (exit code of the program, 128 + n for signal n), `timeout`, `memory`, `processes`, or
`failed WHY` to REPORT_FD. The program has no access to this descriptor, so it cannot report a failure of the sandbox.
If the caller is killed, the jail ends the program and removes its folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable

POLL_SECONDS = 0.01
KILL_SECONDS = 1.0
MEMORY_RECHECKS = 3
MAX_PENDING_SIGNALS = 1000  # limit on pending signals, which the kernel counts per user

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2
_SYS_MOUNT_SETATTR = 442  # same number on all architectures
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_PR_SET_CHILD_SUBREAPER = 36
_SECCOMP_MODE_FILTER, _KEYCTL_JOIN_SESSION_KEYRING = 2, 1
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446  # same on all architectures
_LANDLOCK_RIGHTS = {1: 13, 2: 14}  # ABI version -> number of file access rights; 15 in later versions (truncation)
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1, 2, 4, 8, 1 << 14
_SYS_KCMP, _KCMP_VM = {"x86_64": 312, "aarch64": 272}, 1
_MEMORY_FIELDS = ("VmRSS", "VmSwap", "VmPTE")
_FIRST_FREE_UID = 1_000_000_000  # plus a process id: a user id that owns nothing and is used by no other process

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError if a system call returned a negative value."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Call mount(2). Raises OSError naming the target."""
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()), f"mount {target}")


def read_only(path: str, *, recursive: bool) -> None:
    """Make a mount read-only and ignore its setuid bits; recursive: also for all mounts below it."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    size = ctypes.sizeof(attributes)
    check(
        libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, ctypes.byref(attributes), size),
        f"read-only {path}",
    )


def user_exists(uid: int) -> bool:
    """Return whether this user namespace has the user id; user ids in containers often end at 65,536."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= uid < first + count for first, _, count in ranges)


def enter_namespaces() -> int:
    """Move this process into new namespaces; return the user id of the program inside."""
    everything = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    free = _FIRST_FREE_UID + os.getpid()
    if os.getuid() == 0 and user_exists(free) and libc.unshare(everything) == 0:
        return free
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(everything | _NEWUSER), "unshare")
    for file, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        with open(f"/proc/self/{file}", "w") as out:
            out.write(text)
    return 1000


def build_root(root: str, spec: dict) -> None:
    """Build a file system below `root` with what a program needs to run, and make it the root."""
    mount("none", "/", "none", _MS_REC | _MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.mkdir(root + "/tmp")  # created first, because the interpreter may live below /tmp
    mount("tmpfs", root + "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={spec['disk_mb']}m,nr_inodes=1000,mode=1777")
    for source in spec["readable"]:
        target = root + source
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        elif os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
            mount(source, target, "none", _MS_BIND | _MS_REC)
            read_only(target, recursive=True)
        elif os.path.isfile(source):
            with open(target, "w"):
                pass
            mount(source, target, "none", _MS_BIND)
            read_only(target, recursive=False)
    os.mkdir(root + "/dev")
    for name in ("null", "random", "urandom"):  # no /dev/zero: its shared mappings are memory that no limit counts
        with open(f"{root}/dev/{name}", "w"):
            pass
        mount(f"/dev/{name}", f"{root}/dev/{name}", "none", _MS_BIND)
    os.mkdir(root + "/proc")
    mount("proc", root + "/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    with open(root + "/tmp/main.py", "w", encoding="utf-8", errors="replace") as out:
        out.write(spec["code"])
    read_only(root, recursive=False)
    os.chdir(root)
    check(libc.pivot_root(b".", b"."), "pivot_root")
    check(libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/tmp")


def set_limits(spec: dict) -> None:
    """Set kernel resource limits for this process and its children, never above the current hard limits."""
    mega = 1 << 20
    for what, value in (
        (resource.RLIMIT_AS, spec["memory_mb"] * mega),
        (resource.RLIMIT_CPU, int(spec["seconds"]) + 1),
        (resource.RLIMIT_FSIZE, spec["disk_mb"] * mega),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, spec["processes"]),
        (resource.RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def restrict_files(spec: dict) -> None:
    """Permanently restrict file access with Landlock: read only what is listed, write only in the scratch folder.

    The kernel then also denies access to memory, environment and descriptors of unrestricted processes. Does nothing
    without Landlock (Linux before 5.13, some containers).
    """
    version = libc.syscall(_SYS_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return
    every = (1 << _LANDLOCK_RIGHTS.get(version, 15)) - 1
    rules = libc.syscall(_SYS_LANDLOCK_CREATE, ctypes.byref(ctypes.c_uint64(every)), 8, 0)
    check(rules, "Landlock")
    wanted = dict.fromkeys(spec["readable"], _EXECUTE | _READ_FILE | _READ_DIR)
    wanted |= {"/proc": _READ_FILE | _READ_DIR, "/sys/devices/system/cpu": _READ_FILE | _READ_DIR, spec["root"]: every}
    wanted |= dict.fromkeys(("/dev/null", "/dev/random", "/dev/urandom"), _READ_FILE | _WRITE_FILE | _TRUNCATE)
    for path, rights in wanted.items():
        if os.path.exists(path):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            of_files = every if os.path.isdir(path) else _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
            rule = _PathRule(rights & every & of_files, folder)
            check(libc.syscall(_SYS_LANDLOCK_ADD, rules, 1, ctypes.byref(rule), 0), f"Landlock {path}")
            os.close(folder)
    check(libc.syscall(_SYS_LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def filter_calls(instructions: list) -> None:
    """Permanently deny system calls to this process and its children.

    A string constant stands for this process's id.
    """
    lines = [_Instruction(code, yes, no, os.getpid() if isinstance(k, str) else k) for code, yes, no, k in instructions]
    program = _Program(len(lines), (_Instruction * len(lines))(*lines))
    check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "system call filter")


def join_session_keyring() -> None:
    """Join a new session keyring. If that is not permitted (containers), the filter denies keyring calls."""
    if number := _SYS_KEYCTL.get(platform.machine()):
        libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None)


def become_program(spec: dict, uid: int | None) -> None:
    """Drop all privileges and execute the program in this process."""
    os.setsid()  # a new process group: signals the program sends to its group do not reach the jail
    join_session_keyring()
    set_limits(spec)
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if uid is not None and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if uid is None:
        restrict_files(spec)
    if spec["filter"]:
        filter_calls(spec["filter"])
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def measure_usage() -> tuple[int, dict[int, int]]:
    """Return (number of processes and threads, kilobytes by process) of this namespace, without its first process.

    Kilobytes include resident, swapped and page-table memory. A process whose main thread has exited, which reports no
    memory, is listed under the id of another thread.
    """
    spaces: dict[int, int] = {}
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError):  # it has just exited
                found = status_of(f"/proc/{name}")
                count += int(found.get("Threads", "1"))
                spaces |= address_space(name, (name,) if "VmRSS" in found else os.listdir(f"/proc/{name}/task"))
    return count, spaces


def address_space(process: str, threads: Iterable[str]) -> dict[int, int]:
    """Return {thread: kilobytes} of the first thread that has not exited; {} if all have.

    Threads share their memory.
    """
    for thread in threads:
        with contextlib.suppress(OSError):
            found = status_of(f"/proc/{process}/task/{thread}")
            if "VmRSS" in found:
                return {int(thread): sum(int(found[key].split()[0]) for key in _MEMORY_FIELDS if key in found)}
    return {}


def status_of(path: str) -> dict[str, str]:
    """Parse the status file of a process or thread."""
    with open(f"{path}/status") as file:
        return dict(line.split(":", 1) for line in file)


def total_memory(spaces: dict[int, int]) -> int:
    """Return the total kilobytes, counting a shared address space once (a vfork child shares its parent's)."""
    call = _SYS_KCMP.get(platform.machine(), -1)
    distinct: list[int] = []
    for process in spaces:
        if not any(libc.syscall(call, process, other, _KCMP_VM, 0, 0) == 0 for other in distinct):
            distinct.append(process)
    return sum(spaces[process] for process in distinct)


def exceeds_memory(kilobytes: int, spaces: dict[int, int]) -> bool:
    """Return whether the address spaces exceed the limit, also when read again: a process may have exited."""
    over = sum(spaces.values()) > kilobytes
    return over and all(total_memory(measure_usage()[1]) > kilobytes for _ in range(MEMORY_RECHECKS))


def supervise(child: int, spec: dict, *, watch: bool) -> str:
    """Wait until the program `child` has ended or exceeded a limit; return the report."""
    give_up = time.monotonic() + spec["seconds"]
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid == child and os.WIFSTOPPED(status):  # no process would continue it
            return f"ended {128 + os.WSTOPSIG(status)}"
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return f"ended {code if code >= 0 else 128 - code}"
        if time.monotonic() > give_up:
            return "timeout"
        count, spaces = measure_usage() if watch else (0, {})
        if exceeds_memory(spec["memory_mb"] << 10, spaces):
            return "memory"
        if count > spec["processes"]:  # RLIMIT_NPROC does not apply to the machine's root
            return "processes"
        if pid == 0:
            time.sleep(POLL_SECONDS)


def fork_program(spec: dict, uid: int | None) -> int:
    """Start the program and return its process id. This process then closes its stdin and stdout.

    Raises OSError if the program cannot be started, which is a failure of the sandbox and not of the program.
    """
    failure_in, failure_out = os.pipe()  # both ends close when the program starts
    child = os.fork()
    if child == 0:
        try:
            become_program(spec, uid)
        except BaseException as error:
            os.write(failure_out, f"the program cannot be started: {error}".encode())
        finally:
            os._exit(127)
    os.close(failure_out)
    for stream in (0, 1):
        os.close(stream)
    why = os.read(failure_in, 4096)
    os.close(failure_in)
    if why:
        os.waitpid(child, 0)
        raise OSError(why.decode(errors="replace"))
    return child


def run_first_process(spec: dict, uid: int) -> str:
    """Run as process 1 of the new namespace; all other processes end with it."""
    for number in (signal.SIGTERM, signal.SIGINT):  # with a handler, an unprivileged program could end this process
        signal.signal(number, signal.SIG_IGN)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    build_root(spec["root"], spec)
    return supervise(fork_program(spec, uid), spec, watch=True)


def run_in_namespaces(spec: dict, report: int) -> None:
    """Run the program at level `namespaces`. The first process inside writes the report; this process waits for it."""
    uid = enter_namespaces()
    first = os.fork()
    if first == 0:
        write_report(report, lambda: run_first_process(spec, uid))
        os._exit(0)
    for stream in (0, 1):
        os.close(stream)
    os.waitpid(first, 0)


def run_with_limits(spec: dict) -> str:
    """Run the program at level `limits` and return the report."""
    os.chdir(spec["root"])
    with open("main.py", "w", encoding="utf-8", errors="replace") as out:
        out.write(spec["code"])
    return supervise(fork_program(spec, None), spec, watch=False)


def end_children(proc: int) -> None:
    """Kill all descendants of this process, also those in other sessions: orphans are reparented to it.

    proc: a descriptor of /proc, opened before entering the namespaces.
    """
    give_up = time.monotonic() + KILL_SECONDS
    with contextlib.suppress(ChildProcessError):  # no children are left
        while time.monotonic() < give_up:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            with contextlib.suppress(OSError):
                listed = os.open(f"{os.getpid()}/task/{os.getpid()}/children", os.O_RDONLY, dir_fd=proc)
                with open(listed) as file:
                    left = file.read().split()
                for child in left:
                    os.kill(int(child), signal.SIGKILL)
            time.sleep(0.001)


def install_termination_handler(spec: dict, proc: int) -> None:
    """Install a SIGTERM handler that kills all children, removes the folder and exits.

    The kernel also sends SIGTERM if the caller dies.
    """
    me, name = os.getpid(), os.path.basename(spec["root"])
    above = os.open(os.path.dirname(spec["root"]), os.O_RDONLY | os.O_DIRECTORY)
    if spec["level"] == "limits":
        import shutil  # slow import; with namespaces the folder is an empty mount point

    def remove() -> None:
        if spec["level"] == "limits":
            shutil.rmtree(name, dir_fd=above)
        else:
            os.rmdir(name, dir_fd=above)

    def leave(*_: object) -> None:
        if os.getpid() == me:
            end_children(proc)
            with contextlib.suppress(OSError):
                remove()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def write_report(report: int, work: Callable[[], str | None]) -> None:
    """Write the result of `work`, or why it failed, to the report."""
    try:
        text = work()
    except Exception as error:
        text = f"failed {type(error).__name__}: {error}"
    if text:
        os.write(report, text.encode())


def main() -> None:
    """Run the program of the specification in the file descriptor given as first argument, within its limits."""
    spec_file, report = map(int, sys.argv[1:])
    os.set_inheritable(report, False)
    with open(spec_file, encoding="utf-8") as file:  # closes the file, so that the program has no access to it
        spec = json.load(file)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    install_termination_handler(spec, proc)
    if spec["level"] == "namespaces":
        write_report(report, lambda: run_in_namespaces(spec, report))
    else:
        write_report(report, lambda: run_with_limits(spec))
    end_children(proc)


if __name__ == "__main__":
    main()
    os._exit(0)
