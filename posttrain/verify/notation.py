r"""Normalization of notation: different spellings of signs, fonts, spacing and numbers are rewritten as one.

Pure functions of text. `clean` rewrites spellings with one meaning; a spelling with two meanings keeps the first, and
`other_readings` returns the second.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from posttrain.verify.numerals import value_of
from posttrain.verify.options import split_label
from posttrain.verify.tokens import CASED, FUNCTIONS, GREEK

_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5"}
_VULGAR |= {"⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
# Signs, each followed by the command it stands for.
_COMMANDS = """
∞infty ∅emptyset ≠neq ≈approx …ldots ≤le ≥ge ⩽le ⩾ge ∈in ∉notin ∪cup ∩cap ∖setminus ×cdot ·cdot ⋅cdot ÷div ±pm ∓mp
∨lor ∧land ∠angle △triangle ⟨langle ⟩rangle ⌊lfloor ⌋rfloor ⌈lceil ⌉rceil ≡equiv ∣mid ∑sum ∏prod ∫int
πpi αalpha βbeta γgamma δdelta εepsilon θtheta λlambda μmu ρrho σsigma φphi ϕphi ωomega 或or 且and 和and
"""
_SIGNS = str.maketrans(
    {sign: r"\frac{{{}}}{{{}}}".format(*value.split("/")) for sign, value in _VULGAR.items()}
    | {one[0]: f"\\{one[1:]} " for one in _COMMANDS.split()}
    | {"°": r"^\circ ", "⁄": "/", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}"}
    | dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{FIGURE DASH}\N{FULLWIDTH HYPHEN-MINUS}\N{HYPHEN}", "-")
    | dict.fromkeys("\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}", " ")
    | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if code != 0xFF0D}
    | {"、": ",", "。": ".", "，": ",", "；": ";", "′": "'"}
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_CURRENCY = "€£¥₹"
_MONEY = {"$": "dollars", "US$": "dollars", "USD": "dollars", "€": "euros", "EUR": "euros", "£": "gbp", "GBP": "gbp"}
_MONEY |= {"¥": "yen", "₹": "rupees", "Rs": "rupees", "Rs.": "rupees", "INR": "rupees", "¢": "cents"}

_UPRIGHT = r"\\(?:mathrm|operatorname\*?|text|textrm|textnormal|textup|mbox|hbox|mathop|rm)"
_FONT = (
    r"\\(?:mathbf|mathit|mathsf|mathtt|mathcal|mathfrak|smash|mathnormal|boldsymbol|bm|pmb|underline|underbrace|textbf|textit|texttt|"
    r"textsf|emph|mathbin|mathord|ensuremath|displaystyle|mathstrut|fbox|boxed)"
)
SWITCH = r"\\(?:displaystyle|textstyle|scriptstyle|bf|it|rm|sf|tt|large|Large|small|normalsize|boldmath)\b\s*"
_COLOR = r"\\(?:textcolor|color|colorbox)\s*\{[^{}]*\}|\\color\b\s*(?:red|blue|green)?"
SPACE = (
    r"(?<!\\)\\(?:[,;:> ]|q?quad|(?:enspace|thinspace|medspace|thickspace|hfill)(?![A-Za-z])"
    r"|[hv]space\*?\s*\{[^{}]*\})|(?<!~)~(?!~)"
)

_INDEX = r"(?:\{\s*([0-9]+|[nkm])\s*\}|([0-9]+|[nkm]))"  # of C_n^k

Replacement = str | Callable[[re.Match[str]], str]


def _upright(match: re.Match[str]) -> str:
    r"""Rewrite upright text: `\mathrm{ln}` as a function, `5\,\mathrm{m}` as a unit, `\text{or}` as a separator."""
    content, before = match["content"].strip().strip("$"), match["number"] or ""
    word = content.strip(" .,:;")
    units = " ".join(re.sub(r"\\(?:[,;: ]|cdot)|~", " ", content).split())
    if before and "^" in units and _UNITS.fullmatch(units):
        return rf"{before}\text{{{units}}}"
    if (
        before
        and word in ("min", "sec")
        and not re.match(r"\s*(?:\\left\b)?(?:[A-Za-z0-9\\({_^]|\|\s*[-A-Za-z0-9\\({])", match.string[match.end() :])
    ):
        return rf"{before}\text{{{word}}}"  # 9\text{ min}, not 9\min(a, b)
    if word in FUNCTIONS or (word in GREEK and match[0].startswith("\\operatorname")):
        return f"{before}\\{word} "
    if re.search(r"(?<![\w^])[0-9]|\\", content) and not re.fullmatch(r"[A-Za-z]+\s*\^?[23]", content):
        return f"{before} {content} "
    if separated := re.fullmatch(r"\s*,?\s*(or|and)\b\s*(.*?)", content):
        return f"{before} \\{separated[1]} " + (rf"\text{{{separated[2]}}}" if separated[2] else "")
    if len(content) == 1 and content.isalpha():
        unit = before and content not in "eid"
        return before + (rf"\text{{{content}}}" if unit else f" {content} ")
    if re.fullmatch(r"\(?[A-Za-z]\)?|[A-Z](?:\s*,\s*[A-Z])+|[-+=<>()\[\],;\s]*", content):
        return f"{before} {content} "
    return before + rf"\text{{{content}}}"


def _repeating_decimal(match: re.Match[str]) -> str:
    r"""Rewrite a repeating decimal as a fraction: 0.1\overline{6} as 15/90."""
    whole, once, again = match["whole"], match["once"], match["bar"] or match["dot"] or match["run"] or match["block"]
    below = (10 ** len(again) - 1) * 10 ** len(once)
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{below}}}"


def _rewrite_binomial(match: re.Match[str], kind: str, *indices: str | None) -> str:
    """Rewrite C_5^2 (Chinese notation) as a binomial coefficient and A_5^2 as 5!/3!, but not C_1^2."""
    above, below = (indices[position] or indices[position + 1] or "" for position in (0, 2))
    known = kind == "C" and above == "n"
    if above.isdecimal() and below.isdecimal():
        known = 2 < int(above) >= int(below)
    if not known:
        return match[0]
    return rf"\binom{{{above}}}{{{below}}}" if kind == "C" else rf"\frac{{{above}!}}{{({above}-{below})!}}"


def _join_digit_groups(match: re.Match[str]) -> str:
    return re.sub(r"[^0-9]", "", match[0])


_RULES: tuple[tuple[re.Pattern[str], Replacement], ...] = tuple(
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        # Invisible or purely visual markup.
        (r"\\[hv]?phantom\s*\{[^{}]*\}", ""),
        (_COLOR, ""),
        (r"\\!\s*|\\null(?![a-z])|\\m?kern\s*-?[0-9.]+[a-z]{2}|(?<=[0-9)}])\{\}", ""),
        (r"\{\s*,\s*\}", ","),
        (r"\{\s*:\s*\}", ":"),
        (r"\\(?:sfrac|nicefrac)(?![a-z])", r"\\frac"),
        (r"^([^{}\\=,;]+)\\over(?![a-z])([^{}\\=,;]+)$", r"\\frac{\1}{\2}"),
        (
            r"∛\s*\{?([0-9]+|[a-z](?![a-z]))\}?|(?<![a-z\\])cbrt\s*\(([^()]*)\)",
            lambda m: rf"\sqrt[3]{{{m[1] or m[2]}}}",
        ),
        (r"^\\text\s*\{\s*(?i:(?:the\s+)?(?:final\s+)?(?:answer|ans))\.?\s*(?:is|:|=)?\s*:?\s*\}", ""),
        (r"\^\s*\{?\\circ\s*\}?\s*(?:\\text\s*\{\s*)?([CF])(?![A-Za-z])\s*\}?", r" \\text{°\1}"),
        (r"(?<=[0-9}])(?:\s|~|\\[,;: ])*+(k|M|m|)\s*\\Omega\s*$", r" \\text{\1Ω}"),
        (
            rf"(?<![A-Za-z0-9\\}}])(?P<kind>[CA])_{_INDEX}\^{_INDEX}",
            lambda m: _rewrite_binomial(m, m["kind"], *m.groups()[1:]),
        ),
        (
            rf"(?<![A-Za-z0-9\\}}])C\^{_INDEX}_{_INDEX}",
            lambda m: _rewrite_binomial(m, "C", *m.groups()[2:], *m.groups()[:2]),
        ),
        (rf"(?:\{{\}})?[_^]{_INDEX}\s*C_{_INDEX}", lambda m: _rewrite_binomial(m, "C", *m.groups())),
        (r"(\\[A-Za-z]++\s*|[A-Za-z])\^(\{[^{}]*\}|[0-9a-zA-Z])_(\{[^{}]*\}|[0-9a-zA-Z])", r"\1_\3^\2"),  # v^2_0
        (r"\\Delta\s*\{\s*([A-Za-z])\s*\}", r"\\Delta \1"),
        (r"(?<![\w.])([0-9]+)\.([0-9]*)\(([0-9]{1,6})\)(?![0-9.])", r"\1.\2\\overline{\3}"),
        (
            r"(?<![\w.])([0-9]+\.[0-9]*)\\dot\s*\{?([0-9])\}?([0-9]*)\\dot\s*\{?([0-9])\}?",
            r"\1\\overline{\2\3\4}",
        ),
        (r"^\*\*(.*)\*\*$", r"\1"),
        (r"^\"(.*)\"$", r"\1"),
        (r"\\\\(?=\s*$)", ""),
        (r"^(?:\\therefore|\\Rightarrow|\\implies|\\boxed(?![a-z{ ]))", ""),
        (r"\\begin\s*\{(\w+)\*?\}(?:\s*\{[^{}]*\}|\[[^\]]*\])?", r"\\begin:\1 "),
        (r"\\end\s*\{(\w+)\*?\}", r"\\end:\1 "),
        (r"\\left\s*\\\{\s*\\begin:array(.*?)\\end:array\s*\\right\s*\.", r"\\begin:cases\1\\end:cases "),
        (r"(?<=[0-9.])(?:\\[,;: ]|\s)+(?=\\(?:[,;: ]))", ""),
        # Numbers with separators. After a comma or within brackets, commas separate values.
        (r"(?<![\w.^,\\])[1-9][0-9]{0,2}(?:(?:\s|~|\\[ ,;:])[0-9]{3})+(?![0-9.]*[0-9])", _join_digit_groups),
        (SPACE, " "),
        (
            r"(?<![\w.^,])[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}(?:,[0-9]+)?(?![0-9.])",
            lambda m: m[0].replace(".", "").replace(",", "."),
        ),
        (
            r"(?<![\w.^,])[1-9][0-9]{0,2}(?:\.[0-9]{3})+,[0-9]+(?![0-9.,])",
            lambda m: m[0].replace(".", "").replace(",", "."),
        ),
        (r"(?<![\w.^,])[1-9][0-9]{0,2}(?:'[0-9]{3})+(?![0-9'])", _join_digit_groups),
        (
            r"(?<![\w.])(?P<whole>[0-9]+)\.(?P<once>[0-9]*?)(?:\\(?:overline|bar)\s*\{?(?P<bar>[0-9]+)\}?"
            r"|\\dot\s*\{?(?P<dot>[0-9])\}?|(?:(?P<run>[0-9])(?P=run)(?P=run)+|(?P<block>[0-9]{2,6}?)(?P=block)+)\s*(?:\\[lcd]?dots\b|\.\.\.))(?![0-9.])",
            _repeating_decimal,
        ),
        (r"(?<![\w.}])([0-9]++\.?[0-9]*+|\.[0-9]+)[eE](\+?[0-9]+)(?![\w.(^{\\])(?<!\+[0-9])", r"\1 \\cdot 10^{\2}"),
        (r"(?<![\w.}])([0-9]+\.[0-9]+)[eE]([-+][0-9]+)(?![\w.(^{\\])", r"\1 \\cdot 10^{\2}"),
        (r"(?<![\w.}])([0-9]+)[eE]([-+][0-9]{2,})(?![\w.(^{\\])", r"\1 \\cdot 10^{\2}"),
        (r"\.{2,}", r"\\ldots "),
        (r"(?<=[0-9])\.(?=\s*(?:$|[^\s0-9.\\]|\\text|\\mathrm|\\end))", ""),
        # Words and forms.
        (r"√\s*([0-9]+|[a-z](?![a-z]))", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt "),
        (r"\\log_(?:e|\{e\})(?![a-z])", r"\\ln "),
        (r"(?<=[0-9)])\s*(?:per\s*cent|percent(?:age)?|pct)\b", r"\\%"),
        (r"\\text\{\s*(?:per\s*cent|percent(?:age)?|pct)\s*\}", r"\\%"),
        (r"\\text\{\s*degrees?\s*\}", r"^\\circ "),
        (r"(?<=[0-9])\s+[ap]\.m\.", lambda m: rf"\text{{{m[0].strip()[0]}m}}"),
        (r"\\not\s*=|\\not\s*\\eq", r"\\ne "),
        (r"\\operatorname\s*\{\s*\\", r"{\\"),
        (r"\^\s*\{\s*((?:\\prime(?![a-z])\s*)+)\}", lambda m: "'" * m[1].count("prime")),
        # Degrees, minutes and seconds: 63^\circ 45' 36''.
        (
            r"(?<![0-9])([0-9]++)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*([0-9]+(?:\.[0-9]+)?)\s*['′](?!['′])\s*"
            r"(?:([0-9]+(?:\.[0-9]+)?)\s*(?:''|′′|″|\"))?",
            lambda m: rf"({m[1]}+\frac{{{m[2]}}}{{60}}+\frac{{{m[3] or 0}}}{{3600}})^\circ ",
        ),
        # A condition in words: 2x for 0 < x < 1.
        (
            r"\s(?:(?<![\\A-Za-z])(?:for|if|when|where)(?![A-Za-z])|\\text\{\s*(?:for|if|when|where)\s*\})"
            r"(?=[^,;]*(?:[<>=≤≥∈]|\\(?:[lg]eq?(?:slant)?|ne|in)(?![a-z])))",
            ", ",
        ),
        # A condition in brackets: y = x^2 (x > 0).
        (r"(?<==)([^=<>]+)\(\s*([A-Za-z]\s*(?:[<>≤≥]|\\(?:[lg]eq?(?:slant)?|ne)(?![a-z]))[^()<>=]*)\)\s*$", r"\1, \2"),
        (r"(?<=[\])}])\s*\\backslash", r"\\setminus"),
        (r"\](?=[^\[\](),]*[^\s\[\](),][^\[\]()]*,)([^\[\]()]*)\[", r"(\1)"),
        (r"(^|\\cup|=|\\in\b)\s*\]([^\[\]()]*,[^\[\]()]*\])", r"\1(\2"),
        (r"(\[[^\[\]()]*,[^\[\]()]*)\[(?=\s*(?:$|\\cup))", r"\1)"),
    )
)
_INNERMOST = (
    (re.compile(rf"(?P<number>[0-9}})](?:\s|\\[,;: ]|~)*)?{_UPRIGHT}\s*\{{(?P<content>[^{{}}]*)\}}"), _upright),
    (re.compile(rf"{_FONT}\s*\{{(?P<content>[^{{}}]*)\}}"), lambda m: _in_font(m["content"])),
)
_FONTS = re.compile(rf"{_FONT}\s*(?=\{{)")
_ENDS = re.compile(r"(?<![\s,;.。\\])(?<!\\!)(?:\\!|[\s,;.。\\])++$")


def _in_font(content: str) -> str:
    plain = content.strip()
    if (plain.isalpha() and len(plain) > 1 and not plain.isupper()) or re.fullmatch(
        r"[A-Za-z]{2,}(?:[\s-]+[A-Za-z]+)+", plain
    ):
        return f"\x01text{{{plain}}}"
    return f"{{{plain}}}"


_DECIMAL_COMMA = re.compile(
    rf"(?:[{_CURRENCY}]|\\\$)?\s*([-+]?[0-9]+(?:[ .][0-9]{{3}})*),([0-9]+)"
    rf"\s*((?:[{_CURRENCY}$%]|\\%|\\\$|\\text.*|[a-z]+.*)?)",
    re.DOTALL,
)
_GROUPED = re.compile(r"(?<![\w.,^])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])(?!,[0-9])")
_DATE = re.compile(r"[12][0-9]{3}-[0-9]{1,2}-[0-9]{1,2}")
_RANGE = re.compile(r"[0-9]+-[0-9]+")
_TIME = re.compile(
    r"([01]?[0-9]|2[0-4])(?: ?: ?([0-5][0-9]))?(?: ?: ?([0-5][0-9]))? ?(?:([ap])\.? ?m\.?)?", re.IGNORECASE
)
_POWER_OF_TEN = re.compile(r"([-+]?[0-9]+)[eE]([-+][0-9])")
_POWER = r"(?:\^\s*\{?\s*(-?[1-9])\s*\}?)?"
_TEXT = rf"\{{\s*\\(?:text|mathrm)\s*\{{\s*([A-Za-z]+)\s*{_POWER}\s*\}}\s*{_POWER}\s*\}}"
_TIMES_UNIT = re.compile(
    rf"(?<=[0-9}}\s,~])\\(?:text|mathrm)\s*\{{([^{{}}]*)\}}{_POWER}\s*\\cdot\s*\\(?:text|mathrm)\s*\{{"
)
_GAP = r"(?:\s|\\[,;: ]|~)*+"
_NEXT_UNIT = re.compile(  # \mathrm{m}\,\mathrm{s}^{-1} after a number; no `\text{ or }`
    rf"([0-9}}]{_GAP})\\(?:text|mathrm)\s*\{{((?:\s|~)*[A-Za-zµΩ]{{1,4}}(?:\s[^{{}}]*)?)\}}{_POWER}{_GAP}\\(?:text|mathrm)\s*\{{"
    r"(?=(?:\s|~)*(?!(?:or|and|if|to|in|is|no|for|by|of|at)\b)[A-Za-zµΩ]{1,3}\s*\})"
)
_RAISED_UNIT = re.compile(
    r"(?<=[0-9}\s,~])\\(?:text|mathrm)\s*\{(?:[A-Za-z ~]|\\[,;: ]|\\cdot\b|\^\s*\{\s*-?[1-9]\s*\})+\}"
)
_UNITS = re.compile(r"[A-Za-zµΩ](?:[ /]*[A-Za-zµΩ]|(?<=[A-Za-zµΩ])\^-?[1-9])*[ /]*")  # `J mol^-1 K^-1`
_QUOTIENT = re.compile(rf"\\[dtc]?frac\s*{_TEXT}\s*{_TEXT}")  # of units
_PRICE = re.compile(
    r"^\s*(?:\\text\s*\{\s*)?(?:\\?(?P<before>\$|US\\?\$|USD|EUR|GBP|INR|Rs\.?|[€£¥₹])(?:\s*\})?\s*"
    r"(?P<price>[-+]?[0-9][0-9.,{}\\! ]*)"
    r"|(?P<number>[-+]?[0-9][0-9.,{}\\!]*+(?: ++[0-9.,{}\\!]++)*+)\s*(?P<behind>[€£¥₹¢]))\s*\$?$"
)
_DOUBLED = re.compile(
    r"\\\\(?=(?:[dt]?frac|left|right|pi|sqrt|text|infty|cup|cap|leq?|geq?|neq?|in|pm|cdot|times|boxed|mathrm|circ)"
    r"(?![a-z]))"
)
LETTERS = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mbox)\s*\{([^{}]*)\}")
_UNIT_LETTER = re.compile(
    r"(?<=[0-9}])(?P<blank>\s*)(?P<unit>[mgshl]|(?<=\s)[LNJWVK])(?P<rest>\s*/\s*[a-z]{1,3}|)(?P<power>\^\{?[23]\}?|[²³])?$"
)
_CASED_RUN = re.compile(rf"(?<=[0-9}}])(?:{'|'.join(sorted(CASED))})$")
_IDLE_BLANKS = re.compile(r"(?<![A-Za-z0-9\\])\s+|\s+(?![A-Za-z0-9])")


def clean(text: str) -> str:
    """Rewrite the text in the notation that `tokens.tokenize` accepts."""
    text = _normalize_signs(text)
    for _ in range(6):
        before = text
        for innermost, rewrite in _INNERMOST:
            text = innermost.sub(rewrite, text)
        text = text.replace("\x01text", "\x02").replace("\\text{", "\x03{") if "\x01" in text else text
        text = text.replace("\x02", "\\text").replace("\x03{", "\\text{")
        if text == before:
            break
    text = _FONTS.sub("", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _without_group_commas(_ENDS.sub("", text.strip())).strip()
    while text[:1] == "{" and not re.search(r"\\(?:choose|over)(?![a-z])", text) and _closes_at_the_end(text):
        text = text[1:-1].strip()
    return text


def _closes_at_the_end(text: str) -> bool:
    """Return whether the brace at the start closes at the last character."""
    depth = 0
    for position, character in enumerate(text):
        if character in "{}" and text[position - 1 : position] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position == len(text) - 1
    return False


def _normalize_signs(text: str) -> str:
    """Replace signs by commands and remove math delimiters, currency signs and font switches."""
    text = _QUOTIENT.sub(
        lambda m: rf"\text{{{_raise_unit(m[1], m[2] or m[3])}/{_raise_unit(m[4], m[5] or m[6])}}}", text
    )
    for _ in range(3):
        text = _TIMES_UNIT.sub(lambda m: rf"\text{{{_raise_unit(m[1], m[2])} ", text)
        text = _NEXT_UNIT.sub(lambda m: rf"{m[1]}\text{{{_raise_unit(m[2], m[3])} ", text)
    text = _RAISED_UNIT.sub(lambda m: re.sub(r"\^\s*\{\s*(-?[1-9])\s*\}", r"^\1", m[0]), text)
    text = re.sub(r"(?:\\mu|[μµ])\s*\\(?:text|mathrm)\s*\{\s*", r"\\text{µ", text)
    text = re.sub(
        r"\\(?:text|mathrm)\s*\{[^{}]*\}", lambda m: m[0].replace("\N{GREEK SMALL LETTER MU}", "\N{MICRO SIGN}"), text
    )
    text = re.sub(r"(\\in|∈)\s*\\math(?:bf|rm|it)\s*\{\s*([RZNQC])\s*\}", r"\1 \\mathbb{\2}", text)
    if re.search(r"\\(?:mathbf|boldsymbol|bm|vec|hat)\s*\{?\s*\\?[jk](?:math)?(?![A-Za-z])", text):
        text = re.sub(
            r"\\(?:mathbf|boldsymbol|bm|vec|hat)\s*\{?\s*\\?([ijk])(?:math)?\s*(?:\}|(?![A-Za-z]))", r"\\hat{\1}", text
        )
    text = re.sub(r"(&|,)\s*\\text\s*\{\s*(?:if|for|when|where)\s*\}", r"\1", text)
    if price := _PRICE.match(text):
        money = _MONEY[(price["before"] or price["behind"]).replace("\\", "")]
        text = rf"{price['price'] or price['number']} \text{{{money}}}"
    text = _DOUBLED.sub(r"\\", text) if "begin" not in text else text
    text = text.replace("\\$", "").replace("$", "").translate(_SIGNS)
    text = re.sub(r"(?<=\\\\)\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm)\s*\]", " ", text)
    text = re.sub(r"\\[()\[\]]", "", text) if not re.search(r"\\left\s*\\[\[(]", text) else text
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+", lambda m: "^{" + m[0].translate(_RAISED) + "}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_LOWERED) + "}", text)
    text = re.sub(f"[{_CURRENCY}]", "", text)
    return re.sub(SWITCH, "", text)


def _raise_unit(unit: str, power: str | None) -> str:
    return f"{unit}^{power}" if power else unit


def _without_group_commas(text: str) -> str:
    """Rewrite `1,234` as 1234 outside of brackets."""
    parts, depth, last = [], 0, 0
    for match in _GROUPED.finditer(text):
        before = re.sub(r"\\[{}]", "(", text[last : match.start()])
        depth += sum(before.count(c) for c in "([") - sum(before.count(c) for c in ")]")
        parts.append(text[last : match.start()] + (_join_digit_groups(match) if depth == 0 else match[0]))
        last = match.end()
    return "".join(parts) + text[last:]


_CIRCLED = re.compile(r"\\textcircled\s*\{\s*([1-9]|1[0-9]|20)\s*\}")


def plain(text: str) -> str:
    r"""Strip a `\text{}` around the whole text, and all blanks except those between letters or digits.

    `\textcircled{3}`, a statement in Chinese tests, becomes one sign.
    """
    if "\\textcircled" in text:
        text = _CIRCLED.sub(lambda m: chr(0x2460 + int(m[1]) - 1), text).strip("$ ")
    return _IDLE_BLANKS.sub("", LETTERS.sub(r"\1", text) if LETTERS.fullmatch(text) else text)


def other_readings(text: str, *, gold: bool) -> list[str]:
    r"""Return other meanings of a text.

    `0,5` is 0.5, `1e-3` a power of ten, `(B) 12` option B or 12, `5m` 5 meters.

    In a gold answer, a comma between digits separates two answers unless a currency or unit follows.
    """
    readings = list(split_label(text) or ())
    light = re.sub(SPACE, " ", text.replace("{,}", ",").replace("\\!", "")).strip()
    comma = _DECIMAL_COMMA.fullmatch(light)
    if comma and not _GROUPED.fullmatch(f"{comma[1]},{comma[2]}".lstrip("+-")):
        counted = comma[3] or re.match(r"[€£¥₹]|\\\$", light)
        if counted or (not gold and comma[2].strip("0")):
            whole = re.sub(r"[ .]", "", comma[1])
            readings.append(f"{whole}.{comma[2]} {comma[3]}")
    if named := re.fullmatch(r"\s*(?:\\ell|[lLCcm])\s*[:：]\s*([^:]*=[^:]*)", text):
        readings.append(named[1])  # a line or curve with its name
    if (value := value_of(LETTERS.sub(r"\1", text.strip("$ ")))) is not None:
        readings.append(str(value))
    if not gold and (ratio := re.fullmatch(r"\s*([0-9]+)\s*(?:\\text\{\s*to\s*\}|to)\s*([0-9]+)\s*", text)):
        readings.append(f"{ratio[1]}:{ratio[2]}")
    chosen = re.sub(r"(?<![A-Za-z\\])C\s*\(\s*([0-9]+)\s*,\s*([0-9]+)\s*\)", r"\\binom{\1}{\2}", text)
    if chosen != text and not (gold and chosen.startswith("\\binom") and chosen.endswith("}")):
        readings.append(chosen)  # a gold answer that is only `C(5, 2)` is a point
    if power := _POWER_OF_TEN.fullmatch(text):
        readings.append(rf"{power[1]} \cdot 10^{{{power[2]}}}")
    if run := _CASED_RUN.search(text):
        readings.append(f"{text[: run.start()]} {run[0]}")  # 5kN, otherwise a product
    if (unit := _UNIT_LETTER.search(text)) and (unit["blank"] or not gold):
        readings.append(f"{text[: unit.start()]}\\text{{{unit['unit']}{unit['rest']}}}{unit['power'] or ''}")
    return readings


def same_dates(gold: str, candidate: str) -> bool | None:
    """Compare dates in digits, or a gold range or score (`3-4`), with the other text; None if neither applies."""
    one, other = (
        re.sub(r" ?(?:[-–—]|\bto\b|\\text\{ ?to ?\}) ?", "-", " ".join(text.strip("$ ").split()))
        for text in (gold, candidate)
    )
    dates = [_DATE.fullmatch(text) for text in (one, other)]
    if not any(dates) and not _RANGE.fullmatch(one):
        return None
    return [int(part) for part in one.split("-")] == [int(part) for part in other.split("-") if part.isdecimal()] and (
        one.count("-") == other.count("-")
    )


def same_times(gold: str, candidate: str) -> bool | None:
    """Compare times of day of which one has a.m. or p.m., or one has seconds; None for anything else.

    `8:34` may be 8:34 a.m. or 20:34, `20:34` only 8:34 p.m.
    """
    found = [
        _TIME.fullmatch(" ".join(re.sub(SPACE, " ", LETTERS.sub(r" \1 ", text)).replace("$", " ").split()))
        for text in (gold, candidate)
    ]
    times = [time.groups() for time in found if time is not None and (time[2] or time[4])]
    if len(times) < 2 or not (any(time[3] for time in times) or (times[0][2] is None) != (times[1][2] is None)):
        return None
    parts = [(int(minutes or 0), int(seconds or 0)) for _, minutes, seconds, _ in times]
    halved = any(time[3] for time in times)
    hours = [_possible_hours(int(time[0]), (time[3] or "").lower(), halved) for time in times]
    return parts[0] == parts[1] and not hours[0].isdisjoint(hours[1])


def _possible_hours(hour: int, half: str, halved: bool) -> set[int]:
    """Return the hours of a 24-hour clock that an hour may mean. halved: the other time may have a.m. or p.m."""
    if half:
        return {hour % 12 + 12 * (half == "p")} if hour <= 12 else {hour}
    return {hour % 24, hour + 12} if halved and 1 <= hour < 12 else {0, 12} if halved and hour == 12 else {hour % 24}
