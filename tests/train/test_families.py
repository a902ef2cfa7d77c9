"""Statements of docs/architectures.yaml about each family, checked on tiny models through the commands."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.errors import ModelError
from posttrain.recipe.load import load_dict
from posttrain.train import rl, sft
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import completion_logprobs

from .families import family, save_family

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
try:
    table: ModuleType = importlib.import_module("architectures")
finally:
    sys.path.pop(0)
FAMILIES = {row.family: row for row in table.read_families()}
STAGES = {"sft": sft.run, "rl": rl.run}
WINDOWS = {"llama4_text": "attention_chunk_size"}  # the configuration's name for it, if not `sliding_window`
ROWS = Sequences(tuple(tuple(range(3, 3 + n)) for n in (30, 5, 40, 17)), (5, 2, 3, 4))
REWARD = "def letters(completion, token_count):\n    return sum(map(str.islower, completion)) / max(token_count, 1)\n"


def test_table_of_the_page_is_generated_from_the_rows() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert table.page(text, list(FAMILIES.values())) == text, "run `make index`"
    assert len(FAMILIES) >= 24


def keys_of(row: Any) -> dict[str, Any]:
    return {**row.keys, **({WINDOWS.get(row.kind, "sliding_window"): row.window} if row.window else {})}


@dataclass
class Trial:
    """Runs of a family's tiny model."""

    home: Path
    rows_of: Callable[..., list[dict[str, Any]]]
    lora: bool

    def run(self, stage: str, name: str, steps: int, *, resume: bool = False, **batch: Any) -> list[dict[str, Any]]:
        """The metrics of so many steps, but for times."""
        values = {
            "stage": stage,
            "model": {"path": "base", "device": "cpu", **({"lora": {"rank": 4}} if self.lora else {})},
            "data": {"source": "rows.jsonl"},
            "optim": {"lr": 1e-3},
            "run": {"steps": steps, "save_every": 1},
        }
        if stage == "sft":
            values |= {"batch": {"size": 4, "micro_size": 2, **batch}, "objective": {"router_aux_loss": 0}}
        else:
            rollout = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 12}
            values |= {"rollout": rollout, "rewards": [{"use": "letters.py:letters"}], "scoring": {"workers": 1}}
        recipe = load_dict(values, base_dir=self.home, where="test").recipe
        return self.rows_of(STAGES[stage], recipe, name, resume=resume)

    def final(self, name: str) -> dict[str, torch.Tensor]:
        files = (self.home / name / "final").glob("*.safetensors")
        return {key: tensor for file in files for key, tensor in load_file(file).items()}


@pytest.fixture
def trial(tmp_path: Path, rows_of: Callable[..., list[dict[str, Any]]]) -> Callable[..., Trial]:
    """Build the base model of a family and the data of its runs."""

    def make(row: Any, *, lora: bool) -> Trial:
        save_family(row.kind, tmp_path / "base", **keys_of(row))
        rows = [{"prompt": f"{i}+{i}=" + "?" * (i * 3 % 17), "completion": f"{2 * i}" + "." * (i * 5 % 13)}
                for i in range(8)]  # fmt: skip
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "letters.py").write_text(REWARD)
        return Trial(tmp_path, rows_of, lora)

    return make


def check_stage(trial: Trial, stage: str) -> list[dict[str, Any]]:
    """Check that two steps, unbroken and resumed after the first, are equal; saving has compared `final/` with plain
    transformers and PEFT. Return the metrics."""
    whole = trial.run(stage, f"{stage}-whole", 2)
    trial.run(stage, f"{stage}-broken", 1)
    assert trial.run(stage, f"{stage}-broken", 2, resume=True) == whole
    one, other = trial.final(f"{stage}-whole"), trial.final(f"{stage}-broken")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert all(row["grad_norm"] > 0 for row in whole)
    return whole


def check_packing(trial: Trial, row: Any, padded: list[dict[str, Any]]) -> None:
    """Check that sft's `batch.packing` gives the losses of padded rows, or is refused."""
    if row.packs == "neither":
        with pytest.raises(ModelError, match="packing is not exact"):
            trial.run("sft", "packed", 2, packing=True)
        return
    packed = trial.run("sft", "packed", 2, packing=True)
    for one, other in zip(padded, packed, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=5e-6)


def check_row(make: Callable[..., Trial], row: Any, *, lora: bool, stages: tuple[str, ...] = ("sft", "rl")) -> None:
    trial = make(row, lora=lora)
    found = {stage: check_stage(trial, stage) for stage in stages}
    if "sft" in found:
        check_packing(trial, row, found["sft"])


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_trains_resumes_and_reloads(trial: Callable[..., Trial], name: str, lora: bool) -> None:
    check_row(trial, FAMILIES[name], lora=lora)


@pytest.mark.parametrize(
    ("name", "lora", "stage"),
    [
        ("Qwen3-MoE", False, "rl"),  # stored in other pieces, under other names
        ("Llama 4 (text)", False, "sft"),  # rows packed after whole chunks would look right
        ("Falcon-H1", True, "sft"),  # layers without adapter support
    ],
)
def test_mechanism_of_each_family(trial: Callable[..., Trial], name: str, lora: bool, stage: str) -> None:
    check_row(trial, FAMILIES[name], lora=lora, stages=(stage,))


@pytest.mark.parametrize("name", FAMILIES)
def test_rl_packing_and_stored_names(name: str, tmp_path: Path) -> None:
    """Packed rows have the log-probs of padded rows; stored names equal module names if the table row says so."""
    row = FAMILIES[name]
    base = save_family(row.kind, tmp_path, **keys_of(row))
    switched, plain = family(row.kind, **keys_of(row)), family(row.kind, **keys_of(row))
    stored = {key for file in base.glob("*.safetensors") for key in load_file(file)}
    assert (stored <= plain.state_dict().keys()) == (row.names == "same")
    assert use_packed_attention(switched) == (row.packs == "both")
    with torch.no_grad():
        found = completion_logprobs(switched, ROWS, 37, packed=True)[0]
        expected = completion_logprobs(plain, ROWS, 37)[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
