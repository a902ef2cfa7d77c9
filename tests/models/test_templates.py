"""Chat templates read from model files, without their tokenizers."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain import chat
from posttrain.errors import ModelError
from posttrain.models import tiny, tiny_vision
from posttrain.models.load import load_tokenizer
from posttrain.models.templates import ChatTemplate, read_template, set_variables
from posttrain.models.tiny import build_tokenizer
from posttrain.recipe.sections import Model

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_tiny_is_rendered_as_by_its_tokenizer() -> None:
    found, tokenizer = read_template({"path": "tiny"}, None), build_tokenizer()
    assert found is not None
    assert chat.render(found, TALK) == chat.render(tokenizer, TALK) == "<bos><|user|>q<|assistant|>a<eos>"
    assert chat.turn_end(found).text == chat.turn_end(tokenizer).text == "<eos>"


def of_directory(path: Path, **more: Any) -> None:
    (path / "config.json").write_text("{}")
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE, **more}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def of_gguf(path: Path, template: str = TEMPLATE) -> None:
    """Write a GGUF header: 0 tensors; values are texts, a list of texts, a list of numbers, and numbers."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    tokens = ["<unk>", "<s>", "</s>", "<|end|>", "q"]
    values = [
        (text("tokenizer.chat_template"), struct.pack("<I", 8) + text(template)),
        (text("tokenizer.ggml.tokens"), struct.pack("<IIQ", 9, 8, 5) + b"".join(map(text, tokens))),
        (text("tokenizer.ggml.token_type"), struct.pack("<IIQ5i", 9, 5, 5, 2, 3, 3, 3, 1)),
        (text("tokenizer.ggml.bos_token_id"), struct.pack("<II", 4, 1)),
        (text("tokenizer.ggml.eos_token_id"), struct.pack("<II", 4, 2)),
    ]
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(values)) + b"".join(k + v for k, v in values))


@pytest.mark.parametrize("added", ["config", "tokenizer"])
def test_directories_and_gguf_files(tmp_path: Path, added: str) -> None:
    token = {"content": "<|end|>", "special": True}
    if added == "config":
        of_directory(tmp_path, added_tokens_decoder={"7": token, "8": {"content": "q", "special": False}})
    else:
        of_directory(tmp_path)
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [token]}))
    of_gguf(tmp_path / "m.gguf")
    for name in (str(tmp_path), str(tmp_path / "m.gguf")):
        found = read_template({"path": name}, None)
        assert found is not None
        assert chat.render(found, TALK) == "<s><|user|>q<|end|><|assistant|>a<|end|>"
        assert chat.turn_end(found).text == "<|end|>"
        assert found.eos_token_id >= 0


def test_template_from_the_recipe_or_a_file_next_to_the_configuration(tmp_path: Path) -> None:
    of_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "own.jinja").write_text("own")
    assert read_template({"path": str(tmp_path)}, None).chat_template == "file"  # type: ignore[union-attr]
    assert read_template({"path": str(tmp_path), "chat_template": "own.jinja"}, tmp_path).chat_template == "own"  # type: ignore[union-attr]


def test_unreadable_template_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_template({"path": str(tmp_path)}, None) is None  # no tokenizer_config.json
    assert read_template({"path": "nobody/no-such-model"}, None) is None
    (tmp_path / "own.jinja").write_text("{{ bos_token + messages[0].content }}")
    elsewhere = read_template({"path": "nobody/no-such-model", "chat_template": "own.jinja"}, tmp_path)
    assert elsewhere is not None and chat.render(elsewhere, TALK) == "<bos_token>q"
    (tmp_path / "m.gguf").write_bytes(b"something else")
    assert read_template({"path": str(tmp_path / "m.gguf")}, None) is None


def render_as_transformers(template: str, **given: Any) -> str:
    """Return what transformers renders, or the name and text of its error."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        return str(render_jinja_template([TALK], chat_template=template, **given)[0][0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        tiny.CHAT_TEMPLATE,
        tiny_vision.CHAT_TEMPLATE,
        "{% for m in messages %}\n  {% if loop.index0 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x }}{% endfor %}",
        "{{ {'a': 'é<', 'b': [1, none]} | tojson }} {{ tools | tojson(indent=2, sort_keys=true) }}",
        "{{ [1] | tojson(separators=(',', ':'), ensure_ascii=true) }} {{ tools is none }} {{ documents is none }}",
        "{{ raise_exception('no system message') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ missing.name }}",
        "{{ strftime_now('%Y') }} {{ add_generation_prompt }}",
        "{% endfor %}",
    ],
)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
def test_templates_are_rendered_as_by_transformers(template: str, tools: Any) -> None:
    """The same text or the same error, with tokens by their names."""
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    for prompt in (False, True):
        try:
            found = ChatTemplate(template, named).apply_chat_template(
                TALK, tools=tools, add_generation_prompt=prompt, tokenize=False
            )
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        assert found == render_as_transformers(template, tools=tools, add_generation_prompt=prompt, **named)


def test_reading_templates_does_not_import_torch_or_transformers() -> None:
    code = (
        "import sys; from posttrain import chat; from posttrain.models.templates import read_template; "
        "template = read_template({'path': 'tiny'}, None); "
        "print(chat.render(template, [{'role': 'user', 'content': 'q'}]), {'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["<bos><|user|>q", "set()"]


THINKS = (
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize("blank", ["", "\n", "  \n ", " "])
def test_variables_are_defaults_of_the_template(blank: str) -> None:
    """Callers of the saved template may give others; the text is otherwise the same, blanks at its start too."""
    template, tokenizer = blank + THINKS, build_tokenizer()

    def render(text: str, **variables: Any) -> str:
        tokenizer.chat_template = text
        ours = ChatTemplate(text, {}).apply_chat_template(
            TALK[:1], tokenize=False, add_generation_prompt=True, **variables
        )
        theirs = tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True, **variables)
        assert ours == theirs
        return ours

    silent = set_variables(template, {"enable_thinking": False})
    assert render(silent) == render(template, enable_thinking=False) != render(template)
    assert render(silent, enable_thinking=True) == render(template)
    assert render(set_variables(silent, {"enable_thinking": True})) == render(template)
    assert set_variables(template, {}) is template


@pytest.mark.parametrize(
    "value", [None, True, 2, -0.5, "a 'b' \"c\" {{ d }} \\n é", ["x", None, [1]], {"a b": {"c": False}}]
)
def test_variables_keep_their_values(value: Any) -> None:
    text = set_variables("{{ given | tojson }}", {"given": value})
    assert json.loads(ChatTemplate(text, {}).apply_chat_template([], tokenize=False)) == value


def test_variables_that_no_template_reads_are_refused() -> None:
    with pytest.raises(ModelError, match=r"does not read enable_thinkin\n.*it reads enable_thinking"):
        set_variables(THINKS, {"enable_thinkin": False})
    with pytest.raises(ModelError, match="it reads no variables"):
        set_variables(None, {"enable_thinking": False})
    with pytest.raises(ModelError, match="error in line 2"):
        set_variables("a\n{% if %}", {"a": 1})
    found = set_variables({"default": "{{ a }}", "tool_use": "{{ b }}"}, {"b": 1})
    assert found["default"] == "{{ a }}" and found["tool_use"].endswith("\n{{ b }}")


def test_variables_reach_the_tokenizer_and_the_saved_model(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(THINKS)
    keys = {"path": "tiny", "chat_template": "own.jinja", "chat_template_kwargs": {"enable_thinking": False}}
    tokenizer = load_tokenizer(Model.model_validate(keys), tmp_path)
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "llama"}')
    expected = "<|user|>q<|assistant|><think>\n\n</think>\n\n"
    found = (tokenizer, read_template(keys, tmp_path), load_tokenizer(Model(path=str(tmp_path / "saved")), tmp_path))
    assert [chat.render(one, TALK[:1], generation_prompt=True) for one in found] == [expected] * 3
