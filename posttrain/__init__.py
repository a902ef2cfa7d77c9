"""posttrain: post-train reasoning LLMs from YAML recipes. Heavy libraries are imported only where they are used."""

import sys

__version__ = "0.1.0"

_process = sys.modules.get("multiprocessing.process")  # there already in a process that it has started
if _process is not None and _process.current_process().name.startswith("EngineCore"):
    from posttrain.rollout import engine_process

    engine_process.begin()  # vLLM's, which imports us before itself
