"""Logging of libraries: silences progress bars and warnings, keeps errors."""

from __future__ import annotations

import logging
import os
import sys

import transformers


def quiet() -> None:
    """Disable progress bars and warnings of transformers, datasets, TRL, accelerate, PEFT and DTensor on stderr."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()
    else:  # avoid importing it: that takes a second, and rl does not need it
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # DTensor warns that a weight sharded by two kinds of parallelism is gathered in two steps
    for name in ("trl", "accelerate", "peft", "torch.distributed.tensor._redistribute"):
        logging.getLogger(name).setLevel(logging.ERROR)
