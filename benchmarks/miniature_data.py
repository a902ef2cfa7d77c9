"""Tasks of `miniatures.py`: the quickstart's sums by number of carries, with hints or checks, and running totals.

    458+367=?    <think>8+7+0=15 6+5+1=12 3+4+1=08</think><answer>825</answer>
    7DMq!=?      <think>a0b2c3d3e6f8...</think><answer>5</answer>

In the second task, D, M, q and ! stand for 3, 2, 1 and 0, which are added to 7 in turn, repeatedly; only the last digit
of each total is kept. Problems whose text has a CRC-32 divisible by 10 are held out: they are in no training set.
"""

import random
import re
import runpy
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUMS = runpy.run_path(str(Path(__file__).parents[1] / "recipes" / "quickstart_data.py"))
HINTED = "{prompt}\n{hint}"  # `user` of prompt_variants
CRITIC = "{question}\n{output}\n{checks}"  # `critic` of rollout.workflow
HINT_RATIOS = (0.25, 0.5, 0.75)
TOKEN = re.compile(r"</?\w+>|.")  # of the tiny model: a tag or a character
STEPS = "abcdefghijklmno"
ALPHABETS = ("ABCDEFGHIJ", "KLMNOPQRST", "pqrstuvwxy", "!#$%&()*+,")  # of the numbers to add: digits 0 to 9


# --- sums ---


def count_carries(a: int, b: int) -> int:
    """Return the number of carries into tens and hundreds in a + b, which demonstrations may forget: 0 to 2."""
    ones = (a % 10 + b % 10) // 10
    return ones + (a // 10 % 10 + b // 10 % 10 + ones) // 10


def sums(size: int, seed: int, fewest: int = 0, held_out: bool = False) -> list[dict[str, Any]]:
    """Return `size` rows to solve, equally many for each number of carries from `fewest` to 2.

    A row has prompt, answer, solution, checks of the answer's last three digits, and its difficulty: carries / 2.
    """
    levels = range(fewest, 3)
    left = {level: len(range(place, size, len(levels))) for place, level in enumerate(levels)}
    rows: list[dict[str, Any]] = []
    for a, b in _pairs(random.Random(f"sums {seed}"), held_out=held_out):
        level = count_carries(a, b)
        if left.get(level):
            left[level] -= 1
            rows.append({**problem(a, b), "difficulty": level / 2})
        if len(rows) == size:
            break
    return rows


def problem(a: int, b: int) -> dict[str, Any]:
    """Return the columns of a sum."""
    ones, tens, hundreds = reversed(str(a + b)[-3:])
    checks = [
        {"text": "ones", "pattern": rf"{ones}</answer>"},
        {"text": "tens", "pattern": rf"{tens}\d</answer>"},
        {"text": "hundreds", "pattern": rf"{hundreds}\d\d</answer>"},
    ]
    return {
        "prompt": SUMS["question"](a, b),
        "answer": str(a + b),
        "solution": SUMS["solution"](a, b),
        "checks": checks,
    }


def sum_demonstrations(
    size: int,
    seed: int,
    forget: float = 0.65,
    hinted: float = 0.0,
    forget_hinted: float = 0.65,
    criticised: float = 0.0,
) -> list[dict[str, str]]:
    """Return `size` rows to imitate. A carry is forgotten with probability `forget`.

    hinted: share of rows that show the beginning of a right solution below the prompt, as `hint_on_failure` does; shown
    carries are right, others are forgotten with probability forget_hinted. criticised: share of rows in which a critic
    of `generator_critic` names a failing check, or any check if none fails.
    """
    draw = random.Random(f"demonstrations {seed}")
    rows: list[dict[str, str]] = []
    for a, b in SUMS["_numbers"](size, draw, False):
        prompt, kind = SUMS["question"](a, b), draw.random()
        if kind < hinted:
            right = SUMS["solution"](a, b)
            shown = right[: round(draw.choice(HINT_RATIOS) * (right.index("<answer>") + len("<answer>")))]
            tries = (SUMS["solution"](a, b, lambda: draw.random() < forget_hinted) for _ in range(1000))
            written = next((text for text in tries if text.startswith(shown)), right)
            prompt = HINTED.replace("{prompt}", prompt).replace("{hint}", shown)
        else:
            written = SUMS["solution"](a, b, lambda: draw.random() < forget)
            if kind < hinted + criticised:
                answer, checks = written.partition("</think>")[2], problem(a, b)["checks"]
                failed = [n for n, check in enumerate(checks, 1) if not re.search(check["pattern"], answer)]
                prompt, written = (
                    criticism(prompt, answer, checks),
                    f"<failure>{draw.choice(failed or [1, 2, 3])}</failure>",
                )
        rows.append({"prompt": prompt, "completion": written})
    return rows


def criticism(question: str, output: str, checks: list[dict[str, str]]) -> str:
    """Return the prompt of a critic of `generator_critic`."""
    listed = "\n".join(f"{n}: {check['text']}" for n, check in enumerate(checks, 1))
    return CRITIC.replace("{question}", question).replace("{output}", output).replace("{checks}", listed)


def GOLD(row: dict[str, Any]) -> str:
    """A completion that passes all checks."""
    return row["solution"]


def drawn_checks(completion: str, prompt: str, step: int, checks: list[dict[str, str]], *, count: int = 2) -> float:
    """Return the mean of `count` randomly sampled checks of the answer, the baseline for a critic. 1 = all passed."""
    draw = random.Random(f"{step} {prompt} {completion}")
    drawn = [draw.choice(checks) for _ in range(count)]
    return sum(re.search(check["pattern"], completion) is not None for check in drawn) / count


def _pairs(draw: random.Random, *, held_out: bool) -> Iterator[tuple[int, int]]:
    """Yield different pairs of 3-digit numbers indefinitely."""
    yield from SUMS["_numbers"](400_000 if not held_out else 40_000, draw, held_out)


# --- running totals ---


def total_demonstrations(
    size: int,
    seed: int,
    length: int = 12,
    slips: float = 0.1,
    carried: float = 0.5,
    hurried: float = 0.1,
    keep_tail: int = 4,
) -> list[dict[str, str]]:
    """Return `size` rows to imitate, as plain text (`chat: false`). A step adds nothing with probability `slips`.

    carried: share of rows whose prompt ends with `<think>` and the last keep_tail tokens of a started thought, as shape
    `chunks` carries them over, and whose completion continues it. hurried: share of rows that stop after at most half
    of the steps and answer with the total so far.
    """
    draw = random.Random(f"demonstrations {seed}")
    rows: list[dict[str, str]] = []
    for numbers in _numbers_to_add(size, draw, held_out=False):
        steps = draw.randint(1, length // 2) if draw.random() < hurried else length
        written = work_out(numbers, [draw.random() < slips for _ in range(steps)])
        given = ""
        if draw.random() < carried:
            tokens = TOKEN.findall(written)
            cut = draw.randrange(keep_tail // 2 + 1, len(tokens) // 2 + 1) * 2 - 1  # behind a total
            if cut > keep_tail:
                given, written = "".join([tokens[0], *tokens[cut - keep_tail : cut]]), "".join(tokens[cut:])
        rows.append({"prompt": f"<bos><|user|>{ask(numbers)}<|assistant|>{given}", "completion": written})
    return rows


def totals(size: int, seed: int, length: int = 12, held_out: bool = False) -> list[dict[str, str]]:
    """Return `size` different rows to solve: prompt and the last digit of the total."""
    draw = random.Random(f"totals {seed}")
    found: dict[str, str] = {}
    for numbers in _numbers_to_add(100 * size, draw, held_out=held_out):
        found[ask(numbers)] = str(total_after(numbers, length))
        if len(found) == size:
            break
    return [{"prompt": prompt, "answer": answer} for prompt, answer in found.items()]


def ask(numbers: list[int]) -> str:
    """Return the prompt: the first number as a digit, the others in separate alphabets."""
    others = zip(ALPHABETS, numbers[1:], strict=True)
    return f"{numbers[0]}{''.join(alphabet[number] for alphabet, number in others)}=?"


def total_after(numbers: list[int], steps: int) -> int:
    """Return the last digit of the first number plus `steps` additions, cycling through the other numbers."""
    return (numbers[0] + sum(numbers[1 + n % len(ALPHABETS)] for n in range(steps))) % 10


def work_out(numbers: list[int], forgets: list[bool]) -> str:
    """Return the totals, one per step, and the answer."""
    total, thought = numbers[0], ""
    for n, forgotten in enumerate(forgets):
        total = (total + (0 if forgotten else numbers[1 + n % len(ALPHABETS)])) % 10
        thought += f"{STEPS[n]}{total}"
    return f"<think>{thought}</think><answer>{total}</answer>"


def _numbers_to_add(size: int, draw: random.Random, *, held_out: bool) -> Iterator[list[int]]:
    found = 0
    while found < size:
        numbers = [draw.randint(0, 9) for _ in range(1 + len(ALPHABETS))]
        if (zlib.crc32(ask(numbers).encode()) % 10 == 0) == held_out:
            found += 1
            yield numbers
