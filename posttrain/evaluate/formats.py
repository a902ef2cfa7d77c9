"""Evaluation in several answer formats, with the long one only if the cheap ones disagree (ARM, arXiv 2505.20258)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from posttrain.batch import Prompt
from posttrain.evaluate.sampling import Record, sample
from posttrain.evaluate.summary import verdict
from posttrain.models.load import load_tokenizer
from posttrain.recipe.eval_sections import FormatConsensus
from posttrain.recipe.stages import EvalRecipe
from posttrain.run.directory import RunDirectory
from posttrain.verify.text import qa_norm

CHEAP_FILE, LONG_FILE = "consensus.jsonl", "consensus_long.jsonl"
Grade = Callable[[Sequence[Any]], Sequence[dict[str, Any]]]


class Consensus(NamedTuple):
    """The answer, and whether it comes from the agreement of the cheap formats or from the long chain."""

    answer: str | None
    used: Literal["consensus", "long_cot"]


def arm_consensus(
    direct: str | None,
    short_cot: str | None,
    code: str | None,
    long_cot: str | Callable[[], str | None] | None,
    *,
    equal: Callable[[str, str], bool] | None = None,
) -> Consensus:
    """Return the direct answer if all three cheap formats gave equal answers, else the answer of the long chain.

    long_cot may be a function, called only if the long chain is needed. A missing or blank answer counts as
    disagreement. equal: the verifier's equality; by default text equality ignoring case, punctuation and articles.
    """
    cheap = [answer for answer in (direct, short_cot, code) if answer is not None and answer.strip()]
    same = equal or (lambda a, b: qa_norm(a) == qa_norm(b))
    if len(cheap) == 3 and all(same(cheap[0], other) for other in cheap[1:]):
        return Consensus(direct, "consensus")
    return Consensus(long_cot() if callable(long_cot) else long_cot, "long_cot")


def consensus_of_formats(
    recipe: EvalRecipe, formats: FormatConsensus, directory: RunDirectory, prompts: Sequence[Prompt], grade: Grade
) -> dict[str, Any]:
    """Evaluate greedy answers in three cheap formats, and in the long one if they disagree.

    Returns {"problems", "agreed", "accuracy", "tokens"}. agreed: share of problems whose three cheap answers are equal;
    their answer counts, and the long one is not generated. accuracy: over judged problems. tokens: mean over problems
    of the tokens of all generations. Completions are in consensus.jsonl and consensus_long.jsonl; a stopped run resumes
    from them.
    """
    tokenizer = load_tokenizer(recipe.model, recipe.base_dir)
    greedy = recipe.model_copy(update={"sampling": recipe.sampling.model_copy(update={"temperature": 0.0})})
    openings = (formats.direct, formats.short, formats.code)
    opened = [append_to_prompt(prompt, text, tokenizer) for prompt in prompts for text in openings]
    records = sorted(sample(greedy, directory, opened, 1, grade, file=CHEAP_FILE), key=lambda record: record["problem"])
    cheap = [records[start : start + len(openings)] for start in range(0, len(records), len(openings))]
    unsure = [n for n, three in enumerate(cheap) if arm_consensus(*_answers(three), None).used == "long_cot"]
    opened = [append_to_prompt(prompts[n], formats.long, tokenizer) for n in unsure]
    records = sample(greedy, directory, opened, 1, grade, file=LONG_FILE) if opened else []
    long = dict(zip(unsure, sorted(records, key=lambda record: record["problem"]), strict=True))
    used = [long.get(n, three[0]) for n, three in enumerate(cheap)]
    judged = [right for record in used if (right := verdict(record)) is not None]
    spent = [sum(r["tokens"] for r in three) + (long[n]["tokens"] if n in long else 0) for n, three in enumerate(cheap)]
    return {
        "problems": len(cheap),
        "agreed": 1 - len(unsure) / len(cheap) if cheap else None,
        "accuracy": sum(judged) / len(judged) if judged else None,
        "tokens": sum(spent) / len(spent) if spent else None,
    }


def append_to_prompt(prompt: Prompt, text: str, tokenizer: Any) -> Prompt:
    """Return the prompt followed by the first tokens of the answer."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return replace(prompt, uid=f"{prompt.uid}@{text}", text=prompt.text + text, ids=(*prompt.ids, *ids))


def _answers(three: Sequence[Record]) -> tuple[str | None, str | None, str | None]:
    """Return the answers of the three cheap formats; None for a truncated completion."""
    direct, short, code = (record["answer"] if record["finish"] != "length" else None for record in three)
    return direct, short, code
