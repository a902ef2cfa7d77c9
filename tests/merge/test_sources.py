"""Inputs that are no dense directory: `tiny`, and an adapter that is folded into its base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import ModelError
from posttrain.merge.sources import drop_tied_copies, open_source
from posttrain.merge.tensors import Spec
from posttrain.models import tiny

Merge = Callable[..., dict[str, Any]]
QUERY = "model.layers.0.self_attn.q_proj"


def save_adapter(folder: Path, base: Path) -> torch.Tensor:
    """A rank-1 adapter on one matrix with B = 1, A = .25, alpha 2: it adds 2/1 * 1 * .25 = .5 to every entry."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=1, lora_alpha=2, target_modules=[QUERY], task_type="CAUSAL_LM"),
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.constant_(parameter, 0.25 if "lora_A" in name else 1.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return model.state_dict()[f"base_model.model.{QUERY}.base_layer.weight"]


def test_an_adapter_is_folded_into_its_base(models: Path, merge: Merge) -> None:
    """Average of base + adapter and base, by halves: .25 more in the adapted matrix, everything else as it was."""
    before = save_adapter(models / "lora", models / "base")
    summary = merge(merge_method="linear", models=[{"model": "lora"}, {"model": "base"}])
    merged, base = load_file(models / "run/final/model.safetensors"), load_file(models / "base/model.safetensors")
    torch.testing.assert_close(merged[f"{QUERY}.weight"], before + 0.25)
    assert summary["changed"] == 1
    assert all(torch.equal(merged[n], base[n]) for n in base if n != f"{QUERY}.weight")


def test_tiny_is_written_before_it_is_merged(models: Path, merge: Merge) -> None:
    merge(merge_method="linear", models=[{"model": "tiny"}, {"model": "a"}])
    merged, a = load_file(models / "run/final/model.safetensors"), load_file(models / "a/model.safetensors")
    state = tiny.build(0)[0].state_dict()
    for name, tensor in a.items():
        torch.testing.assert_close(merged[name], (state[name] + tensor) / 2)
    assert not (models / "run" / "inputs").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("some/model@v2", "download that revision, and name its folder"),
        ("base+lora", "name the adapter only: `lora`; its adapter_config"),
    ],
)
def test_mergekits_words_for_revisions_and_adapters(models: Path, name: str, hint: str) -> None:
    with pytest.raises(ModelError, match=hint):
        open_source(name, models, models / "scratch")


def test_a_directory_is_read_where_it_is(models: Path) -> None:
    source = open_source("a", models, models / "scratch")
    assert source.folder == source.origin == (models / "a").resolve()
    assert source.tied and source.vocabulary is not None and len(source.vocabulary) == len(tiny.build_tokenizer())
    assert not (models / "scratch").exists()


def test_only_a_copy_of_the_embedding_is_left_out() -> None:
    """`lm_head.weight` of the embedding's shape is its copy; of another shape it is a tensor of its own."""
    embedding, head = Spec(torch.float32, (9, 4)), Spec(torch.float32, (7, 4))
    assert drop_tied_copies({"embed.weight": embedding, "lm_head.weight": embedding}).keys() == {"embed.weight"}
    assert drop_tied_copies({"embed.weight": embedding, "lm_head.weight": head}).keys() == {
        "embed.weight",
        "lm_head.weight",
    }


ON_EMBEDDINGS: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 40, 41]},
    "kept tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ON_EMBEDDINGS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_adapter_of_peft_on_embeddings(tmp_path: Path, merge: Merge, *, tied: bool, kind: str) -> None:
    """Merged into its base, it is what PEFT computes with it; on tied embeddings the result is untied where it must."""
    base = tmp_path / "base"
    model, tokenizer = tiny.build(0)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(1.01 * model.lm_head.weight.detach())
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, **ON_EMBEDDINGS[kind]))
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    peft.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[1, 5, 40, 41, 60, 100, 109]])
    with torch.no_grad():
        under = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
        expected = under.eval()(input_ids=ids).logits
        merge(merge_method="linear", models=[{"model": "adapter"}])
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
        assert torch.allclose(found.eval()(input_ids=ids).logits, expected, atol=2e-5)
    assert found.config.tie_word_embeddings == (tied and kind in ("tokens", "kept tied"))
