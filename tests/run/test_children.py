"""Child processes of a run: environment, logs, failures, signals, and the end of the parent."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from posttrain.errors import Interrupted, RunError, UserError
from posttrain.run.children import Child, run_children


def child(tmp_path, name, code):
    return Child(name, [sys.executable, "-u", "-c", textwrap.dedent(code)], tmp_path / f"{name}.log", {"WHO": name})


def test_children_get_their_environment_and_are_logged(tmp_path, capsys):
    code = "import os; print('hello', os.environ['WHO']); print('✓ done', os.environ['WHO'])"
    run_children([child(tmp_path, name, code) for name in ("a", "b", "c")], parallel=2)
    assert (tmp_path / "b.log").read_text() == "hello b\n✓ done b\n"
    assert "c  ✓ done c" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "kind"), [(2, UserError), (1, RunError)])
def test_failed_child_stops_the_others_and_its_error_is_raised(tmp_path, code, kind):
    bad = f"import sys; print('working'); print('error: no such thing\\n  hint: look'); sys.exit({code})"
    slow = "import time; time.sleep(60)"
    started = time.monotonic()
    with pytest.raises(kind) as error:
        run_children([child(tmp_path, n, c) for n, c in (("slow", slow), ("bad", bad), ("never", slow))], parallel=2)
    assert time.monotonic() - started < 20
    assert str(error.value).startswith(f"bad ended with {code}: no such thing\n  hint: look")
    assert not (tmp_path / "never.log").exists()


def test_stop_signal_is_forwarded_once(tmp_path):
    waits = """
        import signal, sys, time
        def stop(number, frame):
            print("saved"); sys.exit(130)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(60)
    """

    def interrupt():
        while not (tmp_path / "a.log").exists() or "ready" not in (tmp_path / "a.log").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted):
        run_children([child(tmp_path, "a", waits), child(tmp_path, "b", waits)], parallel=1)
    assert (tmp_path / "a.log").read_text() == "ready\nsaved\n"
    assert not (tmp_path / "b.log").exists()


def test_child_ends_with_its_parent(tmp_path):
    inner = "import posttrain.run.interrupt as i, time; i.stop_with_parent(); print('up'); time.sleep(60)"
    outer = f"""
        import sys
        from pathlib import Path
        from posttrain.run.children import Child, run_children
        run_children([Child("x", [sys.executable, "-u", "-c", {inner!r}], Path({str(tmp_path / "x.log")!r}))], 1)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(outer)], stderr=subprocess.PIPE)
    while not (tmp_path / "x.log").exists() or "up" not in (tmp_path / "x.log").read_text():
        time.sleep(0.05)
    listed = subprocess.run(["pgrep", "-P", str(parent.pid)], capture_output=True, text=True).stdout.split()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}") for pid in listed):
        time.sleep(0.05)
    assert listed and not any(os.path.exists(f"/proc/{pid}") for pid in listed)
