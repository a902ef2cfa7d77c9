"""The `posttrain` command."""

from __future__ import annotations

import atexit
import os
import signal

from posttrain import early_interrupt


def main() -> None:
    """Run the command line in this process. Libraries report to nobody that it runs, unless the user says so."""
    early_interrupt.exit_on_interrupt()
    from posttrain.cli.app import app

    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported
    # Runs last at exit: while modules are torn down a second Ctrl-C would kill the process, whatever its exit code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    app(prog_name="posttrain")


if __name__ == "__main__":
    # By `-m` multiprocessing's children would import none of posttrain, and vLLM's core would not begin its log and the
    # watch for its parent (`rollout.engine_process`) before vLLM is imported. Without a spec they import this file.
    __spec__ = None  # type: ignore[assignment]
    main()
