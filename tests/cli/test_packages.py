"""Missing packages of a recipe are reported before any work, with the line that needs them, and no directory is
created."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import packages
from posttrain.recipe.load import load_dict

Call = Callable[..., Any]

RL: dict[str, Any] = {
    "stage": "rl",
    "model": {"path": "tiny"},
    "data": {"source": "rows.jsonl"},
    "rewards": [{"use": "math.accuracy"}],
    "run": {"steps": 1},
}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that packages are not installed."""
    found = importlib.util.find_spec

    def hide(*names: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *more: None if name in names else found(name, *more)
        )

    return hide


@pytest.mark.parametrize(
    ("values", "package", "extra"),
    [
        ({"rollout": {"engine": "vllm"}}, "rollout.engine: vllm needs vllm", "vllm"),
        ({"model": {"path": "tiny", "quantize": "nf4", "lora": {}}}, "model.quantize: nf4 needs bitsandbytes", "quant"),
        ({"optim": {"use": "adamw_8bit"}}, "optim.use: adamw_8bit needs bitsandbytes", "quant"),
        ({"model": {"path": "tiny", "lora": {}}}, "model.lora needs peft", "train"),
        ({"model": {"path": "a.gguf"}}, "a .gguf model needs gguf", "train"),
        ({"data": {"source": "gym:chain_sum", "size": 4}}, "data gym:chain_sum needs reasoning-gym", "gym"),
        ({"rewards": [{"use": "gym.score"}]}, "rewards: gym.score needs reasoning-gym", "gym"),
        (
            {"stage": "eval", "data": {"mix": [{"source": "some/hub"}]}, "run": {}},
            "data some/hub needs datasets",
            "train",
        ),
        ({}, "stage rl needs torch", "train"),
    ],
)
def test_each_missing_package_is_reported(
    values: dict[str, Any], package: str, extra: str, without: Any, tmp_path: Path
) -> None:
    loaded = load_dict({**RL, **values}, base_dir=tmp_path, where="r.yaml")
    without(package.rpartition(" ")[2].replace("-", "_"))
    (told,) = packages.find_missing_packages(loaded)
    assert told.what == f"{package}, which is not installed" and told.where == ("" if "lora" in package else "r.yaml")
    assert told.hint is not None and told.hint.startswith(f"pip install 'posttrain[{extra}]'")
    assert ("gcc" in told.hint) == (extra == "gym")


def test_remote_server_needs_no_package(without: Any, tmp_path: Path) -> None:
    server = {"urls": ["http://somewhere:8000"]}
    values = {**RL, "rollout": {"engine": "vllm", "vllm": {"server": server}}}
    without("vllm", "bitsandbytes", "gguf", "reasoning_gym")
    assert packages.find_missing_packages(load_dict(values, base_dir=tmp_path, where="r.yaml")) == []


def test_run_with_missing_packages_does_not_start(
    call: Call, stage: Callable[..., None], folder: Path, without: Any
) -> None:
    """Of a pipeline, every stage is asked."""
    stage(lambda *_: pytest.fail("must not run"))
    (folder / "p.yaml").write_text(
        "stage: pipeline\ndefaults: {model: {path: tiny}, data: {source: rows.jsonl}}\nstages:\n"
        "  - {name: a, stage: sft, run: {steps: 1}, optim: {use: adamw_8bit}}\n"
        "  - {name: b, stage: generate, engine: {engine: vllm}}\n",
        encoding="utf-8",
    )
    without("vllm", "bitsandbytes")
    result = call("run", "p.yaml")
    assert result.exit_code == 2 and not (folder / "runs").exists()
    assert result.stderr == (
        "p.yaml:4:57  optim.use: adamw_8bit needs bitsandbytes, which is not installed\n"
        "  hint: pip install 'posttrain[quant]'\n"
        "p.yaml:5:49  engine.engine: vllm needs vllm, which is not installed\n"
        "  hint: pip install 'posttrain[vllm]'\n\n2 problems\n"
    )
    dry = call("run", "p.yaml", "--dry-run")
    assert dry.exit_code == 0 and "not on this machine: engine.engine: vllm needs vllm" in dry.stderr


@pytest.mark.parametrize("command", [("data", "inspect"), ("reward", "test")])
def test_row_commands_need_fewer_packages(command: tuple[str, str], call: Call, folder: Path, without: Any) -> None:
    """The package of the data, and not those of a run."""
    text = "stage: rl\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrun: {steps: 1}\n"
    rewards = "rewards: [{use: mine.py:score}]\nscoring: {workers: 1}\nrollout: {engine: vllm}\n"
    (folder / "r.yaml").write_text(text + rewards, encoding="utf-8")
    (folder / "rows.jsonl").write_text('{"prompt": "7?", "answer": "7"}\n', encoding="utf-8")
    (folder / "mine.py").write_text("def score(completion, answer): return float(completion == answer)\n")
    without("vllm", "reasoning_gym")
    assert call(*command, "r.yaml").exit_code == 0
    told = call(*command, "r.yaml", "data.source=gym:chain_sum", "data.size=2")
    assert told.exit_code == 2
    assert told.stderr.startswith("command line  data gym:chain_sum needs reasoning-gym, which is not installed\n")
