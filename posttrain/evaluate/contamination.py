"""Contamination: evaluation problems that the model continues verbatim, or that are in the training data of its runs.

A model that continues the first part of a problem verbatim has seen it in training (Reasoning or Memorization?, arXiv
2507.10532); the comparison of words is not the paper's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from posttrain.batch import Prompt
from posttrain.data import duplicates
from posttrain.data.render import encode_prompts
from posttrain.data.rows import load_rows
from posttrain.errors import PosttrainError
from posttrain.evaluate.estimators import mean
from posttrain.evaluate.sampling import Record, sample
from posttrain.models.lineage import RESOLVED, trace_lineage
from posttrain.models.load import load_tokenizer
from posttrain.path_resolution import ROW_FILES
from posttrain.recipe.eval_sections import Contamination
from posttrain.recipe.sections import Data
from posttrain.recipe.stages import EvalRecipe
from posttrain.run.atomic_io import read_json
from posttrain.run.directory import RunDirectory

COMPLETIONS = "contamination.jsonl"

Unit = Literal["word", "char"]
Grade = Callable[[Sequence[Any]], Sequence[dict[str, Any]]]

_WORD_PATTERN = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class ContinuationMatch:
    """One value for each text that has a hidden part, and their means (None if no text has one)."""

    exact: list[float]
    rouge_l: list[float]
    completion_rate: float | None
    mean_rouge_l: float | None


def split_text(text: str, ratio: float, unit: Unit = "word") -> tuple[str, str]:
    """Split a text after the first int(ratio * n) of its n words (at least 1) and return both parts unchanged.

    unit `char`: letters and digits of any script instead of words, for languages that write no blanks.
    """
    units = list(re.finditer(r"\S+" if unit == "word" else r"\S", text))
    count = max(1, int(ratio * len(units)))
    end = units[count - 1].end() if count <= len(units) and units else len(text)
    return text[:end], text[end:]


def contamination_check(
    texts: Sequence[str], continuations: Sequence[str], *, ratio: float = 0.6, unit: Unit = "word"
) -> ContinuationMatch:
    """Compare the hidden part of each text with the model's continuation of the shown part.

    Words are compared as lower-cased runs of a-z and 0-9. exact: the continuation begins with all hidden words.
    rouge_l: 2 LCS / (hidden + cut), with the continuation cut to the number of hidden words. Texts without a hidden
    part are skipped.
    """
    exact, rouge = [], []
    for text, continuation in zip(texts, continuations, strict=True):
        hidden = split_units(split_text(text, ratio, unit)[1], unit)
        if hidden:
            cut = split_units(continuation, unit)[: len(hidden)]
            exact.append(float(cut == hidden))
            rouge.append(rouge_l(hidden, cut))
    return ContinuationMatch(exact, rouge, mean(exact), mean(rouge))


@dataclass(frozen=True)
class ContaminationProbe:
    """Result for one question: the number of words shown, and the match of the continuation with the hidden part."""

    shown_words: int
    rouge_l: float | None
    exact_match: float | None


def probe_question(question: str, continuation: str, *, fraction: float = 0.6) -> ContaminationProbe:
    """Compare one question as the paper does: words between blanks unchanged, floor(fraction * words) shown.

    The scores are None if nothing is hidden.
    """
    words = question.split()
    shown = int(fraction * len(words))
    hidden = words[shown:]
    if not hidden:
        return ContaminationProbe(shown, None, None)
    cut = continuation.split()[: len(hidden)]
    return ContaminationProbe(shown, rouge_l(hidden, cut), float(cut == hidden))


def split_units(text: str, unit: Unit) -> list[str]:
    """Split a text into the units that are compared: words, or letters and digits."""
    if unit == "char":
        return [letter for letter in text.lower() if letter.isalnum()]
    return _WORD_PATTERN.findall(text.lower())


def rouge_l(a: Sequence[str], b: Sequence[str]) -> float:
    """Compute ROUGE-L F1: 2 LCS / (len(a) + len(b)); 0 for an empty side."""
    return 2 * lcs_length(a, b) / (len(a) + len(b)) if a and b else 0.0


def lcs_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Compute the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def probe_contamination(
    recipe: EvalRecipe, probe: Contamination, directory: RunDirectory, prompts: Sequence[Prompt], grade: Grade
) -> list[dict[str, Any]]:
    """Sample continuations of truncated problems and compare them with the originals.

    Returns one row per ratio: ratio, problems, completion_rate, rouge_l, answer_rate.

    answer_rate is the share of judged continuations that reach the right answer although they saw only a part of the
    question. Continuations are in contamination.jsonl; a stopped run resumes from it.
    """
    plain_greedy = {"temperature": 0.0, "max_new_tokens": probe.max_new_tokens, "shape": None}
    greedy = recipe.sampling.model_copy(update=plain_greedy)
    tokenizer = load_tokenizer(recipe.model, recipe.base_dir)
    plain = recipe.data.model_copy(update={"chat": False})
    questions = [(ratio, prompt, get_problem_text(prompt)) for ratio in probe.ratios for prompt in prompts]
    questions = [(r, p, text) for r, p, text in questions if split_text(text, r, probe.unit)[1].strip()]
    beginnings = []  # of the problems, as plain text
    for ratio, prompt, text in questions:
        shown = split_text(text, ratio, probe.unit)[0]
        ids = encode_prompts([shown], tokenizer, plain)[0]
        beginnings.append(Prompt(f"{prompt.uid}@{ratio:g}", prompt.row, shown, ids))
    if not beginnings:
        return []
    settings = recipe.model_copy(update={"sampling": greedy})
    records = sample(settings, directory, beginnings, 1, grade, file=COMPLETIONS)
    found = zip(questions, sorted(records, key=lambda record: record["problem"]), strict=True)
    by_ratio: dict[float, list[tuple[str, Record]]] = {}
    for (ratio, _, text), record in found:
        by_ratio.setdefault(ratio, []).append((text, record))
    return [_summarize_ratio(ratio, rows, probe) for ratio, rows in by_ratio.items()]


def get_problem_text(prompt: Prompt) -> str:
    """Return the row's problem: its prompt, or its last user message."""
    given = prompt.row.get("prompt")
    if isinstance(given, str):
        return given
    messages = given or prompt.row.get("messages") or []
    return next((str(m["content"]) for m in reversed(messages) if m["role"] == "user"), "")


def _summarize_ratio(ratio: float, rows: Sequence[tuple[str, Record]], probe: Contamination) -> dict[str, Any]:
    """Return the row of one ratio from its texts and records."""
    texts, records = [text for text, _ in rows], [record for _, record in rows]
    found = contamination_check(texts, [r["completion"] for r in records], ratio=ratio, unit=probe.unit)
    judged = [bool(r["correct"]) for r in records if r["correct"] is not None]
    return {
        "ratio": ratio,
        "problems": len(rows),
        "completion_rate": found.completion_rate,
        "rouge_l": found.mean_rouge_l,
        "answer_rate": sum(judged) / len(judged) if judged else None,
    }


def count_trained_rows(model: str, rows: Sequence[duplicates.Row], base_dir: Path) -> dict[str, Any]:
    """Return `{rows, of, runs}`: how many of the rows are in the training data of the model's runs; {} if none is.

    model: as `model.path` has it. Rows are the same if their prompts have the same words, whatever their other columns
    and files. Only trainings on files of rows are compared.
    """
    texts = [duplicates.question(row) for row in rows]
    seen: set[int] = set()
    runs: list[str] = []
    for run in trace_lineage(model, base_dir).runs:
        recipe = read_json(run / RESOLVED) or {}
        try:
            trained = Data.model_validate(recipe.get("data") or {})
            sources = [source.source for source in trained.mix] if trained.mix is not None else [trained.source]
            if not all(name and name.endswith(ROW_FILES) for name in sources):
                continue
            questions = [duplicates.question(row) for row in load_rows(trained, base_dir)]
        except (PosttrainError, ValidationError, OSError):  # the training data was moved or changed since
            continue
        if matches := {index for index, _ in duplicates.match_same_words(texts, questions) if texts[index].strip()}:
            seen |= matches
            runs.append(str(run))
    return {"rows": len(seen), "of": len(rows), "runs": runs} if seen else {}
