"""Text around a box: usual endings are accepted; math and denials that change the answer are not."""

from __future__ import annotations

import time

import pytest

from posttrain.verify.box_context import visible_text, whole_expression
from posttrain.verify.extract import anchor, boxed_answer, hash_line
from posttrain.verify.math import grade

USUAL = [
    r"\boxed{42}",
    r"$\boxed{42}$",
    r"$$\boxed{42}$$",
    r"\[ \boxed{42} \]",
    r"\( \boxed{42} \)",
    "\\[\n\\boxed{42}\n\\]",
    "$$\n\\boxed{42}\n$$\n",
    r"**\boxed{42}**",
    r"**$\boxed{42}$**",
    r"*\boxed{42}*",
    r"Therefore, the answer is $\boxed{42}$.",
    r"Therefore, the answer is \boxed{42}.",
    r"Claire will eat $\boxed{42}$ dozens of eggs.",
    r"The answer is \boxed{42}!",
    r"The answer is $\boxed{42}$!",
    r"**Answer:** $\boxed{42}$",
    r"**Answer: \boxed{42}**",
    r"**Final Answer:** \boxed{42}",
    "### Final Answer\n\n\\boxed{42}",
    "### Final Answer\n$$\\boxed{42}$$",
    "**Final Answer**\n\\[ \\boxed{42} \\]",
    r"$x = \boxed{42}$",
    r"x = \boxed{42}",
    r"x=\boxed{42}",
    r"\[ x = \boxed{42}. \]",
    r"\[ f(2) = \boxed{42} \]",
    r"\[ 6 \cdot 7 = \boxed{42} \]",
    r"$2 + 40 = \boxed{42}$.",
    r"$\frac{84}{2} = \boxed{42}$",
    r"\[ \int_0^1 84x\,dx = \boxed{42} \]",
    r"\[ a^2 + b^2 = \boxed{42} \]",
    r"$|AB| = \boxed{42}$",
    r"$|z| = \boxed{42}$",
    r"$\sqrt{1764} = \boxed{42}$",
    r"$2x - 42 = x \implies x = \boxed{42}$",
    r"$x - 2 = 40 \Rightarrow \boxed{42}$",
    r"$\therefore \boxed{42}$",
    r"$m + n = 5 + 37 = \boxed{42}$",
    r"\begin{align*} a &= 6 \cdot 7 \\ &= \boxed{42} \end{align*}",
    r"\begin{aligned} x &= 40 + 2 \\ &= \boxed{42}. \end{aligned}",
    r"\[ \text{Answer: } \boxed{42} \]",
    r"$\text{The answer is } \boxed{42}$",
    r"\boxed{42} \text{ cm}",
    r"$\boxed{42} \text{ cm}$",
    r"$\boxed{42}\text{ cm}^2$.",
    r"$\boxed{42}$ dollars",
    r"\$\boxed{42}$",
    r"It costs $\boxed{42}$ dollars.",
    r"There are \boxed{42} apples in the box.",
    r"$\boxed{42}^\circ$",
    r"\boxed{42}^\circ",
    r"The angle is $\boxed{42^\circ}$.",
    r"(\boxed{42})",
    r"$\left(\boxed{42}\right)$",
    r"- \boxed{42}",
    "- one\n- \\boxed{42}",
    r"* \boxed{42}",
    r"> \boxed{42}",
    r"1. \boxed{42}",
    r"Step 7: \boxed{42}",
    r"Step 7 \boxed{42}",
    r"Answer - \boxed{42}",
    r"Answer — \boxed{42}",
    r"Answer – $\boxed{42}$",
    r"-> \boxed{42}",
    r"=> \boxed{42}",
    r"→ \boxed{42}",
    r"\boxed{42} - that is all.",
    r"\boxed{42} -- that is all.",
    r"$\boxed{42}$ — done.",
    r"\boxed{42} (forty-two)",
    r"\boxed{42}, as required.",
    r"\boxed{42} as desired. $\blacksquare$",
    r"$\boxed{42} \quad \blacksquare$",
    r"$\boxed{42} \quad \checkmark$",
    r"$\boxed{42} \tag{1}$",
    r"$\boxed{42} = 6 \cdot 7$",
    r"$\boxed{42} \approx 42.0$",
    r"\boxed{42} \\",
    r"{\boxed{42}}",
    r"\textbf{\boxed{42}}",
    r"$\mathbf{\boxed{42}}$",
    r"$\color{red}{\boxed{42}}$",
    r"\textcolor{blue}{\boxed{42}}",
    r"{\Large \boxed{42}}",
    r"$\displaystyle \boxed{42}$",
    r"\boxed{\boxed{42}}",
    r"\boxed{x = \boxed{42}}",
    r"\boxed{\text{42}}",
    r"\fbox{42}",
    r"\boxed 42",
    r"<b>\boxed{42}</b>",
    r"<p>\boxed{42}</p>",
    r"<answer>\boxed{42}</answer>",
    r"<think>41 or 43?</think>\boxed{42}",
    r"<thinking>\boxed{43}</thinking>\boxed{42}",
    r"<reasoning>so 43</reasoning> \boxed{42}",
    r"Since 6 is not prime, the answer is \boxed{42}.",
    r"It is not 43, but \boxed{42}.",
    r"The smallest value that is not prime is \boxed{42}.",
    r"43 is wrong. The right answer is \boxed{42}.",
    r"After correcting the wrong answer, we get \boxed{42}.",
    r"There is no other solution, so \boxed{42}.",
    r"The number of integers that do not divide it is $\boxed{42}$.",
    r"I do not see another way: \boxed{42}",
    r"\boxed{42} is the answer, not 43.",
    r"\boxed{42} is not prime.",
    r"A share of 50% of 84 gives \boxed{42}.",
    "$50\\%$ of $84$ is $\\boxed{42}$.",
    r"For $n > 3$, the value is $\boxed{42}$.",
    r"If $x < 0$ then \boxed{42}.",
    r"\boxed{42} for $x > 3$",
    r"The total is 40 + 2, i.e. \boxed{42}.",
    r"\boxed{43} is wrong. It is \boxed{42}.",
    r"Is it \boxed{43}? No: \boxed{42}",
    "% a comment\n\\boxed{42}",
    r"So $\angle ABC = \boxed{42}$ degrees",
    r"\[ \lim_{x \to 0} f(x) = \boxed{42} \]",
    r"\[ \sum_{k=1}^{6} 7 = \boxed{42} \]",
    r"\[ \log_2 x = 5 \text{, so } \boxed{42} \]",
    r"$x \in \boxed{\{42\}}$",
    r"\[ N \equiv \boxed{42} \pmod{100} \]",
]


@pytest.mark.parametrize("completion", USUAL)
def test_usual_endings_are_accepted(completion: str) -> None:
    assert grade(completion, "42")["reward"] == 1.0
    start = completion.rindex("boxed" if "boxed" in completion else "fbox")
    other = completion[:start] + completion[start:].replace("42", "41", 1)
    assert grade(other, "42")["reward"] == 0.0


CHANGED = [
    r"-\boxed{42}",
    r"$-\boxed{42}$",
    r"$ - \boxed{42}$",
    r"The answer is -\boxed{42}.",
    r"$x = -\boxed{42}$",
    r"\[ -\boxed{42} \]",
    r"−\boxed{42}",
    r"$\pm\boxed{42}$",
    r"\boxed{42}^2",
    r"$\boxed{42}^{2}$",
    r"$\boxed{42}^{-1}$",
    r"\boxed{42}!",
    r"$\boxed{42}!$",
    r"\boxed{42}+1",
    r"$\boxed{42} + 1$",
    r"$\boxed{42} - 1$",
    r"\boxed{42}-1",
    r"$1 + \boxed{42}$",
    r"$3 - \boxed{42}$",
    r"$2\boxed{42}$",
    r"$2 \cdot \boxed{42}$",
    r"$2 \times \boxed{42}$",
    r"2 * \boxed{42}",
    r"$\boxed{42}\pi$",
    r"$\boxed{42}\sqrt{3}$",
    r"$\boxed{42} \times 10^3$",
    r"$\boxed{42} \cdot 2$",
    r"$\boxed{42} / 5$",
    r"\boxed{42} million",
    r"$\boxed{42}$ million",
    r"$\boxed{42} \text{ million}$",
    r"\boxed{42} thousand dollars",
    r"\boxed{42} dozen",
    r"$\boxed{42}$ squared",
    r"\frac{1}{\boxed{42}}",
    r"$\frac{\boxed{42}}{5}$",
    r"$\dfrac{x}{\boxed{42}}$",
    r"\sqrt{\boxed{42}}",
    r"$\sqrt[3]{\boxed{42}}$",
    r"$2^{\boxed{42}}$",
    r"$2^\boxed{42}$",
    r"$\ln \boxed{42}$",
    r"$\log \boxed{42}$",
    r"$\sin\boxed{42}$",
    r"$\overline{\boxed{42}}$",
    r"$\cancel{\boxed{42}}$",
    r"x\ne\boxed{42}",
    r"$x \neq \boxed{42}$",
    r"$x \not= \boxed{42}$",
    r"x > \boxed{42}",
    r"$x < \boxed{42}$",
    r"$x \ge \boxed{42}$",
    r"$x \leq \boxed{42}$",
    r"x ≥ \boxed{42}",
    r"$\boxed{42} < x$",
    r"$\boxed{42} \ne x$",
    r"\boxed{43} / \boxed{42}",
    r"$\frac{\boxed{43}}{\boxed{42}}$",
    r"\boxed{43\boxed{42}}",
    r"\boxed{\boxed{42}43}",
    r"\boxed{-\boxed{42}}",
]
DENIED = [
    r"not \boxed{42}",
    r"It is not \boxed{42}",
    r"\boxed{43}. It is not \boxed{42}",
    r"The answer is not $\boxed{42}$.",
    r"The answer isn't \boxed{42}.",
    r"It cannot be 42, it is never \boxed{42}",
    r"The answer is \boxed{43}, rather than \boxed{42}.",
    r"I doubt that the answer is \boxed{42}.",
    r"It is false that the answer is \boxed{42}.",
    r"The wrong answer is \boxed{42}.",
    r"Wrong answer: \boxed{42}",
    r"\boxed{42} is wrong.",
    r"$\boxed{42}$ is incorrect",
    r"\boxed{42} is not the answer.",
    r"\boxed{42} (wrong)",
    r"Either \boxed{43} or else \boxed{42}",
    r"\boxed{43}, or perhaps \boxed{42}",
    r"\boxed{43} or maybe \boxed{42}",
    r"\boxed{43} or possibly \boxed{42}",
    r"\boxed{43}, alternatively \boxed{42}",
]
HIDDEN = [
    r"\boxed{43}\phantom{\boxed{42}}",
    r"\boxed{43} % \boxed{42}",
    r"% \boxed{42}",
    "so \\boxed{43}\n  % \\boxed{42}",
    r"\boxed{43}<!-- \boxed{42} -->",
    "<!--\n\\boxed{42}\n-->",
    r"~~\boxed{42}~~",
    r"<thinking>\boxed{42}</thinking>",
    r"<THINK>\boxed{42}</THINK> 43",
    r"<Thinking>\boxed{42}</Thinking> 43",
    r"<thought>\boxed{42}</thought> 43",
    r"<reasoning>\boxed{42}</reasoning> 43",
    r"so \boxed{42}</thinking> 43",
]


@pytest.mark.parametrize("completion", [*CHANGED, *DENIED, *HIDDEN])
def test_text_that_a_reader_would_not_accept_is_wrong(completion: str) -> None:
    assert grade(completion, "42")["reward"] == 0.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"-\boxed{42}", "-42"),
        (r"$x = -\boxed{42}$", "-42"),
        (r"$\boxed{42}^2$", "1764"),
        (r"$\boxed{x+1}^2$", "(x+1)^2"),
        (r"$\boxed{5}!$", "120"),
        (r"\boxed{42}\%", "0.42"),
        (r"\boxed{42}%", "42%"),
        (r"\boxed{42} million", "42000000"),
        (r"$\boxed{42}$ million", "42000000"),
        (r"\frac{1}{\boxed{42}}", "1/42"),
        (r"$\sqrt{\boxed{42}}$", r"\sqrt{42}"),
        (r"$\boxed{2}\sqrt{3}$", r"2\sqrt{3}"),
        (r"$2\boxed{\pi}$", r"2\pi"),
        (r"$x > \boxed{42}$", "x>42"),
        (r"$x > \boxed{42}$", r"(42, \infty)"),
        (r"$x \ne \boxed{42}$", r"x \neq 42"),
        (r"$\boxed{3.2} \times 10^5$", "320000"),
        (r"\boxed{43}. It is not \boxed{42}", "43"),
        (r"\boxed{43}\phantom{\boxed{42}}", "43"),
        (r"\boxed{43} % \boxed{42}", "43"),
        (r"\boxed{43}<!-- \boxed{42} -->", "43"),
        (r"\boxed{43} / \boxed{42}", "43/42"),
        (r"(\boxed{C})", "C"),
        (r"**(\boxed{C})**", "C"),
        (r"\boxed{C}) 12", "C"),
        (r"\boxed{C}. 12", "C"),
        (r"\boxed{1}, \boxed{2}", "1, 2"),
        (r"\boxed{1010}_2", "1010_2"),
    ],
)
def test_box_within_an_expression_gives_the_whole_expression(completion: str, answer: str) -> None:
    assert grade(completion, answer)["reward"] == 1.0


def test_denied_box_is_not_counted_among_two() -> None:
    assert grade(r"\boxed{2} is wrong \boxed{1}", r"\boxed{1}, \boxed{2}")["reward"] == 0.0
    assert grade(r"\boxed{1} \boxed{2}", r"\boxed{1}, \boxed{2}")["reward"] == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "I doubt that the answer is 42.",
        "It is false that the answer is 42.",
        "Wrong answer: 42",
        "Incorrect answer: 42",
        "A wrong answer is 42",
        "The incorrect answer is 42.",
        "Not the final answer: 42",
        "I do not think the answer is 42",
        "It is not true that the answer is 42",
        "The answer is not 42",
    ],
)
def test_denied_anchor_is_not_an_answer(completion: str) -> None:
    assert grade(completion, "42", extract=("anchor",))["reward"] == 0.0
    assert grade(f"The answer is 42.\n{completion.replace('42', '43')}", "42", extract=("anchor",))["reward"] == float(
        "is not 4" not in completion
    )


@pytest.mark.parametrize(
    ("completion", "extract"),
    [
        (r"<answer>I do not think it is \boxed{42}</answer>", "answer_tag"),
        (r"<answer>43 \boxed{42}</answer>", "answer_tag"),
        ("#### ~~42~~", "hash"),
        (r"not \boxed{42}", "boxed"),
        ("Answer: 43 or Answer: 42", "anchor"),
        ("Answer: 42\nor 43", "anchor"),
        ("Answer: 42 (minus forty-two)", "anchor"),
        ("#### 42 (at least)", "hash"),
        ("#### 42 (million)", "hash"),
        ("#### 42 (thousands)", "hash"),
        ("The answer is 42 (guess)", "anchor"),
    ],
)
def test_other_positions_are_read_as_a_reader_does(completion: str, extract: str) -> None:
    assert grade(completion, "42", extract=(extract, "last_number"))["reward"] == 0.0  # type: ignore[arg-type]


def test_extraction_is_linear_in_hostile_text() -> None:
    started = time.process_time()
    for text in (
        r"\phantom{",
        "<!--",
        "~~a",
        "% \\boxed{1}",
        "not ",
        r"\sqrt{",
        r"\boxed{1}^2 ",
        "</thinking>",
        r"$-\boxed{-",
    ):
        boxed_answer(visible_text(text * 20_000))
        anchor(visible_text(text * 20_000))
        hash_line(visible_text(text * 20_000))
    assert time.process_time() - started < 20
    assert whole_expression(r"-\boxed{5}", 1, 10) == "-5"
