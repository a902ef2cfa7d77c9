"""Saved models work elsewhere: plain transformers, same logits, generation stops at EOS; adapters; atomic
replacement.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import ModelError, RunError
from posttrain.models import adapters
from posttrain.models import save as saving
from posttrain.models.load import LoadedModel
from posttrain.models.merge_adapter import merged_copy
from posttrain.models.save import probe_logits, save
from posttrain.models.save_adapter import merged_note
from posttrain.train.reference import reference_policy

Load = Callable[..., LoadedModel]


def move(model: Any, scale: float = 0.05) -> None:
    """Change every trainable weight, as training would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))


def logits_elsewhere(folder: Path) -> torch.Tensor:
    """Compute the probe logits with plain transformers."""
    return probe_logits(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


def test_saved_full_model_gives_the_same_logits(loaded: Load, tmp_path: Path) -> None:
    model = loaded()
    move(model.model)
    report = save(model, tmp_path / "out")
    assert (report["kind"], report["logit_gap"]) == ("full", 0.0)
    assert report["probe_end"] in ("stop", "length")
    assert report["bytes"] == sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert torch.equal(logits_elsewhere(tmp_path / "out"), probe_logits(model.model, model.tokenizer))
    assert model.model.training
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (2, 0)
    assert not list(tmp_path.glob("out.*"))


def test_model_trained_in_bfloat16_is_saved_in_bfloat16(loaded: Load, plain: Path, tmp_path: Path) -> None:
    model = loaded(plain, dtype="bfloat16")
    move(model.model)
    report = save(model, tmp_path / "out")
    assert {v.dtype for v in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert report["logit_gap"] == 0.0  # with the same arithmetic, which differs from autocast's
    with model.autocast():
        assert not torch.equal(logits_elsewhere(tmp_path / "out"), probe_logits(model.model, model.tokenizer))
    assert all(p.dtype == torch.float32 for p in model.model.parameters())  # the master weights are unchanged


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_embeddings_stay_tied_and_are_stored_once(loaded: Load, tmp_path: Path, dtype: str) -> None:
    model = loaded(dtype=dtype)
    move(model.model)
    save(model, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_several_end_tokens_are_saved_unchanged(loaded: Load, plain: Path, tmp_path: Path) -> None:
    (plain / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    save(loaded(plain), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert config["eos_token_id"] == [2, 5]  # and not the padding token
    assert loaded(tmp_path / "out").eos_ids == (2, 5)


def test_adapter_saves_end_tokens_missing_from_its_base(loaded: Load, plain: Path, tmp_path: Path) -> None:
    """The base's generation config names one end token, and its model config another."""
    (plain / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert save(loaded(plain, lora={"rank": 4}), tmp_path / "out")["kind"] == "adapter"
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert config["eos_token_id"] == [2, 5]


def test_lora_over_tiny_is_saved_merged_and_as_an_adapter(loaded: Load, tmp_path: Path) -> None:
    model = loaded(lora={"rank": 4, "targets": ["q_proj", "down_proj"]})
    before = {k: v.clone() for k, v in model.model.state_dict().items()}
    move(model.model)
    moved = {k: v.clone() for k, v in model.model.state_dict().items()}
    report = save(model, tmp_path / "out")
    assert report["kind"] == "merged" and report["logit_gap"] < 1e-5
    assert torch.allclose(logits_elsewhere(tmp_path / "out"), probe_logits(model.model, model.tokenizer), atol=1e-4)
    assert json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())["base_model_name_or_path"] is None
    assert all(torch.equal(v, moved[k]) for k, v in model.model.state_dict().items())  # the live model is unchanged
    saved = load_file(tmp_path / "out" / "model.safetensors")
    base = {k.removeprefix("base_model.model.").replace(".base_layer", ""): v for k, v in before.items()}
    changed = {k for k, v in saved.items() if not torch.equal(v, base[k])}
    assert changed == {k for k in saved if "q_proj" in k or "down_proj" in k}


def test_lora_merge_by_hand(loaded: Load) -> None:
    """W' = W + (alpha / rank) B A, here with alpha / rank = 8 / 4 = 2."""
    model = loaded(lora={"rank": 4, "alpha": 8, "targets": ["q_proj"]})
    move(model.model)
    layer = model.model.get_base_model().model.layers[1].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    merged = merged_copy(model.model).state_dict()["model.layers.1.self_attn.q_proj.weight"]
    assert torch.allclose(merged, layer.base_layer.weight + 2 * b @ a, atol=1e-6)


def test_lora_over_a_directory_is_saved_as_an_adapter(loaded: Load, plain: Path, tmp_path: Path) -> None:
    model = loaded(plain, lora={"rank": 4})
    move(model.model)
    assert save(model, tmp_path / "adapter")["kind"] == "adapter"
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(plain)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    expected = probe_logits(model.model, model.tokenizer)
    assert torch.allclose(logits_elsewhere(tmp_path / "adapter"), expected, atol=1e-5)
    again = loaded(tmp_path / "adapter", training=False)  # ours merges it for speed
    assert not again.is_lora
    assert torch.allclose(probe_logits(again.model, again.tokenizer), expected, atol=1e-4)


def test_each_of_several_adapters_is_saved_as_a_folder_for_peft(loaded: Load, plain: Path, tmp_path: Path) -> None:
    model = loaded(plain, lora={"rank": 2, "adapters": ["actor", "critic"]}, training=True)
    move(model.model)
    report = save(model, tmp_path / "out")
    assert report["kind"] == "adapters" and set(report["adapters"]) == {"actor", "critic"}
    for name, part in report["adapters"].items():
        assert part["kind"] == "adapter" and part["logit_gap"] < 1e-5
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(plain), tmp_path / "out" / name)
        adapters.activate(model.model, name)
        assert torch.allclose(
            probe_logits(again, model.tokenizer), probe_logits(model.model, model.tokenizer), atol=1e-4
        )
    with reference_policy(model)() as base:
        expected = probe_logits(AutoModelForCausalLM.from_pretrained(plain), model.tokenizer)
        assert torch.allclose(probe_logits(base, model.tokenizer), expected, atol=1e-4)
    assert all(p.requires_grad for own in adapters.parameters_by_adapter(model.model).values() for p in own)
    with pytest.raises(ModelError, match=r"out holds no model(.|\n)*out/actor, .*out/critic"):
        loaded(tmp_path / "out")


def test_fresh_adapter_on_an_adapter_starts_as_the_old_policy(loaded: Load, plain: Path, tmp_path: Path) -> None:
    """The frozen base without the fresh adapter is the older adapter's policy: the reference of a KL term."""
    first = loaded(plain, lora={"rank": 4})
    move(first.model)
    save(first, tmp_path / "first")
    expected = probe_logits(first.model, first.tokenizer)
    second = loaded(tmp_path / "first", lora={"rank": 2})
    assert torch.allclose(probe_logits(second.model, second.tokenizer), expected, atol=1e-4)
    move(second.model)
    with second.model.disable_adapter():
        assert torch.allclose(probe_logits(second.model, second.tokenizer), expected, atol=1e-4)
    # Its base is not on disk, so it is saved whole.
    assert save(second, tmp_path / "second")["kind"] == "merged"
    full = loaded(tmp_path / "first")  # without lora: all weights are trained
    assert not full.is_lora and all(p.requires_grad for p in full.model.parameters())


def test_qlora_continues_an_adapter_with_it_as_the_reference(loaded: Load, plain: Path, tmp_path: Path) -> None:
    first = loaded(plain, lora={"rank": 4}, quantize="nf4")
    move(first.model)
    assert save(first, tmp_path / "first")["logit_gap"] < 1e-5  # reloaded over the same 4-bit base
    expected = probe_logits(first.model, first.tokenizer)
    second = loaded(tmp_path / "first", lora={"rank": 4}, quantize="nf4")
    assert set(second.model.peft_config) == {"default", "reference"}
    assert all(".default." in n for n, p in second.model.named_parameters() if p.requires_grad)
    move(second.model)
    assert not torch.allclose(probe_logits(second.model, second.tokenizer), expected, atol=1e-3)
    second.model.set_adapter("reference")
    assert torch.allclose(probe_logits(second.model, second.tokenizer), expected, atol=1e-5)
    second.model.set_adapter("default")
    save(second, tmp_path / "second")
    assert not (tmp_path / "second" / "reference").exists()
    with pytest.raises(ModelError, match=r"lora\.rank is 8, but the adapter .* has 4"):
        loaded(tmp_path / "first", lora={"rank": 8}, quantize="nf4")


def test_adapter_is_trained_further_if_the_recipe_says_so(loaded: Load, plain: Path, tmp_path: Path) -> None:
    first = loaded(plain, lora={"rank": 4, "alpha": 8})
    move(first.model)
    save(first, tmp_path / "first")
    expected = probe_logits(first.model, first.tokenizer)
    second = loaded(tmp_path / "first", lora={"continue": True})
    assert second.model.peft_config["default"].r == 4
    assert all(".default." in n for n, p in second.model.named_parameters() if p.requires_grad)
    assert torch.allclose(probe_logits(second.model, second.tokenizer), expected, atol=1e-5)
    assert (
        merged_note(second)
        == f"{tmp_path / 'first'} is an adapter: it is trained further, and its initial weights are the reference"
    )
    move(second.model)
    with reference_policy(second)() as reference:
        assert torch.allclose(probe_logits(reference, second.tokenizer), expected, atol=1e-5)
    moved = probe_logits(second.model, second.tokenizer)
    assert not torch.allclose(moved, expected, atol=1e-3)
    assert save(second, tmp_path / "second")["kind"] == "adapter"
    again = loaded(tmp_path / "second", training=False)
    assert torch.allclose(probe_logits(again.model, again.tokenizer), moved, atol=1e-4)


def test_continued_adapter_keeps_its_shape(loaded: Load, plain: Path, tmp_path: Path) -> None:
    first = loaded(plain, lora={"rank": 4, "alpha": 8})
    save(first, tmp_path / "first")
    with pytest.raises(ModelError, match=r"lora\.rank is 8, but the adapter .* has 4"):
        loaded(tmp_path / "first", lora={"continue": True, "rank": 8})
    with pytest.raises(ModelError, match=r"lora\.dropout is 0\.5, but the adapter .* has 0\.0"):
        loaded(tmp_path / "first", lora={"continue": True, "dropout": 0.5})
    with pytest.raises(ModelError, match=r"model\.lora\.continue: .*plain is not an adapter"):
        loaded(plain, lora={"continue": True})


def test_adapter_is_never_merged_into_4_bit_weights(loaded: Load, tmp_path: Path) -> None:
    """QLoRA over `tiny`: the saved weights are the dense base's plus the adapter, not the rounded ones."""
    model = loaded(lora={"rank": 4, "targets": ["q_proj"]}, quantize="nf4")
    move(model.model)
    assert save(model, tmp_path / "out")["kind"] == "merged"
    saved, base = load_file(tmp_path / "out" / "model.safetensors"), loaded().model.state_dict()
    assert torch.equal(saved["model.layers.0.self_attn.k_proj.weight"], base["model.layers.0.self_attn.k_proj.weight"])
    assert not torch.equal(
        saved["model.layers.0.self_attn.q_proj.weight"], base["model.layers.0.self_attn.q_proj.weight"]
    )


def test_existing_folder_is_replaced_only_by_a_complete_one(
    loaded: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded()
    save(model, tmp_path / "out")
    old = (tmp_path / "out" / "model.safetensors").read_bytes()
    move(model.model)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "sync_all", dies)
        with pytest.raises(KeyboardInterrupt):
            save(model, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == old
    save(model, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != old
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_weights_that_fail_verification_are_not_published(
    loaded: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded()
    monkeypatch.setattr(saving, "_write", lambda m, f, _: (m.model.save_pretrained(f), ("full", torch.ones(3, 110)))[1])
    with pytest.raises(RunError, match="other logits than the one in memory"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_smollm2_from_gguf_is_saved_and_reloaded(smollm2: LoadedModel, tmp_path: Path) -> None:
    """Real weights: dense after loading, pad = EOS retained, tied embeddings, and the saved model loads without
    `gguf`.
    """
    assert (smollm2.eos_ids, smollm2.pad_id) == ((2,), 2)
    assert smollm2.model.dtype == torch.float32
    move(smollm2.model, 0.01)
    report = save(smollm2, tmp_path / "out")
    assert report["kind"] == "merged" and report["logit_gap"] < 1e-3
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert (again.generation_config.eos_token_id, again.generation_config.pad_token_id) == (2, 2)
    adapter = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"].endswith("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.parametrize("n_positions", [64, 16, 2])
def test_model_with_few_positions_is_saved(loaded: Load, tmp_path: Path, n_positions: int) -> None:
    """The rendered probe and its generated continuation have more tokens than the model has positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from posttrain.models import tiny

    config = GPT2Config(
        vocab_size=114, n_embd=16, n_layer=2, n_head=2, n_positions=n_positions, bos_token_id=1, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "short")
    tiny.build_tokenizer().save_pretrained(tmp_path / "short")
    assert save(loaded(tmp_path / "short"), tmp_path / "out")["logit_gap"] == 0.0
