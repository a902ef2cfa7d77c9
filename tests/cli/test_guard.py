"""Output of a command that fails."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import typer

from posttrain import early_interrupt
from posttrain.cli.guard import run_guarded
from posttrain.errors import Interrupted, PeerLost, RecipeError, RunError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RunError("the engine is gone"), "rank 0: the engine is gone"),
        (ValueError("a wrong shape"), "rank 0: unexpected ValueError: a wrong shape"),
        (PeerLost("rank 1 failed: no more"), "rank 1 failed: no more"),
        (RecipeError("no such key"), "no such key"),
        (Interrupted("stopped after step 3", hint=""), "stopped after step 3"),
    ],
)
def test_error_names_the_failed_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, told: str
) -> None:
    """Rank 0's own failures once had no name. Recipe errors and stops belong to all ranks."""

    def fails() -> None:
        raise error

    alone = told.removeprefix("rank 0: ")
    for world, text in (("2", told), ("1", alone)):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(typer.Exit):
            run_guarded({}, fails)
        assert capsys.readouterr().err.splitlines()[0] == text


STOPPED_WHILE_IMPORTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
sys.meta_path.insert(0, Interrupting())
from posttrain.__main__ import main
main()
"""


def test_ctrl_c_during_imports_prints_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", STOPPED_WHILE_IMPORTED], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        early_interrupt.exit_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        early_interrupt.exit_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        early_interrupt.raise_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
