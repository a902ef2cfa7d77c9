"""Ctrl-C while the command line is imported and read: the process ends at once, since nothing has begun.

A `KeyboardInterrupt` there would be raised in the middle of an import, where nothing turns errors into messages.
"""

from __future__ import annotations

import os
import signal
from typing import Any

EXIT_CODE = 128 + signal.SIGINT


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process with exit code 130 until `raise_on_interrupt`; where it is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, if `exit_on_interrupt` has changed that."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: Any) -> None:
    del number, frame
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)
