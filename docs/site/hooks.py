"""Hooks of mkdocs: add generated pages and pages from outside docs/, and rewrite links to files of the repository.

Pages are written for GitHub: links are relative, and may lead out of docs/. Here a link to a file of the repository
leads to a page that shows it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import reference

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {  # pages of the repository that stand outside docs/ -> where they are on the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "measured.md",
}
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".jsonl": "json", ".toml": "toml", "": "make"}
LONGEST = 60_000  # characters of a file that a page shows


def on_config(config: Any) -> Any:
    """In the navigation a folder of generated pages stands for its pages."""
    config["nav"] = expand(config["nav"])
    return config


def expand(nav: Any) -> Any:
    """The navigation with generated pages in place of their folder, an index first and without a title."""
    if isinstance(nav, list):
        return [expand(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: expand(value) for title, value in nav.items()}
    if not nav.endswith("/"):
        return nav
    pages = {uri: text for uri, text in reference.pages().items() if uri.startswith(nav)}
    titles = {uri: text.partition("\n")[0].removeprefix("# ").replace("`", "") for uri, text in pages.items()}
    return [uri if uri.endswith("/index.md") else {title: uri} for uri, title in titles.items()]


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, the pages from outside docs/, and a page for each file of the code that is linked."""
    from mkdocs.structure.files import File

    texts = {page.src_uri: page.content_string for page in files.documentation_pages()}
    texts |= {uri: (ROOT / name).read_text(encoding="utf-8") for name, uri in OUTSIDE.items() if (ROOT / name).exists()}
    generated = {uri: texts[uri] for uri in OUTSIDE.values() if uri in texts} | reference.pages()
    for uri, text in texts.items():
        for link in LINK.findall(text):
            name = in_repository(link, uri)
            if name is not None and (page := page_of(name)).startswith("source/"):
                generated[page] = show(name)
    for uri, text in generated.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a page as they are on the site."""
    uri = page.file.src_uri
    if uri.startswith(("reference/", "source/")):
        return markdown
    return rewrite(markdown, uri, os.path.relpath)


def rewrite(markdown: str, uri: str, relative: Callable[[str, str], str]) -> str:
    """The text of a page with links that hold on the site."""

    def replaced(found: re.Match[str]) -> str:
        name = in_repository(found[1], uri)
        return found[1] if name is None else relative(page_of(name), str(PurePosixPath(uri).parent))

    return LINK.sub(replaced, markdown)


def in_repository(link: str, uri: str) -> str | None:
    """The file or folder of the repository that a page's link names; None for addresses and for what is not there."""
    if re.match(r"[a-z]+:", link):
        return None
    names = {on_site: name for name, on_site in OUTSIDE.items()}
    source = PurePosixPath(names.get(uri, f"docs/{uri}"))
    name = os.path.normpath(source.parent / link)
    return name if (ROOT / name).exists() else None


def page_of(name: str) -> str:
    """Where a file or folder of the repository is on the site, below docs/."""
    inside = name.removeprefix("docs/")
    if name in OUTSIDE:
        return OUTSIDE[name]
    if name.startswith("docs/") and name.endswith((".md", ".svg", ".png")):
        return inside
    return f"source/{name}.md"


def show(name: str) -> str:
    """A page with the text of a file, or the list of a folder."""
    path = ROOT / name
    if path.is_dir():
        inner = [f"- `{one.name}`" for one in sorted(path.iterdir()) if not one.name.startswith(("_", "."))]
        texts = [show_file(one) for one in sorted(path.iterdir()) if one.suffix in LANGUAGES and one.is_file()]
        return "\n".join([f"# {name}", "", *inner, "", *texts])
    return f"# {name}\n\n{show_file(path)}"


def show_file(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]}\n..."
    return f'````{LANGUAGES.get(path.suffix, "text")} title="{path.name}"\n{cut}\n````\n'
