"""Seccomp filter for untrusted programs: the allowed system calls, compiled to a BPF program.

Allowed is what Python, its standard library, numpy and shell tools need: files, memory, threads and child processes,
waiting, pipes, socket pairs. Everything else is denied: memory that no process limit bounds (memfds, System V memory,
shared anonymous mappings, asynchronous I/O, timers, larger buffers), access beyond the process (sockets, keyrings,
ptrace, other processes' limits and priorities), changes to the system (mounts, namespaces, BPF, the clock), and calls
added by later kernels. A denied call returns EPERM; a call newer than this table returns ENOSYS, so that libraries fall
back to older calls and the program continues.

Call numbers are from the kernel's tables (asm/unistd.h); the format is that of linux/filter.h and linux/seccomp.h.
"""

from __future__ import annotations

import errno
import platform
from collections.abc import Sequence

Instruction = tuple[int, int, int, int | str]  # code, jump if true, jump if false, constant
OWN_PROCESS = "own process"  # constant that the jail replaces with its own process id

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _NOTHING = 0x7FFF0000, 0x80000000, 0x00050000  # _NOTHING: skip the call and return success
_DENY, _MISSING, _NO_TERMINAL = (0x00050000 | number for number in (errno.EPERM, errno.ENOSYS, errno.ENOTTY))
_X32 = 0x40000000  # first number of the x32 calls on x86-64
_NEWER = 451  # first call number newer than the headers this table was made from
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ARCHITECTURES = ("x86_64", "aarch64")

_ALLOWED: dict[str, tuple[int | None, int | None]] = {  # name -> number on x86-64, on arm64; None: does not exist
    # files
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "open": (2, None), "creat": (85, None), "openat": (257, 56), "close": (3, 57), "close_range": (436, 436),
    "lseek": (8, 62), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None),
    "pipe2": (293, 59), "fsync": (74, 82), "fdatasync": (75, 83), "truncate": (76, 45), "ftruncate": (77, 46),
    "fallocate": (285, 47), "fadvise64": (221, 223), "sendfile": (40, 71), "copy_file_range": (326, 285),
    "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "link": (86, None), "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35),
    "symlink": (88, None), "symlinkat": (266, 36), "readlink": (89, None), "readlinkat": (267, 78),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "umask": (95, 166), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "getxattr": (191, 8),
    "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    # waiting
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd": (284, None), "eventfd2": (290, 19), "futex": (202, 98),
    "pause": (34, None), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "restart_syscall": (219, 128),
    # memory
    "brk": (12, 214), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "madvise": (28, 233),
    "mincore": (27, 232), "msync": (26, 227), "membarrier": (324, 283),
    # pairs of sockets
    "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210),
    "getsockopt": (55, 209), "getsockname": (51, 204), "getpeername": (52, 205),
    # processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "exit": (60, 93), "exit_group": (231, 94),
    "wait4": (61, 260), "waitid": (247, 95), "set_tid_address": (218, 96), "set_robust_list": (273, 99),
    "get_robust_list": (274, 100), "rseq": (334, 293), "arch_prctl": (158, None), "pidfd_open": (434, 434),
    "setsid": (112, 157), "getsid": (124, 156), "setpgid": (109, 154), "getpgid": (121, 155),
    "getpgrp": (111, None), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "capget": (125, 90), "getpriority": (140, 141),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "sched_rr_get_interval": (148, 127),
    # signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "alarm": (37, None),
    "setitimer": (38, 103), "getitimer": (36, 102),
    # the clock
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "times": (100, 153), "getrusage": (98, 165), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "uname": (63, 160), "sysinfo": (99, 179), "getcpu": (309, 168), "getrandom": (318, 278),
}  # fmt: skip


def _one_of(
    index: int, values: Sequence[int | str], mask: int = 0xFFFFFFFF, otherwise: int = _DENY
) -> list[Instruction]:
    """Continue if the masked bits of an argument equal one of these values; else return `otherwise`."""
    tests: list[Instruction] = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [_argument(index), (_AND, 0, 0, mask), *tests, (_RETURN, 0, 0, otherwise)]


def _without(index: int, mask: int) -> list[Instruction]:
    """Continue if no bit of `mask` is set in an argument of the call."""
    return [_argument(index), (_ANY_BIT, 0, 1, mask), (_RETURN, 0, 0, _DENY)]


def _argument(index: int) -> Instruction:
    """Load the lower half of an argument of the call."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: cgroup, host name, IPC, user, process, network, mount
_SHARED, _ANONYMOUS, _HUGE_PAGES = 0x1, 0x20, 0x40000
_FILE_KINDS, _DIRECTLY, _FIFO, _REGULAR = 0xF000, 0, 0x1000, 0x8000
_UNIX, _STREAM, _SOCKET_KINDS = 1, 1, 0xF
# Duplicates, flags and locks of a descriptor. Not: its signals (F_SETOWN), leases, notifications, larger pipes.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
# TCGETS (both forms), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FICLONE
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)
# Parent-death signal, dumpable flag, names of threads and mappings, subreaper, no new privileges
_PRCTL = (1, 2, 3, 4, 15, 16, 23, 36, 37, 38, 39, 0x53564D41)
# File modes, owners and times. At level `limits` these calls do nothing, since Landlock does not restrict them.
_ATTRIBUTES = frozenset(
    [
        *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
        *("utime", "utimes", "futimesat", "utimensat"),
    ]
)
_CLONE3 = (435, 435)
_SIGNALS: dict[str, tuple[int, int]] = {  # calls whose first argument is a process
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
_PIDFD_SEND_SIGNAL = (424, 424)
_WITH_ARGUMENTS: dict[str, tuple[tuple[int | None, int | None], list[Instruction]]] = {  # conditions on arguments
    "clone": ((56, 220), _without(0, _NEW_NAMESPACES)),
    "mmap": ((9, 222), [*_one_of(3, (0, _SHARED, _ANONYMOUS), _SHARED | _ANONYMOUS), *_without(3, _HUGE_PAGES)]),
    "fcntl": ((72, 25), _one_of(1, _FCNTL)),
    "ioctl": ((16, 29), _one_of(1, _IOCTL, otherwise=_NO_TERMINAL)),
    "prctl": ((157, 167), _one_of(0, _PRCTL)),
    "prlimit64": ((302, 261), _one_of(0, (0,))),  # of the calling process
    "sched_setaffinity": ((203, 122), _one_of(0, (0,))),
    "setpriority": ((141, 140), [*_one_of(0, (0,)), *_one_of(1, (0,))]),
    # Datagram sockets can be addressed to other programs' sockets, and any socket's buffers can be enlarged: see
    # docs/sandbox.md.
    "socketpair": ((53, 199), [*_one_of(0, (_UNIX,)), *_one_of(1, (_STREAM,), _SOCKET_KINDS)]),
    "sendto": ((44, 206), _one_of(5, (0,))),  # without an address, as in `send`
    "mknod": ((133, None), _one_of(1, (_DIRECTLY, _FIFO, _REGULAR), _FILE_KINDS)),
    "mknodat": ((259, 33), _one_of(2, (_DIRECTLY, _FIFO, _REGULAR), _FILE_KINDS)),
}


def is_supported(machine: str | None = None) -> bool:
    """Return whether the system call numbers of this machine are known."""
    return (machine or platform.machine()) in _ARCHITECTURES


def filter_program(machine: str | None = None, *, as_user: bool = False) -> list[Instruction]:
    """Build the BPF program for `machine` (x86_64 or aarch64; default: this machine).

    The format is the kernel's `struct sock_filter`.

    as_user: for a program that runs with access to the user's own files and processes. Signals to other processes are
    then denied too, and changes of file modes, owners and times are skipped but report success. A program of another
    architecture (32 bits) is killed. Raises KeyError for an unknown machine.
    """
    machine = machine or platform.machine()
    audit, at = _AUDIT[machine], _ARCHITECTURES.index(machine)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _DENY)]
    for name, numbers in _ALLOWED.items():
        program += _when_called(numbers[at], [(_RETURN, 0, 0, _NOTHING)] if as_user and name in _ATTRIBUTES else [])
    for numbers, conditions in _WITH_ARGUMENTS.values():
        program += _when_called(numbers[at], conditions)
    own = _one_of(0, (OWN_PROCESS,)) if as_user else []
    for numbers in _SIGNALS.values():
        program += _when_called(numbers[at], own)
    if not as_user:
        program += _when_called(_PIDFD_SEND_SIGNAL[at], [])
    # clone3 takes its flags in memory, which a filter cannot read; with ENOSYS, libc falls back to clone.
    program += [(_EQUAL, 1, 0, _CLONE3[at]), (_AT_LEAST, 0, 1, _NEWER), (_RETURN, 0, 0, _MISSING)]
    return [*program, (_RETURN, 0, 0, _DENY)]


def _when_called(number: int | None, conditions: list[Instruction]) -> list[Instruction]:
    """Allow the loaded system call number if the conditions hold; emit nothing if the call does not exist."""
    if number is None:
        return []
    body: list[Instruction] = [*conditions, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
