"""Inspection report of a recipe's data: samples with per-token masks, lengths, dropped or cut rows, and checks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain import chat
from posttrain.data import prepare, render
from posttrain.data.images import Reader
from posttrain.data.prepare import Prepared
from posttrain.data.render import Example, Pair
from posttrain.data.turns import ADDED_THOUGHT
from posttrain.errors import DataError, count_noun
from posttrain.images import Image
from posttrain.recipe.preference_sections import PairRules
from posttrain.recipe.sections import Data
from posttrain.thoughts import opening_mark

if TYPE_CHECKING:
    from posttrain.batch import Prompt

Report = dict[str, Any]
Weigh = Callable[[Example], Sequence[float]]
STAGES = ("sft", "dpo", "rl", "eval", "generate")
PROMPT, TRAINED = "prompt", "trained"

FRAMES = 3  # most frequent turn formats that are shown

_NOT_OF_THE_TEMPLATE = (
    *(prepare.EARLIER_TURNS, prepare.CONTRADICTS, prepare.ASKED_NOTHING),
    *(prepare.NOTHING_ASKED, prepare.LABEL_UNREAD, render.OPENING_TURN, render.OTHERS_MARKED),
)


def inspect(
    stage: str,
    section: Data,
    tokenizer: Any,
    base_dir: Path,
    eos_ids: Sequence[int],
    samples: int = 3,
    weigh: Weigh | None = None,
    *,
    single: bool = False,
    rules: PairRules | None = None,
    reader: Reader | None = None,
) -> Report:
    """Return a JSON-serializable report on the data of an sft, dpo, or prompt-only (rl, eval, generate) recipe.

    Keys: stage, rows, items, trained_ratio, dropped {cause: uids}, cut and noted (same form), lengths {part: {min,
    median, p95, max}}, checks [{name, ok, text}], samples [{uid, parts: {name: {tokens: [{id, text, fate}], runs:
    [...]}}}].

    weigh: returns the loss weight of each token of an sft example; tokens and runs then have a `weight`. single: the
    rows of a dpo recipe are single answers with labels. rules: how invalid pairs are handled. reader: image reader of a
    vision model; samples with images then have `images` [{source, width, height, tokens}], and lengths `images`. Raises
    DataError for the same data as training.
    """
    check_stage(stage)
    about = (section, tokenizer, base_dir, samples, reader)
    if stage == "sft":
        found = _describe_examples(*about, weigh)
    elif stage == "dpo":
        found = _describe_pairs(*about, single=single, rules=rules)
    else:
        found = _describe_prompts(*about)
    prepared = found.prepared
    with_images = [(*ids, *shown) for ids, shown in zip(found.sequences, found.images, strict=True)]
    report: Report = {
        **({} if found.columns is None else {"columns": found.columns}),
        "lengths": {name: summarize_lengths(lengths) for name, lengths in found.lengths.items()},
        "checks": [
            *([] if found.ends is None else [_check_ends(found.ends, tuple(eos_ids), tokenizer)]),
            *_check_template(section, tokenizer),
            *_check_text(prepared),
            *_check_labels(found.labeled),
            _check_unknown(found.sequences, tokenizer),
            _check_doubles(with_images),
        ],
        "samples": found.samples,
    }
    if reader is not None:
        _report_images(report, prepared.items, tokenizer, reader)
    report["checks"] += check_dropped(prepared.dropped, prepared.cut, len(prepared.rows))
    return {
        "stage": stage,
        "rows": len(prepared.rows),
        "items": len(prepared),
        "trained_ratio": prepared.trained_ratio,
        "dropped": prepared.dropped,
        "cut": prepared.cut,
        "noted": prepared.noted,
        **report,
    }


def check_stage(stage: str) -> None:
    """Raise DataError for stages whose recipes have no data section."""
    if stage not in STAGES:
        hint = "write a stage of the pipeline as a separate recipe to inspect its rows" if stage == "run" else ""
        raise DataError(f"a recipe for `posttrain {stage}` has no data of its own", hint=hint)


def _report_images(report: Report, items: Sequence[Any], tokenizer: Any, reader: Reader) -> None:
    """Add to the report the images of the samples with their sizes, and the number of image tokens per item."""
    shown = [getattr(item.images, "shown", item.images) or () for item in items]
    if not any(shown):
        return

    @functools.cache
    def tokens(image: Image) -> int:
        return len(tokenizer(reader.read(image).text, add_special_tokens=False)["input_ids"])

    report["lengths"]["images"] = summarize_lengths([sum(map(tokens, images)) for images in shown])
    for sample, images in zip(report["samples"], shown, strict=False):
        sizes = [reader.read(image).size for image in images]
        sample["images"] = [
            {"source": image.name, "width": width, "height": height, "tokens": tokens(image)}
            for image, (width, height) in zip(images, sizes, strict=True)
        ]


class _Described(NamedTuple):
    """Prepared items of a stage and what the report shows of them. sequences: their tokens, with and without images."""

    prepared: Prepared[Any]
    lengths: dict[str, list[int]]
    sequences: list[tuple[int, ...]]
    images: list[tuple[Image, ...]]
    samples: list[Report]
    ends: list[int] | None = None  # last token of each trained text
    labeled: Sequence[render.Row] = ()  # rows of answers with labels
    columns: list[str] | None = None  # of prompts


def _describe_examples(
    section: Data, tokenizer: Any, base_dir: Path, samples: int, reader: Reader | None, weigh: Weigh | None
) -> _Described:
    """Prepare and describe sft examples."""
    prepared = prepare.prepare_examples(section, tokenizer, base_dir, reader=reader)
    items: list[Example] = prepared.items
    lengths = {
        "prompt": [e.trained.index(True) for e in items],
        "trained": [sum(e.trained) for e in items],
        "whole": [len(e.ids) for e in items],
    }
    shown: list[Report] = [
        {"uid": e.uid, "parts": {"sequence": _part(e.ids, e.trained, tokenizer, weigh and weigh(e))}}
        for e in items[:samples]
    ]
    last = [e.ids[max(n for n, on in enumerate(e.trained) if on)] for e in items]  # the last trained token
    return _Described(prepared, lengths, [e.ids for e in items], [e.images for e in items], shown, last)


def _describe_pairs(
    section: Data,
    tokenizer: Any,
    base_dir: Path,
    samples: int,
    reader: Reader | None,
    *,
    single: bool,
    rules: PairRules | None,
) -> _Described:
    """Prepare and describe preference pairs, or labeled answers."""
    prepared = prepare.prepare_pairs(section, tokenizer, base_dir, single=single, rules=rules, reader=reader)
    items: list[Pair] = prepared.items
    rows = {str(row["uid"]): row for row in prepared.rows}
    # The rejected side of a labeled answer belongs to another row: report only the row's own answer.
    sides = [(p.chosen_ids,) if single else (p.chosen_ids, p.rejected_ids) for p in items]
    names = ("answer",) if single else ("chosen", "rejected")
    lengths = {"prompt": [len(p.prompt_ids) for p in items]}
    lengths |= {name: [len(side[n]) for side in sides] for n, name in enumerate(names)}
    shown: list[Report] = []
    for p in items[:samples]:
        label = rows[p.uid]["label"] if single else None
        trained, report = {"chosen": p.chosen_ids, "rejected": p.rejected_ids}, Report(uid=p.uid)
        if label in (0, 1):
            trained = {f"{'good' if label else 'bad'} answer (label {label})": p.chosen_ids}
            report["label"] = label
        parts = {name: _part(ids, [True] * len(ids), tokenizer) for name, ids in trained.items()}
        prompt = _part(p.prompt_ids, [False] * len(p.prompt_ids), tokenizer)
        shown.append({**report, "parts": {"prompt": prompt, **parts}})
    return _Described(
        prepared,
        lengths,
        [sum(side, p.prompt_ids) for p, side in zip(items, sides, strict=True)],
        [p.images for p in items],
        shown,
        [ids[-1] for side in sides for ids in side],
        [rows[p.uid] for p in items] if single else [],
    )


def _describe_prompts(section: Data, tokenizer: Any, base_dir: Path, samples: int, reader: Reader | None) -> _Described:
    """Prepare and describe prompts."""
    prepared = prepare.prepare_prompts(section, tokenizer, base_dir, reader=reader)
    items: list[Prompt] = prepared.items
    shown: list[Report] = [
        {"uid": p.uid, "parts": {"prompt": _part(p.ids, [False] * len(p.ids), tokenizer)}} for p in items[:samples]
    ]
    images = [p.images.shown if p.images else () for p in items]
    columns = sorted({column for p in items for column in p.row})
    ids = [p.ids for p in items]
    return _Described(prepared, {"prompt": list(map(len, ids))}, ids, images, shown, columns=columns)


def summarize_lengths(lengths: Sequence[int]) -> dict[str, float]:
    """Return min, median, p95 and max; quantiles by nearest rank, so each is a length that occurs."""
    ordered = sorted(lengths)

    def at(share: float) -> int:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return {"min": ordered[0], "median": at(0.5), "p95": at(0.95), "max": ordered[-1]}


def _part(
    ids: Sequence[int], trained: Sequence[bool], tokenizer: Any, weights: Sequence[float] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Return single tokens, and runs of equal fate and weight decoded together: a character may span several tokens."""
    marks: list[dict[str, Any]] = [{"fate": TRAINED if t else PROMPT} for t in trained]
    for mark, weight in zip(marks, weights or (), strict=False):
        mark["weight"] = weight
    tokens = [{"id": i, "text": tokenizer.decode([i]), **mark} for i, mark in zip(ids, marks, strict=True)]
    runs = itertools.groupby(zip(ids, marks, strict=True), key=lambda pair: pair[1])
    return {
        "tokens": tokens,
        "runs": [{"text": tokenizer.decode([i for i, _ in run]), **mark} for mark, run in runs],
    }


def sampled_parts(record: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return a rollout of samples.jsonl with every token's fate.

    Tokens of the model and `given` tokens are trained on, tool replies and hints are not.
    """
    ids = [i for segment in record["segments"] for i in segment["ids"]]
    trained = [segment["kind"] in ("model", "given") for segment in record["segments"] for _ in segment["ids"]]
    return {"uid": record["uid"], "parts": {"rollout": _part(ids, trained, tokenizer)}}


def _check(name: str, ok: bool, text: str) -> dict[str, Any]:
    """Return one entry of the report's checks."""
    return {"name": name, "ok": ok, "text": text}


def _check_ends(last: Sequence[int], eos: tuple[int, ...], tokenizer: Any) -> dict[str, Any]:
    """Check that the last trained token of every sequence ends generation."""
    good = sum(i in eos for i in last)
    names = ", ".join(repr(tokenizer.decode([i])) for i in eos)
    text = f"{good} of {count_noun(len(last), 'trained text')} end in a token that stops generation ({names})"
    return _check("end of turn", good == len(last), text)


def _check_template(section: Data, tokenizer: Any) -> list[dict[str, Any]]:
    """Report the template's end-of-turn token and whether its generation prompt opens <think>."""
    if not section.chat:
        return []
    end = chat.turn_end(tokenizer)
    token = repr(tokenizer.decode([end.id])) if end.id is not None else "no special token; EOS is appended"
    checks = [_check("chat template", True, f"an assistant turn ends in {token}")]
    prompt = chat.render(tokenizer, [{"role": "user", "content": "x"}], generation_prompt=True)
    if mark := opening_mark(prompt):
        text = f"the generation prompt already opens {mark}: completions begin inside it, formats must allow for that"
        checks.append(_check("thinking", True, text))
    return checks


def _check_text(prepared: Prepared[Any]) -> list[dict[str, Any]]:
    """Report row texts that the rendering omits, and how the template wraps the trained turns."""
    lost = {cause: uids for cause, uids in prepared.noted.items() if cause not in _NOT_OF_THE_TEMPLATE}
    added = lost.pop(ADDED_THOUGHT, [])
    left_out = {
        uid
        for cause, uids in lost.items()
        if cause.startswith("LOOK") or cause == render.TRAILING_MESSAGES
        for uid in uids
    }
    kept = f"{len(prepared.rows) - len(left_out)} of {count_noun(len(prepared.rows), 'row')}"
    counts = (f"{cause.removeprefix('LOOK: ')} ({count_noun(len(uids), 'row')})" for cause, uids in lost.items())
    parts = [f"{kept} have all of their text in the rendered row", *counts]
    if prepared.frames:
        most = sorted(prepared.frames.items(), key=lambda frame: -frame[1])
        shown = ", ".join(f"{frame!r} ({count_noun(count, 'turn')})" for frame, count in most[:FRAMES])
        more = f" and in {count_noun(len(most) - FRAMES, 'other way')}" if len(most) > FRAMES else ""
        parts.append(f"the template renders a trained turn (… stands for its text) as {shown}{more}")
    checks = [_check("text", not any(cause.startswith("LOOK") for cause in lost), "; ".join(parts))]
    if added:
        text = f"an empty thought in {count_noun(len(added), 'row')}: the model learns to answer without thinking"
        checks.append(_check("added text", False, text))
    return checks


def _check_labels(rows: Sequence[render.Row]) -> list[dict[str, Any]]:
    """Check that labeled rows include both good and bad answers."""
    if not rows:
        return []
    good = sum(row["label"] for row in rows)
    text = f"{good} good, {len(rows) - good} bad; each is compared with another row's answer, which is not shown"
    return [_check("labels", 0 < good < len(rows), text)]


def _check_unknown(sequences: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, Any]:
    """Check that no sequence contains the unknown token."""
    unknown = tokenizer.unk_token_id
    # Some tokenizers declare an ordinary token as unk; unknown characters cannot be detected then.
    count = 0 if unknown is None or unknown == tokenizer.eos_token_id else sum(unknown in s for s in sequences)
    return _check(
        "unknown characters",
        count == 0,
        f"{count} of {count_noun(len(sequences), 'row')} have characters without a token",
    )


def check_dropped(
    dropped: Mapping[str, Sequence[str]], cut: Mapping[str, Sequence[str]], rows: int
) -> list[dict[str, Any]]:
    """Check that at most one row in twenty is dropped; no check if no row is dropped or cut.

    dropped, cut: {cause: uids}.
    """
    causes = [f"{cause}: {len(uids)}" for fate in (dropped, cut) for cause, uids in fate.items()]
    few = 20 * sum(map(len, dropped.values())) <= rows
    return [_check("dropped or cut", few, "; ".join(causes))] if causes else []


def _check_doubles(sequences: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Check that at most 2% of the sequences equal an earlier one."""
    doubles = len(sequences) - len({tuple(s) for s in sequences})
    text = f"{doubles} of {count_noun(len(sequences), 'item')} equal to an earlier one"
    return _check("duplicates", doubles * 50 <= len(sequences), text)
