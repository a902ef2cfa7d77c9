r"""Does the answer follow the verifiable instructions of its prompt? IFEval (2311.07911), RLVR of Tülu 3 (2411.15124).

rewards:
  - use: instructions.follow      # reads `instruction_id_list` and `kwargs` (google/IFEval) or `ground_truth` (Tülu 3)
    params: {mode: share}         # the share of instructions met; the default is all or nothing

These instructions say nothing about what an answer is worth: beside this reward belongs one that judges the content.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.verify.instruction_rows import (
    Instruction,
    answer_after_thought,
    met_instructions,
    only_repeats,
    read_instructions,
)
from posttrain.verify.instruction_writer import write_answer, write_near_miss


def follow(
    completion: str,
    instruction_id_list: Sequence[str] | str | None = None,
    kwargs: Sequence[Mapping[str, Any] | None] | str | None = None,
    ground_truth: Mapping[str, Any] | str | None = None,
    messages: Sequence[Mapping[str, Any]] = (),
    truncated: bool = False,
    prefilled_think: bool = False,
    *,
    mode: Literal["all", "share"] = "all",
    loose: bool = False,
) -> dict[str, float] | None:
    """1 if every instruction is met, else 0 (mode share: the share of met instructions); None without instructions.

    Checked is the text after the thought, without `<answer>` tags around it. It meets nothing if it is blank, was cut
    at the length limit, or only repeats the request (the last message, or what `combination:repeat_prompt` asks to
    repeat). loose: also without `*`, and without its first or last line, as in the paper. Logged parts: all, share.
    An unknown instruction and an argument that is missing are errors of the row.
    """
    if mode not in ("all", "share"):
        raise ValueError(f"unknown mode {mode!r}; known: all, share")
    instructions = read_instructions(instruction_id_list, kwargs, ground_truth)
    if not instructions:
        return None
    text = "" if truncated else answer_after_thought(completion, prefilled_think)
    if any(only_repeats(text, request) for request in _requests(messages, instructions)):
        text = ""
    met = met_instructions(instructions, text, loose=loose)
    parts = {"all": float(all(met)), "share": sum(met) / len(met)}
    return {"reward": parts[mode], **parts}


def _requests(messages: Sequence[Mapping[str, Any]], instructions: Sequence[Instruction]) -> list[str]:
    asked = [message.get("content") for message in messages if message.get("role") == "user"][-1:]
    asked += [instruction.arguments.get("prompt_to_repeat") for instruction in instructions]
    return [text for text in asked if isinstance(text, str)]


def _read(row: Mapping[str, Any]) -> list[Instruction]:
    return read_instructions(row.get("instruction_id_list"), row.get("kwargs"), row.get("ground_truth"))


def ROW_PROBLEM(row: Mapping[str, Any]) -> str:
    """Why the instructions of a row cannot be checked, or ''."""
    if "instruction_id_list" not in row and "ground_truth" not in row:
        return "no column `instruction_id_list` (with `kwargs`) or `ground_truth`"
    try:
        _read(row)
    except ValueError as error:
        return str(error)
    return ""


def GOLD(row: Mapping[str, Any]) -> str | None:
    """A text that follows the instructions; None where unrelated texts follow them too (`no commas`)."""
    instructions = _read(row)
    if not instructions or all(met_instructions(instructions, "x")):
        return None
    return write_answer(instructions)


def NEAR_MISS(row: Mapping[str, Any]) -> str:
    """A text that follows all instructions except one."""
    return write_near_miss(_read(row)) or "x"


_BULLETS = {"instruction_id_list": ["detectable_format:number_bullet_lists"], "kwargs": [{"num_bullets": 2}]}
_TWO = {
    "instruction_id_list": ["startend:end_checker", "punctuation:no_comma"],
    "kwargs": [{"end_phrase": "That is all.", "num_bullets": None}, {}],
}
_REPEAT = {"instruction_id_list": ["combination:repeat_prompt"], "kwargs": [{"prompt_to_repeat": "Name a city."}]}
_TULU = {"ground_truth": '{"func_name": "validate_word_constraint", "N": 3, "quantifier": "at most", "word": null}'}

EXAMPLES = [
    ("* one\n* two", _BULLETS, 1.0),
    ("<think>* a\n* b\n* c</think>\n* one\n* two", _BULLETS, 1.0),
    ("<think>* one\n* two", _BULLETS, 0.0),
    ("* one\n* two", {**_BULLETS, "truncated": True}, 0.0),
    ("* one\n* two", {**_BULLETS, "prefilled_think": True}, 0.0),
    ("* one\n* two\n* three", _BULLETS, 0.0),
    ("* one\n* two\n* three", _BULLETS, 1.0, {"loose": True}),
    ("", _BULLETS, 0.0),
    ("Well, yes. That is all.", _TWO, {"reward": 0.0, "all": 0.0, "share": 0.5}),
    ("Well, yes. That is all.", _TWO, 0.5, {"mode": "share"}),
    ("Yes. That is all.", _TWO, 1.0),
    ("<answer>Yes. That is all.</answer>", _TWO, 1.0),
    ("Name a city. Oslo", _REPEAT, 1.0),
    ("Name a city.", _REPEAT, 0.0),
    ("Name a city. Name a city!", _REPEAT, 0.0),
    ("Oslo and Rome", _TULU, 1.0),
    ("Oslo and then Rome", _TULU, 0.0),
    ("Oslo", {"instruction_id_list": None}, None),
]

ROWS = [
    {"prompt": "Name a city without commas and end with: That is all.", **_TWO},
    {
        "prompt": "Answer without commas in double quotation marks.",
        "instruction_id_list": ["startend:quotation", "punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, None, {"relation": "less than", "num_words": 9}],
    },
    {"prompt": "Answer in capitals.", "ground_truth": '{"func_name": "validate_uppercase", "N": null}'},
    {
        "prompt": "Answer as JSON.",
        "instruction_id_list": ["detectable_format:json_format", "keywords:existence"],
        "kwargs": [{}, {"keywords": ["Oslo", "Rome"]}],
    },
]
