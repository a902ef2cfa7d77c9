"""The merge stage on real folders: values, files beside the weights, and refused inputs."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import Interrupted, MergeError, ModelError, RunError
from posttrain.merge.compatibility import Check

from .conftest import save_tiny

Merge = Callable[..., dict[str, Any]]
LINEAR = {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]}
EMBEDDING = "model.embed_tokens.weight"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = weights(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_linear_merge_from_disk_to_disk(models: Path, merge: Merge) -> None:
    """Weights 1 and 3: (a + 3b) / 4 for every tensor; norms and counts are in the summary and in the report."""
    summary = merge(
        merge_method="linear",
        models=[{"model": "a", "parameters": {"weight": 1.0}}, {"model": "b", "parameters": {"weight": 3.0}}],
    )
    a, b, merged = weights(models / "a"), weights(models / "b"), weights(models / "run" / "final")
    assert merged.keys() == a.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, (a[name] + 3 * b[name]) / 4, rtol=1e-6, atol=1e-7)
    norm = sum(float((b[n] - a[n]).double().square().sum()) for n in a) ** 0.5
    assert summary["models"][1]["delta_norm"] == pytest.approx(norm)
    assert summary["unchanged"] == [n for n in sorted(a) if torch.equal(a[n], b[n])] != []  # the norms are all 1
    assert summary["probe"]["logit_gap"] > 0
    assert json.loads((models / "run" / "final" / "merge_report.json").read_text()) == summary


def test_merged_model_is_complete(models: Path, merge: Merge) -> None:
    merge(**LINEAR)
    final = models / "run" / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    before = AutoTokenizer.from_pretrained(models / "a")
    messages = [{"role": "user", "content": "1+1"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == before.apply_chat_template(
        messages, tokenize=False
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert {p.name for p in (models / "run").iterdir()} & {"final.tmp", "inputs"} == set()


def test_task_arithmetic_with_mergekits_keys(models: Path, merge: Merge) -> None:
    """base + .5 * (1 * (a - base) - 2 * (b - base))."""
    summary = merge(
        merge_method="task_arithmetic",
        base_model="base",
        models=[{"model": "a"}, {"model": "b", "parameters": {"weight": -2.0}}],
        parameters={"lambda": 0.5},
    )
    base, a, b = (weights(models / name) for name in ("base", "a", "b"))
    merged = weights(models / "run" / "final")
    for name, tensor in merged.items():
        expected = base[name] + 0.5 * ((a[name] - base[name]) - 2 * (b[name] - base[name]))
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
    assert any("negative weight -2" in w for w in summary["warnings"])


@pytest.mark.usefixtures("models")
def test_base_that_is_one_of_two_models_is_noted(merge: Merge) -> None:
    summary = merge(
        merge_method="slerp", base_model="a", models=[{"model": "a"}, {"model": "b"}], parameters={"t": 0.5}
    )
    assert summary["base_model"]["model"] == "a"


def test_lambda_zero_gives_the_base_bit_for_bit(models: Path, merge: Merge) -> None:
    edit(models / "base", lambda t: t[EMBEDDING].view(-1)[:2].copy_(torch.tensor([-0.0, 1e-40])))
    merge(merge_method="task_arithmetic", base_model="base", models=[{"model": "a"}], parameters={"lambda": 0.0})
    base, merged = weights(models / "base"), weights(models / "run" / "final")
    assert all(torch.equal(merged[n].view(torch.int32), base[n].view(torch.int32)) for n in base)


def test_merging_a_model_with_itself_returns_it_with_a_note(models: Path, merge: Merge) -> None:
    summary = merge(merge_method="linear", models=[{"model": "a"}, {"model": "a"}, {"model": "a"}])
    a, merged = weights(models / "a"), weights(models / "run" / "final")
    assert all(torch.equal(merged[n], a[n]) for n in a)
    assert (summary["changed"], "a is given twice" in summary["warnings"]) == (0, True)


def test_shards_in_shards_out(models: Path, merge: Merge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs in different numbers of shards; output in shards of 100 kB that transformers reads through the index."""
    shutil.rmtree(models / "a")
    save_tiny(models / "a", 1, shard="100KB")
    assert len(list((models / "a").glob("*.safetensors"))) > 2
    monkeypatch.setattr("posttrain.merge.tensors.write.__defaults__", (100_000,))
    merge(**LINEAR)
    final = models / "run" / "final"
    assert len(list(final.glob("model-*-of-*.safetensors"))) > 2
    a, b, loaded = weights(models / "a"), weights(models / "b"), AutoModelForCausalLM.from_pretrained(final)
    torch.testing.assert_close(loaded.state_dict()[EMBEDDING], (a[EMBEDDING] + b[EMBEDDING]) / 2)


def test_output_dtype(models: Path, merge: Merge) -> None:
    merge(**LINEAR, dtype="bfloat16")
    final = models / "run" / "final"
    assert {t.dtype for t in weights(final).values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(final, dtype="auto").dtype == torch.bfloat16


def test_mixed_dtypes_are_noted_and_the_first_models_dtype_is_kept(models: Path, merge: Merge) -> None:
    shutil.rmtree(models / "b")
    save_tiny(models / "b", 2, dtype=torch.bfloat16)
    merge(**LINEAR)
    assert {t.dtype for t in weights(models / "run" / "final").values()} == {torch.float32}


def test_a_stored_copy_of_a_tied_embedding_is_written_once(models: Path, merge: Merge) -> None:
    edit(models / "b", lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    merge(**LINEAR)
    assert "lm_head.weight" not in weights(models / "run" / "final")


def assert_refused(root: Path, merge: Merge, error: type[Exception], match: str, **values: Any) -> None:
    """Assert that the merge raises and leaves no model and no partial model."""
    with pytest.raises(error, match=match):
        merge(**{**LINEAR, **values})
    assert not (root / "run" / "final").exists() and not (root / "run" / "final.tmp").exists()


def test_other_vocabulary(models: Path, merge: Merge) -> None:
    """The same size, two tokens swapped: shapes are equal, and only the vocabulary differs."""
    path = models / "b" / "tokenizer.json"
    text = path.read_text()
    vocabulary = json.loads(text)["model"]["vocab"]
    document = json.loads(text)
    document["model"]["vocab"] = {**vocabulary, "1": vocabulary["2"], "2": vocabulary["1"]}
    path.write_text(json.dumps(document))
    assert_refused(
        models, merge, MergeError, r"2 tokens with another id in b than in a: '1' is id \d+ in a and id \d+ in b"
    )


def test_other_shapes_are_all_listed(models: Path, merge: Merge, capfd: pytest.CaptureFixture[str]) -> None:
    edit(models / "b", lambda t: t.update({"model.norm.weight": torch.ones(32)}))
    assert_refused(models, merge, MergeError, r"model\.norm\.weight \[32\] against \[64\]")
    assert "embeddings have" not in "".join(capfd.readouterr())  # both have the same rows


def test_missing_and_extra_tensors(models: Path, merge: Merge) -> None:
    edit(models / "b", lambda t: t.update({"extra": t.pop("model.norm.weight")}))
    assert_refused(models, merge, MergeError, r"b lacks model\.norm\.weight; b has extra, which a has not")


def test_other_architecture(models: Path, merge: Merge) -> None:
    edit_config(models / "b", architectures=["MistralForCausalLM"], model_type="mistral")
    assert_refused(models, merge, MergeError, "different architectures: LlamaForCausalLM, MistralForCausalLM")


def test_tied_and_untied(models: Path, merge: Merge) -> None:
    edit_config(models / "b", tie_word_embeddings=False)
    edit(models / "b", lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    assert_refused(models, merge, MergeError, "tied in some models and not in others")


def test_nan_in_an_input(models: Path, merge: Merge) -> None:
    edit(models / "b", lambda t: t["model.norm.weight"].__setitem__(3, float("nan")))
    assert_refused(models, merge, MergeError, r"^b  model\.norm\.weight holds 1 NaN or infinite values")


def test_overflow_of_the_output_dtype(models: Path, merge: Merge) -> None:
    for name in ("a", "b"):
        edit(models / name, lambda t, name=name: t["model.norm.weight"].fill_(1e5 + (name == "b")))
    assert_refused(models, merge, MergeError, r"model\.norm\.weight overflows float16", dtype="float16")


def test_truncated_shard(models: Path, merge: Merge) -> None:
    file = models / "b" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(models, merge, MergeError, "truncated shard")


def test_missing_shard(models: Path, merge: Merge) -> None:
    shutil.rmtree(models / "b")
    save_tiny(models / "b", 2, shard="100KB")
    next((models / "b").glob("model-00002*")).unlink()
    assert_refused(models, merge, MergeError, "missing shards: model-00002")


def test_pickled_weights(models: Path, merge: Merge) -> None:
    (models / "b" / "model.safetensors").rename(models / "b" / "pytorch_model.bin")
    assert_refused(models, merge, MergeError, r"pickled \.bin")


def test_quantised_weights(models: Path, merge: Merge) -> None:
    edit_config(models / "b", quantization_config={"quant_method": "bitsandbytes"})
    assert_refused(models, merge, MergeError, "quantised")


def test_weights_that_cancel(models: Path, merge: Merge) -> None:
    pair = [{"model": "a"}, {"model": "b", "parameters": {"weight": -1.0}}]
    assert_refused(models, merge, MergeError, "cannot be normalised", models=pair)


def test_weights_that_are_all_0(models: Path, merge: Merge) -> None:
    nothing = [{"model": name, "parameters": {"weight": 0.0}} for name in "ab"]
    assert_refused(models, merge, MergeError, r"(?s)cannot be normalised.*a weight that is not 0", models=nothing)


def test_table_reports_differing_values_as_different() -> None:
    assert Check("parameters", ["120,896", "113,856"]).verdict == "differs, allowed"
    assert Check("parameters", ["120,896", "120,896"]).verdict == "same"


def test_model_that_cancels_itself(models: Path, merge: Merge) -> None:
    pair = [{"model": "a"}, {"model": "a", "parameters": {"weight": -1.0}}]
    assert_refused(
        models,
        merge,
        MergeError,
        "a is given 2 times with weights that cancel",
        merge_method="task_arithmetic",
        base_model="base",
        models=pair,
    )


def test_differences_that_the_dtype_cannot_hold(models: Path, merge: Merge) -> None:
    """c = a * (1 + 1e-5) with a exact in bfloat16, which has 8 bits: the difference vanishes."""
    edit(models / "a", lambda t: t.update({n: v.bfloat16().float() for n, v in t.items()}))
    shutil.copytree(models / "a", models / "c")
    edit(models / "c", lambda t: t.update({n: v * (1 + 1e-5) for n, v in t.items()}))
    assert_refused(
        models,
        merge,
        MergeError,
        "too small for the output dtype",
        models=[{"model": "a"}, {"model": "c"}],
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"merge_method": "task_arithmetic"}, "base_model"),
        ({"parameters": {"lambda": 0.5}}, "linear has no parameter lambda"),
        ({"models": [{"model": "a", "parameters": {"normalize": True}}]}, "top-level"),
        ({"tokenizer_source": "c"}, "none of the models"),
    ],
)
def test_invalid_recipes_are_refused(models: Path, merge: Merge, values: dict[str, Any], match: str) -> None:
    assert_refused(models, merge, MergeError, match, **values)


@pytest.mark.parametrize("name", ["run", "./nowhere", "nowhere.gguf"])
def test_missing_model_is_reported(models: Path, merge: Merge, name: str) -> None:
    assert_refused(models, merge, ModelError, name.strip("./"), models=[{"model": "a"}, {"model": name}])


def test_output_that_overwrites_an_input_is_refused(models: Path, merge: Merge) -> None:
    (models / "run").mkdir()
    shutil.copytree(models / "a", models / "run" / "final")
    values = {"merge_method": "linear", "models": [{"model": "run/final"}, {"model": "b"}]}
    (models / "run" / "resolved.json").write_text(json.dumps(values))
    before = weights(models / "run" / "final")
    with pytest.raises(MergeError, match="is or contains the input run/final"):
        merge(resume=True, **values)
    assert all(torch.equal(before[n], t) for n, t in weights(models / "run" / "final").items())


def test_missing_disk_space_is_reported(models: Path, merge: Merge, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(models)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert_refused(models, merge, RunError, "not enough disk space")


def test_disk_full_while_writing_destroys_nothing(models: Path, merge: Merge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The space check had passed. The earlier result, the inputs and a later resume are unaffected."""
    from posttrain.merge import tensors as disk

    merge(**LINEAR)
    before = {name: weights(models / name) for name in ("run/final", "a", "b")}

    def full(*arguments: Any, **_: Any) -> None:
        (arguments[0] / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        with pytest.raises(RunError, match="disk"):
            merge(resume=True, **LINEAR)
    assert not (models / "run" / "final.tmp").exists()
    for name, tensors in before.items():
        assert all(torch.equal(tensor, weights(models / name)[key]) for key, tensor in tensors.items())
    merge(resume=True, **LINEAR)


def test_corrupted_write_is_detected(models: Path, merge: Merge, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of the last tensor changes between writing and reading back."""
    from posttrain.merge import tensors as disk

    def then_flip(folder: Path, *rest: Any, _write: Any = disk.write, **more: Any) -> Any:
        found = _write(folder, *rest, **more)
        with (folder / "model.safetensors").open("r+b") as stream:
            stream.seek(-1, 2)
            byte = stream.read(1)[0]
            stream.seek(-1, 2)
            stream.write(bytes([byte ^ 1]))
        return found

    monkeypatch.setattr(disk, "write", then_flip)
    assert_refused(models, merge, RunError, "written tensors differ from the merged ones: model.norm.weight")


def test_failing_fsync_fails_the_merge(models: Path, merge: Merge, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.run import atomic_io

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_io, "sync_file", full)
    assert_refused(models, merge, RunError, "no space left")


def test_input_that_shrinks_while_being_read_is_reported(
    models: Path, merge: Merge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.merge import run as stage

    check = stage.check

    def then_cut(*arguments: Any) -> None:
        check(*arguments)
        file = models / "b" / "model.safetensors"
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 100)

    monkeypatch.setattr(stage, "check", then_cut)
    assert_refused(models, merge, MergeError, "became shorter")


def test_ctrl_c_leaves_no_partial_output_and_resume_succeeds(
    models: Path, merge: Merge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.run.interrupt import GracefulStop

    with monkeypatch.context() as patch:
        patch.setattr(GracefulStop, "__enter__", lambda self: setattr(self, "requested", True) or self)
        assert_refused(models, merge, Interrupted, "before tensor 1 of")
    merge(resume=True, **LINEAR)
    assert weights(models / "run" / "final")


def test_existing_final_is_replaced_only_by_a_verified_one(models: Path, merge: Merge) -> None:
    merge(**LINEAR)
    before = weights(models / "run" / "final")
    edit(models / "b", lambda t: t["model.norm.weight"].fill_(float("inf")))
    with pytest.raises(MergeError, match="NaN or infinite"):
        merge(resume=True, **LINEAR)
    assert all(torch.equal(before[n], t) for n, t in weights(models / "run" / "final").items())


def test_warnings_are_reported(models: Path, merge: Merge, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(models / "b", rope_theta=5e5)
    merge(**{**LINEAR, "parameters": {"normalize": False, "weight": 0.25}, "base_model": "base"})
    told = capsys.readouterr()
    assert told.out == ""
    assert "the weights sum to 0.75 and normalize is off" in told.err  # the base counts, as one of the models
    merge(models / "other", **{**LINEAR, "base_model": "base"})
    assert "base_model base has no part in a linear merge" in capsys.readouterr().err
    assert "config differs in" in told.err and "LlamaForCausalLM" in told.err
