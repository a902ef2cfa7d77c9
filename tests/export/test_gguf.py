"""GGUF export: written, read back by the loader behind `model.path: FILE.gguf`, and compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from posttrain.errors import ModelError
from posttrain.export import gguf_model, gguf_tokenizer
from posttrain.models.load import LoadedModel, config_of, load, load_eos_ids, load_tokenizer, read_gguf_once
from posttrain.models.save import probe_logits
from posttrain.recipe.sections import Model

from .conftest import byte_level

FolderOf = Callable[..., Path]


def load_model(path: Path, dtype: str = "float32") -> LoadedModel:
    return load(Model.model_validate({"path": str(path), "device": "cpu", "dtype": dtype}), path.parent)


def write_gguf(path: Path, dtype: str, file: Path, stored: str = "float32") -> dict[str, Any]:
    model = load_model(path, stored)
    gguf_model.write(model, file, dtype, {"name": "mine", "license": "mit", "base": "me/base"})
    return gguf_model.verify(model, file, dtype)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_float32_gives_the_same_model(folder_of: FolderOf, tmp_path: Path, kind: str) -> None:
    folder, file = folder_of(kind), tmp_path / "m.gguf"
    report = write_gguf(folder, "float32", file)
    assert report["logit_gap"] < 1e-5
    before, after = load_model(folder), load_model(file)
    assert after.eos_ids == before.eos_ids and after.tokenizer.chat_template == before.tokenizer.chat_template
    assert (after.model.lm_head.weight is after.model.model.embed_tokens.weight) == kind.startswith("qwen")
    gap = (probe_logits(after.model, after.tokenizer) - probe_logits(before.model, before.tokenizer)).abs().max()
    assert gap < 1e-3
    assert report["weights"] == len(list(before.model.parameters()))


def test_loading_parses_the_gguf_file_once(
    folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(folder_of("llama"), "float32", tmp_path / "m.gguf")
    parsed: list[Path] = []
    parse = GGUFReader.__init__
    monkeypatch.setattr(GGUFReader, "__init__", lambda self, path: (parsed.append(Path(path)), parse(self, path))[1])
    load_model(tmp_path / "m.gguf")
    assert parsed == [tmp_path / "m.gguf"]
    load_model(tmp_path / "m.gguf")
    assert len(parsed) == 2, "a file may be written anew"
    section = Model(path=str(tmp_path / "m.gguf"))
    with read_gguf_once(section, tmp_path):
        tokenizer = load_tokenizer(section, tmp_path)
        assert load_eos_ids(section, tmp_path, tokenizer)
        config_of(section, tmp_path)
    assert len(parsed) == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_other_types_round_every_matrix_once(folder_of: FolderOf, tmp_path: Path, dtype: str) -> None:
    folder, file = folder_of("qwen2"), tmp_path / "m.gguf"
    report = write_gguf(folder, dtype, file)
    assert 0 < report["logit_gap"] < 0.05
    before, after = load_model(folder).model, load_model(file).model
    one, other = before.model.layers[0].mlp.up_proj.weight, after.model.layers[0].mlp.up_proj.weight
    if dtype == "q8_0":
        largest = one.detach().reshape(-1, 32).abs().amax(1, keepdim=True)
        step = largest / 127
        # half a step by rounding, and 127 steps by the error of the scale, which is a float16: 2 ** -11 of it at most
        assert ((other - one).reshape(-1, 32).abs() <= step * (0.501 + 127 / 2**11)).all()
    else:
        assert torch.equal(other, one.to(getattr(torch, dtype)).float())
    assert torch.equal(after.model.norm.weight, before.model.norm.weight), "vectors stay float32"


def test_row_length_not_a_multiple_of_32_is_stored_as_float16(folder_of: FolderOf, tmp_path: Path) -> None:
    folder, file = folder_of("llama", intermediate_size=80), tmp_path / "m.gguf"
    write_gguf(folder, "q8_0", file)
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")
    assert types["output_norm.weight"] == "F32"


def test_gguf_metadata(folder_of: FolderOf, tmp_path: Path) -> None:
    """Keys by which llama.cpp loads the file; expected values are written by hand."""
    file = tmp_path / "m.gguf"
    write_gguf(folder_of("llama", dtype=torch.bfloat16), "bfloat16", file, "bfloat16")
    reader = GGUFReader(file)
    said = {key: field.contents() for key, field in reader.fields.items()}
    numbers = {
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 500000.0,
        "llama.vocab_size": 308,
        "general.file_type": 32,
        "tokenizer.ggml.eos_token_id": 302,
        "tokenizer.ggml.padding_token_id": 300,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {key: said[key] for key in numbers} == numbers
    texts = ("general.architecture", "general.name", "general.license", "general.base_model.0.name")
    assert [said[key] for key in texts] == ["llama", "mine", "mit", "me/base"]
    assert (said["tokenizer.ggml.model"], said["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    tokens, types = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    assert (tokens[300:], types[300:]) == (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "[PAD305]", "[PAD306]", "[PAD307]"],
        [3, 3, 3, 4, 4, 5, 5, 5],
    )
    assert set(types[:300]) == {1} and len(tokens) == len(types) == 308


def test_rotary_pairs_of_llama_are_interleaved(folder_of: FolderOf, tmp_path: Path) -> None:
    """Row 1 of a head of 16 in llama.cpp's order is row 8 here: the partner of row 0."""
    folder, file = folder_of("llama"), tmp_path / "m.gguf"
    write_gguf(folder, "float32", file)
    (stored,) = (t for t in GGUFReader(file).tensors if t.name == "blk.1.attn_k.weight")
    own = load_model(folder).model.model.layers[1].self_attn.k_proj.weight.detach().numpy()
    assert np.array_equal(stored.data[:4], own[[0, 8, 1, 9]])
    assert np.array_equal(stored.data[16:18], own[[16, 24]])


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("qwen3", {"head_dim": 16}, "its head_dim is 16, and reading the file gives 128"),
        ("mistral", {"sliding_window": 64}, "sliding window of 64"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            r"positions are scaled \(rope_type linear\)",
        ),
        ("phi", {}, "its architecture is phi"),
    ],
)
def test_models_not_representable_as_gguf_are_refused(
    folder_of: FolderOf, tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said) as error:
        write_gguf(folder_of(kind, **changes), "float32", tmp_path / "m.gguf")
    assert "convert_hf_to_gguf.py" in str(error.value) and "--to merged" in str(error.value)


def test_weight_beyond_float16_is_refused(folder_of: FolderOf, tmp_path: Path) -> None:
    model = load_model(folder_of("llama"))
    with torch.no_grad():
        model.model.model.layers[0].mlp.up_proj.weight[3, 4] = 1e5
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight has a weight above 65504(.|\n)*--dtype bfloat16"):
        gguf_model.write(model, tmp_path / "m.gguf", "float16", {"name": "m"})


@pytest.mark.parametrize("fault", ["weight", "tokens"])
def test_file_that_differs_from_the_model_is_detected(folder_of: FolderOf, tmp_path: Path, fault: str) -> None:
    model, file = load_model(folder_of("llama")), tmp_path / "m.gguf"
    gguf_model.write(model, file, "float32", {"name": "m"})
    if fault == "weight":
        with torch.no_grad():
            model.model.model.layers[1].self_attn.q_proj.weight[0, 0] += 1e-3
    else:
        model.tokenizer._tokenizer = byte_level(merges=[])._tokenizer
    with pytest.raises(
        ModelError, match=r"weight model\.layers\.1\.self_attn\.q_proj" if fault == "weight" else "different ids"
    ):
        gguf_model.verify(model, file, "float32")


@pytest.mark.parametrize(
    ("split", "changes", "said"),
    [
        ("odd", {}, "splits text in a way for which posttrain knows no name"),
        ("qwen2", {"ignore_merges": True}, r"merges otherwise than llama.cpp's `qwen2`"),
        ("qwen2", {"byte_fallback": True}, r"no byte-level BPE \(BPE, byte_fallback\)"),
    ],
)
def test_tokenizers_without_a_gguf_name_are_refused(split: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        gguf_tokenizer.build_vocabulary(byte_level(split, **changes), 400, gguf_model.unsupported_error)


@pytest.mark.parametrize(("split", "name"), [("qwen2", "qwen2"), ("smollm", "smollm"), ("plain", "gpt-2")])
def test_names_of_splits(split: str, name: str) -> None:
    assert gguf_tokenizer.build_vocabulary(byte_level(split), 310, gguf_model.unsupported_error).pre == name


def test_bos_flag_is_set_only_if_tokenizer_and_template_write_bos() -> None:
    from tokenizers.processors import TemplateProcessing

    adding = byte_level(template=None)
    adding.add_special_tokens({"bos_token": "<|endoftext|>"})
    assert not gguf_tokenizer.adds_bos(adding)
    adding._tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", adding.bos_token_id)]
    )
    assert gguf_tokenizer.adds_bos(adding)
    adding.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert not gguf_tokenizer.adds_bos(adding), "chats are trained on without it"
    adding.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert gguf_tokenizer.adds_bos(adding)
