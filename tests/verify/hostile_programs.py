"""Programs that try to break out of the sandbox; each also stops by itself after some megabytes or seconds.

A program prints `escaped WHAT` for each forbidden thing that it managed to do. EXPECTED gives how it must end: `fine`
(by itself, exit code 0), `failed` (by itself, another code) or the limit that it hits.
"""

from __future__ import annotations

import textwrap

HELPERS = textwrap.dedent(
    """
    import ctypes, os, signal, sys, time
    libc = ctypes.CDLL(None, use_errno=True)
    ARM = os.uname().machine == "aarch64"
    def tried(what, work):
        try:
            if work() is not False:
                print("escaped", what, flush=True)
        except (OSError, MemoryError, ValueError, ImportError, RuntimeError):
            pass
    def call(x86, arm, *arguments):
        if libc.syscall(arm if ARM else x86, *arguments) < 0:
            raise OSError(ctypes.get_errno(), "denied")
    def touched(megabytes):
        block = bytearray(megabytes << 20)
        for at in range(0, len(block), 4096):
            block[at] = 1
        return block
    """
)

PROGRAMS: dict[str, tuple[str, str]] = {  # name -> (expected outcome, program)
    # --- memory that does not count in a process's resident size
    "memfd": ("fine", "tried('memfd', lambda: os.memfd_create('x'))"),
    "memfd by number": ("fine", "tried('memfd', lambda: call(319, 279, b'x', 0))"),
    "secret memory": ("fine", "tried('secret', lambda: call(447, 447, 0))"),
    "System V segments": ("fine", "tried('shmget', lambda: call(29, 194, 0, 64 << 20, 0o1600))"),
    "System V messages": ("fine", "tried('msgget', lambda: call(68, 186, 0, 0o1600))"),
    "System V semaphores": ("fine", "tried('semget', lambda: call(64, 190, 0, 32000, 0o1600))"),
    "POSIX messages": ("fine", "tried('mq_open', lambda: call(240, 180, b'x', 0o102, 0o600, None))"),
    "shared anonymous memory": ("fine", "tried('mmap', lambda: mmap.mmap(-1, 64 << 20))"),
    "shared zeros": (
        "fine",
        "tried('zero', lambda: mmap.mmap(os.open('/dev/zero', os.O_RDWR), 64 << 20, flags=mmap.MAP_SHARED))",
    ),
    "shared memory by name": (
        "fine",
        """
        from multiprocessing import shared_memory
        tried('shm', lambda: shared_memory.SharedMemory(create=True, size=64 << 20))
        """,
    ),
    "a full scratch directory": (
        "fine",
        """
        def fill():
            for n in range(64):
                with open(f'/tmp/{n}', 'wb') as file:
                    file.write(bytes(1 << 20))
        tried('64 MB of files', fill)
        """,
    ),
    "files that are deleted but open": (
        "fine",
        """
        def fill():
            kept = []
            for n in range(48):
                kept.append(open('/tmp/x', 'wb'))
                kept[-1].write(bytes(1 << 20)); kept[-1].flush()
                os.unlink('/tmp/x')
        tried('48 MB of deleted files', fill)
        """,
    ),
    "many files": ("fine", "tried('5000 files', lambda: [open(f'/tmp/{n}', 'w').close() for n in range(5000)])"),
    "memory of children": (
        "memory",
        """
        for _ in range(5):
            if os.fork() == 0:
                block = touched(60); time.sleep(9); os._exit(0)
        time.sleep(9)
        """,
    ),
    "memory of a double fork": (
        "memory",
        """
        for _ in range(5):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    block = touched(60); time.sleep(9)
                os._exit(0)
        time.sleep(9)
        """,
    ),
    "memory of a thread that outlives the first": (
        "memory",
        """
        def keep(megabytes):
            time.sleep(0.2); block = touched(megabytes); time.sleep(9)
        for _ in range(4):
            if os.fork() == 0:
                threading.Thread(target=keep, args=(60,)).start()
                libc.syscall(93 if ARM else 60, 0)  # the first thread alone
        time.sleep(9)
        """,
    ),
    "memory of a program whose first thread has ended": (
        "memory",
        """
        def keep(megabytes):
            time.sleep(0.2)
            children = os.fork() and os.fork()  # three processes
            block = touched(megabytes); time.sleep(9)
        threading.Thread(target=keep, args=(60,)).start()
        libc.syscall(93 if ARM else 60, 0)
        """,
    ),
    "one large block": ("failed", "bytearray(1 << 30)"),
    "pipes full of gifts": (
        "fine",
        """
        r, w = os.pipe()
        class Piece(ctypes.Structure):
            _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
        piece = Piece(ctypes.addressof(ctypes.create_string_buffer(4096)), 4096)
        tried('vmsplice', lambda: call(278, 75, w, ctypes.byref(piece), 1, 0))
        """,
    ),
    "io_uring": ("fine", "tried('io_uring', lambda: call(425, 425, 8, ctypes.create_string_buffer(256)))"),
    "userfaultfd": ("fine", "tried('userfaultfd', lambda: call(323, 282, 1))"),
    "inotify": ("fine", "tried('inotify', lambda: call(294, 26, 0))"),
    # --- processes
    "a fork bomb": (
        "processes|timeout",
        """
        end = time.monotonic() + 3
        while time.monotonic() < end:
            try:
                os.fork()
            except OSError:
                time.sleep(0.01)
        """,
    ),
    "threads without end": (
        "processes|fine",
        """
        def start():
            for _ in range(200):
                threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        tried('200 threads', start); os._exit(0)
        """,
    ),
    "a daemon": (
        "fine",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)  # hostile-mark'])
            os._exit(0)
        time.sleep(0.2)
        """,
    ),
    "a daemon that closes everything": (
        "fine",
        """
        if os.fork() == 0:
            os.setsid()
            os.closerange(0, 64)
            os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)  # hostile-mark'])
        time.sleep(0.2)
        """,
    ),
    "its process group is killed": ("failed", "os.killpg(0, signal.SIGKILL); time.sleep(9)"),
    "its process group is stopped": ("failed", "os.killpg(0, signal.SIGSTOP); time.sleep(9)"),
    "everything is killed": ("fine", "tried('kill -1', lambda: (os.kill(-1, signal.SIGKILL), False)[1])"),
    "everything is stopped": ("fine", "tried('stop -1', lambda: (os.kill(-1, signal.SIGSTOP), False)[1])"),
    "it stops itself": ("failed", "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(9)"),
    "it stops at its terminal": ("failed", "for s in (signal.SIGTSTP, signal.SIGSTOP): os.kill(os.getpid(), s)"),
    "it kills itself": ("failed", "os.kill(os.getpid(), signal.SIGKILL); time.sleep(9)"),
    "its parent is killed": (
        "timeout",
        "\nfor s in (9, 15, 19, 1, 2):\n    tried('kill', lambda: (os.kill(os.getppid(), s), False)[1])\ntime.sleep(9)",
    ),
    "its grandparents are killed": (
        "timeout",
        "\nfor p in range(0, 40):\n    if p not in (0, os.getpid()):\n"
        "        tried('kill', lambda: (os.kill(p, 9), False)[1])\ntime.sleep(9)",
    ),
    "signals are ignored": (
        "timeout",
        "for s in range(1, 65):\n    tried('', lambda: (signal.signal(s, signal.SIG_IGN), False)[1])\nwhile True: pass",
    ),
    "a child that outlives the time": (
        "timeout",
        "if os.fork() == 0:\n    os.setsid()\nwhile True: pass",
    ),
    "processes that replace each other": (
        "timeout|processes",
        """
        end = time.monotonic() + 6
        while time.monotonic() < end:
            if os.fork():
                os._exit(0) if os.getpid() != FIRST else time.sleep(9)
        """,
    ),
    # --- other processes, privileges, the kernel
    "ptrace": ("fine", "tried('ptrace', lambda: call(101, 117, 0, 0, 0, 0))"),
    "ptrace of its parent": ("fine", "tried('ptrace', lambda: call(101, 117, 16, os.getppid(), 0, 0))"),
    "memory of another process": ("fine", "tried('vm_writev', lambda: call(311, 271, 1, None, 0, None, 0, 0))"),
    "memory by /proc": ("fine", "tried('mem', lambda: open('/proc/1/mem', 'r+b').close())"),
    "environment of its parent": ("fine", "tried('environ', lambda: bool(open('/proc/1/environ').read()))"),
    "descriptors of its parent": ("fine", "tried('fd', lambda: os.listdir('/proc/1/fd'))"),
    "the root of its parent": ("fine", "tried('root', lambda: os.listdir('/proc/1/root'))"),
    "a descriptor that it inherited": (
        "fine",
        """
        for n in range(3, 64):
            tried(f'descriptor {n}', lambda: os.fstat(n))
        """,
    ),
    "the report is written by number": (
        "failed",
        """
        for n in range(3, 64):
            try:
                os.write(n, b'ended 0')
            except OSError:
                pass
        sys.exit(3)
        """,
    ),
    "a user namespace": ("fine", "tried('unshare', lambda: call(272, 97, 0x10000000))"),
    "a clone with namespaces": ("fine", "tried('clone', lambda: call(56, 220, 0x10000000 | 17, 0, 0, 0, 0))"),
    "clone3 with namespaces": (
        "fine",
        "import struct\nargs = ctypes.create_string_buffer(struct.pack('<11Q', 0x10000000, 0, 0, 0, 17, *[0] * 6))\n"
        "tried('clone3', lambda: call(435, 435, args, 88))",
    ),
    "a mount": ("fine", "tried('mount', lambda: call(165, 40, b'none', b'/tmp', b'tmpfs', 0, b''))"),
    "another root": ("fine", "tried('chroot', lambda: call(161, 51, b'/tmp'))"),
    "bpf": ("fine", "tried('bpf', lambda: call(321, 280, 0, ctypes.create_string_buffer(128), 128))"),
    "setuid": ("fine", "tried('setuid', lambda: os.setuid(0))"),
    "setuid programs": (
        "fine",
        """
        for words in (['su', '-c', 'true'], ['sudo', '-n', 'true'], ['mount', '-t', 'tmpfs', 'x', '/tmp']):
            tried(words[0], lambda: subprocess.run(words, stdin=subprocess.DEVNULL, timeout=1).returncode == 0)
        """,
    ),
    "32-bit calls": (
        "failed",
        """
        if ARM: sys.exit(1)
        code = bytes.fromhex('b814000000cd80c3')  # getpid by int 0x80
        area = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
        area.write(code)
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(area)))()
        print('escaped 32 bit')
        """,
    ),
    "x32 calls": ("fine", "tried('x32', lambda: call(0x40000000 + 39, 10_000))"),
    # --- keys
    "the session keyring": ("fine", "tried('keyctl', lambda: call(250, 219, 0, -3, 1))"),
    "a new key": ("fine", "tried('add_key', lambda: call(248, 217, b'user', b'x', b'secret', 6, -3))"),
    # --- files
    "a link out of the folder": (
        "fine",
        """
        os.symlink('/etc/passwd', '/tmp/link'); os.symlink('/proc/1/root/etc/passwd', '/tmp/other')
        tried('link', lambda: open('/tmp/link').read()); tried('other', lambda: open('/tmp/other').read())
        """,
    ),
    "a hard link to the interpreter": ("fine", "tried('link', lambda: os.link(sys.executable, '/tmp/python'))"),
    "dots": ("fine", "tried('dots', lambda: os.listdir('/tmp/../../../../../home'))"),
    "the interpreter's files": ("fine", "tried('write', lambda: open(os.__file__, 'a').close())"),
    "device files": ("fine", "tried('mknod', lambda: os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0)))"),
    "kernel settings": ("fine", "tried('sysctl', lambda: open('/proc/sys/kernel/hostname', 'w').write('x'))"),
    "the machine's memory": (
        "fine",
        "[tried(p, lambda: open(p, 'rb').read(1)) for p in ('/dev/mem', '/dev/kmem', '/proc/kcore', '/dev/sda')]",
    ),
    # --- network
    "TCP": ("fine", "tried('tcp', lambda: socket.create_connection(('127.0.0.1', 22), 0.2))"),
    "UDP": ("fine", "tried('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))"),
    "Unix sockets": ("fine", "tried('unix', lambda: socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock'))"),
    "abstract sockets": ("fine", "tried('abstract', lambda: socket.socket(socket.AF_UNIX).bind('\\0x'))"),
    "netlink": ("fine", "tried('netlink', lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))"),
    # --- output and exit codes
    "output without end": ("output", "\nwhile True: print('x' * 1000)"),
    "errors without end": ("output", "\nwhile True: sys.stderr.write('x' * 1000)"),
    "output of a child": ("output", "os.fork()\nwhile True: print('x' * 1000)"),
    "closed outputs": ("timeout", "os.close(1); os.close(2); os.close(0)\nwhile True: time.sleep(0.1)"),
    "its input is written": ("fine", "tried('stdin', lambda: os.write(0, b'x'))"),
    "an exit code of the sandbox": ("failed", "os.write(2, b'failed'); os._exit(127)"),
    "an exit code beyond a byte": ("failed", "os._exit(257)"),
    "an answer, then a crash": ("failed", "print(42, flush=True); os.abort()"),
    "an answer of a child, then a failure": (
        "failed",
        "if os.fork() == 0:\n    print(42)\n    sys.exit(0)\nos.wait(); sys.exit(1)",
    ),
    "deep recursion": ("failed|timeout|memory", "sys.setrecursionlimit(1 << 30)\ndef f(): return f()\nf()"),
    "a file too large": ("failed", "open('/tmp/x', 'wb').truncate(1 << 40)"),
}  # fmt: skip


def source(name: str) -> str:
    """Return the whole program with its imports."""
    body = textwrap.dedent(PROGRAMS[name][1])
    used = [module for module in ("mmap", "socket", "subprocess", "threading") if f"{module}." in body]
    return "".join(f"import {module}\n" for module in used) + HELPERS + f"FIRST = os.getpid()\n{body}\n"


def expected(name: str) -> str:
    """Return how the program must end."""
    return PROGRAMS[name][0]


def ended(status: str, exit_code: int) -> str:
    """Return how the program ended, in the words of PROGRAMS."""
    return status if status != "ended" else "failed" if exit_code else "fine"
