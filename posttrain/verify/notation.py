r"""How people write numbers and answers, as LaTeX that math-verify reads as it was meant.

Pure functions of text. What has one meaning is rewritten (`latex`); what has two keeps its first and gets the second as
another reading (`other_readings`); a number in a base is told apart by its base (`based`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from posttrain.verify.options import labelled

_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5"}
_VULGAR |= {"⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
# Signs that the library does not know. It reads the others itself: pi, <=, the union.
_SIGNS = str.maketrans(
    {sign: r"\frac{{{}}}{{{}}}".format(*value.split("/")) for sign, value in _VULGAR.items()}
    | {"°": r"^\circ", "∞": r"\infty", "∅": r"\emptyset", "≠": r"\neq ", "≈": r"\approx ", "…": r"\ldots", "⁄": "/"}
    | dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{FIGURE DASH}\N{FULLWIDTH HYPHEN-MINUS}", "-")
    | dict.fromkeys("\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}~", " ")
    | dict.fromkeys("$€£¥₹")
)
# Names that are no units where they stand behind a number.
_NAMES = (
    "alpha beta gamma delta epsilon zeta theta iota kappa lambda sigma omega "
    "sqrt sin cos tan cot sec csc log exp arcsin arccos arctan sinh cosh tanh infinity floor ceil choose "
    "times divided plus minus over mod modulo base percent percentage million billion thousand hundred"
)
_DEGREES = r"\^\s*(?:\\circ|\{\s*\\circ\s*\})"
_SHORT = r"[kcdm]?m|[km]?g|m?l|[mk]?s|min|sec|hr?s?|yrs?|ft|in|yd|mi|lbs?|oz|gal|mph|kmh|kmph"
_SHORT += r"|am|pm|a\.m|p\.m|cc|deg|sq|cu|rs|day|men|man|cent|pie|toy|way|per|th|rd|nd|st"
# What stands behind a number as its unit: short ones, or words in full; never another answer.
_UNIT = (
    rf"(?:\s*(?:{_SHORT})(?![A-Za-z])|(?:\s+|\s*/\s*)(?!(?:{_NAMES.replace(' ', '|')})\b)[A-Za-z]?[a-z]{{3,}})"
    r"(?!.*\b(?:or|and|not)\b)(?:[\s/]+[a-z]+)*\.?(?:\s*\^\s*\{?[23]\}?|\s*[²³])?$"
)
_TEXT = (
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*(?:[0-9]|\{[0-9]\}|\{\\circ\}))?"
)

Replacement = str | Callable[[re.Match[str]], str]


def _repeating(match: re.Match[str]) -> str:
    r"""0.1\overline{6} as 15/90."""
    whole, once, again = match["whole"], match["once"], match["bar"] or match["dot"] or match["run"]
    below = (10 ** len(again) - 1) * 10 ** len(once)
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{below}}}"


def _improper(match: re.Match[str]) -> str:
    whole, above, below = (int(n) for n in match.groups() if n)
    return rf"\frac{{{whole * below + above}}}{{{below}}}\%"


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = match.groups()
    return rf"{whole}\frac{{{above}}}{{{below}}}" if int(above) < int(below) else match[0]


def _divisor(match: re.Match[str]) -> str:
    """gcd(m, n) as a function of that name: the library takes letters for numbers without a common divisor."""
    return rf"f_{{{match[1]}}}({','.join(sorted(one.strip() for one in match[2].split(',')))})"


_RULES: tuple[tuple[re.Pattern[str], Replacement], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # What is not seen, or is only looks.
        (r"\\[hv]?phantom\s*\{[^{}]*\}", ""),
        (r"\\textcolor\s*\{[^{}]*\}|\\color\s*\{[^{}]*\}|\\(?:bf|it)\b", ""),
        (r"^\*\*(.*)\*\*$", r"\1"),
        (r"^\\displaystyle\b\s*", ""),
        (r"^\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}$", r"\1"),
        (r"^\s*(?:=|\\(?:approx|therefore|Rightarrow|implies)\b)", ""),
        (r"(?:\s|\\\\|\\ |[,;])+$", ""),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\(?:mathrm|text)\{i\}|\\imath\b", "i"),
        (r"\\log_(?:e|\{e\})", r"\\ln "),
        # A text behind a number that says more than its unit: 5\text{ or 6}.
        (r",?\s*\\text\s*\{\s*(?:or|and)\b([^{}]*)\}", r",\1"),
        (r"\\(?:text|mbox)\s*\{([^{}]*(?<![\w^])[0-9][^{}]*)\}", r" \1 "),
        (rf"(?<=[0-9A-Za-z}})%|.!])(?:\s|\\[ ,;!])*(?:{_TEXT}\s*)+\.?$", ""),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        # Numbers.
        (
            r"(?<![\w.])(?P<whole>[0-9]+)\.(?P<once>[0-9]*?)(?:\\(?:overline|bar)\s*\{?(?P<bar>[0-9]+)\}?"
            r"|\\dot\s*\{?(?P<dot>[0-9])\}?|(?P<run>([0-9])\6\6)\6*\s*(?:\\[lcd]?dots\b|\.\.\.))(?![0-9.])",
            _repeating,
        ),
        (r"(?<=[0-9])(?:\s|\\ )*\.(?=\s*(?:$|[^\s0-9.\\]|\\text))|(?<=[A-Za-z)}\]%!])\.$", ""),
        (r"^\(?([A-Z])\)$", r"\1"),
        (r"(?<![\w.^,\\])[1-9][0-9]{0,2}(?:(?:\s|\\[ ,;])[0-9]{3})+(?![0-9])", lambda m: re.sub(r"\D", "", m[0])),
        (
            r"(?<![\w.^,])[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}(?:,[0-9]+)?(?![0-9.])",
            lambda m: m[0].replace(".", "").replace(",", "."),
        ),
        (r"(?<![\w.}])([0-9]+\.?[0-9]*|\.[0-9]+)[eE](\+?[0-9]+)(?![\w.(^{\\])(?<!\+[0-9])", r"\1 \\cdot 10^{\2}"),
        (r"(?<![\w.}])([0-9]+\.[0-9]+)[eE]([-+]?[0-9]+)(?![\w.(^{\\])", r"\1 \\cdot 10^{\2}"),
        (r"(?<![\w.}])([0-9]+)[eE]([-+][0-9]{2,})(?![\w.(^{\\])", r"\1 \\cdot 10^{\2}"),
        (r"(?<![\w.}/^])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![\w.])", _mixed),
        (r"(?<![\w.}^])([0-9]+)\s*\((?=\s*(?:\\[dt]?frac|[0-9]+\s*/))", r"\1 \\cdot ("),
        (r"√\s*([0-9]+|[a-z](?![a-z]))", r"\\sqrt{\1}"),
        (rf"(?:(?<=[0-9}}])|(?<=\\pi)\b(?=\s)){_UNIT}", ""),
        (r"([0-9]+)\s*\\[dt]?frac(?:\{([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9]))\s*\\?%", _improper),
        (r"(?<=[0-9)}xyz])²", "^2"),  # behind other letters it belongs to a unit
        (r"(?<=[0-9)}xyz])³", "^3"),
        (
            rf"(\\(?:sin|cos|tan|cot|sec|csc)\s*)[({{]?\s*([0-9]+(?:\.[0-9]+)?)\s*{_DEGREES}\s*[)}}]?",
            r"\1(\\frac{\2\\pi}{180})",
        ),
        # Forms.
        (
            r"\\(?:operatorname\s*\{\s*)?(gcd|lcm)\b\s*\}?\s*(?:\\left\s*)?"
            r"\(([^()]*(?<![\\A-Za-z])[A-Za-z][^()]*?)(?:\\right\s*)?\)",
            _divisor,
        ),
        (r"^\\text\s*\{([A-Z](?:\s*,\s*[A-Z])+)\}$", r"\1"),
        (r"^(?:\\left\s*)?\\langle(.*,.*?)(?:\\right\s*)?\\rangle$", r"(\1)"),
        (r"^[^:,()=]+(?::[^:,()=]+){2,}$", lambda m: f"({m[0].replace(':', ',')})"),  # 1:2:3, no quotient
        (r"^\](.*,.*)\[$", r"(\1)"),
        (r"^\](.*,.*\])$", r"(\1"),
        (r"^(\[.*,.*)\[$", r"\1)"),
        (r"^([^=<>]*[0-9]\}?)\s*=\s*([A-Za-z])$", r"\2=\1"),
    )
)

_BASE_WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_BASE = re.compile(
    r"(?<![\w.\\^])\(?(?P<digits>[0-9][0-9A-Z,]*)\)?\s*"
    r"(?:_\s*(?:\{\s*\(?\s*(?:\\text\s*\{)?\s*(?:base\s*)?(?P<braced>[0-9]+|[a-z]+)\s*\}?\s*\)?\s*\}"
    r"|\\text\s*\{\s*(?:base\s*)?(?P<worded>[0-9]+|[a-z]+)\s*\}|(?P<bare>[0-9]))"
    r"|(?:\\text\s*\{)?\s*\(?\s*(?:in\s+)?base\s*[-~]?\s*\}?\s*\{?(?P<said>[0-9]+|[a-z]+)\s*\)?\s*\}?)"
)
_MODULO = re.compile(r"(?:.*\\equiv)?(.*?)\(?\\?(?:pmod|bmod|mod)\b.*")
_PERCENT = re.compile(r"([^%]*[0-9}])\s*\\?%")
_DECIMAL_COMMA = re.compile(r"([-+]?[0-9]+),([0-9]*[1-9][0-9]*)")
_THOUSANDS = re.compile(r"[-+]?[1-9][0-9]{0,2}(?:,[0-9]{3})+")
_POWER_OF_TEN = re.compile(r"([-+]?[0-9]+)[eE]([-+][0-9])")
_LETTERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")

_IDLE_BLANKS = re.compile(r"(?<![A-Za-z0-9\\])\s+|\s+(?![A-Za-z0-9])")


def latex(text: str) -> str:
    """The text with numbers and signs as the library reads them."""
    text = text.replace("\\$", "").translate(_SIGNS).strip()
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.strip()


def plain(text: str) -> str:
    r"""The text without a `\text{}` around all of it and without blanks, but for those between letters or digits."""
    return _IDLE_BLANKS.sub("", _LETTERS.sub(r"\1", text) if _LETTERS.fullmatch(text) else text)


def other_readings(text: str) -> list[str]:
    r"""What else it may mean: `0,5` also 0.5, `12.5\%` also 12.5 (not below 1), `1e-3` also a power of ten, whose first
    meaning is 1 * e - 3; and `(B) 12` the option B, or 12.
    """
    found = list(labelled(text) or ())
    if (comma := _DECIMAL_COMMA.fullmatch(text)) and not _THOUSANDS.fullmatch(text):
        found.append(f"{comma[1]}.{comma[2]}")
    if (percent := _PERCENT.fullmatch(text)) and not re.match(r"[-+]?0*\.|[-+]?0+(?:\D|$)", percent[1]):
        found.append(percent[1])
    if power := _POWER_OF_TEN.fullmatch(text):
        found.append(rf"{power[1]} \cdot 10^{{{power[2]}}}")
    return found


def without_modulus(text: str) -> str:
    r"""b of `a \equiv b \pmod m`: where the gold is a plain number, the residue is what was asked for."""
    match = _MODULO.fullmatch(text)
    return match[1].strip() if match and match[1].strip() else text


def based(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text without the bases of its numbers, and the (digits, base) of each that has one."""
    if "_" not in text and "base" not in text:
        return text, []
    found: list[tuple[str, str]] = []

    def bare(match: re.Match[str]) -> str:
        base = match["braced"] or match["worded"] or match["bare"] or match["said"]
        if base in _BASE_WORDS:
            base = str(_BASE_WORDS.index(base) + 2)
        if not base.isdecimal():
            return match[0]
        digits = match["digits"].replace(",", "")
        found.append((digits, base))
        return digits

    return _BASE.sub(bare, text), found


def same_bases(gold: list[tuple[str, str]], candidate: list[tuple[str, str]]) -> bool:
    """Whether each number with a base stands in the gold with that base. Base ten needs no saying there."""
    return all(one in gold or (one[1] == "10" and not gold) for one in candidate)


def same_words(a: str, b: str) -> bool | None:
    """Of two texts of words alone, one of four letters or more: whether they are the same. None: not for us to say.

    The library reads a word as a product of its letters, so it cannot tell `listen` from `silent`.
    """
    x, y = ("".join(_LETTERS.sub(r"\1", text).casefold().split()) for text in (a, b))
    if min(len(x), len(y)) < 4 or not (x.isalpha() and y.isalpha()):
        return None
    return x == y if x == y or Counter(x) == Counter(y) else None
