"""Programs in the sandbox: each is bounded, damages nothing and leaves nothing running."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from posttrain.verify import sandbox, system_calls
from posttrain.verify.sandbox import Finished, Limits, SandboxError, run_python

namespaces = pytest.mark.skipif(sandbox.isolation() != "namespaces", reason="this machine offers no namespaces")
SHORT = Limits(seconds=1.0, memory_mb=128)


def run(code: str, stdin: str = "", limits: Limits = SHORT) -> Finished:
    return run_python(textwrap.dedent(code), stdin, limits=limits, allow_unsandboxed=True)


def find_processes(mark: str) -> list[int]:
    """Return the processes whose command line contains the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_input_output_and_exit_code() -> None:
    done = run("import sys\nprint(input()[::-1])\nsys.stderr.write('so')\nsys.exit(3)", "abc\n")
    assert (done.status, done.exit_code, done.stdout, done.stderr) == ("ended", 3, "cba\n", "so")
    assert not done.ok


def test_long_unread_input_does_not_block() -> None:
    assert run("print(1)", "x" * 1_000_000).stdout == "1\n"


def test_long_input_arrives_completely() -> None:
    assert run("import sys; print(len(sys.stdin.read()))", "é" * 300_000).stdout == "300000\n"


def test_endless_loop_costs_its_time_limit() -> None:
    started = time.monotonic()
    assert run("while True: pass").status == "timeout"
    assert time.monotonic() - started < SHORT.seconds + sandbox.GRACE_SECONDS


def test_memory_of_one_process_is_bounded() -> None:
    done = run("x = bytearray(4 << 30)")
    assert (done.status, done.exit_code) == ("ended", 1)
    assert "MemoryError" in done.stderr


@namespaces
def test_memory_of_all_processes_together_is_bounded() -> None:
    done = run(
        """
        import os, time
        for _ in range(3):
            os.fork()
        x = bytearray(60 << 20)
        for i in range(0, len(x), 4096):
            x[i] = 1
        time.sleep(10)
        """,
        limits=Limits(seconds=8.0, memory_mb=128),
    )
    assert done.status == "memory"
    assert done.seconds < 8


@namespaces
def test_memory_shared_with_a_starting_child_counts_once() -> None:
    done = run(
        """
        import subprocess
        block = bytearray(130 << 20)
        block[::4096] = b"1" * len(block[::4096])
        for _ in range(1500):
            subprocess.run(["/bin/true"])
        print("all")
        """,
        limits=Limits(seconds=20.0, memory_mb=200),
    )
    assert (done.status, done.stdout) == ("ended", "all\n")


@namespaces
def test_fork_bomb_is_bounded_and_removed() -> None:
    done = run(
        """
        import os
        made = 0
        try:
            while True:
                if os.fork() == 0:
                    while True:
                        pass
                made += 1
        except OSError:
            print(made)
        """
    )
    assert done.status == "ended"
    assert 1 <= int(done.stdout) < 16


@namespaces
def test_processes_left_by_a_program_end_with_it() -> None:
    done = run(
        """
        import os, sys
        if os.fork() == 0:
            os.setsid()
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(987)  # left-running-mark"])
        import time; time.sleep(0.3)
        print("bye")
        """
    )
    assert done.stdout == "bye\n"
    assert find_processes("left-running-mark") == []


@namespaces
def test_nothing_can_be_written_outside(tmp_path: Path) -> None:
    outside = tmp_path / "mine"
    outside.write_text("kept")
    done = run(
        f"""
        import os
        for path in ({str(outside)!r}, "/usr/lib/x", "/x", "/dev/x", {str(Path(os.__file__).parent / "x.py")!r}):
            try:
                open(path, "w").write("gone")
                print("wrote", path)
            except OSError as error:
                pass
        open("/tmp/x", "w").write("scratch")
        print(open("/tmp/x").read(), *os.listdir("/tmp"), sep="\\n")
        """
    )
    text, *files = done.stdout.splitlines()
    interpreter = {Path(sys.prefix).parts[2]} if Path(sys.prefix).parts[1] == "tmp" else set()
    assert text == "scratch" and set(files) - interpreter == {"main.py", "x"}
    assert outside.read_text() == "kept"


@namespaces
def test_files_of_the_user_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    done = run(f"import os; print(os.path.exists({str(tmp_path / 'secret')!r}), os.path.exists('/etc/passwd'))")
    assert done.stdout == "False False\n"


@namespaces
def test_scratch_directory_is_bounded() -> None:
    done = run("for i in range(9): open(f'/tmp/{i}', 'w').write('x' * (8 << 20))")
    assert done.exit_code == 1
    assert "No space left" in done.stderr


@namespaces
def test_there_is_no_network() -> None:
    done = run(
        """
        import socket
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            try:
                s = socket.socket(socket.AF_INET, kind)
                s.connect(("127.0.0.1" if kind == socket.SOCK_STREAM else "8.8.8.8", 53))
                print("connected")
            except OSError as error:
                print(error.errno != 111)
        """
    )
    assert done.stdout == "True\nTrue\n"


@namespaces
def test_program_runs_as_nobody_sees_no_other_process_and_gains_no_privileges() -> None:
    done = run(
        """
        import ctypes, os
        libc = ctypes.CDLL(None)
        with open("/proc/self/status") as f:
            caps = [line.split()[1] for line in f if line.startswith(("CapEff", "CapBnd", "NoNewPrivs"))]
        print(caps, libc.mount(b"none", b"/usr", b"none", 32 | 4096, b""), libc.sethostname(b"x", 1))
        print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()) == [1, os.getpid()])
        try:
            os.kill(1, 9)
        except PermissionError:
            pass
        print(os.getuid() != 0, dict(os.environ).keys() >= {"PATH", "HOME"}, "PWD_SECRET" in os.environ)
        """
    )
    zero = "0" * 16
    assert done.stdout == f"['{zero}', '{zero}', '1'] -1 -1\nTrue\nTrue True False\n"


@pytest.mark.parametrize("level", ["namespaces", "limits"])
def test_program_larger_than_its_disk_hits_a_limit(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "isolation", lambda: level)
    limits = Limits(disk_mb=1, memory_mb=128)
    done = run("print(1)\n" + "#" * (1 << 20), limits=limits)
    assert (done.status, done.ok, done.stdout) == ("disk", False, "")
    assert run("#" + "é" * (1 << 19), limits=limits).status == "disk"  # its bytes count


@namespaces
def test_program_as_large_as_its_disk_runs() -> None:
    code = "print(1)\n"
    assert run(code + "#" * ((1 << 20) - len(code)), limits=Limits(disk_mb=1, memory_mb=128)).stdout == "1\n"


def test_megabyte_of_output_is_truncated() -> None:
    done = run("while True: print('x' * 1000)", limits=Limits(seconds=5.0, output_bytes=100_000))
    assert done.status == "output"
    assert len(done.stdout) == 100_000
    assert done.seconds < 5


def test_program_cannot_fake_a_sandbox_failure() -> None:
    for code in (127, 201, 203, 255):
        assert run(f"import os; os.write(2, b'failed'); os._exit({code})").exit_code == code
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").exit_code == 128 + 11


def test_nothing_runs_without_isolation_unless_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "isolation", lambda: "limits")
    with pytest.raises(SandboxError, match="allow_unsandboxed"):
        run_python("print(1)")
    done = run("print(open('main.py').read(), end='')")
    assert done.stdout == "print(open('main.py').read(), end='')"
    assert run("while True: pass").status == "timeout"
    assert "MemoryError" in run("x = bytearray(4 << 30)").stderr


def offers_landlock() -> bool:
    return ctypes.CDLL(None).syscall(444, None, 0, 1) > 0


@pytest.mark.skipif(not system_calls.is_supported(), reason="no filter for this machine")
def test_limits_only_mode_preserves_file_modes_and_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "isolation", lambda: "limits")
    kept = tmp_path / "kept"
    kept.write_text("kept")
    kept.chmod(0o600)
    before = kept.stat()
    done = run(
        f"""
        import os, shutil
        for name in ({str(kept)!r}, {str(tmp_path)!r}):
            os.chmod(name, 0o4777)
            os.chown(name, os.getuid(), os.getgid())
            os.utime(name, (1, 1))
        open("own", "w").write("x")
        shutil.copy2("own", "copy")
        print(open("copy").read())
        """
    )
    assert (done.status, done.stdout.strip()) == ("ended", "x"), done.stderr
    after = kept.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert tmp_path.stat().st_mtime > 1


@pytest.mark.skipif(not offers_landlock(), reason="this kernel offers no Landlock")
def test_limits_only_mode_blocks_files_and_processes_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "isolation", lambda: "limits")
    secret = tmp_path / "secret"
    secret.write_text("kept")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], env={"KEPT": "1"})
    try:
        done = run(
            f"""
            import errno, os
            def tried(what, work):
                try:
                    print("escaped", what, work())
                except OSError as error:
                    if error.errno not in (errno.EPERM, errno.EACCES, errno.EXDEV):
                        raise
            tried("read", lambda: open({str(secret)!r}).read())
            tried("write", lambda: open({str(secret)!r}, "w"))
            tried("truncate", lambda: os.truncate({str(secret)!r}, 0))
            tried("remove", lambda: os.remove({str(secret)!r}))
            tried("create", lambda: open({str(tmp_path / "new")!r}, "w"))
            tried("link", lambda: os.link({str(secret)!r}, "link"))
            tried("list", lambda: os.listdir({str(tmp_path)!r}))
            tried("shared memory", lambda: open("/dev/shm/posttrain-test", "w"))
            for victim in ({victim.pid}, os.getppid()):
                folder = f"/proc/{{victim}}/"
                tried("memory", lambda: open(folder + "mem", "rb"))
                tried("writing memory", lambda: open(folder + "mem", "r+b"))
                tried("environment", lambda: open(folder + "environ").read())
                tried("descriptors", lambda: os.readlink(folder + "fd/2"))
                tried("root", lambda: os.listdir(folder + "root/home"))
                tried("score", lambda: open(folder + "oom_score_adj", "w"))
            os.mkdir("a"); open("a/b", "w").write("x"); os.rename("a/b", "c"); os.truncate("c", 0); os.remove("c")
            print(sorted(os.listdir(".")), open("/dev/null", "w").write("x"), len(open("/proc/self/status").read()) > 0)
            """
        )
    finally:
        victim.kill()
        victim.wait()
    assert (done.stdout, done.stderr) == ("['a', 'main.py'] 1 True\n", "")
    assert secret.read_text() == "kept" and not (tmp_path / "new").exists()


def test_isolation_level_is_named() -> None:
    text = sandbox.describe()
    assert text.startswith("namespaces: no network" if sandbox.isolation() == "namespaces" else "limits only")
