"""Audit of training data: duplicates, overlap with evaluation data, lengths, gold answers and labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import source_locations
from posttrain.data import duplicates
from posttrain.data.duplicates import flag_contaminated
from posttrain.data.inspect import check_dropped
from posttrain.data.rows import Row
from posttrain.errors import count_noun
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify import correctness
from posttrain.verify.audit import choose_writer, find_doubts, row_uid, split_golds, spread_evenly
from posttrain.verify.golds import is_no_answer
from posttrain.verify.load import load_reward
from posttrain.verify.reward_test_cases import describe_writer, variants
from posttrain.verify.score import Scorer, get_score

Report = dict[str, Any]

MAX_SCORED_GOLDS = 2000  # golds that the reward is called on; further golds are only parsed
MAX_SHOWN = 5  # uids listed for each finding
MAX_MAJORITY_SHARE = 0.5  # from this share of the most frequent answer on, always guessing it pays
MIN_ROWS = 8  # with fewer rows, shares mean nothing


def find_duplicates(rows: Sequence[Row]) -> Report:
    """Find rows with the same question.

    `rows`: surplus rows, `whole`: rows whose answer is also the same, `conflicting`: groups whose golds (column
    `answer`) differ, `near`: pairs that are nearly the same.
    """
    texts, uids = [duplicates.question(row) for row in rows], [str(row["uid"]) for row in rows]
    groups = duplicates.group_same_words(texts)
    whole = [g for group in groups for g in group[1:] if _answered_before(rows, group, g)]
    golds = [[g for g in group if rows[g].get("answer") is not None] for group in groups]
    conflicting = [group for group in golds if len({duplicates.answer(rows[g]) for g in group}) > 1]
    pairs = duplicates.find_near_duplicates(texts)
    return {
        "rows": sum(len(group) - 1 for group in groups),
        "groups": [[uids[g] for g in group] for group in groups[:MAX_SHOWN]],
        "whole": [uids[g] for g in whole],
        "conflicting": [[uids[g] for g in group] for group in conflicting],
        "near": [[uids[p.first], uids[p.second], round(p.similarity, 3)] for p in pairs],
    }


def _answered_before(rows: Sequence[Row], group: Sequence[int], index: int) -> bool:
    """Return whether an earlier row of the group has the same answer."""
    answer = duplicates.answer(rows[index])
    return any(duplicates.answer(rows[g]) == answer for g in group if g < index)


def find_overlap(rows: Sequence[Row], held_out: Sequence[Row], source: str) -> Report:
    """Find training rows that are also evaluation rows.

    `same`: same words, `near`: nearly the same, `ngrams`: 32 consecutive words in common (the rule of Light-R1),
    `but_for_numbers`: number of rows that differ only in their numbers.
    """
    texts, held_out_texts = [duplicates.question(r) for r in rows], [duplicates.question(r) for r in held_out]
    uids, held_out_uids = [str(r["uid"]) for r in rows], [str(r["uid"]) for r in held_out]
    same = duplicates.match_same_words(texts, held_out_texts)
    near = duplicates.find_near_duplicates(texts, held_out_texts)
    template = duplicates.find_same_except_numbers(texts, held_out_texts)
    reported = {*(index for index, _ in same), *(pair.first for pair in near), *template}
    flags = flag_contaminated(texts, held_out_texts, skip_empty=True)
    short = {index for index, text in enumerate(texts) if len(text.split()) < 32}  # texts flagged by letters alone
    return {
        "source": source,
        "rows": len(held_out),
        "same": [[uids[a], held_out_uids[b]] for a, b in same],
        "near": [[uids[p.first], held_out_uids[p.second], round(p.similarity, 3)] for p in near],
        "ngrams": [uids[index] for index, flag in enumerate(flags) if flag and index not in reported | short],
        "but_for_numbers": len(template),
    }


def check_golds(rewards: Sequence[Reward], scoring: Scoring, base_dir: Path | None, rows: Sequence[Row]) -> Report:
    """Check the gold answers that the correctness reward reads.

    `unusable` {cause: uids}; `prose`: golds that are a sentence instead of an answer; `refused`: golds that the reward
    itself does not score as right, of `called` rows; `doubts`: suspicious properties of all golds. `skipped`: why no
    gold was checked. Raises RewardError for a script that breaks its contract.
    """
    loaded = [load_reward(section, base_dir) for section in rewards]
    index = correctness.position(list(rewards), loaded)
    reward = loaded[index]
    if not reward.knows_gold or reward.in_trainer:
        return {"skipped": f"{reward.name} {'is a judge' if reward.is_judge else 'reads no data column'}"}
    golds = split_golds(reward, rows)
    unusable: dict[str, list[str]] = {}
    for uid, why in golds.unusable.items():
        unusable.setdefault(why, []).append(uid)
    chosen = spread_evenly(golds.usable, MAX_SCORED_GOLDS)
    with Scorer([rewards[index].model_copy(update={"condition": None})], scoring, base_dir) as scorer:
        name, write = choose_writer(scorer, golds.usable)
        written = {i: v["gold"] for i, row in enumerate(chosen) if (v := variants(row, write, i)) is not None}
        results = scorer.results(list(written.values()), only=[0])[0]
    scores = {i: get_score(result) for i, result in zip(written, results, strict=True)}
    wrong = [i for i, score in scores.items() if score is None or score < scoring.correct_at]
    prose = [i for i in wrong if is_no_answer(str(chosen[i].get(write.column)))]
    return {
        "reward": reward.name,
        "column": write.column,
        "written_as": name,
        "rows": len(rows),
        "called": len(written),
        "unusable": unusable,
        "prose": [row_uid(chosen[i], i) for i in prose],
        "refused": [row_uid(chosen[i], i) for i in wrong if i not in prose],
        "doubts": [doubt.describe(len(golds.usable)) for doubt in find_doubts(reward, golds.usable, write)],
    }


def count_labels(rows: Sequence[Row], column: str) -> Report | None:
    """Count the values of a column.

    Returns `distinct`, `top` [[value, share]], and `entropy` in bits, over the `rows` rows with a value. None if fewer
    than 8 rows have a value.
    """
    values = [str(row[column]).strip() for row in rows if row.get(column) is not None]
    if len(values) < MIN_ROWS:
        return None
    counts = Counter(values)
    shares = [count / len(values) for count in counts.values()]
    return {
        "column": column,
        "rows": len(values),
        "distinct": len(counts),
        "top": [[value[:60], count / len(values)] for value, count in counts.most_common(MAX_SHOWN)],
        "entropy": -math.fsum(share * math.log2(share) for share in shares),
    }


def compare_pair_lengths(rows: Sequence[Row]) -> Report | None:
    """Compute the share of preference pairs whose chosen side is the longer text, and the mean lengths in characters.

    None if fewer than 8 rows are pairs of different lengths.
    """
    sides = [
        (len(_side_text(r["chosen"])), len(_side_text(r["rejected"])))
        for r in rows
        if r.get("chosen") and r.get("rejected")
    ]
    differ = [(a, b) for a, b in sides if a != b]
    if len(differ) < MIN_ROWS:
        return None
    return {
        "pairs": len(sides),
        "chosen_longer": sum(a > b for a, b in differ) / len(differ),
        "chosen_characters": sum(a for a, _ in sides) / len(sides),
        "rejected_characters": sum(b for _, b in sides) / len(sides),
    }


def _side_text(side: Any) -> str:
    """Return the text of one side of a pair, a string or messages."""
    return side if isinstance(side, str) else "\n".join(str(m.get("content") or "") for m in side)


def check_window(report: Mapping[str, Any], window: int | None, new_tokens: int) -> Report:
    """Compare the longest row with the model's window.

    `needed`: its tokens including the completion that may be sampled (`new_tokens`, 0 without sampling).
    """
    lengths = {part: spread["max"] for part, spread in report["lengths"].items()}
    prompt = lengths.pop("prompt", 0)
    longest = lengths["whole"] if "whole" in lengths else prompt + max(lengths.values(), default=0)
    needed = longest + new_tokens
    return {"window": window, "needed": needed, "new_tokens": new_tokens, "fits": window is None or needed <= window}


def build_verdicts(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each finding of the audit as {name, ok, text}; findings that are not ok need a person's attention."""
    return [{"name": name, "ok": ok, "text": text} for name, ok, text in _iterate_verdicts(report)] + check_dropped(
        report["dropped"], report["cut"], report["rows"]
    )


def _iterate_verdicts(report: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Yield (name, ok, text) of each check of the report."""
    yield from _duplicate_verdicts(report["duplicates"], report["rows"])
    for found in report["evaluation"]:
        yield from _overlap_verdicts(found, report["rows"])
    if not report["evaluation"]:
        yield "evaluation data", True, "none given: set `eval.data` in the recipe, or pass --against DATA"
    window = report["window"]
    new = f" with {window['new_tokens']} new ones" if window["new_tokens"] else ""
    limit = f"the window of {window['window']:,}" if window["window"] else "an unknown window"
    yield "window", window["fits"], f"the longest row has {window['needed']:,} tokens{new}, of {limit}"
    if report["golds"]:
        yield from _gold_verdicts(report["golds"])
    for found in report["labels"]:
        yield _label_verdict(found)
    if pairs := report["pairs"]:
        share = pairs["chosen_longer"]
        text = f"the chosen side is longer in {share:.0%} of the pairs: a model may learn length instead of quality"
        yield "length of the sides", 0.2 <= share <= 0.8, text


def _duplicate_verdicts(found: Mapping[str, Any], rows: int) -> Iterator[tuple[str, bool, str]]:
    """Yield the verdicts on duplicate, conflicting and near-duplicate rows."""
    again = f"{found['rows']} of {count_noun(rows, 'row')} repeat the question of an earlier row"
    whole = f", {len(found['whole'])} with the same answer{_format_rows(found['whole'])}" if found["rows"] else ""
    yield "duplicates", len(found["whole"]) * 50 <= rows, again + whole
    if found["conflicting"]:
        first = [uid for group in found["conflicting"] for uid in group[:2]]
        text = f"{count_noun(len(found['conflicting']), 'question')} with different golds{_format_rows(first)}"
        yield "conflicting golds", False, text
    near = found["near"]
    uids = [uid for pair in near for uid in pair[:2]]
    yield "near-duplicates", len(near) * 50 <= rows, f"{count_noun(len(near), 'pair')} of rows{_format_rows(uids)}"


def _overlap_verdicts(found: Mapping[str, Any], rows: int) -> Iterator[tuple[str, bool, str]]:
    """Yield the verdict on the overlap with one evaluation data set."""
    parts = {"equal": found["same"], "near-duplicate": found["near"], "with 32 shared words in a row": found["ngrams"]}
    uids = [pair[0] if isinstance(pair, list) else pair for part in parts.values() for pair in part]
    counts = ", ".join(f"{len(part)} {what}" for what, part in parts.items())
    template = f"; {found['but_for_numbers']} with the same words and other numbers" if found["but_for_numbers"] else ""
    text = f"{count_noun(rows, 'row')} against {count_noun(found['rows'], 'row')} of {found['source']}: {counts}"
    yield "evaluation data", not uids, f"{text}{_format_rows(uids)}{template}"


def _gold_verdicts(golds: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Yield the verdicts on gold answers and the doubts about them."""
    if "skipped" in golds:
        yield "golds", True, f"not read: {golds['skipped']}"
        return
    without = {why: uids for why, uids in golds["unusable"].items() if uids}
    bad = [*(uid for uids in without.values() for uid in uids), *golds["prose"], *golds["refused"]]
    causes = [f"{why}: {len(uids)}" for why, uids in without.items()]
    causes += [f"{what}: {len(golds[key])}" for key, what in _REFUSED_CAUSES.items() if golds[key]]
    tried = (
        f"{golds['called']} golds scored by {golds['reward']} (column `{golds['column']}`,"
        f" written {describe_writer(golds['written_as'])})"
    )
    yield "golds", not bad, f"{tried}; {', '.join(causes) + _format_rows(bad) if bad else 'each is right'}"
    for doubt in golds["doubts"]:
        yield "golds", False, doubt


_REFUSED_CAUSES = {"prose": "a sentence, no answer", "refused": "rejected by the reward itself"}


def _label_verdict(found: Mapping[str, Any]) -> tuple[str, bool, str]:
    """Return the verdict on the balance of a label column."""
    top = ", ".join(f"`{value}` {share:.0%}" for value, share in found["top"][:3])
    share = found["top"][0][1]
    fine = found["distinct"] > 1 and share < MAX_MAJORITY_SHARE + (0.2 if found["distinct"] == 2 else 0.0)
    more = "" if fine else f"; always saying `{found['top'][0][0]}` is right in {share:.0%} of the rows"
    text = f"{count_noun(found['distinct'], 'value')} in {count_noun(found['rows'], 'row')}, most often {top}{more}"
    return f"balance of `{found['column']}`", fine, text


def _format_rows(uids: Sequence[str]) -> str:
    """Format the locations of rows in parentheses; empty without rows."""
    return f" ({source_locations.describe_rows([str(uid) for uid in uids])})" if uids else ""
