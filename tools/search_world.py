"""`tools: [{use: search_world, params: {world: 0}}]`: BM25 over the documents of a world of `source: task:searchgym`.

The documents are made from the same numbers as the questions, so that no file is needed: `world` and `entities` must be
those of the data's `params`. BM25 as in `search`.
"""

import functools
from pathlib import Path
from typing import Any

from posttrain.data.tasks.search_world import make_world
from posttrain.path_resolution import shipped_folder
from posttrain.registry import load_module


def search_world(query: str, *, world: int = 0, entities: int = 400, top: int = 3) -> str:
    """Search the documents and return the passages that fit best.

    Args:
        query: words to look for
    """
    index = _index(world, entities)
    best = index.best(query, top)
    if not best:
        return "nothing found"
    return "\n".join(f"[{number}] {index.passages[i]}" for number, i in enumerate(best, 1))


@functools.cache
def _index(world: int, entities: int) -> Any:
    search = load_module(shipped_folder("tools") / "search.py")
    return search.Index(list(make_world(world, entities).documents.values()))


def sample(folder: Path) -> dict:
    """Parameters for the examples."""
    del folder
    return {"top": 1, "entities": 120}


EXAMPLES = [
    ({"query": "zebra"}, "nothing found"),
    (
        {"query": "Batogi"},
        "[1] Batogi is a person. Batogi was taught by the mentor Gevidu. The employer of Batogi is Nediza. Batogi was "
        "born in Vesusa.",
    ),
    (
        {"query": "the mayor of Kokodo"},
        "[1] Kokodo is a town. Batogi is the mayor of Kokodo. The river of Kokodo is the Budiki.",
    ),
]
