"""Checkpoints and final models written by all ranks of a sharded model."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from posttrain.models import tiny
from posttrain.models.merge_adapter import load_merged
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.train import divided_checkpoint

from .families import save_family

Values = dict[str, Any]
Run = Callable[..., list[Values]]


@pytest.fixture
def run(answer: Callable[..., Any], sft_recipe: Any, tmp_path: Path) -> Run:
    """Return the metrics of an sft run with this number of processes (ranked.py)."""
    del sft_recipe  # it writes the rows

    def train(ranks: int, *, steps: int, name: str = "run", resume: bool = False, **model: Any) -> list[Values]:
        recipe = {
            "stage": "sft",
            "model": {"path": "tiny", **model},
            "data": {"source": "rows.jsonl"},
            "batch": {"size": 6, "micro_size": 2},
            "optim": {"lr": 3e-3},
            "run": {"steps": steps, "save_every": 1},
        }
        job = {"recipe": recipe, "base_dirs": [str(tmp_path)], "output": str(tmp_path / name), "resume": resume}
        assert answer("ranked", **job, ranks=ranks, lost_sync=None, engine=None) == [0] * ranks
        return read_metrics(tmp_path / name)

    return train


def test_each_rank_writes_its_shards_and_some_full_weights(run: Run, tmp_path: Path) -> None:
    """For a checkpoint and for the final model, which load as any other model."""
    run(2, steps=2, parallel={})
    root, final = tmp_path / "run" / "checkpoints", tmp_path / "run" / "final"
    newest = checkpoints.latest(root, hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 2
    assert [path.name for path in root.iterdir() if path != newest] == ["step-00000001"]
    for folder in (newest, final):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
        assert set(index["weight_map"].values()) == files.keys() and len(files) == 2
        assert min(files.values()) > 0.5 * max(files.values())  # the layers are assigned by size
    sizes = [path.stat().st_size for path in (newest / "divided").glob("*.distcp")]
    assert len(sizes) == 2 and min(sizes) > 0.7 * max(sizes)
    saved, last = (AutoModelForCausalLM.from_pretrained(folder) for folder in (newest, final))
    assert all(torch.equal(one, other) for one, other in zip(saved.parameters(), last.parameters(), strict=True))
    report = json.loads((tmp_path / "run" / "summary.json").read_text())["save"]
    assert report["kind"] == "full" and report["weights_compared"] == len(list(last.parameters()))


def test_asynchronous_save_is_used_only_when_complete(answer: Callable[..., Any], tmp_path: Path) -> None:
    """It holds the weights of its step; a save that fails or is killed leaves the previous checkpoint."""
    assert answer("ranked", work="save_asynchronously", root=str(tmp_path), ranks=2) == [1, -signal.SIGKILL]
    newest = checkpoints.latest(tmp_path, hashes=True)
    assert newest is not None and checkpoints.step_of(newest) == 1


def test_rank_failing_in_load_or_save_does_not_block_the_others(answer: Callable[..., Any], tmp_path: Path) -> None:
    """In loading, the error is reported once and an older checkpoint is used; in saving, all ranks raise."""
    path = str(save_family("qwen3_moe", tmp_path / "model"))
    assert answer("ranked", work="fail_alone", root=str(tmp_path / "run"), path=path, ranks=2) == [0, 0]


def test_each_rank_writes_some_layers_of_a_merged_adapter(answer: Callable[..., Any], tmp_path: Path) -> None:
    """The files hold the base merged with the adapter that is saved beside them."""
    assert answer("ranked", work="save_adapters", root=str(tmp_path / "final"), ranks=2) == [0, 0]
    merged = []
    for folder in (tmp_path / "final" / name for name in ("one", "two")):
        files = [load_file(path) for path in folder.glob("*.safetensors")]
        assert len(files) == 2 and min(map(len, files)) > 1
        expected = load_merged(tiny.build(0)[0], folder / "adapter").state_dict()
        found = {name: tensor for tensors in files for name, tensor in tensors.items()}
        assert len(found) == len(expected) - 1  # the head is the embeddings
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        merged.append(found["model.layers.0.self_attn.q_proj.weight"])
    assert not torch.equal(*merged)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral", "qwen3_moe", "gemma3_text"])
def test_files_of_all_ranks_have_published_weight_names(run: Run, tmp_path: Path, kind: str) -> None:
    """Architectures that store weights under other names, in other pieces, or tied; one process resumes from them."""
    path = str(save_family(kind, tmp_path / "model"))
    expected = run(1, steps=2, name="one", path=path)
    run(2, steps=1, path=path, parallel={})
    assert_equal(
        run(1, steps=2, resume=True, path=path), expected, rel=1e-4
    )  # a router's loss is one of its micro-batch
    run(2, steps=1, name="two", path=path, parallel={})
    stored = [
        {name for file in folder.glob("*.safetensors") for name in load_file(file)}
        for folder in (tmp_path / "one" / "final", tmp_path / "two" / "final")
    ]
    assert stored[0] == stored[1]


@pytest.mark.slow
def test_checkpoint_resumes_on_any_number_of_ranks(run: Run) -> None:
    """One, four in two copies, two, one and two ranks: the steps equal those of one process."""
    expected = run(1, steps=6, name="one")
    run(1, steps=1)
    run(4, steps=2, resume=True, parallel={"replicate": 2})
    run(2, steps=3, resume=True, parallel={})
    run(4, steps=4, resume=True, parallel={})
    run(1, steps=5, resume=True)
    found = run(2, steps=6, resume=True, parallel={})
    assert_equal(found, expected)


def assert_equal(found: list[Values], expected: list[Values], rel: float = 1e-5) -> None:
    assert len(found) == len(expected) > 0
    for row, other in zip(found, expected, strict=True):
        assert [row["loss"], row["grad_norm"]] == pytest.approx([other["loss"], other["grad_norm"]], rel=rel)


def test_rank_finds_its_files_by_name(tmp_path: Path) -> None:
    """Up to torch 2.12, DCP reports files only to the first rank."""
    (tmp_path / "divided").mkdir()
    for name in ("__1_0.distcp", "__1_1.distcp", "__10_0.distcp", "__0_0.distcp", ".metadata"):
        (tmp_path / "divided" / name).touch()
    assert divided_checkpoint.list_shards(tmp_path, 1) == {"divided/__1_0.distcp", "divided/__1_1.distcp"}
