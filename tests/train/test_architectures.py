"""Checkpoints and final models of transformers' architectures, many of which store weights under other names or in
other pieces than they use in computation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM

from posttrain.errors import RunError
from posttrain.models import adapters
from posttrain.models.load import LoadedModel, load
from posttrain.models.save import save
from posttrain.models.weights import weight_stream
from posttrain.recipe.sections import Model
from posttrain.recipe.training_sections import Optim
from posttrain.train import checkpoint, optim, preference, sft

from .families import save_family

IDS = torch.tensor([[1, *range(11, 22)]])
RENAMED = (  # stored weights have other names than modules, or are in other pieces
    *("gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "phimoe", "deepseek_v2", "deepseek_v3"),
    *("ernie4_5_moe", "granitemoe", "hunyuan_v1_moe", "minimax", "qwen3_next", "dots1", "laguna", "gemma3"),
)
SAME = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "phi3",
    "cohere",
    "olmo2",
    "gpt_oss",
    "opt",
)
RARE = (  # another half of a minute
    *(
        "afmoe",
        "aria_text",
        "exaone_moe",
        "flex_olmo",
        "granitemoeshared",
        "hy_v3",
        "mellum",
        "minimax_m2",
        "solar_open",
    ),
    *("olmo_hybrid", "qwen3_5_moe_text", "deepseek_v4", "deepseek_v32", "camembert"),
    *("bloom", "codegen", "falcon", "glm", "glm4", "gptj", "granite", "helium", "lfm2", "phi", "nemotron"),
    *("persimmon", "recurrent_gemma", "smollm3", "stablelm", "starcoder2", "xglm"),
)
FAMILIES = [*RENAMED, *SAME, *(pytest.param(kind, marks=pytest.mark.slow) for kind in RARE)]


def start_training(base: Path, **keys: Any) -> tuple[LoadedModel, Optimizer]:
    section = Model.model_validate({"path": str(base), "device": "cpu", **keys})
    loaded = load(section, base, training=True)
    return loaded, optim.build(loaded.model, Optim(lr=1e-3))


def train(loaded: LoadedModel, optimizer: Optimizer) -> None:
    torch.manual_seed(3)
    loaded.model.train()
    loaded.model(input_ids=IDS, labels=IDS.clone(), use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def as_saved(streamed: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return what an engine gets with the names that transformers saves (it drops a level of a vision tower's
    names)."""
    return {name.replace("vision_tower.vision_model.", "vision_tower."): weight for name, weight in streamed}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", FAMILIES)
def test_run_resumes_exactly_and_final_model_loads_elsewhere(kind: str, tmp_path: Path) -> None:
    """Full training: the checkpoint holds every weight and moment; it and the final model load elsewhere with the
    published names of the architecture; an engine gets the final model's weights."""
    base = save_family(kind, tmp_path / "base")
    loaded, optimizer = start_training(base)
    train(loaded, optimizer)
    checkpoint.save(tmp_path / "checkpoints", checkpoint.State(step=1), loaded, optimizer, 1)
    saved = weights(loaded.model)
    train(loaded, optimizer)
    following = weights(loaded.model)

    again, another = start_training(base)
    assert not equal(weights(again.model), saved)
    state = checkpoint.restore(tmp_path / "checkpoints", again, another)
    assert state is not None and state.step == 1
    assert equal(weights(again.model), saved)
    train(again, another)
    assert equal(weights(again.model), following)

    folder = tmp_path / "checkpoints" / "step-00000001"
    assert read_weights(folder).keys() == read_weights(base).keys()
    if kind in RENAMED:
        assert not read_weights(base).keys() <= saved.keys()
    assert equal(weights(AutoModelForCausalLM.from_pretrained(folder)), saved)
    assert save(loaded, tmp_path / "final")["logit_gap"] < 1e-5
    assert read_weights(tmp_path / "final").keys() == read_weights(base).keys()
    elsewhere = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    with torch.no_grad():
        assert torch.equal(elsewhere.eval()(input_ids=IDS).logits, loaded.model.eval()(input_ids=IDS).logits)
        with weight_stream(loaded.model) as named:
            assert equal(as_saved(named), read_weights(tmp_path / "final"))


def test_model_loaded_from_module_names_is_saved_with_published_names(tmp_path: Path) -> None:
    """Other software writes such folders; a model that was read without renaming would be written unchanged."""
    base = save_family("mixtral", tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.save_pretrained(tmp_path / "modules", save_original_format=False)
    (tmp_path / "modules" / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    (tmp_path / "modules" / "tokenizer_config.json").write_bytes((base / "tokenizer_config.json").read_bytes())
    assert read_weights(tmp_path / "modules").keys() != read_weights(base).keys()
    loaded, _ = start_training(tmp_path / "modules")
    save(loaded, tmp_path / "final")
    assert equal(read_weights(tmp_path / "final"), read_weights(base))


def test_optimizer_moments_are_matched_by_name(tmp_path: Path) -> None:
    """Parameters of a checkpoint may come in another order, by another version of torch or transformers."""
    base = save_family("llama", tmp_path / "base")
    loaded, optimizer = start_training(base)
    train(loaded, optimizer)
    checkpoint.save(tmp_path / "checkpoints", checkpoint.State(step=1), loaded, optimizer, 1)
    moments = torch.load(tmp_path / "checkpoints/step-00000001/optimizer.pt", weights_only=True)
    for group, names in zip(moments["param_groups"], moments["names"], strict=True):
        group["params"].reverse()
        names.reverse()
    again, another = start_training(base)
    own = checkpoint._parameter_names(another, again.model, None)
    another.load_state_dict(checkpoint._match_by_name(moments, own, tmp_path))
    named = {id(p): n for n, p in loaded.model.named_parameters()}
    expected = {named[id(p)]: state["exp_avg"] for p, state in optimizer.state.items()}
    for name, parameter in again.model.named_parameters():
        assert torch.equal(another.state[parameter]["exp_avg"], expected[name])


def test_moments_of_other_weights_are_refused(tmp_path: Path) -> None:
    loaded, optimizer = start_training(save_family("llama", tmp_path / "base"))
    moments = {**optimizer.state_dict(), "names": [["a"], ["b"]]}
    with pytest.raises(RunError, match=r"has the optimizer state of other weights, e.g. a"):
        checkpoint._match_by_name(moments, checkpoint._parameter_names(optimizer, loaded.model, None), tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    loaded, optimizer = start_training(save_family("mixtral", tmp_path / "base"))
    checkpoint.save(tmp_path / "checkpoints", checkpoint.State(step=1), loaded, optimizer, 1)
    other, _ = start_training(save_family("qwen3_moe", tmp_path / "other"))
    with pytest.raises(RunError, match=r"step-00000001 cannot be loaded: .*"):
        checkpoint.load_weights(other, tmp_path / "checkpoints" / "step-00000001")


ADAPTED = ("llama", "gpt_neox", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3", "qwen3_next")
ROUTED = ("phimoe", "llama4_text")  # whose routers are linear layers by class, and return more than a product


@pytest.mark.parametrize("kind", [*ADAPTED, *ROUTED])
def test_an_adapter_goes_on_and_is_what_peft_loads(kind: str, tmp_path: Path) -> None:
    """The save is proven by PEFT on the base; merged, the adapter is a model under published names."""
    base = save_family(kind, tmp_path / "base")
    loaded, optimizer = start_training(base, lora={"rank": 2})
    for _ in range(2):
        train(loaded, optimizer)
    checkpoint.save(tmp_path / "checkpoints", checkpoint.State(step=2), loaded, optimizer, 1)
    saved = weights(loaded.model)
    again, another = start_training(base, lora={"rank": 2})
    checkpoint.restore(tmp_path / "checkpoints", again, another)
    assert equal(weights(again.model), saved)
    train(loaded, optimizer)
    train(again, another)
    assert equal(weights(again.model), weights(loaded.model))

    assert save(loaded, tmp_path / "final")["logit_gap"] < 1e-5
    merged = load(Model(path=str(tmp_path / "final"), device="cpu"), tmp_path)
    assert save(merged, tmp_path / "dense")["logit_gap"] < 1e-5
    with torch.no_grad():
        expected = loaded.model.eval()(input_ids=IDS).logits
        assert torch.allclose(merged.model(input_ids=IDS).logits, expected, atol=1e-4)
        with weight_stream(loaded.model, merged=True) as named:
            found, dense = as_saved(named), read_weights(tmp_path / "dense")
    assert found.keys() == dense.keys() == read_weights(base).keys()
    assert all(torch.allclose(found[name], dense[name], atol=1e-6) for name in dense)


CHANGED = {"dtype", "transformers_version"}  # by every save
EXPERTS = ("mixtral", "gpt_oss", "phimoe", "granitemoe", "llama4_text")


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("kind", ["llama", *EXPERTS])
def test_training_leaves_the_configuration_as_it_was(
    sft_recipe: Any, dpo_recipe: Any, opened: Any, kind: str, stage: str, tmp_path: Path, capsys: Any
) -> None:
    """TRL switches the router's loss on, and the cache off, in the configuration that the model is saved with: every
    later user would compute that loss, and generate without a cache. And what TRL takes for granted is not there in
    every architecture: how many experts it has, what stands below the head."""
    base = save_family(kind, tmp_path / "base")
    recipe = {"sft": sft_recipe, "dpo": dpo_recipe}[stage]
    with opened() as directory:
        run = {"sft": sft, "dpo": preference}[stage].run
        run(recipe(model={"path": str(base), "device": "cpu"}, run={"steps": 1, "save_every": 1}), directory)
    before, *after = (
        json.loads((folder / "config.json").read_text())
        for folder in (base, tmp_path / "run/final", tmp_path / "run/checkpoints/step-00000001")
    )
    for config in after:
        assert {key for key in before if before[key] != config.get(key)} <= CHANGED
        assert set(config) <= set(before)
    left_out = "load-balancing loss is left out" in " ".join(capsys.readouterr().err.split())
    assert left_out == (stage == "sft" and kind in ("phimoe", "granitemoe", "llama4_text"))


def test_router_loss_of_the_configuration_is_switched_off_in_passes(tmp_path: Path) -> None:
    base = save_family("mixtral", tmp_path / "base", output_router_logits=True)
    assert not load(Model(path=str(base), device="cpu"), tmp_path).model.config.output_router_logits


@pytest.mark.parametrize("kind", ["phimoe", "llama4_text", "falcon"])
def test_all_linear_selects_every_matrix_product_layer(kind: str, tmp_path: Path) -> None:
    """Routers are linear layers by class but return more than a product; Falcon's layers are a class of their own."""
    loaded, _ = start_training(save_family(kind, tmp_path / "base"), lora={"rank": 2})
    adapted = {name.rpartition(".")[2] for name in adapters.layers_of(loaded.model.get_base_model())}
    assert {"phimoe": "q_proj", "llama4_text": "q_proj", "falcon": "query_key_value"}[kind] in adapted
    assert not {"router", "gate"} & adapted
