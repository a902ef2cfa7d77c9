"""Where vLLM keeps what it compiles, and that the trainer compiles as it would without it.

vLLM names the place after the path of the model's folder, which with us is a folder of the run: every run would compile
anew and leave its compilation behind. So vLLM is started on a link to that folder whose path depends on the model's
configuration only. And where it is imported, it has torch compile one kernel after the other; the passes of training
have as many compilers as without vLLM.
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

COMPILER = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")
LINKS = "posttrain-models"  # in vLLM's cache
KERNELS = "posttrain-triton"  # there, too
_GIVEN = os.environ.get("TRITON_CACHE_DIR")  # by the user: torch's compiler has not run yet, which sets it as well
STARTS = 64  # of equal models at the same time


@contextlib.contextmanager
def keep_compiler_settings() -> Iterator[None]:
    """What vLLM sets of torch's compiler inside, when it is imported, ends with `with`. It compiles in a process of its
    own."""
    before = {name: os.environ.get(name) for name in COMPILER}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        inductor: Any = sys.modules.get("torch._inductor.config")
        if inductor is not None:
            inductor.compile_threads = inductor.decide_compile_threads()


def kernel_cache(cache: Path) -> dict[str, str]:
    """The environment in which vLLM finds the Triton kernels that earlier starts have compiled.

    Without it the first start keeps them where torch's compiler keeps its own, and the next one, which loads compiled
    graphs and runs no compiler, looks in Triton's folder and compiles them again. cache: vLLM's own folder.
    """
    return {"TRITON_CACHE_DIR": _GIVEN or str(cache / KERNELS)}


@contextlib.contextmanager
def stable_path(folder: Path, cache: Path, rank: int) -> Iterator[Path]:
    """A path of `folder` that is the same for every model of its config.json, until the end of `with`.

    cache: vLLM's own folder, in which the links are. rank: of this process among those that train, of which each
    compiles for itself. Of equal models that are started at the same time each has a path of its own; where no link can
    be made it is `folder` itself. Raises EngineError where the file system has no locks between machines and another
    has put its own link there: vLLM may have read that.
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
    for number in range(STARTS):
        link = links / f"{name}-{rank}-{number}"
        lock = os.open(link.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            link.unlink(missing_ok=True)  # of a process that was killed
            link.symlink_to(folder.absolute(), target_is_directory=True)
            try:
                yield link
                if not link.is_symlink() or link.readlink() != folder.absolute():
                    raise EngineError(
                        f"{link} is not ours any more: another machine has started vLLM through the same folder",
                        hint="set VLLM_CACHE_ROOT to a folder of this machine, or one with locks",
                    )
            finally:
                link.unlink(missing_ok=True)
            return
        finally:
            os.close(lock)
    raise OSError(f"{STARTS} starts at the same time")
