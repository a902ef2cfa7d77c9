"""SearchGym (arXiv 2601.14615): a closed world of invented facts, its documents, and multi-hop questions.

From the paper's abstract: a generator makes a graph of facts and documents consistent with it, and a question is a path
in the graph. Relations, templates and sizes are this project's choice.
"""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

from posttrain.errors import DataError
from posttrain.registry import register
from posttrain.seeds import derive

# kind of entity -> {relation: (kind of its object, sentence templates)}; each subject has one object per relation
RELATIONS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "person": {
        "birthplace": ("town", ("{a} was born in {b}.", "The birthplace of {a} is {b}.")),
        "employer": ("company", ("{a} works for {b}.", "The employer of {a} is {b}.")),
        "mentor": ("person", ("{a} was taught by the mentor {b}.", "The mentor of {a} is {b}.")),
    },
    "town": {
        "river": ("river", ("{a} lies on the river {b}.", "The river of {a} is the {b}.")),
        "mayor": ("person", ("{b} is the mayor of {a}.", "The mayor of {a} is {b}.")),
    },
    "company": {
        "seat": ("town", ("{a} has its seat in {b}.", "The seat of {a} is {b}.")),
        "founder": ("person", ("{a} was founded by {b}, its founder.", "The founder of {a} is {b}.")),
    },
    "river": {"mouth": ("town", ("The mouth of the {a} is at {b}.", "The {a} has its mouth near {b}."))},
}
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
MAX_HOPS = 8

Fact = tuple[str, str]  # (subject, relation)


class World(NamedTuple):
    """kinds: entity -> its kind; facts: (subject, relation) -> object; documents: entity -> its text."""

    kinds: dict[str, str]
    facts: dict[Fact, str]
    documents: dict[str, str]


@functools.lru_cache(maxsize=8)
def make_world(world: int, entities: int) -> World:
    """Return the world of the given number; worlds of the same size share no entity."""
    draw = random.Random(derive(world, "search world", entities))
    names = _names(world, entities)
    order = list(RELATIONS)
    kinds = {name: order[i % len(order)] for i, name in enumerate(names)}
    facts: dict[Fact, str] = {}
    documents: dict[str, str] = {}
    for name, kind in kinds.items():
        sentences = []
        for relation, (wanted, templates) in RELATIONS[kind].items():
            others = [other for other in names if kinds[other] == wanted and other != name]
            facts[name, relation] = draw.choice(others)
            sentences.append(draw.choice(templates).format(a=name, b=facts[name, relation]))
        draw.shuffle(sentences)
        documents[name] = f"{name} is a {kind}. {' '.join(sentences)}"
    return World(kinds, facts, documents)


def _names(world: int, entities: int) -> list[str]:
    """Return the names of the world's entities: a slice of all three-syllable names in one fixed order."""
    count = len(_SYLLABLES) ** 3
    if not 2 * len(RELATIONS) <= entities or (world + 1) * entities > count or world < 0:
        raise DataError(
            f"world {world} of {entities} entities",
            allowed=f"at least {2 * len(RELATIONS)} entities, and {count} names for all worlds up to this one",
        )
    step = 104729  # a prime coprime to the count, so that neighboring names look different
    numbers = ((position * step + 12345) % count for position in range(world * entities, (world + 1) * entities))
    base = len(_SYLLABLES)
    return [
        (_SYLLABLES[n // base**2] + _SYLLABLES[n // base % base] + _SYLLABLES[n % base]).capitalize() for n in numbers
    ]


MAX_ENTITIES = 1_000_000
MAX_TRIES = 2000  # random paths tried for one question


@register(
    "task", "searchgym", paper="2601.14615", note="The paper does not publish its sizes, relations and documents."
)
def searchgym(level: int, draw: random.Random, *, world: int = 0, entities: int = 400) -> dict[str, Any]:
    """Generate a question of level + 1 hops through a world of invented facts, answerable only from its documents.

    world: its number; worlds of one size share no entity, so another number is held out. entities: their number. The
    recipe's tool `search_world` with the same `world` and `entities` searches the documents; score the answer with
    `qa.search_r1`. Columns: answer (an entity; the only end of the path), hops, facts (the entities whose documents are
    needed).
    """
    hops = level + 1
    if hops > MAX_HOPS:
        raise DataError(f"task:searchgym has no level {level}", allowed=f"levels 0 to {MAX_HOPS - 1}")
    if not 1 <= entities <= MAX_ENTITIES:
        raise DataError(f"task:searchgym: entities {entities}", allowed=f"1 to {MAX_ENTITIES}")
    made = make_world(world, entities)
    for _ in range(MAX_TRIES):
        path, relations = [draw.choice(list(made.kinds))], list[str]()
        for _ in range(hops):
            relations.append(draw.choice(list(RELATIONS[made.kinds[path[-1]]])))
            path.append(made.facts[path[-1], relations[-1]])
        if len(set(path)) == len(path):
            break
    else:
        raise DataError(
            f"task:searchgym: a world of {entities} entities has no path of {hops} hops",
            hint="raise `entities`, or take lower levels",
        )
    asked = path[0]
    for relation in relations:
        asked = f"the {relation} of {asked}"
    return {
        "prompt": f"What is {asked}? Search the documents, then give the name in <answer> </answer>.",
        "answer": path[-1],
        "hops": hops,
        "facts": path[:-1],
    }


EXAMPLES = [(0, {}, {"hops": 1}), (2, {"entities": 40}, {"hops": 3})]
