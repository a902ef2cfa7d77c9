"""Trained adapters on embeddings and output heads: saved, resumed and loaded again, they compute what PEFT computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from posttrain.errors import ModelError
from posttrain.models import tiny
from posttrain.models.load import load
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Model
from posttrain.train import preference, rl, sft

EMBED, HEAD, Q = "embed_tokens", "lm_head", "q_proj"
IDS = torch.tensor([[1, 5, 40, 41, 60, 61, 62, 7, 8, 100, 109, 20]])
RL: dict[str, Any] = {
    "stage": "rl",
    "data": {"source": "pairs.jsonl"},
    "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 4},
    "rewards": [{"use": "varied.py:varied"}],
    "scoring": {"workers": 1},
    "kl": {"coef": 0.05},
    "optim": {"lr": 1e-2},
}
SLOW = pytest.mark.slow
CASES = [
    *((True, stage, [Q, EMBED]) for stage in ("sft", "dpo", "rl")),
    *((tied, "rl", targets) for targets in ([Q, HEAD], [EMBED, HEAD]) for tied in (True, False)),
    *(pytest.param(False, stage, [Q, EMBED], marks=SLOW) for stage in ("sft", "dpo", "rl")),
]


def make_base(folder: Path, *, tied: bool = True) -> Path:
    model, tokenizer = tiny.build(0)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(1.01 * model.lm_head.weight.detach())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def stages(sft_recipe: Any, dpo_recipe: Any, opened: Any, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that runs a stage on a model for some steps and returns its run directory."""
    reward = "def varied(completion):\n    return sum(map(ord, completion)) % 11 / 11\n"
    (tmp_path / "varied.py").write_text(reward)

    def run(stage: str, model: dict[str, Any], steps: int, name: str = "run", *, resume: bool = False) -> Path:
        keys = {"model": {"device": "cpu", **model}, "run": {"steps": steps, "save_every": 1}}
        recipe = load_dict({**RL, **keys}, base_dir=tmp_path, where="test").recipe if stage == "rl" else None
        recipe = recipe or {"sft": sft_recipe, "dpo": dpo_recipe}[stage](optim={"lr": 1e-2}, **keys)
        with opened(name, resume=resume) as directory:
            {"sft": sft, "dpo": preference, "rl": rl}[stage].run(recipe, directory)
        return tmp_path / name

    return run


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def with_peft(base: Path, folder: Path) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("tied", "stage", "targets"), CASES)
def test_adapter_on_embeddings_equals_peft(
    stages: Any, tied: bool, stage: str, targets: list[str], tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", tied=tied)
    model = {"path": str(base), "lora": {"rank": 4, "targets": targets}}
    run = stages(stage, model, 1)
    run = stages(stage, model, 2, resume=True)
    expected = with_peft(base, run / "final")
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-3
    assert torch.equal(with_peft(base, stages(stage, model, 2, "unbroken") / "final"), expected)
    for folder in (run / "final", run / "checkpoints" / "step-00000002"):
        again = load(Model(path=str(folder), device="cpu"), tmp_path)
        assert torch.allclose(logits(again.model), expected, atol=2e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_full_training_from_an_adapter_unties_the_embeddings(stages: Any, base: Path, capsys: Any) -> None:
    """The model is untied from then on, in checkpoints too."""
    model = {"path": str(base), "lora": {"rank": 4, "targets": [Q, EMBED]}}
    adapter = stages("sft", model, 1, "adapter") / "final"
    capsys.readouterr()
    run = stages("sft", {"path": str(adapter)}, 1)
    told = f"{adapter} is an adapter: it was merged into its base {base}, and all weights of the result are trained"
    assert told in " ".join(capsys.readouterr().err.split())
    stages("sft", {"path": str(adapter)}, 2, resume=True)
    whole = stages("sft", {"path": str(adapter)}, 2, "unbroken") / "final"
    found = AutoModelForCausalLM.from_pretrained(run / "final")
    assert torch.equal(logits(found), logits(AutoModelForCausalLM.from_pretrained(whole)))
    assert found.lm_head.weight is not found.model.embed_tokens.weight


def test_new_adapter_on_a_merged_adapter(stages: Any, base: Path, capsys: Any) -> None:
    """The run notes it; neither its checkpoints nor the adapter beside the final model name the old base as theirs."""
    adapter = stages("sft", {"path": str(base), "lora": {"rank": 4}}, 1, "first") / "final"
    capsys.readouterr()
    run = stages("rl", {"path": str(adapter), "lora": {"rank": 2}}, 1)
    told = f"{adapter} is an adapter: it was merged into its base {base}, and a new adapter is trained on the result"
    assert told in " ".join(capsys.readouterr().err.split())
    for folder in (run / "final" / "adapter", run / "checkpoints" / "step-00000001"):
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] is None
        readme = (folder / "README.md").read_text()
        assert str(base) not in readme and f"An adapter on `{adapter}`" in readme
    with pytest.raises(ModelError, match="names no base model"):
        load(Model(path=str(run / "checkpoints" / "step-00000001"), device="cpu"), base)
    assert load(Model(path=str(run / "final"), device="cpu"), base) is not None
