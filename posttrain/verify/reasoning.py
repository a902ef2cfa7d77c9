"""Rewards for consistency between thoughts, answers and reflections. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from posttrain.verify.extract import (
    THINK_END,
    THINK_START,
    after_think,
    answer_tag,
    last_boxed,
    last_thought,
    outside_thoughts,
    tag_contents,
)
from posttrain.verify.golds import gold_text, is_no_answer
from posttrain.verify.math import equal
from posttrain.verify.math import grade as grade_maths
from posttrain.verify.text import exact_blocks, exact_match, golds_of, qa_norm

_CONCLUSION = re.compile(r"answer\s+is[ \t]*:?([^.,;\n]*)", re.IGNORECASE)
_VERDICT = re.compile(r"correctness of the final answer[\s*]*:[\s*]*(correct|wrong)\b", re.IGNORECASE)
_NO_CONCLUSION = re.compile(r"\\(?:boxed|fbox)\s*\{(?:[\s.,;:?!~$]|\\[ ,;:!])*\}")
_WORD = r"(?:[^\W\d_]{2,}(?:['’-][^\W\d_]+)*|[aAI]\b)"
_WORDS_ONLY = re.compile(rf"\s*{_WORD}(?:[\s,;:.?!]+{_WORD})*[\s.?!]*")
_TRUTHS = {"1": True, "true": True, "yes": True, "correct": True, "right": True}
_TRUTHS |= {"0": False, "false": False, "no": False, "wrong": False, "incorrect": False}
_LETTER = re.compile(r"\W*([A-Za-z])\W*")


def format_and_accuracy(completion: str, answer: Any) -> dict[str, float | None]:
    """Compute format + accuracy (DianJin): {"reward": 0, 1 or 2, "format", "accuracy"}.

    reward is None without a gold answer.

    format: 1 if the text is exactly one thought and one answer, neither blank. accuracy: 1 if the last answer block, or
    its box, equals the gold answer.
    """
    form = float(exact_blocks(completion, ("think", "answer")) is not None)
    accuracy = grade_maths(completion, answer, extract=("answer_tag",))["reward"]
    return {"reward": None if accuracy is None else form + accuracy, "format": form, "accuracy": accuracy}


def conclusion(thought: str) -> str | None:
    """Return the last box of a thought, else the text after its last "answer is" up to punctuation.

    An empty box, or an empty text after "answer is", is skipped in favor of an earlier one.
    """
    box = last_boxed(_NO_CONCLUSION.sub(" ", thought))
    if box is not None and box.strip():
        return box.strip()
    texts = [text for match in _CONCLUSION.findall(_NO_CONCLUSION.sub(" ", thought)) if (text := match.strip())]
    return texts[-1] if texts else None


def think_answer_consistency(
    completion: str, answer: Any, *, values: Sequence[float] = (1.0, 0.5, 0.0)
) -> dict[str, Any]:
    """Reward an answer less if its own thought contradicts it (TACO): {"reward", "conclusion", "consistent"}.

    values: for a right answer that agrees with the thought (or a thought without a `conclusion`), for a right answer
    that contradicts the thought, for a wrong or missing answer; our guesses, the paper's values are unknown. Equality
    is decided by the math verifier. reward is None without a gold answer that math can compare (no dict, list or
    prose); consistent is None if there is nothing to compare.
    """
    gold = None if isinstance(answer, Mapping | list | tuple) else gold_text(answer)
    gold = None if gold is None or is_no_answer(gold) else gold
    found = answer_tag(after_think(completion))
    arrived = conclusion(last_thought(completion) or "")
    consistent = None if found is None or arrived is None else _agree(arrived, found)
    right = None if gold is None else equal(gold, found or "")
    if right is None:
        return {"reward": None, "conclusion": arrived, "consistent": consistent}
    reward = values[2] if found is None or not right else values[1] if consistent is False else values[0]
    return {"reward": reward, "conclusion": arrived, "consistent": consistent}


def _agree(a: str, b: str) -> bool:
    same = equal(a, b)
    return qa_norm(a) == qa_norm(b) if same is None else same


def letter_of(text: str | None) -> str | None:
    """Return the option letter of a short answer, in upper case: `(b).` -> B; None for anything else."""
    found = _LETTER.fullmatch(text) if text else None
    return found[1].upper() if found else None


def shuffled_consistency(
    first: str | None,
    second: str | None,
    permutation: Sequence[int],
    answer: str,
    *,
    values: Sequence[float] = (1.0, 0.5, 0.0, 0.0),
) -> dict[str, Any]:
    """Score a choice made twice with shuffled options (ACRE): {"reward", "second_original", "consistent"}.

    permutation[j]: the original option at position j of the second question; second_original is the second choice in
    the first question's letters. values: both right, only the first, only the second, neither; our guesses, the paper's
    values are unknown. A letter that is not an option is wrong.
    """
    once, again, gold = letter_of(first), letter_of(second), letter_of(answer)
    index = -1 if again is None else ord(again) - ord("A")
    mapped = chr(ord("A") + int(permutation[index])) if 0 <= index < len(permutation) else None
    hits = (gold is not None and once == gold, gold is not None and mapped == gold)
    reward = values[{(True, True): 0, (True, False): 1, (False, True): 2, (False, False): 3}[hits]]
    return {"reward": reward, "second_original": mapped, "consistent": once is not None and once == mapped}


def reflection(
    completion: str,
    answer: Any,
    length_total: float,
    length_first: float,
    *,
    keep: float = 0.75,
    fix: float = 1.0,
    mislead: float = 0.25,
    still_wrong: float = 0.0,
    single: float = 0.5,
    format_weight: float = 0.5,
    length_weight: float = 0.1,
    same: Callable[[str, Sequence[str]], bool] = lambda text, golds: exact_match(text, golds) > 0,
) -> dict[str, float | None]:
    """Score an answer that is reflected on and revised (SRPO).

    Returns {"reward": sum of the parts, "format", "accuracy", "length"}.

    format: format_weight if the text is exactly thought, answer, reflection, thought, answer.
    accuracy, by the first and the last answer (compared by `same`): right and right keep, wrong and right fix, right
    and wrong mislead, wrong and wrong still_wrong; a single answer earns `single` if right.
    length: length_weight * exp(-((L - 2 F) / (0.5 F))^2) for L tokens in total and F in the first thought and answer; 0
    with fewer than two answers or F = 0.
    With fix above keep, a policy can earn more by a wrong first answer: monitor the first answer, or set fix = keep.
    All parts except format are None without a gold answer. An answer block inside a thought does not count.
    """
    blocks = ("think", "answer", "reflection", "think", "answer")
    form = format_weight if exact_blocks(completion, blocks) is not None else 0.0
    golds, answers = golds_of(answer), tag_contents(outside_thoughts(completion), "answer")
    if not golds:
        return {"reward": None, "format": form, "accuracy": None, "length": None}
    right = [same(text, golds) for text in answers]
    table = {(True, True): keep, (False, True): fix, (True, False): mislead, (False, False): still_wrong}
    only = single if right == [True] else 0.0
    accuracy = table[right[0], right[-1]] if len(right) >= 2 else only
    length = 0.0
    if len(right) >= 2 and length_first > 0:
        length = length_weight * math.exp(-(((length_total - 2 * length_first) / (0.5 * length_first)) ** 2))
    return {"reward": form + accuracy + length, "format": form, "accuracy": accuracy, "length": length}


def same_maths(text: str, golds: Sequence[str]) -> bool:
    """Return whether an answer equals a gold answer by the math verifier, or in words by exact match.

    Exact match drops all punctuation, even a minus, so it applies only if both texts are words of two or more letters.
    A gold answer that the verifier cannot parse equals only its own text.
    """
    words = [gold for gold in golds if _WORDS_ONLY.fullmatch(gold)] if _WORDS_ONLY.fullmatch(text) else []
    return exact_match(text, words) > 0 or any(_same_or_written(gold, text) for gold in golds)


def _same_or_written(gold: str, text: str) -> bool:
    same = equal(gold, text)
    return " ".join(gold.split()) == " ".join(text.split()) if same is None else same


def first_part(completion: str) -> str:
    """Return the text up to the end of its first answer block outside of thoughts; "" without one."""
    end = 0
    while (end := completion.find("</answer>", end)) >= 0:
        end += len("</answer>")
        opens, closes = completion.find(THINK_START, end), completion.find(THINK_END, end)
        if closes < 0 or 0 <= opens < closes:
            return completion[:end]
    return ""


def truth_of(label: Any) -> bool | None:
    """Parse a truth label: 1, true, yes, correct or their opposites, as value or text; None for null or NaN.

    Raises ValueError for anything else.
    """
    if label is None or label != label or (isinstance(label, str) and not label.strip()):
        return None
    truth = _TRUTHS.get(str(int(label) if isinstance(label, float) and label in (0, 1) else label).strip().lower())
    if truth is None and str(label).strip().lower() not in ("nan", "none", "null"):
        raise ValueError(f"`original_correct` is {label!r}; allowed: 0, 1, true, false, correct, wrong")
    return truth


def verdict(completion: str) -> bool | None:
    """Return the verdict of a critique, its last "Correctness of the final answer: Correct|Wrong"; None without one.

    Text inside thoughts does not count.
    """
    found = _VERDICT.findall(outside_thoughts(completion))
    return found[-1].lower() == "correct" if found else None


def critique(
    completion: str,
    original_correct: float,
    refined_correct: float | None = None,
    *,
    stage: Literal[1, 2] = 2,
    discrimination: Sequence[float] = (0.2, -1.0),
    refine_values: Sequence[float] = (1.0, 0.0, 1.0, 0.0),
) -> dict[str, Any]:
    """Score a critique of an answer (Critique-RL): {"reward", "judged_right"}.

    Stage 1: 1 if the verdict about the original answer is right, else -1. Stage 2: discrimination[1] if the verdict is
    wrong or missing, else discrimination[0] + refine_values for (original, refined answer): both right, only the
    original, only the refined, neither. A refined answer that could not be graded (None) counts as wrong. Raises
    ValueError for any other stage.
    """
    found, truth = verdict(completion), bool(original_correct)
    judged_right = found is not None and found == truth
    if stage == 1:
        return {"reward": 1.0 if judged_right else -1.0, "judged_right": judged_right}
    if stage != 2:
        raise ValueError(f"unknown stage {stage!r}; known: 1, 2")
    if not judged_right:
        return {"reward": discrimination[1], "judged_right": False}
    case = {(True, True): 0, (True, False): 1, (False, True): 2, (False, False): 3}[truth, bool(refined_correct)]
    return {"reward": discrimination[0] + refine_values[case], "judged_right": True}
