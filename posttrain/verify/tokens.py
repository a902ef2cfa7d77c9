"""Tokenizer for answers in LaTeX or plain text. Pure functions of text."""

from __future__ import annotations

import re
from typing import NamedTuple


class Token(NamedTuple):
    """One token.

    kind: `number`, `letter`, `word` (text in words), `command` (without its backslash), `relation` or `sign`.
    """

    kind: str
    text: str
    spaced: bool = False  # preceded by a blank


_FUNCTIONS_WORDS = """
sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp sqrt gcd lcm max min det
floor ceil abs arcsec arccsc asin acos atan tg ctg arctg arcctg coth sech csch asinh acosh atanh acoth arsinh arcosh
artanh arcoth arcsinh arccosh arctanh arccoth
"""
FUNCTIONS = frozenset(_FUNCTIONS_WORDS.split())
_GREEK_WORDS = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar
"""
GREEK = frozenset(_GREEK_WORDS.split())
_NAMED = {"infinity": "infty", "inf": "infty", "oo": "infty", "mod": "bmod", "modulo": "bmod", "choose": "choose"}
_NAMED |= {"percent": "%", "percentage": "%", "pct": "%", "union": "cup", "and": "and", "or": "or", "pi": "pi"}
_NAMED |= {"degrees": "degree", "degree": "degree", "deg": "degree", "times": "times"}
_NAMED |= {one: one for one in FUNCTIONS | GREEK if one not in ("lg", "abs", "Xi", "xi", "mu", "nu", "eta", "ell")}

# Units of one to three letters, and other short words that follow a number.
_SHORT_WORDS = """
mm cm dm km kg mg ml kl ms ks min sec hr hrs yr yrs ft in yd mi lb lbs oz gal mph kmh kph cc sq cu rs day men
man am pm kmph cent pie toy way per th rd nd st hz kw kwh pa kpa mol rpm usd eur gbp cal kcal box cup dog cat
egg car bag pen pan pt qt ton
"""
SHORT = frozenset(_SHORT_WORDS.split())
# Units whose prefix depends on its case: a megawatt is no milliwatt.
_CASED_WORDS = "MW mW GW MHz mHz GHz kHz MJ mJ GJ kJ kN MN MPa kPa eV keV MeV GeV kV mV mA MWh kWh"
CASED = frozenset(_CASED_WORDS.split())
_SCALE = ("dozen", "hundred", "thousand", "million", "billion", "trillion")

_TOKEN = re.compile(
    r"(?P<blank>\s+)|(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|\\(?:text|textrm)\s*\{(?P<word>[^{}]*)\}|\\(?P<command>(?:begin|end):\w+|[A-Za-z]+|[^A-Za-z])"
    r"|(?P<foreign>[\u4e00-\u9fff]+|[\u0400-\u04ff]{2,}|(?=[^\W\d_]{2})[A-Za-z]*[À-ÖØ-öø-ʯ][A-Za-zÀ-ÖØ-öø-ʯ]*)"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<sign><=|>=|!=|==|\*\*|.)",
    re.DOTALL,
)
_BLANK_AND_NUMBER = re.compile(r"\s+[0-9]")
_RELATIONS = {"<=": "le", ">=": "ge", "!=": "ne", "<": "lt", ">": "gt", "=": "=", "==": "=", "≡": "equiv"}
_SAME_COMMANDS = {"leq": "le", "geq": "ge", "neq": "ne", "leqslant": "le", "geqslant": "ge", "lor": "or", "vee": "or"}
_SAME_COMMANDS |= {"land": "and", "wedge": "and", "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "div": "/"}
_SAME_COMMANDS |= {
    "cdot": "*",
    "times": "*",
    "ast": "*",
    "vert": "|",
    "lvert": "|",
    "rvert": "|",
    "mid": "|",
    "to": "to",
}
_SAME_COMMANDS |= {"dbinom": "binom", "tbinom": "binom", "lbrace": "{", "rbrace": "}", "backslash": "setminus"}
_SAME_COMMANDS |= {
    "lbrack": "[",
    "rbrack": "]",
    "leqq": "le",
    "geqq": "ge",
    "degree": "degree",
    "lg": "lg",
    "colon": ":",
    "tg": "tan",
    "ctg": "cot",
    "arctg": "arctan",
    "arcctg": "arccot",
    "uppi": "pi",
}
_SIGNS = frozenset("*/|[]:")


def tokenize(text: str) -> list[Token]:
    """Tokenize a text normalized by `notation.clean`."""
    tokens: list[Token] = []
    spaced = False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind == "blank":
            spaced = True
            continue
        if kind == "number" and tokens and tokens[-1].text in ("frac", "binom") and match[kind].isdecimal():
            above, below, rest = match[kind][:1], match[kind][1:2], match[kind][2:]  # \frac12
            tokens += [Token(kind, part, spaced) for part in (above, below, rest) if part]
        else:
            found = _tokens(kind, match[kind], spaced, tokens)
            if kind == "letters" and len(found) > 1 and _BLANK_AND_NUMBER.match(text, match.end()):
                found = [Token("sign", match[kind], spaced)]  # a short word, no product: `not 0`, `x at 0`
            tokens += found
        spaced = False
    if tokens and tokens[-1].text == "*" and re.search(r"[0-9)}]\s*times$", text):
        tokens[-1] = Token("word", "times", True)  # 5 times
    return tokens


def _tokens(kind: str, text: str, spaced: bool, before: list[Token]) -> list[Token]:
    if kind == "word":
        return [Token("word", text.strip(), spaced)] if text.strip() else []
    if kind == "command":
        return _command(text, spaced)
    if kind == "letters":
        return _letters(text, spaced, before)
    if kind == "foreign":  # Chinese, Cyrillic, accented Latin: what is counted
        after_number = bool(before) and (
            before[-1].kind in ("number", "word") or before[-1].text in ("}", ")", "pi", "%")
        )
        return [Token("word", text, spaced)] if after_number else [Token("sign", one, spaced) for one in text]
    if kind == "sign" and text in _RELATIONS:
        return [Token("relation", _RELATIONS[text], spaced)]
    return [Token(kind, "^" if text == "**" else text, spaced)]


def _counts(before: list[Token]) -> bool:
    """Return whether up to three words follow a number at the end of the tokens."""
    kinds = [token.kind for token in before[-4:]]
    return "number" in kinds and set(kinds[len(kinds) - kinds[::-1].index("number") :]) == {"word"}


def _command(name: str, spaced: bool) -> list[Token]:
    name = _SAME_COMMANDS.get(name, name)
    if name in ("{", "}"):
        return [Token("sign", "\\" + name, spaced)]
    if name in (
        "left",
        "right",
        "mleft",
        "mright",
        "big",
        "Big",
        "bigl",
        "bigr",
        "Bigl",
        "Bigr",
        "bigg",
        "biggl",
        "biggr",
        "limits",
        "middle",
    ):
        return []
    if name in ("le", "ge", "lt", "gt", "ne", "in", "notin", "approx", "equiv", "subset", "simeq", "sim"):
        return [Token("relation", "approx" if name in ("simeq", "sim") else name, spaced)]
    return [Token("sign" if name in _SIGNS else "command", name, spaced)]


def _letters(run: str, spaced: bool, before: list[Token]) -> list[Token]:
    """Tokenize a run of letters: a known name, a unit or a word, or else single letters."""
    last = before[-1] if before else Token("", "")
    after_number = last.kind == "number" or last.text in ("}", ")", "pi", "%") or last.kind == "word"
    if run == "in" and last.kind == "letter" and spaced:
        return [Token("relation", "in", spaced)]
    if run in _NAMED and not (run == "min" and after_number) and last.text != "_":
        return _command(_NAMED[run], spaced)
    if len(run) == 1:
        return [Token("letter", run, spaced)]
    if run == "for":
        return [Token("sign", run, spaced)]  # no product
    if run == "of" and last.kind == "word":
        return [Token("word", run, spaced)]
    if spaced and run.islower() and set(run) & set("aeiou") and _counts(before):
        return [Token("word", run, spaced)]  # 5 years old, 6 pieces of gum
    if len(run) > 1 and last.text == "/" and run in SHORT and len(before) > 1 and before[-2].kind in ("number", "word"):
        return [Token("word", run, spaced)]
    short = run.lower() in SHORT and (spaced or run.islower())
    if after_number and (short or run in _SCALE or (spaced and run in CASED)):
        return [Token("word", run, spaced)]
    for name in ("sqrt", "arcsin", "arccos", "arctan", "sin", "cos", "tan", "ln", "log"):
        if run.startswith(name) and len(run) == len(name) + 1 and last.text != "_":
            return [Token("command", name, spaced), Token("letter", run[len(name) :])]
    if (
        len(run) >= 4
        and not run.isupper()
        and run not in "abcdefghijklmnopqrstuvwxyz"
        and any(c in "aeiouy" for c in run.lower())
    ):
        return [Token("word", run, spaced)]
    return [Token("letter", run[0], spaced), *(Token("letter", letter) for letter in run[1:])]
