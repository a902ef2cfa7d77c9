"""A model built without weights and filled from files equals the model loaded as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import ModelError
from posttrain.models import load, slices, tiny
from posttrain.recipe.sections import Lora, Model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model in three files."""
    model, tokenizer = tiny.build(1)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    tokenizer.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    return tmp_path


@pytest.mark.parametrize("more", [{}, {"lora": Lora(rank=4)}, {"dtype": "bfloat16"}, {"gradient_checkpointing": True}])
def test_filled_model_equals_the_loaded_model(folder: Path, more: dict[str, Any]) -> None:
    """Weights, types, trainable parameters, the random values of a fresh adapter, buffers, ties, tokens and modes."""
    section = Model(path=str(folder), device="cpu", **more)
    expected = load.load(section, Path(), seed=3, training=True)
    unfilled = slices.build_empty(section, Path(), seed=3)
    assert unfilled is not None
    found = unfilled.loaded
    assert not any(p.abs().sum() for n, p in found.model.named_parameters() if "lora_A" not in n)
    slices.read_local_weights(unfilled)
    for named in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(of.model, named)()) for of in (found, expected))
        assert ours.keys() == theirs.keys() and ours
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype and ours[name].requires_grad == value.requires_grad, name
            assert torch.equal(ours[name], value), name
    assert found.model.get_output_embeddings().weight is found.model.get_input_embeddings().weight
    same = ("eos_ids", "pad_id", "half", "source", "window", "is_lora")
    assert [getattr(found, name) for name in same] == [getattr(expected, name) for name in same]
    assert found.model.training and found.origin == expected.origin
    ids = torch.arange(10, 20)[None]
    assert torch.equal(found.model(ids).logits, expected.model(ids).logits)


def test_weights_stored_under_other_names_are_loaded_whole(folder: Path, tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    def unfilled(**section: Any) -> Any:
        return slices.build_empty(Model(device="cpu", **section), Path(), seed=0)

    assert unfilled(path="tiny") is None
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=2, vocab_size=200, eos_token_id=2)
    experts = tmp_path / "experts"
    MixtralForCausalLM(config).save_pretrained(experts)  # its experts are one tensor in memory, and one each in files
    tiny.build_tokenizer().save_pretrained(experts)
    assert unfilled(path=str(experts)) is None
    quantised = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(quantised))
    assert unfilled(path=str(folder)) is None


def test_skeleton_model_needs_no_attention_package(folder: Path) -> None:
    """`posttrain plan` on a machine without flash-attn; a model that is filled later needs it."""
    section = Model(path=str(folder), device="cpu", attention="flash_attention_2")
    assert load.build_skeleton(section, Path(), training=True) is not None
    with pytest.raises(ModelError, match="flash_attention_2 does not work here"):
        slices.build_empty(section, Path(), seed=0)


MEASURE = """
import json, sys
from pathlib import Path
from posttrain.run import ranks
ranks.end_with_launcher()
from posttrain.recipe.sections import Model, Parallel
from posttrain.train import distributed, sharding
status = Path("/proc/self/status")
def most():
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 2**20
with distributed.join_process_group():
    before = most()
    section = Model(path=sys.argv[1], device="cpu", dtype="float32", parallel=Parallel())
    loaded = sharding.load(section, Path(), seed=0)
    found = distributed.gather(most() - before)
    total = sum(p.full_tensor().double().sum().item() for p in loaded.model.parameters())
    if distributed.is_main():
        Path(sys.argv[2]).write_text(json.dumps({"gib": found, "total": total}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read in /proc")
def test_rank_holds_only_its_share_while_loading(tmp_path: Path) -> None:
    """A random model of 2 GiB on four ranks: each takes at most 1.3 times its share, and 1 GiB, on top of a process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny.build_tokenizer()
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape)
    model = LlamaForCausalLM(config).float()
    total = sum(p.double().sum().item() for p in model.parameters())
    gib = sum(p.nbytes for p in model.parameters()) / 2**30
    model.save_pretrained(tmp_path / "model", max_shard_size="500MB")
    tokenizer.save_pretrained(tmp_path / "model")
    del model
    (tmp_path / "measure.py").write_text(MEASURE)
    command = [str(tmp_path / "measure.py"), str(tmp_path / "model"), str(tmp_path / "found.json")]
    start = f"from posttrain.run import ranks; import sys; sys.exit(ranks.launch([sys.executable, *{command!r}], 4))"
    subprocess.run([sys.executable, "-c", start], check=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert gib > 2 and max(found["gib"]) <= 1.3 * gib / 4 + 1, found
    assert found["total"] == pytest.approx(total, rel=1e-9)
