"""Words that announce an answer, `the answer is` and `Answer:`, in English and in other languages."""

from __future__ import annotations

import functools
import re

_COLON = r"[ \t*_`]*[:\N{FULLWIDTH COLON}][*_`]*(?:[ \t]*\n\s*(?=\S))?"
_NAMED = (
    r"\b(?:answers?(?:\s+(?:option|choice)|\s+to\s+(?:the|this)\s+(?:question|problem))?"
    r"|(?:correct|right|best)\s+(?:option|choice))"
)
# Other languages: (noun, adjectives that may follow it, verb or dash before the answer), each as alternatives.
_SPACED: tuple[tuple[str, str, str | None], ...] = (
    ("réponse", "finale|correcte|exacte", "est(?: de)?"),
    ("respuesta", "final|correcta", "es"),
    ("resposta", "final|correta|certa", "é"),
    ("risposta", "finale|corretta|esatta", "è"),
    ("antwort", "", "ist|lautet"),
    ("antwoord", "", "is"),
    ("ответ", "", "равен|[-–—]"),
    ("відповідь", "", "[-–—]"),
    ("odpověď|odgovor", "", "je"),
    ("odpowiedź", "", "to"),
    ("jawaban|jawabannya", "akhir|akhirnya", "adalah"),
    ("jibu", "sahihi", "ni"),
    ("câu trả lời|đáp án", "cuối cùng|đúng", "là"),
    ("cevap", "", ""),
    ("válasz", "", ""),
    ("ìdáhùn", "", "náà ni"),
    ("答", "", None),
)
_UNSPACED: tuple[tuple[str, str, str | None], ...] = (
    ("الإجابة|الاجابة|إجابة|الجواب", "النهائية|النهائي|الصحيحة|الصحيح", "هي|هو"),
    ("جواب", "", ""),
    ("उत्तर", "", "है|आहे"),
    ("উত্তর", "", "হলো|হল|ঃ"),
    ("సమాధానం", "", ""),
    ("คำตอบ", "สุดท้าย|ที่ถูกต้อง", "คือ"),
    ("答え|正解", "", "は"),
    ("정답|답변|답", "", "은"),
    ("答案", "", "选项应?该?[是为]|(?:应该?)?(?:是|为|為|选择?|選)"),
    ("正确选项|正確選項", "", "[是为為]"),
    ("故选|因此选|所以选|故選|所以選", "", ""),
    ("回答|解答|答复|答曰", "", None),
)


def _announce(noun: str, adjectives: str, verbs: str | None, spaced: bool) -> str:
    """Return the pattern of a noun before a colon, or before a verb and maybe a colon.

    verbs: "" if a number or an option may follow the noun directly; None if only a colon may. spaced: whether the
    language divides words by blanks.
    """
    start, end = (r"(?<!\w)", r"(?!\w)") if spaced else ("", "")
    named = rf"{start}(?:{noun})" + (rf"\s*(?:{adjectives})?" if adjectives else "")
    by_verb = rf"|\s*(?:{verbs}){end}(?:{_COLON})?" if verbs else r"|\s*(?=[(*$]*(?:-?[0-9]|[A-J]\b))"
    return rf"{named}(?:{_COLON}{'' if verbs is None else by_verb})"


# (nouns, pattern) of each language.
_ELSEWHERE = [
    (noun.split("|"), _announce(noun, adjectives, verbs, spaced))
    for spaced, languages in ((True, _SPACED), (False, _UNSPACED))
    for noun, adjectives, verbs in languages
]


def find_anchors(text: str) -> list[re.Match[str]]:
    """Find `the answer is`, `Answer:`, and headings of that kind; the answer stands behind them."""
    lower = text.lower()
    return list(_compile(tuple(found for nouns, found in _ELSEWHERE if any(n in lower for n in nouns))).finditer(text))


@functools.lru_cache(maxsize=64)
def _compile(elsewhere: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of anchors in English and these of other languages: a pattern of all is five times slower."""
    english = rf"{_NAMED}(?:\s+is\b(?:{_COLON})?|{_COLON})"
    heading = r"^[ \t#*_>]*(?:the\s+)?(?:final\s+)?answers?[ \t*_]*\n\s*(?=\S)"
    return re.compile("|".join((english, *elsewhere, heading)), re.IGNORECASE | re.MULTILINE)


# Verbs that end the sentence after the answer; with a negation they are part of other words (`아닙니다`, `नहीं है`).
VERB_BEHIND = re.compile(r"(?<=[0-9A-Za-z)}$*个個」])\s*(?:です|である|だ|입니다|이다|है|हो|आहे|ہے)[。．.।]?$")
# Denials before the answer in its clause: `The wrong answer is 5`, `I doubt that the answer is 5`.
DENIED = re.compile(
    r"\b(?:no(?!\s+doubt)|not|never|wrong|incorrect|false|untrue|(?<!no )doubt\w*|deny|denies|unlikely|impossible"
    r"|if|unless|whether"
    r"|isn['’]?t|don['’]?t|doesn['’]?t|can['’]?t|cannot"
    r"|falsch\w*|fausse|mauvaise|incorrect\w+|equivocad\w+|errad\w+|sbagliat\w+|неправильн\w+|неверн\w+)\b"
    r"|错误|錯誤|不正确|不正確|不对|不對|不是|并非|並非|[不非]\Z|틀린|오답|خاطئة",
    re.IGNORECASE,
)
