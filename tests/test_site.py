"""The documentation site: navigation, generated reference, links, and the strict build."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import posttrain
from posttrain import registry
from posttrain.recipe import presets
from posttrain.recipe.keys import all_paths
from posttrain.recipe.stages import STAGES
from tests.report.browser import needs_chromium

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site() -> tuple[ModuleType, ModuleType]:
    """(reference, hooks), imported as mkdocs imports them."""
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        return importlib.import_module("reference"), importlib.import_module("hooks")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def pages(site: tuple[ModuleType, ModuleType]) -> dict[str, str]:
    found: dict[str, str] = site[0].pages()
    return found


def navigation(hooks: ModuleType) -> list[str]:
    """Return the pages of the navigation, in order."""

    def below(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [page for value in values for page in below(value)]  # type: ignore[attr-defined]

    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return below(hooks.expand(yaml.safe_load(text)["nav"]))


def test_every_page_is_in_the_navigation_once(pages: dict[str, str], site: tuple[ModuleType, ModuleType]) -> None:
    written = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    outside = [uri for name, uri in site[1].OUTSIDE.items() if (ROOT / name).exists()]
    assert sorted(navigation(site[1])) == sorted([*written, *outside, *pages])


def test_reference_of_keys_is_complete(pages: dict[str, str]) -> None:
    for verb, stage in STAGES.items():
        text = pages[f"reference/recipe/{verb.replace('-', '_')}.md"]
        shown = {re.sub(r"\.(N|NAME)(?=\.|$)", "", key) for key in re.findall(r"^(?:\| |## )`([^`]+)`", text, re.M)}
        assert set(all_paths(stage)) <= shown, verb


def test_reference_of_methods_is_complete(pages: dict[str, str]) -> None:
    for kind, entries in registry.load_index().items():
        headings = re.findall(r"^### (\S+) ", pages[f"reference/methods/{kind}.md"], re.MULTILINE)
        assert set(entries) == set(headings), kind
    assert re.findall(r"^### (\S+) ", pages["reference/methods/index.md"], re.MULTILINE) == list(presets.names())


def test_reference_of_commands_has_groups_and_options(pages: dict[str, str]) -> None:
    text = pages["reference/cli.md"]
    assert {"posttrain rl", "posttrain data audit", "posttrain recipe keys", "posttrain doctor"} <= set(
        re.findall(r"^### (.*)$", text, re.MULTILINE)
    )
    assert "--gpus N" in text.partition("### posttrain rl")[2].partition("###")[0]


def test_reference_of_packages_names_modules_that_exist(pages: dict[str, str]) -> None:
    modules = [m for uri, text in pages.items() if "python/" in uri for m in re.findall(r"^::: (\S+)", text, re.M)]
    assert len(modules) > 100
    classes = {"posttrain.api.Run", "posttrain.api.Rows"}
    assert [m for m in modules if m not in classes and importlib.util.find_spec(m) is None] == []


def test_reference_of_the_interface_has_every_public_function(pages: dict[str, str]) -> None:
    text = pages["reference/python/index.md"]
    shown = re.findall(r"^### pt\.(\w+)", text, re.MULTILINE)
    assert sorted([*shown, "PosttrainError", "Run"]) == sorted(posttrain.__all__)
    assert "pt.rl(recipe: str | Path | Mapping[str, Any] | Loaded" in text


def test_docstrings_become_markdown(site: tuple[ModuleType, ModuleType]) -> None:
    as_markdown = site[0].as_markdown
    assert as_markdown("a < b * c `<x>` [N,T]") == r"a &lt; b \* c `<x>` \[N,T]"
    assert as_markdown("One:\na   first\nb   second\nEnd.") == "One:\n\n```text\na   first\nb   second\n```\n\nEnd."


def test_links_work_on_the_site(site: tuple[ModuleType, ModuleType]) -> None:
    """README is the home page; a page stays a page, a file of the code becomes a page that shows it."""
    rewrite, relative = site[1].rewrite, os.path.relpath
    assert rewrite("[a](docs/runs.md#x) [b](SECURITY.md)", "index.md", relative) == "[a](runs.md#x) [b](security.md)"
    found = rewrite("[a](../examples/grpo_minimal.py) [b](https://x.org/a.py)", "runs.md", relative)
    assert found == "[a](source/examples/grpo_minimal.py.md) [b](https://x.org/a.py)"
    assert rewrite("[a](docs/rewards.md)", "security.md", relative) == "[a](rewards.md)"
    assert rewrite("[a](../rewards.md)", "guides/x.md", relative) == "[a](../rewards.md)"
    assert "import posttrain as pt" in site[1].show("docs/examples/python_api.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no mkdocs here: make docs")
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="rewards.html"' in home
    shown = (tmp_path / "site" / "reference" / "python" / "loss.html").read_text(encoding="utf-8")
    assert 'id="posttrain.loss.clip.clip"' in shown
    shown = (tmp_path / "site" / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="posttrain.api.{name}"' in shown for name in ("Run", "Rows.frame"))


@pytest.fixture(scope="module")
def screenshots() -> ModuleType:
    module: ModuleType = registry.load_module(ROOT / "docs" / "site" / "screenshots.py")
    return module


def test_images_are_few_and_small(screenshots: ModuleType) -> None:
    images = sorted((ROOT / "docs" / "images").iterdir())
    assert [image.name for image in images] == ["browse.png", "report.png"]
    assert all(20_000 < image.stat().st_size <= screenshots.LARGEST for image in images)


def test_missing_browser_raises_with_an_install_hint(screenshots: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screenshots.shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match=r"apt-get install chromium.*stay as they are"):
        screenshots.find_browser()


@needs_chromium
def test_screenshots_of_two_runs(screenshots: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On pages of runs with one row each: there are two images, of the asked size, and a small limit is kept."""
    for name in ("rl", "acc-sft", "acc-rl"):
        run = tmp_path / "run" / "seed-0" / name
        run.mkdir(parents=True)
        (run / "resolved.json").write_text(json.dumps({"stage": "rl", "run": {"steps": 1}}))
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
        row = {"step": 0, "problem": 0, "uid": "x", "sample": 0, "prompt": "1+1=?", "completion": name, "correct": True}
        (run / "completions.jsonl").write_text(json.dumps({**row, "finish": "stop", "tokens": 3}) + "\n")
    images = screenshots.take_all(tmp_path / "run", tmp_path / "images", screenshots.find_browser())
    assert [image.name for image in images] == ["report.png", "browse.png"]
    for image in images:
        head = image.read_bytes()[:24]
        size = screenshots.WIDTH, screenshots.HEIGHTS[image.stem]
        assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:]) == size
    monkeypatch.setattr(screenshots, "LARGEST", 1000)
    with pytest.raises(SystemExit, match="more than 1000"):
        screenshots.take_all(tmp_path / "run", tmp_path / "images", screenshots.find_browser())
