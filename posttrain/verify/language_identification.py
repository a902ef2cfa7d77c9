"""Whether a text is written in a language: by its script, and by function words among languages that share a script."""

from __future__ import annotations

import re

from posttrain.verify.language import SCRIPTS, prose, script_of, units

MIN_SCRIPT_SHARE = 0.8  # of the words; names and terms of another script are allowed
_SEPARATORS = re.compile(r"[^\w\u0300-\u036f\u0900-\u0dff\u200c\u200d]+|[\d_]+")

_FUNCTION_WORDS = {
    "en": "the of and to is in that it was for are with you this be not we have on as at by i my your can will or an a"
    " from they their he she but all over so",
    "de": "der die das und ist nicht ein eine ich zu mit den auf für sich von wir sie es im dem auch",
    "fr": "le la les et est des une un pas que je vous dans pour qui sur nous il du ce elle au",
    "es": "el la los las y es que en un una no por con para del se hoy lo su al más como",
    "it": "il la che di è e non un una per sono con del si lo gli della ho mi le più",
    "pt": "o a os as e é que de não um uma para com do da em se você na mais",
    "nl": "de het een en van is dat niet ik je op te zijn met voor we er ook",
    "sv": "och att det är en som inte jag på av för med den ett vi",
    "fi": "ja on ei se että hän oli mutta kun minä ovat joka tai myös",
    "pl": "i w nie na się jest to z że do jak ale co",
    "tr": "ve bir bu için ile da de çok ne gibi ben değil var",
    "id": "dan yang di ini itu dengan untuk tidak dari adalah saya pada ke",
    "vi": "và của là không có một cho được trong những người tôi các với",
    "sw": "na ya wa kwa ni katika hii za la si yake kuwa sana",
    "ru": "и в не на что я с он как это по но они из к она его для",
    "bg": "и в да не на се за от е са това с ще като",
    "uk": "і в не на що я з він як це до але та є",
    "ar": "في من على أن إلى هذا ما لا التي هو هذه كان",
    "fa": "و در به از که این را با است برای",
    "ur": "کے میں کی ہے اور سے کا کو یہ نہیں",
    "hi": "है के में की और से का को यह नहीं हैं",
    "mr": "आहे आणि या च्या मध्ये हे ते नाही आहेत",
    "ne": "छ र को मा हो यो छन् गर्न लागि",
}
FUNCTION_WORDS = {language: words.split() for language, words in _FUNCTION_WORDS.items()}


def is_written_in(text: str, language: str) -> bool:
    """Return whether the text is mostly in the language.

    At least 0.8 of its words must be in the language's script (all of `language.prose` is counted). Among languages
    that share the script, the one with most occurrences of its function words is the text's language; ties count for
    the language asked for. A text without letters or without any function word (`YES`, a list of names) is undecided
    and counts as written in the language.
    Raises ValueError for a language that is not known (`language.SCRIPTS`).
    """
    code = language.partition("-")[0].lower()
    if code not in SCRIPTS:
        raise ValueError(f"unknown language {language!r}; known: {', '.join(sorted(SCRIPTS))}")
    text = prose(text)
    scripts = list(units(text))
    if scripts and sum(script in SCRIPTS[code] for script in scripts) < MIN_SCRIPT_SHARE * len(scripts):
        return False
    if code == "ja":
        return not scripts or any(script_of(letter) in ("HIRAGANA", "KATAKANA") for letter in text)
    if code not in FUNCTION_WORDS:
        return True
    words = [word for word in _SEPARATORS.split(text.lower()) if word]
    counts = {
        other: sum(word in known for word in words)
        for other, known in FUNCTION_WORDS.items()
        if SCRIPTS[other] & SCRIPTS[code]
    }
    return counts[code] == max(counts.values())
