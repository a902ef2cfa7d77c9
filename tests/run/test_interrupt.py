"""Interrupts by signals: the first asks the run to stop, the second ends it."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from posttrain.errors import Interrupted
from posttrain.run.interrupt import ECHO_S, GracefulStop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_first_signal_requests_a_stop_and_the_second_interrupts(number, capsys):
    before = signal.getsignal(number)
    with GracefulStop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert "finishing the step and saving" in capsys.readouterr().err
        os.kill(os.getpid(), signal.SIGTERM)
        stop._asked_at -= ECHO_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_signal_during_a_write_to_stderr_does_not_end_the_run(monkeypatch, capfd):
    """Python refuses a reentrant write to the same buffer; the run would have ended with code 1."""

    def refuse(_line):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    monkeypatch.setattr("posttrain.terminal.note", refuse)
    with GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert capfd.readouterr().err == "SIGTERM: finishing the step and saving; once more stops immediately\n"
    assert GracefulStop.take_ignored_signal() == signal.SIGTERM


def test_handler_does_nothing_outside_the_main_thread():
    seen = []

    def work():
        with GracefulStop() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_interrupted_message_has_the_resume_command():
    error = Interrupted("stopped after step 3 of 9", where="runs/x")
    assert error.exit_code == 130
    assert "--resume" in str(error)


def test_stop_request_after_the_last_step_is_passed_to_the_caller():
    with GracefulStop():
        os.kill(os.getpid(), signal.SIGINT)
    assert GracefulStop.take_ignored_signal()
    assert not GracefulStop.take_ignored_signal(), "once"
    with pytest.raises(Interrupted), GracefulStop():
        os.kill(os.getpid(), signal.SIGINT)
        raise Interrupted("stopped after step 3 of 9")
    assert not GracefulStop.take_ignored_signal()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)]
)
def test_exit_code_is_128_plus_the_signal(number, code):
    with GracefulStop() as stop:
        assert stop.requested_signal == 0
        os.kill(os.getpid(), number)
        assert stop.requested_signal == number
        assert Interrupted("stopped", number=stop.number).exit_code == code
        stop._asked_at -= ECHO_S
        with pytest.raises(KeyboardInterrupt) as second:
            os.kill(os.getpid(), number)
    assert 128 + second.value.args[0] == code
    GracefulStop.take_ignored_signal()


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GracefulStop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_closed_terminal_does_not_end_the_save(tmp_path):
    """The kernel sends SIGHUP, and every later write to the terminal fails; output to a file is still written."""
    code = f"""
import os, signal, sys, time
from posttrain.run.interrupt import GracefulStop
with GracefulStop() as stop:
    open({str(tmp_path / "ready")!r}, "w").close()
    while not stop.requested:
        time.sleep(0.01)
    print("saved", file=sys.stderr, flush=True)
    open({str(tmp_path / "saved")!r}, "w").close()
    os._exit(128 + stop.number)
"""
    child, terminal = os.forkpty()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    assert (tmp_path / "saved").exists()


def test_ctrl_c_during_interpreter_exit_keeps_the_exit_code():
    """`Late` is destroyed when modules are torn down; with its default action the signal would kill the process
    there."""
    code = """
import os, signal, sys
from posttrain.__main__ import main
class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGINT):
        kill(process, number)
late = Late()
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["posttrain", "--nonsense"]
main()
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 2
