"""Paths in arguments of a recipe's functions follow the recipe's folder, whatever the working directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

import pytest

from posttrain.cli import preflight
from posttrain.data.rows import load_rows
from posttrain.errors import DataError, RecipeError, RewardError, ToolError, UserError
from posttrain.evaluate.compare import find_baseline
from posttrain.recipe.load import load_dict
from posttrain.recipe.reward_sections import Reward
from posttrain.recipe.sections import Data
from posttrain.recipe.tool_sections import Environment, Tool
from posttrain.registry import resolve_paths
from posttrain.tools.load import load_environment, load_tool
from posttrain.verify.load import load_reward

SCRIPT = '''
from pathlib import Path
from typing import Annotated
from posttrain.path_resolution import PathText

def graded(
    completion,
    *,
    files: Annotated[list[Path] | None, "to read"] = None,
    folder: Annotated[Path | None, "of notes"] = None,
):
    return 0.0

def looked_up(query: str, *, folder: Path) -> str:
    """Look a word up.

    query: the word
    """
    return str(folder)

class World:
    def __init__(self, *, map: Path):
        self.map = map
    def reset(self, row): ...
    def step(self, text): ...
    def score(self): ...
    def close(self): ...

def problem(level, draw, *, file: Path):
    return {"prompt": file.read_text(), "answer": ""}

EXAMPLES = []

def rows(size, seed, *, files: list[Path], model: Annotated[str, PathText(words=("tiny",))] = "tiny"):
    return [{"prompt": str(file), "answer": model} for file in files][:size]
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's folder, with files that the working directory has too."""
    for name in ("recipe", "elsewhere"):
        (tmp_path / name / "folder").mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "elsewhere" / "b.txt").write_text("only here")
    (tmp_path / "recipe" / "mine.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "recipe"


def judge(here: Path, cache: str) -> Any:
    endpoint = {"url": "http://127.0.0.1:1/v1", "model": "m", "cache": cache}
    return load_reward(Reward(use="judge.rating", params={"endpoint": endpoint}), here).params["endpoint"]["cache"]


def test_cache_of_a_judge_is_beside_the_recipe(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    assert judge(here, "replies") == str(here / "replies")
    assert judge(here, "~/replies") == str(here / "home" / "replies")
    assert [judge(here, word) for word in ("", "none")] == ["", "none"]
    (Path.cwd() / "replies").mkdir()
    assert judge(here, "replies") == str(Path.cwd() / "replies")  # one that exists, like any other path
    (here / "replies").mkdir()
    assert judge(here, "replies") == str(here / "replies")


def test_paths_of_a_reward_are_beside_the_recipe(here: Path) -> None:
    params = {"files": ["a.txt", "b.txt"], "folder": "folder"}
    found = load_reward(Reward(use="mine.py:graded", params=params), here).params
    assert found == {"files": [here / "a.txt", Path.cwd() / "b.txt"], "folder": here / "folder"}
    with pytest.raises(RewardError, match=r"parameter `files`: file or folder not found: c.txt\n.*searched: "):
        load_reward(Reward(use="mine.py:graded", params={"files": ["c.txt"]}), here)
    database = load_reward(Reward(use="sql.execution", params={"db_root": "folder"}), here).params["db_root"]
    assert database == here / "folder"


def test_paths_of_tools_and_environments_are_beside_the_recipe(here: Path) -> None:
    assert load_tool(Tool(use="mine.py:looked_up", params={"folder": "folder"}), here).params == {
        "folder": here / "folder"
    }
    world = load_environment(Environment(use="mine.py:World", params={"map": "a.txt"}), here)
    assert world().map == here / "a.txt"
    with pytest.raises(ToolError, match=r"parameter `map`: file or folder not found: c\.txt"):
        load_environment(Environment(use="mine.py:World", params={"map": "c.txt"}), here)


def test_paths_of_a_data_function_are_beside_the_recipe(here: Path) -> None:
    def load(**params: Any) -> list[Any]:
        section = Data.model_validate({"source": "mine.py:rows", "size": 1, "params": params})
        return [(row["prompt"], row["answer"]) for row in load_rows(section, here)]

    assert load(files=["a.txt"]) == [(str(here / "a.txt"), "tiny")]
    assert load(files=["a.txt"], model="folder") == [(str(here / "a.txt"), str(here / "folder"))]
    assert load(files=["a.txt"], model="some/model") == [(str(here / "a.txt"), "some/model")]
    with pytest.raises(DataError, match=r"file or folder not found: c\.txt"):
        load(files=["c.txt"])


class Files(TypedDict):
    one: Path
    more: list[list[Path]]


def read(*, files: Files | None, named: dict[str, Path]) -> None: ...


def test_paths_in_mappings_and_nested_lists_are_resolved(here: Path) -> None:
    given = {"files": {"one": "a.txt", "more": [["b.txt"]]}, "named": {"x": "a.txt"}}
    assert resolve_paths(read, given, here, "read", DataError) == {
        "files": {"one": here / "a.txt", "more": [[Path.cwd() / "b.txt"]]},
        "named": {"x": here / "a.txt"},
    }


GENERATED = {"stage": "generate", "name": "a", "model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}}
MADE = "stage:a/completions.jsonl"


def check_pipeline(here: Path, **changes: Any) -> list[str]:
    (here / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    judged = {**GENERATED, "stage": "eval", "name": "b", "rewards": [{"use": "math.accuracy"}], **changes}
    return preflight.check(load_dict({"stage": "pipeline", "stages": [GENERATED, judged]}, base_dir=here, where="test"))


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": [{"use": "math.accuracy"}, {"use": "mine.py:graded", "params": {"files": [MADE], "folder": MADE}}]},
        {"tools": [{"use": "mine.py:looked_up", "params": {"folder": MADE}}]},
        {"tools": [{"use": "sql", "params": {"database": MADE}}]},  # a tool that looks into its file when it is loaded
        {"environment": {"use": "mine.py:World", "params": {"map": MADE}}},
        {"data": {"source": "mine.py:rows", "size": 1, "params": {"files": [MADE]}}},
        {"data": {"source": "task:mine.py:problem", "size": 1, "params": {"file": MADE}}},
    ],
)
def test_arguments_may_name_what_an_earlier_stage_makes(here: Path, changes: dict[str, Any]) -> None:
    check_pipeline(here, **changes)
    unknown = json.loads(json.dumps(changes).replace("stage:a", "stage:z"))
    with pytest.raises(RecipeError, match="there is no stage `z` before this one"):
        check_pipeline(here, **unknown)
    single = {**GENERATED, "stage": "eval", "rewards": [{"use": "math.accuracy"}], **changes}
    loaded = load_dict({k: v for k, v in single.items() if k != "name"}, base_dir=here, where="test")
    with pytest.raises(UserError, match=f"not found: {MADE}"):  # at the latest when the rows are made
        preflight.check(loaded)
        load_rows(Data.model_validate(single["data"]), here)


def test_shipped_data_function_reads_a_file_beside_the_recipe(here: Path) -> None:
    row = {"question": "1+1?", "solution": "2", "critique": "Fine. Conclusion: right", "correct": True}
    (here / "critiques.jsonl").write_text(json.dumps(row))
    source = Path(__file__).parents[1] / "recipes" / "data" / "critiques.py"
    section = Data.model_validate({"source": f"{source}:critiques", "params": {"file": "critiques.jsonl"}})
    assert len(load_rows(section, here)) == 1


def test_baseline_is_found_beside_the_recipe(here: Path) -> None:
    for folder in (here, Path.cwd()):
        (folder / "folder" / "problems.jsonl").write_text(json.dumps({"accuracy": 1.0}) + "\n")
    assert find_baseline("folder", here) == here / "folder"
    assert find_baseline(str(here / "folder" / "problems.jsonl"), here) == here / "folder"
