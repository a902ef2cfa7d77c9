"""Reading and writing safetensors: what we write, the safetensors library reads, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.errors import MergeError
from posttrain.merge.tensors import INDEX_NAME, Spec, open_reader, read_header, scan, split_into_shards, write

TENSORS = {
    "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "float16": torch.tensor([0.5], dtype=torch.float16),
}
SPECS = {name: Spec(t.dtype, tuple(t.shape)) for name, t in TENSORS.items()}


def test_what_is_written_the_library_reads(tmp_path: Path) -> None:
    (file,) = write(tmp_path, SPECS, TENSORS.__getitem__)
    found = load_file(file)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    specs = scan(tmp_path)
    assert {name: (s.dtype, s.shape) for name, s in specs.items()} == {n: (s.dtype, s.shape) for n, s in SPECS.items()}
    with open_reader(specs) as read:
        assert all(torch.equal(read(name), tensor) for name, tensor in TENSORS.items())


def test_shards_and_their_index(tmp_path: Path) -> None:
    """40 + 40 + 8 bytes at a limit of 80: two shards; a tensor above the limit gets one of its own."""
    specs = {name: Spec(torch.float32, (size,)) for name, size in (("a", 10), ("b", 10), ("c", 2))}
    assert split_into_shards(specs, 80) == [["a", "b"], ["c"]]
    assert split_into_shards(specs, 20) == [["a"], ["b"], ["c"]]
    write(tmp_path, specs, lambda name: torch.full(specs[name].shape, float(ord(name))), limit=80)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == 88
    assert index["weight_map"]["c"] == "model-00002-of-00002.safetensors"
    with open_reader(scan(tmp_path)) as read:
        assert read("c").tolist() == [99.0, 99.0]


def test_a_tensor_that_is_not_as_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"half: torch\.float32"):
        write(tmp_path, {"half": SPECS["half"]}, lambda _: torch.zeros(1, 2))


def test_broken_files(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    whole = file.read_bytes()
    for content, message in (
        (whole[:-1], "truncated shard"),
        (whole + b"x", "extra bytes after its tensors"),
        (whole[:5], "cut short in its header"),
        (whole[:20], "cut short in its header"),
        (b"version https://git-lfs.github.com/spec/v1", "not a safetensors file"),
        (whole[:8] + b"!" + whole[9:], "unreadable safetensors header"),
    ):
        file.write_bytes(content)
        with pytest.raises(MergeError, match=message):
            read_header(file)


def test_a_dtype_that_cannot_be_averaged(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(MergeError, match="w is stored as F8_E4M3"):
        scan(tmp_path)


def test_an_index_that_lies(tmp_path: Path) -> None:
    specs = {name: Spec(torch.float32, (10,)) for name in "ab"}
    write(tmp_path, specs, lambda _: torch.zeros(10), limit=40)
    path = tmp_path / INDEX_NAME
    index = json.loads(path.read_text())
    index["weight_map"]["a"] = index["weight_map"]["b"]
    path.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], "z": index["weight_map"]["b"]}}))
    with pytest.raises(MergeError, match=r"a is not in model-00002|z is not in"):
        scan(tmp_path)
    path.write_text("{")
    with pytest.raises(MergeError, match="unreadable index"):
        scan(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(MergeError, match="2 safetensors files but no"):
        scan(tmp_path)
