"""Every kind of source, and the errors of broken ones."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from posttrain import hub
from posttrain.data.rows import load_rows
from posttrain.errors import DataError
from posttrain.recipe.sections import Data

ROWS = [{"prompt": f"{i}+1=?", "answer": str(i + 1), "level": str(i)} for i in range(5)]


def prompts(section: Data, base: Path) -> list[str]:
    return [row["prompt"] for row in load_rows(section, base)]


def write(path: Path, kind: str) -> None:
    """Write the same rows in each file format."""
    import datasets

    if kind == "jsonl":
        path.write_text("".join(json.dumps(r) + "\n\n" for r in ROWS))  # empty lines are not rows
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "csv":
        path.write_text("prompt,answer,level\n" + "".join(f"{r['prompt']},{r['answer']},{r['level']}\n" for r in ROWS))
    elif kind == "parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(str(path))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_each_file_kind_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    write(tmp_path / f"rows.{kind}", kind)
    rows = load_rows(Data(source=f"rows.{kind}"), tmp_path)
    assert [{k: r[k] for k in ("prompt", "answer", "level")} for r in rows] == ROWS
    assert len({r["uid"] for r in rows}) == 5


def test_saved_datasets_directory_with_and_without_splits(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": data, "test": data.select([3])}).save_to_disk(str(tmp_path / "split"))
    assert prompts(Data(source="plain"), tmp_path) == [r["prompt"] for r in ROWS]
    assert prompts(Data(source="split", split="test"), tmp_path) == ["3+1=?"]
    with pytest.raises(DataError, match="no split `tests`") as error:
        load_rows(Data(source="split", split="tests"), tmp_path)
    assert "did you mean `test`?" in str(error.value)


def test_skip_and_size_select_a_range_of_rows(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", "jsonl")
    assert prompts(Data(source="rows.jsonl", skip=1, size=2), tmp_path) == ["1+1=?", "2+1=?"]
    whole = load_rows(Data(source="rows.jsonl"), tmp_path)
    part = load_rows(Data(source="rows.jsonl", skip=1, size=2), tmp_path)
    assert [r["uid"] for r in part] == [r["uid"] for r in whole[1:3]]
    with pytest.raises(DataError, match="no rows after the first 5, which are skipped"):
        load_rows(Data(source="rows.jsonl", skip=5), tmp_path)


def test_uids_are_the_same_in_another_folder_and_differ_for_equal_rows(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text('{"prompt": "x"}\n{"prompt": "x"}\n')
    here, there = (load_rows(Data(source="rows.jsonl"), tmp_path / f) for f in ("a", "b"))
    assert [r["uid"] for r in here] == [r["uid"] for r in there]
    assert here[0]["uid"] != here[1]["uid"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', r"a.jsonl:2:11  broken JSON: Expecting value"),
        ("a.jsonl", '{"prompt": "x"}\n{\n\n{"prompt": "y"}\n[\n', r"a.jsonl:2:2 .*\n.*a.jsonl:5:2 "),
        ("a.jsonl", "{\n" * 7, r"a.jsonl:5:2 .*\n  hint: a row is one line .*\nand 2 lines more"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": "\\ud83d!"}\n', r"a.jsonl:2  `prompt` has half a character"),
        ("a.jsonl", '{"prompt": "x"}\n[1]\n', r"a.jsonl:2  a row must be a JSON object, not list"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": 3}\n', r"a.jsonl:2  `prompt` is int \(3\), not text"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": null}\n', r"a.jsonl:2  `prompt` is null"),
        ("a.jsonl", "", r"a\.jsonl  the file is empty"),
        ("a.jsonl", "\n \n", r"a\.jsonl  the file has no rows"),
        ("a.json", "[{]", r"a.json:1:3  broken JSON"),
        ("a.json", '{"x": 1}', r"a list of objects"),
        ("a.csv", "prompt,answer\n1,2\n3\n", r"a.csv:3  not 2 cells"),
        ("a.csv", 'prompt\n"x', r"a.csv:2  broken CSV"),
        ("a.parquet", "nonsense", r"a.parquet  not a parquet file"),
        ("a.txt", "x", r"files ending in `.txt` are not read"),
        ("a.jsonl", '{"messages": [{"content": "x"}]}', r"a.jsonl:1  `messages\[0\]` has no role; it has: content"),
        ("a.jsonl", '{"messages": "x"}', r"a.jsonl:1  `messages` is str \(x\), not a list of messages"),
        ("a.jsonl", '{"prompt": "x", "chosen": "y"}', r"a.jsonl:1  `rejected` is missing"),
    ],
)
def test_broken_input_is_reported_with_its_position(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_rows(Data(source=name), tmp_path)


def test_a_byte_order_mark_windows_line_ends_and_whole_characters_are_read(tmp_path: Path) -> None:
    rows = '\ufeff{"prompt": "\\ud83d\\ude00"}\r\n\r\n{"prompt": "b"}\r\n'
    (tmp_path / "a.jsonl").write_text(rows, encoding="utf-8", newline="")
    assert prompts(Data(source="a.jsonl"), tmp_path) == ["\U0001f600", "b"]


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match="not UTF-8"):
        load_rows(Data(source="a.jsonl"), tmp_path)


def test_error_for_a_missing_file_lists_the_searched_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data not found: nope\.jsonl") as error:
        load_rows(Data(source="nope.jsonl"), tmp_path)
    assert str(tmp_path / "nope.jsonl") in str(error.value)
    (tmp_path / "my rows.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"did you mean `\./my rows\.jsonl`"):
        load_rows(Data(source="./my row.jsonl"), tmp_path)


def test_hub_id_without_network_fails_immediately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    start = time.perf_counter()
    with pytest.raises(DataError, match="data not found: nobody/nothing") as error:
        load_rows(Data(source="nobody/nothing"), tmp_path)
    assert "cannot be reached from here" in str(error.value)
    assert time.perf_counter() - start < 10
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    with pytest.raises(DataError, match="TRANSFORMERS_OFFLINE=1 is set, so the hub is not used"):
        load_rows(Data(source="nobody/nothing"), tmp_path)


def test_column_map_renames_and_unknown_column_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "1+1", "target": "2", "id": 7}')
    row = load_rows(Data(source="a.jsonl", columns={"prompt": "question", "answer": "target"}), tmp_path)[0]
    assert (row["prompt"], row["answer"], row["id"]) == ("1+1", "2", 7)
    assert "question" not in row
    with pytest.raises(DataError, match="no column `qestion`") as error:
        load_rows(Data(source="a.jsonl", columns={"prompt": "qestion"}), tmp_path)
    assert "columns: question, target, id" in str(error.value)
    assert "did you mean `question`?" in str(error.value)


def test_function_is_called_with_size_seed_and_params(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text(
        "def sums(size, seed, top=9):\n    return [{'prompt': f'{seed}:{i}:{top}'} for i in range(size)]\n"
        "def short(size, seed):\n    return [{'prompt': 'x'}]\n"
        "def texts(size, seed):\n    return ['x'] * size\n"
    )
    section = Data(source="make.py:sums", size=2, skip=1, seed=4, params={"top": 3})
    assert prompts(section, tmp_path) == ["4:1:3", "4:2:3"]
    with pytest.raises(DataError, match="give `size`"):
        load_rows(Data(source="make.py:sums"), tmp_path)
    with pytest.raises(DataError, match="unexpected keyword argument 'tip'"):
        load_rows(Data(source="make.py:sums", size=1, params={"tip": 3}), tmp_path)
    with pytest.raises(DataError, match="asked for 3 rows and returned 1"):
        load_rows(Data(source="make.py:short", size=3), tmp_path)
    with pytest.raises(DataError, match="row 0  a row must be a dict, not str"):
        load_rows(Data(source="make.py:texts", size=3), tmp_path)
    with pytest.raises(DataError, match="has no function sum"):
        load_rows(Data(source="make.py:sum", size=3), tmp_path)


def test_params_of_a_file_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", "jsonl")
    with pytest.raises(DataError, match="takes no `params`"):
        load_rows(Data(source="rows.jsonl", params={"a": 1}), tmp_path)


def test_nulls_that_an_arrow_table_fills_in_do_not_reach_messages_or_tools(tmp_path: Path) -> None:
    """Two tools with different parameters share a struct type in the table, so each gets the other's key as null."""
    import datasets

    tools = [{"name": "f", "parameters": {"x": {"type": "int"}}}, {"name": "g", "parameters": {"y": {"type": "str"}}}]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    ]
    data = datasets.Dataset.from_list([{"messages": messages, "tools": tools}])
    assert data[0]["tools"][0]["parameters"] != tools[0]["parameters"] or data[0]["messages"] != messages
    data.save_to_disk(str(tmp_path / "saved"))
    row = load_rows(Data(source="saved"), tmp_path)[0]
    assert row["tools"] == tools
    assert row["messages"] == messages


def test_copy_of_a_hub_dataset_is_read_by_split(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    (tmp_path / "shards" / "data").mkdir(parents=True)
    for number, part in enumerate((data.select([0, 1]), data.select([2, 3, 4]))):
        part.to_parquet(str(tmp_path / "shards" / "data" / f"train-0000{number}-of-00002.parquet"))
    data.select([3]).to_parquet(str(tmp_path / "shards" / "data" / "test-00000-of-00001.parquet"))
    (tmp_path / "shards" / "README.md").write_text("---\n---\n")
    assert prompts(Data(source="shards"), tmp_path) == [r["prompt"] for r in ROWS]
    assert prompts(Data(source="shards", skip=1, size=2), tmp_path) == [r["prompt"] for r in ROWS[1:3]]
    assert prompts(Data(source="shards", split="test"), tmp_path) == ["3+1=?"]
    (tmp_path / "plain").mkdir()
    for place, prompt in (("train.jsonl", "a"), ("training.jsonl", "b")):
        (tmp_path / "plain" / place).write_text(json.dumps({"prompt": prompt}))
    assert prompts(Data(source="plain"), tmp_path) == ["a"]
    with pytest.raises(DataError, match="has no files of the split `test`"):
        load_rows(Data(source="plain", split="test"), tmp_path)


def test_error_for_a_directory_of_several_files_lists_them(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(DataError, match=r"hint: name one of its files: a\.jsonl, b\.jsonl$"):
        load_rows(Data(source=str(tmp_path)), tmp_path)
