"""Numbers in words, and words that change or deny the number before them. Pure functions of text."""

from __future__ import annotations

import re

_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_ONES += " seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: value for value, word in enumerate(_ONES.split())}
_VALUES |= {word: 10 * (index + 2) for index, word in enumerate(_TENS.split())}
_LARGE = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

SCALES = {**_LARGE, "quadrillion": 10**15, "dozen": 12, "gross": 144, "lakh": 10**5, "crore": 10**7}
SCALES |= {"bn": 10**9, "tn": 10**12, "mio": 10**6, "mrd": 10**9}
SCALES |= {f"{name}s": size for name, size in SCALES.items()}
SCALES |= {f"{many}{name}": count * size for many, count in (("", 1), ("十", 10), ("百", 100), ("千", 1000))
           for name, size in (("万", 10**4), ("萬", 10**4), ("亿", 10**8), ("億", 10**8))}  # fmt: skip
# Words that, after a number, say more than what is counted: they change, bound or deny the number, or name another one.
_MORE_WORDS = """
or and not no but is are isn aren plus minus times over squared cubed factorial wrong right maybe possibly
perhaps probably to through between less more than least most if when where for other another half halves
quarter quarters pi sqrt alpha either neither nor except unless mod modulo base instead rather point into
one two three four five six seven eight nine ten eleven twelve zero negative positive false incorrect from below
above under exceeding divided root power fewer greater smaller too only also false non lower upper etc
so remainder rem with out
doubled tripled quadrupled halved twice thrice negated inverted inverse reciprocal reversed conjugate transpose
complement octal binary hexadecimal hex decimal factorials tens twelves ones zeros zeroes nines zillion
quintillion googol myriad score scores grand couple couples pairs mille millones permille basis kilo mega giga nano
micro milli nope never untrue mistaken wrongly invalid error rejected impossible unlikely doubtful unsure guess
guessed perchance conceivably likely hopefully alternatively something excluded excluding exclusive removed missing
ignoring nicht oder ou keine minimum maximum tops upwards upward downwards onwards onward mindestens unknown among
truncated
tausend millionen milliarde milliarden milliers milliard milliards mil milhão milhões bilhão bilhões millón mila milioni
miliardi тысяча тысячи тысяч миллион миллиона миллионов миллиард миллиарда миллиардов ألف آلاف مليون مليار हज़ार लाख करोड़
만 억 천 백만 천만 ribu juta nghìn triệu milyon milyar
не нет или либо и с половиной половина половины плюс минус более менее больше меньше сотен сотни десятков десятки дюжин
дюжина дюжины десятых сотых тысячных третьих четверти четвертей пятых квадрате кубе степени
não até além também más según también además où né più così perché hälfte größer höher fünf zwölf dreißig fünftel
zwölftel moitié dixièmes centièmes millièmes carré carrés négatif négative décimos décimas décimo centésimas milésimas
nebo či až není než půl třetiny čtvrtiny değil lub że không hoặc
tercio tercios cuartos quintos octavos medio medios terços meia meio mezzo demi demie halbe
drittel viertel sechstel achtel zehntel terzi quinti cinquièmes huitièmes
thou hunderte tausende dutzend paar centaine centaines dizaine dizaines douzaine douzaines paire cientos docena docenas
пара пол bps double triple umpteen gazillion
"""
_MORE = frozenset(_MORE_WORDS.split())
_PART = re.compile(
    r"(?:\w*(?:thir|four|fif|six|seven|eigh|nin|ten|eleven|twelf|twentie|hundred|thousand|illion)th|third)s?"
)


# Chinese words are written without blanks: a scale and what is counted, and what changes a number wherever it stands
# (half, more, some, or, not, numerals; hundreds and thousands except in the names of units).
_HAN_SCALE = re.compile(r"\b([十百千]?[万萬亿億])(?=[\u4e00-\u9fff])")
_HAN_MORE = re.compile(
    r"[半多余餘几幾或和与與加减減乘除折成割打双雙负負非不无無错錯零一二三四五六七八九两兆十百万萬亿億]"
    r"|以[上下]|分之|千(?![克米瓦卡焦帕赫伏])"
)


def split_scale(text: str) -> str:
    """Separate a Chinese scale from what is counted: `万人` is `万 人`."""
    return _HAN_SCALE.sub(r"\1 ", text)


def changes_number(word: str) -> bool:
    """Return whether a lowercase word after a number changes, bounds or denies it: `sevenths`, `halved`, `or`."""
    known = word in _MORE or word in SCALES or word in _VALUES
    return known or _PART.fullmatch(word) is not None or _HAN_MORE.search(word) is not None


def value_of(text: str) -> int | None:
    """Return the number in English words: `forty-two`, `one hundred and five`, `minus three`; else None."""
    words = text.casefold().replace("-", " ").split()
    negative = words[:1] in (["minus"], ["negative"])
    words = [word for word in words[negative:] if word != "and"]
    if not words or len(words) > 12 or not all(word in _VALUES or word in _LARGE for word in words):
        return None
    total, part, last = 0, 0, None
    for word in words:
        if word == "hundred" and last is not None and 0 < last < 10:
            part, last = part - last + 100 * last, None
        elif word in _LARGE and word != "hundred" and part:
            total, part, last = total + part * _LARGE[word], 0, None
        elif word in _VALUES and (last is None or (last >= 20 and last % 10 == 0 and 0 < _VALUES[word] < 10)):
            part, last = part + _VALUES[word], (last or 0) + _VALUES[word]
        else:
            return None
    return -(total + part) if negative else total + part
