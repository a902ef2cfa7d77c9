"""Early start of vLLM beside the trainer: the process starts before the trainer's weights are loaded and loads its
model afterwards."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt
from posttrain.errors import EngineError
from posttrain.models import weights
from posttrain.models.load import LoadedModel, build_skeleton, load
from posttrain.recipe.engine_sections import EngineSection, Vllm
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Lora, Model
from posttrain.rollout import engine_process, vllm_engine, vllm_start
from posttrain.rollout.make_engine import make_engine, start_early
from posttrain.rollout.vllm_engine import begin_colocated, spec_of

sys.path.append(str(Path(__file__).parents[1]))
from engine_clients import TransformersClient
from train.families import save_family

GREEDY = Sampling(temperature=0.0, max_new_tokens=6)
SECTION = EngineSection(engine="vllm")


@pytest.fixture
def engine_starts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand-ins for vLLM that were started, each once its model could be loaded."""
    found = list[Any]()

    class Client(TransformersClient):
        @classmethod
        def start(cls, spec: Any, folder: Path, log: Path) -> Any:
            core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), name="EngineCore")
            core.start()
            try:
                while not (folder / vllm_start.READY_FILE).exists():
                    if core.exitcode is not None:
                        raise EngineError("its process was killed")
                    time.sleep(0.01)
            finally:
                core.kill()
            found.extend(engine_starts := super().start(spec, folder, log))
            return engine_starts

    monkeypatch.setattr(vllm_engine, "ColocatedClient", Client)
    monkeypatch.setattr(vllm_start, "require_vllm", lambda: None)
    return found


def save_model(loaded: LoadedModel, folder: Path, **section: Any) -> Model:
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return Model.model_validate({"path": str(folder), "device": "cpu", **section})


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma3_text", "tiny"])
@pytest.mark.parametrize("lora", [None, Lora(rank=3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_settings_come_from_a_model_skeleton(kind: str, lora: Lora | None, dtype: str, tmp_path: Path) -> None:
    path = "tiny" if kind == "tiny" else str(save_family(kind, tmp_path / kind))
    section = Model.model_validate({"path": path, "device": "cpu", "dtype": dtype, "lora": lora})
    state = torch.get_rng_state()
    foreseen = build_skeleton(section, tmp_path, training=True)
    assert foreseen is not None and torch.equal(torch.get_rng_state(), state)
    assert {p.device.type for p in foreseen.model.parameters()} == {"meta"}
    loaded = load(section, tmp_path, training=True)
    merged = Vllm(merge_adapter=True)
    assert spec_of(merged, foreseen, 64) == spec_of(merged, loaded, 64)
    one, other = (weights.published_config(model).to_json_string() for model in (foreseen, loaded))
    assert one == other


@pytest.mark.parametrize("lora", [None, Lora(rank=3)])
def test_engine_loads_its_model_after_the_trainers_weights(
    lora: Lora | None, loaded: LoadedModel, prompts: list[Prompt], engine_starts: list[Any], tmp_path: Path
) -> None:
    section, place = save_model(loaded, tmp_path / "model", lora=lora), {"scratch": tmp_path / "engine", "max_len": 64}
    with start_early(SECTION, section, tmp_path, training=True, **place) as begun:
        assert begun is not None
        time.sleep(0.1)
        assert not engine_starts and not list(begun.folder.glob("*.safetensors"))
        model = load(section, tmp_path, training=True)
        engine = make_engine(SECTION, model, begun=begun, **place)
        assert [one.spec.lora_rank for one in engine_starts] == [lora and lora.rank]
        assert engine.generate(prompts, 1, GREEDY, seed=0) and engine.gap < 1e-5
        assert not list((tmp_path / "engine").rglob("*.safetensors"))
    assert engine_starts[0].ended


def test_engine_started_for_another_window_is_replaced(
    loaded: LoadedModel, engine_starts: list[Any], tmp_path: Path
) -> None:
    """The prompts turn out to need another window than the engine was started with."""
    section, place = save_model(loaded, tmp_path / "model"), {"scratch": tmp_path / "engine", "max_len": 64}
    with start_early(SECTION, section, tmp_path, training=True, **{**place, "max_len": 32}) as begun:
        assert begun is not None
        engine: Any = make_engine(SECTION, loaded, begun=begun, **place)
        assert engine.window == 64
        assert len(engine_starts) == 1, "the one that was begun is ended"
        ours = engine.clients[0]
        engine.close()
    assert ours is engine_starts[-1] and all(one.ended for one in engine_starts)


def test_error_before_first_use_ends_the_engine(loaded: LoadedModel, engine_starts: list[Any], tmp_path: Path) -> None:
    section = save_model(loaded, tmp_path / "model")
    before = threading.active_count()
    begin = start_early(SECTION, section, tmp_path, training=True, scratch=tmp_path / "engine", max_len=64)
    with pytest.raises(ZeroDivisionError), begin as begun:
        assert begun is not None
        raise ZeroDivisionError
    assert not (tmp_path / "engine" / "engine-model").exists()
    assert not engine_starts and threading.active_count() <= before


@pytest.mark.parametrize("change", [{"engine": "transformers"}, {"vllm": {"server": {"devices": [1]}}}])
def test_only_vllm_beside_the_trainer_starts_early(change: dict[str, Any], loaded: LoadedModel, tmp_path: Path) -> None:
    section = EngineSection.model_validate({"engine": "vllm", **change})
    model = save_model(loaded, tmp_path / "model")
    with start_early(section, model, tmp_path, training=True, scratch=tmp_path / "engine", max_len=64) as begun:
        assert begun is None and not (tmp_path / "engine").exists()


def test_no_early_start_for_a_model_that_cannot_be_loaded(engine_starts: list[Any], tmp_path: Path) -> None:
    for path in ("missing", str(tmp_path)):
        section = Model.model_validate({"path": path, "device": "cpu"})
        with start_early(SECTION, section, tmp_path, training=True, scratch=tmp_path / "e", max_len=64) as begun:
            assert begun is None
    assert not engine_starts


def test_engine_with_known_cache_size_does_not_wait(
    loaded: LoadedModel, engine_starts: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of its KV cache is known, and its weights come with the first sync. An engine that loads the base for
    adapters waits."""
    monkeypatch.setattr(vllm_start, "starts_beside", lambda *_: True)
    begun = begin_colocated(Vllm(), loaded, scratch=tmp_path, max_len=64)
    assert (begun.folder / vllm_start.READY_FILE).exists()
    begun.wait()
    assert len(engine_starts) == 1
    begun.close()
    model = save_model(loaded, tmp_path / "model", lora={"rank": 3})
    lora = begin_colocated(Vllm(), load(model, tmp_path, training=True), scratch=tmp_path, max_len=64)
    assert not (lora.folder / vllm_start.READY_FILE).exists()
    lora.close()


def test_process_waits_for_the_file_named_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engine_process.READY, raising=False)
    engine_process.wait_until_ready()
    monkeypatch.setenv(engine_process.READY, str(tmp_path / "ready"))
    waiting = threading.Thread(target=engine_process.wait_until_ready)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    (tmp_path / "ready").touch()
    waiting.join(10)
    assert not waiting.is_alive()


AS_A_MODULE = """
import multiprocessing, os, runpy, sys, time
from pathlib import Path
import posttrain.cli.app

def command(prog_name):
    core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), name="EngineCore_DP0")
    core.start()
    deadline = time.monotonic() + 50
    while not Path(os.environ["POSTTRAIN_ENGINE_LOG"]).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    core.kill()

posttrain.cli.app.app = command
runpy.run_module("posttrain", run_name="__main__", alter_sys=True)
"""


def test_process_of_python_m_posttrain_opens_its_log_before_other_imports(tmp_path: Path) -> None:
    """multiprocessing skips a main module named `__main__` in a package."""
    log = tmp_path / "log"
    environment = {**os.environ, engine_process.LOG: str(log), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", AS_A_MODULE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and log.exists(), done.stderr


ORPHAN = """
import multiprocessing, time
multiprocessing.current_process().name = "EngineCore_DP0"
import posttrain
print("goes on", flush=True)
time.sleep(60)
"""


def test_process_ends_if_its_trainer_ended_before_it_started_watching() -> None:
    """Its parent is then another process, whose end it must not wait for."""
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    environment = {**os.environ, engine_process.PARENT: str(gone.pid), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", ORPHAN], env=environment, timeout=50, check=False)
    assert done.returncode == 1
    environment[engine_process.PARENT] = str(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ORPHAN], env=environment, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout is not None and living.stdout.readline() == "goes on\n"
        with pytest.raises(subprocess.TimeoutExpired):
            living.wait(3 * engine_process.POLL_S)
        living.kill()
