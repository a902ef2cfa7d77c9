"""The `posttrain` command."""

from __future__ import annotations

import os

from posttrain.cli.app import app


def main() -> None:
    """Run the command line in this process. Libraries report to nobody that it runs, unless the user says so."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported
    app(prog_name="posttrain")


if __name__ == "__main__":
    # By `-m` multiprocessing's children would import none of posttrain, and vLLM's core would not begin its log and the
    # watch for its parent (`rollout.engine_process`) before vLLM is imported. Without a spec they import this file.
    __spec__ = None  # type: ignore[assignment]
    main()
