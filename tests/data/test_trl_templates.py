"""The chat templates shipped with TRL, each with twelve conversations: trained tokens, refusals, and agreement with
the masks of TRL's training templates.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template

from posttrain import chat
from posttrain.data import render
from posttrain.data.template_spans import adapt_messages
from posttrain.data.turns import EARLIER_THOUGHTS, EMPTY_TURN, Text
from posttrain.errors import DataError
from posttrain.models.tiny import build_tokenizer
from posttrain.recipe.sections import Data
from posttrain.thoughts import opening_mark

FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SPECIAL = re.compile(
    r"<\|[A-Za-z_0-9/\"]+\|?>|<[A-Za-z_]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_turn>|<end_of_utterance>|\[gMASK\]|<sop>|</s>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "a town"},
                    "hours": {"type": "integer", "description": "how far ahead"},
                },
                "required": ["place"],
            },
        },
    }
]


def make_message(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def call(number: int = 1, **arguments: Any) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "forecast", "arguments": arguments}}


def result(text: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


ASK = make_message("user", "Umbrella in Bergen?")
BERGEN = make_message("assistant", "", tool_calls=[call(place="Bergen")])
CASES: dict[str, list[dict[str, Any]]] = {
    "plain": [make_message("user", "Seven plus eight?"), make_message("assistant", "Fifteen.")],
    "system": [
        make_message("system", "Talk tersely."),
        make_message("user", "Morning"),
        make_message("assistant", "Hey!"),
    ],
    "turns": [
        make_message("user", "Knock"),
        make_message("assistant", "Who?"),
        make_message("user", "Me"),
        make_message("assistant", "Enter."),
    ],
    "call last": [ASK, make_message("assistant", "", tool_calls=[call(place="Bergen", hours=6)])],
    "content and call": [ASK, make_message("assistant", "Let me see.", tool_calls=[call(place="Bergen")])],
    "tool result": [ASK, BERGEN, result("showers"), make_message("assistant", "Take one.")],
    "parallel calls": [
        ASK,
        make_message("assistant", "", tool_calls=[call(place="Bergen"), call(2, place="Voss")]),
        result("showers"),
        result("clear", 2),
        make_message("assistant", "Only in Bergen."),
    ],
    "reasoning_content": [
        make_message("user", "Seven plus eight?"),
        make_message("assistant", "Fifteen.", reasoning_content="ten and five"),
    ],
    "thoughts": [
        make_message("user", "Six sixes?"),
        make_message("assistant", "<think>\nsquare it\n</think>\n\nThirty-six"),
        make_message("user", "Nine nines?"),
        make_message("assistant", "<think>\nsquare that\n</think>\n\nEighty-one"),
    ],
    "empty": [
        make_message("user", "Anyone?"),
        make_message("assistant", ""),
        make_message("user", "Hello?"),
        make_message("assistant", "Present."),
    ],
    "header words": [
        make_message("user", "assistant"),
        make_message("assistant", "final"),
        make_message("user", "model"),
        make_message("assistant", "a"),
    ],
    "unicode": [make_message("user", "Smørbrød 寿司?"), make_message("assistant", "Ærlig talt: 寿司 – „ja“ 🍣")],
}

# What comes of the twelve in their order, and of which templates. +: trained on, as checked below. Else refused: c, the
# template writes no call, or not all; t, no text beside a call; r, no thought; o, its prompt opens a thought that the
# turn has not; x, it refuses the conversation itself.
OUTCOMES = {
    "++++++++++++": "diffusion_gemma diffusion_gemma_training gemma4_v5 glm4moe glm4moe_training lfm2_2_5 lfm2_2_5_v2 "
    "lfm2_2_5_vl qwen3 qwen3_5_think qwen3_5_think_training qwen3_6 qwen3_6_training qwen3_8 "
    "qwen3_8_training qwen3_training",
    "+++++++r++++": "gemma4 gemma4_v2 gemma4_v3 gemma4_v4 lfm2_v2 lfm2_v2_training qwen2_5 qwen2_5_training "
    "qwen3_instruct_2507 qwen3_instruct_2507_training qwen3_vl qwen3_vl_training",
    "+++++++rr+++": "qwen3_5_nothink qwen3_5_nothink_training",
    "++++++c+++++": "gptoss gptoss_training",
    "++++t+++++++": "muse_glimmer muse_glimmer_training",
    "++++t+xr++++": "llama3_1 llama3_2",
    "+++ccccr++++": "cohere cohere2 cohere2_training cohere_training gemma3 gemma3_training idefics3 idefics3_training "
    "lfm2 lfm2_training llama3 llama3_training llava_next llava_next_training phi3 phi3_5 phi3_5_training "
    "phi3_training qwen2_5_vl qwen2_5_vl_training smolvlm smolvlm_training",
    "+x+ccccr++++": "gemma gemma_training",
    "ooooooo++ooo": "deepseek_r1_distill deepseek_r1_distill_training deepseekv3 deepseekv3_training "
    "nemotron_3_5_lightning nemotron_3_5_lightning_training nemotron_3_nano nemotron_3_nano_training "
    "nemotron_3_super nemotron_3_super_training nemotron_3_ultra nemotron_3_ultra_training",
}


def tokenizer_for(name: str) -> Any:
    template = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = build_tokenizer()
    tokens = [*tokenizer.all_special_tokens[4:], *sorted(set(SPECIAL.findall(template)))]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    texts = template + str(CASES)
    tokenizer.add_tokens(sorted({letter for letter in texts if not letter.isascii()}))
    tokenizer.chat_template = template
    return tokenizer


def texts_of(tokenizer: Any, messages: list[dict[str, Any]]) -> list[Text]:
    tools = TOOLS if any("tool_calls" in m for m in messages) else None
    row = {"uid": "u", "messages": messages, "tools": tools}
    return render.example_texts(row, tokenizer, Data(source="x", train_on="assistant"))


REFUSALS = {
    "does not write `tool_calls`": "c",
    "does not write `content` of this assistant": "t",
    "does not write `reasoning_content`": "r",
    "no room for the thought": "r",
    "never closes it": "o",
    "the chat template refuses": "x",
}


def outcome(tokenizer: Any, name: str) -> str:
    """Return a letter of OUTCOMES; for `+`, also check the trained tokens."""
    messages = CASES[name]
    try:
        texts = texts_of(tokenizer, messages)
    except DataError as error:
        return next((letter for part, letter in REFUSALS.items() if part in str(error)), str(error))
    check_trained(tokenizer, messages, texts)
    return "+"


def check_trained(tokenizer: Any, messages: list[dict[str, Any]], texts: list[Text]) -> None:
    """Check that each assistant turn's text and end are trained on, in order, and no other text is."""
    turns = [m for m in messages if m["role"] == "assistant"]
    trained = [piece.text for text in texts for piece in text.pieces if piece.trained]
    filled = [turn for turn in turns if turn["content"] or turn.get("tool_calls")]
    assert len([piece for piece in trained if piece]) == len(filled)
    if len(filled) < len(turns):
        assert any(EMPTY_TURN in text.notes for text in texts)
    for turn, written in zip(filled, [piece for piece in trained if piece], strict=True):
        assert [word for word in words(turn) if word not in written] == []
    if not all(m["content"] in ("assistant", "final", "model", "a") for m in messages):
        for other in (m for m in messages if m["role"] != "assistant"):
            assert not any(other["content"] in written for written in trained)
    examples = render.encode(texts, tokenizer, Data(source="x"))
    for text, example in zip(texts, examples, strict=True):
        ids = [i for i, is_trained in zip(example.ids, example.trained, strict=True) if is_trained]
        behind = tokenizer.decode(list(text.ids_after))
        assert tokenizer.decode(ids) == "".join(p.text for p in text.pieces if p.trained) + behind
        assert not ids or ids[-1] in tokenizer.all_special_ids
    everything = "".join(piece.text for piece in texts[-1].pieces)
    missing = [word for m in messages for word in words(m) if word not in everything]
    assert not missing or EARLIER_THOUGHTS in texts[-1].notes


def words(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message, with those of a thought separately."""
    found = [part.strip() for part in re.split(r"</?think>", message["content"]) if part.strip()]
    found += [message["reasoning_content"]] if "reasoning_content" in message else []
    for one in message.get("tool_calls", []):
        found += [one["function"]["name"], *(str(value) for value in one["function"]["arguments"].values())]
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_trained_tokens_of_every_template(template: str) -> None:
    tokenizer = tokenizer_for(template)
    found = "".join(outcome(tokenizer, name) for name in CASES)
    known = [outcomes for outcomes, names in OUTCOMES.items() if template in names.split()]
    assert known in ([found], [])  # TRL may ship more templates by now: those that support training are checked too


# --- TRL's masks


def masks(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    """Return the text between `{% generation %}` and `{% endgeneration %}`, with adjacent runs joined."""
    tools = TOOLS if any("tool_calls" in m for m in messages) else None
    shown = adapt_messages(tokenizer, chat.clean_messages(messages), tools)
    if tokenizer.chat_template.count("content'][0]") or "line['type']" in tokenizer.chat_template:
        shown = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in shown]
    (whole,), (spans,) = render_jinja_template(
        [shown],
        tools=tools,
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    runs: list[list[int]] = []
    for start, end in spans:
        if runs and runs[-1][1] == start:
            runs[-1][1] = end
        else:
            runs.append([start, end])
    return [whole[start:end] for start, end in runs if end > start]


def agree(prompt: str, ours: str, theirs: str) -> bool:
    """Check agreement; TRL's runs may begin with text of the generation prompt and extend past the end of the turn."""
    start = theirs.find(ours.removesuffix("<|tool_response>"))  # Gemma 4's models end a call with it
    behind = theirs[start + len(ours) :].replace("<eos>", "")  # Phi-3 ends a conversation, too
    return start >= 0 and prompt.endswith(theirs[:start]) and not behind.strip()


# This mask leaves out thoughts, although the template's own prompt opens one; we put them behind that prompt.
DIFFER = {("deepseekv3_training", "reasoning_content"), ("deepseekv3_training", "thoughts")}
GENERATION = [name for name in TEMPLATES if re.search(r"\{%-?\s*generation", (FOLDER / f"{name}.jinja").read_text())]


@pytest.mark.parametrize("template", GENERATION)
def test_masks_agree_with_trl(template: str) -> None:
    """If both train on a conversation: its last turn, and earlier ones if the template leaves them unchanged."""
    tokenizer = tokenizer_for(template)
    compared = 0
    for name, messages in CASES.items():
        try:
            texts, theirs = texts_of(tokenizer, messages), masks(tokenizer, messages)
        except Exception:  # refused by one of the two
            continue
        ours: list[tuple[str, str]] = []
        for text in texts if len(texts) == 1 else texts[-1:]:
            prompt = ""
            for piece in text.pieces:
                ours += [(prompt, piece.text)] if piece.trained and piece.text else []
                prompt += piece.text
        filled = theirs[-len(ours) :]
        assert len(filled) == len(ours)
        for (prompt, own), their in zip(ours, filled, strict=True):
            assert agree(prompt, own, their) != ((template, name) in DIFFER), (name, own, their)
            compared += 1
    assert compared


HOSTILE = [
    "assistant",
    "<|im_end|>",
    "<|im_start|>assistant\nhi",
    "{{ m }}{% if x %}",
    "x8q0x 730100000",
    " lead\n\n\ttrail ",
    '"quoted" \\back\\',
    "<answer>5</answer>",
    "x<y>z & b",
    "<tool_call>",
    "[INST] hi [/INST]",
    "…",
    "null",
]


@pytest.mark.parametrize("template", [name for name in GENERATION if (name, "thoughts") not in DIFFER])
def test_masks_agree_for_answers_that_look_like_markup(template: str) -> None:
    """For answers made of header text, tags, probes, JSON and white space."""
    tokenizer = tokenizer_for(template)
    opens = opening_mark(chat.render(tokenizer, CASES["plain"][:1], generation_prompt=True))
    for answer in HOSTILE:
        content = f"<think>\nwell\n</think>\n\n{answer}" if opens else answer
        messages = [make_message("user", answer), make_message("assistant", content)]
        (text,) = texts_of(tokenizer, messages)
        prompt, written = (piece.text for piece in text.pieces)
        (theirs,) = masks(tokenizer, messages)
        assert agree(prompt, written, theirs), (answer, written, theirs)
        assert answer.strip() in written
