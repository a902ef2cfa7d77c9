"""Instructions of a data row, read from IFEval's or Tülu 3's columns, and checks of a completion against them."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

from posttrain.errors import did_you_mean
from posttrain.thoughts import ends_in_thought
from posttrain.verify.extract import after_think
from posttrain.verify.instructions import CHECKERS
from posttrain.verify.language import SCRIPTS
from posttrain.verify.structured import from_json


class Instruction(NamedTuple):
    """An instruction of a row: its id in `CHECKERS`, and the arguments of the checker."""

    id: str
    arguments: Mapping[str, Any] = types.MappingProxyType({})

    def is_followed_by(self, text: str) -> bool:
        return CHECKERS[self.id](text, **self.arguments)


# Tülu 3 (RLVR-IFeval): `func_name` -> (id, its argument -> ours, arguments that the function implies).
TULU_FUNCTIONS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}, {}),
    "verify_keyword_frequency": (
        "keywords:frequency",
        {"word": "keyword", "N": "frequency"},
        {"relation": "exactly", "whole_words": True},
    ),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}, {}),
    "verify_letter_frequency": (
        "keywords:letter_frequency",
        {"letter": "letter", "N": "let_frequency"},
        {"let_relation": "exactly"},
    ),
    "validate_response_language": ("language:response_language", {"language": "language"}, {}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"N": "num_sentences", "quantifier": "relation"},
        {},
    ),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}, {}),
    "validate_word_constraint": ("length_constraints:number_words", {"N": "num_words", "quantifier": "relation"}, {}),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "i": "nth_paragraph", "first_word": "first_word"},
        {},
    ),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}, {}),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}, {}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}, {}),
    "validate_choice": ("detectable_format:constrained_response", {"options": "options"}, {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}, {}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"N": "num_sections", "section_splitter": "section_spliter"},
        {},
    ),
    "validate_json_format": ("detectable_format:json_format", {}, {}),
    "validate_title": ("detectable_format:title", {}, {}),
    "validate_two_responses": ("combination:two_responses", {}, {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}, {}),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}, {}),
    "validate_quotation": ("startend:quotation", {}, {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"N": "capital_frequency", "quantifier": "capital_relation"},
        {},
    ),
    "validate_uppercase": ("change_case:english_capital", {}, {}),
    "validate_lowercase": ("change_case:english_lowercase", {}, {}),
    "validate_no_commas": ("punctuation:no_comma", {}, {}),
}


def read_instructions(ids: Any, arguments: Any, ground_truth: Any) -> list[Instruction]:
    """Read the instructions of a row; [] if all three columns are null.

    ids, arguments: columns `instruction_id_list` and `kwargs` as in google/IFEval (lists of one length, or their JSON
    text; arguments that are null do not count). ground_truth: used without ids; an object of Tülu 3, or its JSON text,
    with `func_name` and the arguments of that function.
    Raises ValueError, naming the instruction, for an unknown id, and for arguments that are missing, unknown or of
    another type.
    """
    if ids is not None:
        ids = from_json(ids, (list, tuple), "a list of ids", "instruction_id_list")
        given = from_json([{}] * len(ids) if arguments is None else arguments, (list, tuple), "a list", "kwargs")
        if not ids or len(ids) != len(given):
            raise ValueError(f"`instruction_id_list` has {len(ids)} ids, and `kwargs` has {len(given)} entries")
        return [
            Instruction(name, _validate_arguments(str(name), from_json(entry or {}, Mapping, "an object", "kwargs")))
            for name, entry in zip(ids, given, strict=True)
        ]
    if ground_truth is None:
        return []
    held = from_json(ground_truth, Mapping, "an object with `func_name`", "ground_truth")
    function = held.get("func_name")
    if function not in TULU_FUNCTIONS:
        hint = did_you_mean(str(function), TULU_FUNCTIONS)
        raise ValueError(f"`ground_truth` has the unknown func_name {function!r}{f'; {hint}' if hint else ''}")
    name, names, implied = TULU_FUNCTIONS[function]
    renamed = {names.get(key, key): held[key] for key in held if key in names}
    return [Instruction(name, _validate_arguments(name, {**renamed, **implied}))]


def _validate_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without nulls, integral floats as int. Raises ValueError if they do not fit the checker."""
    if name not in CHECKERS:
        hint = did_you_mean(name, CHECKERS)
        raise ValueError(f"unknown instruction {name!r}{f'; {hint}' if hint else ''}")
    arguments = {key: value for key, value in given.items() if value is not None}
    parameters = {p.name: p for p in inspect.signature(CHECKERS[name]).parameters.values() if p.name != "text"}
    if missing := [key for key, p in parameters.items() if p.default is p.empty and key not in arguments]:
        raise ValueError(f"instruction {name} lacks the argument {', '.join(missing)}")
    if unknown := sorted(arguments.keys() - parameters.keys()):
        takes = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
        raise ValueError(f"instruction {name} has the unknown argument {', '.join(unknown)}; {takes}")
    hints = typing.get_type_hints(CHECKERS[name])
    checked = {key: _validate_value(name, key, value, hints[key]) for key, value in arguments.items()}
    if checked.get("nth_paragraph", 1) > checked.get("num_paragraphs", 1) or checked.get("nth_paragraph", 1) < 1:
        raise ValueError(f"instruction {name}: nth_paragraph must be from 1 to num_paragraphs")
    if "language" in checked and checked["language"].partition("-")[0].lower() not in SCRIPTS:
        raise ValueError(
            f"instruction {name}: language {checked['language']!r} is unknown; known: {', '.join(SCRIPTS)}"
        )
    return checked


def _validate_value(name: str, key: str, value: Any, hint: Any) -> Any:
    where = f"instruction {name}: {key}"
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{where} is {value!r}, must be one of: {', '.join(get_args(hint))}")
        return value
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            raise ValueError(f"{where} is {value!r}, must be a whole number from 0")
        return int(value)
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{where} is {value!r}, must be true or false")
        return value
    if hint is str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where} is {value!r}, must be a text")
        return value
    texts = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"{where} is {value!r:.80}, must be a list of texts")
    return texts


def loose_variants(text: str) -> list[str]:
    """Return the eight texts of the paper's loose accuracy: without `*`, without the first, the last or both lines."""
    lines = text.split("\n")
    parts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*parts, *(part.replace("*", "") for part in parts)]


def met_instructions(instructions: Sequence[Instruction], text: str, *, loose: bool = False) -> list[bool]:
    """Return for each instruction whether the text follows it; a blank text follows none.

    loose: an instruction is met if one of the `loose_variants` follows it.
    """
    texts = [variant for variant in (loose_variants(text) if loose else [text]) if variant.strip()]
    return [any(map(instruction.is_followed_by, texts)) for instruction in instructions]


def answer_after_thought(completion: str, prefilled_think: bool) -> str:
    """Return the answer: the text after the thought, within its `<answer>` tags if they enclose it.

    "" if the thought is not closed.
    """
    if ends_in_thought("<think>" if prefilled_think else "", completion):
        return ""
    text = after_think(completion).lstrip("\n")
    enclosed = re.fullmatch(r"\s*<answer>(.*)</answer>\s*", text, re.DOTALL)
    return enclosed[1] if enclosed else text


def only_repeats(text: str, request: str) -> bool:
    """Return whether the text is copies of the request and nothing else, except for case, blanks and punctuation."""
    words, asked = (re.findall(r"\w+", part.lower()) for part in (text, request))
    return bool(asked) and words == asked * (len(words) // len(asked)) and len(words) >= len(asked)
