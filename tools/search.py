"""`tools: [{use: search, params: {folder: docs}}]`: BM25 over the paragraphs of .txt and .md files, or lines of .jsonl.

BM25 as in Robertson and Zaragoza (2009), with k1 1.5, b 0.75 and the idf of Lucene, which is never negative. The index
is built once a worker.
"""

import functools
import json
import math
import re
from collections import Counter
from pathlib import Path

_WORD = re.compile(r"\w+")
K1, B = 1.5, 0.75


def search(query: str, *, folder: Path, top: int = 3, max_chars: int = 500) -> str:
    """Search the documents and return the passages that fit best.

    Args:
        query: words to look for
    """
    index = _index(str(folder))
    best = index.best(query, top)
    if not best:
        return "nothing found"
    return "\n".join(f"[{number}] {index.passages[i][:max_chars]}" for number, i in enumerate(best, 1))


class Index:
    """passages: texts; postings: word -> {passage: count}."""

    def __init__(self, passages: list[str]) -> None:
        self.passages = passages
        counts = [Counter(words(text)) for text in passages]
        self.lengths = [sum(count.values()) for count in counts]
        self.mean = sum(self.lengths) / max(len(passages), 1)
        self.postings: dict[str, dict[int, int]] = {}
        for i, count in enumerate(counts):
            for word, times in count.items():
                self.postings.setdefault(word, {})[i] = times

    def best(self, query: str, top: int) -> list[int]:
        """The passages with the largest scores above 0, the largest first; ties in their order."""
        scores: dict[int, float] = {}
        for word in dict.fromkeys(words(query)):
            found = self.postings.get(word, {})
            idf = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for i, times in found.items():
                norm = K1 * (1 - B + B * self.lengths[i] / self.mean)
                scores[i] = scores.get(i, 0.0) + idf * times * (K1 + 1) / (times + norm)
        return sorted(scores, key=lambda i: (-scores[i], i))[:top]


def words(text: str) -> list[str]:
    """Lower-case words."""
    return _WORD.findall(text.lower())


@functools.cache
def _index(folder: str) -> Index:
    return Index(read_passages(Path(folder)))


def read_passages(folder: Path) -> list[str]:
    """All passages of the files in a folder, in the order of their paths. Raises ValueError where there are none."""
    found = [passage for path in sorted(folder.rglob("*.*")) if path.is_file() for passage in _passages(path)]
    if not found:
        raise ValueError(f"no .txt, .md or .jsonl file with text in {folder}")
    return found


def _passages(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix in (".txt", ".md"):
        return [
            " ".join(part.split()) for part in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")) if part.strip()
        ]
    return []


def sample(folder: Path) -> dict:
    """Documents for the examples."""
    (folder / "towns.txt").write_text("Ulm lies on the Danube.\n\nBonn lies on the Rhine.\n\nThe Rhine is a river.")
    return {"folder": str(folder), "top": 1}


EXAMPLES = [
    ({"query": "Where is Ulm?"}, "[1] Ulm lies on the Danube."),
    ({"query": "bonn"}, "[1] Bonn lies on the Rhine."),
    ({"query": "zebra"}, "nothing found"),
]
