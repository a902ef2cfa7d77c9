"""Libraries that print about themselves are told not to; their errors, and all of our own lines, stay."""

from __future__ import annotations

import logging
import os
import sys

import transformers


def quiet() -> None:
    """No progress bars and no warnings of transformers, datasets, TRL, accelerate, PEFT and DTensor on stderr."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()
    else:  # importing it takes a second, and rl has no use for it
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # torch's warns that a weight which two kinds of parallelism divide is gathered in two steps
    for name in ("trl", "accelerate", "peft", "torch.distributed.tensor._redistribute"):
        logging.getLogger(name).setLevel(logging.ERROR)
