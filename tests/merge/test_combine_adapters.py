"""`merge_method: lora_combine` on adapters written by PEFT, compared with dense weights; refused inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from posttrain.errors import MergeError, RecipeError
from posttrain.recipe.load import load_dict

from .conftest import save_tiny

Merge = Callable[..., dict[str, Any]]
LAYER = "model.layers.0.self_attn.q_proj.weight"


def adapter(folder: Path, base: Path, seed: int, *, rank: int = 2, alpha: int = 6, **options: Any) -> Path:
    """Save an adapter whose B is not 0."""
    torch.manual_seed(seed)
    options = {"target_modules": ["q_proj", "down_proj"], **options}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=rank, lora_alpha=alpha, **options))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    return folder


def dense(base: Path, folder: Path | None = None) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base)
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base", 0)


@pytest.fixture
def pair(tmp_path: Path, base: Path) -> Path:
    """Adapters a (rank 2, scale 3) and b (rank 3, one module of rank 1 with alpha 4, rslora)."""
    adapter(tmp_path / "a", base, 1)
    patterns = {"rank_pattern": {"layers.0.self_attn.q_proj": 1}, "alpha_pattern": {"layers.0.self_attn.q_proj": 4}}
    adapter(tmp_path / "b", base, 2, rank=3, use_rslora=True, **patterns)
    return tmp_path


def list_models(*weights: float) -> list[dict[str, Any]]:
    return [{"model": n, "parameters": {"weight": w}} for n, w in zip("ab", weights, strict=True)]


@pytest.mark.parametrize("parameters", [{}, {"combination": "svd", "rank": 5}], ids=["cat", "svd"])
def test_combined_adapter_equals_the_weighted_sum(
    pair: Path, base: Path, merge: Merge, parameters: dict[str, Any]
) -> None:
    """W + 0.5 (W_a - W) - 2 (W_b - W), with PEFT's own merge on both sides; the adapters and the base are unchanged."""
    before = {file: file.read_bytes() for name in ("a", "b", "base") for file in (pair / name).iterdir()}
    summary = merge(merge_method="lora_combine", models=list_models(0.5, -2.0), parameters=parameters)
    w, a, b = dense(base), dense(base, pair / "a"), dense(base, pair / "b")
    merged = dense(base, pair / "run" / "final")
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, w[name] + 0.5 * (a[name] - w[name]) - 2 * (b[name] - w[name]))
    assert not torch.equal(merged[LAYER], w[LAYER])
    assert summary["modules"] == 4 and [m["weight"] for m in summary["models"]] == [0.5, -2.0]
    assert summary["ranks"] == {"3": 1, "5": 3}
    norm = sum(float((merged[name] - tensor).square().sum()) for name, tensor in w.items()) ** 0.5
    assert summary["norm"] == pytest.approx(norm, rel=1e-4) and summary["relative_distance_from_sum"] < 1e-5
    assert summary["probe"]["logit_gap"] > 0
    assert json.loads((pair / "run/final/merge_report.json").read_text()) == summary
    assert all(file.read_bytes() == content for file, content in before.items())


def test_svd_of_a_lower_rank_is_the_best_approximation(pair: Path, base: Path, merge: Merge) -> None:
    summary = merge(merge_method="lora_combine", models=list_models(1, 1), parameters={"combination": "svd", "rank": 2})
    assert summary["ranks"] == {"2": 4}
    w, a, b = dense(base)[LAYER], dense(base, pair / "a")[LAYER], dense(base, pair / "b")[LAYER]
    u, s, v = torch.linalg.svd((a - w + b - w).double())
    best = (u[:, :2] * s[:2]) @ v[:2]
    torch.testing.assert_close(dense(base, pair / "run/final")[LAYER] - w, best.float(), rtol=1e-4, atol=1e-6)
    plain, first, second = dense(base), dense(base, pair / "a"), dense(base, pair / "b")
    cut = [torch.linalg.svdvals(first[n] - w + second[n] - w)[2:] for n, w in plain.items() if w.dim() == 2]
    expected = float(torch.cat(cut).norm()) / summary["norm"]  # by Eckart and Young
    assert summary["relative_distance_from_sum"] == pytest.approx(expected, rel=1e-3)


def test_linear_needs_equal_ranks_and_returns_a_single_adapter(tmp_path: Path, base: Path, merge: Merge) -> None:
    """a with weight 1 and itself with weight 0 is a; another rank is refused, with the module's name."""
    adapter(tmp_path / "a", base, 1)
    adapter(tmp_path / "b", base, 2, rank=4)
    linear = {"combination": "linear"}
    with pytest.raises(MergeError, match=r"q_proj|down_proj: `linear` mixes adapters of equal rank only"):
        merge(tmp_path / "no", merge_method="lora_combine", models=list_models(1, 1), parameters=linear)
    models = [{"model": "a"}, {"model": "a", "parameters": {"weight": 0}}]
    assert merge(merge_method="lora_combine", models=models, parameters=linear)["ranks"] == {"2": 4}
    torch.testing.assert_close(dense(base, tmp_path / "run/final")[LAYER], dense(base, tmp_path / "a")[LAYER])


def spoil(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def apply(root: Path) -> None:
        tensors = load_file(root / "b/adapter_model.safetensors")
        change(tensors)
        save_file(tensors, root / "b/adapter_model.safetensors")

    return apply


def edit_config(**values: Any) -> Callable[[Path], Any]:
    def apply(root: Path) -> None:
        path = root / "b/adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return apply


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another base": (edit_config(base_model_name_or_path="tiny"), "different bases"),
    "another revision": (edit_config(revision="v2"), "different revisions"),
    "dora": (edit_config(use_dora=True), "use_dora: True is more than B A"),
    "whole modules": (edit_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "a changed base": (edit_config(init_lora_weights="pissa_niter_4"), "changed the base that this adapter fits"),
    "no lora": (edit_config(peft_type="IA3"), "only LORA is B A"),
    "B is missing": (spoil(lambda t: t.pop(FIRST.replace("_A", "_B"))), "lora_B.weight is missing"),
    "nan": (spoil(lambda t: t[FIRST].fill_(float("nan"))), "NaN or infinite"),
    "other targets": (
        spoil(lambda t: [t.pop(FIRST), t.pop(FIRST.replace("_A", "_B"))]),
        "different targets: only one of them is on model.layers.0.self_attn.q_proj",
    ),
    "another width": (spoil(lambda t: t.update({FIRST: torch.ones(1, 8)})), "do not fit at"),
    "single tokens": (edit_config(trainable_token_indices=[3]), "trainable_token_indices"),
    "parameters of experts": (edit_config(r=7), "the adapter's rank there is 7"),
    "weights of the base": (
        spoil(lambda t: t.update({"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(2)})),
        "hint: save it in PEFT with save_embedding_layers=False",
    ),
    "something else": (spoil(lambda t: t.update(x=torch.ones(2))), "neither A nor B: x"),
    "cut short": (lambda root: (root / "b/adapter_model.safetensors").write_bytes(b"12"), "unreadable"),
    "no weights": (lambda root: (root / "b/adapter_model.safetensors").unlink(), r"no adapter_model\.safetensors"),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_invalid_adapters_are_refused(pair: Path, merge: Merge, fault: str) -> None:
    change, match = SPOILT[fault]
    change(pair)
    with pytest.raises(MergeError, match=match):
        merge(merge_method="lora_combine", models=list_models(1, 1))
    assert not (pair / "run" / "final").exists() and not (pair / "run" / "final.tmp").exists()


@pytest.mark.usefixtures("pair")
def test_cancelling_adapters_are_refused(merge: Merge) -> None:
    with pytest.raises(MergeError, match="combined adapter is zero"):
        merge(merge_method="lora_combine", models=list_models(0, 0))


@pytest.mark.usefixtures("pair")
def test_full_model_as_adapter_is_refused(merge: Merge) -> None:
    with pytest.raises(MergeError, match="base is not an adapter directory"):
        merge(merge_method="lora_combine", models=[{"model": "a"}, {"model": "base"}])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"base_model": "base"}, "takes its base from the adapters"),
        ({"parameters": {"combination": "svd"}}, "write `rank`"),
        ({"parameters": {"rank": 3}}, "only svd takes a rank"),
        ({"parameters": {"combination": "cta"}}, "did you mean `cat`|combination"),
        ({"parameters": {"density": 0.3}}, "has no parameter density"),
    ],
)
def test_invalid_recipes_are_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    values = {"stage": "merge", "merge_method": "lora_combine", "models": list_models(1, 1), **changes}
    with pytest.raises(RecipeError, match=match):
        load_dict(values, base_dir=tmp_path, where="test")
