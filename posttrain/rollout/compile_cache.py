"""Stable paths for vLLM's compile cache, and protection of the trainer's compiler settings from vLLM's import.

vLLM derives the cache path from the path of the model's folder, which is a folder of the run here: every run would
compile again and leave its result behind. So vLLM is started on a link to that folder whose path depends only on the
model's configuration. And when vLLM is imported, it makes torch compile one kernel at a time; the trainer's forward and
backward passes keep as many compile threads as without vLLM.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import EngineError
from posttrain.rollout.engine_process import restore_environment

COMPILER_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")
LINKS = "posttrain-models"
KERNELS = "posttrain-triton"  # in vLLM's cache folder
_USER_TRITON_CACHE = os.environ.get("TRITON_CACHE_DIR")  # read before torch's compiler runs, which sets it too
MAX_STARTS = 64  # maximum number of concurrent starts of equal models


@contextlib.contextmanager
def keep_compiler_settings() -> Iterator[None]:
    """Restore the settings of torch's compiler that vLLM's import changes inside the block. vLLM compiles in its own
    process."""
    try:
        with restore_environment(COMPILER_VARIABLES):
            yield
    finally:
        inductor: Any = sys.modules.get("torch._inductor.config")
        if inductor is not None:
            inductor.compile_threads = inductor.decide_compile_threads()


def kernel_cache(cache: Path) -> dict[str, str]:
    """Return the environment in which vLLM finds the Triton kernels that earlier starts have compiled.

    Without it, the first start stores them where torch's compiler stores its own, and the next start, which loads
    compiled graphs and runs no compiler, looks in Triton's folder and compiles them again. cache: vLLM's cache folder.
    """
    return {"TRITON_CACHE_DIR": _USER_TRITON_CACHE or str(cache / KERNELS)}


@contextlib.contextmanager
def stable_path(folder: Path, cache: Path, rank: int) -> Iterator[Path]:
    """Yield a path of `folder` that is the same for every model with this config.json, until the block ends.

    cache: vLLM's cache folder, which holds the links. rank: of this training process, since each compiles for itself.
    Equal models that start at the same time get different paths. If no link can be made, the path is `folder` itself.
    Raises EngineError if the file system has no locks across machines and another machine has replaced the link: vLLM
    may have read the other model.
    """
    with contextlib.ExitStack() as stack:
        try:
            link = stack.enter_context(_link(folder, cache / LINKS, rank))
        except OSError:
            link = folder
        yield link


@contextlib.contextmanager
def _link(folder: Path, links: Path, rank: int) -> Iterator[Path]:
    links.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    for number in range(MAX_STARTS):
        link = links / f"{name}-{rank}-{number}"
        lock = os.open(link.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            link.unlink(missing_ok=True)  # left by a process that was killed
            link.symlink_to(folder.absolute(), target_is_directory=True)
            try:
                yield link
                if not link.is_symlink() or link.readlink() != folder.absolute():
                    raise EngineError(
                        f"{link} was replaced: another machine has started vLLM with the same cache folder",
                        hint="set VLLM_CACHE_ROOT to a folder of this machine, or on a file system with locks",
                    )
            finally:
                link.unlink(missing_ok=True)
            return
        finally:
            os.close(lock)
    raise OSError(f"{MAX_STARTS} starts at the same time")
