"""Files of rows: compressed files are read, and unreadable or oversized content gives a one-sentence error."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import files
from posttrain.data.prepare import prepare_examples
from posttrain.errors import DataError
from posttrain.recipe.sections import Data

ROWS = [{"prompt": f"{n} + 1", "answer": str(n + 1)} for n in range(50)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
CSV = ("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS)).encode()
PACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize(("kind", "text"), [(".jsonl", LINES), (".csv", CSV), (".json", json.dumps(ROWS).encode())])
def test_compressed_files_are_read(packed: str, kind: str, text: bytes, tmp_path: Path) -> None:
    for name in (
        f"rows{kind}{packed}",
        f"rows{kind}",
    ):  # the format is detected from the first bytes, not only the name
        path = tmp_path / name
        path.write_bytes(PACK[packed](text))
        assert [row for _, row in files.read(path, None)] == ROWS
        assert [row for _, row in files.read(path, 3)] == ROWS[:3]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b"", "a.jsonl  the file is empty"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "a.jsonl.gz  the file has no rows"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:200], "a.jsonl.gz  cannot be decompressed"),
        ("a.jsonl.xz", lzma.compress(LINES)[:60], "a.jsonl.xz  cannot be decompressed"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd rest", "zstd is not read\n  hint: unpack it: zstd -d a.jsonl.zst"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd rest", "zstd is not read"),
        ("a.jsonl", "{}".encode("utf-16"), "not UTF-8: it begins like UTF-16"),
        ("a.parquet", b"PK\x03\x04", "not a parquet file"),
        ("a.parquet", b"PAR1", "a.parquet  the parquet file is incomplete or damaged"),
        ("a.parquet", b"PAR1 rows PAR1", "a.parquet  the parquet file is incomplete or damaged"),
        ("a.parquet", b"PAR1 rows and more rows", "a.parquet  the parquet file is incomplete or damaged"),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), "are not read"),
        ("a.tar.gz", gzip.compress(b"x", mtime=0), "files ending in `.gz` are not read"),
        ("a.jsonl", b"[" * 100_000, "broken JSON: nested too deep"),
        ("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "broken JSON: Exceeds the limit"),
        ("a.jsonl", b'{"a": 1}\n{"a": 1, "b": 2, "a": 3}', "a.jsonl:2  broken JSON: the key `a` is given twice"),
        ("a.json", b'[{"m": {"b": 2, "b": 3}}]', "a.json  broken JSON: the key `b` is given twice"),
        ("a.jsonl", b'[{"a": 1}, {"a": 2}]', "is a .json file"),
        ("a.jsonl", b'{\n "a": 1\n}', "a row is one line"),
        ("a.csv", b"prompt;answer\n1;2\n", "a.csv:1  the header has no comma; its columns seem to be separated by ';'"),
        ("a.csv", b"prompt\tanswer\n1\t2\n", "separated by '\\t'"),
        ("a.csv", b"a,b\n" + b'"' + b"x" * (33 << 20), "more than 32 MB"),
    ],
)
def test_unreadable_files_are_reported(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        files.read(tmp_path / name, None)
    assert told in str(error.value)


def test_long_cells_of_csv_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n" + "x" * 500_000 + ",2\n")
    assert len(files.read(tmp_path / "a.csv", None)[0][1]["prompt"]) == 500_000


def test_rows_beyond_size_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES + b"broken\n" * 1000)
    assert len(files.read(tmp_path / "a.jsonl", 50)) == 50
    with pytest.raises(DataError, match="and 995 lines more"):
        files.read(tmp_path / "a.jsonl", 51)


READ = """
import sys
from pathlib import Path
from posttrain.data import files
from posttrain.errors import DataError
try:
    print(len(files.read(Path(sys.argv[1]), None)))
except DataError as error:
    print(error)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.parametrize("packed", [False, True])
def test_endless_line_is_not_loaded_into_memory(packed: bool, tmp_path: Path) -> None:
    """200 MB in one line, of which 32 are read."""
    path = tmp_path / "long.jsonl"
    with gzip.open(path, "wb", compresslevel=1) if packed else path.open("wb") as stream:
        stream.write(b'{"prompt": "')
        for _ in range(200):
            stream.write(b"a" * (1 << 20))
        stream.write(b'"}\n')
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True)
    assert "long.jsonl:1  the line has more than 32 MB" in done.stdout, done.stderr
    assert int(done.stdout.split()[-1]) < 300 << 10  # KiB


def test_text_too_long_to_tokenize_is_refused_with_its_line(tiny: Any, tmp_path: Path) -> None:
    """Ten megabytes in one row took gigabytes of memory after the last message."""
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "q", "completion": "a b " * 600_000}
    path.write_text(json.dumps({"prompt": "q", "completion": "a"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2 .*2,400,\d+ characters"):
        prepare_examples(Data(source="./rows.jsonl"), tiny, tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_error_names_the_line_that_is_not_utf8(packed: bool, tmp_path: Path) -> None:
    content = b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n'
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=rf"{path.name}:2  not UTF-8: byte 0xe9 at place 16(.|\n)*iconv -f LATIN1"):
        files.read(path, None)
