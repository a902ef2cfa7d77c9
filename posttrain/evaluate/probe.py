"""The contamination probe of an evaluation: samples continuations of truncated problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.batch import Prompt
from posttrain.data.render import encode_prompts
from posttrain.evaluate.contamination import contamination_check, split_text
from posttrain.evaluate.sampling import Record, sample
from posttrain.models.load import load_tokenizer
from posttrain.recipe.eval_sections import Contamination
from posttrain.recipe.sections import Data
from posttrain.recipe.stages import EvalRecipe
from posttrain.run.directory import RunDirectory

COMPLETIONS = "contamination.jsonl"
Grade = Callable[[Sequence[Any]], Sequence[dict[str, Any]]]


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
    beginnings = [_truncate_prompt(r, p, text, probe, tokenizer, plain) for r, p, text in questions]
    if not beginnings:
        return []
    settings = recipe.model_copy(update={"sampling": greedy})
    records = sample(settings, directory, beginnings, 1, grade, file=COMPLETIONS)
    found = zip(questions, sorted(records, key=lambda record: record["problem"]), strict=True)
    by_ratio: dict[float, list[tuple[str, Record]]] = {}
    for (ratio, _, text), record in found:
        by_ratio.setdefault(ratio, []).append((text, record))
    return [_summarise_ratio(ratio, rows, probe) for ratio, rows in by_ratio.items()]


def get_problem_text(prompt: Prompt) -> str:
    """Return the row's problem: its prompt, or its last user message."""
    given = prompt.row.get("prompt")
    if isinstance(given, str):
        return given
    messages = given or prompt.row.get("messages") or []
    return next((str(m["content"]) for m in reversed(messages) if m["role"] == "user"), "")


def _truncate_prompt(
    ratio: float, prompt: Prompt, text: str, probe: Contamination, tokenizer: Any, plain: Data
) -> Prompt:
    """Return the prompt with the first part of the problem as plain text."""
    shown = split_text(text, ratio, probe.unit)[0]
    return Prompt(f"{prompt.uid}@{ratio:g}", prompt.row, shown, encode_prompts([shown], tokenizer, plain)[0])


def _summarise_ratio(ratio: float, rows: Sequence[tuple[str, Record]], probe: Contamination) -> dict[str, Any]:
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
