"""Tokenized rows of a recipe within its maximum length, with a record of every row that was dropped or cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from posttrain import source_locations
from posttrain.data import images, render
from posttrain.data.binary_labels import label_rows
from posttrain.data.images import Reader
from posttrain.data.render import Example, Pair
from posttrain.data.row_formats import template_fields
from posttrain.data.rows import Row, format_causes, load_rows
from posttrain.data.sft_rows import drop_thought
from posttrain.data.turns import EMPTY_COMPLETION, Text
from posttrain.errors import DataError, count_noun
from posttrain.recipe.preference_sections import PairRules
from posttrain.recipe.sections import Data

if TYPE_CHECKING:
    from posttrain.batch import Prompt, PromptImages

T = TypeVar("T")

SIDES = ("chosen", "rejected")

TOO_LONG = "longer than max_length"
ANSWER_TOO_LONG = "trained part alone longer than max_length"
EMPTY_PROMPT = "empty prompt"
ASKED_NOTHING = "LOOK: the prompt is empty, and the answer to it is trained on"
NOTHING_ASKED = "LOOK: the prompt is empty"
LABEL_UNREAD = "LOOK: `label` is false or 0, and the row is trained on: sft reads no label (`algorithm: kto` does)"
PROMPT_CUT = "prompt cut to max_length"
IMAGES_CUT = "longer than max_length, and a prompt with images is not cut"
SAME_SIDES = "chosen and rejected are the same"
TOO_FAR_APART = "one side longer than the other by more than pairs.max_gap"
CONTRADICTS = "LOOK: says the opposite of another row about the same prompt"
KEPT_LONG = "kept although longer than max_length"
EARLIER_TURNS = "earlier assistant turns are read, not trained on (data.train_on: assistant trains on all)"


@dataclass
class Prepared(Generic[T]):
    """Items in the order of their rows. `dropped`, `cut` and `noted` (kept) map a cause to the uids of its rows.

    trained_ratio: share of all tokens that are trained on (pairs: of both sides; prompts: 0). frames: turn format of
    the chat template -> number of trained turns, with `…` for the row's texts. too_long: token counts of the rows that
    were dropped for their length.
    """

    items: list[T]
    rows: list[Row]
    dropped: dict[str, list[str]] = field(default_factory=dict)
    cut: dict[str, list[str]] = field(default_factory=dict)
    noted: dict[str, list[str]] = field(default_factory=dict)
    trained_ratio: float = 0.0
    frames: dict[str, int] = field(default_factory=dict)
    too_long: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def kept_rows(self) -> list[Row]:
        """Rows of the items."""
        kept = {getattr(item, "uid", None) for item in self.items}
        return [row for row in self.rows if row["uid"] in kept]


def prepare_prompts(
    section: Data,
    tokenizer: Any,
    base_dir: Path,
    shown: Callable[[Row], Row] | None = None,
    reader: Reader | None = None,
) -> Prepared[Prompt]:
    """Return prompts to sample from; `max_length` limits the prompt. Raises DataError if no prompt is left.

    shown: returns the row as it is rendered, e.g. with the recipe's tools. reader: image reader of a vision model;
    without a reader, rows with images are refused.
    """
    from posttrain.batch import Prompt

    rows = load_rows(section, base_dir)
    images.check_model(rows, reader)
    texts = [render.prompt_text(shown(row) if shown else row, tokenizer, section) for row in rows]
    prepared: Prepared[Prompt] = Prepared([], rows)
    _note_template(prepared, [[text] for text in texts])
    encoded = encode_with_images(rows, texts, section, tokenizer, reader)
    for row, text, (ids, own) in zip(rows, texts, encoded, strict=True):
        prompt = Prompt(str(row["uid"]), row, text.pieces[0].text, ids, own)
        fitted = _fit_prompt(prompt, section, prepared, tokenizer)
        if fitted is not None:
            prepared.items.append(fitted)
    kept = {prompt.uid for prompt in prepared.items}
    asking_nothing = (str(row["uid"]) for row in rows if _has_blank_prompt(row, section) and not row.get("images"))
    if blank := [uid for uid in asking_nothing if uid in kept]:
        prepared.noted[NOTHING_ASKED] = blank
    return _require_rows(prepared, section)


def encode_with_images(
    rows: Sequence[Row], texts: Sequence[Text], section: Data, tokenizer: Any, reader: Reader | None
) -> list[tuple[tuple[int, ...], PromptImages | None]]:
    """Tokenize single-piece prompts together with the images of their rows.

    Returns (token ids, images or None) per prompt. Raises DataError for images that cannot be read or have no
    placeholder in the text.
    """
    every = render.encode_prompts([text.pieces[0].text for text in texts], tokenizer, section)
    with_images = images.expand_placeholders(rows, texts, section, reader)
    if with_images is None:
        return [(ids, None) for ids in every]
    expanded = ["".join(piece.text for piece in text.pieces) for text in with_images]
    whole = render.encode_prompts(expanded, tokenizer, section)
    return list(zip(whole, _prompt_images(with_images, every, whole), strict=True))


def _prompt_images(
    texts: Sequence[Text], short_ids: Sequence[tuple[int, ...]], ids: Sequence[tuple[int, ...]]
) -> list[PromptImages | None]:
    """Return the images of each prompt with its token ids before expansion and its length after expansion."""
    from posttrain.batch import PromptImages

    return [
        PromptImages(text.images, short, len(whole)) if text.images else None
        for text, short, whole in zip(texts, short_ids, ids, strict=True)
    ]


def prepare_examples(
    section: Data, tokenizer: Any, base_dir: Path, *, labels_read: bool = False, reader: Reader | None = None
) -> Prepared[Example]:
    """Return training sequences. Raises DataError if none is left, or if no token or every token is trained on.

    labels_read: the caller reads the column `label`, so rows with a false label need no note. reader: as in
    `prepare_prompts`.
    """
    rows = load_rows(section, base_dir, trained=True)
    images.check_model(rows, reader)
    _require_completions(rows)
    if section.thought_dropout:
        rows = [drop_thought(row, section.thought_dropout, section.seed) for row in rows]
    by_row = [render.example_texts(row, tokenizer, section) for row in rows]
    prepared: Prepared[Example] = Prepared([], rows)
    _note_template(prepared, by_row)
    texts = [text for row_texts in by_row for text in row_texts]
    of_text = [row for row, row_texts in zip(rows, by_row, strict=True) for _ in row_texts]
    texts = images.expand_placeholders(of_text, texts, section, reader) or texts
    for text, example in zip(texts, render.encode(texts, tokenizer, section), strict=True):
        fitted = _fit_example(example, text.drop_cause, section, prepared, tokenizer)
        if fitted is not None:
            prepared.items.append(fitted)
    if earlier := [str(row["uid"]) for row in rows if _has_untrained_turns(row, section)]:
        prepared.noted[EARLIER_TURNS] = earlier
    kept = {example.uid.partition(".")[0] for example in prepared.items}
    for cause, is_so in ((ASKED_NOTHING, _has_blank_prompt), (LABEL_UNREAD, _is_labeled_bad)):
        uids = [uid for row in rows if (uid := str(row["uid"])) in kept and is_so(row, section)]
        if uids and not (cause == LABEL_UNREAD and labels_read):
            prepared.noted[cause] = uids
    prepared.trained_ratio = _ratio((sum(e.trained), len(e.ids)) for e in prepared.items)
    return _check_ratio(_require_rows(prepared, section), section)


def _require_completions(rows: Sequence[Row]) -> None:
    """Raise DataError for rows with only a prompt among rows that have completions."""
    having = sum(row.get("completion") is not None for row in rows)
    lacking = [row for row in rows if row.get("prompt") is not None and not {"completion", "messages"} & row.keys()]
    if having and lacking:
        others = "another row has one" if having == 1 else f"{having} other rows have one"
        which = "this row" if len(lacking) == 1 else f"the {len(lacking)} rows without"
        raise DataError(
            "no `completion` to train on",
            where=source_locations.describe_row(lacking[0]["uid"]),
            hint=f"{others}: give {which} one, or leave out {which}",
        )


def prepare_pairs(
    section: Data,
    tokenizer: Any,
    base_dir: Path,
    *,
    single: bool = False,
    rules: PairRules | None = None,
    reader: Reader | None = None,
) -> Prepared[Pair]:
    """Return preference pairs; `max_length` limits prompt plus longer side. Raises DataError if none is left.

    single: rows are answers with labels, and the rejected side is another row's answer. rules: handling of pairs that
    carry no learning signal; texts are compared without surrounding white space. Rows that contradict each other are
    kept and noted. reader: as in `prepare_prompts`.
    """
    rules = rules or PairRules()
    rows = load_rows(section, base_dir, trained=True)
    images.check_model(rows, reader)
    rows = label_rows(rows) if single else rows
    by_row = [render.pair_texts(row, tokenizer, section) for row in rows]
    texts = [text for row_texts in by_row for text in row_texts]
    texts = images.expand_placeholders([row for row in rows for _ in SIDES], texts, section, reader) or texts
    sides = render.encode(texts, tokenizer, section)
    prepared: Prepared[Pair] = Prepared([], rows)
    # The rejected side of a labeled answer belongs to another row, which reports its own notes.
    _note_template(prepared, [row_texts[:1] for row_texts in by_row] if single else by_row)
    for row, chosen, rejected in zip(rows, sides[::2], sides[1::2], strict=True):
        pair = render.join_pair(str(row["uid"]), chosen, rejected)
        cause = _find_pair_fault(row, pair, rules, single)
        if cause and rules.bad == "error":
            raise DataError(
                cause,
                where=source_locations.describe_row(pair.uid),
                hint="write `pairs: {bad: drop}` to leave such rows out",
            )
        fitted = _drop(prepared, cause, pair.uid) if cause else _fit_pair(pair, section, prepared, tokenizer)
        if fitted is not None:
            prepared.items.append(fitted)
    prepared.trained_ratio = _ratio(
        (len(side), len(p.prompt_ids) + len(side)) for p in prepared.items for side in (p.chosen_ids, p.rejected_ids)
    )
    if against := _contradictions(prepared, single):
        prepared.noted[CONTRADICTS] = against
    return _require_rows(prepared, section)


def _contradictions(prepared: Prepared[Pair], single: bool) -> list[str]:
    """Return the kept rows that another kept row contradicts, each followed by the first row that contradicts it.

    Two pairs contradict each other if their sides are swapped; with `single`, if the same answer has the other label.
    """
    rows = {str(row["uid"]): row for row in prepared.rows}
    texts = {pair.uid: _strip_texts(rows[pair.uid], single) for pair in prepared.items}
    first: dict[tuple[str, ...], str] = {}
    for uid, own in texts.items():
        first.setdefault(own, uid)
    uids: dict[str, None] = {}
    for uid, (prompt, one, other) in texts.items():
        opposite = (prompt, one, "0" if other == "1" else "1") if single else (prompt, other, one)
        if opposite in first:
            uids |= dict.fromkeys((uid, first[opposite]))
    return list(uids)


def _strip_texts(row: Row, single: bool) -> tuple[str, str, str]:
    """Return (prompt, chosen, rejected) of a row, or (prompt, answer, label), without surrounding white space."""
    prompt = row["prompt"] if row.get("prompt") is not None else row.get("messages")
    question = " ".join([str(prompt).strip(), *row.get("images", ())])  # images distinguish equal prompts
    return question, str(row["chosen"]).strip(), str(row["label" if single else "rejected"]).strip()


def _fit_prompt(prompt: Prompt, section: Data, into: Prepared[Any], tokenizer: Any) -> Prompt | None:
    """Return the prompt within max_length, or None if it was dropped."""
    if not prompt.ids:
        return _drop(into, EMPTY_PROMPT, prompt.uid)
    keep = _fit_to_max_length(prompt.uid, len(prompt.ids), 0, section, into)
    if keep is None:
        return None
    if keep < len(prompt.ids):
        if prompt.images is not None:
            return _drop(into, IMAGES_CUT, prompt.uid)
        ids = cut_left(prompt.ids, keep, tokenizer)
        return dataclasses.replace(prompt, ids=ids, text=tokenizer.decode(list(ids)))
    return prompt


def _note_template(into: Prepared[Any], by_row: Sequence[Sequence[Text]]) -> None:
    """Record what the chat template omitted or added for each row, and count the formats of the turns."""
    for row, texts in zip(into.rows, by_row, strict=True):
        for cause in dict.fromkeys(note for text in texts for note in text.notes):
            into.noted.setdefault(cause, []).append(str(row["uid"]))
        for frame in (frame for text in texts for frame in text.frames if frame):
            into.frames[frame] = into.frames.get(frame, 0) + 1


def _fit_example(
    example: Example, drop_cause: str, section: Data, into: Prepared[Any], tokenizer: Any
) -> Example | None:
    """Return the example within max_length, or None if it was dropped."""
    # The prompt is everything before the first trained token; only the prompt may be cut.
    prompt = example.trained.index(True) if any(example.trained) else len(example.ids)
    answer = len(example.ids) - prompt
    if not answer:
        return _drop(into, drop_cause, example.uid)
    keep = _fit_to_max_length(example.uid, prompt, answer, section, into)
    if keep is None:
        return None
    if keep < prompt:
        if example.images:
            return _drop(into, IMAGES_CUT, example.uid)
        ids = cut_left(example.ids[:prompt], keep, tokenizer) + example.ids[prompt:]
        return dataclasses.replace(example, ids=ids, trained=example.trained[prompt - keep :])
    return example


def _has_untrained_turns(row: Row, section: Data) -> bool:
    """Return whether an assistant turn before the last one could be trained on but is not."""
    if section.train_on != "completion" or not section.chat or section.prompt_template or not row.get("messages"):
        return False
    turns = [m for m in row["messages"] if m["role"] == "assistant"]
    return any(m.get("train", True) for m in turns[:-1])


def _has_blank_prompt(row: Row, section: Data) -> bool:
    """Return whether the row's prompt or messages ask nothing."""
    talk = None if section.prompt_template else row.get("messages")
    return _is_blank_prompt(row.get("prompt") if talk is None else talk)


def _is_blank_prompt(prompt: Any) -> bool:
    """Return whether a prompt is blank, or all of its user messages and tool results are."""
    if isinstance(prompt, str):
        return not prompt.strip()
    asked = [m for m in prompt or () if m["role"] in ("user", "tool")]
    return bool(asked) and not any(str(m.get("content") or "").strip() for m in asked)


def _is_labeled_bad(row: Row, section: Data) -> bool:
    """Return whether the row labels its answer as bad in a column that the prompt does not show."""
    used = section.prompt_template is not None and "label" in template_fields(section.prompt_template)
    return row.get("label") in (0, 1) and not row["label"] and not used


def _find_pair_fault(row: Row, pair: Pair, rules: PairRules, single: bool) -> str | None:
    """Return why nothing can be learned from a pair, or None."""
    chosen, rejected = (text.strip() if isinstance(text := row[side], str) else text for side in SIDES)
    if not (chosen and pair.chosen_ids and rejected and pair.rejected_ids):
        return EMPTY_COMPLETION
    if chosen == rejected or pair.chosen_ids == pair.rejected_ids:
        return SAME_SIDES
    if not pair.prompt_ids or _is_blank_prompt(row.get("prompt")):
        return EMPTY_PROMPT  # a template writes tokens even for an empty prompt
    lengths = len(pair.chosen_ids), len(pair.rejected_ids)
    if not single and rules.max_gap is not None and max(lengths) > rules.max_gap * min(lengths):
        return TOO_FAR_APART
    return None


def _fit_pair(pair: Pair, section: Data, into: Prepared[Any], tokenizer: Any) -> Pair | None:
    """Return the pair within max_length, or None if it was dropped."""
    keep = _fit_to_max_length(
        pair.uid, len(pair.prompt_ids), max(len(pair.chosen_ids), len(pair.rejected_ids)), section, into
    )
    if keep is None:
        return None
    if pair.images and keep < len(pair.prompt_ids):
        return _drop(into, IMAGES_CUT, pair.uid)
    return dataclasses.replace(pair, prompt_ids=cut_left(pair.prompt_ids, keep, tokenizer))


def _fit_to_max_length(uid: str, prompt: int, answer: int, section: Data, into: Prepared[Any]) -> int | None:
    """Return how many prompt tokens remain, or None if the row was dropped.

    Answers are never cut: they would lose their end.
    """
    limit = section.max_length
    if limit is None or prompt + answer <= limit:
        return prompt
    if section.overlong == "error":
        raise DataError(
            f"{count_noun(prompt + answer, 'token')}, over data.max_length {limit}",
            where=source_locations.describe_row(uid),
            hint=f"`max_length: {prompt + answer}` takes this row; or overlong: drop | truncate_prompt | keep",
        )
    if section.overlong == "keep":
        into.cut.setdefault(KEPT_LONG, []).append(uid)
        return prompt
    if section.overlong == "truncate_prompt" and answer < limit:
        into.cut.setdefault(PROMPT_CUT, []).append(uid)
        return limit - answer
    into.too_long.append(prompt + answer)
    return _drop(into, TOO_LONG if answer < limit else ANSWER_TOO_LONG, uid)


def cut_left(ids: Sequence[int], keep: int, tokenizer: Any) -> tuple[int, ...]:
    """Return the last `keep` tokens of a prompt; a leading BOS is preserved."""
    if keep >= len(ids):
        return tuple(ids)
    bos = tokenizer.bos_token_id
    if keep > 1 and bos is not None and ids[0] == bos:
        return (ids[0], *ids[len(ids) - keep + 1 :])
    return tuple(ids[len(ids) - keep :])


def _drop(into: Prepared[Any], cause: str, uid: str) -> Any:
    """Record a dropped row and return None in place of its item."""
    into.dropped.setdefault(cause, []).append(uid)
    return None


def _ratio(counts: Iterable[tuple[int, int]]) -> float:
    """Return the share of trained tokens from (trained, total) counts."""
    trained = total = 0
    for trained_here, all_here in counts:
        trained, total = trained + trained_here, total + all_here
    return trained / max(total, 1)


def _require_rows(prepared: Prepared[T], section: Data) -> Prepared[T]:
    """Return `prepared`. Raises DataError if no item is left."""
    if not prepared.items:
        what = f"no row is left of {len(prepared.rows)}: {format_causes(prepared.dropped)}"
        hint = "see `posttrain data inspect RECIPE`"
        if lengths := prepared.too_long:
            least, most = min(lengths), max(lengths)
            have = f"{least}" if least == most else f"{least} to {most}"
            what += f"; data.max_length is {section.max_length}, the rows that are longer have {have} tokens"
            hint = f"`data.max_length={most}` takes these rows; `posttrain data inspect RECIPE` shows them"
        raise DataError(what, hint=hint)
    return prepared


def _check_ratio(prepared: Prepared[Example], section: Data) -> Prepared[Example]:
    """Return `prepared`. Raises DataError if no token is trained on, or all are without `train_on: all`."""
    if prepared.trained_ratio == 0:
        raise DataError("no token is trained on", hint="see `posttrain data inspect RECIPE`")
    if prepared.trained_ratio == 1 and section.train_on != "all":
        raise DataError("every token is trained on, prompts too", hint="write `train_on: all` if that is meant")
    return prepared
