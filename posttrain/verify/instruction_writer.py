"""Writing of texts that follow given instructions, to test a reward on its own rows before training."""

from __future__ import annotations

import json
from collections.abc import Sequence

from posttrain.verify.instruction_rows import Instruction, met_instructions
from posttrain.verify.language_identification import FUNCTION_WORDS

_EXPECTS_MORE = ("at least", "around", "exactly")


def write_answer(instructions: Sequence[Instruction]) -> str | None:
    """Write a short text that follows all instructions; None if that does not succeed (some exclude each other)."""
    text = _compose({name: dict(arguments) for name, arguments in instructions})
    return text if all(met_instructions(instructions, text)) else None


def write_near_miss(instructions: Sequence[Instruction]) -> str | None:
    """Write a text that follows all instructions except one; None if that does not succeed."""
    for left_out in range(len(instructions)):
        others = [one for number, one in enumerate(instructions) if number != left_out]
        text = write_answer(others)
        if text is not None and not all(met_instructions(instructions, text)):
            return text
    return None


def _compose(wanted: dict[str, dict]) -> str:
    """Write a text with every part that an instruction asks for; the parts may disturb each other."""

    def get(name: str) -> dict:
        return wanted.get(name, {})

    def count(name: str, key: str, relation: str) -> int:
        given = get(name)
        return given[key] if given and given[relation] in _EXPECTS_MORE else 0

    language = get("language:response_language").get("language", "en")
    word = FUNCTION_WORDS.get(language, ["so"])[0]
    body = [word, *get("keywords:existence").get("keywords", [])]
    body += [get("keywords:frequency").get("keyword", "")] * count("keywords:frequency", "frequency", "relation")
    body += ["OK"] * count("change_case:capital_word_frequency", "capital_frequency", "capital_relation")
    if "keywords:letter_frequency" in wanted:
        letter = get("keywords:letter_frequency")["letter"]
        body.append(letter * count("keywords:letter_frequency", "let_frequency", "let_relation"))
    body += ["[name]"] * get("detectable_content:number_placeholders").get("num_placeholders", 0)
    body += [f"*{word}*"] * get("detectable_format:number_highlighted_sections").get("num_highlights", 0)
    if "detectable_format:title" in wanted:
        body.insert(0, f"<<{word}>>\n")
    if "detectable_format:constrained_response" in wanted:
        body.append((get("detectable_format:constrained_response").get("options") or ["My answer is yes."])[0])
    missing = count("length_constraints:number_words", "num_words", "relation") - len(body)
    body += [word] * missing
    text = " ".join(body)
    text += f" {word}." * count("length_constraints:number_sentences", "num_sentences", "relation")
    sections = get("detectable_format:multiple_sections")
    splitter = sections.get("section_spliter", "")
    text += "".join(f"\n{splitter} {number + 1}\n{word}" for number in range(sections.get("num_sections", 0)))
    text += f"\n* {word}" * get("detectable_format:number_bullet_lists").get("num_bullets", 0)
    text += f"\n***\n{word}" * (get("length_constraints:number_paragraphs").get("num_paragraphs", 1) - 1)
    if nth := get("length_constraints:nth_paragraph_first_word"):
        parts = [text] + [word] * (nth["num_paragraphs"] - 1)
        parts[nth["nth_paragraph"] - 1] = f"{nth['first_word']} {parts[nth['nth_paragraph'] - 1]}"
        text = "\n\n".join(parts)
    if "combination:two_responses" in wanted:
        text += f"\n******\n{word} {word}"
    if "combination:repeat_prompt" in wanted:
        text = f"{get('combination:repeat_prompt')['prompt_to_repeat']}\n{text}"
    if "detectable_content:postscript" in wanted:
        text += f"\n{get('detectable_content:postscript')['postscript_marker']} {word}"
    if "startend:end_checker" in wanted:
        text += f"\n{get('startend:end_checker')['end_phrase']}"
    if "detectable_format:json_format" in wanted:
        text = json.dumps(text if "startend:quotation" in wanted else {word: text}, ensure_ascii=False)
    elif "startend:quotation" in wanted:
        text = f'"{text}"'
    if "change_case:english_capital" in wanted:
        text = text.upper()
    return text.lower() if "change_case:english_lowercase" in wanted else text
