"""Fixtures: small recipes on `tiny`, with their data in the test's folder, and run directories."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from posttrain.batch import Rollout, RolloutBatch
from posttrain.cli.app import app
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import Stage
from posttrain.run.directory import RunDirectory
from posttrain.run.metrics import read_metrics
from posttrain.train import attention, rl

from .short_runs import skip_parts_tested_elsewhere

Values = dict[str, Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: tiny tensors are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _short_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    request.getfixturevalue("scripts_described_here")
    request.getfixturevalue("short_library_calls")
    with pytest.MonkeyPatch.context() as patch:
        skip_parts_tested_elsewhere(patch.setattr)
        yield


@pytest.fixture(autouse=True)
def _forked_workers(forked_workers: None) -> None:
    """Workers of rewards are forks; tests/verify tests how they start and end."""


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run packed rows through one kernel, as on a GPU, to examine the graphs."""
    spec = importlib.util.spec_from_file_location("varlen_on_cpu", Path(__file__).with_name("varlen_on_cpu.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules.get(spec.name) or importlib.util.module_from_spec(spec)
    if spec.name not in sys.modules:  # an operator can be defined only once
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    monkeypatch.setattr(attention, "varlen_attn", module.varlen_attn)
    monkeypatch.setattr(attention, "has_kernel", lambda _: True)


def merge_sections(base: Values, changes: Values) -> Values:
    """Return sections updated key by key."""
    return {**base, **{k: {**base[k], **v} if isinstance(base.get(k), dict) else v for k, v in changes.items()}}


def write_rows(path: Path, n: int, *, pairs: bool) -> None:
    """Write sums of one-digit numbers with prompts and completions of uneven length."""
    draw = random.Random(0)
    with path.open("w") as file:
        for i in range(n):
            a, b = draw.randrange(10), draw.randrange(10)
            row = {"prompt": f"{a}+{b}" + "=" * (i % 4)}
            good, bad = f"{a + b}" + "." * (i % 3), "no" * (1 + i % 4)
            row |= {"chosen": good, "rejected": bad} if pairs else {"completion": good}
            file.write(json.dumps(row) + "\n")


@pytest.fixture
def sft_recipe(tmp_path: Path) -> Callable[..., Stage]:
    """An SFT recipe of 6 steps of 8 rows; keyword arguments change keys of its sections."""
    write_rows(tmp_path / "rows.jsonl", 20, pairs=False)
    base = {
        "stage": "sft",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "batch": {"size": 8, "micro_size": 4},
        "optim": {"lr": 3e-3},
        "run": {"steps": 6},
    }
    return lambda **changes: load_dict(merge_sections(base, changes), base_dir=tmp_path, where="test").recipe


@pytest.fixture
def dpo_recipe(tmp_path: Path) -> Callable[..., Stage]:
    """A DPO recipe of 6 steps of 8 pairs; keyword arguments change keys of its sections."""
    write_rows(tmp_path / "pairs.jsonl", 20, pairs=True)
    base = {
        "stage": "dpo",
        "model": {"path": "tiny"},
        "data": {"source": "pairs.jsonl"},
        "loss": {"use": "dpo"},
        "batch": {"size": 8, "micro_size": 4},
        "optim": {"lr": 3e-3},
        "run": {"steps": 6},
    }
    return lambda **changes: load_dict(merge_sections(base, changes), base_dir=tmp_path, where="test").recipe


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., contextlib.AbstractContextManager[RunDirectory]]:
    """Return a function that opens the run directory NAME under the test's folder."""

    def open_directory(name: str = "run", *, resume: bool = False) -> RunDirectory:
        return RunDirectory.open(tmp_path / name, name=name, text="", resolved={}, resume=resume)

    return open_directory


@pytest.fixture
def rows_of(opened: Any, tmp_path: Path) -> Callable[..., list[Values]]:
    """Return a function that runs a recipe and returns its metrics without times."""

    def run_and_read(run: Any, recipe: Stage, name: str = "run", *, resume: bool = False) -> list[Values]:
        with opened(name, resume=resume) as directory:
            run(recipe, directory)
        return without_time(read_metrics(tmp_path / name))

    return run_and_read


def without_time(rows: list[Values]) -> list[Values]:
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


@pytest.fixture(scope="session")
def answer(forked_python: str) -> Iterator[Callable[..., Any]]:
    """Return forked.py's answer to a job for a `program`."""
    command = [forked_python, str(Path(__file__).with_name("forked.py"))]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(program: str, **job: Any) -> Any:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps({"program": program, **job}) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield ask
    server.kill()  # it has nothing to finish
    server.communicate()


@pytest.fixture(scope="session")
def train(answer: Callable[..., Any]) -> Callable[..., int]:
    """Train in a separate process (killable.py); return its exit status."""

    def run(recipe: dict[str, Any], output: Path, *, resume: bool = False, kill: Any = None) -> int:
        place = {"base_dir": str(output.parent), "output": str(output)}
        return int(answer("killable", recipe=recipe, resume=resume, kill=kill, **place))

    return run


class Cli:
    """Runs `posttrain` commands in this process."""

    @staticmethod
    def run(*command: str) -> str:
        done = CliRunner().invoke(app, list(command))
        assert done.exit_code == 0, done.output
        return done.output

    @staticmethod
    def refused(*command: str) -> str:
        """Return the one-line error of a command that must fail."""
        done = CliRunner().invoke(app, list(command))
        assert done.exit_code != 0, done.output
        return " ".join(done.output.split())

    @staticmethod
    def rows_of(run: Path) -> list[Values]:
        """The metrics of a run, but for times."""
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]

    @staticmethod
    def resumed(run: Path, *command: str, steps: int = 20) -> list[Values]:
        """Return the metrics of an unbroken run after checking that a run killed in its middle and resumed has the
        same."""
        Cli.run(*command, "--output", str(run))
        whole = Cli.rows_of(run)
        shutil.rmtree(run / "checkpoints" / f"step-{steps:08d}")
        (run / "summary.json").unlink()
        assert f"resumed after step {steps // 2}" in Cli.run(*command, "--output", str(run), "--resume")
        assert Cli.rows_of(run) == whole
        return whole


@pytest.fixture
def cli() -> Cli:
    return Cli()


class Seen:
    """Records the rollouts and batches that each step trained on."""

    def __init__(self) -> None:
        self.rollouts: list[list[Rollout]] = []
        self.batches: list[RolloutBatch] = []

    def trajectories(self, step: int = 0) -> list[list[tuple[Rollout, RolloutBatch]]]:
        """Return (rollout, batch of one row) of each row, by trajectory."""
        found: dict[int | None, list[tuple[Rollout, RolloutBatch]]] = {}
        for n, rollout in enumerate(self.rollouts[step]):
            found.setdefault(rollout.trajectory, []).append((rollout, self.batches[step].select([n])))
        return list(found.values())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, update, batch_of = Seen(), rl.update, rl.batch_of

    def batched(ctx: Any, rollouts: list[Rollout], state: Any) -> RolloutBatch:
        found.rollouts.append(list(rollouts))
        return batch_of(ctx, rollouts, state)

    def updated(ctx: Any, batch: RolloutBatch, sequences: Any, *rest: Any) -> Any:
        found.batches.append(batch.to("cpu"))
        return update(ctx, batch, sequences, *rest)

    monkeypatch.setattr(rl, "batch_of", batched)
    monkeypatch.setattr(rl, "update", updated)
    return found


@pytest.fixture
def ran(cli: Any, home: Path) -> Callable[..., list[Values]]:
    """Return a function that runs an rl recipe through the command line and returns its metrics; the test module
    defines a fixture `home`, the folder."""

    def run(values: Values, name: str = "run", *options: str) -> list[Values]:
        (home / f"{name}.yaml").write_text(json.dumps(values))  # JSON is YAML
        cli.run("rl", str(home / f"{name}.yaml"), "--output", str(home / name), *options)
        return cli.rows_of(home / name)

    return run
