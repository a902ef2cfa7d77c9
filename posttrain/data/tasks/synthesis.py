"""Questions made from documents (after ASearcher, arXiv 2508.07976): a gap in a sentence, obscured by clues.

The paper's agent lets a language model inject facts into a question and blur its details. Here rules do the former: a
name in the sentence is replaced by a clue, another sentence about it. Nothing is blurred.
"""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.errors import DataError
from posttrain.path_resolution import shipped_folder
from posttrain.registry import load_module, register

GAP = "____"
MAX_TRIES = 2000  # sentences and names tried to find a question with exactly one answer

_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_NAME = re.compile(r"\b[A-Z]\w*(?:[ -][A-Z]\w*)*")
_WORD = re.compile(r"\w+")


class Corpus(NamedTuple):
    """sentences: distinct sentences of all passages; names: the names in each sentence."""

    sentences: list[str]
    names: list[list[str]]


@functools.lru_cache(maxsize=4)
def read_corpus(folder: Path) -> Corpus:
    """Return the sentences of the documents that the tool `search` reads, with their names. Raises DataError."""
    try:
        passages = load_module(shipped_folder("tools") / "search.py").read_passages(folder)
    except (OSError, ValueError) as cause:
        raise DataError(f"task:asearcher: {cause}") from cause
    sentences = list(dict.fromkeys(s.strip() for text in passages for s in _SENTENCE.split(text) if s.strip()))
    common = {word for sentence in sentences for word in _WORD.findall(sentence) if word.islower()}
    return Corpus(sentences, [find_names(sentence, common) for sentence in sentences])


def find_names(sentence: str, common: set[str]) -> list[str]:
    """Return capitalized words and runs of them, without a first word that the documents also write in lower case."""
    names = []
    for match in _NAME.finditer(sentence):
        words = match.group().split(" ")
        if match.start() == 0 and words[0].lower() in common:
            words = words[1:]
        if words:
            names.append(" ".join(words))
    return list(dict.fromkeys(names))


@register(
    "task",
    "asearcher",
    paper="2508.07976",
    note="Rules generate the questions instead of a language model; nothing is blurred.",
)
def asearcher(level: int, draw: random.Random, *, folder: Path) -> dict[str, Any]:
    """Generate a gap in a sentence of the documents, with `level` other names hidden behind clues.

    Score it with `qa.asearcher`. folder: .txt, .md and .jsonl files, as for the tool `search`, which the recipe
    provides with the same folder. Only questions with one answer are generated: no other sentence fits the gap, and no
    other name fits a clue. Columns: answer (the name in the gap), hops (level + 1), facts (the required sentences).
    """
    corpus = read_corpus(folder)
    for _ in range(MAX_TRIES):
        index = draw.randrange(len(corpus.sentences))
        names = corpus.names[index]
        if len(names) < 2:
            continue
        answer = draw.choice(names)
        asked = corpus.sentences[index].replace(answer, GAP)
        if not is_only(asked, GAP, answer, corpus):
            continue
        question = hide_names(level, asked, [name for name in names if name != answer], corpus, {index}, answer, draw)
        if question is not None:
            text, used = question
            return {
                "prompt": f"{text} Search the documents, then give what stands at {GAP} in <answer> </answer>.",
                "answer": answer,
                "hops": level + 1,
                "facts": [corpus.sentences[number] for number in sorted(used)],
            }
    raise DataError(
        f"task:asearcher finds no question of level {level} in {folder}",
        hint="a question of level n needs n names that also occur in other sentences; add documents or lower the level",
    )


def hide_names(
    level: int, asked: str, shown: list[str], corpus: Corpus, used: set[int], answer: str, draw: random.Random
) -> tuple[str, set[int]] | None:
    """Return the question with `level` names hidden behind clues and the sentences it needs; None if impossible.

    A name in a clue may be hidden in turn, so that clues form chains; no clue shows a hidden name.
    """
    parts, used = [asked], set(used)
    hidden = {answer}
    for number in range(1, level + 1):
        options = [
            (name, index)
            for name in shown
            for index, names in enumerate(corpus.names)
            if index not in used
            and name in names
            and hidden.isdisjoint(names)
            and is_only(corpus.sentences[index].replace(name, f"X{number}"), f"X{number}", name, corpus)
        ]
        if not options:
            return None
        name, index = draw.choice(options)
        used.add(index)
        hidden.add(name)
        parts = [part.replace(name, f"X{number}") for part in (*parts, corpus.sentences[index])]
        shown = [shown_name for shown_name in dict.fromkeys((*shown, *corpus.names[index])) if shown_name != name]
    gap, *clues = parts
    return (f"{gap} Here {'; '.join(f'{clue!r}' for clue in clues)}." if clues else gap), used


def is_only(pattern: str, mark: str, name: str, corpus: Corpus) -> bool:
    """Return whether only this name, in place of the mark, makes the pattern a sentence of the documents."""
    fits = re.compile(".+?".join(map(re.escape, pattern.split(mark))))
    matches = {sentence for sentence in corpus.sentences if fits.fullmatch(sentence)}
    return matches == {pattern.replace(mark, name)}


EXAMPLES = [(0, {"folder": shipped_folder("recipes") / "tools" / "towns"}, {"hops": 1})]
