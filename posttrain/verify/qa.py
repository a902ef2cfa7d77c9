"""Scores for search-based question answering: answers, block order, retrieved text. Pure functions of text."""

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
    qa_norm,
    split_at_tags,
    weighted_mean,
)
from posttrain.verify.transcript import Message

BLOCKS = ("think", "search", "information", "answer")
# state -> {opening tag that may follow: state after its closing tag}
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
    """Return the model's turns interleaved with tool and environment results in `<information>` blocks.

    An `<information>` block that the model wrote itself becomes `<written>`, which no format allows. A failed call
    leaves an empty block. A call in `<tool_call>` becomes a search; tags in returned texts are dropped.
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
    """Return whether the text is think, any number of (search, information, think), then answer.

    Only blanks may stand outside the blocks.
    """
    state, inside = "start", ""
    for piece, is_tag in split_at_tags(text, BLOCKS):
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
    """Score a transcript (Search-R1): {"reward", "score", "valid", "retrieved"}.

    reward and score are None without a gold answer.

    score: score of the last answer block by `metric`, 0 without one. valid: `well_formed_search`. retrieved: a gold
    answer occurs in an information block. reward: a right answer earns its score, minus `structure` if not valid (at
    least 0); a wrong answer earns `structure` plus, if retrieved, `retrieval` if valid, else `final_format` if it has
    an answer block. An answer block inside a closed thought does not count; the authors' code counts it and can be
    gamed by it.
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
    """Return the mean label of the retrieved chunks, 0 without chunks; None if the judge failed on any."""
    if useful is None or any(label is None for label in useful):
        return None
    return sum(float(label) for label in useful if label is not None) / len(useful) if useful else 0.0


def density_reward(outcome: float | None, useful: Sequence[float | None] | None) -> float | None:
    """Compute outcome * (1 + usefulness): good retrieval pays only with a right answer (Search-R2).

    Returns just the outcome if the judge failed; None without an outcome.
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
    """Score a transcript with judge actions (ReSeek): {"reward": outcome + judge, "outcome", "judge"}.

    All are None without a gold answer.

    outcome: exact match of the last answer outside closed thoughts, divided by 4 if there are more than max_answer_tags
    answer tags.
    judge: sum over information blocks followed by a judge block, with s = similarity of the information to the gold
    answer. Yes and the answer right: positive; Yes and wrong: negative, half of it if s >= threshold; No: negative if s
    >= threshold, else a fifth of positive; other words: 0. Without an answer, everything is 0.
    similarity: one number per pair; None = 1 if a gold answer occurs in the information, else 0.
    max_judged: only this many first pairs count (None: all).
    Raises ValueError if there are fewer similarities than judged blocks.
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
    """Score the texts of a rollout's turns (ASearcher): {"reward": f1 * format, "f1", "format"}.

    All are None without a gold answer.

    f1: F1 of the word sets of the last answer block and a gold answer after `qa_norm`, the maximum over gold answers; 0
    without a block. format: 1 if in every turn each of `tags` opens as often as it closes, and at most one of `actions`
    opens. An answer block inside a closed thought does not count, as in `search_r1`.
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
    """Compute the F1 of two sets of words."""
    ours, theirs = set(found), set(wanted)
    return 2 * len(ours & theirs) / (len(ours) + len(theirs)) if ours & theirs else 0.0


def answer_items(text: str) -> list[str]:
    """Return the distinct normalized items of an answer block: a JSON list, else split at `;` and newlines."""
    items: list[Any] = re.split(r"[;\n]", text)
    if text.strip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):  # not JSON after all
            items = list(json.loads(text))
    return [item for item in dict.fromkeys(qa_norm(str(item)) for item in items) if item]


def answer_f1(
    completion: str, answer: Sequence[str | Sequence[str]] | str | None, *, format_ok: bool | None = None
) -> dict[str, float | None]:
    """Score the items of the last answer block (A^2Search): {"reward": F1, "precision", "recall"}.

    All are None without a gold answer.

    answer: one entry per right answer, each a text or a list of its aliases. precision: items that are an alias of any
    right answer / items; recall: right answers named / right answers. All are 0 if format_ok is False or there is no
    block or item.
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
    """Score an answer with its trace (CRAFT): {"reward", "format", "answer", "citation", "judge"}.

    All are None without a gold answer.

    format: 1 if the text is exactly the components, in order; otherwise every score is 0. answer: exact match.
    citation: F1 of the numbers in the block gold_docs against the row's gold_docs, or set equality; omitted if the
    block is not declared or the row has no documents. judge: mean of the audits that have a score; omitted if none has.
    reward: mean of the present parts by `weights`.
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
    """Compute the F1 of the cited against the gold numbers as sets, or exact equality; 0 if none is cited.

    Negative numbers and decimals cite nothing. Raises ValueError for an unknown `how`.
    """
    if how not in ("f1", "exact"):
        raise ValueError(f"unknown citation {how!r}; known: f1, exact")
    found, wanted = {int(n) for n in _NUMBER.findall(block) if n.isdigit()}, {int(n) for n in gold}
    if not found:
        return 0.0
    return float(found == wanted) if how == "exact" else 2 * len(found & wanted) / (len(found) + len(wanted))
