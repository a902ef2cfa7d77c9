"""Rows for tools: products that nobody computes in his head, and questions whose answers stand in towns/.

Traces show how tools are used, with the habits of a poor teacher: some guess, some call twice. RL finds out what pays.
"""

import json
import random
from pathlib import Path

TOWNS = Path(__file__).parent / "towns" / "towns.jsonl"


def call(name: str, **arguments: str) -> str:
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def products(size: int, seed: int, digits: int = 3) -> list[dict]:
    """Prompts `347*582` with their answers."""
    draw = random.Random(f"products {seed}")
    low, high = 10 ** (digits - 1), 10**digits - 1
    pairs = [(draw.randint(low, high), draw.randint(low, high)) for _ in range(size)]
    return [{"prompt": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs]


def product_traces(size: int, seed: int, digits: int = 3, guesses: float = 0.3, doubles: float = 0.3) -> list[dict]:
    """Conversations: one call and its answer; a share `doubles` calls twice, a share `guesses` does not call at all and
    writes digits that mean nothing."""
    draw = random.Random(f"traces {seed}")
    rows = []
    for row in products(size, seed + 1_000_003, digits):
        kind = draw.random()
        times = 0 if kind < guesses else 2 if kind < guesses + doubles else 1
        answer = row["answer"] if times else str(draw.randint(10 ** (2 * digits - 2), 10 ** (2 * digits) - 1))
        turn = [
            {"role": "assistant", "content": call("calculator", expression=row["prompt"])},
            {"role": "tool", "content": row["answer"]},
        ]
        last = {"role": "assistant", "content": f"<answer>{answer}</answer>"}
        rows.append({"messages": [{"role": "user", "content": row["prompt"]}, *turn * times, last]})
    return rows


def towns() -> list[dict]:
    """{town, river, text}."""
    return [json.loads(line) for line in TOWNS.read_text().splitlines()]


def questions(size: int, seed: int) -> list[dict]:
    """Prompts `river of X?` with their answers; the towns of traces and questions are the same, drawn apart."""
    draw = random.Random(f"questions {seed}")
    chosen = [draw.choice(towns()) for _ in range(size)]
    return [{"prompt": f"river of {town['town']}?", "answer": town["river"]} for town in chosen]


def question_traces(size: int, seed: int, guesses: float = 0.3, doubles: float = 0.3) -> list[dict]:
    """The same with the search tool: what it finds is the town's line."""
    draw, known = random.Random(f"traces {seed}"), towns()
    rivers = sorted({town["river"] for town in known})
    rows = []
    for _ in range(size):
        town, kind = draw.choice(known), draw.random()
        times = 0 if kind < guesses else 2 if kind < guesses + doubles else 1
        turn = [
            {"role": "assistant", "content": call("search", query=town["town"])},
            {"role": "tool", "content": f"[1] {town['text']}"},
        ]
        answer = town["river"] if times else draw.choice(rivers)
        last = {"role": "assistant", "content": f"<answer>{answer}</answer>"}
        asked = {"role": "user", "content": f"river of {town['town']}?"}
        rows.append({"messages": [asked, *turn * times, last]})
    return rows
