"""Chat templates in Ollama's template language: translated if the translation is exact, refused otherwise."""

from __future__ import annotations

import re
from typing import Any

import pytest

from posttrain import chat
from posttrain.export import ollama

from .conftest import CHATML, byte_level

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}<<SYS>>{{ m.content }}<</SYS>>{% endif %}{% endfor %}"
)


def of(template: str) -> Any:
    made = byte_level(template=template)
    made.add_special_tokens({"bos_token": "<|endoftext|>"})
    return made


def as_go_would(template: str, messages: list[dict[str, str]]) -> str:
    """A reader of Go's template language, as far as translations use it: if, else if, else, range, Content."""
    tokens = re.split(r"(\{\{.*?\}\})", template)
    parsed, rest = _block(tokens)
    assert rest == []
    return _run(parsed, messages, None)


def _block(tokens: list[str]) -> tuple[list[Any], list[str]]:
    made: list[Any] = []
    while tokens:
        token, tokens = tokens[0], tokens[1:]
        if not token.startswith("{{"):
            made.append(token)
            continue
        word = token[2:-2].strip()
        if word == "end" or word.startswith("else"):
            return made, [token, *tokens]
        if word == ".Content":
            made.append(("content",))
            continue
        assert word.startswith(("if ", "range "))
        branches = []
        while True:
            inside, tokens = _block(tokens)
            branches.append((word, inside))
            word, tokens = tokens[0][2:-2].strip(), tokens[1:]
            if word == "end":
                break
            word = word.removeprefix("else ").strip()
        made.append(("branches", branches))
    return made, []


def _run(parsed: list[Any], messages: list[dict[str, str]], message: dict[str, str] | None) -> str:
    out = ""
    for part in parsed:
        if isinstance(part, str):
            out += part
        elif part[0] == "content":
            assert message is not None
            out += message["content"]
        elif part[1][0][0] == "range .Messages":
            out += "".join(_run(part[1][0][1], messages, one) for one in messages)
        else:
            for word, inside in part[1]:
                if _holds(word, messages, message):
                    out += _run(inside, messages, message)
                    break
    return out


def _holds(word: str, messages: list[dict[str, str]], message: dict[str, str] | None) -> bool:
    if word == "if .Messages":
        return bool(messages)
    if word == 'if ne (index .Messages 0).Role "system"':
        return messages[0]["role"] != "system"
    role = re.fullmatch(r'if eq \.Role "(\w+)"', word)
    assert role and message is not None, word
    return message["role"] == role[1]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, INST], ids=["chatml", "llama3", "inst"])
def test_translation_renders_the_same_text_as_the_template(template: str) -> None:
    tokenizer = of(template)
    turns, why = ollama.translate(tokenizer, add_bos=False)
    assert turns is not None and why == ""
    talks = ollama.build_conversations()
    assert len(talks) == 30
    for talk in talks:
        assert as_go_would(turns.to_go_template(), talk) == chat.render(tokenizer, talk, generation_prompt=True)


def test_turns_are_split_after_their_end_token() -> None:
    turns, _ = ollama.translate(of(CHATML), add_bos=False)
    assert turns is not None
    assert (turns.before_user, turns.after_user) == ("<|im_start|>user\n", "<|im_end|>\n")
    assert (turns.before_assistant, turns.after_assistant) == ("<|im_start|>assistant\n", "<|im_end|>\n")
    assert turns.opening == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_bos_is_left_to_ollama_if_the_file_adds_it() -> None:
    turns, _ = ollama.translate(of(LLAMA3), add_bos=True)
    assert turns is not None and turns.opening == "" and not turns.before_system.startswith("<|endoftext|>")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("", "no chat template"),
        (CHATML.replace("m.content", "m.content | trim"), "changes what stands in a message"),
        (
            CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"),
            "changes what stands in a message",
        ),
        (CHATML.replace("{{ m.role }}", "{{ m.role }}{{ loop.index }}"), "does not write turns one after the other"),
        (CHATML.replace("Be brief.", "Write {{ '{{x}}' }}."), "braces or quotes"),
        ("{{ raise_exception('no system') if messages[0].role == 'system' }}" + LLAMA3, "refuses a conversation"),
    ],
)
def test_inexact_translation_is_refused(template: str, why: str) -> None:
    turns, said = ollama.translate(of(template), add_bos=False)
    assert turns is None and why in said


def test_modelfile() -> None:
    turns, _ = ollama.translate(of(CHATML), add_bos=False)
    text = ollama.build_modelfile("m.gguf", turns, "", ["<|im_end|>", 'a"b'], CHATML)
    assert text.startswith('FROM ./m.gguf\n\nTEMPLATE """{{ if .Messages }}')
    assert text.endswith('PARAMETER stop "<|im_end|>"\nPARAMETER stop "a\\"b"\n')
    assert "# Tools" not in text
    untold = ollama.build_modelfile("m.gguf", None, "it trims", ["<|im_end|>"], CHATML + "{{ tools }}")
    assert 'TEMPLATE """' not in untold and "not translated, because it trims" in untold and "# Tools" in untold
