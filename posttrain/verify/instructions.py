"""Checkers of verifiable instructions: the 25 of IFEval (arXiv 2311.07911). Pure functions of text.

A checker answers as the authors' code does (google-research, instruction_following_eval), except that words of the data
are plain text and not regular expressions, and that three checkers do not depend on packages: `count_sentences` and
`capital_word_frequency` do not use NLTK, and languages are found by `language_identification` and not by langdetect.
Arguments are keyword-only and named as in the data set; a checker's signature lists what a row must have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

from posttrain.verify.language_identification import is_written_in

Relation = Literal["less than", "at least", "at most", "around", "exactly"]  # IFEval has the first two

_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_OPENING = "([{\"'*_\N{LEFT DOUBLE QUOTATION MARK}\N{LEFT SINGLE QUOTATION MARK}"
_SENTENCE_END = re.compile(r"(.*?[^.?!…]|)([.?!…]+)(?:[)\]}\"'*_:;”’]\W*)?")
# Words after which `.` ends no sentence, and words that begin a sentence even there.
_ABBREVIATIONS = re.compile(
    r"mr|mrs|ms|dr|prof|st|jr|sr|inc|ltd|co|corp|vs|etc|rev|gen|col|lt|sgt|capt|gov|sen|rep|fig|vol|ed|approx|dept|est"
    r"|jan|feb|mar|apr|aug|sept|oct|nov|dec|[^\W\d_]|(?!(?:p\.)?p\.s$).*[^\W\d_]\.[^\W\d_]+"
)
_SENTENCE_STARTERS = re.compile(
    r"(?:the|an?|th(?:is|at|ese|ose)|s?he|it|they|we|i|you|in|on|at|and|or|so|by|do|from|with|his|her|my|our|your|their|its"
    r"|some\w*|but|however|then|there|if|when|what|as|for|introduction|overview|conclusion),?",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"(?:--|\.{2,}|[^\s,;:!?()\[\]{}<>\"@#$%&])++")
_CONTRACTION = re.compile(r"(?<=\w)(?=N['’]T$)|(?<=[A-Z])(?=['’](?:S|M|D|LL|RE|VE)$)")


def holds(count: int, relation: Relation, wanted: int) -> bool:
    """Return whether `count` stands in the relation to `wanted`. `around` allows a tenth of `wanted`, at least 1."""
    if relation == "less than":
        return count < wanted
    if relation == "at least":
        return count >= wanted
    if relation == "at most":
        return count <= wanted
    if relation == "around":
        return abs(count - wanted) <= max(1, round(wanted / 10))
    return count == wanted


def _find_word(word: str, *, whole: bool) -> re.Pattern[str]:
    pattern = re.escape(word.strip())
    return re.compile(rf"(?<!\w){pattern}(?!\w)" if whole else pattern, re.IGNORECASE)


def existence(text: str, *, keywords: Sequence[str]) -> bool:
    """Return whether every keyword occurs, also within a word, in any case."""
    return all(_find_word(keyword, whole=False).search(text) for keyword in keywords)


def frequency(text: str, *, keyword: str, frequency: int, relation: Relation, whole_words: bool = False) -> bool:
    """Return whether the keyword occurs that often; without whole_words, occurrences within words count."""
    return holds(len(_find_word(keyword, whole=whole_words).findall(text)), relation, frequency)


def has_no_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """Return whether none of the words occurs as a whole word, in any case."""
    return not any(_find_word(word, whole=True).search(text) for word in forbidden_words)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    """Return whether the letter (or another character) occurs that often, in any case."""
    return holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, *, language: str) -> bool:
    """Return whether the text is written in the language (`is_written_in`, which names what is undecided)."""
    return is_written_in(text, language)


def count_sentences(text: str) -> int:
    """Count the sentences, approximately as NLTK's Punkt model for English.

    A sentence ends at a word with `.`, `?` or `!` before white space. After an abbreviation (`Dr.`, `U.S.`, an initial)
    it ends only before a capitalized word that often begins sentences, after a number (`1.`) not before a small letter,
    and after an ellipsis only before a capital. Line breaks end nothing.
    """
    words = text.split()
    return sum(map(_ends_sentence, words, words[1:])) + bool(words)


def _ends_sentence(word: str, following: str) -> bool:
    found = _SENTENCE_END.fullmatch(word)
    if found is None:
        return False
    stem, marks = found[1].lstrip(_OPENING).lower(), found[2]
    following = following.lstrip(_OPENING)
    if "?" in marks or "!" in marks:
        return True
    if len(marks) > 1 or marks == "…":
        return following[:1].isupper()
    if stem.isdigit():
        return not following[:1].islower()
    return _ABBREVIATIONS.fullmatch(stem) is None or bool(
        following[:1].isupper() and _SENTENCE_STARTERS.fullmatch(following)
    )


def number_sentences(text: str, *, num_sentences: int, relation: Relation) -> bool:
    """Return whether the text has that many sentences (`count_sentences`)."""
    return holds(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Return whether the dividers `***` or `* * *` separate exactly so many paragraphs; none between two is blank."""
    paragraphs = [part.strip() for part in re.split(r"\*\*\*|\* \* \*", text)]
    return all(paragraphs[1:-1]) and sum(map(bool, paragraphs)) == num_paragraphs


def number_words(text: str, *, num_words: int, relation: Relation) -> bool:
    r"""Return whether the text has that many words, where a word is a run of letters, digits and `_` (`\w+`)."""
    return holds(len(re.findall(r"\w+", text)), relation, num_words)


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return whether blank lines separate exactly so many paragraphs and the n-th (from 1) begins with the word.

    Quotation marks before the word do not count, and the word ends at a punctuation mark.
    """
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """Return whether at least so many placeholders such as `[address]` occur."""
    return len(re.findall(r"\[[^\n\[\]]*\]", text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    """Return whether the marker occurs, in any case; `P.S.` and `P.P.S` may have spaces within."""
    patterns = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    marker = postscript_marker.strip()
    return re.search(patterns.get(marker, re.escape(marker)), text, re.IGNORECASE) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """Return whether exactly so many lines begin with `*` (not `**`) or `-`."""
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def constrained_response(text: str, *, options: Sequence[str] = _CHOICES) -> bool:
    """Return whether one of the options occurs; the paper has `My answer is yes.`, `no.` and `maybe.`."""
    return any(option in text for option in options)


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """Return whether at least so many passages are `*highlighted*` or `**highlighted**`."""
    single = [found for found in re.findall(r"\*([^\n*]*)\*", text) if found.strip()]
    double = [found for found in re.findall(r"\*\*([^\n*]*)\*\*", text) if found.strip()]
    return len(single) + len(double) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Return whether at least so many sections begin with the word and a number, as in `Section 1`."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """Return whether the text, or its only fenced block, is JSON."""
    text = re.sub(r"^```(?:json|Json|JSON)?|```$", "", text.strip()).strip()
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """Return whether a line has a title in double angular brackets."""
    return any("<<" in line and line.partition("<<")[2].rpartition(">>")[0].strip("<> \t") for line in text.split("\n"))


def two_responses(text: str) -> bool:
    """Return whether `******` separates exactly two different answers."""
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Return whether the text begins with the request, in any case. What follows is not checked (see `follow`)."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    """Return whether the text ends with the phrase, in any case; a quotation mark may follow."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """Return whether double quotation marks enclose the text."""
    text = text.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: Relation) -> bool:
    """Return whether so many words are in capitals; hyphenated words are one, `DON'T` is two, as in NLTK."""
    tokens = [part for token in _TOKEN.findall(text) for part in _CONTRACTION.split(token)]
    return holds(sum(map(str.isupper, tokens)), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """Return whether every letter is a capital and the text is English."""
    return text.isupper() and is_written_in(text, "en")


def english_lowercase(text: str) -> bool:
    """Return whether no letter is a capital and the text is English."""
    return text.islower() and is_written_in(text, "en")


def no_comma(text: str) -> bool:
    """Return whether the text has no comma."""
    return "," not in text


CHECKERS: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": has_no_forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
