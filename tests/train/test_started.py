"""Comparison of ranks before the start: equal copies elsewhere pass, and differences are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.recipe.load import load_dict
from posttrain.train import launch_fingerprint

RECIPE: dict[str, Any] = {
    "stage": "rl",
    "model": {"path": "model"},
    "data": {"source": "rows.jsonl"},
    "rewards": [
        {"use": "mine.py:digits"},
        {"use": "math.accuracy"},
        {"use": "mine.py:listed", "params": {"path": "a"}},
    ],
    "loss": {"use": "mine.py:own", "by": 2.0},
    "critic": {"path": "critic"},
    "run": {"steps": 1},
}
SCRIPT = """
from pathlib import Path

def digits(completion):
    return float(len(completion))

def listed(completion, *, path: Path = Path("a")):
    return 0.0

def own(batch, logp, *, by: float = 1.0):
    return None
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    for inner in ("model", "critic"):
        (folder / inner).mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(bytes(launch_fingerprint.LARGE + 5))
    (folder / "critic" / "critic.safetensors").write_bytes(b"critic")
    (folder / "mine.py").write_text(SCRIPT)
    (folder / "a").write_text("listed")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    return folder


def facts(folder: Path, **changes: Any) -> dict[str, str]:
    loaded = load_dict({**RECIPE, **changes}, base_dir=folder, where="test")
    return {key: fact.compared for key, fact in launch_fingerprint.launch_facts(loaded).items()}


def damage(path: Path) -> None:
    """Flip one bit of the file's last byte."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_differences_between_ranks_are_named(here: Path, tmp_path: Path) -> None:
    for file, keys in {
        "mine.py": ["rewards[0].use", "rewards[2].use", "loss.use"],
        "a": ["rewards[2].params.path"],
        "model/model.safetensors": ["model.path"],
        "critic/critic.safetensors": ["critic.path"],
        "rows.jsonl": ["data.source"],
    }.items():
        there = tmp_path / "there"
        shutil.copytree(here, there)
        (there / "model" / ".lock").touch()  # not compared
        assert facts(there) == facts(here)
        damage(there / file)
        before, after = facts(here), facts(there)
        assert sorted(key for key in before if before[key] != after[key]) == sorted(keys), file
        shutil.rmtree(there)


def test_values_are_compared_but_not_the_output_path(here: Path) -> None:
    before = facts(here)
    after = facts(here, optim={"lr": 1e-3}, run={"steps": 1, "output": "elsewhere"})
    assert [key for key in before if before[key] != after[key]] == ["optim.lr"]
    assert {"posttrain", "torch", "transformers", "run.seed"} <= before.keys()


def test_data_files_are_compared_completely(here: Path) -> None:
    """A part of a model file is enough, because training changes all of it; a single row of data may be edited in
    place."""
    rows = here / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i:06}", "answer": "2"}) + "\n" for i in range(120_000)))
    assert rows.stat().st_size > launch_fingerprint.LARGE
    before = facts(here)["data.source"]
    content = bytearray(rows.read_bytes())
    content[len(content) // 2 + launch_fingerprint.BLOCK * 3] ^= 1
    rows.write_bytes(content)
    assert facts(here)["data.source"] != before


def test_files_in_folders_of_a_data_directory_are_compared(here: Path, tmp_path: Path) -> None:
    """`train/part-0.jsonl`, as hub copies and `save_to_disk` have it; the names count, the folder's own place does
    not."""
    source = here / "data" / "train"
    source.mkdir(parents=True)
    (source / "0.jsonl").write_text("first")
    (source.parent / "README.md").touch()
    data = {"data": {"source": "data"}}
    before = facts(here, **data)["data.source"]
    (source.parent / "README.md").write_text("about the data")
    (source.parent / ".cache").mkdir()
    (source.parent / ".cache" / "lock").touch()
    shutil.copytree(here, tmp_path / "there")
    assert facts(here, **data)["data.source"] == facts(tmp_path / "there", **data)["data.source"] == before
    (source / "0.jsonl").rename(source / "1.jsonl")
    renamed = facts(here, **data)["data.source"]
    damage(source / "1.jsonl")
    assert len({before, renamed, facts(here, **data)["data.source"]}) == 3


def test_files_that_functions_read_are_compared(here: Path) -> None:
    """Those of tools, environments and data functions, like those of rewards."""
    (here / "folder").mkdir()
    (here / "folder" / "notes.md").write_text("text")
    (here / "tool.py").write_text(
        "from pathlib import Path\n\ndef look(query: str, *, folder: Path) -> str:\n"
        '    """Look.\n\n    query: a word\n    """\n    return query\n\n'
        "def rows(size, seed, *, file: Path, runs: list[Path] = ()):\n    return []\n"
    )
    (here / "run").mkdir()
    for name in ("resolved.json", "report.html", "completions.jsonl"):
        (here / "run" / name).write_text("{}")
    changes = {
        "tools": [{"use": "tool.py:look", "params": {"folder": "folder"}}],
        "data": {"source": "tool.py:rows", "size": 1, "params": {"file": "a", "runs": ["run"]}},
    }
    before = facts(here, **changes)
    damage(here / "run" / "report.html")
    assert facts(here, **changes) == before
    damage(here / "run" / "completions.jsonl")
    damage(here / "folder" / "notes.md")
    damage(here / "a")
    after = facts(here, **changes)
    assert [key for key in sorted(before) if before[key] != after[key]] == [
        "data.params.file",
        "data.params.runs",
        "rewards[2].params.path",
        "tools[0].params.folder",
    ]


FOLDER = """
from pathlib import Path

def rows(size, seed, *, dir: Path):
    return []
"""


def test_a_folder_with_the_output_of_the_run_keeps_its_hash(here: Path) -> None:
    """`dir: .` with the run directory below, and files that change by themselves."""
    (here / "own.py").write_text(FOLDER)
    changes = {"data": {"source": "own.py:rows", "size": 1, "params": {"dir": "."}}}
    before = facts(here, **changes)["data.params.dir"]
    for file in ("runs/toy/resolved.json", "runs/toy/logs/attempt_1/env.json", ".git/index", "__pycache__/own.pyc"):
        (here / file).parent.mkdir(parents=True, exist_ok=True)
        (here / file).write_text("{}")
    assert facts(here, **changes)["data.params.dir"] == before
    (here / "runs" / "notes.txt").write_text("not of a run")
    assert facts(here, **changes)["data.params.dir"] != before


def test_files_behind_links_are_compared(here: Path, tmp_path: Path) -> None:
    (here / "own.py").write_text(FOLDER)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.txt").write_text("text")
    (here / "folder").mkdir()
    (here / "folder" / "link").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "circle").symlink_to(here / "folder")
    changes = {"data": {"source": "own.py:rows", "size": 1, "params": {"dir": "folder"}}}
    before = facts(here, **changes)["data.params.dir"]
    damage(tmp_path / "far" / "a.txt")
    assert facts(here, **changes)["data.params.dir"] != before


def test_unreadable_file_is_named_with_its_key(here: Path) -> None:
    (here / "own.py").write_text(FOLDER)
    (here / "folder").mkdir()
    (here / "folder" / "odd").symlink_to("/proc/self/mem")  # a regular file whose first byte nobody can read
    with pytest.raises(
        UserError, match=r"^data\.params\.dir: .*/folder/odd cannot be read: Input/output error\n  hint: "
    ):
        facts(here, data={"source": "own.py:rows", "size": 1, "params": {"dir": "folder"}})


def test_of_very_many_files_the_first_are_compared(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_fingerprint, "MOST_FILES", 3)
    (here / "own.py").write_text(FOLDER)
    for number in range(5):
        (here / "folder" / str(number // 2)).mkdir(parents=True, exist_ok=True)
        (here / "folder" / str(number // 2) / f"{number}.txt").write_text("text")
    changes = {"data": {"source": "own.py:rows", "size": 1, "params": {"dir": "folder"}}}
    before = facts(here, **changes)["data.params.dir"]
    note = f"{here / 'folder'} has more than 3 files: changes are detected in the first of them only\n"
    assert capsys.readouterr().err.endswith(note)
    damage(here / "folder" / "1" / "3.txt")
    assert facts(here, **changes)["data.params.dir"] == before
    damage(here / "folder" / "1" / "2.txt")
    assert facts(here, **changes)["data.params.dir"] != before


def test_of_very_large_data_a_part_is_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of all files of a key count together."""
    monkeypatch.setattr(launch_fingerprint, "LARGE", 100)
    read: list[Path] = []
    some = launch_fingerprint._some_blocks
    monkeypatch.setattr(launch_fingerprint, "_some_blocks", lambda path, *rest: read.append(path) or some(path, *rest))
    (here / "data").mkdir()
    for name, size in (("a", 200), ("b", 200), ("c", 50)):
        (here / "data" / name).write_bytes(bytes(size))
    for limit, expected in ((450, []), (449, ["a", "b"])):
        read.clear()
        monkeypatch.setattr(launch_fingerprint, "LARGE_DATA", limit)
        facts(here, data={"source": "data"})
        assert [path.name for path in read if path.parent.name == "data"] == expected


def test_files_of_earlier_stages_are_not_looked_for(here: Path) -> None:
    """A pipeline is fingerprinted before its stages make them; other arguments are compared."""
    (here / "tool.py").write_text(
        "from pathlib import Path\nfrom typing import TypedDict\n\n"
        "class Files(TypedDict):\n    one: Path\n    more: list[Path]\n\n"
        "def rows(size, seed, *, run: Path, runs: list[Path], file: Path, files: Files, named: dict[str, Path]):\n"
        "    return []\n"
    )
    made = "stage:a/completions.jsonl"
    params = {
        "run": made,
        "runs": [made],
        "file": "a",
        "files": {"one": made, "more": ["a", made]},
        "named": {"x": made},
    }
    rows = {"source": "rows.jsonl"}
    first = {"stage": "generate", "name": "a", "model": {"path": "model"}, "data": rows}
    then = {**first, "name": "b", "data": {"source": "tool.py:rows", "size": 1, "params": params}}

    def named() -> dict[str, str]:
        loaded = load_dict({"stage": "pipeline", "stages": [first, then]}, base_dir=here, where="test")
        found = launch_fingerprint.named_files(loaded)
        return {key: fact.compared for key, fact in found.items() if "params" in key}

    before = named()
    assert list(before) == ["stages[1].data.params.file", "stages[1].data.params.files"]
    damage(here / "a")
    assert all(named()[key] != before[key] for key in before)


def test_the_script_of_a_task_is_compared(here: Path) -> None:
    (here / "own.py").write_text("def problem(level, draw):\n    return {}\n")
    source = {"source": "task:own.py:problem", "size": 1}
    before = facts(here, data=source)
    damage(here / "own.py")
    assert facts(here, data=source)["data.source"] != before["data.source"]


def test_arguments_of_gym_tasks_name_no_function(here: Path) -> None:
    """`gym:chain_sum` looks like MODULE:FUNCTION."""
    source = {"source": "gym:chain_sum", "size": 1, "params": {"min_terms": 2}}
    assert facts(here, data=source)["data.params.min_terms"] == "2"
