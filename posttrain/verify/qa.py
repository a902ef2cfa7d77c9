"""Questions answered by search: answers, the order of the blocks, what was retrieved. Pure functions of text."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.verify.extract import after_think, last_tag, outside_thoughts, tag_contents
from posttrain.verify.text import (
    Metric,
    contains,
    exact_blocks,
    exact_match,
    golds_of,
    match,
    pieces,
    qa_norm,
    weighted_mean,
)
from posttrain.verify.transcript import Message

BLOCKS = ("think", "search", "information", "answer")
# state -> the opening tags that may follow it, and the state that their closing tag leads to
_FOLLOWS = {
    "start": {"think": "thought"},
    "thought": {"search": "searched", "answer": "end"},
    "searched": {"information": "informed"},
    "informed": {"think": "thought"},
    "end": {},
}
_NUMBER = re.compile(r"(?<!\d)(?:(?<!\w)-)?\d{1,18}(?:\.\d+)?(?!\d)", re.ASCII)
_OWN_INFORMATION = re.compile(r"<(/?)information>")
_AS_WRITTEN = r"<\1written>"
_CALL = re.compile(r"<(/?)tool_call>")
_TAGS = re.compile(r"</?(?:think|search|information|answer|judge|tool_call)>")
_JUDGED = re.compile(r"<information>((?:(?!<information>).)*?)</information>"
                     r"(?:(?!<information>).)*?<judge>(.*?)</judge>", re.DOTALL)  # fmt: skip


def searched_text(transcript: Sequence[Message]) -> str:
    """The model's turns with what its tools or its environment returned in `<information>` blocks, and no such block of
    its own.

    A block that the model wrote becomes `<written>`, which no form allows. A call that failed leaves an empty block. A
    call in `<tool_call>` is a search; tags in what was returned are dropped.
    """
    text, acted = "", False
    for role, run in itertools.groupby(transcript, key=lambda message: message.role in ("tool", "environment")):
        said = [message for message in run if message.role != "prompt"]
        if role:
            returned = "\n".join(m.text for m in said if m.role == "environment" or m.kind == "ok")
            text += f"<information>{_TAGS.sub(' ', returned)}</information>\n"
            acted = True
        else:
            text += "".join(f"{_OWN_INFORMATION.sub(_AS_WRITTEN, message.text)}\n" for message in said)
    return _CALL.sub(r"<\1search>", text) if acted else text


def well_formed_search(text: str) -> bool:
    """think, then any number of (search, information, think), then answer; nothing but blanks outside the blocks."""
    state, inside = "start", ""
    for piece, is_tag in pieces(text, BLOCKS):
        if not is_tag:
            if not inside and piece.strip():
                return False
        elif piece.startswith("</"):
            if piece[2:-1] != inside:
                return False
            state, inside = _FOLLOWS[state][inside], ""
        elif inside or piece[1:-1] not in _FOLLOWS[state]:
            return False
        else:
            inside = piece[1:-1]
    return state == "end" and not inside


def search_r1(
    completion: str,
    answer: str | Sequence[str] | None,
    *,
    metric: Metric = "em",
    structure: float = 0.0,
    final_format: float = 0.0,
    retrieval: float = 0.0,
) -> dict[str, Any]:
    """{"reward", "score", "valid", "retrieved"} of a transcript (Search-R1); reward and score are None without a gold.

    score: that of the last answer block by `metric`, 0 without one. valid: `well_formed_search`. retrieved: a gold
    stands in an information block. reward: a right answer earns its score, less `structure` if not valid (never below
    0); a wrong one earns structure, and retrieval if retrieved, if valid, else final_format if it has an answer block.
    An answer block inside a closed thought is none: the authors' code counts it, and can be gamed by it.
    """
    golds = golds_of(answer)
    valid = well_formed_search(completion)
    retrieved = any(contains(block, golds) for block in tag_contents(completion, "information"))
    if not golds:
        return {"reward": None, "score": None, "valid": valid, "retrieved": retrieved}
    found = last_tag(outside_thoughts(completion), "answer")
    score = 0.0 if found is None else match(found, golds, metric)
    if score > 0:
        reward = score if valid else max(0.0, score - structure)
    elif valid:
        reward = structure + (retrieval if retrieved else 0.0)
    else:
        reward = 0.0 if found is None else final_format
    return {"reward": reward, "score": score, "valid": valid, "retrieved": retrieved}


def usefulness(useful: Sequence[float | None] | None) -> float | None:
    """Mean of the labels of the retrieved chunks, 0 without a chunk; None if the judge failed on one or on all."""
    if useful is None or any(label is None for label in useful):
        return None
    return sum(float(label) for label in useful if label is not None) / len(useful) if useful else 0.0


def density_reward(outcome: float | None, useful: Sequence[float | None] | None) -> float | None:
    """outcome * (1 + usefulness): good retrieval pays only under a right answer (Search-R2).

    Just the outcome where the judge failed; None without an outcome.
    """
    process = usefulness(useful)
    return None if outcome is None else outcome * (1 + (0.0 if process is None else process))


def reseek(
    completion: str,
    answer: str | Sequence[str] | None,
    similarity: Sequence[float] | None = None,
    *,
    positive: float = 0.1,
    negative: float = -0.05,
    threshold: float = 0.5,
    max_answer_tags: int = 10,
    max_judged: int | None = None,
) -> dict[str, float | None]:
    """{"reward": outcome + judge, "outcome", "judge"} of a transcript with judge actions (ReSeek); None without a gold.

    outcome: exact match of the last answer outside closed thoughts, a quarter of it if there are more than
    max_answer_tags. judge: for each information block that a judge block follows, with s = its similarity to the gold:
    Yes and the answer right: positive; Yes and wrong: negative, half of it if s >= threshold; No: negative if s >=
    threshold, else a fifth of positive; other words: 0. No answer: all 0. similarity: one number a pair, None = 1 if a
    gold stands in the information, else 0. max_judged: only the first so many pairs count (None: all). Raises
    ValueError if there are not as many similarities as judged blocks.
    """
    golds = golds_of(answer)
    if not golds:
        return {"reward": None, "outcome": None, "judge": None}
    found = last_tag(outside_thoughts(completion), "answer")
    if found is None:
        return {"reward": 0.0, "outcome": 0.0, "judge": 0.0}
    right = exact_match(found, golds)
    pairs = _JUDGED.findall(completion)[:max_judged]
    near = [float(contains(text, golds)) for text, _ in pairs] if similarity is None else list(similarity)
    if len(near) < len(pairs):
        raise ValueError(f"{len(near)} similarities for {len(pairs)} judged information blocks")
    judge = sum(
        _judge_term(word.strip().lower(), right > 0, s >= threshold, positive, negative)
        for (_, word), s in zip(pairs, near, strict=False)
    )
    outcome = right / 4 if completion.count("<answer>") > max_answer_tags else right
    return {"reward": outcome + judge, "outcome": outcome, "judge": judge}


def _judge_term(word: str, right: bool, useful: bool, positive: float, negative: float) -> float:
    if word == "yes":
        return positive if right else (0.5 * negative if useful else negative)
    if word == "no":
        return negative if useful else 0.2 * positive
    return 0.0


def asearcher_reward(
    generations: Sequence[str],
    answer: str | Sequence[str] | None,
    *,
    tags: Sequence[str] = ("think", "search", "access", "answer"),
    actions: Sequence[str] = ("search", "access", "answer"),
) -> dict[str, float | None]:
    """{"reward": f1 * format, "f1", "format"} of the texts of a rollout's turns; None without a gold (ASearcher).

    f1: of the sets of words of the last answer block and a gold after `qa_norm`, the best over the golds; 0 without a
    block. format: 1 if in every turn each of `tags` opens as often as it closes, and at most one of `actions` opens.
    An answer block inside a closed thought is none, as in `search_r1`.
    """
    golds = golds_of(answer)
    if not golds:
        return {"reward": None, "f1": None, "format": None}
    found = last_tag(outside_thoughts("\n".join(generations)), "answer")
    f1 = 0.0 if found is None else max(set_f1(qa_norm(found).split(), qa_norm(gold).split()) for gold in golds)
    well = bool(generations) and all(
        all(text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in tags)
        and sum(text.count(f"<{action}>") for action in actions) <= 1
        for text in generations
    )
    return {"reward": f1 * well, "f1": f1, "format": float(well)}


def set_f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of two sets of words."""
    ours, theirs = set(found), set(wanted)
    return 2 * len(ours & theirs) / (len(ours) + len(theirs)) if ours & theirs else 0.0


def answer_items(text: str) -> list[str]:
    """The normalised items of an answer block, no blanks, no doubles: a JSON list, else split at `;` and lines."""
    items: list[Any] = re.split(r"[;\n]", text)
    if text.strip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):  # where it is not JSON after all
            items = list(json.loads(text))
    return [item for item in dict.fromkeys(qa_norm(str(item)) for item in items) if item]


def answer_f1(
    completion: str, answer: Sequence[str | Sequence[str]] | str | None, *, format_ok: bool | None = None
) -> dict[str, float | None]:
    """{"reward": F1, "precision", "recall"} of the items of the last answer block; None without a gold (A^2Search).

    answer: one entry a right answer, each a text or a list of its aliases. precision: items that are an alias of any /
    items; recall: right answers that were named / right answers. format_ok False, no block or no item: 0.
    """
    listed = list(answer) if isinstance(answer, list | tuple) else [answer]
    groups = [{qa_norm(alias) for alias in golds_of(entry)} - {""} for entry in listed]
    groups = [group for group in groups if group]
    if not groups:
        return {"reward": None, "precision": None, "recall": None}
    block = last_tag(after_think(completion), "answer")
    items = [] if block is None or format_ok is False else answer_items(block)
    precision = sum(any(item in group for group in groups) for item in items) / len(items) if items else 0.0
    recall = sum(not group.isdisjoint(items) for group in groups) / len(groups)
    both = precision + recall
    return {"reward": 2 * precision * recall / both if both else 0.0, "precision": precision, "recall": recall}


def traced_answer(
    completion: str,
    answer: str | Sequence[str] | None,
    gold_docs: Sequence[int] | None = None,
    *,
    components: Sequence[str] = ("plan", "gold_docs", "reason", "answer"),
    citation: Literal["f1", "exact"] = "f1",
    judge: Mapping[str, float | None] | None = None,
    weights: Mapping[str, float] | None = None,
) -> dict[str, float | None]:
    """{"reward", "format", "answer", "citation", "judge"} of an answer with its trace (CRAFT); None without gold.

    format: the text is exactly the components, in order; if not, everything is 0. answer: exact match. citation: F1
    of the numbers in the block gold_docs against the row's, or whether the sets are equal; left out if the block is not
    declared or the row names no documents. judge: mean of the audits that have a score; left out without any. reward:
    mean of the parts that are there by `weights`.
    """
    golds = golds_of(answer)
    if not golds:
        return {"reward": None, "format": None, "answer": None, "citation": None, "judge": None}
    contents = exact_blocks(completion, components)
    if contents is None:
        return dict.fromkeys(("reward", "format", "answer", "citation", "judge"), 0.0)
    blocks = dict(zip(components, contents, strict=True))
    parts = {"format": 1.0, "answer": exact_match(blocks["answer"], golds) if "answer" in blocks else 0.0}
    if "gold_docs" in blocks and gold_docs is not None:
        parts["citation"] = citation_f1(blocks["gold_docs"], gold_docs, citation)
    audits = [score for score in (judge or {}).values() if score is not None]
    if audits:
        parts["judge"] = sum(audits) / len(audits)
    reward = weighted_mean(parts, weights, ("format", "answer", "citation", "judge"))
    return {"citation": 0.0, "judge": 0.0, **parts, "reward": reward}


def citation_f1(block: str, gold: Sequence[int], how: Literal["f1", "exact"]) -> float:
    """F1 of the numbers in the text against the gold ones, as sets, or 1 if the sets are equal; 0 if none is cited.

    Negative numbers and decimals cite nothing. Raises ValueError for an unknown `how`.
    """
    if how not in ("f1", "exact"):
        raise ValueError(f"unknown citation {how!r}; known: f1, exact")
    found, wanted = {int(n) for n in _NUMBER.findall(block) if n.isdigit()}, {int(n) for n in gold}
    if not found:
        return 0.0
    return float(found == wanted) if how == "exact" else 2 * len(found & wanted) / (len(found) + len(wanted))
