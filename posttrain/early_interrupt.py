"""Ctrl-C handling during startup: exits immediately, because no run has begun.

A `KeyboardInterrupt` would be raised in the middle of an import, where no code turns errors into messages.
"""

from __future__ import annotations

import os
import signal
from typing import Any

EXIT_CODE = 128 + signal.SIGINT


def exit_on_interrupt() -> None:
    """Make Ctrl-C exit with code 130 until `raise_on_interrupt` is called; an ignored SIGINT stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, if `exit_on_interrupt` changed that."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: Any) -> None:
    del number, frame
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)
