"""Entry point of the `posttrain` command."""

from __future__ import annotations

import atexit
import os
import signal

from posttrain import early_interrupt


def main() -> None:
    """Run the command line in this process, with the telemetry of libraries off unless the user enables it."""
    early_interrupt.exit_on_interrupt()
    from posttrain.cli.app import app

    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # huggingface_hub reads it at import
    # Runs last at exit: during module teardown a second Ctrl-C would kill the process and replace its exit code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    app(prog_name="posttrain")


if __name__ == "__main__":
    # With a spec (`-m`), multiprocessing's children would not import posttrain, and vLLM's core would import vllm
    # before its log and parent watch (`rollout.engine_process`) start. Without a spec the children import this file.
    __spec__ = None  # type: ignore[assignment]
    main()
