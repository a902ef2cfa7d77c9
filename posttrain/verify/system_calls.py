"""The seccomp filter for untrusted programs: which system calls are denied, as a BPF program.

Denied are calls whose memory no limit of the process bounds (memfds, System V memory, shared anonymous mappings,
message queues, gifts to pipes), that reach beyond the process (sockets, keyrings, ptrace, other processes' memory), or
that only serve to change the system (mounts, namespaces, BPF, io_uring). A denied call returns EPERM: the program goes
on.

Numbers are those of the kernel's tables (asm/unistd.h); the format is that of linux/filter.h and linux/seccomp.h.
"""

from __future__ import annotations

import errno
import platform

Instruction = tuple[int, int, int, int | str]  # code, jump if true, jump if false, constant
OWN_PROCESS = "own process"  # a constant that the jail replaces with its process id, which only it knows

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_DENY, _MISSING = (0x00050000 | number for number in (errno.EPERM, errno.ENOSYS))
_X32 = 0x40000000  # numbers of the x32 calls of x86-64 begin here
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ARCHITECTURES = ("x86_64", "aarch64")
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: cgroup, host name, IPC, user, process, network, mount
_SHARED, _ANONYMOUS = 0x1, 0x20

_DENIED: dict[str, tuple[int | None, int | None]] = {  # name -> number on x86-64, on arm64; None: not there
    # memory that no limit of the process counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75), "userfaultfd": (323, 282),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "mq_open": (240, 180),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # what reaches other processes, the network, or the user's keys
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "perf_event_open": (298, 241), "syslog": (103, 116),
    # what changes the system
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "bpf": (321, 280), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "swapon": (167, 224),
    "acct": (163, 89), "quotactl": (179, 60), "nfsservctl": (180, 42),
}  # fmt: skip
_SIGNALS: dict[str, tuple[int, int]] = {  # with the process as their first argument
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
_CLONE, _CLONE3, _MMAP, _PIDFD_SEND_SIGNAL = (56, 220), (435, 435), (9, 222), (424, 424)


def supported(machine: str | None = None) -> bool:
    """Whether the numbers of this machine's system calls are known here."""
    return (machine or platform.machine()) in _ARCHITECTURES


def filter_program(machine: str | None = None, *, own_signals_only: bool = False) -> list[Instruction]:
    """The BPF program for `machine` (x86_64 or aarch64; default: this one), for the kernel's `struct sock_filter`.

    own_signals_only: signals to other processes are denied as well, for a program that can see processes of the user.
    A program of another architecture (32 bits) is killed. Raises KeyError for a machine whose numbers are not known.
    """
    machine = machine or platform.machine()
    audit, at = _AUDIT[machine], _ARCHITECTURES.index(machine)
    found: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        found += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _DENY)]
    for numbers in _DENIED.values():
        if (number := numbers[at]) is not None:
            found += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _DENY)]
    found += [(_EQUAL, 0, 1, _CLONE3[at]), (_RETURN, 0, 0, _MISSING)]  # its flags are in memory; libc then uses clone
    found += _when_called(_CLONE[at], _argument(0), [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _DENY)])
    shared_anonymous: list[Instruction] = [
        (_AND, 0, 0, _SHARED | _ANONYMOUS),
        (_EQUAL, 0, 1, _SHARED | _ANONYMOUS),
        (_RETURN, 0, 0, _DENY),
    ]
    found += _when_called(_MMAP[at], _argument(3), shared_anonymous)
    if own_signals_only:
        found += [(_EQUAL, 0, 1, _PIDFD_SEND_SIGNAL[at]), (_RETURN, 0, 0, _DENY)]
        for numbers in _SIGNALS.values():
            own: list[Instruction] = [(_EQUAL, 1, 0, OWN_PROCESS), (_RETURN, 0, 0, _DENY)]
            found += _when_called(numbers[at], _argument(0), own)
    return [*found, (_RETURN, 0, 0, _ALLOW)]


def _argument(index: int) -> Instruction:
    """Load the lower half of an argument of the call."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _when_called(number: int, load: Instruction, then: list[Instruction]) -> list[Instruction]:
    """`then` for one system call, whose number is loaded before and after it."""
    body: list[Instruction] = [load, *then, (_LOAD, 0, 0, _NUMBER)]
    return [(_EQUAL, 0, len(body), number), *body]
