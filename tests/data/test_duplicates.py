"""Duplicates and near-duplicates, on texts whose pairs are counted by hand."""

from __future__ import annotations

import itertools
import random

from posttrain.data.duplicates import (
    SHINGLE,
    answer,
    find_near_duplicates,
    find_same_except_numbers,
    group_same_words,
    match_same_words,
    question,
    words,
)


def test_words_are_lower_cased_and_keep_only_arithmetic_signs():
    assert words("What is 3 - 4?") == ("what", "is", "3", "-", "4")
    assert words("what is 3+4") != words("what is 3-4")
    assert words("1.50 apples, please!") == ("1.50", "apples", "please")


def test_duplicates_ignore_case_and_punctuation():
    assert group_same_words(["Add 2 and 3.", "add 2 and 4", "ADD 2 AND 3", "?!", "?!", "!?"]) == [[0, 2], [3, 4]]
    assert match_same_words(["a b", "c", "A, B!"], ["x", "a b"]) == [(0, 1), (2, 1)]


def test_near_duplicates_share_shingles():
    """Ten words have eight runs of three.

    A different last word changes one of them: 7 of 9 are shared, 0.78. An additional word keeps all eight of nine,
    0.89.
    """
    ten = "a farmer walks to the market with his old donkey"
    texts = [ten, ten.replace("donkey", "horse"), f"{ten} today"]
    assert [(p.first, p.second, round(p.similarity, 2)) for p in find_near_duplicates(texts)] == [(2, 0, 0.89)]
    assert [p[:2] for p in find_near_duplicates(texts, min_similarity=0.75)] == [(1, 0), (2, 0)]
    assert [p[:2] for p in find_near_duplicates([f"{ten} today"], [ten.replace("donkey", "horse"), ten])] == [(0, 1)]


def test_problems_of_one_template_are_counted_but_not_near_duplicates():
    texts = [f"A train goes {n} miles in {n + 1} hours and the driver then rests for a while at home" for n in range(4)]
    assert find_near_duplicates(texts) == []
    assert find_same_except_numbers(texts[:2], texts[2:]) == [0, 1]
    assert find_same_except_numbers(["1+2"], ["3+4"]) == []  # a sum without words is not a template
    assert find_same_except_numbers(texts[:1], texts[:1]) == []  # the same numbers: a duplicate


def test_prefix_filtering_matches_exhaustive_comparison():
    draw = random.Random(0)
    base = [" ".join(draw.choices("abcdefgh", k=draw.randint(4, 14))) for _ in range(12)]
    texts = [" ".join(w for w in t.split() if draw.random() > 0.05) for t in base for _ in range(4)]

    def shingles(text):
        w = words(text)
        return {tuple(w[i : i + 3]) for i in range(max(1, len(w) - 2))}

    def jaccard(a, b):
        return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))

    wanted = {
        (b, a)
        for a, b in itertools.combinations(range(len(texts)), 2)
        if words(texts[a]) != words(texts[b]) and jaccard(texts[a], texts[b]) >= 0.6
    }
    assert len(wanted) > 5
    assert {(p.first, p.second) for p in find_near_duplicates(texts, min_similarity=0.6)} == wanted


def test_question_and_answer_text_of_a_row():
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert (question({"messages": talk}), answer({"messages": talk})) == ("q", "a")
    assert (question({"prompt": talk[:2]}), answer({"prompt": "q", "answer": 4})) == ("q", "4")
    assert answer({"chosen": "x", "rejected": "y"}) == "x\0y" and question({"text": "t"}) == "t"


def test_similarity_at_the_threshold_is_found() -> None:
    """55 of 100 shingles are shared, and 0.55 * 100 is more than 55 in floating point."""
    names = [f"w{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(100 + SHINGLE - 1)]
    texts = [" ".join(names), " ".join(names[: 55 + SHINGLE - 1])]
    assert [(p.first, p.second, p.similarity) for p in find_near_duplicates(texts, min_similarity=0.55)] == [
        (1, 0, 0.55)
    ]
