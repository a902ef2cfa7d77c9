"""mergekit's `slices`: layers of models stacked to a model of another depth, or merged part by part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor

from posttrain.errors import MergeError
from posttrain.models import tiny

Merge = Callable[..., dict[str, Any]]
SHAPE = {"vocab_size": 110, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
         "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def save(folder: Path, seed: int, layers: int, kind: str = "Llama", **config: Any) -> None:
    """A tiny model in which no two tensors are equal."""
    torch.manual_seed(seed)
    made = getattr(transformers, f"{kind}Config")(**{**SHAPE, "num_hidden_layers": layers, **config})
    architecture = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, architecture)(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    save(tmp_path / "a", 0, 4, tie_word_embeddings=False)
    save(tmp_path / "b", 1, 5, tie_word_embeddings=False)
    return tmp_path


def read_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def go(merge: Merge, text: str, **values: Any) -> dict[str, Any]:
    return merge(**yaml.safe_load(text), **values)


LAYER = "model.layers.{}.{}"
PARTS = ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight")

STACK = """
merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 3]}]
  - sources: [{model: b, layer_range: [1, 5]}]
  - sources: [{model: a, layer_range: [3, 4]}]
"""


def test_layers_are_stacked_in_order(pair: Path, merge: Merge) -> None:
    """Embeddings are the first slice's, norm and head the last one's. transformers loads the 8 layers."""
    summary = go(merge, STACK)
    a, b, merged = (read_weights(pair / name) for name in ("a", "b", "run/final"))
    sources = [(a, 0), (a, 1), (a, 2), (b, 1), (b, 2), (b, 3), (b, 4), (a, 3)]
    for number, (model, layer) in enumerate(sources):
        for part in PARTS:
            assert torch.equal(merged[LAYER.format(number, part)], model[LAYER.format(layer, part)])
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(merged[name], a[name])
    assert json.loads((pair / "run/final/config.json").read_text())["num_hidden_layers"] == 8
    model = transformers.AutoModelForCausalLM.from_pretrained(pair / "run/final")
    assert len(model.model.layers) == 8
    assert summary["models"][1]["layers"] == [{"from": [1, 5], "to": [3, 7]}]


def test_the_last_line_says_what_was_stacked(pair: Path, merge: Merge, capsys: pytest.CaptureFixture[str]) -> None:
    go(merge, STACK)
    assert f"8 layers of 2 models stacked in {pair / 'run/final'}" in capsys.readouterr().err


def test_ends_come_from_the_first_and_the_last_slice(pair: Path, merge: Merge) -> None:
    go(merge, STACK.replace("[{model: a, layer_range: [3, 4]}]", "[{model: b, layer_range: [0, 1]}]"))
    a, b, merged = (read_weights(pair / name) for name in ("a", "b", "run/final"))
    assert torch.equal(merged["model.embed_tokens.weight"], a["model.embed_tokens.weight"])
    assert torch.equal(merged["model.norm.weight"], b["model.norm.weight"])
    assert torch.equal(merged["lm_head.weight"], b["lm_head.weight"])


def test_a_model_on_itself_of_an_architecture_with_other_words(tmp_path: Path, merge: Merge) -> None:
    """GPT-2: `n_layer`, and layers under `transformer.h.`."""
    save(tmp_path / "a", 0, 3, "GPT2", n_embd=16, n_layer=3, n_head=2, n_positions=32, vocab_size=110)
    source = "  - sources: [{model: a, layer_range: [0, 3]}]\n"
    go(merge, f"merge_method: passthrough\nslices:\n{source}{source}")
    assert json.loads((tmp_path / "run/final/config.json").read_text())["n_layer"] == 6
    a, merged = read_weights(tmp_path / "a"), read_weights(tmp_path / "run/final")
    assert torch.equal(merged["transformer.h.5.attn.c_attn.weight"], a["transformer.h.2.attn.c_attn.weight"])


def test_what_a_config_says_of_each_layer_is_stacked_too(tmp_path: Path, merge: Merge) -> None:
    """Qwen2 names a kind of attention for each layer: mergekit leaves the list as it was, which does not load."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    save(tmp_path / "a", 0, 3, "Qwen2", layer_types=kinds, sliding_window=4, use_sliding_window=True)
    one, two = ("  - sources: [{model: a, layer_range: [0, 2]}]\n", "  - sources: [{model: a, layer_range: [0, 3]}]\n")
    go(merge, f"merge_method: passthrough\nslices:\n{one}{two}")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "run/final")
    assert (config.num_hidden_layers, config.layer_types) == (5, [*kinds[:2], *kinds])


def test_layers_made_silent(pair: Path, merge: Merge) -> None:
    """Copies whose outputs are scaled to 0 change nothing: the logits are those of the model."""
    silent = "[{filter: o_proj, value: 0}, {filter: down_proj, value: 0}, {value: 1}]"
    text = f"""
merge_method: passthrough
slices:
  - sources: [{{model: a, layer_range: [0, 2]}}]
  - sources: [{{model: a, layer_range: [1, 2], parameters: {{scale: {silent}}}}}]
  - sources: [{{model: a, layer_range: [2, 4]}}]
"""
    assert go(merge, text)["probe"]["logit_gap"] < 1e-5
    assert not read_weights(pair / "run/final")["model.layers.2.mlp.down_proj.weight"].any()


def test_parts_are_merged_with_values_of_their_own(pair: Path, merge: Merge) -> None:
    """Lists run over the layers of their slice; of a slice of one layer they give the last value, outside of layers the
    first. What a source says goes before its slice, that before the merge."""
    text = """
merge_method: linear
slices:
  - sources:
      - {model: a, layer_range: [0, 2], parameters: {weight: [0.2, 0.8]}}
      - {model: b, layer_range: [3, 5]}
    parameters: {weight: 0.6}
  - sources:
      - {model: a, layer_range: [3, 4]}
      - {model: b, layer_range: [0, 1], parameters: {weight: [5, 3]}}
parameters: {weight: 1.0, normalize: false}
"""
    go(merge, text)
    a, b, merged = (read_weights(pair / name) for name in ("a", "b", "run/final"))
    expected = [(0.2, 0, 0.6, 3), (0.8, 1, 0.6, 4), (1.0, 3, 3.0, 0)]
    for number, (x, i, y, k) in enumerate(expected):
        for part in PARTS:
            whole = x * a[LAYER.format(i, part)] + y * b[LAYER.format(k, part)]
            torch.testing.assert_close(merged[LAYER.format(number, part)], whole)
    for name, x, y in (("model.embed_tokens.weight", 0.2, 0.6), ("model.norm.weight", 1, 5)):
        torch.testing.assert_close(merged[name], x * a[name] + y * b[name])


def test_a_slice_takes_differences_from_its_layers_of_the_base(pair: Path, merge: Merge) -> None:
    save(pair / "base", 2, 4, tie_word_embeddings=False)
    text = """
merge_method: task_arithmetic
base_model: base
slices:
  - sources:
      - {model: base, layer_range: [2, 4]}
      - {model: b, layer_range: [0, 2]}
parameters: {weight: 0.5}
"""
    go(merge, text)
    base, b, merged = (read_weights(pair / name) for name in ("base", "b", "run/final"))
    name = "mlp.up_proj.weight"
    start, other = base[LAYER.format(3, name)], b[LAYER.format(1, name)]
    torch.testing.assert_close(merged[LAYER.format(1, name)], start + 0.5 * (other - start))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("[1, 5]", "[1, 6]"), r"layer_range \[1, 6\] of b, which has 5 layers"),
        (("model: b", "model: wide"), r"model.layers.1.*wide.*\[32.*16"),
    ],
)
def test_slices_that_do_not_fit(pair: Path, merge: Merge, change: tuple[str, str], match: str) -> None:
    save(pair / "wide", 3, 5, tie_word_embeddings=False, hidden_size=32)
    with pytest.raises(MergeError, match=match):
        go(merge, STACK.replace(*change))
    assert not (pair / "run" / "final").exists()
