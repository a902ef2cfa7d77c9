"""Answer extraction on hand-written completions."""

from __future__ import annotations

import time

import pytest

from posttrain.verify.extract import (
    after_think,
    anchor,
    answer_tag,
    boxed_answer,
    extract,
    hash_line,
    last_boxed,
    last_number,
    last_tag,
    outside_thoughts,
)
from posttrain.verify.numerals import value_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{4} then \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{4} then \boxed{5", "4"),
        (r"\boxed{5", None),
        (r"\fbox{7}", "7"),
        (r"\boxed{1} \fbox{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\boxed{\boxed{5}}", "5"),  # the inner box starts last
        (r"\boxed{ \boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{ 5 }", " 5 "),
        (r"} \boxed{5} }", "5"),
        (r"{ \boxed{5}", "5"),
        (r"\\boxed{5}", "5"),  # one escape too many, as models often write
        (r"\boxed{1\\2}", r"1\\2"),  # a row break, then a digit
        (r"\boxed{1\\}", r"1\\"),  # a row break does not escape the brace
        (r"\boxed {4} then \boxed {5}", "5"),  # TeX skips blanks after a command
        ("\\boxed\n{5}", "5"),
        (r"\\boxed {5}", "5"),
        (r"\boxed {5", None),
        (r"\boxed 5", None),
        ("boxed{5}", None),
        ("\\boxed{a\nb}", "a\nb"),
        ("", None),
        ("答え \\boxed{é}", "é"),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


def test_last_boxed_is_linear_in_hostile_text() -> None:
    started = time.process_time()
    assert last_boxed(r"\boxed{" * 100_000) is None
    assert last_boxed(r"\boxed{" * 50_000 + "5" + "}" * 50_000) == "5"
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1} and \boxed{-2}", "1, -2"),
        (r"\boxed{1}, \boxed{-2} or \fbox{3}.", "1, -2, 3"),
        (r"$x = \boxed{1}$ or $x = \boxed{-2}$", "1, -2"),
        (r"$x_1=\boxed{1}$, $x_{2} = \boxed{-2}$", "1, -2"),
        (r"\boxed{1}\text{ and }\boxed{-2}", "1, -2"),
        (r"\[\boxed{1}\quad\boxed{-2}\]", "1, -2"),
        (r"\\boxed{1} and \\boxed{-2}", "1, -2"),
        ("\\boxed{1}\n\\boxed{-2}", "1, -2"),
        ("\\boxed{1}\n\n\\boxed{-2}", "-2"),
        (r"\boxed{1} wait \boxed{-2}", "-2"),
        (r"\boxed{4} is wrong, \boxed{1} or \boxed{-2}", "1, -2"),
        (r"\boxed{5} and \boxed{5}", "5"),
        (r"{\boxed{\boxed{1}}} and \boxed{(2, 3)}", "1, (2, 3)"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"so $x = \boxed 42$.", "42"),
        (r"so $x = \boxed {42}$.", "42"),
        (r"$-\boxed {42}$", "-42"),
        (r"$\boxed {1}$ and $\boxed {2}$", "1, 2"),
        (r"\fbox 4.5.", "4.5"),
        (r"\boxed 1 and \boxed{-2}", "1, -2"),
        (r"\boxed{\boxed 7}", "7"),
        ("no box", None),
    ],
)
def test_adjacent_boxes_are_one_answer(text: str, expected: str | None) -> None:
    assert boxed_answer(text) == expected
    assert extract(text, ["boxed"]) == expected
    assert answer_tag(f"<answer>{text}</answer>") == (text if expected is None else expected)


def test_requested_number_of_boxes_is_extracted() -> None:
    text = r"\boxed{9} no: first \boxed{1}, second \boxed{-2} or \boxed{3}"
    assert [boxed_answer(text, n) for n in (1, 2, 3, 4, 9)] == [
        "-2, 3",
        "-2, 3",
        "1, -2, 3",
        "9, 1, -2, 3",
        "9, 1, -2, 3",
    ]


def test_extractors_are_linear_in_hostile_text() -> None:
    started = time.process_time()
    for text in (
        r"\boxed{",
        r"\boxed{1}",
        r"\boxed{1} and ",
        "answer: ",
        "answer",
        "# answer\n",
        "answer:\\[",
        "#### ",
        ". A b c ",
    ):
        for name in ("boxed", "hash", "anchor"):
            extract(text * 50_000, [name])  # type: ignore[list-item]
            extract("#### answer: " + text * 50_000, [name])  # type: ignore[list-item]
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>4</answer> no <answer>5</answer>", "5"),
        ("<answer>4</answer> no <answer>5", "4"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>5", None),
        ("</answer>5<answer>", None),
        ("<answer>a<answer>b</answer>", "a<answer>b"),  # non-greedy from the first opening tag
        ("<answer></answer>", ""),
        ("", None),
    ],
)
def test_last_tag(text: str, expected: str | None) -> None:
    assert last_tag(text, "answer") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a</think>b</think> c", " c"), ("no thought", "no thought"), ("a</think>", ""), ("", "")],
)
def test_after_think(text: str, expected: str) -> None:
    assert after_think(text) == expected


def test_after_think_accepts_another_delimiter() -> None:
    assert after_think("a[/THINK]b</think>c", "[/THINK]") == "b</think>c"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>so \\boxed{5}</answer>", "5"),
        ("\\boxed{4} <answer>5</answer>", "5"),
        ("<answer>\\boxed{5</answer>", "\\boxed{5"),
        ("\\boxed{4}", None),
    ],
)
def test_answer_tag_takes_the_box_inside(text: str, expected: str | None) -> None:
    assert answer_tag(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("48 + 24 = 72\n#### 72", "72"),
        ("#### 1\n#### 2\nmore", "2"),
        ("####  1,000  ", "1,000"),
        ("#### \n7", None),  # nothing on its line
        ("### 7", None),
        ("#### 72 (seventy-two)", "72"),
        ("#### 72 (seventy two dollars).", "72"),
        ("**#### 72**", "72"),
        ("#### **$72$**", "72"),
        ("#### 72.", "72"),
        (r"#### \(72\)", "72"),
        ("#### 72 ####", "72"),
        ("#### Answer: 72", "72"),
        ("#### The answer is **72**.", "72"),
        ("#### 72 (or 73)", "72 (or 73)"),  # another answer is not a remark
        ("#### 72 (73)", "72 (73)"),
        ("#### (1, 2)", "(1, 2)"),
        ("#### f(x)", "f(x)"),
        ("#### C#", "C#"),
    ],
)
def test_hash_line(text: str, expected: str | None) -> None:
    assert (hash_line(text) or None) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 12.", "12"),
        ("**The answer is 12.**", "12"),
        ("The final answer is **12**.", "12"),
        ("the Answer is $12$.\nThat is all.", "12"),
        ("The answer is: 12", "12"),
        ("The answer is 3.5.", "3.5"),
        ("The answer is 3\nno, the answer is 4", "4"),
        ("The answer is x^2 + 1 ", "x^2 + 1"),
        ("The answer is", ""),
        ("I give up", None),
        ("Answer: 12", "12"),
        ("so 3 * 4 = 12.\nAnswer: $12$.", "12"),
        ("**Answer:** 12", "12"),
        ("**Answer: 12**", "12"),
        ("**Answer**: `12`", "12"),
        ("### Final Answer: 12", "12"),
        ("- **Final answer:** **12** apples", "12 apples"),
        ("answer : 12\n", "12"),
        ("ANSWER\N{FULLWIDTH COLON}12", "12"),
        ("Answers: 1, 2", "1, 2"),
        ("Answer: 11\nNo.\nAnswer: 12", "12"),
        ("Answer: 11\nSo the answer is 12", "12"),
        ("The answer is 11\nAnswer: 12", "12"),
        ("Answer:\n12", "12"),
        ("**Final Answer**\n\n12", "12"),
        ("### Answer\n$12$\nThat is all.", "12"),
        ("Answer:\n\\[\n12\n\\]\n", "12"),
        ("Answer: $$12$$", "12"),
        (r"Answer: \(12\).", "12"),
        ("The final answer is:\n**12**", "12"),
        ("Answer: 12 (twelve)", "12"),
        ("Final Answer: The final answer is $12$. I hope it is correct.", "12"),
        ("Answer: 12! That was easy.", "12"),
        ("Answer: 12 cm.", "12 cm"),
        ("Answer: x = 12", "x = 12"),
        ("Answer: 12, since 5 + 7 = 12.", "12"),
        ("The answer is 12 because 13 is odd", "12"),
        ("Answer: 12, since 13 is not", "12, since 13 is not"),
        ("Answer: (B) 12", "(B) 12"),
        ("The correct option is **B**.", "B"),
        ("An option is to stop", None),
        ("Answer: 12 or 13", "12 or 13"),  # a possible second answer is retained
        ("Answer: 12. Or maybe it is 13.", "12. Or maybe it is 13"),
        ("Answer: 12 (not 13)", "12 (not 13)"),
        ("The answers to both are hard", None),
        ("answered: 12", None),
        ("Final Answer: The final answer is $10,455$. I hope it is correct.", "10,455"),
        # Other languages, after the multilingual anchors of NeMo-RL and simple-evals.
        ("所以答案是 5。", "5"),
        ("**答案**：5", "5"),
        ("最终答案：$5$。", "5"),
        ("答案选C", "C"),
        ("答案是：\n\n5", "5"),
        ("答案：5。所以小明对了。", "5"),
        ("答案：5。也可能是六。", "5。也可能是六"),
        ("答案：5 或 6", "5 或 6"),
        ("Réponse : 5", "5"),
        ("Antwort: **5**.", "5"),
        ("الإجابة: C", "C"),
        ("정답: 3", "3"),
        # Sentences, after the anchors of MGSM and MMLU-ProX in lm-evaluation-harness.
        ("La réponse finale est : 5.", "5"),
        ("La réponse est de 5 euros.", "5 euros"),
        ("La respuesta correcta es **5**.", "5"),
        ("Die Antwort lautet 5.", "5"),
        ("La risposta è (B)", "(B)"),
        ("A resposta é 5.", "5"),
        ("Ответ — -5.", "-5"),
        ("Odpověď je 5.", "5"),
        ("Jawabannya adalah 5", "5"),
        ("Jibu ni 5.", "5"),
        ("Câu trả lời là 5.", "5"),
        ("A válasz (B)", "(B)"),
        ("よって答えは「5」です。", "5"),
        ("답은 (B)입니다.", "(B)"),
        ("คำตอบคือ 5", "5"),
        ("సమాధానం 5.", "5"),
        ("উত্তর হল 5।", "5"),
        ("उत्तर है 5।", "5"),
        ("جواب B ہے", "B"),
        ("الإجابة النهائية هي: 5", "5"),
        ("因此答案应该是 5。", "5"),
        ("故选：B．", "B"),
        ("答：5", "5"),
        ("The answer to the question is 5.", "5"),
        ("La réponse n'est pas 5.", None),
        ("La respuesta incorrecta es 5", None),
        ("A resposta não é 5.", None),
        ("不正解は5", None),
        ("故不选A", None),
        ("回答 5 个问题", None),
        ("Answer choices: A", None),
        ("答えは5ではない。", "5ではない"),
        ("답은 5가 아닙니다.", "5가 아닙니다"),
        ("正确答案不是：5", None),
        ("错误答案：5", None),
        ("Falsche Antwort: 5", None),
        ("这不是答案：5。答案：6", "6"),
        ("答案如下：\n首先", None),
        # A retracted answer is not an answer.
        ("The wrong answer is 5", None),
        ("Incorrect answer: 42", None),
        ("Not the final answer: 42", None),
        ("No answer is 5", None),
        ("If the answer is 5", None),
        ("I doubt that the answer is 42.", None),
        ("It is false that the answer is 42.", None),
        ("The answer is 7.\nIt is not true that the answer is 8.", "7"),
        ("There is no doubt that the answer is 42.", "42"),
        ("Since x is not 0, the answer is 5.", "5"),
        ("If x = 3 then the answer is 5", "5"),
        # Several answers remain several.
        ("Answer: 6 or Answer: 5", "6 or Answer: 5"),
        ("The answer is 6, or maybe the answer is 5", "6, or maybe the answer is 5"),
        ("The answer is 6. The answer is 5.", "5"),
        ("Answer: 5\nor 6", "5 , or 6"),
        ("### Answer\n5\n6", "5 , 6"),
        ("Answer: 5\n\nAnd now a check.", "5"),
        # Remarks that change the number are retained.
        ("Answer: 5 (minus five)", "5 (minus five)"),
        ("Answer: 5 (six)", "5 (six)"),
        ("Answer: 5 (thousand)", "5 (thousand)"),
        ("Answer: 5 (at least)", "5 (at least)"),
        ("Answer: -5 (minus five)", "-5"),
        ("Answer: 105 (one hundred five apples)", "105"),
        ("The answer is 5. It might be six instead.", "5. It might be six instead"),
        ("Answer: 5. But it can be six.", "5. But it can be six"),
    ],
)
def test_anchor(text: str, expected: str | None) -> None:
    assert anchor(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 and 3", "3"),
        ("costs $1,234.50 in all", "1,234.50"),
        ("it is -7.", "-7"),
        ("5-3", "3"),  # a difference, not a negative number
        ("about .5", ".5"),
        ("3, 4,", "4"),
        ("none", None),
        ("it is −7.", "-7"),
        ("it is –7.5", "-7.5"),
        ("3–5", "5"),
        ("8−5", "5"),
    ],
)
def test_last_number(text: str, expected: str | None) -> None:
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{6} or else \boxed{5}", "6, 5"),
        (r"\boxed{6}, or perhaps \boxed{5}", "6, 5"),
        (r"\boxed{6} (or \boxed{5})", "6, 5"),
        (r"\boxed{6} / \boxed{5}", "6 / 5"),
        (r"\boxed{6} \lor \boxed{5}", "6, 5"),
        (r"\boxed{6}; if not, \boxed{5}", "6, 5"),
        (r"\boxed{6}. So it is \boxed{5}", "5"),
        (r"$-\boxed{5}$", "-5"),
        (r"x = -\boxed{5}", "-5"),
        (r"x = \pm\boxed{5}", r"\pm5"),
        (r"x\ne\boxed{5}", r"x\ne5"),
        (r"- \boxed{5}", "5"),  # an item of a list
        (r"x-\boxed{5}", "x-5"),
    ],
)
def test_boxes_are_read_with_their_separators_and_signs(text: str, expected: str) -> None:
    assert boxed_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("five", 5), ("forty-two", 42), ("one hundred and five", 105), ("two thousand three", 2003)),
        *(("minus three", -3), ("three hundred", 300), ("seventeen million two hundred thousand", 17_200_000)),
        *(("ten four", None), ("five apples", None), ("", None), ("thirty ten", None), ("hundred", None)),
    ],
)
def test_numbers_in_words(text: str, value: int | None) -> None:
    assert value_of(text) == value


def test_first_extractor_with_a_match_decides() -> None:
    text = r"<answer>4</answer> \boxed{5} and 6"
    assert extract(text, ["boxed", "answer_tag"]) == "5"
    assert extract(text, ["answer_tag", "boxed"]) == "4"
    assert extract(text, ["hash", "last_number"]) == "6"
    assert extract(r"\boxed{} #### 7", ["boxed", "hash"]) == ""  # matched, although blank
    assert extract("seven", ["boxed", "hash"]) is None


def test_unknown_extractor_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown extractor 'box'"):
        extract("", ["box"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", ""),
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),  # the prompt opened it
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("a</think>b<think>c</think>d", "bd"),
        ("<think>a", "<think>a"),  # never closed
        ("<think>a</think>b<think>c", "b<think>c"),
        ("<think>a<think>b</think>c", "c"),
        ("<answer>x</answer><think>a</think>", "<answer>x</answer>"),
    ],
)
def test_outside_thoughts(text: str, left: str) -> None:
    assert outside_thoughts(text) == left
