"""Libraries that print about themselves are told not to; their errors, and all of our own lines, stay."""

from __future__ import annotations

import logging

import datasets
import transformers


def quiet() -> None:
    """No progress bars and no warnings of transformers, datasets, TRL, accelerate and PEFT on stderr."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    for name in ("trl", "accelerate", "peft"):
        logging.getLogger(name).setLevel(logging.ERROR)
