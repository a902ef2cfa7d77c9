"""Names in the documentation exist: recipe keys, files, links, recipes, commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from posttrain import registry
from posttrain.cli.app import LAZY, app
from posttrain.path_resolution import known_files
from posttrain.recipe import keys
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import STAGES
from posttrain.recipe.tree import plain
from posttrain.recipe.yaml import parse

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PATHS = {path for stage in STAGES.values() for path in keys.all_paths(stage)}
ROOTS = {path.partition(".")[0] for path in PATHS}
ARGUMENTS = {
    key for kind in registry.load_index().values() for found in kind.values() for key in found.get("params", ())
}
KEY = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?=$|[:= ])")
ANCHORED = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
COMMAND = re.compile(r"(?:^|`|\$ ?|bin/)posttrain ([a-z-]+)([^\n`#]*)", re.MULTILINE)
FILE = re.compile(r"[\w./-]*/[\w./-]+\.(?:py|yaml|md|json|svg)\b")
MADE = (
    "runs/",
    "./",
    "/",
    "recipe/presets/NAME",
    "data/",
    "path/",
    "rewards/brief",
)  # created by a run or by its reader


def _code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))


def _wrong_keys(page: Path) -> Iterator[str]:
    rewards = known_files("rewards", [".py"])  # `environment.steps` is a metric, not a key
    for code in _code(page):
        found = KEY.match(code)
        if (
            not found
            or found[1].partition(".")[0] not in ROOTS
            or found[1].endswith((".py", ".json", ".jsonl", ".yaml", ".html"))
        ):
            continue
        key = re.sub(r"\.\d+", "", re.sub(r"^stages\.\w+\.", "", found[1]))
        known = key in PATHS or any(path.endswith(f".{key}") for path in PATHS) or key.rpartition(".")[2] in ARGUMENTS
        if not known and key.partition(".")[0] not in rewards:
            yield key


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_recipe_keys_in_docs_exist(page: Path) -> None:
    assert list(_wrong_keys(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_links_in_docs_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert [link for link in links if not (page.parent / link).exists()] == []
    folders = [ROOT, page.parent, *(ROOT / name for name in ("posttrain", "recipes", "tests", "docs", "benchmarks"))]
    named = {file for code in _code(page) for file in FILE.findall(code) if not file.startswith(MADE)}
    assert [file for file in sorted(named) if not any((folder / file).exists() for folder in folders)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_to_sections_name_a_heading(page: Path) -> None:
    """`page.md#some-words`: a heading of the page in lower case, without punctuation, with hyphens for spaces."""
    for link, anchor in ANCHORED.findall(page.read_text(encoding="utf-8")):
        text = (page.parent / link if link else page).read_text(encoding="utf-8")
        heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads]
        assert anchor in anchors, f"{link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_and_shipped_recipes_in_docs_exist(page: Path) -> None:
    verbs = {*typer.main.get_group(app).commands, *LAZY}
    shipped = known_files("recipes", [".yaml"])
    for verb, rest in COMMAND.findall(page.read_text(encoding="utf-8")):
        assert verb in verbs
        names = re.findall(r"(?<![\w./-])((?:rl|sft|dpo|eval|merge|tools|debug)/\w+)(?![\w./-])", rest)
        assert [name for name in names if name not in shipped] == []


def test_docs_contain_keys_links_and_commands() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(ANCHORED.findall(text)) > 20 and len(COMMAND.findall(text)) > 100
    assert sum(bool(KEY.match(code)) for page in PAGES for code in _code(page)) > 100
    assert {page.name for page in PAGES} >= {"recipes.md", "rewards.md", "tools.md", "preference.md"}


def test_recipe_of_the_readme_is_valid() -> None:
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block
    loaded = load_dict(plain(parse(block[1], "README.md").tree), base_dir=ROOT, where="README.md")
    assert loaded.resolved["algorithm"] == "dapo" and loaded.notes == ()


def test_pipeline_of_the_recipes_page_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), re.DOTALL)
    loaded = load_dict(plain(parse(blocks[1], "recipes.md").tree), base_dir=ROOT, where="recipes.md")
    assert [stage["name"] for stage in loaded.resolved["stages"]] == ["warm", "train", "before", "after"]
    assert loaded.notes == ()
