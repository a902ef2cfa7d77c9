"""The experience store of `actor_extractor`: its contents, what is shown, and which memories are trained on when."""

from __future__ import annotations

import random
from typing import Any

from posttrain.workflows.experience import ActorExtractor, merge_memories
from posttrain.workflows.protocol import Learned, Made, Outcome


def attempts(*, plain: tuple[float, ...], guided: tuple[float, ...] = (), memory: str = "m0") -> tuple[Made, ...]:
    shown = tuple(Made("guided", "", {"memory": memory}, reward) for reward in guided)
    return (*(Made("actor", "", {}, reward) for reward in plain), *shown)


def make_lesson(text: str, **note: str) -> Made:
    return Made("extractor", text, {"text": text, "question": "2 + 2", **note}, row={"prompt": "a", "of": text})


def step(kind: ActorExtractor, memory: Any, number: int, *calls: Made) -> Learned:
    return kind.learn(memory, [Outcome("a", {}, calls)], number)


def test_memory_is_trained_on_after_it_helped_with_decreasing_advantage() -> None:
    """Shown in steps 1 to 3: 1 over plain 0, so +1, then (1 + 1)^-1/2 and (1 + 2)^-1/2 of it; in step 4 it hurt."""
    kind = ActorExtractor()
    first = step(kind, None, 0, *attempts(plain=(0.0, 0.0)), make_lesson("carry"))
    assert not first.again and [one["id"] for one in first.memory["memories"]] == ["m0"]
    memory, found = first.memory, []
    for number in range(1, 4):
        learned = step(kind, memory, number, *attempts(plain=(0.0, 0.0), guided=(1.0, 0.0)))
        memory, found = learned.memory, [*found, *learned.again]
    hurt = step(kind, memory, 4, *attempts(plain=(1.0,), guided=(0.0,)))
    assert [row["of"] for row, _ in found] == ["carry"] * 3
    assert [advantage for _, advantage in found] == [1.0, 2**-0.5, 3**-0.5] and hurt.again[0][1] == -0.5
    (one,) = hurt.memory["memories"]
    assert (one["retrieved"], one["shown_at"], one["trained"], one["trained_at"]) == (7, 4, 4, 4)
    assert memory["memories"][0]["trained"] == 3, "what was known before is left as it was"


def test_training_respects_the_cooldown_and_the_batch_size() -> None:
    kind = ActorExtractor(cooldown=2, batch=1, merge_every=100)
    memory = step(kind, None, 0, make_lesson("one"), make_lesson("two")).memory
    both = (*attempts(plain=(0.0,), guided=(1.0,)), *attempts(plain=(), guided=(1.0,), memory="m1"))
    found = []
    for number in range(1, 5):
        learned = step(kind, memory, number, *both)
        memory = learned.memory
        found.append([row["of"] for row, _ in learned.again])
    assert found == [["one"], ["two"], ["one"], ["two"]]


def test_store_is_bounded_rewritten_and_merged() -> None:
    kind = ActorExtractor(capacity=2, merge_every=3)
    memory = step(kind, None, 0, make_lesson("a b c"), make_lesson("d e f"), make_lesson("g h i")).memory
    assert [one["text"] for one in memory["memories"]] == ["d e f", "g h i"], "the oldest goes"
    memory = step(kind, memory, 1, make_lesson("better", replaces="m1")).memory
    assert [(one["id"], one["text"]) for one in memory["memories"]] == [("m2", "g h i"), ("m3", "better")]
    memory = step(kind, memory, 2, make_lesson("Better!")).memory
    assert [one["text"] for one in memory["memories"]] == ["g h i", "Better!"], "merged in every third step"
    kept = merge_memories([{"text": "a b c d", "retrieved": 2}, {"text": "a b c", "retrieved": 1}], 0.75)
    assert kept == [{"text": "a b c", "retrieved": 3}], "three of four words are shared"


def test_often_or_recently_shown_memories_rank_lower() -> None:
    """Three memories of the same words: scores 0 - 1 (just shown), -1 - 0.4 ln 10 = -1.92 and -2; with dropout the
    second is chosen. With lambda 1, and the first shown 9 times: -3.3, -3.3 and -2.
    """

    def entry(n: int, **changes: Any) -> dict[str, Any]:
        return {"id": f"m{n}", "question": "add", "text": f"x{n}", "retrieved": 0, "shown_at": None, **changes}

    memory = {"memories": [entry(0, shown_at=3), entry(1, retrieved=9), entry(2)], "step": 4}
    first = ActorExtractor(guided=1, first_dropout=0.0, diversity_lambda=0.4)
    second = ActorExtractor(guided=1, first_dropout=1.0, diversity_lambda=0.4)
    assert [one["id"] for one in first.retrieve("add", memory, random.Random(0))] == ["m0"]
    assert [one["id"] for one in second.retrieve("add", memory, random.Random(0))] == ["m1"]
    strict = ActorExtractor(guided=2, first_dropout=0.0, diversity_lambda=1.0, recent_steps=1)
    memory["memories"][0]["retrieved"] = 9
    assert [one["id"] for one in strict.retrieve("add", memory, random.Random(0))] == ["m2", "m2"]
    assert first.retrieve("add", {}, random.Random(0)) == []
